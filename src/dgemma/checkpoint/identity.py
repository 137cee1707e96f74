"""The identity of weights: a short text that differs for other weights, and is the same on every device."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from dgemma.model.denoiser import Denoiser

_CHUNK = 1 << 24  # bytes at a time
_ODD = -7046029254386353131  # 2⁶⁴ divided by the golden ratio, as a signed number


def fingerprint(value: Any, *, dtype: torch.dtype | None = None) -> str:
    """Return a digest of all tensors in a denoiser, a module or a collection: names, dtypes, shapes and bits.

    Parameters and buffers count, so also the codes of quantised weights. With `dtype`, floats are rounded to it first,
    so that a model has the same identity in bfloat16 and in float32.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, item in sorted(_items(value, ""), key=itemgetter(0)):
        if isinstance(item, Tensor):
            is_code = not item.is_floating_point() or item.element_size() == 1
            kind = item.dtype if dtype is None or is_code else dtype
            digest.update(f"{name} {kind} {tuple(item.shape)} {_sums(item, kind)}\n".encode())
        else:
            digest.update(f"{name} {item!r}\n".encode())
    return digest.hexdigest()


def _items(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and plain values in `value`, with their places."""
    if isinstance(value, Tensor | str | int | float | None):
        yield name, value
    elif isinstance(value, nn.Module):
        yield from _items({**dict(value.named_parameters()), **dict(value.named_buffers())}, name)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _items(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        yield from _items(dict(enumerate(value)), name)
    elif isinstance(value, Denoiser) or (is_dataclass(value) and not isinstance(value, type)):
        yield from _items(value.__getstate__(), name)  # the content of a pickle, without graphs and buffers


@torch.no_grad()
def _sums(tensor: Tensor, dtype: torch.dtype) -> list[int]:
    """Return a sum of every chunk's bits. Each word of 64 bits has its own odd factor, so that order matters."""
    sums = []
    flat = tensor.detach().flatten()
    factors = torch.arange(min(_CHUNK, flat.numel() * dtype.itemsize + 7) // 8, device=flat.device) * _ODD | 1
    for part in flat.split(_CHUNK // dtype.itemsize):
        data = part.to(dtype).contiguous().view(torch.uint8)
        words = data.new_zeros(-(-len(data) // 8) * 8)
        words[: len(data)] = data
        words = words.view(torch.int64)
        sums.append(words.mul_(factors[: len(words)]).sum())
    return torch.stack(sums).tolist() if sums else []
