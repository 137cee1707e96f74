"""Fixes for new NumPy and float8 in Triton's interpreter, which runs kernels without a GPU (`TRITON_INTERPRET=1`)."""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def accept_new_numpy() -> None:
    """Let loop bounds be arrays of shape (1,): Triton 3.6 calls `int` on them, which NumPy 2.4 refuses."""
    patch = interpreter._patch_lang_tensor

    def patch_and_index(tensor: type, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_index


def round_float8() -> None:
    """Convert to and from float8 (e4m3) as a GPU does: Triton loses the carry (1.96 becomes 1.0), and NaN becomes 480.

    Values round to the nearest, ties to even, and are clamped to the largest.
    """
    convert = interpreter._convert_float

    def convert_float8(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if tl.float8e4nv not in (source, target) or source == target:
            return convert(data, source, target, rounding_mode)
        if target == tl.float8e4nv:
            wide = data if source != tl.bfloat16 else convert(data, source, tl.float32, None).view(np.float32)
            return torch.tensor(wide).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        wide = torch.tensor(data).view(torch.float8_e4m3fn).float().numpy()
        if target == tl.float16:  # has all values of float8
            return wide.astype(np.float16).view(np.uint16)
        return wide.view(np.uint32) if target == tl.float32 else convert(wide, tl.float32, target, rounding_mode)

    interpreter._convert_float = convert_float8
