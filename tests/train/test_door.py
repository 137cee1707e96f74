"""On a GPU, training through the door has the losses and gradients of plain PyTorch, up to rounding."""

from contextlib import nullcontext

import pytest
import torch

import dgemma
from dgemma.quantization.rounding import quantize
from dgemma.quantization.weights import set_weight
from dgemma.train import LoRA, Objective, TrainBatch, TrainConfig, add_lora, train
from dgemma_kernels import accelerate_training

LAYERS = {"num_hidden_layers": 2, "layer_types": ("sliding_attention", "full_attention")}
# Widths that all kernels support. Every token uses all experts, because rounding could change a choice.
CONFIG = dgemma.presets.tiny().replace(
    hidden_size=128, moe_intermediate_size=64, num_experts=4, top_k_experts=4, canvas_length=32, **LAYERS
)
KINDS = ("LoRA", "QLoRA", "all weights", "all weights, mixed")


def make_model(kind, dtype):
    model = dgemma.DiffusionGemma(CONFIG, dtype=torch.float64)
    model.reset_parameters(torch.Generator().manual_seed(1))
    for number, layer in enumerate(model.layers if kind == "QLoRA" else ()):
        for name in ("gate_up_proj", "down_proj"):
            weight = quantize(getattr(layer.experts, name).float(), "int4", group_size=32)
            set_weight(model, f"layers.{number}.experts.{name}", weight)
    model = model.to("cuda", dtype)
    if kind in ("LoRA", "QLoRA"):
        generator = torch.Generator().manual_seed(2)
        for weight in add_lora(model, LoRA(rank=8)):
            weight.data = (0.03 * torch.randn(weight.shape, generator=generator)).to("cuda", weight.dtype)
    model.recompute_activations = kind in ("LoRA", "QLoRA")
    return model


def rows(step, num_rows=2, device="cpu"):
    tokens = torch.randint(5, 512, (num_rows, 96), generator=torch.Generator().manual_seed(step)).to(device)
    ones = torch.ones(num_rows, dtype=torch.int64, device=device)
    return TrainBatch(tokens=tokens, prompt_len=64 * ones, length=96 * ones, spans=((64, 96),) * num_rows)


def measure(kind, dtype, fast):
    model = make_model(kind, dtype)
    objective = Objective(noise=dgemma.UniformNoise(512), canvas_len=32)

    with accelerate_training(model) if fast else nullcontext():
        with torch.autocast("cuda", torch.bfloat16, enabled=kind.endswith("mixed"), cache_enabled=False):
            terms = objective(model, rows(3, device="cuda"), seeds=torch.arange(2, device="cuda"))
        loss = objective.reduce(terms)
        loss.backward()
    return loss.item(), {
        name: weight.grad.double() for name, weight in model.named_parameters() if weight.grad is not None
    }


def distance(found, expected):
    assert found.keys() == expected.keys()
    error = sum((found[name] - expected[name]).square().sum() for name in expected)
    return (error / sum(value.square().sum() for value in expected.values())).sqrt().item()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_the_door_is_as_exact_as_plain_pytorch(kind):
    dtype = torch.float32 if kind.endswith("mixed") else torch.bfloat16
    exact_loss, exact = measure(kind.removesuffix(", mixed"), torch.float64, fast=False)
    loss, gradients = measure(kind, dtype, fast=False)
    fast_loss, fast_gradients = measure(kind, dtype, fast=True)
    assert loss == pytest.approx(exact_loss, rel=1e-2)
    assert fast_loss == pytest.approx(exact_loss, rel=1e-2)
    # Both round to bfloat16, at different places. Their errors are compared, because the tiny model amplifies rounding.
    error = distance(gradients, exact)
    assert error < 0.25
    assert distance(fast_gradients, exact) <= 2 * error


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_through_the_door_learns_as_the_plain_one(kind, tmp_path):
    """Six steps of one shape: from the third on, passes are replayed as CUDA graphs."""
    losses = {}
    for way in ("plain", "door", "door without graphs"):
        model = make_model(kind, torch.float32 if kind.endswith("mixed") else torch.bfloat16)
        config = TrainConfig(
            steps=6,
            batch_size=4,
            micro_batch_size=2,
            lr=1e-3,
            warmup=0,
            precision="mixed" if kind.endswith("mixed") else "weights",
            recompute_activations=model.recompute_activations,
            log_every=1,
            progress=False,
        )
        objective = Objective(noise=dgemma.UniformNoise(512), canvas_len=32)

        def source(step, numbers):
            return rows(step, len(numbers))

        with nullcontext() if way == "plain" else accelerate_training(model, replay=way == "door"):
            result = train(model, objective, source, config, out=tmp_path / way)
        losses[way] = result.log.column("loss")[1]
    assert losses["door"] == pytest.approx(losses["plain"], rel=2e-2)
    assert losses["door"] == pytest.approx(losses["door without graphs"], rel=2e-3)
