"""Changes apply from the next step on, and memory that no longer fits is replaced."""

from dataclasses import dataclass, field, fields, replace

import pytest
import torch

import dgemma
from dgemma.run.changes import apply_changes
from dgemma.run.knobs import Knobs
from dgemma.run.step import start_state
from dgemma.sampling import KLASS, Ancestral, Confidence, ConstantTemperature, EntropyBound, StableAndConfident

VOCAB, CANVAS_LEN = 11, 6


def fresh(sampler, noise=None, stop=None):
    knobs = Knobs(sampler=sampler, temperature=ConstantTemperature(1.0), stop=stop)
    noise = noise or dgemma.MaskNoise(VOCAB)
    return start_state(knobs, noise, seeds=torch.arange(2), canvas_len=CANVAS_LEN, num_steps=4), knobs


def test_a_new_temperature_applies_to_the_next_step():
    state, knobs = fresh(EntropyBound())
    state, knobs = apply_changes({"temperature": 0.25}, state, knobs)
    assert state.temperature.tolist() == [0.25, 0.25]
    assert knobs.temperature == ConstantTemperature(0.25)


def test_a_temperature_tensor_applies_to_one_step_only():
    state, knobs = fresh(EntropyBound())
    state, changed = apply_changes({"temperature": torch.tensor([0.5, 2.0])}, state, knobs)
    assert state.temperature.tolist() == [0.5, 2.0]
    assert changed == knobs


def test_a_sampler_with_other_memory_starts_with_new_memory():
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


def test_a_stop_rule_with_longer_memory_starts_with_new_memory():
    state, knobs = fresh(EntropyBound(), stop=StableAndConfident(stability=1))
    state, knobs = apply_changes({"stop": StableAndConfident(stability=2)}, state, knobs)
    assert state.stop_memory.shape == (2, 2, CANVAS_LEN)
    state, knobs = apply_changes({"stop": None}, state, knobs)
    assert knobs.stop is None


def test_a_new_canvas_under_mask_noise_opens_its_masks():
    state, knobs = fresh(Confidence())
    canvas = torch.full((2, CANVAS_LEN), 7)
    canvas[0, 2] = 4  # the mask
    planted, _ = apply_changes({"canvas": canvas}, state, knobs)
    assert planted.open.nonzero().tolist() == [[0, 2]]
    by_replace, _ = apply_changes(replace(state, canvas=canvas), state, knobs)
    assert torch.equal(by_replace.open, planted.open)
    kept_open, _ = apply_changes({"canvas": canvas, "open": state.open}, state, knobs)
    assert bool(kept_open.open.all())


def test_freezing_a_position_closes_it_and_unfreezing_opens_it():
    state, knobs = fresh(EntropyBound(), noise=dgemma.UniformNoise(VOCAB))
    frozen = torch.zeros(2, CANVAS_LEN, dtype=torch.bool)
    frozen[:, 1] = True
    closed, _ = apply_changes({"frozen": frozen}, state, knobs)
    assert torch.equal(closed.open, ~frozen)
    opened, _ = apply_changes({"frozen": ~frozen & False}, closed, knobs)
    assert bool(opened.open.all())


def test_the_mask_is_never_proposed_after_allowed_changes():
    state, knobs = fresh(Confidence())
    changed, _ = apply_changes({"allowed": torch.ones(1, 1, VOCAB, dtype=torch.bool)}, state, knobs)
    assert changed.allowed[0, 0].logical_not().nonzero().tolist() == [[4]]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"bound": 0.1}, r"must be among state, .*, got \['bound'\]"),
        (
            {"canvas": torch.zeros(2, 3, dtype=torch.int64)},
            r"DenoiseState\.canvas must stay torch\.int64 \(2, 6\), got",
        ),
        ({"sampler": Confidence()}, "Confidence must run under mask noise, got 'uniform'"),
        (5, r"changes must be DenoiseState or Mapping\[str, Any\] or None, got 5"),
        ({"canvas": torch.full((2, 6), 11)}, r"DenoiseState\.canvas must hold ids in \[0, 11\), got 11\.\.11\."),
        (
            {"allowed": torch.zeros(1, 1, VOCAB, dtype=torch.bool)},
            r"DenoiseState\.allowed must leave at least one token",
        ),
        ({"allowed": torch.ones(3, VOCAB, dtype=torch.bool)}, r"must broadcast to .* = \(2, 6, 11\), got \(1, 3, 11\)"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_changes_that_do_not_fit_are_refused(changes, sentence):
    state, knobs = fresh(Ancestral(), noise=dgemma.UniformNoise(VOCAB))
    with pytest.raises(ValueError, match=sentence):
        apply_changes(changes, state, knobs)


def allow(*ids):
    table = torch.zeros(VOCAB, dtype=torch.bool)
    table[list(ids)] = True
    return table


UNIFORM = dgemma.UniformNoise(VOCAB)


@pytest.mark.parametrize("allowed", [allow(5), allow(5).expand(CANVAS_LEN, -1), [5], [[5]] * CANVAS_LEN])
def test_every_form_of_an_allowed_set_becomes_rows_positions_and_tokens(allowed):
    state, knobs = fresh(EntropyBound(), noise=UNIFORM)
    changed, _ = apply_changes({"allowed": allowed}, state, knobs)
    if isinstance(allowed, torch.Tensor):
        started = start_state(
            knobs, UNIFORM, seeds=torch.arange(2), canvas_len=CANVAS_LEN, num_steps=4, allowed=allowed
        )
        assert torch.equal(started.allowed, changed.allowed)
    assert changed.allowed.dim() == 3
    selected = changed.select(torch.tensor([1]))
    assert torch.equal(selected.allowed.expand(1, CANVAS_LEN, -1), allow(5).expand(1, CANVAS_LEN, -1))


def started(allowed, seeds=(0, 1)):
    knobs = Knobs(sampler=EntropyBound(), temperature=ConstantTemperature(1.0))
    return start_state(knobs, UNIFORM, seeds=torch.tensor(seeds), canvas_len=CANVAS_LEN, num_steps=4, allowed=allowed)


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (None, allow(5)),
        (allow(6), None),
        (allow(6), allow(5)),
        (allow(6), allow(5).expand(CANVAS_LEN, -1)),
        (allow(6).expand(2, CANVAS_LEN, -1), allow(5).expand(2, CANVAS_LEN, -1)),
        (allow(6).expand(2, 1, -1), allow(5).expand(2, CANVAS_LEN, -1)),
    ],
    ids=["donor-alone", "host-alone", "shared", "shared-by-position", "own", "own-by-row"],
)
def test_a_spliced_row_has_the_donors_allowed_set_and_other_rows_keep_theirs(mine, theirs):
    host, donor = started(mine), started(theirs, seeds=(8, 9)).select(torch.tensor([0]))
    spliced = host.splice(torch.tensor([1]), donor)
    everything = torch.ones(VOCAB, dtype=torch.bool)
    table = spliced.allowed.expand(2, CANVAS_LEN, -1)
    for row, expected in enumerate((mine, theirs)):
        expected = everything if expected is None else expected.reshape(-1, VOCAB)[0]
        assert torch.equal(table[row], expected.expand(CANVAS_LEN, -1))
    assert torch.equal(spliced.canvas[1], donor.canvas[0])


def test_a_state_is_not_started_where_no_token_is_allowed():
    with pytest.raises(ValueError, match="start_state allowed must leave at least one token at every position"):
        started(allow())


def test_steps_after_the_last_have_no_noise_and_the_last_temperature():
    class Flat(dgemma.Denoiser):
        def denoise(self, canvas, cache, self_cond=None):
            return dgemma.Prediction(torch.zeros(*canvas.shape, VOCAB))

    knobs = Knobs(sampler=Ancestral(), temperature=dgemma.LinearTemperature(start=0.8, end=0.4))
    state = start_state(knobs, UNIFORM, seeds=torch.arange(2), canvas_len=CANVAS_LEN, num_steps=2)
    for _ in range(6):
        state, _ = dgemma.step(Flat(), state, cache=None, knobs=knobs)
    assert state.noise_level.tolist() == state.next_noise_level.tolist() == [0.0, 0.0]
    assert state.temperature.tolist() == pytest.approx([0.4, 0.4])


@dataclass(frozen=True, kw_only=True)
class TracedState(dgemma.DenoiseState):
    """A state with fields of every kind: required, optional, shared by all rows, constant and computed."""

    label: torch.Tensor  # (B,)
    trace: torch.Tensor | None = None
    table: torch.Tensor = field(default_factory=lambda: torch.arange(5), metadata={"shared": True})
    origin: str = field(default="here", metadata={"constant": True})
    num_labels: int = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "num_labels", len(self.label))


def traced():
    plain, knobs = fresh(EntropyBound())
    return TracedState(**{f.name: getattr(plain, f.name) for f in fields(plain)}, label=torch.arange(2)), knobs


@pytest.mark.parametrize("as_state", [True, False], ids=["state", "dictionary"])
@pytest.mark.parametrize(
    ("name", "value"), [("label", torch.tensor([7, 8])), ("trace", torch.ones(2, 3)), ("table", torch.zeros(4))]
)
def test_a_field_of_a_subclass_can_change(name, value, as_state):
    state, knobs = traced()
    changes = replace(state, **{name: value}) if as_state else {name: value}
    changed, kept = apply_changes(changes, state, knobs)
    assert torch.equal(getattr(changed, name), value)
    assert type(changed) is TracedState
    assert kept == knobs


def test_rows_of_a_subclass_are_selected_without_its_shared_fields():
    state, _ = traced()
    one = state.select(torch.tensor([1]))
    assert (one.label.tolist(), one.num_labels, one.table.tolist()) == ([1], 1, [0, 1, 2, 3, 4])
    other = replace(one, label=torch.tensor([5]), table=torch.zeros(3))
    spliced = state.splice(torch.tensor([0]), other)
    assert (spliced.label.tolist(), spliced.table.tolist()) == ([5, 1], [0, 1, 2, 3, 4])


def test_a_donor_with_other_fields_is_refused_even_if_it_has_as_many_tensors():
    state, _ = fresh(EntropyBound())
    row = torch.tensor([0])
    mine = replace(state, awaited=torch.ones(2, CANVAS_LEN, dtype=torch.bool))
    theirs = replace(state, memory=torch.zeros(2, CANVAS_LEN)).select(row)
    with pytest.raises(ValueError, match="donor must have the state's class and present fields"):
        mine.splice(row, theirs)
    labelled, _ = traced()
    with pytest.raises(ValueError, match="donor must have the state's class and present fields"):
        labelled.splice(row, replace(state, stop_memory=torch.zeros(2)).select(row))


def test_changes_that_a_state_cannot_keep_are_refused():
    state, knobs = traced()
    plain, _ = fresh(EntropyBound())
    for changes, sentence in (
        ({"label": torch.zeros(2)}, r"TracedState\.label must stay torch\.int64 \(2,\), got torch\.float32"),
        ({"origin": "there"}, r"got \['origin'\]"),
        (replace(state, origin="there"), r"TracedState\.origin must stay the same"),
        (replace(state, noise=dgemma.MaskNoise(VOCAB + 1)), r"TracedState\.noise must stay the same"),
        (replace(state, rows=torch.tensor([1, 0])), r"TracedState\.rows must stay the same"),
        (plain, r"must stay a TracedState, got DenoiseState\("),
    ):
        with pytest.raises(ValueError, match=sentence):
            apply_changes(changes, state, knobs)
    with pytest.raises(ValueError, match=r"must stay a DenoiseState, got TracedState\("):
        apply_changes(state, plain, knobs)
    equal, _ = apply_changes(replace(state, noise=dgemma.MaskNoise(VOCAB)), state, knobs)
    assert equal is state
