"""Integer checkpoints in the packing of GPTQ, as written by GPTQModel, AutoGPTQ and AutoRound."""

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
    is_linear,
    modules,
    plain_entry,
    refuse,
    weight_name,
)
from dgemma.model.quantized import IntWeight, unpack_nibbles

_REQUIRED = ("qweight", "qzeros", "scales")
_ROLES = ("weight", *_REQUIRED, "g_idx")
_PACKINGS = ("auto_round:auto_gptq", "auto_gptq", "auto_round:gptqmodel")


def read_gptq(config: Mapping[str, Any], stored: Mapping[str, Stored]) -> Contents:
    """Return the weights that a GPTQ or AutoRound checkpoint stores. No weight is read.

    Example: `read_gptq(published["quantization_config"], read_headers(folder)).entries`.
    """
    overrides = dictionary(config, "extra_config")
    if config.get("quant_method") != "gptq":
        packing = config.get("packing_format")
        if packing not in _PACKINGS:
            raise refuse("packing_format", f"be one of {', '.join(_PACKINGS)}", packing)
        if config.get("data_type", "int") != "int":
            raise refuse("data_type", "be 'int'", config.get("data_type"))
    if config.get("checkpoint_format", "gptq") not in ("gptq", "gptq_v2"):
        raise refuse("checkpoint_format", "be 'gptq' or 'gptq_v2'", config.get("checkpoint_format"))
    # The first version stores zero points minus one.
    shift = 0 if config.get("checkpoint_format") == "gptq_v2" else 1
    contents = Contents(entries={})
    unquantized = []
    for module, tensors in modules(stored, _ROLES):
        override = next((dictionary(overrides, name) for name in aliases(module) if name in overrides), {})
        settings = {**config, **override}
        if len(tensors) > 1 or "qweight" in tensors:
            _add(contents, module, settings, shift, tensors, stored)
            continue
        ((role, name),) = tensors.items()
        if role not in ("", "weight"):
            contents.problems.append(f"unexpected {name}: it belongs to no weight")
        elif is_linear(module) and settings.get("bits") in (4, 8):
            unquantized.append(module)
        contents.entries[weight_name(module) if role else name] = plain_entry(name, stored[name])
    if unquantized:
        contents.notes.append(
            f"{len(unquantized)} linear layers are not quantised in this checkpoint, such as {unquantized[0]}."
        )
    return contents


def _add(
    contents: Contents,
    module: str,
    settings: Mapping[str, Any],
    shift: int,
    tensors: dict[str, str],
    stored: Mapping[str, Stored],
) -> None:
    bits, size, symmetric = settings.get("bits"), settings.get("group_size"), settings.get("sym", True)
    if bits not in (4, 8):
        raise refuse("bits", f"be 4 or 8 for {module}", bits)
    if not isinstance(size, int) or (size < 1 and size != -1):
        raise refuse("group_size", "be a number of columns, or -1 for whole rows", size)
    missing = [f"missing {module}.{role}" for role in _REQUIRED if role not in tensors]
    if missing or "weight" in tensors:
        contents.problems.extend(missing or [f"unexpected {tensors['weight']}: it is also stored in codes"])
        return
    codes, zeros, scales = (stored[tensors[role]] for role in _REQUIRED)
    per_word = 32 // bits
    words, num_rows = codes.shape if len(codes.shape) == 2 else (0, 0)
    width = words * per_word
    groups = 1 if size == -1 else -(-width // size)
    expected = {"qweight": ("I32", codes.shape), "qzeros": ("I32", (groups, num_rows // per_word))}
    for role, header in (("qweight", codes), ("qzeros", zeros)):
        if (header.dtype, header.shape) != expected[role] or not width:
            contents.problems.append(f"misshapen {tensors[role]}: {header.dtype} {header.shape}, not {expected[role]}")
            return
    if scales.dtype not in FLOATS or scales.shape != (groups, num_rows):
        contents.problems.append(f"misshapen {tensors['scales']}: {scales.shape}, not {(groups, num_rows)}")
        return
    if size != -1 and width % size:
        contents.problems.append(f"unreadable {module}: {width} columns are no multiple of its groups of {size}")
        return
    decode = partial(_decode, bits=bits, shift=shift, symmetric=symmetric)
    used = {role: tensors[role] for role in (*_REQUIRED, "g_idx") if role in tensors}
    contents.entries[weight_name(module)] = Entry(
        tensors=used, shape=(num_rows, width), format=f"int{bits}", decode=decode
    )


def _decode(tensors: dict[str, Tensor], *, bits: int, shift: int, symmetric: bool) -> IntWeight:
    # A word of qweight (K · bits / 32, N) has neighbouring columns of the weight, the lowest first.
    codes = tensors["qweight"].T.contiguous().view(torch.uint8)
    zeros = tensors["qzeros"].contiguous().view(torch.uint8)  # (G, N · bits / 8)
    zeros = ((unpack_nibbles(zeros) if bits == 4 else zeros) + shift) & ((1 << bits) - 1)
    if symmetric and not bool((zeros == 1 << bits - 1).all()):
        raise ValueError(f"qzeros must all be {1 << bits - 1}, because sym is true. Download the file again.")
    index = tensors.get("g_idx")
    return IntWeight(
        codes=codes,
        scale=tensors["scales"].T.contiguous(),
        zero_point=None if symmetric else zeros.T.contiguous(),
        group_index=None if index is None else index.int(),
        bits=bits,
    )
