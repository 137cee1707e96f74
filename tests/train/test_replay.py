"""A replayed pass gives the losses and gradients of the pass itself."""

import pytest
import torch

import dgemma
from dgemma.train import LoRA, Objective, TrainBatch, add_lora
from dgemma.train.batch import MicroBatch
from dgemma.train.canvases import sizes_of
from dgemma.train.update import Measured
from dgemma_kernels import accelerate_training
from dgemma_kernels.training import replay
from dgemma_kernels.training.adapted_linear import rounded_once
from dgemma_kernels.training.replay import Replayed


def part_of(seed, length=56, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(5, 512, (2, length), generator=generator).to(device)
    ones = torch.ones(2, dtype=torch.int64, device=device)
    batch = TrainBatch(tokens=tokens, prompt_len=24 * ones, length=length * ones, spans=((24, length),) * 2)
    return MicroBatch(batch, seed + torch.arange(2, device=device))


def test_a_shape_is_captured_when_it_comes_for_the_third_time(monkeypatch):
    captured = []

    class Graph:
        def __init__(self, owner, part, totals):
            captured.append(part.batch.tokens.shape[1])

        def replay(self, part, totals):
            return "replayed"

    monkeypatch.setattr(replay, "_Graph", Graph)
    monkeypatch.setattr(Replayed, "_run_once", lambda self, part, totals: "run")
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    measure = Replayed(None, [], lambda part: part.batch.spans)
    lengths = [56, 56, 48, 56, 48, 56, 48]
    found = [measure(part_of(step, length), {}) for step, length in enumerate(lengths)]
    assert found == ["run", "run", "run", "replayed", "run", "replayed", "replayed"]
    assert captured == [56, 48]
    monkeypatch.setattr(replay, "_MOST_GRAPHS", 2)
    assert [measure(part_of(0, 40), {}) for _ in range(4)] == ["run"] * 4
    monkeypatch.setattr(replay, "_MOST_SHAPES", 4)
    assert [measure(part_of(0, length), {}) for length in range(60, 66)] == ["run"] * 6
    assert len(measure.seen) <= 4


def rows(prompt_len, length, closed):
    frozen = torch.zeros(2, 49, dtype=torch.bool)
    frozen[closed] = True  # a whole canvas, which is not denoised
    documents = (torch.arange(49) >= 20).long().expand(2, -1)
    tokens = torch.randint(5, 512, (2, 49))
    lengths = {"prompt_len": torch.tensor(prompt_len), "length": torch.tensor(length)}
    return TrainBatch(tokens=tokens, documents=documents, frozen=frozen, **lengths)


def test_texts_of_other_lengths_share_a_graph_if_their_sizes_are_equal():
    captured, new = rows([1, 3], [49, 30], (0, slice(17, 33))), rows([7, 1], [33, 49], (1, slice(1, 17)))
    assert sizes_of(captured, 16) == sizes_of(new, 16) != sizes_of(rows([1, 2], [49, 49], (0, slice(17, 33))), 16)
    assert sizes_of(captured, 16).num_open == 2 != sizes_of(rows([1, 3], [49, 30], (0, 17)), 16).num_open
    assert_replays("all", captured, new)


def test_texts_with_one_canvas_share_a_graph_whatever_the_number_of_open_canvases():
    """A closed canvas may be the row's one canvas."""
    captured, new = rows([1, 3], [49, 30], (0, slice(17, 33))), rows([1, 3], [49, 30], (0, 17))
    assert sizes_of(captured, 16) != sizes_of(new, 16)
    assert_replays("one", captured, new)


def assert_replays(canvases, captured, new):
    """The batches have one graph, and the replay has the losses of `new`."""
    model = dgemma.DiffusionGemma(dgemma.presets.tiny())
    objective = Objective(noise=dgemma.UniformNoise(512), canvas_len=16, canvases=canvases)
    assert len({replay._sizes(objective, MicroBatch(batch, torch.arange(2))) for batch in (captured, new)}) == 1
    alone = objective(model, new, seeds=torch.arange(2))
    for name in ("spans", "host_frozen"):  # as in a replay, which sees the numbers of the captured batch
        object.__setattr__(new, name, getattr(captured, name))
    replayed = objective(model, new, seeds=torch.arange(2))
    for name, sums in alone.sums.items():
        assert torch.equal(replayed.sums[name], sums)
        assert torch.equal(replayed.counts[name], alone.counts[name])


def test_graphs_add_to_gradients_of_their_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    first, second, unused = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    measure = Replayed(None, [first, second, unused], lambda part: None)
    measure.trained = [first, second]
    first.grad = torch.ones(2)
    measure.place_gradients()  # at a capture: gradients of this step are kept
    own = first.grad, second.grad
    assert [grad.tolist() for grad in own] == [[1, 1], [0, 0]]
    assert unused.grad is None
    own[1].fill_(7)
    first.grad, second.grad = torch.full((2,), 3.0), None  # the next step: one pass without a graph, then a replay
    measure.place_gradients()
    assert first.grad is own[0]
    assert second.grad is own[1]
    assert [grad.tolist() for grad in own] == [[3, 3], [0, 0]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("adapted", [True, False], ids=["adapters", "all-weights"])
def test_replays_have_the_losses_and_gradients_of_their_own_batches(adapted):
    config = dgemma.presets.tiny().replace(hidden_size=64, moe_intermediate_size=32)
    model = dgemma.DiffusionGemma(config, device="cuda", dtype=torch.bfloat16)
    model.recompute_activations = True
    trained = add_lora(model, LoRA(rank=8)) if adapted else list(model.parameters())
    for weight in trained if adapted else ():
        weight.data.normal_(std=0.1)
    objective = Objective(noise=dgemma.UniformNoise(512), canvas_len=32)

    def measure(part, totals):
        with rounded_once(model, torch.bfloat16):
            terms = objective(model, part.batch, seeds=part.seeds)
            loss = objective.reduce(terms, totals)
            loss.backward()
        return Measured(loss.detach(), {name: t.detach() for name, t in terms.sums.items()}, dict(terms.counts))

    replayed = Replayed(measure, trained, lambda part: part.batch.spans)

    def step(run, part):
        model.zero_grad(set_to_none=False)
        measured = run(part, objective.total_counts(part.batch, part.seeds))
        return measured, [weight.grad.clone() for weight in trained if weight.grad is not None]

    with accelerate_training(model):
        for seed in range(6):
            part = part_of(seed, device="cuda")
            got, gradients = step(replayed, part)
            want, expected = step(measure, part)
            # The same kernels in the same order; only atomic additions of attention may round differently.
            torch.testing.assert_close(got.loss, want.loss, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(got.sums, want.sums, rtol=1e-3, atol=1e-3)
            error = sum((a - b).square().sum() for a, b in zip(gradients, expected, strict=True))
            assert error <= 1e-3 * sum(a.square().sum() for a in expected)
    assert len(replayed.graphs) == 1
