"""GGUF files of llama.cpp with the architecture "diffusion-gemma": config, names, and blocks of codes as weights.

Types whose values are code · scale + bias keep their codes. The others are dequantised by the `gguf` package.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dgemma.checkpoint.formats.entry import Contents, Entry, Stored
from dgemma.checkpoint.formats.gguf_file import GgufFile
from dgemma.checks import require
from dgemma.model.config import FULL, SLIDING
from dgemma.printing import install_command
from dgemma.quantization.weights import IntWeight, Weight, pack_nibbles

_ARCHITECTURE = "diffusion-gemma"
_FLOATS = ("F32", "F16", "BF16")
_NOT_WEIGHTS = ("I8", "I16", "I32", "I64", "F64")
_GLOBAL_NAMES = {
    "token_embd.weight": "model.decoder.embed_tokens.weight",
    "output_norm.weight": "model.decoder.norm.weight",
    "self_cond_pre_norm.weight": "model.decoder.self_conditioning.pre_norm.weight",
    "self_cond_gate.weight": "model.decoder.self_conditioning.gate_proj.weight",
    "self_cond_up.weight": "model.decoder.self_conditioning.up_proj.weight",
    "self_cond_down.weight": "model.decoder.self_conditioning.down_proj.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "ffn_gate_inp.weight": "router.proj.weight",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
    "post_ffw_norm_1.weight": "post_feedforward_layernorm_1.weight",
    "pre_ffw_norm_2.weight": "pre_feedforward_layernorm_2.weight",
    "post_ffw_norm_2.weight": "post_feedforward_layernorm_2.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
    "layer_output_scale.weight": "layer_scalar",
}
_ENCODER_SCALE = "enc_layer_output_scale.weight"
_FREQUENCIES = "rope_freqs.weight"  # read into the config, not into a weight


def find_gguf(path: str | Path) -> Path | None:
    """Return the GGUF file that a path names: a file, or the only one in a folder without safetensors; else None."""
    path = Path(os.path.expanduser(path))
    if path.suffix == ".gguf":
        return path
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        raise ValueError(f"{path} must hold one GGUF file, got {len(found)}. Name one of them: {found[0]}.")
    return found[0] if found else None


def read_gguf(file: Path) -> tuple[dict[str, Any], Contents]:
    """Return the config.json of a GGUF file, and descriptions of its tensors and weights. No weight is read."""
    opened = _open(file)
    stored = {tensor.name: Stored(file, tensor.shape, tensor.kind, tensor.num_bytes) for tensor in opened.tensors}
    contents = Contents(stored)
    for tensor in opened.tensors:
        name, kind = _published_name(tensor.name), tensor.kind
        if name is None and tensor.name != _FREQUENCIES:
            contents.problems.append(f"unexpected {tensor.name}")
        elif kind != "F32" and len(tensor.shape) == 1:
            contents.problems.append(f"unreadable {tensor.name}: stored as {kind}, not as F32")
        elif kind in _NOT_WEIGHTS:
            contents.problems.append(f"unreadable {tensor.name}: stored as {kind}, not as a float or as codes")
        elif name is not None:
            own = (kind, None) if kind in _FLOATS else (kind.lower(), partial(_dequantize, kind=kind))
            format, decode = _CODES.get(kind, own)
            entry = Entry(tensors={"weight": tensor.name}, shape=tensor.shape, format=format, decode=decode)
            contents.entries[name] = entry
    return _config(opened, stored), contents


@contextmanager
def open_gguf(file: Path, device: str) -> Iterator[Callable[[str], Tensor]]:
    """Open a GGUF file; yield a function that returns a named tensor: its floats, or its bytes (..., bytes per row)."""
    opened = _open(file)
    tensors = {tensor.name: tensor for tensor in opened.tensors}

    def read(name: str) -> Tensor:
        data = torch.from_numpy(opened.read(tensors[name])).to(device)
        return data.view(torch.bfloat16) if tensors[name].kind == "BF16" else data

    yield read


def _open(file: Path) -> GgufFile:
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise ImportError(f"GGUF files need the gguf package. Install it with: {install_command('gguf')}.") from None
    return GgufFile.open(file)


def _published_name(name: str) -> str | None:
    match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    if match is None:
        return _GLOBAL_NAMES.get(name)
    if match[2] == _ENCODER_SCALE:
        return f"model.encoder.language_model.layers.{match[1]}.layer_scalar"
    ours = _LAYER_NAMES.get(match[2])
    return None if ours is None else f"model.decoder.layers.{match[1]}.{ours}"


def _config(opened: GgufFile, stored: Mapping[str, Stored]) -> dict[str, Any]:
    """Return the config.json that the metadata describes."""
    metadata = opened.metadata

    def check(fits: bool, key: str, rule: str, found: Any) -> None:
        require(fits, f"GGUF {key}", rule, found, "Download the file of a DiffusionGemma again.")

    def value(key: str, kinds: type | tuple[type, ...], rule: str, default: Any = None) -> Any:
        found = metadata.get(key, default)
        check(isinstance(found, kinds) and not isinstance(found, bool), key, f"be {rule}", found)
        return found

    def size(key: str, default: int | None = None) -> int:
        found: int = value(f"{_ARCHITECTURE}.{key}", int, "an integer", default)
        return found

    def real(key: str, default: float | None = None) -> float:
        return float(value(f"{_ARCHITECTURE}.{key}", (int, float), "a number", default))

    architecture = metadata.get("general.architecture")
    check(architecture == _ARCHITECTURE, "general.architecture", f"be {_ARCHITECTURE!r}", architecture)
    num_tokens = stored["token_embd.weight"].shape[0] if "token_embd.weight" in stored else 0
    fits = num_tokens > 0 and len(metadata.get("tokenizer.ggml.tokens", range(num_tokens))) == num_tokens
    check(fits, "token_embd.weight", "have a row for every token", num_tokens)
    num_layers, most = size("block_count"), len(stored)
    check(1 <= num_layers <= most, "block_count", f"fit the {most} tensors stored", num_layers)  # or fill the memory
    pattern = value(f"{_ARCHITECTURE}.attention.sliding_window_pattern", np.ndarray, "a list of flags")
    sliding = [bool(flag) for flag in pattern]
    per_layer = value(f"{_ARCHITECTURE}.attention.head_count_kv", (int, np.ndarray), "one number per layer")
    kv_heads = [per_layer] * num_layers if isinstance(per_layer, int) else [int(heads) for heads in per_layer]
    pairs = set(zip(kv_heads, sliding, strict=False))
    by_kind = {kind: {heads for heads, flag in pairs if flag == kind} for kind in (True, False)}
    fits = len(sliding) == num_layers and all(len(heads) <= 1 for heads in by_kind.values())
    check(fits, "head_count_kv", f"have one number per type of layer, {sliding}", kv_heads)
    full_head = size("attention.key_length")
    check(full_head >= 1, "attention.key_length", "be at least 1", full_head)
    frequencies = [tensor for tensor in opened.tensors if tensor.name == _FREQUENCIES]
    # Pairs that do not rotate have a divisor of about 1e30.
    rotating = int((opened.read(frequencies[0]) < 1e6).sum()) if frequencies else full_head // 2
    full_rope = {"rope_type": "proportional", "rope_theta": real("rope.freq_base")}
    full_rope["partial_rotary_factor"] = 2 * rotating / full_head
    sliding_rope = {"rope_type": "default", "rope_theta": real("rope.freq_base_swa", 10_000.0)}
    tokens = {"pad_token_id": ("padding", 0), "bos_token_id": ("bos", 2), "eos_token_id": ("eos", 1)}
    text = {
        "vocab_size": num_tokens,
        "hidden_size": size("embedding_length"),
        "intermediate_size": size("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": size("attention.head_count"),
        "num_key_value_heads": next(iter(by_kind[True]), kv_heads[0]),
        "head_dim": size("attention.key_length_swa", full_head),
        "num_global_key_value_heads": next(iter(by_kind[False]), kv_heads[0]),
        "global_head_dim": full_head,
        "num_experts": size("expert_count"),
        "top_k_experts": size("expert_used_count"),
        "moe_intermediate_size": size("expert_feed_forward_length"),
        "sliding_window": size("attention.sliding_window"),
        "layer_types": [SLIDING if flag else FULL for flag in sliding],
        "max_position_embeddings": size("context_length"),
        "rope_parameters": {FULL: full_rope, SLIDING: sliding_rope},
        "rms_norm_eps": float(f"{real('attention.layer_norm_rms_epsilon'):.6g}"),
        "final_logit_softcapping": real("final_logit_softcapping"),
        **{n: value(f"tokenizer.ggml.{key}_token_id", int, "an id", d) for n, (key, d) in tokens.items()},
    }
    canvas = value("diffusion.canvas_length", int, "an integer", 256)
    return {"model_type": _ARCHITECTURE.replace("-", "_"), "canvas_length": canvas, "text_config": text}


def _dequantize(tensors: dict[str, Tensor], *, kind: str) -> Weight:
    import gguf

    data = tensors["weight"]
    values = gguf.dequantize(data.cpu().numpy(), gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(values).to(data.device)


def _split(data: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """Split rows (..., blocks · bytes) into the fields of their blocks: (..., blocks, size) each."""
    return data.unflatten(-1, (-1, sum(sizes))).split(sizes, dim=-1)


def _halves(data: Tensor) -> Tensor:
    """Return float16 numbers (..., blocks) from bytes (..., blocks, 2)."""
    return data.contiguous().view(torch.float16).squeeze(-1)


def _low_then_high(packed: Tensor) -> Tensor:
    """Return codes (..., 2 n) of bytes (..., n): all low halves, then all high halves."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _q8_0(tensors: dict[str, Tensor]) -> IntWeight:
    scale, codes = _split(tensors["weight"], 2, 32)
    return IntWeight(codes=codes.flatten(-2) ^ 128, scale=_halves(scale), bits=8)


def _q4_0(tensors: dict[str, Tensor]) -> IntWeight:
    scale, packed = _split(tensors["weight"], 2, 16)
    return IntWeight(codes=pack_nibbles(_low_then_high(packed).flatten(-2)), scale=_halves(scale))


def _q4_1(tensors: dict[str, Tensor]) -> IntWeight:
    scale, bias, packed = _split(tensors["weight"], 2, 2, 16)
    codes = pack_nibbles(_low_then_high(packed).flatten(-2))
    return IntWeight(codes=codes, scale=_halves(scale), bias=_halves(bias))


def _scales_and_biases(scale: Tensor, bias: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and biases (..., blocks * 8), float32, of the eight groups of every block of Q4_K or Q5_K.

    `packed` (..., blocks, 12) has six bits for each scale and bias. The scales of the first four groups are the low six
    bits of bytes 0 to 3. The scales of the last four have their low four bits in the low half of bytes 8 to 11, and
    their high two bits in the high two bits of bytes 0 to 3. Biases are in bytes 4 to 7 and in the high half of bytes 8
    to 11.
    """
    first, second, third = packed.split(4, dim=-1)
    scales = torch.cat((first & 63, third & 15 | (first >> 6) << 4), dim=-1)
    biases = torch.cat((second & 63, third >> 4 | (second >> 6) << 4), dim=-1)
    wide_scale, wide_bias = (_halves(half).float()[..., None] for half in (scale, bias))
    return (wide_scale * scales).flatten(-2), -(wide_bias * biases).flatten(-2)


def _q4_k(tensors: dict[str, Tensor]) -> IntWeight:
    scale, bias, packed, codes = _split(tensors["weight"], 2, 2, 12, 128)
    scales, biases = _scales_and_biases(scale, bias, packed)
    values = _low_then_high(codes.unflatten(-1, (4, 32))).flatten(-3)
    return IntWeight(codes=pack_nibbles(values), scale=scales, bias=biases)


def _q5_k(tensors: dict[str, Tensor]) -> IntWeight:
    scale, bias, packed, high, codes = _split(tensors["weight"], 2, 2, 12, 32, 128)
    scales, biases = _scales_and_biases(scale, bias, packed)
    values = _low_then_high(codes.unflatten(-1, (4, 32))).flatten(-2)  # (..., blocks, 256)
    fifth = torch.cat([high >> bit & 1 for bit in range(8)], dim=-1)
    return IntWeight(codes=(values | fifth << 4).flatten(-2), scale=scales, bias=biases, bits=8)


def _q6_k(tensors: dict[str, Tensor]) -> IntWeight:
    low, high, groups, scale = _split(tensors["weight"], 128, 64, 16, 2)
    values = _low_then_high(low.unflatten(-1, (2, 64))).flatten(-2)
    upper = torch.cat([high.unflatten(-1, (2, 32)) >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1).flatten(-2)
    scales = (_halves(scale).float()[..., None] * groups.contiguous().view(torch.int8)).flatten(-2)
    return IntWeight(
        codes=(values | upper << 4).flatten(-2),
        scale=scales,
        zero_point=torch.full(scales.shape, 32, dtype=torch.uint8, device=scales.device),
        bits=8,
    )


_CODES: dict[str, tuple[str, Callable[[dict[str, Tensor]], Weight] | None]] = {
    "Q8_0": ("int8", _q8_0),
    "Q4_0": ("int4", _q4_0),
    "Q4_1": ("int4", _q4_1),
    "Q4_K": ("int4", _q4_k),
    "Q5_K": ("int8", _q5_k),
    "Q6_K": ("int8", _q6_k),
}
