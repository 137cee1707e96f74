"""Cases, limits and errors for the tests of the attention kernels for Hopper."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from dgemma_kernels.ops import configs
from dgemma_kernels.ops.attention import kernel as module
from dgemma_kernels.ops.attention import reference
from dgemma_kernels.ops.attention.parts import Inputs, KeyMask, Parts
from gluon_interpreter import Hazard
from kernel_inputs import error

HEADS = 16
SLIDING, FULL = (8, 256), (2, 512)  # key heads, head_dim
# Limits of the relative error's norm. Softmax weights, the results for each part of the keys, and the output are
# rounded. Each rounding is at most 2**-8 in bfloat16 and 2**-11 in float16. The norm of one rounding error is 0.42 of
# that. Three independent errors give 0.74 of it: 2.9e-3 and 3.6e-4. We measured 2.8e-3 for bfloat16 with several parts.
LIMITS = {torch.bfloat16: 4e-3, torch.float16: 5e-4}


def draw(
    lengths: list[int],
    num_tokens: int,
    layer: tuple[int, int],
    *,
    heads: int = HEADS,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    rotary_pairs: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw queries, keys, values and lengths. Keys and values are part of larger buffers. Free slots are NaN.

    With `rotary_pairs`, keys equal values except in the rotated columns.
    """
    generator = torch.Generator(device).manual_seed(sum(lengths) + num_tokens)
    (kv_heads, head_dim), batch = layer, len(lengths)
    capacity = max(lengths) + num_tokens + 7

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    queries = (normal(batch, num_tokens, heads, head_dim) / head_dim**0.5).to(dtype)
    keys, values = (normal(batch + 1, kv_heads, capacity + 9, head_dim).to(dtype)[1:, :, :capacity] for _ in range(2))
    for row, length in enumerate(lengths):
        for cache in (keys, values):
            cache[row, :, length + num_tokens :] = torch.nan
    if rotary_pairs is not None:
        halves = (cache.unflatten(-1, (2, head_dim // 2))[..., rotary_pairs:] for cache in (keys, values))
        next(halves).copy_(next(halves))
    return queries, keys, values, torch.tensor(lengths, device=device)


def exact(queries: Tensor, keys: Tensor, values: Tensor, length: Tensor, **mode: int | bool) -> Tensor:
    return reference.attention(queries.double(), keys.double(), values.double(), length, **mode)


def add_parts(partial: Tensor, log_weight: Tensor) -> Tensor:
    """Add the results for parts of the keys, (splits, B, T, N, H), in float64."""
    if partial.shape[0] == 1:
        return partial[0]
    weight = (log_weight.double() - log_weight.amax(0)).exp2().unsqueeze(-1)  # (splits, B, T, N, 1)
    return torch.where(weight > 0, partial * weight, 0).sum(0) / weight.sum(0)


def interpret(kernel: Any, case: tuple[Tensor, ...], *, num_splits: int = 1, **options: Any) -> Tensor:
    """Run a kernel's source on the CPU, and add its parts in float64: (B, T, N, H)."""
    queries = case[0]
    partial = torch.full((num_splits, *queries.shape), torch.nan, dtype=queries.dtype)
    log_weight = torch.full((num_splits, *queries.shape[:3]), torch.nan)
    inputs, part = Inputs(*case, options.pop("position", case[3])), options.pop("part", None)
    kernel.attend(inputs, Parts(partial, log_weight), KeyMask(**options), *(() if part is None else (part,)))
    return add_parts(partial, log_weight)


def check(case: tuple[Tensor, ...], *, num_splits: int | None, rotary_pairs: int | None = None, **mode: Any) -> None:
    got = module.attention(*case, **mode, kernel="hopper", num_splits=num_splits, rotary_pairs=rotary_pairs)
    assert error(got, exact(*case, **mode)) < LIMITS[got.dtype]


def check_float8(case: tuple[Tensor, ...], **options: Any) -> None:
    """The float8 result is the plain one in units of one scale, rounded."""
    plain, got = (module.attention(*case, **options, num_splits=1, float8=float8) for float8 in (False, True))
    unit = 1 / 16  # 448 units are 28, and values are at most 16 or 22.6
    assert got.scale.tolist() == [unit] * (plain.shape[0] * plain.shape[1])
    assert torch.equal(got.values.float(), (plain.float() / unit).to(torch.float8_e4m3fn).float().view(got.shape))


def assert_detected(run: Callable[[], Tensor], found: str | None, want: Tensor, limit: float) -> None:
    """A mistake in a kernel must raise an error that matches `found`, or if that is None give a wrong result."""
    if found:
        with pytest.raises((Hazard, ValueError), match=found):
            run()
    else:
        assert not error(run(), want) < limit


def pretend_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_hopper", lambda device: True)
    monkeypatch.setattr(configs, "GLUON_RAN_WITH", (triton.__version__,))


# Errors of the interpreter.
UNSEEN, TAKEN = "reads shared memory without having waited", "overwrites shared memory"
HANGS = r"deadlock: .* waits for barrier \d of \d, which is in phase \d"

is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
native = pytest.mark.skipif(not is_hopper, reason="compiled Gluon needs a Hopper GPU")
