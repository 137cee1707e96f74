"""Matrix products that are slow in cuBLAS: one row, a very large depth, or next to other kernels.

Reference: `reference.py`.

The product of one row is limited by reading the weight. A program loads its rows of the weight at once, into registers.
On Hopper it does so before it waits for the previous kernel (programmatic dependent launch), so memory is busy while
small kernels before it run. A product of few rows and columns has few tiles, so programs also share its depth.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dgemma_kernels.blocks import inside, wait_for_launches_before
from dgemma_kernels.formats.float8 import Quantized, values_and_scale
from dgemma_kernels.ops.configs import dependent_launch, num_multiprocessors
from dgemma_kernels.ops.norms import scale_rows

_DEPTH = 1024  # columns per load
# Programs have two warps if a float8 weight has at least this many rows. Then a thread loads 16 bytes at once.
_MANY = 16_384
_TILE_ROWS, _TILE_DEPTH = 128, 128  # of a tile of float8 operands
_DEEP_COLS, _BESIDE_COLS = 256, 128


def multiply_row(x: Tensor | Quantized, weight: Tensor | Quantized, *, early: bool = True) -> Tensor:
    """Return x @ weight.T of one row: (1, K), (N, K) → (1, N). Sums are float32 and round once.

    The weight may be float8, with a plain or a float8 row. With `early`, programs start during the previous kernel.

    Example: `multiply_row(x[:1], layer.qkv)`.
    """
    if len(x.shape) != 2 or len(weight.shape) != 2 or x.shape != (1, weight.shape[1]):
        raise ValueError(
            f"multiply_row must get a row (1, K) and a weight (N, K), got {tuple(x.shape)} and {tuple(weight.shape)}."
        )
    (row, row_scale), (matrix, scale) = values_and_scale(x), values_and_scale(weight)
    if x.dtype != weight.dtype or not (row.is_contiguous() and matrix.is_contiguous()):
        raise ValueError(f"multiply_row must get contiguous tensors of one dtype, got {x.dtype} and {weight.dtype}.")
    num_cols, width = weight.shape
    out = torch.empty(1, num_cols, dtype=x.dtype, device=row.device)
    at_once = max(1, 12 // triton.cdiv(width, _DEPTH))  # so that four programs share a multiprocessor's registers
    cols = min(4, 1 << (at_once.bit_length() - 1))
    _multiply_row_kernel[(triton.cdiv(num_cols, cols),)](
        row,
        row_scale,
        matrix,
        scale,
        out,
        num_cols,
        WIDTH=width,
        COLS=cols,
        DEPTH=_DEPTH,
        EXACT=num_cols % cols == 0,
        num_warps=2 if scale is not None and num_cols >= _MANY else 4,
        maxnreg=128,
        **(dependent_launch(row.device) if early else {"DEPENDENT": False}),
    )
    return out


def multiply_deep(x: Quantized, weight: Quantized, *, factor: float = 1.0, parts: int | None = None) -> Tensor:
    """Return factor * x @ weight.T of float8 operands, for few rows and columns and a very large K: (M, K), (N, K) →
    (M, N).

    The depth is added in `parts`, by default as many as fill the GPU. Tensor cores add a part in about 14 bits, and the
    parts are added in float32.

    Example: `multiply_deep(soft_probabilities(logits, statistics, temperature, float8=True), table)`.
    """
    _require_operands("multiply_deep", x, weight)
    (num_rows, depth), num_cols = x.shape, weight.shape[0]
    num_tiles = triton.cdiv(num_rows, _TILE_ROWS) * triton.cdiv(num_cols, _DEEP_COLS)
    if parts is None:
        parts = max(1, min(triton.cdiv(depth, _TILE_DEPTH), num_multiprocessors(x.values.device) // num_tiles))
    sums = torch.empty(parts, num_rows, num_cols, dtype=torch.float32, device=x.values.device)
    _multiply_tiles(x, weight, sums, _DEEP_COLS)
    return scale_rows(sums, x.scale, weight.scale, factor=factor, dtype=x.dtype)


def multiply_beside(x: Quantized, weight: Quantized) -> Tensor:
    """Return the product of the values of float8 operands, without their scales: (M, K), (N, K) → (M, N).

    It is for the second stream of a forward. A program of a library's product uses all registers of a multiprocessor.
    So small kernels on the first stream wait for it. This product runs on fewer multiprocessors, and its programs leave
    registers to others.

    Example: `multiply_beside(dense_in, layer.gate_up)`.
    """
    _require_operands("multiply_beside", x, weight)
    out = torch.empty(1, x.shape[0], weight.shape[0], dtype=x.dtype, device=x.values.device)
    _multiply_tiles(x, weight, out, _BESIDE_COLS)
    return out[0]


def _require_operands(owner: str, x: Quantized, weight: Quantized) -> None:
    depth = x.shape[1]
    if weight.shape[1] != depth or x.dtype != weight.dtype or x.block or weight.block or depth % 16:
        raise ValueError(
            f"{owner} must get (M, K) and (N, K) with K in multiples of 16, got {tuple(x.shape)} and "
            f"{tuple(weight.shape)}."
        )
    if not (x.values.is_contiguous() and weight.values.is_contiguous()):
        raise ValueError(f"{owner} must get contiguous tensors. Call .contiguous() on them first.")


def _multiply_tiles(x: Quantized, weight: Quantized, out: Tensor, cols: int) -> None:
    """Write x @ weight.T without scales, in parts of the depth. out: (parts, M, N)."""
    parts, num_rows, num_cols = out.shape
    _multiply_tiles_kernel[(triton.cdiv(num_rows, _TILE_ROWS), triton.cdiv(num_cols, cols), parts)](
        TensorDescriptor.from_tensor(x.values, [_TILE_ROWS, _TILE_DEPTH]),
        TensorDescriptor.from_tensor(weight.values, [cols, _TILE_DEPTH]),
        out,
        num_rows,
        num_cols,
        triton.cdiv(x.shape[1], _TILE_DEPTH),
        ROWS=_TILE_ROWS,
        COLS=cols,
        DEPTH=_TILE_DEPTH,
        num_warps=8,
        num_stages=4,
    )


@triton.jit
def _multiply_tiles_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_cols: tl.tensor,
    steps: tl.tensor,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    first_row = tl.program_id(0) * ROWS
    first_col = tl.program_id(1) * COLS
    part, parts = tl.program_id(2), tl.num_programs(2)
    sums = tl.zeros([ROWS, COLS], tl.float32)
    for step in range(part * steps // parts, (part + 1) * steps // parts):
        rows = x.load([first_row, step * DEPTH])  # zeros beyond the last row, column or depth
        cols = weight.load([first_col, step * DEPTH])
        sums = tl.dot(rows, cols.T, sums)
    row = first_row + tl.arange(0, ROWS)
    col = first_col + tl.arange(0, COLS)
    at = (part.to(tl.int64) * num_rows + row[:, None]) * num_cols + col[None, :]
    tl.store(out + at, sums, mask=(row < num_rows)[:, None] & (col < num_cols)[None, :])


@triton.jit(do_not_specialize=["num_cols"])
def _multiply_row_kernel(
    x: tl.tensor,
    x_scale: tl.tensor | None,
    weight: tl.tensor,
    weight_scale: tl.tensor | None,
    out: tl.tensor,
    num_cols: tl.tensor,
    WIDTH: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    EXACT: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    depth = tl.arange(0, DEPTH)
    col_inside = inside(col, num_cols, EXACT)
    matrix = weight + col[:, None].to(tl.int64) * WIDTH + depth[None, :]
    parts = ()
    for start in tl.static_range(0, WIDTH, DEPTH):
        left = inside(depth, WIDTH - start, WIDTH - start >= DEPTH)
        parts += (tl.load(matrix + start, mask=col_inside[:, None] & left[None, :], other=0.0),)  # type: ignore[assignment]
    if weight_scale is not None:
        scale = tl.load(weight_scale + col, mask=col_inside, other=0.0)
    wait_for_launches_before(DEPENDENT)
    sums = tl.zeros([COLS, DEPTH], tl.float32)
    for at in tl.static_range(len(parts)):
        left = inside(depth, WIDTH - at * DEPTH, WIDTH - at * DEPTH >= DEPTH)
        inputs = tl.load(x + at * DEPTH + depth, mask=left, other=0.0)
        sums += parts[at].to(tl.float32) * inputs.to(tl.float32)[None, :]
    result = tl.sum(sums, 1)
    if weight_scale is not None:
        result *= scale
    if x_scale is not None:
        result *= tl.load(x_scale)
    tl.store(out + col, result.to(out.dtype.element_ty), mask=col_inside)
