"""Attention of new tokens over a cached prefix and themselves, and the choice between its kernels.

All use online softmax (FlashAttention, arXiv:2205.14135). The query heads that share a key head are packed as rows of
one tile. The keys are split into equal parts, so that even few queries fill the GPU (Flash-Decoding; `parts`). The
Triton kernel in this module runs on every GPU; `hopper` has a kernel with specialised warps for Hopper. `choose_kernel`
chooses between them. Reference: `reference.py`.
"""

from types import ModuleType
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma_kernels.formats.float8 import Quantized, values_and_scale
from dgemma_kernels.ops.attention.parts import (
    Inputs,
    KeyMask,
    Parts,
    choose_num_splits,
    combine_parts,
    count_fixed_parts,
    float8_unit,
    part_of_keys,
    seen_slots,
)
from dgemma_kernels.ops.configs import gluon_obstacle, is_hopper, num_multiprocessors

KernelName = Literal["auto", "triton", "hopper"]

_FEW_ROWS = 16  # packed query rows for which the Triton kernel's small tile is faster


class KernelChoice(NamedTuple):
    """The kernel that `attention` runs, "triton" or "hopper", and the reason in words."""

    kernel: str
    reason: str


class AttentionTile(NamedTuple):
    """The shape of one program of the Triton kernel: `rows` queries by `keys` keys.

    It computes `value_dim` value columns (0: all). With `tma` it loads keys and values through tensor descriptors,
    which need no registers for pointers on Hopper.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    tma: bool = False
    value_dim: int = 0


def default_tile(num_rows: int, head_dim: int, *, hopper: bool) -> AttentionTile:
    """Return the Triton kernel's tile for `num_rows` packed query rows of one key head (tokens × heads that share it).

    Example: `default_tile(512, 256, hopper=True)` is the canvas tile of a sliding layer.
    """
    if not hopper:  # fits the 99 KiB of shared memory per block of consumer GPUs
        return AttentionTile(16 if num_rows <= _FEW_ROWS else 32, 16, 4, 2)
    if num_rows <= _FEW_ROWS:
        return AttentionTile(16, 32, 4, 3)
    if head_dim > 256:
        return AttentionTile(128, 32, 8, 2, tma=True, value_dim=256)
    return AttentionTile(128, 64, 8, 2, tma=True)


def attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    length: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    canvas_len: int = 0,
    keep: int = 0,
    kernel: KernelName = "auto",
    tile: AttentionTile | None = None,
    num_splits: int | None = None,
    part: int = 0,
    position: Tensor | None = None,
    float8: bool = False,
    rotary_pairs: int | None = None,
    spans: Tensor | None = None,
) -> Tensor | Quantized:
    """Attend from T query tokens per row to the row's prefix and to each other, with scale 1.

    queries: (B, T, N, H) contiguous. keys, values: (B, K, capacity, H), last two dimensions contiguous; row b has its
    prefix in slots [0, length[b]) and the T new tokens in the next T, which must fit the capacity. length: (B,)
    integers on the device. Attention is bidirectional by default. With `causal` query i sees slots up to its own, and
    with `window` only the last `window` of those. A canvas may follow causal tokens: the last `canvas_len` tokens see
    each other and everything before them. In a windowed layer they see only the last `keep` slots before the canvas.
    Or causal tokens may be parts of images, which see their whole image: spans (B, T, 2) int32 has the numbers of the
    first and the last token of a token's image, or twice its own number if it is text (`images.image_spans`).
    Returns (B, T, N, H). With `float8` the result is rounded to float8, as rows (B·T, N·H). All rows have the scale
    `parts.float8_unit`, because the values of a head have a root mean square of at most 1.

    With `rotary_pairs`, keys must equal values, except in the first `rotary_pairs` columns of both halves of a head
    (`prepare_qkv` writes such keys). On Hopper, heads of 512 then compute every score once instead of twice.

    `kernel` "triton" or "hopper" raises where that kernel cannot run; "auto" follows `choose_kernel`. `tile` (Triton
    kernel only) and `num_splits` are for tuning and change rounding.

    With `part`, a multiple of 64, a token's result has the same bits in any batch, for any T, capacity and first slot:
    tiles and parts of the keys begin at fixed positions (`parts.count_fixed_parts`). `position`, (B,) like length, is
    the position of each row's first new token, by default its slot. If it differs from the slot, a tile may begin
    before slot 0. The 64 slots before slot 0 of each row and head must then be in memory and finite.

    Example: `attention(queries, cache.keys, cache.values, cache.length)`.
    """
    assert window is None or window >= 1
    mask = KeyMask(causal, window or 0, canvas_len, keep, spans is not None)
    check_arguments(queries, keys, values, length, mask)
    assert spans is None or (causal and not canvas_len and not part)
    assert spans is None or (spans.shape == (*queries.shape[:2], 2) and spans.is_contiguous())
    batch, num_tokens, num_heads, head_dim = queries.shape
    kv_heads, capacity = keys.shape[1], keys.shape[2]
    num_rows = num_tokens * num_heads // kv_heads
    assert tile is None or kernel != "hopper"
    choice = choose_kernel(queries, keys, values, kernel if tile is None else "triton", few_rows=part == 0)
    # With fixed parts, the tile must not depend on the number of rows.
    tile = tile or default_tile(_FEW_ROWS + 1 if part else num_rows, head_dim, hopper=is_hopper(queries.device))
    hopper = choice.kernel == "hopper"
    shared = hopper and _computes_scores_once(head_dim, rotary_pairs, window, part)
    rows, slots, columns = tile.rows, tile.keys, tile.value_dim or head_dim
    if hopper:
        rows, slots, columns = (_hopper_shared() if shared else _hopper()).TILE
    if part:
        assert part % slots == 0
        assert num_splits is None
        tokens_per_tile = triton.cdiv(rows * kv_heads, num_heads)
        span = None
        if window is not None:
            span = keep + canvas_len if canvas_len == num_tokens else window + canvas_len + tokens_per_tile
        num_splits = count_fixed_parts(part, capacity, span)
    elif num_splits is None:
        programs = triton.cdiv(num_rows, rows) * (head_dim // columns) * batch * kv_heads
        num_splits = choose_num_splits(programs, num_multiprocessors(queries.device), triton.cdiv(capacity, slots))

    out = torch.empty_like(queries, dtype=torch.float8_e4m3fn if float8 else None)
    scale = torch.empty(batch * num_tokens, dtype=torch.float32, device=out.device) if float8 else None
    if num_splits == 1:  # the only part is the output; its weight is never written
        partial, log_weight, part_scale = out.unsqueeze(0), out, scale
    else:
        # Parts have the output's dtype, not float32. This halves their traffic and adds one rounding, no larger than
        # that of the output.
        partial = torch.empty((num_splits, *queries.shape), dtype=queries.dtype, device=queries.device)
        log_weight = torch.empty((num_splits, *queries.shape[:3]), dtype=torch.float32, device=queries.device)
        part_scale = None
    inputs = Inputs(queries, keys, values, length, length if position is None else position, spans)
    parts = Parts(partial, log_weight, part_scale)
    if shared:
        _hopper_shared().attend(inputs, parts, mask)
    elif hopper:
        _hopper().attend(inputs, parts, mask, part)
    else:
        _attend(inputs, parts, mask, part, tile)
    if num_splits > 1:
        combine_parts(partial, log_weight, out, scale, in_order=part > 0)
    if scale is None:
        return out
    return Quantized(values=out.view(batch * num_tokens, -1), scale=scale, dtype=queries.dtype)


def choose_kernel(
    queries: Tensor, keys: Tensor, values: Tensor, kernel: KernelName = "auto", *, few_rows: bool = True
) -> KernelChoice:
    """Return the kernel that `attention` runs on these arguments, and the reason.

    "auto" is the Hopper kernel if it can run, was tested with this version of Triton, and has more than 16 packed query
    rows. Otherwise it is the Triton kernel. With `few_rows=False` the number of rows does not matter. An explicit
    "hopper" runs with any Triton that compiles it, and raises where it cannot run.

    Example: `print(choose_kernel(queries, cache.keys, cache.values).reason)`.
    """
    if kernel not in ("auto", "triton", "hopper"):
        raise ValueError(f'attention kernel must be "auto", "triton" or "hopper", got {kernel!r}.')
    if kernel == "triton":
        return KernelChoice("triton", "requested")
    obstacle = hopper_obstacle(queries, keys, values)
    if kernel == "hopper":
        if obstacle is not None:
            raise ValueError(f'attention kernel="hopper" needs {obstacle}. Use kernel="auto".')
        return KernelChoice("hopper", "requested")
    if obstacle is not None:
        return KernelChoice("triton", f"the Hopper kernel needs {obstacle}")
    num_rows = queries.shape[1] * queries.shape[2] // keys.shape[1]
    if few_rows and num_rows <= _FEW_ROWS:
        return KernelChoice("triton", f"it is faster for at most {_FEW_ROWS} packed query rows, got {num_rows}")
    if untested := gluon_obstacle():
        return KernelChoice("triton", f'the Hopper kernel is tested with {untested}; kernel="hopper" runs it anyway')
    return KernelChoice("hopper", f"it can run, and is faster for more than {_FEW_ROWS} packed query rows")


def hopper_obstacle(queries: Tensor | Quantized, keys: Tensor, values: Tensor) -> str | None:
    """Return a requirement of the Hopper kernels that these arguments do not meet, None if they can run.

    Example: `hopper_obstacle(queries, keys, values)` is "a head_dim of 256 or 512, got 128" for heads of 128.
    """
    rows, _ = values_and_scale(queries)
    head_dim, group = queries.shape[3], queries.shape[2] // keys.shape[1]
    if triton.knobs.runtime.interpret and rows.device.type == "cuda":
        return "a compiler: Triton's interpreter does not run Gluon"
    if not is_hopper(rows.device):
        return f"a Hopper GPU (compute capability 9.0), got tensors on {rows.device}"
    if queries.dtype not in (torch.bfloat16, torch.float16):
        return f"bfloat16 or float16, got {queries.dtype}"
    if head_dim not in (256, 512):
        return f"a head_dim of 256 or 512, got {head_dim}"
    if 64 % group:
        return f"a number of query heads per key head that divides 64, got {group}"
    if any(stride % head_dim for cache in (keys, values) for stride in cache.stride()[:2]):
        return f"strides of keys and values in multiples of {head_dim}, got {keys.stride()} and {values.stride()}"
    if any(tensor.data_ptr() % 16 for tensor in (rows, keys, values)):
        return "tensors aligned to 16 bytes"  # for tensor descriptors
    return None


def _computes_scores_once(head_dim: int, rotary_pairs: int | None, window: int | None, part: int) -> bool:
    """Return True if `hopper_shared` runs instead of `hopper`. With fixed parts `hopper` always runs, so that sums
    have one order."""
    if rotary_pairs is None or window is not None or part or gluon_obstacle() is not None:
        return False
    return head_dim == _hopper_shared().TILE[2] and rotary_pairs <= _hopper_shared().ROTARY_PAIRS


def _hopper() -> ModuleType:
    """Import the Hopper kernel at its first use, because other versions of Triton may lack its Gluon functions."""
    from dgemma_kernels.ops.attention import hopper

    return hopper


def _hopper_shared() -> ModuleType:
    from dgemma_kernels.ops.attention import hopper_shared

    return hopper_shared


def _attend(inputs: Inputs, parts: Parts, mask: KeyMask, part: int, tile: AttentionTile) -> None:
    queries, keys, values, length, position, spans = inputs
    batch, num_tokens, num_heads, head_dim = queries.shape
    kv_heads, num_splits, value_dim = keys.shape[1], parts.partial.shape[0], tile.value_dim or head_dim
    group = num_heads // kv_heads
    row_tiles = triton.cdiv(num_tokens * group, tile.rows)
    if tile.tma:
        triton.set_allocator(_allocate)  # for descriptors, which the kernel builds in memory
    _attention_kernel[(row_tiles * (head_dim // value_dim), num_splits, batch * kv_heads)](
        queries,
        keys,
        values,
        length,
        position,
        spans,
        *parts,
        num_tokens,
        num_tokens * batch * num_heads,
        *keys.stride()[:2],
        *values.stride()[:2],
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        ROWS=tile.rows,
        KEYS=tile.keys,
        CAUSAL=mask.causal,
        WINDOW=mask.window,
        CANVAS=mask.canvas_len,
        KEEP=mask.keep,
        SPANS=mask.has_spans,
        SPLIT=num_splits > 1,
        PART=part,
        UNIT=float8_unit(head_dim),
        TMA=tile.tma,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@triton.jit
def _attention_kernel(
    query_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    length_ptr: tl.tensor,
    position_ptr: tl.tensor,
    span_ptr: tl.tensor,  # (B, T, 2) int32 if SPANS
    partial_ptr: tl.tensor,  # (splits, B, T, N, H)
    log_weight_ptr: tl.tensor,  # (splits, B, T, N) float32, base 2, if SPLIT
    scale_ptr: tl.tensor,  # (B·T,) float32 if the output is float8, else None
    num_tokens: tl.tensor,
    num_query_heads: tl.tensor,  # B·T·N
    key_batch_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_batch_stride: tl.tensor,
    value_head_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CANVAS: tl.constexpr,
    KEEP: tl.constexpr,
    SPANS: tl.constexpr,
    SPLIT: tl.constexpr,
    PART: tl.constexpr,
    UNIT: tl.constexpr,
    TMA: tl.constexpr,
) -> None:
    VALUE_PARTS: tl.constexpr = HEAD_DIM // VALUE_DIM
    row_tile = tl.program_id(0) // VALUE_PARTS
    value_part = tl.program_id(0) % VALUE_PARTS
    batch = (tl.program_id(2) // KV_HEADS).to(tl.int64)
    head = (tl.program_id(2) % KV_HEADS).to(tl.int64)
    prefix_len = tl.load(length_ptr + batch).to(tl.int32)

    row = row_tile * ROWS + tl.arange(0, ROWS)  # packed: token-major, then the GROUP heads that share this key head
    token = row // GROUP
    row_valid = token < num_tokens
    query_head = (batch * num_tokens + token) * (KV_HEADS * GROUP) + head * GROUP + row % GROUP  # into (B, T, N)

    spans = span_ptr
    if SPANS:
        spans += 2 * batch * num_tokens
    origin = prefix_len * 0
    if PART > 0:
        origin = tl.load(position_ptr + batch).to(tl.int32) - prefix_len
    MASK: tl.constexpr = KeyMask(CAUSAL, WINDOW, CANVAS, KEEP, SPANS)
    begin, end = part_of_keys(row_tile, prefix_len, origin, num_tokens, spans, ROWS, GROUP, KEYS, MASK, SPLIT, PART)
    column = tl.arange(0, HEAD_DIM)
    value_column = value_part * VALUE_DIM + tl.arange(0, VALUE_DIM)
    query = tl.load(query_ptr + query_head[:, None] * HEAD_DIM + column[None, :], mask=row_valid[:, None], other=0.0)
    key_ptr += batch * key_batch_stride + head * key_head_stride
    value_ptr += batch * value_batch_stride + head * value_head_stride

    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, VALUE_DIM), tl.float32)
    if TMA:  # loads beyond `end` give zeros
        key_tiles = tl.make_tensor_descriptor(key_ptr, [end, HEAD_DIM], [HEAD_DIM, 1], [KEYS, HEAD_DIM])
        value_tiles = tl.make_tensor_descriptor(value_ptr, [end, HEAD_DIM], [HEAD_DIM, 1], [KEYS, VALUE_DIM])
    for start in range(begin, end, KEYS):
        slot = start + tl.arange(0, KEYS)
        slot_valid = slot < end
        if PART > 0 and not TMA:
            slot_valid = slot_valid & (slot >= 0)
        offset = slot.to(tl.int64) * HEAD_DIM
        if TMA:
            key = key_tiles.load([start, 0]).T  # (H, KEYS)
        else:
            key = tl.load(key_ptr + offset[None, :] + column[:, None], mask=slot_valid[None, :], other=0.0)
        score = tl.dot(query, key, input_precision="ieee")
        if CAUSAL:
            first_seen, last_seen = seen_slots(token, num_tokens, spans, MASK)
            seen = slot[None, :] <= prefix_len + last_seen[:, None]
            if WINDOW > 0:
                seen = seen & (slot[None, :] >= prefix_len + first_seen[:, None])
            score = tl.where(seen & slot_valid[None, :], score, float("-inf"))
        else:
            score = tl.where(slot_valid[None, :], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1) * 1.4426950408889634)  # base 2
        if CAUSAL:
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row without a visible key so far
        else:
            shift = new_top
        weight = tl.exp2(score * 1.4426950408889634 - shift[:, None])
        decay = tl.exp2(top - shift)
        total = total * decay + tl.sum(weight, 1)
        acc = acc * decay[:, None]
        if TMA:
            value = value_tiles.load([start, value_part * VALUE_DIM])  # (KEYS, VALUE_DIM)
        else:
            value = tl.load(value_ptr + offset[:, None] + value_column[None, :], mask=slot_valid[:, None], other=0.0)
        acc = tl.dot(weight.to(value.dtype), value, acc, input_precision="ieee")
        top = new_top

    # A part without a visible key has weight zero. Its values are neither written nor read.
    seen_any = total > 0.0
    total = tl.where(seen_any, total, 1.0)
    acc = acc / total[:, None]
    query_head += tl.program_id(1).to(tl.int64) * num_query_heads
    if SPLIT and value_part == 0:
        log_weight = tl.where(seen_any, top + tl.log2(total), float("-inf"))
        tl.store(log_weight_ptr + query_head, log_weight, mask=row_valid)
    if scale_ptr is not None:
        acc = acc.to(query_ptr.dtype.element_ty).to(tl.float32) * (1.0 / UNIT)  # rounded as if there were several parts
        if head == 0 and value_part == 0:
            tl.store(scale_ptr + batch * num_tokens + token, UNIT, mask=row_valid & (row % GROUP == 0))
    target = partial_ptr + query_head[:, None] * HEAD_DIM + value_column[None, :]
    tl.store(target, acc.to(partial_ptr.dtype.element_ty), mask=(row_valid & seen_any)[:, None])


def _allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def check_arguments(queries: Tensor | Quantized, keys: Tensor, values: Tensor, length: Tensor, mask: KeyMask) -> None:
    """Assert the shapes, strides and dtypes that the kernels of attention rely on."""
    rows, _ = values_and_scale(queries)
    (batch, num_tokens, num_heads, head_dim), (_, kv_heads, capacity, _) = rows.shape, keys.shape
    assert keys.shape == values.shape == (batch, kv_heads, capacity, head_dim)
    assert num_heads % kv_heads == 0
    assert head_dim >= 16 and head_dim & (head_dim - 1) == 0, head_dim  # noqa: PT018
    assert rows.is_contiguous()
    assert keys.stride()[2:] == values.stride()[2:] == (head_dim, 1)
    assert queries.dtype == keys.dtype == values.dtype in (torch.bfloat16, torch.float16, torch.float32)
    assert length.shape == (batch,)
    assert not length.dtype.is_floating_point
    assert 1 <= num_tokens <= capacity
    assert 0 <= mask.canvas_len <= num_tokens
    assert mask.causal or not (mask.window or mask.canvas_len)
    assert not mask.window or 0 <= mask.keep <= mask.window
