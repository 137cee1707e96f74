"""Counter-based uniforms in one launch, bit-identical to `dgemma.diffusion.draws.uniform` (Philox-4x32-10)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma.diffusion.draws import purpose_word


def uniform(seeds: Tensor, block: Tensor, step: Tensor, num_positions: int, purpose: str) -> Tensor:
    """Draw uniforms in [0, 1) with 53 bits. seeds, block, step: (B,) int64 → (B, num_positions) float64.

    Example: `uniform(state.seeds, state.block, state.step, 256, "token")`.
    """
    assert all(numbers.dtype == torch.int64 and numbers.is_contiguous() for numbers in (seeds, block, step))
    out = torch.empty(seeds.shape[0], num_positions, dtype=torch.float64, device=seeds.device)
    word = purpose_word(purpose)
    _uniform_kernel[(seeds.shape[0],)](
        seeds,
        block,
        step,
        out,
        num_positions,
        word - (1 << 32) * (word >> 31),  # as int32
        POSITIONS=triton.next_power_of_2(num_positions),
    )
    return out


@triton.jit(do_not_specialize=["word"])  # one compilation for all purposes
def _uniform_kernel(
    seed_ptr: tl.tensor,
    block_ptr: tl.tensor,
    step_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_positions: tl.tensor,
    word: tl.tensor,
    POSITIONS: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    position = tl.arange(0, POSITIONS)
    zero = position * 0
    step = zero + tl.load(step_ptr + row).to(tl.int32)
    block = zero + tl.load(block_ptr + row).to(tl.int32)
    high, low, _, _ = tl.philox(tl.load(seed_ptr + row), position, step, block, zero + word)
    bits = ((high >> 5).to(tl.int64) << 26) | (low >> 6).to(tl.int64)
    out = bits.to(tl.float64) * 1.1102230246251565e-16  # 2**-53
    tl.store(out_ptr + row * num_positions + position, out, mask=position < num_positions)
