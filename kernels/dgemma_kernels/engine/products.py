"""Library matrix products in calls of 256 rows, so that the bits of a row do not depend on the number of rows.

A library chooses its kernel, and with it the order of a sum, by the shapes of a product. So rows are multiplied in
slices of one size, and the last slice is filled up with zeros.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dgemma_kernels.formats.float8 import Quantized, values_and_scale

ROWS = 256  # those of one canvas, so that its step makes the same calls as without slices


def in_slices(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `product(x, weight, ..., out=out)` so that it multiplies ROWS rows of x at a time.

    Example: `in_slices(multiply)(x, weight)` has the bits of `in_slices(multiply)(x[5:6], weight)` in row 5.
    """

    def multiply(x: Tensor | Quantized, weight: Tensor | Quantized, *others: Any, out: Tensor | None = None) -> Tensor:
        num_rows = x.shape[0]
        if out is None:
            device = values_and_scale(x)[0].device
            out = torch.empty(num_rows, weight.shape[0], dtype=x.dtype, device=device)
        whole = num_rows // ROWS * ROWS
        for start in range(0, whole, ROWS):
            rows = slice(start, start + ROWS)
            product(_slice(x, rows), weight, *others, out=out[rows])
        if whole < num_rows:
            filled = out.new_empty(ROWS, out.shape[1])
            product(_fill_up(_slice(x, slice(whole, num_rows))), weight, *others, out=filled)
            out[whole:] = filled[: num_rows - whole]
        return out

    return multiply


def _slice(x: Tensor | Quantized, rows: slice) -> Tensor | Quantized:
    return x[rows] if isinstance(x, Tensor) else replace(x, values=x.values[rows], scale=x.scale[rows])


def _fill_up(x: Tensor | Quantized) -> Tensor | Quantized:
    """Append rows of zeros up to ROWS."""

    def filled(rows: Tensor) -> Tensor:
        zeros = rows.new_zeros(ROWS - rows.shape[0], *rows.shape[1:])
        return torch.cat((rows, zeros))

    return filled(x) if isinstance(x, Tensor) else replace(x, values=filled(x.values), scale=filled(x.scale))
