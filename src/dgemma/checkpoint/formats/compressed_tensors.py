"""Checkpoints of the compressed-tensors library (llm-compressor, vLLM): reading, and the tensors to write."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dgemma.checkpoint.formats.entry import (
    FLOATS,
    INTEGERS,
    Contents,
    Entry,
    Names,
    Settings,
    Stored,
    is_linear,
    weight_name,
)
from dgemma.quantization.weights import (
    NVFP4_GROUP,
    Float8Weight,
    IntWeight,
    NvFp4Weight,
    QuantizedWeight,
    pack_nibbles,
    unpack_nibbles,
)

# Scales of activations are for products in low precision. Here activations stay in the model's dtype.
_UNUSED = ("input_global_scale", "input_scale", "input_zero_point")
_OPTIONAL = ("weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale")
_ROLES = ("weight", "weight_packed", "weight_scale", *_OPTIONAL, *_UNUSED)
_REORDERED = (True, "group", "dynamic")  # orders of columns that need weight_g_idx


class _Format(NamedTuple):
    """A format of compressed-tensors: the settings that it allows, and its codes."""

    bits: tuple[int, ...]
    type: str
    strategies: tuple[str, ...]
    codes: str  # role of the codes
    dtype: str  # of the codes


_FORMATS = {
    "pack-quantized": _Format((4, 8), "int", ("channel", "group", "tensor"), "weight_packed", "I32"),
    "nvfp4-pack-quantized": _Format((4,), "float", ("tensor_group",), "weight_packed", "U8"),
    "float-quantized": _Format((8,), "float", ("channel", "tensor"), "weight", "F8_E4M3"),
    "int-quantized": _Format((8,), "int", ("channel", "group", "tensor"), "weight", "I8"),
}


@dataclass(frozen=True, kw_only=True)
class _ConfigGroup:
    """One entry of config_groups: its targets, and the format of their weights."""

    targets: Names
    classes: tuple[str, ...]
    format: str
    bits: int
    symmetric: bool
    reordered: bool
    group_size: int | None  # None: one scale per row, or one per matrix


def read_compressed(config: Settings, stored: Mapping[str, Stored]) -> Contents:
    """Return descriptions of the weights in a compressed-tensors checkpoint. No weight is read."""
    groups, ignore = _groups(config), Names(config.names("ignore"))

    def group_of(module: str) -> _ConfigGroup | None:
        fits = (g for g in groups if module in g.targets or ("Linear" in g.classes and is_linear(module)))
        return None if module in ignore else next(fits, None)

    contents = Contents(stored)
    for module, tensors in contents.coded_modules(_ROLES):
        group = group_of(module)
        if group is None:
            contents.refuse_coded(module)
        else:
            _add(contents, module, group, tensors)
    contents.refuse_plain(lambda module: group_of(module) is not None)
    fused = [name for name, entry in contents.entries.items() if entry.decode is None and weight_name(name) == name]
    if fused:
        contents.notes.append(f"{len(fused)} fused expert weights are not quantised in this checkpoint.")
    if config.values.get("kv_cache_scheme"):
        contents.note_cache()
    return contents


def _groups(config: Settings) -> list[_ConfigGroup]:
    for name in ("sparsity_config", "transform_config"):
        if config.values.get(name):
            raise config.refuse(name, "be empty")
    config.choose("quantization_status", "compressed", absent="compressed")
    found = config.section("config_groups")
    if not found.values:
        raise config.refuse("config_groups", "name at least one group")
    return [_group(found.section(name), config.values.get("format")) for name in found.values]


def _group(group: Settings, default_format: Any) -> _ConfigGroup:
    if "weights" not in group:
        raise group.refuse("weights", "describe quantised weights")
    weights = group.section("weights")
    format = group.choose("format", *_FORMATS, "naive-quantized", absent=default_format)
    kind = weights.choose("type", "int", "float", absent="int")
    if format == "naive-quantized":
        format = f"{kind}-quantized"
    known = _FORMATS[format]
    weights.choose("type", known.type, absent="int")
    strategy = weights.choose("strategy", *known.strategies)
    size = weights.size("group_size") if strategy in ("group", "tensor_group") else None
    if strategy == "tensor_group":
        weights.choose("group_size", NVFP4_GROUP)
    weights.choose("dynamic", False, absent=False)
    symmetries = (True, False) if kind == "int" else (True,)
    order = weights.choose("actorder", *_REORDERED, False, "weight", "static", absent=False)
    targets = group.names("targets")
    return _ConfigGroup(
        targets=Names(targets),
        classes=targets,
        format=format,
        bits=weights.choose("num_bits", *known.bits),
        symmetric=weights.choose("symmetric", *symmetries, absent=True),
        reordered=order in _REORDERED and strategy == "group",
        group_size=size,
    )


def _add(contents: Contents, module: str, group: _ConfigGroup, tensors: dict[str, str]) -> None:
    """Add the entry of a quantised module, or the problems of its tensors."""
    known, is_packed = _FORMATS[group.format], group.format == "pack-quantized"
    codes = contents.shape(tensors, known.codes)
    *rows, length = codes or (0,)
    width = length * {"pack-quantized": 32 // group.bits, "nvfp4-pack-quantized": 2}.get(group.format, 1)
    num_groups = 1 if group.group_size is None else width // group.group_size
    scales = (*rows, num_groups)
    if group.group_size is None and "weight_scale" in tensors and contents.shape(tensors, "weight_scale") in ((), (1,)):
        scales = (1,)  # one scale for the whole matrix
    zeros = (*rows[:-1], -(-(rows or [0])[-1] * group.bits // 32), num_groups) if is_packed else scales
    expected: dict[str, tuple[Collection[str], tuple[int, ...]]] = {
        known.codes: ((known.dtype,), codes),
        "weight_scale": (("F8_E4M3",) if group.format == "nvfp4-pack-quantized" else FLOATS, scales),
    }
    if is_packed:
        expected["weight_shape"] = (INTEGERS, (len(codes),))
    if group.format == "nvfp4-pack-quantized":
        expected["weight_global_scale"] = (("F32",), (*rows[:-1], 1))
    if not group.symmetric or (group.format == "int-quantized" and "weight_zero_point" in tensors):
        expected["weight_zero_point"] = (("I32",) if is_packed else ("I8",), zeros)
    if group.reordered or (is_packed and "weight_g_idx" in tensors):  # without it, the order of the columns is lost
        expected["weight_g_idx"] = (INTEGERS, (*rows[:-1], width))
    extra = [role for role in tensors if role not in (*expected, *_UNUSED)]
    problems = [f"unexpected {tensors[role]} for {group.format}" for role in extra]
    decoders: dict[str, tuple[str, Callable[[dict[str, Tensor]], QuantizedWeight]]] = {
        "pack-quantized": (f"int{group.bits}", partial(_decode_packed, bits=group.bits)),
        "nvfp4-pack-quantized": ("nvfp4", _decode_nvfp4),
        "float-quantized": ("fp8", _decode_float8),
        "int-quantized": ("int8", _decode_int8),
    }
    name, decode = decoders[group.format]
    weight = Entry(shape=(*rows, width), format=name, decode=decode)
    contents.add_coded(module, tensors, expected, weight, group_size=group.group_size, problems=problems)


def _per_row(scale: Tensor, rows: Sequence[int]) -> Tensor:
    """Return scales (..., N, 1). A single scale of a whole matrix is repeated."""
    return scale.reshape(1).expand(*rows, 1).contiguous() if scale.numel() == 1 else scale


def _decode_float8(tensors: dict[str, Tensor]) -> QuantizedWeight:
    values = tensors["weight"]
    scale = _per_row(tensors["weight_scale"], values.shape[:-1]).squeeze(-1).float()
    return Float8Weight(values=values, scale=scale)


def _decode_int8(tensors: dict[str, Tensor]) -> QuantizedWeight:
    zero = tensors.get("weight_zero_point")
    return IntWeight(
        codes=_unsigned(tensors["weight"]),
        scale=_per_row(tensors["weight_scale"], tensors["weight"].shape[:-1]),
        zero_point=None if zero is None else _unsigned(_per_row(zero, tensors["weight"].shape[:-1])),
        bits=8,
    )


def _unsigned(signed: Tensor) -> Tensor:
    """Return int8 as uint8 with 128 in the middle: the same bits with the highest one inverted."""
    return signed.to(torch.int8).contiguous().view(torch.uint8) ^ 128


def _decode_packed(tensors: dict[str, Tensor], bits: int) -> QuantizedWeight:
    packed = tensors["weight_packed"]
    codes = packed.contiguous().view(torch.uint8)  # words are little-endian, so the lowest code comes first
    shape = (*packed.shape[:-1], packed.shape[-1] * 32 // bits)
    if tuple(tensors["weight_shape"].tolist()) != shape:
        raise ValueError(f"weight_shape must be {shape}, got {tensors['weight_shape'].tolist()}. Download it again.")
    zero = tensors.get("weight_zero_point")
    index = tensors.get("weight_g_idx")
    return IntWeight(
        codes=codes,
        scale=_per_row(tensors["weight_scale"], shape[:-1]),
        zero_point=None if zero is None else _unpack_rows(zero, bits)[..., : shape[-2], :].contiguous(),
        group_index=None if index is None else index.int(),
        bits=bits,
    )


def _unpack_rows(words: Tensor, bits: int) -> Tensor:
    """Return zero points (..., N, G). Each word of (..., N · bits / 32, G) has the codes of neighbouring rows."""
    octets = words.contiguous().view(torch.uint8).unflatten(-1, (-1, 4))  # (..., W, G, 4)
    codes = unpack_nibbles(octets) if bits == 4 else octets
    return codes.transpose(-1, -2).flatten(-3, -2)


def _decode_nvfp4(tensors: dict[str, Tensor]) -> QuantizedWeight:
    codes, divisor = tensors["weight_packed"], tensors["weight_global_scale"]
    if not bool((divisor.isfinite() & (divisor > 0)).all()):
        raise ValueError("weight_global_scale must be finite and above 0. Download the file again.")
    row_scale = divisor.reciprocal().reshape(-1).repeat_interleave(codes.shape[-2]).view(codes.shape[:-1])
    return NvFp4Weight(codes=codes, scale=tensors["weight_scale"], row_scale=row_scale)


_KINDS = {  # kinds of linear layers, and the names of their modules in the files
    "experts": r"re:.*\.experts\.\d+\.(gate|up|down)_proj$",
    "attention": r"re:.*\.layers\.\d+\.self_attn\.[qkvo]_proj$",
    "dense": r"re:.*\.layers\.\d+\.mlp\.(gate|up|down)_proj$",
    "router": r"re:.*\.router\.proj$",
    "self_conditioning": r"re:.*\.self_conditioning\.(gate|up|down)_proj$",
}


def published_tensors(name: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return the tensors that store a weight, by published name. Experts are stored one by one, as published."""
    if isinstance(weight, IntWeight) and (weight.bias is not None or weight.group_index is not None):
        raise ValueError(
            f"{name} has a bias or a group index, which save_pretrained cannot write. Quantise the original model."
        )
    if len(weight.shape) == 2:
        return _module_tensors(name.removesuffix(".weight"), weight)
    experts, _, attribute = name.rpartition(".")
    rows = weight.shape[1]
    half = {"gate_proj": slice(0, rows // 2), "up_proj": slice(rows // 2, rows)}
    projections = {"down_proj": slice(0, rows)} if attribute == "down_proj" else half
    tensors: dict[str, Tensor] = {}
    for expert in range(weight.shape[0]):
        for projection, part in projections.items():
            one = weight.with_tensors({role: tensor[expert, part] for role, tensor in weight.tensors().items()})
            tensors |= _module_tensors(f"{experts}.{expert}.{projection}", one)
    return tensors


def _module_tensors(module: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return the tensors of one matrix (N, K)."""
    if isinstance(weight, Float8Weight):
        narrow = weight.scale.to(torch.bfloat16)  # as published, if it is exact
        scale = narrow if torch.equal(narrow.float(), weight.scale) else weight.scale
        tensors = {"weight": weight.values, "weight_scale": scale[:, None]}
    elif isinstance(weight, NvFp4Weight):
        if not bool((weight.row_scale == weight.row_scale[0]).all()):
            raise ValueError(f"save_pretrained cannot write {module}: its rows have several global scales.")
        tensors = {"weight_packed": weight.codes, "weight_scale": weight.scale}
        tensors["weight_global_scale"] = weight.row_scale[:1].reciprocal()
    elif isinstance(weight, IntWeight) and weight.bits == 4:
        if weight.shape[-1] % 8:
            raise ValueError(
                f"save_pretrained cannot write {module}: its {weight.shape[-1]} columns are not a multiple of 8."
            )
        tensors = {"weight_packed": weight.codes.contiguous().view(torch.int32), "weight_scale": weight.scale}
        tensors["weight_shape"] = torch.tensor(weight.shape)
        if weight.zero_point is not None:
            tensors["weight_zero_point"] = _pack_rows(weight.zero_point)
    else:
        assert isinstance(weight, IntWeight)
        tensors = {"weight": (weight.codes ^ 128).view(torch.int8), "weight_scale": weight.scale}
        if weight.zero_point is not None:
            tensors["weight_zero_point"] = (weight.zero_point ^ 128).view(torch.int8)
    return {f"{module}.{role}": tensor.contiguous() for role, tensor in tensors.items()}


def _pack_rows(codes: Tensor) -> Tensor:
    """Return words (N / 8, G) of zero points (N, G) below 16: the inverse of `_unpack_rows`."""
    by_word = codes.unflatten(0, (-1, 8)).transpose(1, 2).contiguous()  # (N / 8, G, 8)
    return pack_nibbles(by_word).flatten().view(torch.int32).view(by_word.shape[:2])


def describe_weights(weights: Mapping[str, QuantizedWeight]) -> dict[str, Any]:
    """Return the quantization_config of a checkpoint with these quantised weights. Keys of `weights` are our names."""
    settings: dict[str, tuple[str, dict[str, Any]]] = {}
    for name, weight in weights.items():
        kind = _kind_of(name)
        if settings.setdefault(kind, _settings(weight)) != _settings(weight):
            raise ValueError(
                f"save_pretrained needs one format for all weights of {kind}, got {_settings(weight)} and "
                f"{settings[kind]}."
            )
    groups: dict[str, Any] = {}
    for number, (kind, (format, arguments)) in enumerate(settings.items()):
        inputs = None
        if format in ("float-quantized", "int-quantized"):  # engines multiply in 8 bits, with one scale per token
            inputs = {"num_bits": 8, "type": arguments["type"], "strategy": "token", "dynamic": True, "symmetric": True}
        group = {"targets": [_KINDS[kind]], "weights": arguments, "input_activations": inputs}
        groups[f"group_{number}"] = {**group, "output_activations": None, "format": format}
    formats = {format for format, _ in settings.values()}
    plain = [pattern for kind, pattern in _KINDS.items() if kind not in settings]
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ["lm_head", *plain, r"re:.*vision_tower.*", r"re:.*embed_vision.*"],
        "kv_cache_scheme": None,
    }


def _kind_of(name: str) -> str:
    published = f"model.decoder.{name}"
    if ".experts." in name:
        return "experts"
    module = published.removesuffix(".weight")
    return next(kind for kind, pattern in _KINDS.items() if re.match(pattern.removeprefix("re:"), module))


def _settings(weight: QuantizedWeight) -> tuple[str, dict[str, Any]]:
    """Return the name of a weight's format, and the arguments that describe it."""
    if isinstance(weight, Float8Weight):
        format, own = "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel", "group_size": None}
    elif isinstance(weight, NvFp4Weight):
        format, own = "nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group"}
        own |= {"group_size": NVFP4_GROUP, "scale_dtype": "torch.float8_e4m3fn"}
    else:
        assert isinstance(weight, IntWeight)
        format = "pack-quantized" if weight.bits == 4 else "int-quantized"
        size = weight.group_size if weight.scale.shape[-1] > 1 or weight.bits == 4 else None
        strategy = "channel" if size is None else "group"
        own = {"num_bits": weight.bits, "type": "int", "strategy": strategy, "group_size": size}
    symmetric = not isinstance(weight, IntWeight) or weight.zero_point is None
    return format, {**own, "symmetric": symmetric, "dynamic": False}
