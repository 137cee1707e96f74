"""The vocabulary pass: statistics of (R, V) logits for a sampler, without a float32 copy of them.

One sweep reads the logits, caps them and divides by the temperature. Per row and chunk of the vocabulary it writes a
maximum m, z = Σ e^(l - m) and s = Σ (l - m) e^(l - m). Let M be the largest m of a row, and Δ = m - M. Then chunks
merge as Z = Σ z e^Δ and S = Σ (s + Δ z) e^Δ. The entropy is log Z - S/Z. The best token lies in the chunk with the
largest maximum; the second best lies there too, or is the maximum of another chunk. A sample lies in the chunk that its
uniform selects. So each of these rereads one chunk and adds no work to the sweep. The sweep is bound by its special
functions, three per logit. Reference: `reference.py`.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096


class Bias(NamedTuple):
    """A value (R, K) float32 for the tokens of each class, and the class of each token (V,) int32."""

    values: Tensor
    token_class: Tensor


class Shaping(NamedTuple):
    """The distribution softmax(cap(logits) / temperature + bias) over the allowed tokens, for logits (R, V)."""

    temperature: Tensor  # (B,) float32 with B dividing R, one for each R / B consecutive rows
    softcap: float | None = 30.0  # c caps to c·tanh(x / c)
    allowed: Tensor | None = (
        None  # (A, ceil(V / 32)) int32 of `pack_allowed`, with A dividing R; a token or more per row
    )
    bias: Bias | None = None
    floor: Tensor | None = None  # (R,), of `kth_largest` or `nucleus_floor`: smaller logits are forbidden


class VocabularyStatistics(NamedTuple):
    """Statistics of R rows, float32 (argmax int64), and the chunk sums for `sample` and `soft_probabilities`."""

    entropy: Tensor  # (R,) nats
    argmax: Tensor  # (R,) lowest id on ties
    confidence: Tensor  # (R,) probability of the argmax
    margin: Tensor  # (R,) confidence minus the probability of the second best token
    log_normalizer: Tensor  # (R,)
    best: Tensor  # (R,) largest processed logit
    chunk_best: Tensor  # (R, chunks)
    chunk_sum: Tensor  # (R, chunks) relative to chunk_best


class LogitShaping(NamedTuple):
    """The shaping of logits (R, V) by `processed`, as one argument of a kernel. Fields that are None cost nothing."""

    temperature: Any  # (B,) float32
    allowed: Any  # (A, ceil(V / 32)) int32 or None
    bias: Any  # (R, K) float32 or None, and the class of each token, (V,) int32
    token_class: Any
    floor: Any  # (R,) or None
    softcap: Any  # float or None
    rows_per_temperature: Any  # R / B
    rows_per_mask: Any  # R / A
    num_classes: Any  # K
    RAGGED: Any  # constexpr: a token may lie beyond the vocabulary


class SoftProbabilities(NamedTuple):
    """Probabilities of R rows: weights (R, V), in the logits' dtype or float8, times scale (R,) float32."""

    weights: Tensor
    scale: Tensor


def pack_allowed(allowed: Tensor) -> Tensor:
    """Pack a boolean mask over the vocabulary into 32 tokens per word: (A, V) bool → (A, ceil(V / 32)) int32.

    Example: `pack_allowed(torch.ones(1, 64, dtype=torch.bool))` is `[[-1, -1]]`.
    """
    bits = torch.nn.functional.pad(allowed, (0, -allowed.shape[1] % 32)).unflatten(1, (-1, 32))
    words = (bits.long() << torch.arange(32, device=allowed.device)).sum(-1)
    return words.to(torch.int32)  # the top bit wraps to the sign


def kth_largest(logits: Tensor, k: int) -> Tensor:
    """Return the k-th largest logit of each row, the smallest one if there are fewer: (R, V) → (R,).

    The k largest logits lie in the k chunks with the largest maxima, so the vocabulary is read once.

    Example: `Shaping(temperature, floor=kth_largest(logits, 64))` keeps the 64 most likely tokens.
    """
    chunk_len = 64
    missing = -logits.shape[1] % chunk_len
    padded = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits  # padding copies
    chunks = padded.unflatten(1, (-1, chunk_len))
    best = chunks.amax(-1).topk(min(k, chunks.shape[1]), dim=-1).indices
    near = chunks.gather(1, best[..., None].expand(-1, -1, chunk_len)).flatten(1)
    return near.topk(min(k, logits.shape[1]), dim=-1).values[:, -1].clone()  # begins at a multiple of 16 bytes


def nucleus_floor(logits: Tensor, shaping: Shaping, p: float) -> Tensor:
    """Return the largest logit of each row such that it and larger ones have the probability `p`, (R, V) → (R,).

    A bisection over the bits of a float: as integers of the same order, they are found one by one, with a sweep each.

    Example: `shaping._replace(floor=nucleus_floor(logits, shaping, 0.9))`.
    """
    size, integer = (16, torch.int16) if logits.element_size() == 2 else (32, torch.int32)

    def reorder(bits: Tensor) -> Tensor:
        return bits ^ ((bits >> (size - 1)) & torch.iinfo(integer).max)

    def as_floor(key: Tensor) -> Tensor:
        floor = reorder(key.to(integer)).view(logits.dtype)
        return floor if shaping.floor is None else torch.maximum(floor, shaping.floor)

    whole = vocabulary_statistics(logits, shaping)
    token = whole.argmax.clamp(max=logits.shape[1] - 1)  # NaN logits have no best token
    best = reorder(logits.gather(1, token[:, None])[:, 0].view(integer)).long()
    key = torch.full_like(best, torch.iinfo(integer).min)
    for bit in reversed(range(size)):
        higher = key + (1 << bit)
        found = vocabulary_statistics(logits, shaping._replace(floor=as_floor(higher)))
        is_enough = (found.log_normalizer - whole.log_normalizer).exp() >= p
        key = torch.where(is_enough & (higher <= best), higher, key)
    return as_floor(key)


def vocabulary_statistics(logits: Tensor, shaping: Shaping) -> VocabularyStatistics:
    """Compute statistics of the shaped logits (R, V), which are contiguous.

    Example: `vocabulary_statistics(logits, Shaping(torch.tensor([0.8], device="cuda"))).entropy`.
    """
    operands = shape_logits(logits, shaping)
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    chunk_best, chunk_sum, chunk_slope = torch.empty((3, num_rows, num_chunks), device=logits.device)
    argmax = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    aligned = torch.empty((5, triton.cdiv(num_rows, 4) * 4), device=logits.device)  # one compilation for all rows
    entropy, confidence, margin, log_normalizer, best = aligned[:, :num_rows]
    statistics = VocabularyStatistics(entropy, argmax, confidence, margin, log_normalizer, best, chunk_best, chunk_sum)
    _sweep_kernel[(num_chunks, num_rows)](
        logits, operands, chunk_best, chunk_sum, chunk_slope, vocab_size, CHUNK=CHUNK, num_warps=2
    )
    _merge_kernel[(num_rows,)](
        logits,
        operands,
        statistics,
        chunk_slope,
        vocab_size,
        num_chunks,
        CHUNK=CHUNK,
        CHUNKS=triton.next_power_of_2(num_chunks),
        num_warps=4,
    )
    return statistics


def sample(logits: Tensor, statistics: VocabularyStatistics, u: Tensor, shaping: Shaping) -> Tensor:
    """Sample by inverse CDF in vocabulary order, one uniform per row: u (R,) float64 in [0, 1) → tokens (R,) int64.

    The other arguments must be those that `statistics` was computed from.

    Example: `sample(logits, statistics, state.uniform("token").flatten(), shaping)`.
    """
    num_rows, vocab_size = logits.shape
    assert u.shape == (num_rows,)
    assert u.dtype == torch.float64
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    num_chunks = statistics.chunk_best.shape[1]
    _sample_kernel[(num_rows,)](
        logits,
        shape_logits(logits, shaping),
        statistics,
        u,
        tokens,
        vocab_size,
        num_chunks,
        CHUNK=CHUNK,
        CHUNKS=triton.next_power_of_2(num_chunks),
        num_warps=8,
    )
    return tokens


def soft_probabilities(
    logits: Tensor, statistics: VocabularyStatistics, shaping: Shaping, *, float8: bool = False
) -> SoftProbabilities:
    """Return the self-conditioning distribution (R, V), for the product with the embedding.

    As in the published model, the processed logits are rounded to their dtype before a float32 softmax. Weights are not
    divided by their sum, which is known only at the end; `scale` is its inverse. The largest weight is 1, or 448 with
    `float8`.

    Example: `weights, scale = soft_probabilities(logits, statistics, shaping)`.
    """
    operands = shape_logits(logits, shaping)
    num_rows, vocab_size = logits.shape
    weights = torch.empty_like(logits, dtype=torch.float8_e4m3fn if float8 else None)
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    chunk_sum = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits.device)
    scale = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    _soft_probabilities_kernel[(num_chunks, num_rows)](
        logits, operands, statistics.best, weights, chunk_sum, vocab_size, CHUNK=CHUNK, FLOAT8=float8, num_warps=2
    )
    _soft_scale_kernel[(num_rows,)](
        chunk_sum, scale, num_chunks, CHUNKS=triton.next_power_of_2(num_chunks), num_warps=1
    )
    return SoftProbabilities(weights, scale)


@triton.jit
def _below_cap(x: tl.tensor, softcap: tl.tensor, cap: tl.tensor) -> tl.tensor:
    """Return cap - cap·tanh(x / softcap), where `cap` is the softcap over the temperature.

    It is 2·cap / (e^(2x / softcap) + 1). 1 / y as rsqrt(y)² is one special-function instruction. The temperature
    divides the constants instead of every logit.
    """
    half = 0.5 / cap
    root = tl.rsqrt(tl.fma(tl.exp2(x * (2.8853900817779268 / softcap)), half, half))
    # Not root * root, which may be fused with a later sum, so that equal logits would round differently.
    return tl.fma(root, root, 0.0)


@triton.jit
def processed(
    logits_ptr: tl.tensor, row: tl.tensor, token: tl.tensor, vocab_size: tl.tensor, shaping: LogitShaping
) -> tl.tensor:
    """Load one row's logits at `token`: capped, divided by the temperature, biased, float32; -inf if forbidden."""
    # Logits are loaded after the division: it has a branch, across which they would occupy registers.
    t = tl.load(shaping.temperature + row // shaping.rows_per_temperature)
    if shaping.softcap is not None:
        cap = tl.math.div_rn(shaping.softcap, t)
        x = _load_allowed(logits_ptr, row, token, vocab_size, shaping)
        capped = cap - _below_cap(x, shaping.softcap, cap)
        if shaping.allowed is not None or shaping.floor is not None or shaping.RAGGED:
            capped = tl.where(x == float("-inf"), x, capped)
        x = capped
    else:
        # x / t correctly rounded without a division: one Newton step on x · (1 / t) (Markstein, 1990).
        inverse = tl.math.div_rn(1.0, t)
        x = _load_allowed(logits_ptr, row, token, vocab_size, shaping)
        quotient = x * inverse
        divided = tl.fma(tl.fma(-quotient, t, x), inverse, quotient)
        if shaping.allowed is not None or shaping.floor is not None or shaping.RAGGED:
            divided = tl.where(x == float("-inf"), x, divided)
        x = divided
    if shaping.bias is not None:
        if shaping.RAGGED:
            group = tl.load(shaping.token_class + token, mask=token < vocab_size, other=0)
        else:
            group = tl.load(shaping.token_class + token)
        x += tl.load(shaping.bias + row.to(tl.int64) * shaping.num_classes + group)
    return x


@triton.jit
def _load_allowed(
    logits_ptr: tl.tensor, row: tl.tensor, token: tl.tensor, vocab_size: tl.tensor, shaping: LogitShaping
) -> tl.tensor:
    """Load one row's logits at `token` in float32; -inf if forbidden or beyond the vocabulary."""
    at = logits_ptr + row.to(tl.int64) * vocab_size + token
    if shaping.RAGGED:
        x = tl.load(at, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    else:
        x = tl.load(at).to(tl.float32)
    if shaping.allowed is not None:
        words = shaping.allowed + (row // shaping.rows_per_mask).to(tl.int64) * tl.cdiv(vocab_size, 32)
        if shaping.RAGGED:
            word = tl.load(words + token // 32, mask=token < vocab_size, other=0)
        else:
            word = tl.load(words + token // 32)
        x = tl.where((word >> (token % 32)) & 1 == 1, x, float("-inf"))
    if shaping.floor is not None:
        x = tl.where(x < tl.load(shaping.floor + row).to(tl.float32), float("-inf"), x)  # NaN stays, to be noticed
    return x


@triton.jit
def _rounded(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Round float32 to `dtype` and back.

    For bfloat16 this is two integer instructions, with ties away from zero. The conversion instruction would share a
    slow unit with the exponentials.
    """
    if dtype == tl.bfloat16:
        return ((x.to(tl.int32, bitcast=True) + 0x8000) & -0x10000).to(tl.float32, bitcast=True)
    return x.to(dtype).to(tl.float32)


@triton.jit
def _add(a0: tl.tensor, a1: tl.tensor, b0: tl.tensor, b1: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    return a0 + b0, a1 + b1


@triton.jit
def _sweep_kernel(
    logits_ptr: tl.tensor,
    shaping: LogitShaping,
    chunk_best_ptr: tl.tensor,
    chunk_sum_ptr: tl.tensor,
    chunk_slope_ptr: tl.tensor,
    vocab_size: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    if shaping.softcap is not None and shaping.bias is None:
        # The largest logit has the largest processed logit. So `best` is known before any special function, and
        # differences to it need no processed logits in registers.
        cap = tl.math.div_rn(shaping.softcap, tl.load(shaping.temperature + row // shaping.rows_per_temperature))
        x = _load_allowed(logits_ptr, row, token, vocab_size, shaping)
        largest = tl.max(x, 0)
        least_gap = _below_cap(largest, shaping.softcap, cap)
        delta = least_gap - _below_cap(x, shaping.softcap, cap)
        best = tl.where(largest == float("-inf"), float("-inf"), cap - least_gap)
    else:
        x = processed(logits_ptr, row, token, vocab_size, shaping)
        best = tl.max(x, 0)
        delta = x - best
    weight = tl.exp2(delta * 1.4426950408889634)
    if shaping.allowed is not None or shaping.floor is not None or shaping.bias is not None or shaping.RAGGED:
        # A chunk without an allowed token has a `best` of -inf.
        outside = x == float("-inf")
        weight, delta = tl.where(outside, 0.0, weight), tl.where(outside, 0.0, delta)
    total, slope = tl.reduce((weight, weight * delta), 0, _add)
    at = row.to(tl.int64) * tl.num_programs(0) + chunk
    tl.store(chunk_best_ptr + at, best)
    tl.store(chunk_sum_ptr + at, total)
    tl.store(chunk_slope_ptr + at, slope)


@triton.jit
def _merge_kernel(
    logits_ptr: tl.tensor,
    shaping: LogitShaping,
    statistics: VocabularyStatistics,
    chunk_slope_ptr: tl.tensor,
    vocab_size: tl.tensor,
    num_chunks: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    valid = chunk < num_chunks
    at = row * num_chunks + chunk
    chunk_best = tl.load(statistics.chunk_best + at, mask=valid, other=float("-inf"))
    chunk_sum = tl.load(statistics.chunk_sum + at, mask=valid, other=0.0)
    chunk_slope = tl.load(chunk_slope_ptr + at, mask=valid, other=0.0)

    best = tl.max(chunk_best, 0)
    delta = tl.where(chunk_best == float("-inf"), 0.0, chunk_best - best)  # such chunks have zero sums
    decay = tl.exp(delta)
    normalizer = tl.sum(chunk_sum * decay, 0)
    slope = tl.sum((chunk_slope + delta * chunk_sum) * decay, 0)

    winner = tl.min(tl.where(chunk_best == best, chunk, CHUNKS), 0)
    token = winner * CHUNK + tl.arange(0, CHUNK)
    x = processed(logits_ptr, row, token, vocab_size, shaping)
    argmax = tl.min(tl.where(x == tl.max(x, 0), token, 2147483647), 0)
    second = tl.maximum(
        tl.max(tl.where(token == argmax, float("-inf"), x), 0),
        tl.max(tl.where(chunk == winner, float("-inf"), chunk_best), 0),
    )
    tl.store(statistics.entropy + row, tl.log(normalizer) - slope / normalizer)
    tl.store(statistics.confidence + row, 1.0 / normalizer)
    tl.store(statistics.margin + row, (1.0 - tl.exp(second - best)) / normalizer)
    tl.store(statistics.log_normalizer + row, best + tl.log(normalizer))
    tl.store(statistics.best + row, best)
    tl.store(statistics.argmax + row, argmax.to(tl.int64))


@triton.jit
def _sample_kernel(
    logits_ptr: tl.tensor,
    shaping: LogitShaping,
    statistics: VocabularyStatistics,
    u_ptr: tl.tensor,
    token_ptr: tl.tensor,
    vocab_size: tl.tensor,
    num_chunks: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    at = row * num_chunks + chunk
    chunk_best = tl.load(statistics.chunk_best + at, mask=chunk < num_chunks, other=float("-inf"))
    chunk_sum = tl.load(statistics.chunk_sum + at, mask=chunk < num_chunks, other=0.0)
    best = tl.max(chunk_best, 0)
    width = chunk_sum.to(tl.float64) * tl.exp(chunk_best - best).to(tl.float64)
    target = tl.load(u_ptr + row) * tl.sum(width, 0)
    # The first chunk whose cumulative sum exceeds the target; if rounding leaves none, the last with a positive sum.
    above = tl.min(tl.where(tl.cumsum(width, 0) > target, chunk, CHUNKS), 0)
    picked = tl.minimum(above, tl.max(tl.where(width > 0.0, chunk, 0), 0))
    target -= tl.sum(tl.where(chunk < picked, width, 0.0), 0)

    index = tl.arange(0, CHUNK)
    x = processed(logits_ptr, row, picked * CHUNK + index, vocab_size, shaping)
    weight = tl.exp(x - best).to(tl.float64)
    above = tl.min(tl.where(tl.cumsum(weight, 0) > target, index, CHUNK), 0)
    inside = tl.minimum(above, tl.max(tl.where(weight > 0.0, index, 0), 0))
    tl.store(token_ptr + row, (picked * CHUNK + inside).to(tl.int64))


@triton.jit
def _soft_probabilities_kernel(
    logits_ptr: tl.tensor,
    shaping: LogitShaping,
    best_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    chunk_sum_ptr: tl.tensor,
    vocab_size: tl.tensor,
    CHUNK: tl.constexpr,
    FLOAT8: tl.constexpr,
) -> None:
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    dtype = logits_ptr.dtype.element_ty
    shift = _rounded(tl.load(best_ptr + row), dtype) * 1.4426950408889634
    if FLOAT8:
        shift -= 8.807354922057604  # log2 of 448, the largest float8
    x = processed(logits_ptr, row, token, vocab_size, shaping)
    weight = tl.exp2(_rounded(x, dtype) * 1.4426950408889634 - shift)
    target = weight_ptr + row.to(tl.int64) * vocab_size + token
    if shaping.RAGGED:
        tl.store(target, weight.to(weight_ptr.dtype.element_ty), mask=token < vocab_size)
    else:
        tl.store(target, weight.to(weight_ptr.dtype.element_ty))
    tl.store(chunk_sum_ptr + row.to(tl.int64) * tl.num_programs(0) + chunk, tl.sum(weight, 0))


@triton.jit
def _soft_scale_kernel(
    chunk_sum_ptr: tl.tensor, scale_ptr: tl.tensor, num_chunks: tl.tensor, CHUNKS: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    total = tl.sum(tl.load(chunk_sum_ptr + row * num_chunks + chunk, mask=chunk < num_chunks, other=0.0), 0)
    tl.store(scale_ptr + row, 1.0 / total)


def shape_logits(logits: Tensor, shaping: Shaping) -> LogitShaping:
    """Return the shaping of logits (R, V) as one argument of a kernel."""
    num_rows, vocab_size = logits.shape
    temperature, softcap, allowed, bias, floor = shaping
    assert logits.is_contiguous()
    assert num_rows % temperature.shape[0] == 0
    assert allowed is None or num_rows % allowed.shape[0] == 0
    return LogitShaping(
        temperature=temperature,
        allowed=allowed,
        bias=None if bias is None else bias.values,
        token_class=None if bias is None else bias.token_class,
        floor=floor,
        softcap=softcap,
        rows_per_temperature=num_rows // temperature.shape[0],
        rows_per_mask=1 if allowed is None else num_rows // allowed.shape[0],
        num_classes=1 if bias is None else bias.values.shape[1],
        RAGGED=tl.constexpr(vocab_size % CHUNK != 0),
    )
