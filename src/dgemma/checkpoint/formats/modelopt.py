"""NVFP4 checkpoints of NVIDIA's ModelOpt."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dgemma.checkpoint.formats.entry import (
    Contents,
    Entry,
    Names,
    Stored,
    dictionary,
    is_linear,
    modules,
    plain_entry,
    refuse,
    strings,
    weight_name,
)
from dgemma.model.quantized import NVFP4_GROUP, NvFp4Weight

_REQUIRED = ("weight", "weight_scale", "weight_scale_2")
_UNUSED = ("input_scale",)  # scale of activations, which stay in the model's dtype here


def read_modelopt(config: Mapping[str, Any], stored: Mapping[str, Stored]) -> Contents:
    """Return the weights that a ModelOpt checkpoint stores. No weight is read.

    Example: `read_modelopt(published["quantization_config"], read_headers(folder)).entries`.
    """
    # hf_quant_config.json of older versions nests the same fields and has another name for `ignore`.
    config = dictionary(config, "quantization") or config
    if config.get("quant_algo") != "NVFP4":
        raise refuse("quant_algo", "be 'NVFP4'", config.get("quant_algo"))
    sizes = {config.get("group_size", NVFP4_GROUP)}
    for name in dictionary(config, "config_groups"):
        weights = dictionary(dictionary(dictionary(config, "config_groups"), name), "weights")
        sizes.add(weights.get("group_size", NVFP4_GROUP))
    if sizes != {NVFP4_GROUP}:
        raise refuse("group_size", f"be {NVFP4_GROUP}", sorted(sizes, key=str))
    ignore = Names(strings(config, "ignore") or strings(config, "exclude_modules"))
    contents = Contents(entries={})
    for module, tensors in modules(stored, (*_REQUIRED, *_UNUSED)):
        if len(tensors) > 1:
            _add(contents, module, tensors, stored, ignored=module in ignore)
            continue
        ((role, name),) = tensors.items()
        if role not in ("", "weight"):
            contents.problems.append(f"unexpected {name}: it belongs to no weight")
        elif is_linear(module) and module not in ignore:
            contents.problems.append(
                f"missing codes of {module}: stored as {stored[name].dtype}, but the config quantises it"
            )
        contents.entries[weight_name(module) if role else name] = plain_entry(name, stored[name])
    if config.get("kv_cache_scheme") or config.get("kv_cache_quant_algo"):
        contents.notes.append("The checkpoint asks for a quantised prefix cache. dgemma keeps it in the model's dtype.")
    return contents


def _add(
    contents: Contents, module: str, tensors: dict[str, str], stored: Mapping[str, Stored], *, ignored: bool
) -> None:
    missing = [f"missing {module}.{role}" for role in _REQUIRED if role not in tensors]
    if ignored or missing:
        ignored_too = [f"unexpected {module}: stored in codes, but the config does not quantise it"]
        contents.problems.extend(missing or ignored_too)
        return
    codes, scale, second = (stored[tensors[role]] for role in _REQUIRED)
    *rows, width = codes.shape
    groups = (*rows, width * 2 // NVFP4_GROUP)
    if codes.dtype != "U8":
        contents.problems.append(f"unreadable {module}.weight: stored as {codes.dtype}, not as U8")
    elif scale.dtype != "F8_E4M3" or scale.shape != groups:
        contents.problems.append(f"misshapen {module}.weight_scale: {scale.dtype} {scale.shape}, not F8_E4M3 {groups}")
    elif second.dtype != "F32" or second.shape not in ((), (1,)):
        contents.problems.append(f"misshapen {module}.weight_scale_2: {second.dtype} {second.shape}, not one F32")
    else:
        used = {role: tensors[role] for role in _REQUIRED}
        shape = (*rows, width * 2)
        contents.entries[weight_name(module)] = Entry(tensors=used, shape=shape, format="nvfp4", decode=_decode)


def _decode(tensors: dict[str, Tensor]) -> NvFp4Weight:
    codes = tensors["weight"]
    row_scale = tensors["weight_scale_2"].reshape(1).expand(codes.shape[:-1]).contiguous()
    return NvFp4Weight(codes=codes, scale=tensors["weight_scale"], row_scale=row_scale)
