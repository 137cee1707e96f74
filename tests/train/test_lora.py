"""An adapter acts exactly like a changed weight, and merging gives that weight."""

import copy
from dataclasses import replace

import pytest
import torch

import dgemma
from dgemma.train.adapter_files import load_lora, save_lora
from dgemma.train.lora import LoRA, add_lora, drop_lora, is_adapted, merge_lora, share_weights
from dgemma.train.one_pass import read_clean
from dgemma_kernels import accelerate_training
from dgemma_kernels.training.adapted_linear import rounded_once
from dgemma_kernels.training.fused import joined

EVERYTHING = ("attention", "dense", "experts", "router", "self_conditioning")


def _model(dtype=torch.float64):
    model = dgemma.DiffusionGemma(dgemma.presets.tiny().replace(num_experts=4), dtype=dtype)
    model.reset_parameters(torch.Generator().manual_seed(1))
    return model


def _stir(model):
    """Return a model with adapters as after some training: B is not zero."""
    generator = torch.Generator().manual_seed(2)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = torch.randn(weight.shape, generator=generator).to(weight.dtype) * 0.1


def _logits(model):
    tokens = torch.arange(24).reshape(2, 12) % 500
    cache = model.encode(tokens)
    canvas = (torch.arange(16).reshape(2, 8) * 7) % 500
    first = model.denoise(canvas, cache)
    return torch.cat((model.denoise(canvas, cache, self_cond=first).logits, model.causal_logits(tokens)), dim=1)


@pytest.mark.parametrize("target", EVERYTHING)
def test_a_fresh_adapter_changes_nothing_and_a_trained_one_does(target):
    model = _model()
    before = _logits(model)
    add_lora(model, LoRA(rank=4, targets=(target,)))
    assert torch.equal(_logits(model), before)
    _stir(model)
    assert (_logits(model) - before).abs().max() > 1e-4


def test_lora_a_keeps_the_size_of_its_input():
    """Inputs of size 1 give outputs of size 1, so that the learning rate does not depend on the width."""
    model = _model()
    add_lora(model, LoRA(rank=64))
    layer, draw = model.layers[0], torch.Generator().manual_seed(3)
    for a in (layer.self_attn.q_proj.lora_a, layer.experts.gate_up_lora_a, layer.experts.down_lora_a):
        x = torch.randn(a.shape[-1], 200, generator=draw, dtype=a.dtype)
        assert (a @ x).std().item() == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("targets", [(t,) for t in EVERYTHING] + [EVERYTHING], ids=lambda t: "+".join(t))
def test_merged_weights_give_the_adapted_logits(targets):
    model = _model()
    add_lora(model, LoRA(rank=3, alpha=5.0, targets=targets))
    _stir(model)
    adapted = _logits(model)
    merge_lora(model)
    assert not is_adapted(model)
    assert torch.allclose(_logits(model), adapted, atol=1e-10)


def test_adapter_gradients_are_the_chain_rule_of_the_dense_weights_gradient():
    # W' = W + s·B A, so dA = s·Bᵀ dW' and dB = s·dW' Aᵀ, with dW' from an ordinary model with W'.
    lora = LoRA(rank=2, alpha=6.0)
    adapted = _model()
    add_lora(adapted, lora)
    _stir(adapted)
    _logits(adapted).square().sum().backward()
    dense = _model()
    add_lora(dense, lora)
    _stir(dense)
    merge_lora(dense)
    _logits(dense).square().sum().backward()
    layer, plain = adapted.layers[0], dense.layers[0]
    cases = [
        (layer.self_attn.q_proj.lora_a, layer.self_attn.q_proj.lora_b, plain.self_attn.q_proj.weight),
        (layer.router.proj.lora_a, layer.router.proj.lora_b, plain.router.proj.weight),
        (layer.experts.gate_up_lora_a, layer.experts.gate_up_lora_b, plain.experts.gate_up_proj),
        (layer.experts.down_lora_a, layer.experts.down_lora_b, plain.experts.down_proj),
    ]
    for a, b, weight in cases:
        assert torch.allclose(a.grad, 3.0 * b.mT @ weight.grad, rtol=1e-8, atol=1e-9)
        assert torch.allclose(b.grad, 3.0 * weight.grad @ a.mT, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("trains_experts", [False, True], ids=["adapters", "adapters and experts"])
def test_the_gradients_of_training_kernels_are_those_of_autograd(trains_experts, device):
    """The door computes the experts' gradient by hand, with recomputed hidden values."""
    model = _model()
    trained = add_lora(model, LoRA(rank=8, alpha=12.0))
    _stir(model)
    model.to(device)
    if trains_experts:
        trained += [layer.experts.down_proj.requires_grad_() for layer in model.layers]
        trained += [layer.experts.gate_up_proj.requires_grad_() for layer in model.layers]
    tokens = torch.arange(24, device=device).reshape(2, 12) % 500
    probe = torch.randn(2, 12, model.config.hidden_size, generator=torch.Generator().manual_seed(3)).to(device)

    def gradients(recompute):
        model.recompute_activations = recompute
        return torch.autograd.grad((read_clean(model, tokens).hidden * probe).sum(), trained, allow_unused=True)

    stored = gradients(False)
    with accelerate_training(model):
        recomputed = gradients(True)
    error = sum((a - b).square().sum() for a, b in zip(stored, recomputed, strict=True) if a is not None)
    size = sum(a.square().sum() for a in stored if a is not None)
    assert error.sqrt() <= 1e-12 * size.sqrt()


def test_weights_of_layers_with_one_input_become_neighbours_and_keep_their_values(tmp_path, device):
    model = dgemma.DiffusionGemma(dgemma.presets.tiny(), device=device)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    add_lora(model, LoRA(rank=2))
    with accelerate_training(model):
        pass
    for layer in model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        heads = [each.weight for each in (attention.q_proj, attention.k_proj, attention.v_proj) if each is not None]
        for weights in (heads, [mlp.gate_proj.weight, mlp.up_proj.weight]):
            assert torch.equal(joined(weights, 0), torch.cat(weights))
    drop_lora(model)
    model.save_pretrained(tmp_path)
    saved = dgemma.DiffusionGemma.from_pretrained(tmp_path, device=device).state_dict()
    for weights in (model.state_dict(), saved):
        assert all(torch.equal(weights[name], weight) for name, weight in before.items())


def test_rounded_adapters_of_layers_with_one_input_are_neighbours():
    model = dgemma.DiffusionGemma(dgemma.presets.tiny())
    add_lora(model, LoRA(rank=2))
    with rounded_once(model, torch.bfloat16):
        attention, mlp = model.layers[0].self_attn, model.layers[0].mlp
        for layers in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
            for name in ("lora_a", "lora_b"):
                weights = [getattr(layer, name) for layer in layers]
                assert torch.equal(joined(weights, 0), torch.cat(weights))


def test_gradients_of_rounded_adapters_are_added_to_the_earlier_ones():
    model = _model(torch.float32)
    trained = add_lora(model, LoRA(rank=2))
    _stir(model)

    def accumulate(tokens):
        with rounded_once(model, torch.bfloat16), torch.autocast("cpu", torch.bfloat16):
            read_clean(model, tokens).hidden.square().sum().backward()
        return [weight.grad for weight in trained]

    first, second = torch.arange(24).reshape(2, 2, 6)
    of_first = [None if grad is None else grad.clone() for grad in accumulate(first)]
    both = accumulate(second)
    model.zero_grad(set_to_none=True)
    of_second = accumulate(second)
    assert sum(grad is not None for grad in of_first) > 0
    for total, one, other in zip(both, of_first, of_second, strict=True):
        assert total is None if one is None else torch.equal(total, one + other)


def test_only_adapters_train_and_dropping_them_restores_the_model():
    model = _model()
    before, names = _logits(model), set(model.state_dict())
    weights = add_lora(model, LoRA(rank=2))
    assert {id(p) for p in model.parameters() if p.requires_grad} == {id(p) for p in weights}
    _stir(model)
    drop_lora(model)
    assert set(model.state_dict()) == names
    assert torch.equal(_logits(model), before)
    assert all(p.requires_grad for p in model.parameters())


def test_models_that_share_weights_learn_and_merge_on_their_own():
    model = _model()
    before, other = _logits(model), share_weights(model)
    assert other.embed_tokens.weight.data_ptr() == model.embed_tokens.weight.data_ptr()
    add_lora(other, LoRA(rank=2))
    _stir(other)
    adapted = _logits(other)
    assert all(weight.requires_grad for weight in model.parameters())
    merge_lora(other)
    torch.testing.assert_close(_logits(other), adapted)
    assert torch.equal(_logits(model), before)


def test_dropping_adapters_restores_the_noise_of_the_base():
    model = _model(torch.float32)
    own = {"noise": {"kind": "uniform"}, "entropy_bound": 12.0, "sampler": {"name": "leave-one-out-gibbs"}}
    model.generation = replace(model.generation, **own)
    add_lora(model, LoRA(rank=2, targets=("router",)))
    # Training with other noise changes all settings of `own`. The length is unrelated to adapters.
    model.generation = replace(model.generation.after_learning({"kind": "mask"}), max_new_tokens=7)
    merged = copy.deepcopy(model)
    drop_lora(model)
    assert {name: getattr(model.generation, name) for name in own} == own
    assert model.generation.max_new_tokens == 7
    merge_lora(merged)
    assert (merged.generation.noise, merged.generation.sampler) == ({"kind": "mask"}, None)


def test_loaded_adapters_set_the_noise_of_their_training(tmp_path):
    model, path = _model(torch.float32), tmp_path / "adapter"
    noise = dgemma.MaskNoise(model.config.vocab_size, mask_token_id=7)
    add_lora(model, LoRA(rank=2, targets=("router",)))
    save_lora(model, tmp_path / "silent")
    model.generation = replace(model.generation, noise=dgemma.describe_noise(noise))
    save_lora(model, path)
    other = _model(torch.float32)
    load_lora(other, path)
    assert dgemma.learnt_noise(other) == noise
    assert replace(other.generation, noise=None) == _model().generation
    tuned = _model(torch.float32)  # its entropy bound suits the noise of the base model
    tuned.generation = replace(tuned.generation, entropy_bound=12.0)
    load_lora(tuned, path)
    assert tuned.generation.entropy_bound == dgemma.GenerationDefaults().entropy_bound
    merge_lora(other)
    load_lora(other, tmp_path / "silent")  # stores no noise, so nothing changes
    assert dgemma.learnt_noise(other) == noise
    bigger = dgemma.DiffusionGemma(dgemma.presets.tiny().replace(hidden_size=128))
    with pytest.raises(ValueError, match="must fit the names and shapes of the model"):
        load_lora(bigger, path)
    assert bigger.generation.noise is None
    assert not is_adapted(bigger)


def test_a_merged_model_can_be_saved_and_an_adapted_one_must_be_merged_first(tmp_path):
    model = _model(torch.float32)
    add_lora(model, LoRA(rank=4))
    _stir(model)
    with pytest.raises(ValueError, match="Merge adapters first"):
        model.save_pretrained(tmp_path)
    merge_lora(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(_logits(dgemma.DiffusionGemma.from_pretrained(tmp_path)), _logits(model))


def test_adapters_of_bfloat16_weights_are_float32_and_run_in_bfloat16():
    model = _model(torch.bfloat16)
    weights = add_lora(model, LoRA(rank=8))
    assert {w.dtype for w in weights} == {torch.float32}
    assert model.encode(torch.ones(1, 4, dtype=torch.int64)).layers[0].view(4)[0].dtype == torch.bfloat16


def test_wrong_calls_raise_errors_that_name_the_fix(tmp_path):
    model = _model(torch.float32)
    with pytest.raises(ValueError, match="model must have adapters"):
        merge_lora(model)
    with pytest.raises(ValueError, match=r"LoRA\.rank must be at most the model's hidden size \d+, got 1000000000000"):
        add_lora(model, LoRA(rank=10**12))
    with pytest.raises(ValueError, match=r"LoRA\.targets must name linear layers or experts of the model"):
        add_lora(model, LoRA(targets=("layers.0.self_attn",)))
    assert all(weight.requires_grad for weight in model.parameters())
    add_lora(model, LoRA(rank=2, targets=("attention",)))
    with pytest.raises(ValueError, match="model must have no adapters"):
        add_lora(model)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_lora(_model(torch.float32), tmp_path / "none")
    with pytest.raises(ValueError, match=r"LoRA\.targets must be among attention"):
        LoRA(targets=("q_proj",))


def test_adapters_rounded_once_have_the_gradients_of_adapters_rounded_at_each_use():
    model = _model(torch.bfloat16)
    trained = add_lora(model, LoRA(rank=8))
    _stir(model)
    model.recompute_activations = True
    tokens = torch.arange(24).reshape(2, 12) % 500

    def gradients():
        read_clean(model, tokens).hidden.float().square().sum().backward()
        found = [weight.grad for weight in trained]
        for weight in trained:
            weight.grad = None
        return found

    expected = gradients()
    with rounded_once(model, torch.bfloat16):
        assert model.layers[0].self_attn.q_proj.lora_a.dtype == torch.bfloat16
        found = gradients()
    assert model.layers[0].self_attn.q_proj.lora_a is trained[0]
    for ours, theirs in zip(found, expected, strict=True):  # None: self-conditioning is not used
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)
