"""A whole step with the kernels of training, against the same step in plain PyTorch."""

from contextlib import nullcontext

import pytest
import torch

import dgemma
from dgemma.train import LoRA, Objective, TrainBatch, add_lora
from dgemma_kernels import accelerate_training
from dgemma_kernels.ops import grouped
from dgemma_kernels.ops.heads import kernel as heads
from dgemma_kernels.ops.residual import kernel as residual
from dgemma_kernels.training import door, fused, head

CONFIG = {
    "num_hidden_layers": 2,
    "layer_types": ("sliding_attention", "full_attention"),
    "num_experts": 4,
    "top_k_experts": 4,  # all, because a rounding error could change the choice of an expert
    "moe_intermediate_size": 64,
    "canvas_length": 8,
}
KERNELS = {
    grouped: ("group_choices",),
    heads: ("norm_heads", "norm_heads_gradient"),
    residual: ("after_attention_gradient", "after_experts_gradient", "rms_norm_gradient"),
}


@pytest.fixture
def kernels_on_cpu(monkeypatch):
    """Run kernels on CPU tensors, as on Hopper, and fusible functions without a compiler. Return the kernels that ran.

    Triton interprets the kernels. On a machine with a GPU this fixture changes only the compiler.
    """

    def without_compiler(function, *, dynamic=None):
        @torch.no_grad()
        def run(*args):
            with monkeypatch.context() as patch:
                patch.setattr(fused, "COMPILED_ON", ())  # functions that it calls are part of it
                return function(*(value.detach() if isinstance(value, torch.Tensor) else value for value in args))

        return run

    for module in (fused, head, door):
        monkeypatch.setattr(module, "compiled", without_compiler)
    if not torch.cuda.is_available():
        monkeypatch.setattr(fused, "COMPILED_ON", ("cpu",))
    ran = set()
    others = [(grouped, "multiply"), (residual, "rms_norm")]
    for module, name in [*((module, name) for module, names in KERNELS.items() for name in names), *others]:
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, f=function, n=name, **k: ran.add(n) or f(*a, **k))
    return ran


def make_step(dtype, rank=2):
    """Return a function that computes loss and gradients in `dtype`, with the same weights for every dtype."""
    device, config = "cuda" if torch.cuda.is_available() else "cpu", dgemma.presets.tiny().replace(**CONFIG)
    drawn = dgemma.DiffusionGemma(config, dtype=torch.float16)
    drawn.reset_parameters(torch.Generator().manual_seed(1))
    model = dgemma.DiffusionGemma(config, dtype=dtype)
    model.load_state_dict(drawn.state_dict())
    model.recompute_activations = True
    adapters = add_lora(model.to(device), LoRA(rank=rank))
    generator = torch.Generator().manual_seed(2)
    for weight in adapters:
        weight.data = (0.03 * torch.randn(weight.shape, generator=generator)).to(device, weight.dtype)
    tokens = torch.randint(5, 512, (2, 28), generator=generator).to(device)
    ones = torch.ones(2, dtype=torch.int64, device=device)
    batch = TrainBatch(tokens=tokens, prompt_len=ones * 12, length=ones * 20)
    objective = Objective(noise=dgemma.UniformNoise(512), canvas_len=8)

    def step(fast=False):
        with accelerate_training(model) if fast else nullcontext():
            loss = objective.reduce(objective(model, batch, seeds=torch.arange(2, device=device)))
            return loss.detach(), torch.autograd.grad(loss, adapters)

    return step


def relative_error(gradients, expected):
    error = sum((ours.double() - theirs).square().sum() for ours, theirs in zip(gradients, expected, strict=True))
    return (error / sum(theirs.square().sum() for theirs in expected)).sqrt().item()


@pytest.mark.slow
def test_a_step_with_the_kernels_is_as_exact_as_the_plain_one(kernels_on_cpu):
    exact_loss, exact = make_step(torch.float64)()
    step = make_step(torch.float16)
    loss, gradients = step()
    assert kernels_on_cpu == set()
    kernel_loss, kernel_gradients = step(fast=True)
    assert kernels_on_cpu == {
        "group_choices",
        *("norm_heads", "norm_heads_gradient"),
        *("rms_norm", "rms_norm_gradient", "after_attention_gradient", "after_experts_gradient"),
    }
    for each in (loss, kernel_loss):
        torch.testing.assert_close(each.double(), exact_loss.double(), rtol=1e-3, atol=0)
    # Both round to float16, at different places. Their errors are compared, because the tiny model amplifies rounding.
    error = relative_error(gradients, exact)
    assert error < 0.25
    assert relative_error(kernel_gradients, exact) <= 2 * error


@pytest.mark.slow
def test_a_compiled_step_in_float64_uses_no_kernel_that_computes_in_float32(kernels_on_cpu):
    step = make_step(torch.float64)
    loss, gradients = step()
    kernel_loss, kernel_gradients = step(fast=True)
    assert kernels_on_cpu == {"group_choices"}  # integers
    torch.testing.assert_close(kernel_loss, loss, rtol=1e-12, atol=0)
    assert relative_error(kernel_gradients, gradients) <= 1e-12
