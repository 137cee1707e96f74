"""Checkpoints of Apple's MLX with affine quantisation: a weight is code · scale + bias."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from dgemma.checkpoint.formats.entry import FLOATS, Contents, Entry, Settings, Stored, aliases
from dgemma.quantization.weights import IntWeight

_REQUIRED = ("weight", "scales", "biases")


def read_mlx(config: Settings, stored: Mapping[str, Stored]) -> Contents:
    """Return the weights that an MLX checkpoint stores. No weight is read.

    The config has default bits and groups. Under the name of a module it may have others, or false for a module that
    is not quantised.
    """
    contents = Contents(stored)
    for module, tensors in contents.coded_modules(_REQUIRED):
        name = next((name for name in aliases(module) if name in config), None)
        own = True if name is None else config.values[name]
        if own is False:
            contents.refuse_coded(module)
            continue
        settings = config if own is True else config.override(str(name))
        settings.choose("mode", "affine", absent="affine")
        bits, size = settings.choose("bits", 4, 8), settings.size("group_size")
        codes = contents.shape(tensors, "weight")
        *rows, words = codes or (0,)
        width = words * 32 // bits
        groups = (FLOATS, (*rows, width // size))
        expected = {"weight": (("U32",), codes), "scales": groups, "biases": groups}
        weight = Entry(shape=(*rows, width), format=f"int{bits}", decode=partial(_decode, bits=bits))
        contents.add_coded(module, tensors, expected, weight, group_size=size)
    return contents


def _decode(tensors: dict[str, Tensor], *, bits: int) -> IntWeight:
    codes = tensors["weight"].contiguous().view(torch.uint8)  # words are little-endian, so the lowest code comes first
    return IntWeight(codes=codes, scale=tensors["scales"], bias=tensors["biases"], bits=bits)
