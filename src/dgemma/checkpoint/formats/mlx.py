"""Checkpoints of Apple's MLX with affine quantisation: a weight is code · scale + bias."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dgemma.checkpoint.formats.entry import (
    FLOATS,
    Contents,
    Entry,
    Stored,
    aliases,
    dictionary,
    modules,
    plain_entry,
    refuse,
    weight_name,
)
from dgemma.model.quantized import IntWeight

_REQUIRED = ("weight", "scales", "biases")


def read_mlx(config: Mapping[str, Any], stored: Mapping[str, Stored]) -> Contents:
    """Return the weights that an MLX checkpoint stores. No weight is read.

    The config has default bits and groups. Under the name of a module it may have others, or false for a module that
    is not quantised.

    Example: `read_mlx(published["quantization"], read_headers(folder)).entries`.
    """
    contents = Contents(entries={})
    for module, tensors in modules(stored, _REQUIRED):
        name = next((name for name in aliases(module) if name in config), None)
        if len(tensors) > 1 or "weight" not in tensors:
            if "" in tensors:
                contents.entries[module] = plain_entry(module, stored[module])
            elif name is not None and config[name] is False:
                contents.problems.append(f"unexpected {module}: stored in codes, but the config does not quantise it")
            else:
                override = {} if name is None or config[name] is True else dictionary(config, name)
                _add(contents, module, {**config, **override}, tensors, stored)
            continue
        contents.entries[weight_name(module)] = plain_entry(tensors["weight"], stored[tensors["weight"]])
    return contents


def _add(
    contents: Contents, module: str, settings: Mapping[str, Any], tensors: dict[str, str], stored: Mapping[str, Stored]
) -> None:
    bits, size, mode = settings.get("bits"), settings.get("group_size"), settings.get("mode", "affine")
    if mode != "affine":
        raise refuse("mode", f"be 'affine' for {module}", mode)
    if bits not in (4, 8):
        raise refuse("bits", f"be 4 or 8 for {module}", bits)
    if not isinstance(size, int) or size < 1:
        raise refuse("group_size", "be a number of columns", size)
    missing = [f"missing {module}.{role}" for role in _REQUIRED if role not in tensors]
    if missing:
        contents.problems.extend(missing)
        return
    codes, scale, bias = (stored[tensors[role]] for role in _REQUIRED)
    *rows, words = codes.shape
    width = words * 32 // bits
    expected = (*rows, width // size)
    if codes.dtype != "U32":
        contents.problems.append(f"unreadable {tensors['weight']}: stored as {codes.dtype}, not as U32")
    elif width % size or scale.shape != expected or bias.shape != expected:
        contents.problems.append(f"misshapen {module}.scales or biases: {scale.shape}, {bias.shape}, not {expected}")
    elif scale.dtype not in FLOATS or bias.dtype not in FLOATS:
        contents.problems.append(f"unreadable {tensors['scales']}: stored as {scale.dtype}, not as a float")
    else:
        contents.entries[weight_name(module)] = Entry(
            tensors=tensors, shape=(*rows, width), format=f"int{bits}", decode=partial(_decode, bits=bits)
        )


def _decode(tensors: dict[str, Tensor], *, bits: int) -> IntWeight:
    codes = tensors["weight"].contiguous().view(torch.uint8)  # words are little-endian, so the lowest code comes first
    return IntWeight(codes=codes, scale=tensors["scales"], bias=tensors["biases"], bits=bits)
