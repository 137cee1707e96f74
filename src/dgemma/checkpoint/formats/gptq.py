"""Integer checkpoints in the packing of GPTQ, as written by GPTQModel, AutoGPTQ and AutoRound."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from dgemma.checkpoint.formats.entry import FLOATS, INTEGERS, Contents, Entry, Expected, Settings, Stored, aliases
from dgemma.quantization.weights import IntWeight, unpack_nibbles

_REQUIRED = ("qweight", "qzeros", "scales")
_PACKINGS = ("auto_round:auto_gptq", "auto_gptq", "auto_round:gptqmodel")


def read_gptq(config: Settings, stored: Mapping[str, Stored]) -> Contents:
    """Return the weights that a GPTQ or AutoRound checkpoint stores. No weight is read."""
    if config.values["quant_method"] != "gptq":
        config.choose("packing_format", *_PACKINGS)
        config.choose("data_type", "int", absent="int")
    # The first version stores zero points minus one.
    shift = 1 if config.choose("checkpoint_format", "gptq", "gptq_v2", absent="gptq") == "gptq" else 0
    overrides = config.section("extra_config")

    def settings_of(module: str) -> Settings:
        name = next((name for name in aliases(module) if name in overrides), None)
        return config if name is None else config.override(name, overrides)

    contents = Contents(stored)
    for module, tensors in contents.coded_modules(("weight", *_REQUIRED, "g_idx")):
        _add(contents, module, settings_of(module), shift, tensors)
    plain = [module for module in contents.plain_linears() if settings_of(module).values.get("bits") in (4, 8)]
    if plain:
        contents.notes.append(f"{len(plain)} linear layers are not quantised in this checkpoint, such as {plain[0]}.")
    return contents


def _add(contents: Contents, module: str, settings: Settings, shift: int, tensors: dict[str, str]) -> None:
    bits, size = settings.choose("bits", 4, 8), settings.size("group_size", also=-1)
    symmetric = settings.choose("sym", True, False, absent=True)
    is_reordered = settings.choose("desc_act", True, False, absent=False) and size != -1
    codes = contents.shape(tensors, "qweight")
    words, num_rows = codes if len(codes) == 2 else (0, 0)
    per_word = 32 // bits
    width = words * per_word
    groups = 1 if size == -1 else width // size
    expected: Expected = {
        "qweight": (("I32",), (words, num_rows)),
        "qzeros": (("I32",), (groups, num_rows // per_word)),
        "scales": (FLOATS, (groups, num_rows)),
    }
    if is_reordered or "g_idx" in tensors:  # without it, the order of the columns is lost
        expected = {**expected, "g_idx": (INTEGERS, (width,))}
    problems = [f"unexpected {tensors['weight']}: it is also stored in codes"] if "weight" in tensors else []
    if num_rows % per_word:
        problems.append(f"unreadable {module}: {num_rows} rows do not fill words of {per_word}")
    decode, group_size = partial(_decode, bits=bits, shift=shift, symmetric=symmetric), None if size == -1 else size
    weight = Entry(shape=(num_rows, width), format=f"int{bits}", decode=decode)
    contents.add_coded(module, tensors, expected, weight, group_size=group_size, problems=problems)


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
