"""The log file survives kills and resumes, and reads back as columns and CSV; the router load is counted."""

import math

import pytest
import torch

import next_token
from dgemma.train.log import RouterLoad, TrainLog, summary

LINES = [
    {"step": 1, "loss": 2.0, "loss/decoder": 1.5, "lr": 0.1},
    {"step": 2, "loss": 1.0, "loss/decoder": 0.5, "lr": 0.2, "router": [{"load": [0.5, 0.5]}], "evenness": 1.0},
    {"step": 2, "evaluation/accuracy": 0.75},
]


@pytest.fixture
def log(tmp_path) -> TrainLog:
    log = TrainLog(tmp_path / "log.jsonl")
    log.append(LINES[:1])
    log.append(LINES[1:])
    return log


def test_an_incomplete_last_line_is_ignored(log):
    with log.path.open("a") as file:
        file.write('{"step": 3, "lo')
    assert log.lines() == LINES
    log.cut(1)
    log.append([{"step": 2, "loss": 5.0}])
    assert log.column("loss") == ([1, 2], [2.0, 5.0])


def test_router_load_shows_a_router_that_always_chooses_the_same_two_of_four():
    model = next_token.model()
    with torch.no_grad():
        router = model.layers[0].router
        # Experts 1 and 3 score highest for every token: the router only reads an entry that is constant.
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
    assert first["evenness"] == pytest.approx(math.log(2) / math.log(4))
    assert sum(second["load"]) == pytest.approx(1.0)
    assert counts.sum(1).tolist() == [12, 12]  # six tokens, two choices each


def test_counts_can_be_reset_and_leave_no_buffer():
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


@pytest.mark.slow
def test_compiled_layers_count_in_every_run():
    model, tokens = next_token.model(), torch.arange(8).reshape(2, 4)
    load = RouterLoad(model)
    with load.watching():
        model.encode(tokens)
        expected = load.counts().clone()
    for layer in model.layers:
        layer.compile(backend="eager", dynamic=False)
    for _ in range(2):  # the second run reuses the compiled layers
        with load.watching():
            model.encode(tokens)
            assert torch.equal(load.counts(), expected)
