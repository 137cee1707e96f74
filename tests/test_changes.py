"""What a callback changes holds from the next step on, and nothing is remembered that no longer fits."""

from dataclasses import replace

import pytest
import torch

import dgemma
from dgemma.changes import apply_changes
from dgemma.generate import Knobs, start_state
from dgemma.sampling import KLASS, Ancestral, Confidence, ConstantTemperature, EntropyBound, StableAndConfident

VOCAB, CANVAS_LEN = 11, 6


def fresh(sampler, noise=None, stop=None):
    knobs = Knobs(sampler=sampler, temperature=ConstantTemperature(1.0), stop=stop)
    noise = noise or dgemma.MaskNoise(VOCAB)
    return start_state(knobs, noise, seeds=torch.arange(2), canvas_len=CANVAS_LEN, num_steps=4), knobs


def test_a_new_temperature_holds_for_the_very_next_step():
    state, knobs = fresh(EntropyBound())
    state, knobs = apply_changes({"temperature": 0.25}, state, knobs)
    assert state.temperature.tolist() == [0.25, 0.25]
    assert knobs.temperature == ConstantTemperature(0.25)


def test_a_temperature_tensor_is_this_steps_alone():
    state, knobs = fresh(EntropyBound())
    state, changed = apply_changes({"temperature": torch.tensor([0.5, 2.0])}, state, knobs)
    assert state.temperature.tolist() == [0.5, 2.0]
    assert changed == knobs


def test_a_sampler_with_other_memory_starts_afresh():
    state, knobs = fresh(EntropyBound())
    assert state.memory is None
    state, knobs = apply_changes({"sampler": KLASS(history=2)}, state, knobs)
    assert state.memory.divergences.shape == (2, 2, CANVAS_LEN)
    kept = replace(state, memory=state.memory._replace(divergences=torch.zeros(2, 2, CANVAS_LEN)))
    same_form, _ = apply_changes({"sampler": KLASS(history=2, tau=0.5)}, kept, knobs)
    assert bool((same_form.memory.divergences == 0).all())
    longer, _ = apply_changes({"sampler": KLASS(history=3)}, kept, knobs)
    assert longer.memory.divergences.shape == (2, 3, CANVAS_LEN)
    assert bool(longer.memory.divergences.isinf().all())


def test_a_stop_rule_with_a_longer_memory_starts_afresh():
    state, knobs = fresh(EntropyBound(), stop=StableAndConfident(stability=1))
    state, knobs = apply_changes({"stop": StableAndConfident(stability=2)}, state, knobs)
    assert state.stop_memory.shape == (2, 2, CANVAS_LEN)
    state, knobs = apply_changes({"stop": None}, state, knobs)
    assert knobs.stop is None


def test_a_canvas_planted_under_mask_noise_opens_its_masks():
    state, knobs = fresh(Confidence())
    canvas = torch.full((2, CANVAS_LEN), 7)
    canvas[0, 2] = 4  # the mask
    planted, _ = apply_changes({"canvas": canvas}, state, knobs)
    assert planted.open.nonzero().tolist() == [[0, 2]]
    by_replace, _ = apply_changes(replace(state, canvas=canvas), state, knobs)
    assert torch.equal(by_replace.open, planted.open)
    kept_open, _ = apply_changes({"canvas": canvas, "open": state.open}, state, knobs)
    assert bool(kept_open.open.all())


def test_freezing_closes_and_unfreezing_opens():
    state, knobs = fresh(EntropyBound(), noise=dgemma.UniformNoise(VOCAB))
    frozen = torch.zeros(2, CANVAS_LEN, dtype=torch.bool)
    frozen[:, 1] = True
    closed, _ = apply_changes({"frozen": frozen}, state, knobs)
    assert torch.equal(closed.open, ~frozen)
    opened, _ = apply_changes({"frozen": ~frozen & False}, closed, knobs)
    assert bool(opened.open.all())


def test_the_mask_stays_unproposable_when_allowed_changes():
    state, knobs = fresh(Confidence())
    changed, _ = apply_changes({"allowed": torch.ones(1, 1, VOCAB, dtype=torch.bool)}, state, knobs)
    assert changed.allowed[0, 0].logical_not().nonzero().tolist() == [[4]]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"bound": 0.1}, "must be among state, .*; got bound"),
        ({"rows": torch.arange(2)}, "got rows"),
        (
            {"canvas": torch.zeros(2, 3, dtype=torch.int64)},
            r"DenoiseState\.canvas must stay torch\.int64 \(2, 6\), got",
        ),
        ({"frozen": torch.zeros(2, 6)}, r"DenoiseState\.frozen must stay torch\.bool"),
        ({"sampler": Confidence()}, "Confidence must run under mask noise, got uniform"),
    ],
    ids=["unknown", "fixed", "shape", "dtype", "process"],
)
def test_changes_that_do_not_fit_are_refused(changes, sentence):
    state, knobs = fresh(Ancestral(), noise=dgemma.UniformNoise(VOCAB))
    with pytest.raises(ValueError, match=sentence):
        apply_changes(changes, state, knobs)
