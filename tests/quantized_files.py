"""Tiny checkpoints with the tensor names, dtypes and layouts of published quantised files.

Each writer returns the values that its files encode, by our names. Codes and scales are random. They are packed and
decoded here, number by number, from the descriptions of the formats.
"""

import json

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from dgemma import DiffusionGemma, presets

CONFIG = presets.tiny().replace(
    vocab_size=128,
    num_hidden_layers=2,
    layer_types=("sliding_attention", "full_attention"),
    num_experts=2,
    vision_config=None,
)
GROUP = 32
NOT_QUANTIZED = ("router", "self_conditioning", "embed_tokens")


def random_model(config=CONFIG):
    model = DiffusionGemma(config, dtype=torch.bfloat16)
    model.reset_parameters(torch.Generator().manual_seed(0))
    return model


def edit(folder, change):
    """Rewrite the single weight file after `change` has edited its tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def published_tensors(model, *, fused=False):
    """The tensors of a model by published name; experts one by one unless `fused`."""
    tensors = {}
    for name, value in model.state_dict().items():
        value = value.clone()
        layer = name.rpartition(".")[0]
        if name.endswith("causal_layer_scalar"):
            tensors[f"model.encoder.language_model.{layer}.layer_scalar"] = value
        elif fused or ".experts." not in name:
            tensors[f"model.decoder.{name}"] = value
        else:
            for expert, matrix in enumerate(value):
                parts = {"down_proj": matrix} if name.endswith("down_proj") else {}
                if not parts:
                    parts["gate_proj"], parts["up_proj"] = matrix.chunk(2)
                tensors |= {f"model.decoder.{layer}.{expert}.{p}.weight": m.contiguous() for p, m in parts.items()}
    return tensors


def our_values(tensors):
    """The values of published tensors by our names; experts are joined again."""
    values, experts = {}, {}
    for name, value in tensors.items():
        if "encoder.language_model" in name:
            values[name.removeprefix("model.encoder.language_model.").replace("layer_s", "causal_layer_s")] = value
            continue
        ours = name.removeprefix("model.decoder.")
        if ".experts." in ours and ours.endswith(".weight"):
            layer, _, rest = ours.partition(".experts.")
            expert, projection, _ = rest.split(".")
            experts.setdefault(f"{layer}.experts", {})[int(expert), projection] = value
        else:
            values[ours] = value
    for layer, parts in experts.items():
        count = 1 + max(expert for expert, _ in parts)
        halves = [torch.cat((parts[e, "gate_proj"], parts[e, "up_proj"])) for e in range(count)]
        values[f"{layer}.gate_up_proj"] = torch.stack(halves)
        values[f"{layer}.down_proj"] = torch.stack([parts[e, "down_proj"] for e in range(count)])
    return values


def is_quantized(name, skipped=NOT_QUANTIZED):
    return name.endswith("_proj.weight") and not any(part in name for part in skipped)


def write(folder, tensors, **config):
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**CONFIG.to_hf(), "dtype": "bfloat16", **config}))


E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
SCHEMES = {  # formats of compressed-tensors, and the arguments of their weights
    "pack-quantized": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP},
    "int-quantized": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "float-quantized": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "nvfp4-pack-quantized": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
}


def compressed(folder, format, *, symmetric=True, skipped=NOT_QUANTIZED, library=False):
    """Files of llm-compressor; with `library`, written and decoded by the compressed-tensors package itself."""
    generator = np.random.default_rng(0)
    files, values, ignore = {}, {}, ["lm_head"]
    encode = _library_encoder(format, symmetric) if library else _encode
    for name, value in published_tensors(random_model()).items():
        module = name.removesuffix(".weight")
        if is_quantized(name, skipped):
            stored, values[name] = encode(format, value.float(), symmetric, generator)
            files |= {f"{module}.{role}": tensor.contiguous() for role, tensor in stored.items()}
        else:
            files[name] = values[name] = value
            ignore += [module] if name.endswith("proj.weight") else []
    weights = {**SCHEMES[format], "symmetric": symmetric, "dynamic": False}
    config = {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "ignore": ignore,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "format": format}},
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
    }
    write(folder, files, quantization_config=config)
    return our_values(values)


def _encode(format, value, symmetric, generator):
    """Random codes and scales of one matrix, and their values by definition."""
    rows, width = value.shape
    if format == "pack-quantized":
        codes, shape = generator.integers(0, 16, (rows, width)), (rows, width // GROUP)
        zeros = np.full(shape, 8) if symmetric else generator.integers(0, 16, shape)
        scale = torch.tensor(generator.uniform(1e-3, 1e-2, shape), dtype=torch.bfloat16)
        shifts = 4 * np.arange(8)
        stored = {"weight_packed": _words((codes.reshape(rows, -1, 8) << shifts).sum(-1)), "weight_scale": scale}
        stored["weight_shape"] = torch.tensor([rows, width])
        if not symmetric:
            joined = (zeros.reshape(-1, 8, shape[1]) << shifts[:, None]).sum(1)
            stored["weight_zero_point"] = _words(joined)
        wide = np.repeat(scale.double().numpy(), GROUP, axis=1)
        return stored, torch.tensor((codes - np.repeat(zeros, GROUP, axis=1)) * wide)
    if format == "nvfp4-pack-quantized":
        packed, scale, values = _nvfp4(generator, rows, width)
        divisor = torch.tensor([generator.uniform(1e4, 1e5)], dtype=torch.float32)
        stored = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": divisor}
        stored["input_global_scale"] = torch.tensor([384.0])  # as published, for activations in four bits
        return stored, torch.tensor(values / float(divisor))
    scale = torch.tensor(generator.uniform(1e-5, 1e-4, (rows, 1)), dtype=torch.bfloat16)
    if format == "int-quantized":
        codes = torch.tensor(generator.integers(-128, 128, (rows, width)), dtype=torch.int8)
    else:
        codes = torch.tensor(generator.uniform(-448, 448, (rows, width))).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.double() * scale.double()


def _library_encoder(format, symmetric):
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights = QuantizationArgs(**SCHEMES[format], symmetric=symmetric)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, format=format)
    compressor = BaseCompressor.get_value_from_registry(format)

    def encode(format, value, symmetric, generator):
        largest = {"pack-quantized": 7, "int-quantized": 127, "float-quantized": 448, "nvfp4-pack-quantized": 6}[format]
        groups = value.unflatten(-1, (-1, weights.group_size or value.shape[-1]))
        scale = groups.abs().amax(-1) / largest
        state = {"weight": value, "weight_scale": scale}
        if format == "nvfp4-pack-quantized":
            state["weight_global_scale"] = (448 * 6 / value.abs().max()).reshape(1)
            state["weight_scale"] = (scale * state["weight_global_scale"]).to(torch.float8_e4m3fn).float()
        if not symmetric:
            state["weight_zero_point"] = torch.tensor(generator.integers(-8, 8, scale.shape), dtype=torch.int8)
        stored = compressor.compress(dict(state), scheme)
        return stored, compressor.decompress(dict(stored), scheme)["weight"]

    return encode


def _nvfp4(generator, rows, width):
    """Random packed codes and scales of groups of 16, and the codes' values times these scales."""
    codes = generator.integers(0, 16, (rows, width))
    scales = torch.tensor(generator.uniform(0.5, 300, (rows, width // 16))).to(torch.float8_e4m3fn)
    packed = torch.tensor(codes[:, 0::2] + 16 * codes[:, 1::2], dtype=torch.uint8)
    return packed, scales, np.take(E2M1, codes) * np.repeat(scales.double().numpy(), 16, axis=1)


def _words(unsigned):
    return torch.tensor(unsigned.astype(np.uint32).view(np.int32))


def modelopt(folder):
    """Files of NVIDIA's ModelOpt: NVFP4 experts, everything else plain."""
    generator = np.random.default_rng(0)
    files, values = {}, {}
    for name, value in published_tensors(random_model()).items():
        if ".experts." not in name:
            files[name] = values[name] = value
            continue
        module, (packed, scales, scaled) = name.removesuffix(".weight"), _nvfp4(generator, *value.shape)
        second = torch.tensor(generator.uniform(1e-5, 1e-4), dtype=torch.float32)
        files[f"{module}.weight"], files[f"{module}.weight_scale"] = packed, scales
        files[f"{module}.weight_scale_2"], files[f"{module}.input_scale"] = second, torch.tensor(0.01)
        values[name] = torch.tensor(scaled * float(second))
    patterns = ["*embed_vision*", "*mlp*", "*router*", "*self_attn*", "*self_conditioning*", "*vision_tower*"]
    four_bits = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    config = {
        "config_groups": {"group_0": {"input_activations": four_bits, "weights": four_bits, "targets": ["Linear"]}},
        "ignore": ["lm_head", *patterns],
        "quant_algo": "NVFP4",
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "producer": {"name": "modelopt", "version": "0.45.0"},
        "quant_method": "modelopt",
    }
    write(folder, files, quantization_config=config)
    return our_values(values)


def gptq(folder, *, symmetric=True, order=False, method="auto-round"):
    """Files in the packing of GPTQ: words join eight neighbouring inputs; zero points are stored minus one."""
    generator = np.random.default_rng(0)
    files, values = {}, {}
    for name, value in published_tensors(random_model()).items():
        if not is_quantized(name):
            files[name] = values[name] = value
            continue
        rows, width = value.shape
        module, num_groups = name.removesuffix(".weight"), width // GROUP
        codes = generator.integers(0, 16, (width, rows))
        zeros = generator.integers(1, 16, (num_groups, rows)) if not symmetric else np.full((num_groups, rows), 8)
        scales = torch.tensor(generator.uniform(1e-3, 1e-2, (num_groups, rows)), dtype=torch.float16)
        # Gate and up have the same input, so that GPTQ sorts their columns alike.
        mixed = np.random.default_rng(width).permutation(width) // GROUP
        index = mixed if order else np.arange(width) // GROUP
        shifts = 4 * np.arange(8)
        words = (codes.reshape(-1, 8, rows) << shifts[:, None]).sum(1)
        zero_words = ((zeros - 1).reshape(num_groups, -1, 8) << shifts).sum(-1)
        files[f"{module}.qweight"] = _words(words)
        files[f"{module}.qzeros"] = _words(zero_words)
        files[f"{module}.scales"], files[f"{module}.g_idx"] = scales, torch.tensor(index, dtype=torch.int32)
        values[name] = torch.tensor((codes - zeros[index]) * scales.double().numpy()[index]).T
    config = {"quant_method": method, "bits": 4, "group_size": GROUP, "sym": symmetric, "desc_act": order}
    if method == "auto-round":
        config |= {"packing_format": "auto_round:auto_gptq", "data_type": "int"}
        config["extra_config"] = {
            name.removesuffix(".weight"): {"bits": 16, "data_type": "float"}
            for name in values
            if name.endswith("proj.weight") and not is_quantized(name)
        }
    write(folder, files, quantization_config=config)
    return our_values(values)


def mlx(folder, *, bits=4):
    """Files of MLX: experts are fused and have few bits; the rest of the matrices, with the embedding, has 8 bits."""
    generator = np.random.default_rng(0)
    files, values, overrides = {}, {}, {}
    for name, value in published_tensors(random_model(), fused=True).items():
        fused = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        if not fused and not name.endswith(("proj.weight", "embed_tokens.weight")):
            files[name] = values[name] = value
            continue
        module = name.removesuffix(".weight")
        width, num_bits = value.shape[-1], bits if fused else 8
        if num_bits != bits:
            overrides[module] = {"group_size": GROUP, "bits": 8}
        codes = generator.integers(0, 1 << num_bits, value.shape)
        shape = (*value.shape[:-1], width // GROUP)
        scales = torch.tensor(generator.uniform(1e-4, 1e-3, shape), dtype=torch.bfloat16)
        biases = torch.tensor(generator.uniform(-1e-2, 0, shape), dtype=torch.bfloat16)
        per_word = 32 // num_bits
        words = (codes.reshape(*value.shape[:-1], -1, per_word) << (num_bits * np.arange(per_word))).sum(-1)
        files[f"{module}.weight"] = torch.tensor(words.astype(np.uint32))
        files[f"{module}.scales"], files[f"{module}.biases"] = scales, biases
        wide_scale, wide_bias = (np.repeat(t.double().numpy(), GROUP, axis=-1) for t in (scales, biases))
        values[name] = torch.tensor(codes * wide_scale + wide_bias)
    write(folder, files, quantization={"group_size": GROUP, "bits": bits, **overrides})
    return our_values(values)


GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "router.proj": "ffn_gate_inp",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf(file, *, experts="Q4_0", dense="Q8_0"):
    """A GGUF file with the names and the metadata of llama.cpp, quantised and decoded by the gguf package."""
    import gguf as package

    writer = package.GGUFWriter(file, "diffusion-gemma")
    c, values = CONFIG, {}
    for key, number in {
        "block_count": c.num_hidden_layers,
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "expert_count": c.num_experts,
        "expert_used_count": c.top_k_experts,
        "expert_feed_forward_length": c.moe_intermediate_size,
        "attention.key_length": c.global_head_dim,
        "attention.key_length_swa": c.head_dim,
        "attention.sliding_window": c.sliding_window,
    }.items():
        writer.add_uint32(f"diffusion-gemma.{key}", number)
    for key, number in {
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        "final_logit_softcapping": c.final_logit_softcapping,
    }.items():
        writer.add_float32(f"diffusion-gemma.{key}", number)
    sliding = [kind == "sliding_attention" for kind in c.layer_types]
    heads = [c.num_key_value_heads if flag else c.num_global_key_value_heads for flag in sliding]
    writer.add_array("diffusion-gemma.attention.head_count_kv", heads)
    writer.add_array("diffusion-gemma.attention.sliding_window_pattern", sliding)
    writer.add_uint32("diffusion.canvas_length", c.canvas_length)
    pairs = c.global_head_dim // 2
    frequencies = np.where(np.arange(pairs) < c.layer_shape(1).rotary_pairs, 1.0, 1e30).astype(np.float32)
    writer.add_tensor("rope_freqs.weight", frequencies)
    for name, value in random_model().state_dict().items():
        stored, wide = _gguf_name(name), value.float().numpy()
        kind = experts if ".experts." in name else dense
        plain = value.dim() == 1 or "router" in name
        if plain:
            writer.add_tensor(stored, wide)
            values[name] = value
            continue
        kind = package.GGMLQuantizationType[kind]
        codes = package.quantize(wide, kind)
        writer.add_tensor(stored, codes, raw_dtype=kind)
        values[name] = torch.tensor(package.dequantize(codes, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def _gguf_name(name):
    special = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}
    if name in special:
        return special[name]
    if name.startswith("self_conditioning."):
        part = name.removeprefix("self_conditioning.").removesuffix("_proj.weight").removesuffix(".weight")
        return f"self_cond_{part}.weight"
    _, layer, rest = name.split(".", 2)
    fixed = {
        "layer_scalar": "layer_output_scale.weight",
        "causal_layer_scalar": "enc_layer_output_scale.weight",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "experts.gate_up_proj": "ffn_gate_up_exps.weight",
        "experts.down_proj": "ffn_down_exps.weight",
    }
    return f"blk.{layer}.{fixed.get(rest) or GGUF_NAMES[rest.removesuffix('.weight')] + '.weight'}"
