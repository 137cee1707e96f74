"""The fused denoiser against the reference model, in float32: same logits to rounding, same tokens, same caches."""

import copy
import gc
import os
import pickle
import re
import subprocess
import sys
import weakref
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import ClassVar
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import triton

import dgemma
from dgemma.constraints.canvas_language import Language
from dgemma.constraints.tables import with_stops
from dgemma.constraints.token_automaton import TokenAutomaton
from dgemma.diffusion import draws as reference_draws
from dgemma.diffusion.prediction import SoftCap
from dgemma.diffusion.schedule import OneMinusCosine
from dgemma.model.causal import CausalRule, CausalState
from dgemma.model.config import FULL, SLIDING
from dgemma.run.knobs import Knobs
from dgemma.run.step import start_state
from dgemma.sampling import SoftThreshold
from dgemma.train.lora import LoRA, add_lora
from dgemma_kernels import accelerate
from dgemma_kernels.engine import published, reading
from dgemma_kernels.engine import step as engine_step
from dgemma_kernels.engine.forward import Forward
from dgemma_kernels.engine.graphs import CaptureError, Replay
from dgemma_kernels.engine.prediction import FusedPrediction, Logits
from dgemma_kernels.engine.reading import plan_chunks
from dgemma_kernels.ops import configs
from dgemma_kernels.ops.accept import kernel as accept
from dgemma_kernels.ops.attention import kernel as attention
from dgemma_kernels.ops.draws import kernel as draws
from dgemma_kernels.ops.experts import kernel as experts
from kernel_inputs import draw_tokens, make_model

pytestmark = pytest.mark.usefixtures("small_chunks")
CANVAS, VOCAB = 4, 40
# float32 throughout: two layers of sums in another order, over activations of order ten.
CLOSE = {"rtol": 2e-4, "atol": 2e-4}


@pytest.fixture(scope="module")
def models():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = make_model(device)
    return copy.deepcopy(model), accelerate(model)


@dataclass
class ConstantDenoiser(dgemma.Denoiser):
    """A denoiser that always returns the same prediction."""

    prediction: dgemma.Prediction

    def denoise(self, canvas, cache, self_cond=None):
        return self.prediction


def take_step(model, state, **how):
    """Take a step as a run does."""
    return (model.step or partial(dgemma.step, model))(state, **how)


def begin(device, *, sampler=None, stop=None, seeds=(11,), num_steps=4):
    """Return knobs and the first state of a canvas, with one row per seed."""
    knobs = Knobs(sampler=sampler or dgemma.EntropyBound(), temperature=dgemma.LinearTemperature(), stop=stop)
    seeds = torch.tensor(seeds, device=device)
    return knobs, start_state(knobs, dgemma.UniformNoise(VOCAB), seeds=seeds, canvas_len=CANVAS, num_steps=num_steps)


def extend(kind, state, **more):
    """Return a state of another class with the same fields."""
    return kind(**{f.name: getattr(state, f.name) for f in fields(state)}, **more)


def ragged_prompt():
    """Make rows of seven and five tokens, padded on the left. Both exceed the four tokens of a sliding layer."""
    prompt = draw_tokens(2, 7)
    real = torch.ones_like(prompt)
    real[1, :2] = 0
    return prompt, real


def test_both_modes_equal_the_reference_over_ragged_rows(models):
    prompt, real = ragged_prompt()
    canvas = draw_tokens(2, CANVAS, seed=1)
    before = torch.randn(2, CANVAS, VOCAB, generator=torch.Generator().manual_seed(4)).to(canvas.device)
    switched = torch.tensor([True, False], device=canvas.device)
    committed = torch.tensor([[True, True, True, True], [True, True, False, False]], device=canvas.device)
    results = []
    for model in models:
        cache = model.encode(prompt, attention_mask=real)
        prediction = model.denoise(canvas, cache, self_cond=before, self_cond_mask=switched)
        shaped = prediction.shaped(temperature=0.7)
        cache = model.encode(canvas, cache, committed)
        words = model.causal_logits(canvas[:, :2], cache)
        word = model.causal_logits(canvas[:, 3:], cache)
        assert cache.num_slots == 7 + 4 + 3
        results.append([prediction.logits, shaped.entropy, shaped.confidence, words, word, cache.lengths])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 16], ids=["own-tails", "one-tail"])
def test_a_prompt_in_chunks_equals_the_reference(size, device, monkeypatch):
    """A chunk of 16 tokens is longer than the tails, which fit two canvases. So both sliding layers share one."""
    reference = make_model(device, num_hidden_layers=3, layer_types=(SLIDING, SLIDING, FULL))
    fast = accelerate(copy.deepcopy(reference))
    monkeypatch.setattr(fast._arena, "most_read", 3 * size)
    prompt, ends = draw_tokens(3, 2 * size + 3), [3, size + 1, 2 * size + 3]  # one in each chunk
    real = torch.arange(2 * size + 3, 0, -1, device=device) <= torch.tensor(ends, device=device)[:, None]
    theirs, cache = reference.new_cache(3), fast.new_cache(3)
    want, got = reference.causal_logits(prompt, theirs, real), fast.causal_logits(prompt, cache, real)
    torch.testing.assert_close(got[real], want[real], **CLOSE)
    assert cache.lengths.tolist() == ends
    torch.testing.assert_close(fast.causal_logits(prompt[2:], fast.new_cache(1)), want[2:], **CLOSE)
    longer, word, canvas, alone = draw_tokens(1, 6 * size + 7), draw_tokens(1, 1), draw_tokens(3, 4), fast.new_cache(1)
    fast.causal_logits(longer[:, :3], alone)
    fast.encode(longer[:, 3:], alone)  # captures a forward while the window holds tokens
    torch.testing.assert_close(fast.denoise(canvas, cache).logits, reference.denoise(canvas, theirs).logits, **CLOSE)
    want = reference.causal_logits(word, reference.encode(longer))
    torch.testing.assert_close(fast.causal_logits(word, alone), want, **CLOSE)


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_chunks_cover_a_prompt_and_waste_little(batch, monkeypatch):
    monkeypatch.undo()  # the sizes that a GPU has
    plan_chunks.cache_clear()
    most = 8192 // batch
    assert plan_chunks(0, batch, most) == ()
    for num_tokens in (1, 15, 16, 17, 100, 700, 2100, 3500, 4400, 16_384):
        chunks = plan_chunks(num_tokens, batch, most)
        assert sum(chunks[:-1]) < num_tokens <= sum(chunks)
        assert max(chunks) <= most
        # At most a quarter more tokens than needed, or the 1,200 of two short forwards.
        assert batch * (sum(chunks) - num_tokens) <= max(batch * num_tokens / 4, 1200)


@pytest.mark.parametrize(
    "kind", ["published", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("masked", "shaped", "gibbs"))]
)
def test_generate_gives_the_same_with_the_fused_denoiser_and_the_reference(models, kind):
    prompt, real = ragged_prompt()
    alone = {"prompt_tokens": prompt[:1, :3], "max_new_tokens": CANVAS}
    options = {
        "published": {
            "prompt_tokens": prompt,
            "attention_mask": real,
            "max_new_tokens": 2 * CANVAS,
            "stop": dgemma.StableAndConfident(confidence=10.0),
        },
        "masked": {**alone, "noise": dgemma.MaskNoise(VOCAB), "sampler": dgemma.EntropyBound(bound=1.0)},
        "shaped": {**alone, "top_k": 5, "top_p": 0.9, "allowed": list(range(3, 30)), "stop": None, "steps": 3},
        "gibbs": {**alone, "sampler": dgemma.LeaveOneOutGibbs(corrections=1, num_positions=2), "steps": 3},
    }[kind]
    options = {"steps": 2, "seed": 5, "eos_token_ids": [7], "progress": False} | options
    want, got = (dgemma.generate(model, **options) for model in models)
    assert torch.equal(got.new_tokens, want.new_tokens)
    assert torch.equal(got.steps, want.steps)
    assert torch.equal(got.cache.lengths, want.cache.lengths)


@pytest.mark.parametrize(
    "options", [{"temperature": 0.8}, pytest.param({"top_k": 5}, marks=pytest.mark.slow)], ids=["all", "top-k"]
)
def test_autoregressive_tokens_are_those_of_the_reference(models, options):
    prompt, real = ragged_prompt()
    free = dgemma.generate_causal(models[0], prompt, attention_mask=real, max_new_tokens=4, eos_token_ids=[], **options)
    options |= {"eos_token_ids": [int(free[0, 1])], "max_new_tokens": 4}
    want, got = (dgemma.generate_causal(model, prompt, attention_mask=real, **options) for model in models)
    assert torch.equal(got, want)


@pytest.mark.slow
def test_a_token_replaced_between_two_steps_is_the_one_that_is_read(models):
    # A captured step returns its state as views of one tensor. Fields that the caller replaces are not in it.
    plain, fast = models
    tokens = draw_tokens(1, 5)
    row, no = torch.zeros_like(tokens[:, 0]), torch.zeros_like(tokens[:, 0], dtype=torch.bool)
    state = CausalState(token=tokens[:, 4:], number=row, done=no, broken=no, seeds=row)
    rule = CausalRule(temperature=1.0, top_k=1, top_p=None, eos_token_ids=(), pad_token_id=0)
    cache = fast.encode(tokens[:, :4])
    state = fast.causal_step(state, cache=cache, rule=rule)
    other = (state.token + 1) % VOCAB
    got = fast.causal_step(replace(state, token=other), cache=cache, rule=rule)
    want = plain.causal_logits(torch.cat((tokens, other), dim=1))[:, -1:].argmax(-1)
    assert torch.equal(got.token, want)


def test_the_soft_embedding_of_equal_probabilities_fits_float16(device):
    # 40 embeddings of 2,000 add up to 80,000, beyond float16. Their mean is 2,000, times sqrt(hidden size).
    model = make_model(device).to(torch.float16)
    model.embed_tokens.weight.fill_(2000.0)
    fast = accelerate(model)
    logits = Logits(torch.zeros(1, CANVAS, VOCAB, dtype=torch.float16, device=device))
    prediction = FusedPrediction(logits, (SoftCap(30.0),))
    got = fast._workspace.soft_embedding(prediction, torch.Size((1, CANVAS)))
    assert torch.equal(got, torch.full_like(got, 2000.0 * fast._forward.embed_scale))


@pytest.mark.slow
def test_a_step_can_be_repeated_from_any_state_and_overwritten_logits_are_refused(models):
    _, fast = models
    prompt, _ = ragged_prompt()
    cache = fast.encode(prompt[:1, :2])
    knobs, start = begin(fast.device, stop=dgemma.StableAndConfident())
    one, first = fast.step(start, cache=cache, knobs=knobs)
    kept = {name: getattr(first, name).clone() for name in ("canvas", "argmax", "entropy", "accepted")}
    two, _ = fast.step(one, cache=cache, knobs=knobs)
    with pytest.raises(RuntimeError, match="overwritten by a later step"):
        _ = first.prediction.logits
    other = replace(knobs, sampler=dgemma.EntropyBound(bound=100.0))  # another graph, not the old bound
    assert fast.step(one, cache=cache, knobs=other)[1].accepted.all()
    again, _ = fast.step(one, cache=cache, knobs=knobs)
    assert torch.equal(again.canvas, two.canvas)
    assert torch.equal(again.draft, two.draft)
    for name, value in kept.items():
        assert torch.equal(getattr(first, name), value)
    assert type(again) is dgemma.DenoiseState
    planted = replace(again, canvas=(again.canvas + 1) % VOCAB)
    again.canvas.copy_(planted.canvas)  # the engine must notice that its state was modified
    seen = [fast.step(state, cache=cache, knobs=knobs)[1].entropy for state in (again, planted)]
    assert torch.equal(*seen)


def take_first_step(fast):
    """A cache, the state after one step over it, and the knobs."""
    knobs, start = begin(fast.device)
    cache = fast.encode(draw_tokens(1, 3))
    return cache, fast.step(start, cache=cache, knobs=knobs)[0], knobs


@pytest.mark.slow
def test_a_state_can_be_copied_and_pickled_before_and_after_the_next_step(models):
    fast = models[1]
    cache, state, knobs = take_first_step(fast)
    logits = state.self_cond.logits.clone()
    copies = [copy.deepcopy(state), pickle.loads(pickle.dumps(state))]
    after, _ = fast.step(state, cache=cache, knobs=knobs)
    copies.append(copy.deepcopy(state))  # its logits were overwritten, its soft embedding was not
    for other in copies[:2]:
        assert torch.equal(other.self_cond.logits, logits)  # not overwritten with the original's
    for other in copies:
        assert torch.equal(fast.step(other, cache=cache, knobs=knobs)[0].canvas, after.canvas)


@pytest.mark.slow
def test_rows_that_stay_keep_the_bits_of_their_soft_embedding(models):
    fast = models[1]
    cache, state, knobs = take_first_step(fast)
    stayed = state.select(torch.tensor([0], device=fast.device))  # as when another row leaves the batch
    fast.step(state, cache=cache, knobs=knobs)
    assert torch.equal(stayed.self_cond.signal, state.self_cond.signal)


@pytest.mark.slow
def test_an_interrupted_step_does_not_change_the_next_one(models, monkeypatch):
    fast = models[1]
    cache, state, knobs = take_first_step(fast)
    want, _ = fast.step(copy.deepcopy(state), cache=cache, knobs=knobs)
    cache, state, knobs = take_first_step(fast)  # again, so that this is the engine's last step
    other = replace(state, canvas=(state.canvas + 1) % VOCAB, seeds=state.seeds + 1)
    with monkeypatch.context() as patch:
        patch.setattr(engine_step.CapturedStep, "_copy_results", MagicMock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            fast.step(other, cache=cache, knobs=knobs)
    got, _ = fast.step(state, cache=cache, knobs=knobs)
    assert torch.equal(got.canvas, want.canvas)


@pytest.mark.slow
def test_an_interrupted_read_loses_no_postponed_tokens(models, monkeypatch):
    fast, block = models[1], draw_tokens(1, CANVAS, seed=2)
    want, got = (fast.encode(block, fast.encode(draw_tokens(1, 3))) for _ in range(2))
    with monkeypatch.context() as patch:
        patch.setattr(Forward, "read", MagicMock(side_effect=KeyboardInterrupt))
        patch.setattr(Replay, "replay", MagicMock(side_effect=KeyboardInterrupt))  # if a graph reads the tokens
        with pytest.raises(KeyboardInterrupt):
            got.catch_up()
    assert got.num_slots == 3 + CANVAS
    word = draw_tokens(1, 1, seed=6)
    assert torch.equal(fast.causal_logits(word, got), fast.causal_logits(word, want))


def short_texts(num_rows, device):
    """Texts of even ids and at most one odd id, which is the last one before the stop token 7."""
    table = np.array([[-1, 1, 2], [-1, 1, 2], [-1, -1, -1]], np.int32)
    tokens = TokenAutomaton(1 + np.arange(VOCAB) % 2, table, np.ones(3, bool))
    automaton = with_stops(tokens, (7,), VOCAB).to(device)
    end = torch.ones(num_rows, 4, dtype=torch.bool, device=device)
    return Language(automaton, torch.zeros(num_rows, dtype=torch.int64, device=device), end)


@pytest.mark.parametrize("num_rows", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("bound", "commit", "stop", "more"),
    [
        (0.05, "argmax", None, {"top_p": 0.95}),
        (0.05, "argmax", dgemma.StableAndConfident(confidence=10.0), {}),
        (0.5, "canvas", dgemma.StableAndConfident(stability=2, confidence=1.5, compare="canvas"), {"top_k": 3}),
    ],
    ids=["fixed-steps", "published", "of-canvases"],
)
def test_a_published_step_equals_the_librarys_step_in_every_field(
    models, bound, commit, stop, more, num_rows, monkeypatch, device
):
    # The check takes one more step than the run has.
    check_published_steps(models, monkeypatch, device, bound, commit, stop, num_rows, 5, **more)


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [None, 3])
def test_a_published_step_under_a_language_equals_the_librarys_step_in_every_field(models, top_k, monkeypatch, device):
    stop = dgemma.StableAndConfident(confidence=10.0)
    language = short_texts(1, device)
    drafts = check_published_steps(
        models, monkeypatch, device, 0.05, "argmax", stop, 1, 3, top_k=top_k, language=language
    )
    for draft in drafts:
        assert (language.automaton.advance(language.start, draft) >= 0).all()


def check_published_steps(models, monkeypatch, device, bound, commit, stop, num_rows, num_taken, language=None, **cuts):
    """Compare steps of the engine with those of the library, and return the drafts."""
    fast = accelerate(copy.deepcopy(models[0]))  # of its own, because its graphs keep the functions that follow
    # The logits depend on the position's token and favour token 7, between a little and strongly.
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2)).to(device)
    table[:, 7] += torch.linspace(4, 9, VOCAB, device=device)
    monkeypatch.setattr(Forward, "canvas", lambda self, tokens, signal, buffers: tokens.flatten())
    monkeypatch.setattr(Forward, "head", lambda self, hidden, out: out.copy_(table[hidden]))
    launches = []
    monkeypatch.setattr(published, "accept", lambda *args, **more: launches.append(1) or accept.accept(*args, **more))
    sampler = dgemma.EntropyBound(bound=bound, commit=commit)
    knobs = Knobs(sampler=sampler, temperature=dgemma.LinearTemperature(), stop=stop, **cuts)
    tokens = draw_tokens(num_rows, CANVAS, seed=8)
    frozen = torch.zeros_like(tokens, dtype=torch.bool)
    frozen[0, 1] = True
    state = start_state(
        knobs,
        dgemma.UniformNoise(VOCAB, schedule=OneMinusCosine()),
        seeds=11 + torch.arange(num_rows, device=device),
        canvas_len=CANVAS,
        num_steps=4,
        block=2,
        canvas=tokens,
        frozen=frozen,
        language=language,
    )
    cache = fast.encode(draw_tokens(num_rows, 2))
    num_accepted, num_renoised, drafts = 0, 0, []
    for number in range(num_taken):
        after, record = fast.step(state, cache=cache, knobs=knobs)
        if number % 2:  # computes the soft embedding now; the logits stay readable
            assert fast.read_ahead(record.verdict) == record.verdict.tolist()
        # Both decide from the same numbers: the kernels' statistics of the same logits.
        logits = Logits(record.prediction._raw.clone())
        prediction = FusedPrediction(logits, (SoftCap(fast.config.final_logit_softcapping),))
        want_after, want_record = dgemma.step(ConstantDenoiser(prediction), state, cache=cache, knobs=knobs)
        for got, want in ((after, want_after), (record, want_record)):
            for column in fields(want):
                expected, value = getattr(want, column.name), getattr(got, column.name)
                if isinstance(expected, torch.Tensor):
                    assert value.dtype == expected.dtype, column.name
                    assert torch.equal(value, expected), column.name
                elif column.name in ("memory", "stop_memory", "awaited", "allowed"):
                    assert value == expected, column.name
        for name in ("argmax", "entropy", "confidence", "noise_level"):  # properties of a record
            assert torch.equal(getattr(record, name), getattr(want_record, name)), name
        assert torch.equal(record.prediction.logits, want_record.prediction.logits)
        num_accepted, num_renoised = num_accepted + record.accepted.sum(), num_renoised + record.renoised.sum()
        drafts.append(after.draft)
        state = after
    assert launches
    assert num_accepted > 0
    assert num_renoised > 0
    assert state.done.any() == (stop is not None)
    return drafts


@dataclass(frozen=True, kw_only=True)
class TracedState(dgemma.DenoiseState):
    """A state with three added fields: a tensor, a number that keys the graph, and half of that number."""

    label: torch.Tensor
    limit: int = 3
    half: int = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "half", self.limit // 2)


@dataclass(frozen=True, kw_only=True)
class ComputedState(dgemma.DenoiseState):
    """A state with a tensor that is computed from another one."""

    twice: torch.Tensor = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "twice", 2 * self.canvas)


@dataclass(frozen=True, kw_only=True)
class AddLabel(dgemma.Sampler):
    """Adds the label to the argmax at the positions below the limit."""

    revises: ClassVar[bool] = True

    def __call__(self, prediction, state):
        positions = torch.arange(state.canvas_len, device=state.device).expand_as(state.canvas)
        tokens = (prediction.argmax + state.label[:, None]) % VOCAB
        return dgemma.Decision(tokens=tokens, write=positions < state.limit, renoise=positions > state.limit)


def test_a_captured_step_refuses_a_tensor_that_it_cannot_compute_again(models, device):
    knobs, plain = begin(device, sampler=AddLabel())
    state = extend(ComputedState, plain)
    with pytest.raises(ValueError, match="twice is a tensor in a field with init=False"):
        models[1].step(state, cache=models[1].new_cache(1), knobs=knobs)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [AddLabel(), dgemma.EntropyBound(bound=0.5)], ids=["own", "published"])
def test_a_field_added_to_the_state_arrives_in_the_captured_step_and_in_the_next_state(models, sampler, device):
    knobs, plain = begin(device, sampler=sampler, seeds=(3, 4))
    ends = []
    for model in models:
        state = extend(TracedState, plain, label=torch.tensor([5, 11], device=device))
        cache = model.encode(draw_tokens(2, 3))
        for _ in range(2):
            state, _ = take_step(model, state, cache=cache, knobs=knobs)
            assert type(state) is TracedState
        other, _ = take_step(model, replace(state, label=state.label + 7, limit=1), cache=cache, knobs=knobs)
        ends.append((state.canvas, state.label, other.canvas, other.label))
        assert (state.limit, state.half, other.limit, other.half) == (3, 1, 1, 0)
    for want, got in zip(*ends, strict=True):
        assert torch.equal(got, want)


class OwnDraw(dgemma.DenoiseState):
    """A state that draws 1/4 everywhere."""

    @staticmethod
    def draw(seeds, block, step, num_positions, purpose):
        return torch.full((len(seeds), num_positions), 0.25, dtype=torch.float64, device=seeds.device)


class OwnUniform(dgemma.DenoiseState):
    """A state that has its own uniforms for noise tokens."""

    def uniform(self, purpose):
        places = torch.arange(self.canvas_len, device=self.device, dtype=torch.float64) / self.canvas_len
        return places.expand_as(self.canvas) if purpose == "noise" else super().uniform(purpose)


BOUND = dgemma.EntropyBound(bound=0.5)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "sampler"), [(OwnDraw, BOUND), (OwnUniform, BOUND), (OwnDraw, dgemma.Ancestral())])
def test_the_engine_uses_the_draws_of_a_state_that_has_its_own(models, kind, sampler, device):
    knobs, plain = begin(device, sampler=sampler, seeds=(3, 4), num_steps=3)
    own = extend(kind, plain)
    ends = []
    for model in models:
        cache = model.encode(draw_tokens(2, 3))
        other, _ = take_step(model, plain, cache=cache, knobs=knobs)  # now a graph has the library's draws
        first, _ = take_step(model, own, cache=cache, knobs=knobs)
        second, _ = take_step(model, first, cache=cache, knobs=knobs)
        ends.append((other.canvas, first.canvas, second.canvas))
        assert type(second) is kind
        assert not torch.equal(other.canvas, first.canvas)
    for want, got in zip(*ends, strict=True):
        assert torch.equal(got, want)


def test_the_kernel_of_the_published_sampler_refuses_fields_and_draws_that_it_does_not_know(models, device):
    _, plain, knobs = take_first_step(models[1])
    assert published.is_published(plain, knobs)
    assert published.is_published(extend(type("Renamed", (dgemma.DenoiseState,), {}), plain), knobs)
    for changes in ({"allowed": torch.ones(1, 1, VOCAB)}, {"awaited": plain.open}):
        assert not published.is_published(replace(plain, **changes), knobs)
    for kind in (OwnDraw, OwnUniform):
        assert not published.is_published(extend(kind, plain), knobs)
    assert not published.is_published(extend(TracedState, plain, label=plain.seeds), knobs)


def test_a_sampler_that_waits_for_the_host_is_named(models, monkeypatch):
    fast = models[1]
    cache, state, knobs = take_first_step(fast)  # on a GPU, reading a prompt captures graphs too

    def fail(*args, **options):
        raise CaptureError("This work could not be captured in a CUDA graph (operation not permitted).")

    monkeypatch.setattr(engine_step, "Replay", fail)
    sentence = (
        r"could not be captured in a CUDA graph \(operation not permitted\)\. If Ancestral\(.*makes the host wait"
    )
    with pytest.raises(RuntimeError, match=sentence):
        fast.step(state, cache=cache, knobs=replace(knobs, sampler=dgemma.Ancestral()))


WAITS = """
import copy, dataclasses, torch, dgemma
from dgemma.sampling import SoftThreshold
from dgemma_kernels import accelerate
from kernel_inputs import make_model

class Waits(dgemma.Ancestral):
    def __call__(self, prediction, state):
        if prediction.entropy.max().item() > 1e9:
            raise AssertionError
        return super().__call__(prediction, state)

model = make_model(torch.device("cuda"))
plain, fast = copy.deepcopy(model), accelerate(model)
options = {"max_new_tokens": 8, "steps": 3, "eos_token_ids": (), "progress": False}
tokens, stream = torch.arange(6, device="cuda")[None], torch.cuda.current_stream()
try:
    dgemma.generate(fast, tokens, sampler=Waits(), **options)
except RuntimeError as error:
    print(error)
assert torch.cuda.current_stream() == stream
torch.cuda.empty_cache()
got, want = (dgemma.generate(each, tokens, sampler=dgemma.Ancestral(), **options).new_tokens for each in (fast, plain))
assert torch.equal(got, want), (got, want)
"""


@pytest.mark.gpu
def test_after_a_sampler_that_waits_for_the_host_the_model_writes_with_another():
    # In another process, because torch before 2.12 does not recover from a failed capture by itself.
    ran = subprocess.run(
        [sys.executable, "-c", WAITS],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"could not be captured in a CUDA graph \(.+\)\. If Waits\(.*makes the host wait", ran.stdout)


@pytest.mark.slow
def test_a_sampler_may_remember_views_of_its_inputs(models):
    @dataclass(frozen=True, kw_only=True)
    class LastTwo(dgemma.Sampler):
        revises: ClassVar[bool] = True

        def start(self, state):
            return torch.zeros_like(state.canvas), torch.zeros_like(state.canvas)

        def __call__(self, prediction, state):
            last, before = state.memory
            return dgemma.Decision(
                tokens=(prediction.argmax + before) % VOCAB,
                write=torch.ones_like(state.open),
                renoise=torch.zeros_like(state.open),
                memory=(prediction.argmax, last.view_as(last)),
            )

    seen = []
    for model in models:
        seen.append([])
        keep = lambda record: seen[-1].append((record.state.canvas, *record.state.memory))  # noqa: E731
        options = {"sampler": LastTwo(), "stop": None, "max_new_tokens": CANVAS, "steps": 4, "eos_token_ids": []}
        dgemma.generate(model, draw_tokens(1, 3), seed=5, on_step=keep, progress=False, **options)
    for want, got in zip(*seen, strict=True):
        assert all(torch.equal(*pair) for pair in zip(want, got, strict=True))


def test_a_finished_canvas_is_read_together_with_the_next_one(models):
    prompt, real = ragged_prompt()
    block, word = draw_tokens(2, CANVAS, seed=2), draw_tokens(2, 1, seed=6)
    knobs, start = begin(prompt.device, seeds=(11, 12))
    results = []
    for model in models:
        cache = model.encode(block, model.encode(prompt, attention_mask=real))
        waits = getattr(cache, "postponed", None) is not None
        seen = cache.num_slots, cache.num_seen
        _, record = take_step(model, start, cache=cache, knobs=knobs)
        logits = record.prediction.logits
        assert getattr(cache, "postponed", None) is None
        assert (cache.num_slots, cache.num_seen) == seen == (7 + CANVAS, 7 + CANVAS)
        results.append([logits, cache.lengths, model.causal_logits(word, cache)])
        assert waits is (model is models[1])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, **CLOSE)


def test_caches_are_cloned_selected_and_spliced_like_the_reference(models):
    prompt, real = ragged_prompt()
    more = draw_tokens(2, 4, seed=2)
    ends = []
    for model in models:
        cache = model.encode(prompt, attention_mask=real)
        lengths, aside = cache.lengths.clone(), cache.clone()
        model.encode(more, cache)
        assert torch.equal(aside.lengths, lengths)
        rows = torch.tensor([1], device=prompt.device), torch.tensor([0], device=prompt.device)
        parts = [cache.select(row) for row in rows]
        cache = parts[0].select(torch.zeros_like(prompt[:, 0]))
        for row, part in zip(rows, parts, strict=True):
            cache.splice(row, part)
        ends.append((model.causal_logits(more[:, :1], cache), model.causal_logits(more[:, :1], aside)))
    for want, got in zip(*ends, strict=True):
        torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.slow
def test_after_warm_up_calls_capture_no_forward_and_give_the_same(models, monkeypatch):
    reference, fast = models[0], accelerate(copy.deepcopy(models[0]))
    monkeypatch.setattr(reading, "_SIZES", (4, 8))  # fewer, for the interpreter
    plan_chunks.cache_clear()
    fast._workspace.graphs.most = 1  # the graphs of the warm-up have room of their own
    fast.warm_up(2, 30, progress=False)
    captured = {*fast._workspace.graphs, *fast._stepper.graphs}
    for num_rows, num_tokens in ((1, 1), (2, 11)):
        prompt = draw_tokens(num_rows, num_tokens)
        results = [dgemma.generate(model, prompt, max_new_tokens=2 * CANVAS, steps=1) for model in (reference, fast)]
        assert torch.equal(results[0].new_tokens, results[1].new_tokens)
    assert {*fast._workspace.graphs, *fast._stepper.graphs} == captured
    plan_chunks.cache_clear()


def test_the_model_keeps_working_and_no_weight_is_stored_twice(device):
    model = make_model(device)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fast = accelerate(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    attention, taken = model.layers[0].self_attn, fast._forward.weights.layers[0]
    assert attention.v_proj.weight.untyped_storage().data_ptr() == taken.qkv.untyped_storage().data_ptr()
    assert model.layers[1].mlp.up_proj.weight.data_ptr() == fast._forward.weights.layers[1].gate_up[32:].data_ptr()
    again = accelerate(model)._forward.weights.layers[0]  # as when a cell of a notebook is run again
    assert (again.qkv.data_ptr(), again.gate_up.data_ptr()) == (taken.qkv.data_ptr(), taken.gate_up.data_ptr())
    assert torch.equal(again.qkv, taken.qkv)


def test_generation_defaults_start_as_the_models_and_then_change_independently(device):
    model = make_model(device)
    fast, before = accelerate(model), model.generation
    model.generation = replace(before, max_new_tokens=7)
    assert fast.generation == before
    fast.generation = replace(before, max_new_tokens=9)
    assert (fast.generation.max_new_tokens, model.generation.max_new_tokens) == (9, 7)


def test_unsupported_arguments_raise_with_a_reason(models, monkeypatch):
    plain, fast = models
    prompt, _ = ragged_prompt()
    with pytest.raises(ValueError, match="weights must be one of bf16, packed, fp8, int4, nvfp4, got 'int2'"):
        accelerate(plain, weights="int2")
    with pytest.raises(TypeError, match=r"model must be a DiffusionGemma, got FusedDenoiser\. Pass the original"):
        accelerate(fast, weights="packed")
    with pytest.raises(ValueError, match="head_dim must be a power of two >= 16"):
        accelerate(dgemma.DiffusionGemma(plain.config.replace(head_dim=24), device=plain.device))
    with pytest.raises(ValueError, match="cache must come from this model"):
        fast.denoise(prompt[:, :CANVAS], plain.encode(prompt))
    with pytest.raises(ValueError, match="cache must come from encode of this model"):
        plain.denoise(prompt[:, :CANVAS], fast.encode(prompt))
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match="needs the model on a CUDA GPU"):
        accelerate(dgemma.DiffusionGemma(plain.config, device="cpu"))


def test_one_warning_names_all_kernels_that_another_version_of_triton_would_replace(monkeypatch, caplog, device):
    caplog.set_level("INFO", "dgemma")
    for module in (attention, experts):
        monkeypatch.setattr(module, "is_hopper", lambda device: True)
    monkeypatch.setattr(configs, "GLUON_RAN_WITH", ("2.0.",))
    needs = (
        f'The faster ones need Triton 2.0.*, got {triton.__version__} (pip install "torch==2.11.*" "triton==2.0.*").'
    )
    heads = {"head_dim": 256, "global_head_dim": 512}  # that fit the Hopper kernels
    widths = {"hidden_size": 128, "moe_intermediate_size": 64}  # of experts that fit theirs
    accelerate(make_model(device, **heads, **widths).bfloat16())
    accelerate(make_model(device, **heads, **widths).bfloat16(), attention="triton")
    # The same with all versions:
    accelerate(make_model(device, **heads, **widths).bfloat16(), "packed", attention="triton")
    accelerate(make_model(device).bfloat16(), attention="triton")
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", f"accelerate runs slower kernels of attention and experts for long prompts. {needs}"),
        ("WARNING", f"accelerate runs slower kernels of experts for long prompts. {needs}"),
    ]


def test_uniform_draws_the_reference_bits(device):
    seeds, block, step = (
        torch.tensor([0, -3, 2**62], device=device),
        torch.arange(3, device=device),
        torch.tensor([0, 5, 47]).to(device),
    )
    for purpose in ("token", "noise"):
        want = reference_draws.uniform(seeds, block, step, 37, purpose)
        assert torch.equal(draws.uniform(seeds, block, step, 37, purpose), want)


def test_a_denoiser_is_neither_copied_nor_pickled_and_the_error_names_a_fix(models):
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"FusedDenoiser .* Accelerate a copy of the model"):
            attempt(models[1])


def test_a_copied_cache_is_a_clone_and_a_pickled_one_is_refused_with_a_fix(models):
    _, fast = models
    cache = fast.encode(draw_tokens(1, 3))
    other = copy.deepcopy({"kept": cache})["kept"]
    for mine, own in zip(cache.layers, other.layers, strict=True):
        assert torch.equal(mine.keys[:, :, :3], own.keys[:, :, :3])
        assert mine.keys.data_ptr() != own.keys.data_ptr()
    fast.denoise(draw_tokens(1, CANVAS), other)  # the clone belongs to the same denoiser
    for attempt in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match=r"FusedCache .* Keep its tokens, and encode them again"):
            attempt(cache)


def test_a_model_with_adapters_is_refused_until_they_are_merged(device):
    # The kernels read only base weights and would silently ignore the adapters.
    model = dgemma.DiffusionGemma(dgemma.presets.tiny(), device=device)
    add_lora(model, LoRA(rank=4))
    with pytest.raises(ValueError, match="merge_lora"):
        accelerate(model)


@pytest.mark.slow
def test_rows_that_replace_one_another_write_the_tokens_of_generate(models):
    # Prompts longer and shorter than the sliding window; rows end after one or two blocks.
    prompts = [draw_tokens(length, seed=length) for length in (7, 2, 5)]
    options = {"max_new_tokens": 8, "steps": 2, "eos_token_ids": range(3, 12)}
    wanted = [dgemma.generate(models[0], row[None], seed=[at], **options) for at, row in enumerate(prompts)]
    assert len({want.steps.shape[1] for want in wanted}) > 1
    for got, want in zip(dgemma.generate_many(models[1], prompts, batch_size=2, **options), wanted, strict=True):
        assert torch.equal(got.new_tokens, want.new_tokens[0].cpu())
        assert torch.equal(got.steps, want.steps[0].cpu())


@pytest.mark.slow
def test_a_spliced_cache_has_the_rows_of_the_donor(models):
    prompt, real = ragged_prompt()
    canvas = draw_tokens(2, CANVAS, seed=1)
    predictions = []
    for model in models:
        cache, donor = model.encode(prompt, attention_mask=real), model.encode(draw_tokens(1, 9, seed=2))
        model.encode(draw_tokens(1, CANVAS, seed=3), donor)  # the engine postpones it
        cache.splice(torch.tensor([1], device=prompt.device), donor)
        assert (cache.lengths.tolist(), cache.num_slots) == ([7, 13], 13)
        predictions.append(model.denoise(canvas, cache).logits)
    torch.testing.assert_close(*predictions, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [dgemma.EntropyBound(bound=1.0), SoftThreshold(tau=0.3)], ids=repr)
def test_a_run_of_the_engine_has_the_log_prob_that_its_steps_had(models, sampler):
    """The steps replay graphs, and `log_prob` predicts without them: the ratio of both is 1."""
    plain, fast = models
    sums = torch.zeros(2, dtype=torch.float64, device=fast.device)

    def add(record):
        sums.index_add_(0, record.rows, record.log_prob)

    options = {"max_new_tokens": 2 * CANVAS, "steps": 2, "stop": None, "eos_token_ids": [], "temperature": 2.0}
    out = dgemma.generate(fast, draw_tokens(2, 5), sampler=sampler, on_step=add, record=True, progress=False, **options)
    # A step reads the block before it in its own forward, and `log_prob` reads that block alone. On CUDA, products of
    # other sizes add in another order. A row has 16 tokens, each with a float32 log-probability rounded to 2^-21.
    atol = 16 * 2**-21 if sums.is_cuda else 1e-12
    torch.testing.assert_close(out.trajectory.log_prob(fast), sums, rtol=0, atol=atol)
    with torch.no_grad():
        known = out.trajectory.log_prob(plain, strict=False)
    torch.testing.assert_close(known, sums, rtol=1e-3, atol=1e-3)


def test_a_kept_prediction_does_not_keep_the_weights_of_its_engine(device):
    fast = accelerate(make_model(device))
    prediction = fast.denoise(draw_tokens(1, CANVAS), fast.encode(draw_tokens(1, 3)))
    workspace = weakref.ref(fast._workspace)
    del fast
    gc.collect()
    assert workspace() is None
    assert prediction.as_self_cond().shape == prediction.logits.shape
