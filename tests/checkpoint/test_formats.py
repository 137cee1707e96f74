"""Quantised checkpoints: every published format loads to the values that its files encode, or is refused."""

import itertools
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import quantized_files as files
from dgemma import DiffusionGemma, presets
from dgemma.checkpoint.formats import read_contents
from dgemma.checkpoint.formats.entry import Stored
from dgemma.checkpoint.formats.gguf import _CODES as gguf_codes
from dgemma.checkpoint.names import published_name
from dgemma.checkpoint.plan import make_plan
from dgemma.checkpoint.quantizing import quantize_checkpoint
from dgemma.checkpoint.tokenizer import ByteTokenizer
from dgemma.cli.main import main
from dgemma.quantization.rounding import Quantization
from dgemma.quantization.weights import QuantizedWeight, quantized_weights
from quantized_files import edit

EXPERTS_ONLY = (*files.NOT_QUANTIZED, "self_attn", "mlp")  # the published NVFP4 files
FORMATS = {
    "compressed int4": (files.compressed, {"format": "pack-quantized"}, "int4"),
    "compressed int4, zero points": (files.compressed, {"format": "pack-quantized", "symmetric": False}, "int4"),
    "compressed int8": (files.compressed, {"format": "int-quantized"}, "int8"),
    "compressed fp8": (files.compressed, {"format": "float-quantized"}, "fp8"),
    "compressed nvfp4": (files.compressed, {"format": "nvfp4-pack-quantized", "skipped": EXPERTS_ONLY}, "nvfp4"),
    "modelopt": (files.modelopt, {}, "nvfp4"),
    "auto-round": (files.gptq, {}, "int4"),
    "gptq, zero points": (files.gptq, {"symmetric": False, "method": "gptq"}, "int4"),
    "gptq, act order": (files.gptq, {"order": True, "method": "gptq"}, "int4"),
    "mlx": (files.mlx, {}, "int4"),
    "mlx, 8 bits": (files.mlx, {"bits": 8}, "int8"),
}


def written(tmp_path, name):
    writer, options, _ = FORMATS[name]
    return writer(tmp_path, **options)


def values_of(model):
    """All weights of a model in float64, quantised ones decoded."""
    quantized = {name: weight.decode(torch.float64) for name, weight in quantized_weights(model)}
    buffers = {f"{name}.{role}" for name in quantized for role in model.get_submodule(name).tensors()}
    plain = {name: value.double() for name, value in model.state_dict().items() if name not in buffers}
    return plain | quantized


def edit_config(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config" if "quantization_config" in config else "quantization"])
    (folder / "config.json").write_text(json.dumps(config))


def check_values(model, expected, rtol=1e-6):
    found = values_of(model)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        # The embedding is rounded to the model's dtype; other weights keep their codes.
        tolerance = 2**-8 if key == "embed_tokens.weight" else rtol
        error = (found[key] - value.double()).abs()
        assert (error <= tolerance * value.double().abs() + 1e-9).all(), key


@pytest.mark.parametrize("name", FORMATS)
def test_loaded_weights_have_the_values_that_the_files_encode(tmp_path, name):
    expected = written(tmp_path, name)
    model = DiffusionGemma.from_pretrained(tmp_path)
    check_values(model, expected)
    experts = model.layers[1].experts
    assert isinstance(experts.gate_up_proj, QuantizedWeight)
    assert experts.gate_up_proj.format == experts.down_proj.format == FORMATS[name][2]
    if name == "compressed int4":  # half a byte per weight, and a bfloat16 scale for each group of 32
        assert experts.down_proj.num_bytes == experts.down_proj.shape.numel() * (1 / 2 + 2 / files.GROUP)
    if name == "auto-round":  # its order of columns is trivial, and dropped
        assert all(weight.group_index is None for _, weight in quantized_weights(model))


@pytest.mark.slow  # the library takes seconds to import
@pytest.mark.parametrize(
    ("format", "symmetric"), [*((name, True) for name in files.SCHEMES), ("pack-quantized", False)]
)
def test_files_of_the_compressed_tensors_library_have_the_values_it_decodes(tmp_path, format, symmetric):
    pytest.importorskip("compressed_tensors")
    expected = files.compressed(tmp_path, format, symmetric=symmetric, library=True)
    # The library decodes NVFP4 in bfloat16: it rounds the scale and the product.
    rtol = 2**-7 if format == "nvfp4-pack-quantized" else 1e-6
    check_values(DiffusionGemma.from_pretrained(tmp_path), expected, rtol)


@pytest.mark.parametrize("name", ["compressed int4", "modelopt", "mlx"])
def test_a_quantised_model_predicts_as_the_plain_model_with_its_values(tmp_path, name):
    expected = written(tmp_path, name)
    model = DiffusionGemma.from_pretrained(tmp_path, dtype=torch.float32)
    plain = DiffusionGemma(files.CONFIG)
    plain.load_state_dict({key: value.float() for key, value in (expected | values_of(model)).items()})
    tokens, canvas = torch.arange(20)[None], torch.arange(32)[None]
    predictions = [m.denoise(canvas, m.encode(tokens), self_cond=torch.zeros(1, 32, 128)) for m in (model, plain)]
    torch.testing.assert_close(predictions[0].logits, predictions[1].logits, rtol=1e-4, atol=1e-4)
    assert model.num_parameters() == plain.num_parameters()
    assert model.num_parameters(active=True) == plain.num_parameters(active=True)


def test_plain_experts_may_be_stored_one_by_one(tmp_path):
    files.write(tmp_path, files.published_tensors(files.random_model()))
    check_values(DiffusionGemma.from_pretrained(tmp_path), values_of(files.random_model()))


EXPERT = "model.decoder.layers.0.experts.1.up_proj"
DAMAGES = [
    ("compressed int4", lambda t: t.pop(f"{EXPERT}.weight_scale"), f"missing {EXPERT}.weight_scale"),
    ("compressed int4", lambda t: t[f"{EXPERT}.weight_scale"].fill_(torch.nan), "scales must be finite"),
    (
        "compressed int4",
        lambda t: t.update({"model.decoder.layers.0.experts.gate_up_proj_packed": torch.zeros(1)}),
        "unexpected model.decoder.layers.0.experts.gate_up_proj_packed",
    ),
    (
        "compressed int4",
        lambda t: t.update({f"{EXPERT}.weight_scale": t[f"{EXPERT}.weight_scale"].float()}),
        "must be stored as the other experts are",
    ),
    ("gptq, act order", lambda t: t[f"{EXPERT}.g_idx"].sub_(1).neg_(), "must group its columns as the gate"),
    ("gptq, act order", lambda t: t[f"{EXPERT}.g_idx"].fill_(0), "with 32 columns in each group"),
    ("gptq, act order", lambda t: t[f"{EXPERT}.g_idx"].add_(9), "group indices must be below 2"),
    ("compressed nvfp4", lambda t: t[f"{EXPERT}.weight_global_scale"].fill_(torch.inf), "finite and above 0"),
    ("auto-round", lambda t: t[f"{EXPERT}.qzeros"].fill_(0), "qzeros must all be 8"),
]


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGES)
def test_damaged_tensors_are_named(tmp_path, name, damage, message):
    written(tmp_path, name)
    edit(tmp_path, damage)
    with pytest.raises(ValueError, match=message):
        DiffusionGemma.from_pretrained(tmp_path)


def copy_to_encoder(tensors):
    """Store the experts twice, as llm-compressor does."""
    copies = {n.replace("decoder", "encoder.language_model"): t.clone() for n, t in tensors.items() if ".experts." in n}
    tensors |= copies


@pytest.mark.parametrize("name", ["compressed int4", "compressed fp8", "modelopt"])
def test_experts_may_be_stored_twice_if_both_copies_are_equal(tmp_path, name):
    expected = written(tmp_path, name)
    edit(tmp_path, copy_to_encoder)
    check_values(DiffusionGemma.from_pretrained(tmp_path), expected)
    copy = EXPERT.replace("decoder", "encoder.language_model")
    edit(tmp_path, lambda t: t[f"{copy}.weight_scale"].view(torch.uint8).bitwise_xor_(1))
    with pytest.raises(ValueError, match=f"copies that differ from the tensor they are tied to: {copy}.weight"):
        DiffusionGemma.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["compressed fp8", "modelopt"])
def test_scales_of_a_quantised_prefix_cache_are_not_used(tmp_path, name, caplog):
    expected = written(tmp_path, name)
    attention = "model.decoder.layers.0.self_attn"
    scales = {f"{attention}.k_proj.k_scale": torch.ones(1), f"{attention}.v_scale": torch.ones(())}
    edit(tmp_path, lambda t: t.update(scales))
    check_values(DiffusionGemma.from_pretrained(tmp_path), expected)
    assert "dgemma keeps it in the model's dtype" in caplog.text


REFUSALS = [
    ("compressed int4", lambda c: c.update(quant_method="bitsandbytes"), "quant_method must be .*bitsandbytes"),
    ("compressed int4", lambda c: c.update(transform_config={"config_groups": {"u": {}}}), "transform_config"),
    (
        "compressed int4",
        lambda c: c["config_groups"]["group_0"].update(format="mxfp4-pack-quantized"),
        "format must be",
    ),
    ("compressed fp8", lambda c: c["ignore"].pop(), "missing codes of model.decoder"),
    ("compressed fp8", lambda c: c["ignore"].append("re:.*self_attn.*"), "the config does not quantise it"),
    ("modelopt", lambda c: c.update(quant_algo="W4A8_AWQ"), "quant_algo must be 'NVFP4', got 'W4A8_AWQ'"),
    ("modelopt", lambda c: c["ignore"].remove("*mlp*"), "missing codes of model.decoder.layers.0.mlp.down_proj"),
    ("auto-round", lambda c: c.update(packing_format="auto_round:auto_awq"), "packing_format must be"),
    ("compressed fp8", lambda c: c.update(ignore=["re:("]), "must be valid expressions"),
    ("compressed fp8", lambda c: c.update(ignore=[r"re:(.|.)*[!?]$"]), "must match within 1 s"),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSALS)
def test_what_cannot_run_is_refused_before_a_weight_is_read(tmp_path, monkeypatch, name, change, message):
    written(tmp_path, name)
    edit_config(tmp_path, change)
    monkeypatch.setattr("dgemma.checkpoint.loading._read_weights", None)  # a call would be a TypeError
    monkeypatch.setattr("dgemma.checkpoint.formats.entry._MOST_SECONDS", 1.0)
    with pytest.raises(ValueError, match=message):
        DiffusionGemma.from_pretrained(tmp_path)


def published_headers(kind):
    """Make headers like those of the published FP8 and NVFP4 files. The vision tower is not quantised."""
    model, stored = DiffusionGemma(presets.diffusiongemma_26b_a4b(), device="meta"), {}
    file = Path("model.safetensors")

    def add(name, dtype, *shape):
        stored[name] = Stored(file, shape, dtype, 0)

    for name, value in model.state_dict().items():
        published = published_name(name)
        module = published.removesuffix(".weight")
        quantized = kind == "fp8" and name.startswith("layers.") and name.endswith("_proj.weight")
        if ".experts." in name:
            _, rows, width = value.shape
            for expert, projection in itertools.product(range(128), ("down",) if "down" in name else ("gate", "up")):
                part = f"{module.rpartition('.')[0]}.{expert}.{projection}_proj"
                half = rows if projection == "down" else rows // 2
                if kind == "fp8":
                    add(f"{part}.weight", "F8_E4M3", half, width)
                    add(f"{part}.weight_scale", "BF16", half, 1)
                else:
                    add(f"{part}.weight", "U8", half, width // 2)
                    add(f"{part}.weight_scale", "F8_E4M3", half, width // 16)
                    add(f"{part}.weight_scale_2", "F32")
                    add(f"{part}.input_scale", "F32")
        else:
            add(published, "F8_E4M3" if quantized else "BF16", *value.shape)
            if quantized:
                add(f"{module}.weight_scale", "BF16", value.shape[0], 1)
    return model, stored


@pytest.mark.parametrize(("kind", "count"), [("fp8", 24_232), pytest.param("nvfp4", 47_067, marks=pytest.mark.slow)])
def test_every_tensor_of_the_published_files_is_consumed(kind, count):
    model, stored = published_headers(kind)
    assert len(stored) == count  # of the published files
    if kind == "fp8":
        layers = [
            f"model.{half}.layers.{i}.router.proj" for half in ("encoder.language_model", "decoder") for i in range(30)
        ]
        ignore = [*layers, *(f"model.decoder.self_conditioning.{p}_proj" for p in ("gate", "up", "down")), "lm_head"]
        ignore += ["re:.*vision.*"]
        weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights, "format": "float-quantized"}}
        config = {"quant_method": "compressed-tensors", "ignore": ignore, "config_groups": groups}
    else:
        ignore = [
            "lm_head",
            "*embed_vision*",
            "*mlp*",
            "*router*",
            "*self_attn*",
            "*self_conditioning*",
            "*vision_tower*",
        ]
        config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ignore}
    contents = read_contents({"quantization_config": config}, stored)
    plan = make_plan(model.state_dict(), contents, plain_gemma4=False)
    read = [contents.entries[name] for ours in (*plan.whole, *plan.parts) for name in plan.sources(ours)]
    consumed = {tensor for entry in read for tensor in entry.tensors.values()}
    unused = {name for name in stored if name.endswith(".input_scale")}  # of activations
    assert consumed | unused == stored.keys()
    assert len(plan.parts["layers.29.experts.gate_up_proj"]) == 256


SETTINGS = [
    Quantization(experts="int4", dense="fp8", group_size=32),
    Quantization(experts="int4", dense="int4", group_size=32, symmetric=False),
    Quantization(experts="nvfp4", dense=None),
    Quantization(experts="fp8", dense="int8"),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    files.random_model().save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_quantised_checkpoint_loads_with_the_same_codes(tmp_path, plain, settings):
    report = quantize_checkpoint(plain, tmp_path / "out", settings)
    first = DiffusionGemma.from_pretrained(plain, quantization=settings)
    again = DiffusionGemma.from_pretrained(tmp_path / "out")
    assert again.memory_report() == first.memory_report() == report
    assert {part.format for part in report.parts if part.part == "experts"} == {settings.experts}
    second = values_of(again)
    for name, value in values_of(first).items():
        torch.testing.assert_close(second[name], value, rtol=1e-6, atol=0)
    assert (tmp_path / "out" / "tokenizer_config.json").is_file()


def test_quantising_refuses_quantised_checkpoints_and_full_folders(tmp_path, plain):
    quantize_checkpoint(plain, tmp_path / "out", SETTINGS[2])
    with pytest.raises(ValueError, match="must be a new or an empty folder"):
        quantize_checkpoint(plain, tmp_path / "out", SETTINGS[2])
    with pytest.raises(ValueError, match="None for a quantised checkpoint"):
        quantize_checkpoint(tmp_path / "out", tmp_path / "twice", SETTINGS[2])


def test_formats_without_compressed_tensors_files_are_not_saved(tmp_path):
    written(tmp_path, "mlx")
    with pytest.raises(ValueError, match="has a bias or a group index, which save_pretrained cannot write"):
        DiffusionGemma.from_pretrained(tmp_path).save_pretrained(tmp_path / "out")


@pytest.mark.slow  # the library takes seconds to import
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_compressed_tensors_library_decodes_our_files_to_our_values(tmp_path, plain, settings):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils.match import match_name

    quantize_checkpoint(plain, tmp_path / "out", settings)
    published = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(published)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    grouped = {}
    for name, tensor in tensors.items():
        module, _, role = name.rpartition(".")
        grouped.setdefault(module, {})[role] = tensor
    found = {}
    for module, state in grouped.items():
        schemes = [s for s in config.config_groups.values() if any(match_name(module, target) for target in s.targets)]
        if "weight_scale" not in state:
            assert not schemes
            continue
        (scheme,) = schemes
        assert not any(match_name(module, name) for name in config.ignore)
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        found[f"{module}.weight"] = compressor.decompress(state, scheme)["weight"].double()
    ours = values_of(DiffusionGemma.from_pretrained(tmp_path / "out"))
    expected = files.our_values(found)
    assert expected
    for name, value in expected.items():
        # If scales are bfloat16, the library decodes in bfloat16. It rounds the product, and for NVFP4 the scale too.
        torch.testing.assert_close(ours[name], value, rtol=2**-7, atol=1e-9)


@pytest.mark.parametrize(("experts", "dense"), [("Q4_0", "Q8_0"), ("Q4_1", "Q5_0")])
def test_gguf_files_have_the_values_that_the_gguf_package_decodes(tmp_path, experts, dense):
    pytest.importorskip("gguf")
    expected = files.gguf(tmp_path / "model.gguf", experts=experts, dense=dense)
    model = DiffusionGemma.from_pretrained(tmp_path / "model.gguf", dtype=torch.float32)
    assert model.config.to_hf()["text_config"] == files.CONFIG.to_hf()["text_config"]
    check_values(model, expected)
    assert model.layers[0].experts.down_proj.format == "int4"
    # Q5_0 has no module here, so its weights are plain, and the report names them.
    assert bool(model.dequantized.keys() - {"embed_tokens.weight"}) == (dense == "Q5_0")
    assert "embed_tokens.weight was dequantised" in str(model.memory_report())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_blocks_of_gguf_decode_as_in_the_gguf_package(kind):
    package = pytest.importorskip("gguf")
    _, num_bytes = package.GGML_QUANT_SIZES[package.GGMLQuantizationType[kind]]
    generator = np.random.default_rng(0)
    blocks = generator.integers(0, 256, (2, 3, 2, num_bytes), dtype=np.uint8)
    # Numbers in float16 are at the start of a block, for Q6_K at the end. Random bytes could be NaN.
    for start in {"Q4_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(kind, (0,)):
        numbers = generator.normal(size=blocks.shape[:-1]).astype(np.float16)
        blocks[..., start : start + 2] = numbers[..., None].view(np.uint8)
    data = blocks.reshape(2, 3, -1)
    expected = package.dequantize(data, package.GGMLQuantizationType[kind])
    _, decode = gguf_codes[kind]
    assert torch.equal(decode({"weight": torch.from_numpy(data)}).decode(torch.float32), torch.from_numpy(expected))


def test_damaged_and_foreign_gguf_files_are_refused(tmp_path):
    package = pytest.importorskip("gguf")
    files.gguf(tmp_path / "whole.gguf")
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "whole.gguf").read_bytes()[:-5000])
    with pytest.raises(ValueError, match="not a complete GGUF file"):
        DiffusionGemma.from_pretrained(tmp_path / "cut.gguf")
    writer = package.GGUFWriter(tmp_path / "llama.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="architecture must be 'diffusion-gemma', got 'llama'"):
        DiffusionGemma.from_pretrained(tmp_path / "llama.gguf")
    with pytest.raises(ValueError, match="must hold one GGUF file, got 3"):
        DiffusionGemma.from_pretrained(tmp_path)


def patched(data, name, *, shape=None, kind=None, offset=None):
    """Change the description of a tensor of two dimensions or one."""
    at = data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
    (count,) = struct.unpack_from("<I", data, at)
    old = struct.unpack_from(f"<{count}QIQ", data, at + 4)
    new = (*(shape or old[:count]), old[-2] if kind is None else kind, old[-1] if offset is None else offset)
    return data[: at + 4] + struct.pack(f"<{count}QIQ", *new) + data[at + 4 + 8 * count + 12 :]


def with_number(data, key, value, type=4):
    at = data.index(key.encode()) + len(key)
    return data[:at] + struct.pack("<II", type, value) + data[at + 8 :]


NORM, GATE = "blk.0.attn_norm.weight", "blk.0.ffn_gate.weight"
GGUF_DAMAGES = {
    "two tensors at one offset": (lambda d: patched(d, GATE, offset=0), "without gap or overlap"),
    "a norm as float16": (lambda d: patched(d, NORM, kind=1), "without gap or overlap"),
    "a norm as int32": (lambda d: patched(d, NORM, kind=26), "attn_norm.weight: stored as I32, not as F32"),
    "an unknown type": (lambda d: patched(d, NORM, kind=999), "999 is not a valid"),
    "a shape of 2^80": (lambda d: patched(d, GATE, shape=(2**40, 2**40)), "without gap or overlap"),
    "bytes at the end": (lambda d: d + bytes(64), "its tensors must end"),
    "no pairs to rotate": (lambda d: with_number(d, "attention.key_length", 0), "key_length must be at least 1"),
    "a list of 2^40 items": (
        lambda d: b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 0, 2**40),
        "it declares 1,099,511,627,776 items",
    ),
    "2^40 tensors": (lambda d: b"GGUF" + struct.pack("<IQQ", 3, 2**40, 0), "not a complete GGUF file"),
    "a number as truth value": (lambda d: with_number(d, "attention.head_count", 1, type=7), "GGUF"),
}


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory):
    pytest.importorskip("gguf")
    file = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    files.gguf(file)
    return file.read_bytes()


@pytest.mark.parametrize(("damage", "message"), GGUF_DAMAGES.values(), ids=GGUF_DAMAGES)
def test_a_gguf_file_that_contradicts_itself_is_refused(tmp_path, gguf_bytes, damage, message):
    (tmp_path / "model.gguf").write_bytes(damage(gguf_bytes))
    with pytest.raises(ValueError, match=message):
        DiffusionGemma.from_pretrained(tmp_path / "model.gguf")


def test_the_command_line_writes_with_a_gguf_file_and_a_tokenizer(tmp_path, gguf_bytes, capsys):
    (tmp_path / "model.gguf").write_bytes(gguf_bytes)
    options = ["--steps", "2", "--max-new-tokens", "8", "--quiet"]
    command = ["generate", "-m", str(tmp_path / "model.gguf"), "<mask>", *options]
    assert main(command) != 0
    assert "is read without its tokenizer" in capsys.readouterr().err
    assert main(["generate", "-m", "no.gguf", "Once"]) != 0
    assert capsys.readouterr().err == "dgemma generate: no.gguf does not exist. Check the path.\n"
    ByteTokenizer().save_pretrained(tmp_path / "bytes")
    assert main([*command, "--tokenizer", str(tmp_path / "bytes")]) == 0
    assert capsys.readouterr().out
