"""Autograd, activation checkpointing, compilation and the grouped product of the model."""

import copy

import pytest
import torch
import torch.nn.functional as F

import dgemma
from dgemma import DiffusionGemma
from dgemma.checkpoint.loading import lay_out_by_column
from dgemma.model.config import Conventions
from dgemma.model.experts import looped_product, product_by_group
from published import pair


def loss(model: DiffusionGemma, tokens: torch.Tensor, canvas: torch.Tensor) -> torch.Tensor:
    """Both modes and both passes of self-conditioning, as training uses them."""
    cache = model.encode(tokens)
    first = model.denoise(canvas, cache)
    second = model.denoise(canvas, cache, self_cond=first, self_cond_mask=torch.tensor([True, False]))
    causal = model.causal_logits(tokens)
    return F.cross_entropy(second.logits.flatten(0, 1), canvas.flatten()) + F.cross_entropy(
        causal[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    )


def gradients(model: DiffusionGemma, *args: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss(model, *args).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(5, 512, (2, 30)), torch.randint(0, 512, (2, 12))


def test_every_weight_gets_the_gradient_the_published_model_gives_it(batch):
    ours, theirs = pair()
    tokens, canvas = batch
    rows = torch.tensor([True, False])
    found = gradients(ours, *batch)

    read = theirs.model.encoder(input_ids=tokens)
    first = theirs(decoder_input_ids=canvas, past_key_values=read.past_key_values).logits
    second = theirs(
        decoder_input_ids=canvas,
        past_key_values=read.past_key_values,
        self_conditioning_logits=first,
        self_conditioning_mask=rows,
    ).logits
    causal = (theirs.lm_head(read.last_hidden_state) / 30).tanh() * 30
    (
        F.cross_entropy(second.flatten(0, 1), canvas.flatten())
        + F.cross_entropy(causal[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    ).backward()
    for name, grad in found.items():
        expected = theirs.get_parameter(f"model.decoder.{name}").grad
        # Float32 through six layers and back; a gradient's error is measured against its own size.
        assert (grad - expected).norm() <= 1e-4 * expected.norm(), name
        assert expected.norm() > 0, name


def test_activation_checkpointing_gives_the_same_gradients(batch):
    model = pair()[0]
    plain = gradients(model, *batch)
    model.recompute_activations = True
    for name, grad in gradients(model, *batch).items():
        torch.testing.assert_close(grad, plain[name], msg=name)


def test_under_autograd_a_cache_concatenates_instead_of_writing_in_place(batch):
    model = pair()[0]
    cache = model.encode(batch[0])
    before = cache.layers[-1].keys
    model.encode(batch[0], cache)
    assert before.shape[2] == 30
    assert cache.layers[-1].keys.shape[2] == 60
    model.denoise(batch[1], cache).logits.sum().backward()
    assert model.layers[0].self_attn.k_proj.weight.grad.abs().sum() > 0


@pytest.mark.slow
@torch.no_grad()
def test_both_modes_compile_without_graph_breaks(batch):
    torch._dynamo.reset()
    config = dgemma.presets.tiny().replace(num_hidden_layers=2, layer_types=("sliding_attention", "full_attention"))
    model = DiffusionGemma(config)
    model.reset_parameters(torch.Generator().manual_seed(1))  # with others, rounding may decide between two experts
    # The eager backend suffices: this test checks that the whole graph can be traced, not the generated code.
    encode = torch.compile(model.encode, fullgraph=True, dynamic=False, backend="eager")
    denoise = torch.compile(model.denoise, fullgraph=True, dynamic=False, backend="eager")
    mask = torch.ones_like(batch[0])
    mask[0, :9] = 0
    for attention_mask in (None, mask):
        expected_cache = model.encode(batch[0], attention_mask=attention_mask)
        cache = encode(batch[0], attention_mask=attention_mask)
        assert cache.lengths.tolist() == expected_cache.lengths.tolist()
        expected = model.denoise(batch[1], expected_cache)
        if attention_mask is None:
            found = denoise(batch[1], cache)
        else:  # as in the loop, the condition is a shaped prediction whose statistics were not computed yet
            found = denoise(batch[1], cache, self_cond=model.denoise(batch[1], cache).shaped(temperature=0.7))
            expected = model.denoise(batch[1], expected_cache, self_cond=expected.logits / 0.7)
        torch.testing.assert_close(found.logits, expected.logits, atol=2e-5, rtol=0)
    causal = torch.compile(model.causal_logits, fullgraph=True, dynamic=False, backend="eager")
    torch.testing.assert_close(causal(batch[0]), model.causal_logits(batch[0]), atol=2e-5, rtol=0)


@pytest.mark.parametrize("sizes", [(3, 0, 5, 1), (0, 0, 9, 0), (9, 0, 0, 0)], ids=["ragged", "one-middle", "one-first"])
def test_the_grouped_product_equals_the_loop_forward_and_backward(sizes):
    rows, weights = torch.randn(9, 8, requires_grad=True), torch.randn(4, 12, 8, requires_grad=True)
    ends = torch.tensor(sizes).cumsum(0).int()
    seen = torch.randn(9, 12)
    results = []
    for product in (product_by_group, looped_product):
        rows.grad = weights.grad = None
        out = product(rows, weights, ends)
        (out * seen).sum().backward()
        results.append((out.detach(), rows.grad, weights.grad))
    for grouped, looped in zip(*results, strict=True):
        torch.testing.assert_close(grouped, looped)
    start, stop = int(ends[1]), int(ends[2])
    torch.testing.assert_close(results[0][0][start:stop], (rows[start:stop] @ weights[2].T).detach())


@torch.no_grad()
def test_weights_laid_out_by_column_are_the_same_weights(tmp_path):
    model, canvas = DiffusionGemma(dgemma.presets.tiny()), torch.randint(0, 512, (1, 8))
    by_column = copy.deepcopy(model)
    lay_out_by_column(by_column)
    assert all(
        w.mT.is_contiguous()
        for w in (by_column.layers[0].mlp.up_proj.weight, *by_column.layers[0].experts.parameters())
    )
    expected = model.denoise(canvas, model.encode(canvas)).logits
    torch.testing.assert_close(by_column.denoise(canvas, by_column.encode(canvas)).logits, expected)
    by_column.save_pretrained(tmp_path)
    for name, weight in DiffusionGemma.from_pretrained(tmp_path).named_parameters():
        assert torch.equal(weight, model.get_parameter(name))


@torch.no_grad()
def test_rounding_of_self_conditioning_logits_is_a_convention():
    rounded = pair()[0].bfloat16()
    wide = DiffusionGemma(rounded.config, dtype=torch.bfloat16, conventions=Conventions(self_cond_logits="float32"))
    wide.load_state_dict(rounded.state_dict())
    logits = torch.randn(1, 8, 512) * 10
    cache, canvas = rounded.encode(torch.randint(5, 512, (1, 6))), torch.randint(0, 512, (1, 8))
    as_published = rounded.denoise(canvas, cache, self_cond=logits).logits
    assert torch.equal(as_published, wide.denoise(canvas, cache, self_cond=logits.bfloat16()).logits)
    assert not torch.equal(as_published, wide.denoise(canvas, cache, self_cond=logits).logits)


@torch.no_grad()
def test_a_float64_model_is_float64_throughout():
    config = dgemma.presets.tiny().replace(num_hidden_layers=1, layer_types=("full_attention",))
    model = DiffusionGemma(config, dtype=torch.float64)
    tokens = torch.randint(5, 512, (1, 4))
    logits = model.denoise(tokens, model.encode(tokens)).logits
    assert logits.dtype == torch.float64
    # A change in the twelfth decimal has an effect. Rounding to float32 anywhere would hide it.
    model.layers[0].input_layernorm.weight[0] *= 1 + 1e-10
    difference = (model.denoise(tokens, model.encode(tokens)).logits - logits).abs().max()
    assert 0 < difference < 1e-9


def test_calling_the_model_points_to_generate():
    model = DiffusionGemma(dgemma.presets.tiny(), device="meta")
    with pytest.raises(
        TypeError, match=r"Read a prefix with encode\(tokens\).*dgemma\.generate\(model, prompt_tokens\)"
    ):
        model(torch.zeros(1, 3, dtype=torch.long))
    with pytest.raises(AttributeError, match=r"Call dgemma\.generate\(model, prompt_tokens\)"):
        _ = model.generate
    with pytest.raises(AttributeError, match="no attribute 'lm_head'"):
        _ = model.lm_head
