"""The product of one row, which is slow in cuBLAS.

It is limited by reading the weight. A program loads its rows of the weight at once, into registers. On Hopper it does
so before it waits for the previous kernel (programmatic dependent launch), so memory is busy while small kernels before
it run. Reference: `reference.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma_kernels.blocks import inside, wait_for_launches_before
from dgemma_kernels.formats.float8 import Quantized, values_and_scale
from dgemma_kernels.ops.configs import dependent_launch

_DEPTH = 1024  # columns per load
# Programs have two warps if a float8 weight has at least this many rows. Then a thread loads 16 bytes at once.
_MANY = 16_384


def multiply_row(x: Tensor | Quantized, weight: Tensor | Quantized, *, early: bool = True) -> Tensor:
    """Return x @ weight.T of one row: (1, K), (N, K) → (1, N). Sums are float32 and round once.

    The weight may be float8, with a plain or a float8 row. With `early`, programs start during the previous kernel.

    Example: `multiply_row(x[:1], layer.qkv)`.
    """
    (row, row_scale), (matrix, scale) = values_and_scale(x), values_and_scale(weight)
    assert x.shape == (1, weight.shape[1])
    assert row.is_contiguous()
    assert matrix.is_contiguous()
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
