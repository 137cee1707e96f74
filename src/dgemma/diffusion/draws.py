"""Counter-based randomness: every draw is a function of (seed, block, step, position, purpose).

Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) in plain tensor code: the same bits
on CPU, on GPU and in a Triton kernel (`tl.philox(seed, position, step, block, purpose)`), for any batch. Nothing here
uses a global generator.
"""

import torch
from torch import Tensor

_LOW_32 = 0xFFFFFFFF
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_NUM_ROUNDS = 10
_SMALLEST_UNIFORM = 2.0**-54  # half of the smallest uniform above 0; keeps Gumbel noise finite


def _crc_of_byte(word: int) -> int:
    for _ in range(8):
        word = (word >> 1) ^ (0xEDB88320 if word & 1 else 0)
    return word


_CRC_TABLE = tuple(map(_crc_of_byte, range(256)))


def philox(key: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit words from a 64-bit key and a 128-bit counter; all int64 tensors that broadcast together.

    Example: `philox(torch.tensor(0), *[torch.tensor(0)] * 4)[0]` is `0x6627E8D5`, the published test vector.
    """
    k0, k1 = key, key >> 32
    for _ in range(_NUM_ROUNDS):
        # int64 products wrap modulo 2**64, so both halves are exact. Only the factors c0 and c2 must have zeros above
        # their 32 bits.
        product_a, product_b = c0 * _ROUND_A, c2 * _ROUND_B
        c0, c1 = ((product_b >> 32) ^ c1 ^ k0) & _LOW_32, product_b
        c2, c3 = ((product_a >> 32) ^ c3 ^ k1) & _LOW_32, product_a
        k0, k1 = k0 + _KEY_A, k1 + _KEY_B
    return c0, c1 & _LOW_32, c2, c3 & _LOW_32


def purpose_word(purpose: str) -> int:
    """The counter word of a purpose: its CRC-32, so that every string is a separate stream on every machine.

    It is plain Python, because torch.compile cannot trace `zlib`.
    """
    word = _LOW_32
    for byte in purpose.encode():
        word = (word >> 8) ^ _CRC_TABLE[(word ^ byte) & 0xFF]
    return word ^ _LOW_32


def uniform(seeds: Tensor, block: Tensor, step: Tensor, num_positions: int, purpose: str) -> Tensor:
    """Draw uniforms in [0, 1) with 53 bits. seeds, block, step: (B,) integers → (B, num_positions) float64.

    They are float64 because 24-bit uniforms would round the probability of a rare event, such as 1e-7.

    Example: `uniform(torch.tensor([7]), torch.tensor([0]), torch.tensor([3]), 256, "token")`.
    """
    position = torch.arange(num_positions, device=seeds.device)
    return uniform_at(seeds, block, step, position, torch.full_like(position, purpose_word(purpose)))


def uniform_at(seeds: Tensor, block: Tensor, step: Tensor, position: Tensor, word: Tensor) -> Tensor:
    """Draw uniforms (B, P) float64 for positions (P,). `word` (P,) holds the counter word of each position's purpose.

    Example: `draws.uniform_at(seeds, block, step, torch.arange(2), torch.full((2,), draws.purpose_word("token")))`.
    """
    high, low, _, _ = philox(
        seeds.long()[:, None],  # the products of the rounds overflow 32 bits
        position[None, :] & _LOW_32,  # otherwise Inductor folds the first product into a 32-bit index
        step[:, None] & _LOW_32,
        block[:, None] & _LOW_32,
        word[None, :],
    )
    return ((high >> 5 << 26) | (low >> 6)).double() * 2.0**-53


def integers(u: Tensor, upper: int | Tensor) -> Tensor:
    """Integers in [0, upper) from uniforms, (…) float64 → (…) int64; `upper` is one number, or one per uniform.

    Example: `integers(torch.tensor([0.0, 0.999], dtype=torch.float64), 5)` is `[0, 4]`.
    """
    return (u.double() * upper).long().clamp_(max=upper - 1)


def gumbel(u: Tensor) -> Tensor:
    """Standard Gumbel noise from uniforms, always finite: (…) float64 → (…) float64.

    Example: `(score + tau * gumbel(u)).argmax(-1)` is a draw from softmax(score / tau).
    """
    return -(-u.clamp(min=_SMALLEST_UNIFORM).log()).log()
