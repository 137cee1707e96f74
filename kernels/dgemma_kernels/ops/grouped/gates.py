"""The gradient of the experts' GeGLU in training, in one pass over the rows. Reference: `reference.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLS = 16, 64  # of a block


def gated_gradient(wide: Tensor, pulled: Tensor, weights: Tensor, order: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden values (R, F), gradients of gate and up (R, 2F), and those of the routing weights by row, (R,).

    wide: (R, 2F), gate and up. pulled: (R, F), the gradient of the hidden values before it is multiplied by the routing
    weights (M, A). order: (R,), the choice of each row, as token · A + a. Gradients are computed in float32.

    Example: `hidden, of_wide, of_weights = gated_gradient(wide, pulled, routing.weights, groups.order)`.
    """
    num_rows, width = pulled.shape
    if wide.shape != (num_rows, 2 * width) or not all(x.is_contiguous() for x in (wide, pulled, weights, order)):
        raise ValueError(
            f"gated_gradient must get contiguous tensors, wide with two columns for each column of pulled, got "
            f"{tuple(wide.shape)} and {tuple(pulled.shape)}."
        )
    hidden, of_wide = torch.empty_like(pulled), torch.empty_like(wide)
    of_rows = torch.empty(num_rows, dtype=torch.float32, device=wide.device)
    _gated_gradient_kernel[(triton.cdiv(num_rows, _ROWS),)](
        wide, pulled, weights, order, hidden, of_wide, of_rows, num_rows, WIDTH=width, ROWS=_ROWS, COLS=_COLS
    )
    return hidden, of_wide, of_rows


@triton.jit
def _gated_gradient_kernel(
    wide: tl.tensor,
    pulled: tl.tensor,
    weights: tl.tensor,
    order: tl.tensor,
    hidden: tl.tensor,
    of_wide: tl.tensor,
    of_rows: tl.tensor,
    num_rows: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
) -> None:
    dtype: tl.constexpr = wide.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    weight = tl.load(weights + tl.load(order + row, is_row, 0), is_row, 0.0).to(tl.float32)[:, None]
    total = tl.zeros((ROWS,), tl.float32)
    for begin in range(0, WIDTH, COLS):
        col = begin + tl.arange(0, COLS)
        here = is_row[:, None] & (col < WIDTH)[None, :]
        at, at_wide = row[:, None] * WIDTH + col[None, :], row[:, None] * (2 * WIDTH) + col[None, :]
        gate = tl.load(wide + at_wide, here, 0.0).to(tl.float32)
        up = tl.load(wide + at_wide + WIDTH, here, 0.0).to(tl.float32)
        grad = tl.load(pulled + at, here, 0.0).to(tl.float32)
        # 0.5 (1 + tanh(u)) is sigmoid(2u), 2u = sqrt(8 / pi) (gate + 0.044715 gate³).
        half = tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
        slope = half + gate * half * (1 - half) * 1.5957691216057308 * (1 + 3 * 0.044715 * gate * gate)
        activated = (gate * half).to(dtype).to(tl.float32)
        value = (activated * up).to(dtype)
        total += tl.sum(value.to(tl.float32) * grad, 1)
        tl.store(hidden + at, value, here)
        tl.store(of_wide + at_wide, (grad * weight * up * slope).to(dtype), here)
        tl.store(of_wide + at_wide + WIDTH, (grad * weight * activated).to(dtype), here)
    tl.store(of_rows + row, total, is_row)
