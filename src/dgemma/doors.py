"""Functions that a faster package may replace, and weights that training replaces for a while.

A replaceable function is plain PyTorch: the meaning, and the reference.
`dgemma_kernels.accelerate_training` installs its functions with `replaced`; nothing here knows that package.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

from torch import Tensor, nn

Function = TypeVar("Function", bound=Callable[..., Any])


def replaceable(function: Function) -> Function:
    """Let `replaced` replace this function or method, wherever it was imported."""

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        return call.current(*args, **options)  # type: ignore[attr-defined]

    call.current = function  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def plain(function: Function) -> Function:
    """Return a replaceable function as it is written in this package.

    Example: `torch.testing.assert_close(fast_rms_norm(x, weight, eps), plain(rms_norm)(x, weight, eps))`.
    """
    return function.__wrapped__  # type: ignore[attr-defined]


@contextmanager
def replaced(table: Mapping[Callable[..., Any], Callable[..., Any]]) -> Iterator[None]:
    """Replace functions within the context, in all threads: backward passes recompute activations in others.

    Example: `with replaced({rms_norm: fast_rms_norm}): ...`.
    """
    before = {function: function.current for function in table}  # type: ignore[attr-defined]
    try:
        for function, faster in table.items():
            function.current = faster  # type: ignore[attr-defined]
        yield
    finally:
        for function, earlier in before.items():
            function.current = earlier  # type: ignore[attr-defined]


@contextmanager
def replace_weights(places: Sequence[tuple[nn.Module, str, Tensor]]) -> Iterator[None]:
    """Replace parameters, each given by its module and name, by computed tensors within the context."""
    # `setattr` refuses a tensor that is not a Parameter, and a Parameter would have no gradient function. With
    # `torch.func.functional_call`, the replacement would last for only one call of one module.
    parameters = [getattr(module, name) for module, name, _ in places]
    for module, name, weight in places:
        module._parameters[name] = weight  # type: ignore[assignment]
    try:
        yield
    finally:
        for (module, name, _), parameter in zip(places, parameters, strict=True):
            module._parameters[name] = parameter
