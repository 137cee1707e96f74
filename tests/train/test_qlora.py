"""Adapters over quantised weights: gradients, training, resuming and merging."""

import copy

import pytest
import torch

import dgemma
import next_token
from dgemma.quantization.rounding import Quantization
from dgemma.quantization.weights import QuantizedWeight, frozen_tensors, quantized_weights, set_weight
from dgemma.train import Objective, TrainConfig, train
from dgemma.train.lora import LoRA, add_lora, is_adapted, merge_lora

QUANTIZATION = Quantization(experts="int4", dense="fp8", group_size=32)


def quantized_model(quantization=QUANTIZATION, dtype=torch.float32):
    model = dgemma.DiffusionGemma(
        dgemma.presets.tiny().replace(num_experts=4, vocab_size=next_token.VOCAB), dtype=dtype
    )
    model.reset_parameters(torch.Generator().manual_seed(1))
    for name, weight in model.state_dict().items():
        rounded = quantization.apply(name, weight)
        if isinstance(rounded, QuantizedWeight):
            set_weight(model, name, rounded)
    return model


def dequantized(model):
    plain = copy.deepcopy(model)
    for name, weight in list(quantized_weights(plain)):
        set_weight(plain, name, weight.decode(plain.dtype))
    return plain


def stir(model):
    generator = torch.Generator().manual_seed(2)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = torch.randn(weight.shape, generator=generator).to(weight.dtype) * 0.1
    return model


def logits(model):
    tokens = torch.arange(24).reshape(2, 12) % next_token.VOCAB
    return model.denoise(tokens[:, :8], model.encode(tokens)).logits


@pytest.mark.parametrize(("experts", "recompute"), [("int4", True), ("nvfp4", False)])
def test_gradients_equal_those_over_the_dequantised_weights(experts, recompute):
    model = quantized_model(Quantization(experts=experts, dense="fp8", group_size=32))
    gradients = []
    for one in (model, dequantized(model)):
        add_lora(one, LoRA(rank=2))
        stir(one)
        one.recompute_activations = recompute
        logits(one).square().mean().backward()
        gradients.append({name: p.grad for name, p in one.named_parameters() if p.requires_grad})
    ours, plain = gradients
    assert ours.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-7)


def test_training_changes_only_adapters_and_saves_no_codes(tmp_path):
    model = quantized_model()
    objective = Objective(noise=dgemma.UniformNoise(next_token.VOCAB), canvas_len=4)
    config = TrainConfig(steps=2, batch_size=2, lr=1e-2, warmup=0, precision="weights")
    with pytest.raises(ValueError, match="quantised ones, which cannot be trained"):
        train(model, objective, next_token.counting, config, out=tmp_path)
    before = {name: tensor.clone() for name, tensor in frozen_tensors(model).items() if ".codes" in name}
    add_lora(model, LoRA(rank=2))
    result = train(model, objective, next_token.counting, config, out=tmp_path)
    after = frozen_tensors(model)
    assert before
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    stored = sum(file.stat().st_size for file in result.checkpoint.rglob("*") if file.is_file())
    adapters = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert stored < 4 * adapters + 50_000  # weights, two moments, and settings


def test_merging_says_what_it_rounds():
    model = quantized_model()
    add_lora(model, LoRA(rank=2))
    stir(model)
    expected = logits(model)
    with pytest.raises(ValueError, match="must be 'dequantize' or 'requantize'"):
        merge_lora(model)
    rounded = copy.deepcopy(model)
    assert max(merge_lora(model, quantized="dequantize").values()) == 0.0  # in float32 nothing is lost
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)
    assert not any(quantized_weights(model))

    errors = merge_lora(rounded, quantized="requantize")
    assert not is_adapted(rounded)
    assert {weight.format for _, weight in quantized_weights(rounded)} == {"int4", "fp8"}
    assert errors.keys() == dict(quantized_weights(rounded)).keys()
    # Relative errors of normally distributed weights: 2.6 % for e4m3, about 9 % for int4 in groups of 32.
    assert all(0.01 < error < (0.12 if "experts" in name else 0.04) for name, error in errors.items())
