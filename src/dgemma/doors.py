"""Functions that a faster package may replace. The function here is plain PyTorch: the meaning, and the reference.

`dgemma_kernels.accelerate_training` installs its functions with `replaced`; nothing here knows that package.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def replaceable(function: Function) -> Function:
    """Let `replaced` replace this function or method, wherever it was imported.

    Example: `rms_norm = replaceable(rms_norm)`.
    """

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
