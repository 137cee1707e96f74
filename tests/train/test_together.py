"""The joint pass over text and canvases has the losses and the gradients of separate passes."""

import pytest
import torch

import dgemma
from dgemma.quantization.rounding import quantize
from dgemma.quantization.weights import set_weight
from dgemma.train import LoRA, Objective, TrainBatch, add_lora
from dgemma_kernels import accelerate_training
from dgemma_kernels.training.together import TogetherPass, can_run_together


def adapted_model(dtype=torch.float64, *, quantized=False, **config_changes):
    config = dgemma.presets.tiny().replace(sliding_window=16, num_experts=4)  # a window shorter than the text
    config = config.replace(**config_changes)
    model = dgemma.DiffusionGemma(config, dtype=dtype)
    model.reset_parameters(torch.Generator().manual_seed(1))
    for layer in model.layers:
        layer.layer_scalar.fill_(0.7)
        layer.causal_layer_scalar.fill_(0.9)
    if quantized:
        for number, layer in enumerate(model.layers):
            set_weight(
                model, f"layers.{number}.experts.down_proj", quantize(layer.experts.down_proj, "int4", group_size=32)
            )
    trained = add_lora(model, LoRA(rank=8))
    generator = torch.Generator().manual_seed(2)
    for weight in trained:
        weight.data = 0.03 * torch.randn(weight.shape, generator=generator).to(weight.dtype)
    model.recompute_activations = True
    return model, trained


def rows(*, packed=False):
    generator = torch.Generator().manual_seed(3)
    documents = (torch.arange(60) >= 30).long().expand(2, -1) if packed else None
    frozen = (torch.arange(60) < 40).expand(2, -1) if packed else None  # whole canvases, which are not denoised
    return TrainBatch(
        tokens=torch.randint(5, 512, (2, 60), generator=generator),
        prompt_len=torch.tensor([24, 20]),
        length=torch.tensor([60, 48]),
        documents=documents,
        frozen=frozen,
    )


def loss_and_gradients(objective, model, trained, batch):
    loss = objective.reduce(objective(model, batch, seeds=torch.arange(2, device=model.device)))
    return loss.detach(), torch.autograd.grad(loss, trained)


def distance(found, expected):
    """Return the error of gradients relative to the norm of the expected ones."""
    error = sum((ours - theirs).square().sum() for ours, theirs in zip(found, expected, strict=True))
    return (error / sum(theirs.square().sum() for theirs in expected)).sqrt()


# With few layers, all experts and small adapters, rounding to bfloat16 changes the gradients by a few percent only.
STABLE = {"num_hidden_layers": 2, "layer_types": ("sliding_attention", "full_attention"), "top_k_experts": 4}
CASES = ["one canvas", "all canvases", "packed texts", "quantised"]


@pytest.mark.parametrize("case", [*CASES, pytest.param("mixed precision", marks=pytest.mark.slow)])
def test_text_and_canvases_together_have_the_loss_and_gradients_of_separate_passes(case, monkeypatch, device):
    dtype = torch.float32 if case in ("quantised", "mixed precision") else torch.float64
    changes = STABLE if case == "mixed precision" else {}
    model, trained = adapted_model(dtype, quantized=case == "quantised", **changes)
    canvases = "all" if case in ("all canvases", "packed texts") else "one"
    objective = Objective(noise=dgemma.UniformNoise(512), canvas_len=12, canvases=canvases)
    model.to(device)
    batch, runs = rows(packed=case == "packed texts").to(device), []
    run = TogetherPass.denoise_again
    monkeypatch.setattr(TogetherPass, "denoise_again", lambda *args: runs.append(case) or run(*args))
    with torch.autocast(device.type, torch.bfloat16, enabled=case == "mixed precision", cache_enabled=False):
        with accelerate_training(model):
            loss, gradients = loss_and_gradients(objective, model, trained, batch)
        expected_loss, expected = loss_and_gradients(objective, model, trained, batch)
    assert len(runs) == 1
    if case == "mixed precision":
        # Both passes round to bfloat16, in ways that differ between CPUs. Their errors are compared, not their bits.
        expected_loss, exact = loss_and_gradients(objective, model, trained, batch)
        tolerance, expected = 2 * distance(expected, exact).item(), exact
        assert tolerance < 0.25
    else:
        tolerance = 1e-5 if case == "quantised" else 1e-12
    torch.testing.assert_close(loss, expected_loss, rtol=min(tolerance, 1e-2), atol=0)
    assert distance(gradients, expected) <= tolerance


def test_passes_are_separate_without_recomputation_gradients_or_adapters():
    model, _ = adapted_model()
    assert can_run_together(model)
    with torch.no_grad():
        assert not can_run_together(model)
    model.recompute_activations = False
    assert not can_run_together(model)
    plain = dgemma.DiffusionGemma(dgemma.presets.tiny())
    plain.recompute_activations = True
    assert not can_run_together(plain)
