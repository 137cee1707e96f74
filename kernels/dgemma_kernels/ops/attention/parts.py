"""Code that all attention kernels use: the slots that a token sees, the split of keys into parts, the sum of the parts.

The number of parts depends on shapes alone; their bounds are computed from lengths on the device. So a growing prefix
never changes a launch, and a captured graph stays valid. Parts are added in a fixed order, so that the same inputs give
the same bits. Fixed parts also begin at fixed positions, so that a token's result does not depend on its batch.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from dgemma_kernels.blocks import wait_for_launches_before
from dgemma_kernels.formats.float8 import LARGEST
from dgemma_kernels.ops.configs import dependent_launch

_MAX_SPLITS = 128
_FEW_PARTS = 8
_ROWS = 4  # rows per program, one per warp, if there are few parts
_ONE_WARP = 16  # up to this many parts, one warp adds 32 columns and exchanges nothing with other warps
_COMBINE_ELEMENTS = 8192  # float32 values of partial results in the registers of a program that adds many parts


class Inputs(NamedTuple):
    """The operands of attention: queries (B, T, N, H), keys and values (B, K, capacity, H), (B,) each of length and
    position, and the spans of images (B, T, 2). `kernel.attention` describes them.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    length: Tensor
    position: Tensor
    spans: Tensor | None = None


class KeyMask(NamedTuple):
    """The slots that a token sees, as `kernel.attention` describes them. `window` 0 means none."""

    causal: bool = False
    window: int = 0
    canvas_len: int = 0
    keep: int = 0
    has_spans: bool = False


class Parts(NamedTuple):
    """The results of a kernel for each part of the keys: (splits, B, T, N, H) and (splits, B, T, N) float32.

    With one split `partial` is the whole result, and `log_weight` is not written. With `scale` (B·T,), `partial` is
    float8 in units of `float8_unit`, and that unit is written to `scale`.
    """

    partial: Tensor
    log_weight: Tensor
    scale: Tensor | None = None


@lru_cache(maxsize=4096)
def choose_num_splits(programs: int, num_multiprocessors: int, most: int) -> int:
    """Return the number of parts of the keys with the least cost.

    The cost is waves of programs times work per part, plus the work of adding the parts.

    Example: `choose_num_splits(64, 132, 20)` is 2; `choose_num_splits(128, 132, 20)` is 1.
    """

    def cost(splits: int) -> float:
        rounds = triton.cdiv(programs * splits, num_multiprocessors) / splits
        return rounds + 0.02 * splits * programs / num_multiprocessors

    return min(range(1, max(1, min(most, _MAX_SPLITS)) + 1), key=cost)


def count_fixed_parts(part: int, capacity: int, span: int | None) -> int:
    """Return the number of fixed parts for `capacity` slots.

    Part 0 has `part` positions, and every later part has as many as all parts before it. So for a prefix of any length
    they fill a GPU about as well as two equal parts would. With a window, where rows of a tile see `span` neighbouring
    positions, all parts have `part` positions, and a tile's parts are counted from the first that it sees.

    Example: `count_fixed_parts(640, 4096, None)` is 4: 640, 640, 1,280 and 2,560 positions.
    """
    if span is not None:
        return triton.cdiv(min(span, capacity) - 1, part) + 1
    return 1 + max(0, triton.cdiv(capacity, part) - 1).bit_length()


@triton.jit
def seen_slots(
    token: tl.tensor, num_tokens: tl.tensor, spans: tl.tensor, MASK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the first and the last slot that a token after the prefix sees, counted from the prefix's end.

    Neither decreases from a token to the next. So all tokens of a tile see what its first and its last token see.
    """
    CANVAS: tl.constexpr = MASK.canvas_len
    first = token - MASK.window + 1
    last = token
    if MASK.has_spans:
        span = spans + 2 * tl.minimum(token, num_tokens - 1)
        first = tl.minimum(first, tl.load(span))
        last = tl.load(span + 1)
    if CANVAS > 0:
        first = tl.where(token < num_tokens - CANVAS, first, num_tokens - CANVAS - MASK.keep)
        last = tl.where(token < num_tokens - CANVAS, last, num_tokens - 1)
    return first, last


@triton.jit
def part_of_keys(
    row_tile: tl.tensor,
    prefix_len: tl.tensor,
    origin: tl.tensor,  # position of slot 0
    num_tokens: tl.tensor,
    spans: tl.tensor,  # of this batch row
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    KEYS: tl.constexpr,
    MASK: tl.constexpr,
    SPLIT: tl.constexpr,
    PART: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the slots [begin, end) of this program: those its rows can see, split into parts of whole tiles.

    The parts are equal, or fixed as in `count_fixed_parts` if PART > 0. Tiles of fixed parts begin at multiples of KEYS
    positions. So `begin` may be negative by less than KEYS; no row sees those slots.
    """
    end = prefix_len + num_tokens
    begin = 0
    if MASK.causal:
        first_token = row_tile * ROWS // GROUP
        last_token = tl.minimum((row_tile * ROWS + ROWS - 1) // GROUP, num_tokens - 1)
        tile_first, _ = seen_slots(first_token, num_tokens, spans, MASK)
        _, tile_last = seen_slots(last_token, num_tokens, spans, MASK)
        end = prefix_len + tile_last + 1
        if MASK.window > 0:
            begin = tl.maximum(prefix_len + tile_first, 0)
            if PART == 0:
                begin = begin // KEYS * KEYS
    if PART > 0:
        number = tl.program_id(1)
        if MASK.window > 0:
            first = ((begin + origin) // PART + number) * PART
            following = first + PART
        else:
            following = PART << number
            first = tl.where(number == 0, 0, following // 2)
        begin = tl.maximum((begin + origin) // KEYS * KEYS, first) - origin
        end = tl.minimum(end, following - origin)
    elif SPLIT:
        part = tl.cdiv(tl.cdiv(end - begin, KEYS), tl.num_programs(1)) * KEYS
        begin += tl.program_id(1) * part
        end = tl.minimum(end, begin + part)
    return begin, end


def float8_unit(head_dim: int) -> float:
    """Return the scale of attention in float8: the least power of two for which float8 reaches the square root of H.

    Values of a head have a root mean square of at most 1, so no mean of them exceeds the square root of H. Float8 is a
    floating-point format: a smaller scale would not make typical values more precise.

    Example: `float8_unit(256)` is 1/16, because 16 / 448 is between 1/32 and 1/16.
    """
    return 2.0 ** math.ceil(math.log2(head_dim**0.5 / LARGEST))


def combine_parts(
    partial: Tensor, log_weight: Tensor, out: Tensor, scale: Tensor | None = None, *, in_order: bool = False
) -> None:
    """Write to `out` the mean of the parts of `partial`, weighted by 2^log_weight.

    partial: (splits, B, T, N, H), log_weight: (splits, B, T, N), out: (B, T, N, H). Values of a part with log-weight
    -inf are ignored; they may be NaN. With `in_order` parts are added one by one, so that empty parts change no bits.
    If `out` is float8, it is in units of `float8_unit`, which is written to scale (B·T,).

    Example: `combine_parts(partial, log_weight, out)`.
    """
    num_splits, num_heads, head_dim = partial.shape[0], out.shape[2], out.shape[3]
    num_rows = out.numel() // head_dim
    float8 = {"HEADS": num_heads, "UNIT": float8_unit(head_dim)}
    if in_order or num_splits <= _FEW_PARTS:
        _combine_few_kernel[(triton.cdiv(num_rows, _ROWS),)](
            partial,
            log_weight,
            out,
            scale,
            num_rows,
            HEAD_DIM=head_dim,
            SPLITS=num_splits,
            ROWS=_ROWS,
            num_warps=_ROWS,
            **float8,
            **dependent_launch(out.device),
        )
        return
    splits = triton.next_power_of_2(num_splits)
    columns = min(head_dim, 32 if splits <= _ONE_WARP else max(32, _COMBINE_ELEMENTS // splits))
    _combine_kernel[(num_rows, head_dim // columns)](
        partial,
        log_weight,
        out,
        scale,
        num_rows,
        num_splits,
        HEAD_DIM=head_dim,
        SPLITS=splits,
        COLUMNS=columns,
        num_warps=1 if splits * columns <= 2048 else 4,
        **float8,
        **dependent_launch(out.device),
    )


@triton.jit(do_not_specialize=["num_rows"])
def _combine_few_kernel(
    partial_ptr: tl.tensor,
    log_weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    num_rows: tl.tensor,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Add the parts of ROWS rows in order. All loads come first, and no warp waits for another."""
    wait_for_launches_before(DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    column = tl.arange(0, HEAD_DIM)[None, :]
    logs: tl.tuple = ()
    values: tl.tuple = ()
    for part in tl.static_range(SPLITS):
        at = part * num_rows + row
        logs += (tl.load(log_weight_ptr + at, mask=inside, other=0.0),)
        values += (tl.load(partial_ptr + at[:, None] * HEAD_DIM + column, mask=inside[:, None], other=0.0),)
    top = logs[0]
    for part in tl.static_range(1, SPLITS):
        top = tl.maximum(top, logs[part])
    total = tl.zeros([ROWS], tl.float32)
    for part in tl.static_range(SPLITS):
        total += tl.exp2(logs[part] - top)
    out = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    for part in tl.static_range(SPLITS):
        weight = tl.zeros([ROWS, HEAD_DIM], tl.float32) + (tl.exp2(logs[part] - top) / total)[:, None]
        # The values of an empty part were never written.
        value = tl.where(weight > 0.0, values[part].to(tl.float32), 0.0)
        out = tl.fma(value, weight, out)  # explicit fma, so that rounding does not depend on the number of parts
    if scale_ptr is not None:
        out *= 1.0 / UNIT
        tl.store(scale_ptr + row // HEADS, tl.full([ROWS], UNIT, tl.float32), mask=inside & (row % HEADS == 0))
    tl.store(out_ptr + row[:, None] * HEAD_DIM + column, out.to(out_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _combine_kernel(
    partial_ptr: tl.tensor,
    log_weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_splits: tl.tensor,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Add the parts of one row, for one block of its columns."""
    wait_for_launches_before(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.arange(0, SPLITS)
    at = part.to(tl.int64) * num_rows + row
    log_weight = tl.load(log_weight_ptr + at, mask=part < num_splits, other=float("-inf"))
    source = partial_ptr + at[:, None] * HEAD_DIM + column[None, :]
    values = tl.load(source, mask=(part < num_splits)[:, None], other=0.0).to(tl.float32)
    weight = tl.exp2(log_weight - tl.max(log_weight, 0))
    weight = (weight / tl.sum(weight, 0))[:, None]
    out = tl.sum(tl.where(weight > 0.0, values * weight, 0.0), 0)
    if scale_ptr is not None:
        out *= 1.0 / UNIT
        tl.store(scale_ptr + row // HEADS, UNIT, mask=row % HEADS == 0)
    tl.store(out_ptr + row * HEAD_DIM + column, out.to(out_ptr.dtype.element_ty))
