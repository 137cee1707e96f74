"""Norms and elementwise operations between matrix products, as functions that `torch.compile` can fuse.

Training compiles them on a GPU: one kernel instead of many.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, wraps
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Function = TypeVar("Function", bound=Callable[..., object])

_COMPILED_ON = ("cuda",)  # device types
_fusing = False  # of the process, not of a thread: backward passes, which recompute activations, have their own threads


@contextmanager
def fusing() -> Iterator[None]:
    """Compile `fusible` functions of tensors on a GPU within the context. The first call takes seconds.

    Example: `with fusing(): objective.reduce(objective(model, batch, seeds=seeds)).backward()`.
    """
    global _fusing
    before, _fusing = _fusing, True
    # All gradient functions share one code object, and so one limit on recompilations. It is raised here.
    # Without a GPU, nothing is compiled and the compiler is not imported.
    on_gpu = torch.cuda.is_available()
    try:
        with torch._dynamo.config.patch(recompile_limit=64) if on_gpu else nullcontext():
            yield
    finally:
        _fusing = before


def is_fusing() -> bool:
    """Return True within `fusing`.

    Example: `with fusing(): assert is_fusing()`.
    """
    return _fusing


def compiles_on(device: torch.device) -> bool:
    """Return True if `fusible` functions of tensors on the device are compiled now.

    Example: `with fusing(): compiles_on(model.device)`.
    """
    return _fusing and device.type in _COMPILED_ON


def start_compiler() -> None:
    """Import torch's compiler and start its processes, which takes seconds in which the caller can do other work.

    Example: `start_compiler(); load_data()`.
    """
    import_module("torch._inductor.compile_fx")
    import_module("torch._inductor.async_compile").maybe_warm_pool()


def fusible(function: Function) -> Function:
    """Mark a function of (M, …) tensors, vectors and numbers, whose first argument is a tensor.

    One compilation serves every number of tokens M.

    Example: `norm = fusible(norm)`.
    """

    @wraps(function)
    def run(*args: Any) -> object:
        if torch.compiler.is_compiling() or not compiles_on(args[0].device):
            return function(*args)
        return _Fused.apply(function, *args)

    return run  # type: ignore[return-value]


class _Fused(torch.autograd.Function):
    """A compiled function that saves its arguments alone: its compiled gradient computes the rest again."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
        ctx.function = function
        ctx.others = {number: value for number, value in enumerate(args) if not isinstance(value, Tensor)}
        ctx.save_for_backward(*(value for value in args if isinstance(value, Tensor)))
        return _compiled(function, False)(*args)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors, needed = iter(ctx.saved_tensors), ctx.needs_input_grad[1:]
        args = [ctx.others[number] if number in ctx.others else next(tensors) for number in range(len(needed))]
        wanted = tuple(number for number, is_needed in enumerate(needed) if is_needed)
        found: Any = _compiled(_gradient(ctx.function, wanted, len(grads)), False)(*grads, *args)
        of = dict(zip(wanted, found, strict=True))
        return None, *(of.get(number) for number in range(len(args)))


@cache
def _gradient(function: Callable[..., Any], wanted: tuple[int, ...], num_outputs: int) -> Callable[..., Any]:
    """Return the function of (gradients of the outputs, arguments) → gradients of the `wanted` arguments."""

    def gradient(*values: Any) -> Any:
        grads, args = values[:num_outputs], list(values[num_outputs:])

        def of_wanted(*chosen: Tensor) -> Any:
            for number, value in zip(wanted, chosen, strict=True):
                args[number] = value
            return function(*args)

        pull_back = torch.func.vjp(of_wanted, *(args[number] for number in wanted))[1]
        return pull_back(grads if num_outputs > 1 else grads[0])

    return gradient


def fused(function: Function, device: torch.device) -> Function:
    """Return the function, compiled if `device` is a GPU, where each operation would cost a launch and a pass.

    It computes without gradients. One compilation serves any size of the arguments' first dimension.

    Example: `fused(softmax_of_slice, logits.device)(logits)`.
    """
    return _compiled(function, None) if device.type in _COMPILED_ON else function  # type: ignore[return-value]


@cache
def _compiled(function: Callable[..., object], dynamic: bool | None) -> Callable[..., object]:
    # Without the first option, fusion would skip the rounding between operations, which is part of the result. The
    # second one makes sums over up to 16 values part of elementwise kernels, which read memory several times faster.
    compiled = torch.compile(
        function, dynamic=dynamic, options={"emulate_precision_casts": True, "unroll_reductions_threshold": 17}
    )

    @torch.no_grad()  # with gradients, and for inputs that require them, it would be compiled again
    def run(*args: Any) -> object:
        values = [value.detach() if isinstance(value, Tensor) else value for value in args]
        for value, given in zip(values, args, strict=True):
            if isinstance(value, Tensor) and value.dim() and not isinstance(given, nn.Parameter):
                torch._dynamo.maybe_mark_dynamic(value, 0)
        return compiled(*values)

    return run
