"""Functions of many elementwise operations, fused on a GPU, where each operation would cost a launch and a pass."""

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., object])


def fused(function: Function, device: torch.device) -> Function:
    """The function, compiled if it is to run on a GPU.

    Example: `fused(softmax_of_slice, logits.device)(logits)`.
    """
    return _compiled(function) if device.type == "cuda" else function  # type: ignore[return-value]


@cache
def _compiled(function: Callable[..., object]) -> Callable[..., object]:
    # Roundings between operations are part of what is computed; without this they are fused away.
    return torch.compile(function, options={"emulate_precision_casts": True})
