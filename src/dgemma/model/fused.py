"""Norms and elementwise operations between matrix products, as functions that `torch.compile` can fuse.

Training compiles them on a GPU: one kernel instead of many.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, wraps
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Function = TypeVar("Function", bound=Callable[..., object])

_COMPILED_ON = ("cuda",)  # device types
# One value per process, not per thread: backward passes recompute activations in threads that torch starts.
_fusing = False
_package: ModuleType | None = None


@contextmanager
def fusing(package: ModuleType | None = None) -> Iterator[None]:
    """Compile `fusible` functions of tensors on a GPU within the context. The first call takes seconds.

    package: `dgemma_kernels.ops.residual`. Its kernels replace compiled functions that are marked by
    `fusible_with(kernels=...)`.

    Example: `with fusing(): objective.reduce(objective(model, batch, seeds=seeds)).backward()`.
    """
    global _fusing, _package
    before = _fusing, _package
    _fusing, _package = True, package
    # All gradient functions share one code object, and so one limit on recompilations. It is raised here.
    # Without a GPU, nothing is compiled and the compiler is not imported.
    on_gpu = torch.cuda.is_available()
    try:
        with torch._dynamo.config.patch(recompile_limit=64) if on_gpu else nullcontext():
            yield
    finally:
        _fusing, _package = before


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
    """Import torch's compiler and start its processes. They need seconds, in which the caller can do other work.

    Example: `start_compiler(); load_data()`.
    """
    with suppress(ImportError, AttributeError):  # private names; without them only time is lost
        import_module("torch._inductor.compile_fx")
        import_module("torch._inductor.async_compile").maybe_warm_pool()


def fusible(function: Function) -> Function:
    """Mark a function of (M, …) tensors, vectors and numbers, whose first argument is a tensor.

    One compilation serves every number of tokens M.

    Example: `norm = fusible(norm)`.
    """
    return fusible_with()(function)


class Kernels(NamedTuple):
    """The name of a function in the package that `fusing` gets. Its gradient is the function "NAME_gradient". The
    package may have only the gradient.

    The gradient takes the gradients of the results, then the arguments. It returns the gradients of the `trained`
    arguments, and is used only if exactly these are needed.
    """

    name: str
    trained: tuple[int, ...]


def fusible_with(*, num_joined: int = 0, kernels: Kernels | None = None) -> Callable[[Function], Function]:
    """Return `fusible` with options.

    num_joined: the gradients of the first `num_joined` arguments are slices of one tensor, which `joined` returns.
    These arguments may be the products of one input with several weights. If the weights are joined too, one product
    gives the gradient of this input. kernels: replace the compiled function on a GPU.

    Example: `gated_gelu = fusible_with(num_joined=2)(gated_gelu)`.
    """

    def mark(function: Function) -> Function:
        @wraps(function)
        def run(*args: Any) -> object:
            if torch.compiler.is_compiling() or not compiles_on(args[0].device):
                return function(*args)
            return _Fused.apply(function, num_joined, kernels, *args)

        return run  # type: ignore[return-value]

    return mark


def joined(tensors: Sequence[Tensor], dim: int) -> Tensor | None:
    """Return one tensor without a copy if these are its neighbouring slices along `dim`; otherwise None.

    Example: `joined(torch.ones(3, 8).split(4, 1), 1).shape` is (3, 8).
    """
    first, total = tensors[0], sum(tensor.shape[dim] for tensor in tensors)
    if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors):
        return None
    if dim > 0 and first.stride(dim - 1) < total * first.stride(dim):
        return None
    end = first.storage_offset()
    for tensor in tensors:
        same_memory = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        same_kind = tensor.dtype == first.dtype and tensor.stride() == first.stride()
        if not same_memory or not same_kind or tensor.storage_offset() != end:
            return None
        end += tensor.shape[dim] * tensor.stride(dim)
    return first.as_strided((*first.shape[:dim], total, *first.shape[dim + 1 :]), first.stride())


class _Fused(torch.autograd.Function):
    """A compiled function that saves only its arguments. Its compiled gradient computes the rest again."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], num_joined: int, kernels: Kernels | None, *args: Any) -> Any:
        ctx.function, ctx.num_joined, ctx.kernels = function, num_joined, kernels
        ctx.others = {number: value for number, value in enumerate(args) if not isinstance(value, Tensor)}
        ctx.save_for_backward(*(value for value in args if isinstance(value, Tensor)))
        return (_kernel(kernels, "", args) or _compiled(function, False))(*args)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors, needed = iter(ctx.saved_tensors), ctx.needs_input_grad[3:]
        args = [ctx.others[number] if number in ctx.others else next(tensors) for number in range(len(needed))]
        wanted = tuple(number for number, is_needed in enumerate(needed) if is_needed)
        kernels = ctx.kernels if ctx.kernels is not None and ctx.kernels.trained == wanted else None
        kernel = _kernel(kernels, "_gradient", (*grads, *args))
        gradient = kernel or _compiled(_gradient(ctx.function, wanted, len(grads), ctx.num_joined), False)
        found: Any = gradient(*grads, *args)
        of = dict(zip(wanted, found, strict=True))
        return None, None, None, *(of.get(number) for number in range(len(args)))


def _kernel(kernels: Kernels | None, suffix: str, values: Sequence[Any]) -> Callable[..., Any] | None:
    """Return the kernel for these values, or None if it does not support them, such as rows of different dtypes."""
    if kernels is None or _package is None or not values[0].is_cuda:
        return None
    rows = [value for value in values if isinstance(value, Tensor) and value.shape == values[0].shape]
    return getattr(_package, kernels.name + suffix, None) if _package.fits(*rows) else None


@cache
def _gradient(
    function: Callable[..., Any], wanted: tuple[int, ...], num_outputs: int, num_joined: int
) -> Callable[..., Any]:
    """Return the function of (gradients of the outputs, arguments) → gradients of the `wanted` arguments."""
    num_slices = sum(number < num_joined for number in wanted)

    def gradient(*values: Any) -> Any:
        grads, args = values[:num_outputs], list(values[num_outputs:])

        def of_wanted(*chosen: Tensor) -> Any:
            for number, value in zip(wanted, chosen, strict=True):
                args[number] = value
            return function(*args)

        pull_back = torch.func.vjp(of_wanted, *(args[number] for number in wanted))[1]
        found = pull_back(grads if num_outputs > 1 else grads[0])
        return found if num_slices < 2 else (*_in_one(found[:num_slices]), *found[num_slices:])

    return gradient


def _in_one(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors (M, …) that are slices of one tensor."""
    flat = [tensor.flatten(1) for tensor in tensors]
    parts = torch.cat(flat, 1).split([each.shape[1] for each in flat], 1)
    return [part.unflatten(1, tensor.shape[1:]) for part, tensor in zip(parts, tensors, strict=True)]


def fused(function: Function, device: torch.device) -> Function:
    """Return the function, compiled if `device` is a GPU.

    Without compilation, each operation reads and writes all values. The compiled function computes without gradients.
    One compilation serves any size of the arguments' first dimension.

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
        for value, argument in zip(values, args, strict=True):
            if isinstance(value, Tensor) and value.dim() and not isinstance(argument, nn.Parameter):
                torch._dynamo.maybe_mark_dynamic(value, 0)
        return compiled(*values)

    return run
