"""The identity of weights: the same on every device and in every layout, and another for any other weights."""

import copy

import pytest
import torch

import dgemma
from dgemma import train
from dgemma.checkpoint import identity
from dgemma.checkpoint.identity import fingerprint
from dgemma.checkpoint.loading import lay_out_by_column
from dgemma.quantization.rounding import Quantization
from dgemma.quantization.weights import quantized_weights

CONFIG = dgemma.presets.tiny().replace(vocab_size=384, canvas_length=8)


def tiny(seed=0, dtype=torch.float32):
    model = dgemma.DiffusionGemma(CONFIG, dtype=dtype)
    model.reset_parameters(torch.Generator().manual_seed(seed))
    return model.eval()


def quantized(folder, experts):
    tiny(dtype=torch.bfloat16).save_pretrained(folder)
    quantization = Quantization(experts=experts, dense=None, group_size=32)
    return dgemma.DiffusionGemma.from_pretrained(folder, quantization=quantization)


def test_equal_weights_have_one_identity_in_any_layout():
    model = tiny()
    other = tiny()
    lay_out_by_column(other)
    assert fingerprint(model) == fingerprint(other) == fingerprint(copy.deepcopy(model))
    assert fingerprint(model) != fingerprint(model, dtype=torch.bfloat16)
    rounded = [fingerprint(tiny().to(dtype), dtype=torch.bfloat16) for dtype in (torch.float32, torch.bfloat16)]
    assert rounded[0] == rounded[1]


@pytest.mark.parametrize("chunk", [16, 1 << 24], ids=["many chunks", "one chunk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn, torch.int64])
def test_every_bit_and_the_order_of_values_count(monkeypatch, chunk, dtype):
    monkeypatch.setattr(identity, "_CHUNK", chunk)
    bits = torch.randint(0, 100, (37 * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = set()
    for byte in range(len(bits)):
        changed = bits.clone()
        changed[byte] ^= 1
        found.add(fingerprint([changed.view(dtype)]))
    swapped = bits.view(37, -1)[[5, 1, 2, 3, 4, 0, *range(6, 37)]].flatten()
    found |= {fingerprint([swapped.view(dtype)]), fingerprint([bits.view(dtype)])}
    found |= {fingerprint([bits.view(dtype)[None]]), fingerprint([bits.view(dtype), torch.zeros(0)])}
    assert len(found) == len(bits) + 4


@pytest.mark.gpu
def test_the_device_does_not_count():
    assert fingerprint(tiny(dtype=torch.bfloat16)) == fingerprint(tiny(dtype=torch.bfloat16).cuda())


def run(model, out, **options):
    tokens = {"tokens": [200, 201], "seed": 3}
    return list(dgemma.generate_many(model, [tokens], out=out, steps=2, max_new_tokens=8, progress=False, **options))


def bump_code(model):
    _, weight = next(quantized_weights(model))
    weight.tensors()["codes"].view(-1)[100] ^= 1
    return model


CHANGES = {
    "a value in the middle": lambda folder, model: model.layers[0].mlp.up_proj.weight.data[3, 5].add_(1),
    "dtype": lambda folder, model: model.to(torch.bfloat16),
    "rows in another order": lambda folder, model: model.layers[0].mlp.up_proj.weight.data.copy_(
        model.layers[0].mlp.up_proj.weight.data.flip(0)
    ),
    "layer scalar": lambda folder, model: model.layers[1].layer_scalar.data.mul_(2),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_run_is_not_continued_with_other_weights(tmp_path, change):
    model = tiny()
    first = run(model, tmp_path / "run.jsonl")
    again = run(tiny(), tmp_path / "run.jsonl")  # the same weights
    assert torch.equal(first[0].new_tokens, again[0].new_tokens)
    change(tmp_path, model)
    with pytest.raises(ValueError, match="weights"):
        run(model, tmp_path / "run.jsonl")


def test_a_run_is_not_continued_in_another_format_or_with_other_codes(tmp_path):
    run(quantized(tmp_path / "a", "int4"), tmp_path / "run.jsonl")
    run(quantized(tmp_path / "a", "int4"), tmp_path / "run.jsonl")
    for other in (quantized(tmp_path / "a", "nvfp4"), bump_code(quantized(tmp_path / "a", "int4"))):
        with pytest.raises(ValueError, match="weights"):
            run(other, tmp_path / "run.jsonl")


def test_a_run_is_not_continued_with_another_tokenizer(tmp_path):
    run(tiny(), tmp_path / "run.jsonl", tokenizer=dgemma.ByteTokenizer())
    with pytest.raises(ValueError, match="tokenizer"):
        run(tiny(), tmp_path / "run.jsonl", tokenizer=dgemma.Tokenizer.from_pretrained("dgemma/text"))


def test_adapters_for_other_weights_are_named(tmp_path, caplog):
    model = tiny()
    train.add_lora(model, train.LoRA(rank=2))
    train.save_lora(model, tmp_path / "adapters")
    for dtype in (torch.float32, torch.bfloat16):
        train.load_lora(tiny().to(dtype), tmp_path / "adapters")
    assert not caplog.records
    train.load_lora(tiny(seed=1), tmp_path / "adapters")
    assert "were trained for other weights" in caplog.text
