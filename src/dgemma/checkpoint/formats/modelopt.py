"""NVFP4 checkpoints of NVIDIA's ModelOpt."""

from collections.abc import Mapping

from torch import Tensor

from dgemma.checkpoint.formats.entry import Contents, Entry, Names, Settings, Stored
from dgemma.quantization.weights import NVFP4_GROUP, NvFp4Weight

_REQUIRED = ("weight", "weight_scale", "weight_scale_2")
_UNUSED = ("input_scale",)  # scale of activations, which stay in the model's dtype here


def read_modelopt(config: Settings, stored: Mapping[str, Stored]) -> Contents:
    """Return the weights that a ModelOpt checkpoint stores. No weight is read."""
    if "quantization" in config:  # hf_quant_config.json nests the same fields and has another name for `ignore`
        config = config.section("quantization")
    config.choose("quant_algo", "NVFP4")
    config.choose("group_size", NVFP4_GROUP, absent=NVFP4_GROUP)
    groups = config.section("config_groups")
    for name in groups.values:
        groups.section(name).section("weights").choose("group_size", NVFP4_GROUP, absent=NVFP4_GROUP)
    ignore = Names(config.names("ignore") or config.names("exclude_modules"))
    contents = Contents(stored)
    for module, tensors in contents.coded_modules((*_REQUIRED, *_UNUSED)):
        if module in ignore:
            contents.refuse_coded(module)
            continue
        codes = contents.shape(tensors, "weight")
        *rows, width = codes or (0,)
        expected = {
            "weight": (("U8",), codes),
            "weight_scale": (("F8_E4M3",), (*rows, width * 2 // NVFP4_GROUP)),
            "weight_scale_2": (("F32",), (1,)),
        }
        weight = Entry(shape=(*rows, width * 2), format="nvfp4", decode=_decode)
        contents.add_coded(module, tensors, expected, weight)
    contents.refuse_plain(lambda module: module not in ignore)
    if "kv_cache_scheme" in config or "kv_cache_quant_algo" in config:
        contents.note_cache()
    return contents


def _decode(tensors: dict[str, Tensor]) -> NvFp4Weight:
    codes = tensors["weight"]
    row_scale = tensors["weight_scale_2"].reshape(1).expand(codes.shape[:-1]).contiguous()
    return NvFp4Weight(codes=codes, scale=tensors["weight_scale"], row_scale=row_scale)
