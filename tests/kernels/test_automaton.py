"""The passes over an automaton against the library's own functions, and a constrained step of the engine."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

import dgemma
from dgemma.constraints.automaton import Automaton
from dgemma.constraints.canvas_language import Language
from dgemma.constraints.joint import condition
from dgemma.constraints.tables import with_stops
from dgemma.constraints.token_automaton import TokenAutomaton
from dgemma.diffusion.prediction import Prediction, SoftCap
from dgemma.run.knobs import Knobs
from dgemma.run.step import start_state
from dgemma_kernels import accelerate
from dgemma_kernels.engine.prediction import FusedPrediction, Logits
from dgemma_kernels.ops.automaton import kernel, tables
from kernel_inputs import draw_tokens, make_model

VOCAB_SIZE, CANVAS_LEN, BATCH_SIZE = 300, 3, 2


def draw_language(device, *, num_states=18, may_end=False):
    """A random automaton with a class of more than 256 tokens.

    One state has 13 arcs out of it, and one has 17 arcs into it.
    """
    generator = np.random.default_rng(3)
    table = np.where(generator.random((num_states, 20)) < 0.2, generator.integers(0, num_states, (num_states, 20)), -1)
    table[:, 0] = -1
    table[1, 1:19] = np.arange(18)
    table[2:, 3] = 5
    table[0, 1], table[5, 1] = 1, num_states - 1  # so that texts of three tokens exist
    table = table.astype(np.int32)
    classes = np.where(np.arange(VOCAB_SIZE) < 260, 1, generator.integers(0, 20, VOCAB_SIZE))
    is_final = np.arange(num_states) == num_states - 1
    automaton = with_stops(TokenAutomaton(classes, table, is_final), (VOCAB_SIZE - 1,), VOCAB_SIZE).to(device)
    end = torch.from_numpy(np.append(is_final, True)).expand(BATCH_SIZE, -1).to(device)
    flags = torch.arange(CANVAS_LEN, device=device).expand(BATCH_SIZE, -1) >= 1 if may_end else None
    return Language(automaton, torch.tensor([0, 1], device=device), end, flags)


@pytest.mark.slow
@pytest.mark.parametrize("may_end", [False, True], ids=["stops-anywhere", "stops-late"])
def test_the_conditioned_prediction_of_the_kernels_is_that_of_the_library(device, may_end):
    language = draw_language(device, may_end=may_end)
    generator = torch.Generator().manual_seed(1)
    logits = (6 * torch.randn(BATCH_SIZE, CANVAS_LEN, VOCAB_SIZE, generator=generator)).to(device)
    canvas = torch.full((BATCH_SIZE, CANVAS_LEN), 265, device=device)
    fixed = torch.zeros_like(canvas, dtype=torch.bool)
    fixed[0, 1] = True
    u = torch.rand(BATCH_SIZE, CANVAS_LEN, generator=generator, dtype=torch.float64).to(device)
    temperature = torch.tensor([0.7, 1.1], device=device)
    fused = FusedPrediction(Logits(logits), (SoftCap(30.0),)).shaped(temperature=temperature)
    plain = torch.tanh(logits / 30) * 30
    got = condition(fused, language, canvas, fixed)
    want = condition(Prediction(plain).shaped(temperature=temperature), language, canvas, fixed)
    assert got.joint.prediction.automaton_ops is kernel
    assert want.joint.prediction.automaton_ops is None
    for name in ("forward", "backward", "best"):
        torch.testing.assert_close(
            getattr(got.joint._passes, name), getattr(want.joint._passes, name), rtol=1e-5, atol=1e-4
        )
    torch.testing.assert_close(got.joint.bias, want.joint.bias, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(got.entropy, want.entropy, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(got.confidence, want.confidence, rtol=1e-3, atol=1e-4)
    assert torch.equal(got.argmax, want.argmax)
    assert torch.equal(got.sample(u), want.sample(u))
    assert torch.equal(got.shaped(temperature=0.5).sample(u), want.shaped(temperature=0.5).sample(u))
    draft = torch.randint(VOCAB_SIZE, canvas.shape, generator=generator).to(device)
    assert torch.equal(got.joint.project(draft, fixed), want.joint.project(draft, fixed))


def shift_language(offset, device):
    """Texts of tokens that count up or stay, modulo 4, beginning at `offset`. Every offset has tables of one shape."""
    state, token_class = torch.arange(4), torch.arange(40) % 4
    table = torch.where((state - state[:, None]) % 4 < 2, state, -1)  # (Q, K)
    table[offset] = (state + offset) % 4
    automaton = Automaton.build(token_class.int(), table, torch.zeros(4, dtype=torch.bool)).to(device)
    return Language(automaton, torch.tensor([offset], device=device), torch.ones(1, 4, dtype=torch.bool, device=device))


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("most_slots", [0, 1 << 14], ids=["the-library-s-passes", "passes-in-a-kernel"])
@pytest.mark.parametrize(
    "sampler", [dgemma.EntropyBound(bound=0.5), dgemma.LeaveOneOutGibbs(num_positions=2)], ids=["published", "general"]
)
def test_one_graph_takes_the_steps_of_languages_with_tables_of_one_shape(sampler, most_slots, monkeypatch, device):
    monkeypatch.setattr(kernel, "_MOST_SLOTS", most_slots)
    built = []
    build = tables._build_tables
    monkeypatch.setattr(tables, "_build_tables", lambda automaton: built.append(automaton) or build(automaton))
    plain = make_model(device)
    fast = accelerate(copy.deepcopy(plain))
    knobs = Knobs(sampler=sampler, temperature=dgemma.LinearTemperature(), stop=None)
    prompt = draw_tokens(1, 3)
    caches = [model.encode(prompt) for model in (fast, plain)]
    languages = [shift_language(offset, device) for offset in (0, 1)]
    drafts = []
    for language in (*languages, languages[0]):
        start = {"seeds": torch.tensor([5], device=device), "canvas_len": 4, "num_steps": 4, "language": language}
        got = want = start_state(knobs, dgemma.UniformNoise(40), **start)
        for _ in range(3):
            got, _ = fast.step(got, cache=caches[0], knobs=knobs)
            want, _ = dgemma.step(plain, want, cache=caches[1], knobs=knobs)
            assert torch.equal(got.canvas, want.canvas)
            assert torch.equal(got.draft, want.draft)
        assert type(got.language.automaton) is Automaton  # a stored state does not need the kernels
        drafts.append(got.draft)
    assert torch.equal(drafts[0], drafts[2])
    assert not torch.equal(drafts[0], drafts[1])
    assert len(fast._stepper.graphs) == 1
    assert len(built) == 2


def test_the_tables_of_an_automaton_are_built_once_per_device_and_copies_have_their_own(device):
    automaton = draw_language(torch.device("cpu")).automaton
    known = tables.with_tables(automaton)
    assert tables.with_tables(automaton) is known
    assert tables.with_tables(known) is known
    for other in (automaton.to(device), copy.deepcopy(automaton), pickle.loads(pickle.dumps(automaton))):
        again = tables.with_tables(other)
        assert again.fan.arc.device == other.next_state.device
        for mine, theirs in zip(tree_leaves(known), tree_leaves(again), strict=True):
            assert torch.equal(mine, theirs.cpu())
