"""Norms and elementwise operations between matrix products, compiled by `torch.compile`: one kernel instead of many."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, wraps
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dgemma_kernels.ops.residual import kernel as residual

Function = TypeVar("Function", bound=Callable[..., object])

COMPILED_ON = ("cuda",)  # device types; kernels run there too


def runs_kernels(x: Tensor) -> bool:
    """Return True if functions of x are compiled, and outside of a compiled layer.

    Example: `runs_kernels(torch.ones(2, device="cuda"))`.
    """
    return x.device.type in COMPILED_ON and not torch.compiler.is_compiling()


def start_compiler() -> None:
    """Import torch's compiler and start its processes. They need seconds, in which the caller can do other work.

    Example: `start_compiler(); load_data()`.
    """
    with suppress(ImportError, AttributeError):  # private names; without them only time is lost
        import_module("torch._inductor.compile_fx")
        import_module("torch._inductor.async_compile").maybe_warm_pool()


class Kernels(NamedTuple):
    """The name of a function in `ops.residual`. Its gradient is the function "NAME_gradient". The module may have only
    the gradient.

    The gradient takes the gradients of the results, then the arguments. It returns the gradients of the `trained`
    arguments, and is used only if exactly these are needed.
    """

    name: str
    trained: tuple[int, ...]


def fused(function: Function, *, num_joined: int = 0, kernels: Kernels | None = None) -> Function:
    """Return the function, compiled for tensors on a GPU. Its arguments are (M, …) tensors, vectors and numbers.

    One compilation serves every number of tokens M. num_joined: the gradients of the first `num_joined` arguments are
    slices of one tensor, which `joined` returns. These arguments may be the products of one input with several weights.
    If the weights are joined too, one product gives the gradient of this input. kernels: replace the compiled function.

    Example: `gated_gelu = fused(plain(layers.gated_gelu), num_joined=2)`.
    """

    @wraps(function)
    def run(*args: Any) -> object:
        return _Fused.apply(function, num_joined, kernels, *args) if runs_kernels(args[0]) else function(*args)

    return run  # type: ignore[return-value]


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
        return (_kernel(kernels, "", args) or compiled(function, dynamic=False))(*args)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors, needed = iter(ctx.saved_tensors), ctx.needs_input_grad[3:]
        args = [ctx.others[number] if number in ctx.others else next(tensors) for number in range(len(needed))]
        wanted = tuple(number for number, is_needed in enumerate(needed) if is_needed)
        kernels = ctx.kernels if ctx.kernels is not None and ctx.kernels.trained == wanted else None
        kernel = _kernel(kernels, "_gradient", (*grads, *args))
        gradient = kernel or compiled(gradient_of(ctx.function, wanted, len(grads), ctx.num_joined), dynamic=False)
        found: Any = gradient(*grads, *args)
        of = dict(zip(wanted, found, strict=True))
        return None, None, None, *(of.get(number) for number in range(len(args)))


def _kernel(kernels: Kernels | None, suffix: str, values: Sequence[Any]) -> Callable[..., Any] | None:
    """Return the kernel for these values, or None if it does not support them, such as rows of different dtypes."""
    if kernels is None:
        return None
    rows = [value for value in values if isinstance(value, Tensor) and value.shape == values[0].shape]
    return getattr(residual, kernels.name + suffix, None) if residual.fits(*rows) else None


@cache
def gradient_of(
    function: Callable[..., Any], wanted: tuple[int, ...], num_outputs: int = 1, num_joined: int = 0
) -> Callable[..., Any]:
    """Return the function of (gradients of the outputs, arguments) → gradients of the `wanted` arguments.

    Example: `gradient_of(torch.mul, (0,))(grad, x, y)[0]` is `grad * y`.
    """
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


@cache
def compiled(function: Callable[..., Any], *, dynamic: bool | None = None) -> Callable[..., Any]:
    """Return the compiled function, which computes without gradients. One compilation serves any number of rows.

    Example: `compiled(softmax_of_slice)(logits)`.
    """
    # Without the first option, fusion would skip the rounding between operations, which is part of the result. The
    # second one makes sums over up to 16 values part of elementwise kernels, which read memory several times faster.
    options: dict[str, Any] = {"emulate_precision_casts": True, "unroll_reductions_threshold": 17}
    fast = torch.compile(function, dynamic=dynamic, options=options)

    @torch.no_grad()  # with gradients, and for inputs that require them, it would be compiled again
    def run(*args: Any) -> object:
        values = [value.detach() if isinstance(value, Tensor) else value for value in args]
        for value, argument in zip(values, args, strict=True):
            if isinstance(value, Tensor) and value.dim() and not isinstance(argument, nn.Parameter):
                torch._dynamo.maybe_mark_dynamic(value, 0)
        return fast(*values)

    return run
