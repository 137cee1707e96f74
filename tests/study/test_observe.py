"""`observe` records the model's residuals, attention and router choices without changing any result."""

import pytest
import torch
import torch.nn.functional as F

import dgemma
from dgemma.study.observe import observe
from dgemma.train.one_pass import read_clean

B, C, P = 2, 32, 40  # longer than the sliding window of 24, so that sliding and full layers differ


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return dgemma.DiffusionGemma(dgemma.presets.tiny()).eval()


@pytest.fixture(scope="module")
def prompt():
    return torch.randint(5, 500, (B, P), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def canvas():
    return torch.randint(5, 500, (B, C), generator=torch.Generator().manual_seed(2))


@pytest.fixture(params=["whole", "padded"])
def cache(request, model, prompt):
    mask = torch.ones_like(prompt)
    if request.param == "padded":
        mask[0, :30] = 0  # row 0 has 10 tokens: less than a window
    return model.encode(prompt, attention_mask=mask)


def catch_calls(module, calls):
    return module.register_forward_hook(lambda module, args, output: calls.append((args, output)))


def test_attention_rows_sum_to_one_and_weigh_the_values_as_torch_does(model, canvas, cache):
    calls = []
    handles = [catch_calls(layer.self_attn, calls) for layer in model.layers]
    with torch.no_grad(), observe(model, attention=True) as seen:
        model.denoise(canvas, cache)
    for handle in handles:
        handle.remove()
    for index, layer in enumerate(model.layers):
        (x, rope, past, mask), (output, _, _) = calls[index]
        weights = seen.passes[0].attention[index]
        queries, keys, values = layer.self_attn.project(x, rope)
        keys, values = torch.cat((past[0], keys), dim=2), torch.cat((past[1], values), dim=2)
        assert weights.shape == (B, 4, C, keys.shape[2])
        torch.testing.assert_close(weights.sum(-1), torch.ones(B, 4, C))
        group = 4 // keys.shape[1]
        copied = (each.repeat_interleave(group, dim=1) for each in (keys, values))  # a kv head for every query head
        expected = F.scaled_dot_product_attention(queries.transpose(1, 2), *copied, attn_mask=mask, scale=1.0)
        weighed = weights @ values.repeat_interleave(group, dim=1)
        torch.testing.assert_close(weighed, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(layer.self_attn.o_proj(weighed.transpose(1, 2).flatten(2)), output)


def test_router_choices_equal_a_direct_call(model, canvas, cache):
    inputs = []
    handles = [
        layer.router.register_forward_pre_hook(lambda module, args: inputs.append(args[0])) for layer in model.layers
    ]
    with torch.no_grad(), observe(model, router=True) as seen:
        model.denoise(canvas, cache)
    for handle in handles:
        handle.remove()
    for index, layer in enumerate(model.layers):
        routing, direct = seen.passes[0].router[index], layer.router(inputs[index])
        assert routing.experts.shape == (B, C, 2)
        assert routing.probabilities.shape == (B, C, 8)
        assert torch.equal(routing.experts.flatten(0, 1), direct.experts)
        assert torch.equal(routing.weights.flatten(0, 1), direct.weights)


def test_residuals_lead_from_the_embedding_to_the_logits(model, canvas, cache):
    with torch.no_grad(), observe(model, residuals=True) as seen:
        prediction = model.denoise(canvas, cache)
    only = seen.passes[0]
    assert list(only.residuals) == [0, 1, 2]
    logits = model.norm(only.residuals[2]) @ model.embed_tokens.weight.T
    torch.testing.assert_close((logits / 30).tanh() * 30, prediction.logits)
    embedded = model.embed_tokens(canvas) * 64**0.5
    expected = embedded / (embedded.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps).sqrt()
    torch.testing.assert_close(only.embedded, expected)


def test_every_step_of_a_run_is_recorded_with_its_rows(model, prompt):
    records = []

    def watch(record):
        records.append(record)
        return {"done": record.rows == 0} if len(records) == 2 else None  # row 0 leaves after two steps

    with observe(model, residuals=[-1], router=[0], device="cpu") as seen:
        dgemma.generate(model, prompt, steps=3, max_new_tokens=C, on_step=watch, progress=False)
    assert len(seen.passes) == len(seen.steps) == len(records) == 3
    assert [len(step.residuals[2]) for step in seen.steps] == [2, 2, 1]
    for step, record in zip(seen.steps, records, strict=True):
        logits = model.norm(step.residuals[2]) @ model.embed_tokens.weight.T
        assert torch.equal(logits.argmax(-1), record.argmax)
        assert list(step.router) == [0]
        assert not step.attention


def test_the_prefix_is_recorded_on_request(model, prompt):
    with observe(model, attention=[0], prefix=True) as seen:
        model.encode(prompt)
    weights = seen.passes[0].attention[0]
    assert seen.passes[0].causal
    assert seen.steps == []
    assert bool((weights.triu(1) == 0).all())
    assert bool((weights.tril(-24) == 0).all())  # outside the window of 24


def test_the_attention_of_a_training_pass_is_that_of_the_encoder(model, prompt):
    texts = prompt[:, :20]  # within the window, so that training needs no mask
    with torch.no_grad(), observe(model, attention=True, prefix=True) as seen:
        model.encode(texts)
        read_clean(model, texts)
    for index in range(len(model.layers)):
        torch.testing.assert_close(seen.passes[1].attention[index], seen.passes[0].attention[index])


def test_observing_changes_no_result_and_removes_its_hooks(model, canvas, cache):
    before = model.denoise(canvas, cache).logits
    with observe(model, residuals=True, attention=True, router=True):
        during = model.denoise(canvas, cache).logits
    assert torch.equal(before, during)
    with pytest.raises(RuntimeError, match="on purpose"), observe(model, residuals=True) as seen:
        raise RuntimeError("on purpose")
    model.denoise(canvas, cache)
    assert seen.passes == []
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
