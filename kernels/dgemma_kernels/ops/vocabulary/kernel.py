"""The vocabulary pass: statistics of (R, V) logits for a sampler, without a float32 copy of them.

One sweep reads the logits, caps them and divides by the temperature. Per row and chunk of the vocabulary it writes a
maximum m, z = Σ e^(l - m) and s = Σ (l - m) e^(l - m). Chunks merge with Δ = m - M: z = Σ z e^Δ, s = Σ (s + Δ z) e^Δ,
entropy = log z - s/z. The best token lies in the chunk with the largest maximum; the second best lies there too, or is
the maximum of another chunk. A sample lies in the chunk that its uniform selects. So each of these rereads one chunk
and adds no work to the sweep. Reference: `reference.py`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma_kernels.formats.float8 import Quantized

CHUNK = 4096


class Bias(NamedTuple):
    """A value (R, K) float32 for the tokens of each class, and the class of each token (V,) int32."""

    values: Tensor
    token_class: Tensor


class VocabularyStatistics(NamedTuple):
    """Statistics of R rows, float32 (argmax int64), and the chunk sums for `sample` and `soft_probabilities`."""

    entropy: Tensor  # (R,) nats
    argmax: Tensor  # (R,) lowest id on ties
    confidence: Tensor  # (R,) probability of the argmax
    margin: Tensor  # (R,) confidence minus the probability of the second best token
    log_normalizer: Tensor  # (R,)
    best: Tensor  # (R,) largest processed logit
    soft_normalizer: Tensor  # (R,) Σ e^(l - best) over logits rounded to their dtype
    chunk_best: Tensor  # (R, chunks)
    chunk_sum: Tensor  # (R, chunks) relative to chunk_best


def pack_allowed(allowed: Tensor) -> Tensor:
    """Pack a boolean mask over the vocabulary into 32 tokens per word: (A, V) bool → (A, ceil(V / 32)) int32.

    Example: `pack_allowed(torch.ones(1, 64, dtype=torch.bool))` is `[[-1, -1]]`.
    """
    if allowed.dim() != 2 or allowed.dtype != torch.bool:
        raise ValueError(f"pack_allowed allowed must be (A, V) bool, got {tuple(allowed.shape)} {allowed.dtype}.")
    bits = torch.nn.functional.pad(allowed, (0, -allowed.shape[1] % 32)).unflatten(1, (-1, 32))
    words = (bits.long() << torch.arange(32, device=allowed.device)).sum(-1)
    return words.to(torch.int32)  # the top bit wraps to the sign


def vocabulary_statistics(
    logits: Tensor,
    temperature: Tensor,
    *,
    softcap: float | None = 30.0,
    allowed: Tensor | None = None,
    bias: Bias | None = None,
) -> VocabularyStatistics:
    """Compute statistics of softmax(cap(logits) / temperature) over the allowed tokens.

    logits: (R, V) contiguous, from the head's product. temperature: (B,) float32 with B dividing R, one for each R / B
    consecutive rows. softcap c caps to c·tanh(x / c). allowed: (A, ceil(V / 32)) int32 from `pack_allowed`, with A
    dividing R and at least one token per row. bias: added to the processed logits, one value per row and class.

    Example: `vocabulary_statistics(logits, torch.tensor([0.8], device="cuda")).entropy`.
    """
    num_rows, vocab_size = _check("vocabulary_statistics", logits, temperature, allowed)
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    chunks = torch.empty((4, num_rows, num_chunks), dtype=torch.float32, device=logits.device)
    rows = torch.empty((6, num_rows), dtype=torch.float32, device=logits.device)
    argmax = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    shaping = _shaping(logits, temperature, softcap, allowed, bias)
    _sweep_kernel[(num_chunks, num_rows)](
        logits, temperature, allowed, *_pointers(bias), *chunks, vocab_size, CHUNK=CHUNK, num_warps=4, **shaping
    )
    _merge_kernel[(num_rows,)](
        logits,
        temperature,
        allowed,
        *_pointers(bias),
        *chunks,
        *rows,
        argmax,
        vocab_size,
        num_chunks,
        CHUNK=CHUNK,
        CHUNKS=triton.next_power_of_2(num_chunks),
        num_warps=4,
        **shaping,
    )
    entropy, confidence, margin, log_normalizer, best, soft_normalizer = rows
    return VocabularyStatistics(
        entropy, argmax, confidence, margin, log_normalizer, best, soft_normalizer, chunks[0], chunks[1]
    )


def sample(
    logits: Tensor,
    statistics: VocabularyStatistics,
    u: Tensor,
    temperature: Tensor,
    *,
    softcap: float | None = 30.0,
    allowed: Tensor | None = None,
    bias: Bias | None = None,
) -> Tensor:
    """Sample by inverse CDF in vocabulary order, one uniform per row: u (R,) float64 in [0, 1) → tokens (R,) int64.

    The other arguments must be those that `statistics` was computed from.

    Example: `sample(logits, statistics, state.uniform("token").flatten(), temperature)`.
    """
    num_rows, vocab_size = _check("sample", logits, temperature, allowed)
    if u.shape != (num_rows,) or u.dtype != torch.float64 or not u.is_contiguous():
        raise ValueError(f"sample u must be contiguous ({num_rows},) float64, got {tuple(u.shape)} {u.dtype}.")
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    num_chunks = statistics.chunk_best.shape[1]
    _sample_kernel[(num_rows,)](
        logits,
        temperature,
        allowed,
        *_pointers(bias),
        statistics.chunk_best,
        statistics.chunk_sum,
        u,
        tokens,
        vocab_size,
        num_chunks,
        CHUNK=CHUNK,
        CHUNKS=triton.next_power_of_2(num_chunks),
        num_warps=8,
        **_shaping(logits, temperature, softcap, allowed, bias),
    )
    return tokens


def soft_probabilities(
    logits: Tensor,
    statistics: VocabularyStatistics,
    temperature: Tensor,
    *,
    softcap: float | None = 30.0,
    allowed: Tensor | None = None,
    bias: Bias | None = None,
    float8: bool = False,
) -> Tensor | Quantized:
    """Return the self-conditioning distribution (R, V) in the logits' dtype, for the product with the embedding.

    As in the published model, the processed logits are rounded to their dtype before a float32 softmax. With `float8`
    the probabilities are rounded to float8, with one scale per row.

    Example: `soft = soft_probabilities(logits, statistics, temperature) @ embedding * hidden_size**0.5`.
    """
    num_rows, vocab_size = _check("soft_probabilities", logits, temperature, allowed)
    out = torch.empty_like(logits, dtype=torch.float8_e4m3fn if float8 else None)
    scale = torch.empty(num_rows, dtype=torch.float32, device=logits.device) if float8 else None
    _soft_probabilities_kernel[(triton.cdiv(vocab_size, CHUNK), num_rows)](
        logits,
        temperature,
        allowed,
        *_pointers(bias),
        statistics.best,
        statistics.soft_normalizer,
        out,
        scale,
        vocab_size,
        CHUNK=CHUNK,
        num_warps=2,
        **_shaping(logits, temperature, softcap, allowed, bias),
    )
    return out if scale is None else Quantized(values=out, scale=scale, dtype=logits.dtype)


@triton.jit
def processed(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    allowed_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    class_ptr: tl.tensor,
    row: tl.tensor,
    token: tl.tensor,
    vocab_size: tl.tensor,
    softcap: tl.tensor,
    rows_per_temperature: tl.tensor,
    rows_per_mask: tl.tensor,
    num_bias: tl.tensor,
    HAS_CAP: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RAGGED: tl.constexpr,
) -> tl.tensor:
    """Load one row's logits at `token`: capped, divided by the temperature, biased, float32; -inf if forbidden."""
    at = logits_ptr + row * vocab_size + token
    if RAGGED:
        x = tl.load(at, mask=token < vocab_size, other=0.0).to(tl.float32)
    else:
        x = tl.load(at).to(tl.float32)
    t = tl.load(temperature_ptr + row // rows_per_temperature)
    if HAS_CAP:
        # c·tanh(x / c) = c - 2c / (e^(2x / c) + 1). 1 / y as rsqrt(y)² is one special-function instruction. The
        # temperature divides the constants instead of every logit.
        cap = tl.math.div_rn(softcap, t)
        root = tl.rsqrt(tl.exp2(x * (2.8853900817779268 / softcap)) + 1.0)
        x = cap - (2.0 * cap * root) * root
    else:
        # x / t correctly rounded without a division: one Newton step on x · (1 / t) (Markstein, 1990).
        inverse = tl.math.div_rn(1.0, t)
        quotient = x * inverse
        x = tl.fma(tl.fma(-quotient, t, x), inverse, quotient)
    if HAS_BIAS:
        if RAGGED:
            group = tl.load(class_ptr + token, mask=token < vocab_size, other=0)
        else:
            group = tl.load(class_ptr + token)
        x += tl.load(bias_ptr + row * num_bias + group)
    if HAS_MASK:
        words = allowed_ptr + row // rows_per_mask * tl.cdiv(vocab_size, 32)
        if RAGGED:
            word = tl.load(words + token // 32, mask=token < vocab_size, other=0)
        else:
            word = tl.load(words + token // 32)
        x = tl.where((word >> (token % 32)) & 1 == 1, x, float("-inf"))
    elif RAGGED:
        x = tl.where(token < vocab_size, x, float("-inf"))
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
def _add(
    a0: tl.tensor, a1: tl.tensor, a2: tl.tensor, b0: tl.tensor, b1: tl.tensor, b2: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _sweep_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    allowed_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    class_ptr: tl.tensor,
    chunk_best_ptr: tl.tensor,
    chunk_sum_ptr: tl.tensor,
    chunk_slope_ptr: tl.tensor,
    chunk_soft_ptr: tl.tensor,
    vocab_size: tl.tensor,
    softcap: tl.tensor,
    rows_per_temperature: tl.tensor,
    rows_per_mask: tl.tensor,
    num_bias: tl.tensor,
    CHUNK: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RAGGED: tl.constexpr,
) -> None:
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = processed(
        logits_ptr,
        temperature_ptr,
        allowed_ptr,
        bias_ptr,
        class_ptr,
        row,
        token,
        vocab_size,
        softcap,
        rows_per_temperature,
        rows_per_mask,
        num_bias,
        HAS_CAP,
        HAS_MASK,
        HAS_BIAS,
        RAGGED,
    )
    dtype = logits_ptr.dtype.element_ty
    best = tl.max(x, 0)
    shift = best
    if HAS_MASK or HAS_BIAS:  # a chunk without an allowed token
        shift = tl.where(best == float("-inf"), 0.0, best)
    soft_shift = _rounded(shift, dtype)
    # Rounding moves a bfloat16 logit below 128 by d, at most 1/4. A cubic gives e^d with an error of 3e-5 instead of a
    # fourth special function. Each branch below computes delta and weight itself, so that only x stays in registers.
    CUBIC: tl.constexpr = HAS_CAP and not HAS_BIAS
    if CUBIC and tl.math.div_rn(softcap, tl.load(temperature_ptr + row // rows_per_temperature)) <= 128.0:
        delta = x - shift
        moved = _rounded(x, dtype) - x
        if HAS_MASK or HAS_BIAS or RAGGED:
            outside = delta == float("-inf")
            delta, moved = tl.where(outside, 0.0, delta), tl.where(outside, 0.0, moved)
        weight = tl.exp2((x - shift) * 1.4426950408889634)
        factor = 1.0 + moved * (1.0000535 + moved * (0.5021531 + moved * 0.16588574))
        total, slope, soft = tl.reduce((weight, weight * delta, weight * factor), 0, _add)
        soft *= tl.exp(shift - soft_shift)
    else:
        delta = x - shift
        if HAS_MASK or HAS_BIAS or RAGGED:
            delta = tl.where(delta == float("-inf"), 0.0, delta)
        weight = tl.exp2((x - shift) * 1.4426950408889634)
        soft_weight = tl.exp2((_rounded(x, dtype) - soft_shift) * 1.4426950408889634)
        total, slope, soft = tl.reduce((weight, weight * delta, soft_weight), 0, _add)
    at = row * tl.num_programs(0) + chunk
    tl.store(chunk_best_ptr + at, best)
    tl.store(chunk_sum_ptr + at, total)
    tl.store(chunk_slope_ptr + at, slope)
    tl.store(chunk_soft_ptr + at, soft)


@triton.jit
def _merge_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    allowed_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    class_ptr: tl.tensor,
    chunk_best_ptr: tl.tensor,
    chunk_sum_ptr: tl.tensor,
    chunk_slope_ptr: tl.tensor,
    chunk_soft_ptr: tl.tensor,
    entropy_ptr: tl.tensor,
    confidence_ptr: tl.tensor,
    margin_ptr: tl.tensor,
    log_normalizer_ptr: tl.tensor,
    best_ptr: tl.tensor,
    soft_normalizer_ptr: tl.tensor,
    argmax_ptr: tl.tensor,
    vocab_size: tl.tensor,
    num_chunks: tl.tensor,
    softcap: tl.tensor,
    rows_per_temperature: tl.tensor,
    rows_per_mask: tl.tensor,
    num_bias: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RAGGED: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    valid = chunk < num_chunks
    at = row * num_chunks + chunk
    chunk_best = tl.load(chunk_best_ptr + at, mask=valid, other=float("-inf"))
    chunk_sum = tl.load(chunk_sum_ptr + at, mask=valid, other=0.0)
    chunk_slope = tl.load(chunk_slope_ptr + at, mask=valid, other=0.0)
    chunk_soft = tl.load(chunk_soft_ptr + at, mask=valid, other=0.0)

    best = tl.max(chunk_best, 0)
    delta = tl.where(chunk_best == float("-inf"), 0.0, chunk_best - best)  # such chunks have zero sums
    decay = tl.exp(delta)
    normalizer = tl.sum(chunk_sum * decay, 0)
    slope = tl.sum((chunk_slope + delta * chunk_sum) * decay, 0)
    dtype = logits_ptr.dtype.element_ty
    soft_delta = _rounded(chunk_best, dtype) - _rounded(best, dtype)
    soft_normalizer = tl.sum(chunk_soft * tl.exp(tl.where(chunk_best == float("-inf"), 0.0, soft_delta)), 0)

    winner = tl.min(tl.where(chunk_best == best, chunk, CHUNKS), 0)
    token = winner * CHUNK + tl.arange(0, CHUNK)
    x = processed(
        logits_ptr,
        temperature_ptr,
        allowed_ptr,
        bias_ptr,
        class_ptr,
        row,
        token,
        vocab_size,
        softcap,
        rows_per_temperature,
        rows_per_mask,
        num_bias,
        HAS_CAP,
        HAS_MASK,
        HAS_BIAS,
        RAGGED,
    )
    argmax = tl.min(tl.where(x == tl.max(x, 0), token, 2147483647), 0)
    second = tl.maximum(
        tl.max(tl.where(token == argmax, float("-inf"), x), 0),
        tl.max(tl.where(chunk == winner, float("-inf"), chunk_best), 0),
    )
    tl.store(entropy_ptr + row, tl.log(normalizer) - slope / normalizer)
    tl.store(confidence_ptr + row, 1.0 / normalizer)
    tl.store(margin_ptr + row, (1.0 - tl.exp(second - best)) / normalizer)
    tl.store(log_normalizer_ptr + row, best + tl.log(normalizer))
    tl.store(best_ptr + row, best)
    tl.store(soft_normalizer_ptr + row, soft_normalizer)
    tl.store(argmax_ptr + row, argmax.to(tl.int64))


@triton.jit
def _sample_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    allowed_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    class_ptr: tl.tensor,
    chunk_best_ptr: tl.tensor,
    chunk_sum_ptr: tl.tensor,
    u_ptr: tl.tensor,
    token_ptr: tl.tensor,
    vocab_size: tl.tensor,
    num_chunks: tl.tensor,
    softcap: tl.tensor,
    rows_per_temperature: tl.tensor,
    rows_per_mask: tl.tensor,
    num_bias: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RAGGED: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    at = row * num_chunks + chunk
    chunk_best = tl.load(chunk_best_ptr + at, mask=chunk < num_chunks, other=float("-inf"))
    chunk_sum = tl.load(chunk_sum_ptr + at, mask=chunk < num_chunks, other=0.0)
    best = tl.max(chunk_best, 0)
    width = chunk_sum.to(tl.float64) * tl.exp(chunk_best - best).to(tl.float64)
    target = tl.load(u_ptr + row) * tl.sum(width, 0)
    # The first chunk whose cumulative sum exceeds the target; if rounding leaves none, the last with a positive sum.
    above = tl.min(tl.where(tl.cumsum(width, 0) > target, chunk, CHUNKS), 0)
    picked = tl.minimum(above, tl.max(tl.where(width > 0.0, chunk, 0), 0))
    target -= tl.sum(tl.where(chunk < picked, width, 0.0), 0)

    index = tl.arange(0, CHUNK)
    x = processed(
        logits_ptr,
        temperature_ptr,
        allowed_ptr,
        bias_ptr,
        class_ptr,
        row,
        picked * CHUNK + index,
        vocab_size,
        softcap,
        rows_per_temperature,
        rows_per_mask,
        num_bias,
        HAS_CAP,
        HAS_MASK,
        HAS_BIAS,
        RAGGED,
    )
    weight = tl.exp(x - best).to(tl.float64)
    above = tl.min(tl.where(tl.cumsum(weight, 0) > target, index, CHUNK), 0)
    inside = tl.minimum(above, tl.max(tl.where(weight > 0.0, index, 0), 0))
    tl.store(token_ptr + row, (picked * CHUNK + inside).to(tl.int64))


@triton.jit
def _soft_probabilities_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    allowed_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    class_ptr: tl.tensor,
    best_ptr: tl.tensor,
    soft_normalizer_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    vocab_size: tl.tensor,
    softcap: tl.tensor,
    rows_per_temperature: tl.tensor,
    rows_per_mask: tl.tensor,
    num_bias: tl.tensor,
    CHUNK: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RAGGED: tl.constexpr,
) -> None:
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    x = processed(
        logits_ptr,
        temperature_ptr,
        allowed_ptr,
        bias_ptr,
        class_ptr,
        row,
        token,
        vocab_size,
        softcap,
        rows_per_temperature,
        rows_per_mask,
        num_bias,
        HAS_CAP,
        HAS_MASK,
        HAS_BIAS,
        RAGGED,
    )
    dtype = logits_ptr.dtype.element_ty
    best = _rounded(tl.load(best_ptr + row), dtype)
    normalizer = tl.load(soft_normalizer_ptr + row)
    if scale_ptr is not None:  # the largest probability becomes the largest float8
        tl.store(scale_ptr + row, 1.0 / (448.0 * normalizer))
        normalizer = 1.0 / 448.0
    shift = best * 1.4426950408889634 + tl.log2(normalizer)
    probability = tl.exp2(_rounded(x, dtype) * 1.4426950408889634 - shift).to(out_ptr.dtype.element_ty)
    if RAGGED:
        tl.store(out_ptr + row * vocab_size + token, probability, mask=token < vocab_size)
    else:
        tl.store(out_ptr + row * vocab_size + token, probability)


def arguments(
    logits: Tensor, temperature: Tensor, softcap: float | None, allowed: Tensor | None, bias: Bias | None
) -> tuple[tuple[Tensor | None, ...], dict[str, float | int | bool]]:
    """Return the arguments that another kernel needs to call `processed`: pointers after the logits, and settings."""
    return (temperature, allowed, *_pointers(bias)), _shaping(logits, temperature, softcap, allowed, bias)


def _pointers(bias: Bias | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if bias is None else (bias.values, bias.token_class)


def _shaping(
    logits: Tensor, temperature: Tensor, softcap: float | None, allowed: Tensor | None, bias: Bias | None
) -> dict[str, float | int | bool]:
    num_rows, vocab_size = logits.shape
    return {
        "softcap": softcap or 1.0,
        "rows_per_temperature": num_rows // temperature.shape[0],
        "rows_per_mask": num_rows // allowed.shape[0] if allowed is not None else 1,
        "num_bias": bias.values.shape[1] if bias is not None else 1,
        "HAS_CAP": softcap is not None,
        "HAS_MASK": allowed is not None,
        "HAS_BIAS": bias is not None,
        "RAGGED": vocab_size % CHUNK != 0,
    }


def _check(owner: str, logits: Tensor, temperature: Tensor, allowed: Tensor | None) -> tuple[int, int]:
    if logits.dim() != 2 or not logits.is_contiguous():
        raise ValueError(
            f"{owner} logits must be contiguous (R, V), got {tuple(logits.shape)}. Flatten the canvas first."
        )
    if logits.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"{owner} logits must be bfloat16, float16 or float32, got {logits.dtype}.")
    num_rows, vocab_size = logits.shape
    if temperature.dim() != 1 or temperature.dtype != torch.float32 or num_rows % temperature.shape[0]:
        raise ValueError(
            f"{owner} temperature must be (B,) float32 with B dividing the {num_rows} rows, got "
            f"{tuple(temperature.shape)} {temperature.dtype}."
        )
    if allowed is not None and (
        allowed.dim() != 2
        or allowed.dtype != torch.int32
        or allowed.shape[1] != triton.cdiv(vocab_size, 32)
        or num_rows % allowed.shape[0]
        or not allowed.is_contiguous()
    ):
        raise ValueError(
            f"{owner} allowed must be contiguous int32 (A, {triton.cdiv(vocab_size, 32)}) with A dividing the "
            f"{num_rows} rows, got {tuple(allowed.shape)} {allowed.dtype}. Use pack_allowed."
        )
    return num_rows, vocab_size
