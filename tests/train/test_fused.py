"""Fused functions are compiled on a GPU, and then compute the same."""

import sys

import pytest
import torch
from triton import knobs

import dgemma
import learning_toy
from dgemma.quantization.rounding import quantize
from dgemma.train import LoRA, Objective, TrainBatch, add_lora
from dgemma_kernels import accelerate_training
from dgemma_kernels.ops import grouped
from dgemma_kernels.training import fused


@pytest.fixture
def graphs(monkeypatch):
    """Compile on the CPU too, without code generation. Return the names of the functions that were compiled."""
    names, compile_function = [], torch.compile

    def with_names(function, *, dynamic, options):
        def trace(graph, inputs):
            names.append(function.__name__)
            return graph.forward

        return compile_function(function, dynamic=dynamic, backend=trace)

    monkeypatch.setattr(torch, "compile", with_names)
    monkeypatch.setattr(fused, "COMPILED_ON", ("cpu",))
    monkeypatch.setattr(fused, "_kernel", lambda *_: None)  # compiled functions, not kernels
    monkeypatch.setattr(grouped, "fits_groups", lambda *_: False)
    fused.compiled.cache_clear()
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        yield names
    fused.compiled.cache_clear()


def test_starting_the_compiler_does_nothing_with_a_torch_that_lacks_its_module(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._inductor.compile_fx", None)  # importing it then raises ImportError
    fused.start_compiler()


def double(x, weight):
    return 2 * x * weight


@pytest.mark.slow  # imports the compiler
def test_a_fused_function_is_compiled_once_for_all_numbers_of_tokens(graphs, monkeypatch):
    weight, fast = torch.nn.Parameter(torch.ones(3), requires_grad=False), fused.fused(double)
    for num_tokens in (4, 7, 5):
        assert torch.equal(fast(torch.ones(num_tokens, 3), weight), torch.full((num_tokens, 3), 2.0))
    assert graphs == ["double"]
    monkeypatch.setattr(fused, "COMPILED_ON", ("cuda",))
    fast(torch.ones(4, 3, dtype=torch.float64), weight)
    assert graphs == ["double"]


@pytest.mark.slow
def test_runs_that_end_one_by_one_compile_no_function_again(graphs):
    model = learning_toy.small_model()

    def gradients(group):
        policy = learning_toy.objective(group=group)
        terms = policy(model, policy.problems(0, range(1)), seeds=torch.zeros(1, dtype=torch.int64))
        return torch.autograd.grad(policy.reduce(terms), list(model.parameters()), materialize_grads=True)

    expected = gradients(16)  # most rows take a second step
    with accelerate_training(model, whole_layers=False):
        found, compiled = gradients(16), list(graphs)
        gradients(11)
    assert compiled
    assert graphs == compiled
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU, kernels replace some of these functions")
def test_a_fused_step_has_the_loss_and_the_gradients_of_the_plain_one(graphs):
    two_layers = {"num_hidden_layers": 2, "layer_types": ("sliding_attention", "full_attention")}
    model = dgemma.DiffusionGemma(dgemma.presets.tiny().replace(**two_layers), dtype=torch.float64)
    model.reset_parameters(torch.Generator().manual_seed(1))
    model.recompute_activations = True
    adapters = add_lora(model, LoRA(rank=2))
    generator = torch.Generator().manual_seed(2)
    for weight in adapters:
        weight.data = 0.1 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    tokens = torch.randint(5, 512, (2, 56), generator=generator)
    batch = TrainBatch(tokens=tokens, prompt_len=torch.full((2,), 24), length=torch.full((2,), 56))
    objective = Objective(noise=dgemma.UniformNoise(512), canvas_len=32)

    def step():
        loss = objective.reduce(objective(model, batch, seeds=torch.arange(2)))
        return loss.detach(), torch.autograd.grad(loss, adapters)

    loss, gradients = step()
    with accelerate_training(model):
        fused_loss, fused_gradients = step()
    assert {"rms_norm", "_norm_heads_plainly", "after_attention", "after_experts", "geglu_gradient"} <= set(graphs)
    torch.testing.assert_close(fused_loss, loss, rtol=1e-12, atol=0)
    for ours, theirs in zip(fused_gradients, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_neighbouring_slices_are_joined_without_a_copy():
    whole = torch.arange(24.0).view(4, 6)
    for dim in (0, 1):
        found = fused.joined(whole.split(2, dim), dim)
        assert torch.equal(found, whole)
        assert found.data_ptr() == whole.data_ptr()


def test_other_tensors_are_not_joined():
    whole = torch.arange(24.0).view(4, 6)
    first, second, third = whole.split(2, 1)
    assert fused.joined([first, third], 1) is None  # not neighbours
    assert fused.joined([second, first], 1) is None  # in another order
    assert fused.joined([first, second.clone()], 1) is None  # in other memory
    assert fused.joined(whole.view(-1).view(2, 2, 6).unbind(), 1) is None  # one below the other
    assert fused.joined([first, quantize(torch.randn(4, 64), "int4")], 1) is None


def scaled_sum(x, y, weight):
    return 2 * x + 3 * y * weight


@pytest.mark.slow
def test_gradients_of_joined_arguments_are_slices_of_one_tensor(graphs):
    x, y = torch.ones(4, 2, requires_grad=True), torch.ones(4, 2, requires_grad=True)
    out = fused.fused(scaled_sum, num_joined=2)(x, y, torch.full((2,), 5.0))
    of_x, of_y = torch.autograd.grad(out.sum(), [x, y])
    assert torch.equal(fused.joined([of_x, of_y], 1), torch.tensor([2.0, 2, 15, 15]).expand(4, -1))


@pytest.mark.slow
def test_a_compiled_step_decodes_quantised_weights_in_one_function(graphs, device):
    weight = quantize(torch.randn(3, 8, 64), "int4").to(device)
    expected = weight.decode(torch.bfloat16)
    with accelerate_training(dgemma.DiffusionGemma(dgemma.presets.tiny(), device=device)):
        assert torch.equal(weight.decode(torch.bfloat16), expected)
    assert graphs == ["int_values"]


def test_a_model_on_a_cpu_is_refused(monkeypatch):
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    with (
        pytest.raises(ValueError, match="must be on a GPU"),
        accelerate_training(dgemma.DiffusionGemma(dgemma.presets.tiny())),
    ):
        pass
