"""The routers' load, counted where the choice is known beforehand."""

import math

import pytest
import torch

import next_token
from dgemma.train.balance import RouterLoad, summary


def test_a_router_that_always_chooses_the_same_two_of_four_shows_it():
    model = next_token.model()
    with torch.no_grad():
        router = model.layers[0].router
        # Whatever the token, experts 1 and 3 score highest: weights only where the residual is made constant.
        router.scale.zero_()
        router.scale[0] = 1.0
        router.proj.weight.zero_()
        model.embed_tokens.weight[:, 0] = 5.0
        router.proj.weight[:, 0] = torch.tensor([-1.0, 2.0, -1.0, 1.0])
        model.layers[0].post_attention_layernorm.weight.zero_()  # so that the residual is the embedding
    load = RouterLoad(model)
    with load.watching():
        model.encode(torch.arange(6).reshape(2, 3))
        counts = load.counts()
    first, second = summary(counts)
    assert first["load"] == [0.0, 0.5, 0.0, 0.5]
    assert (first["min"], first["max"]) == (0.0, 0.5)
    assert first["evenness"] == pytest.approx(math.log(2) / math.log(4))
    assert sum(second["load"]) == pytest.approx(1.0)
    assert counts.sum(1).tolist() == [12, 12]  # six tokens, two choices each


def test_counting_starts_anew_and_leaves_nothing_behind():
    model = next_token.model()
    names = model.state_dict().keys()
    load = RouterLoad(model)
    with load.watching():
        for expected in (6, 12):
            model.encode(torch.arange(3)[None])
            assert load.counts().sum(1).tolist() == [expected] * 2
        load.reset()
        assert load.counts().sum() == 0
        assert model.state_dict().keys() == names
    model.encode(torch.arange(3)[None])
    assert not any("load" in name for name, _ in model.named_buffers())


def test_compiled_layers_count_in_every_run():
    model, tokens = next_token.model(), torch.arange(8).reshape(2, 4)
    load = RouterLoad(model)
    with load.watching():
        model.encode(tokens)
        expected = load.counts().clone()
    for layer in model.layers:
        layer.compile(backend="eager", dynamic=False)
    for _ in range(2):  # the second time with what the first compiled
        with load.watching():
            model.encode(tokens)
            assert torch.equal(load.counts(), expected)
