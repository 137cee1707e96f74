"""The loop: rows are independent, knobs may change, frozen tokens stay, and errors name the mistake."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import dgemma
from dgemma import GenerationDefaults, Knobs, Prediction, StepRecord
from dgemma.model.cache import PrefixCache
from dgemma.run.options import _warn_once
from dgemma.run.plan import read_plan
from dgemma.run.records import BlockCommit
from dgemma.run.step import settle
from published import pair
from rowwise import RowwiseDenoiser


def options(**changes):
    return {"max_new_tokens": 48, "steps": 6, "stop": dgemma.StableAndConfident(confidence=2.5)} | changes


def test_row_i_of_a_batch_equals_row_i_alone_bit_for_bit():
    model = RowwiseDenoiser()
    prompt = torch.randint(5, 64, (5, 7))
    together = dgemma.generate(model, prompt, seed=40, **options())
    lengths = set()
    for row in range(5):
        alone = dgemma.generate(model, prompt[row : row + 1], seed=[40 + row], **options())
        width = alone.new_tokens.shape[1]
        assert torch.equal(alone.new_tokens, together.new_tokens[row : row + 1, :width])
        assert (together.new_tokens[row, width:] == 0).all()
        assert torch.equal(alone.steps[0], together.steps[row, : alone.steps.shape[1]])
        assert alone.cache.lengths[0] == together.cache.lengths[row]
        lengths.add(int(alone.cache.lengths[0]))
    assert len(lengths) > 1, "the case is meant to have rows that end at different places"


@pytest.mark.parametrize(
    ("stop_tokens", "waits_per_block"), [((64,), 1), ((), 0)], ids=["a stop token that no row writes", "no stop token"]
)
def test_the_host_waits_for_the_device_once_per_step_and_once_per_block(monkeypatch, stop_tokens, waits_per_block):
    # On a GPU each of these blocks the host until all earlier kernels have finished.
    waits = []

    def counted(read):
        return lambda tensor, *arguments: waits.append(read) or read(tensor, *arguments)

    for name in ("tolist", "item", "nonzero", "__bool__", "__int__"):
        monkeypatch.setattr(Tensor, name, counted(getattr(Tensor, name)))
    prompt = torch.randint(5, 64, (2, 7))
    model = RowwiseDenoiser(generation=GenerationDefaults(eos_token_id=stop_tokens))
    events = dgemma.stream(model, prompt, **options(stop=None))
    next(events)  # reads the arguments too
    waits.clear()
    assert sum(isinstance(event, StepRecord) for event in events) == 3 * 6 - 1
    assert len(waits) == 3 * (6 + waits_per_block)


def test_the_same_seed_gives_the_same_tokens_and_does_not_use_the_global_generator():
    model, prompt = RowwiseDenoiser(), torch.randint(5, 64, (2, 7))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = dgemma.generate(model, prompt, seed=1, **options())
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert torch.equal(dgemma.generate(model, prompt, seed=1, **options()).tokens, first.tokens)
    assert not torch.equal(
        dgemma.generate(model, prompt, seed=2, **options()).new_tokens[:, :16], first.new_tokens[:, :16]
    )


def test_a_second_turn_on_the_cache_equals_one_run_over_the_whole_history():
    model = pair(seed=3)[0]
    prompt, reply = torch.randint(5, 512, (2, 6)), torch.randint(5, 512, (2, 5))
    first = dgemma.generate(model, prompt, max_new_tokens=64, steps=4, seed=0, eos_token_ids=range(40))
    assert first.cache.lengths[0] != first.cache.lengths[1], "the case is meant to have rows of different length"
    lengths = first.cache.lengths.tolist()
    second = dgemma.generate(model, reply, cache=first.cache, max_new_tokens=32, steps=4, seed=7, eos_token_ids=[1])
    for row in range(2):
        history = torch.cat((first.tokens[row, : lengths[row]], reply[row]))[None]
        whole = dgemma.generate(model, history, max_new_tokens=32, steps=4, seed=[7 + row], eos_token_ids=[1])
        assert torch.equal(whole.new_tokens[0], second.new_tokens[row])


@pytest.mark.parametrize("noise", [dgemma.UniformNoise(512), dgemma.MaskNoise(512)], ids=lambda n: n.kind)
def test_frozen_tokens_and_allowed_sets_hold_over_several_blocks(noise):
    model = pair()[0]
    prompt = torch.randint(5, 512, (2, 4))
    canvas = torch.full((2, 50), -1)
    canvas[0, 3:9], canvas[1, 30:40] = 77, 88  # the second frozen span crosses the end of the first block
    allowed = torch.zeros(2, 50, 512, dtype=torch.bool)
    allowed[:, :, 100:110] = True
    allowed[:, 45, :] = False
    allowed[:, 45, 7] = True
    seen: list[StepRecord] = []
    out = dgemma.generate(
        model,
        prompt,
        max_new_tokens=64,
        steps=4,
        noise=noise,
        canvas=canvas,
        frozen=canvas >= 0,
        allowed=allowed,
        stop=None,
        on_step=seen.append,
        eos_token_ids=[],
    )
    frozen = canvas >= 0
    assert torch.equal(out.new_tokens[:, :50][frozen], canvas[frozen])
    free = out.new_tokens[:, :50][~frozen & (torch.arange(50) != 45)]
    assert ((free >= 100) & (free < 110)).all()
    assert (out.new_tokens[:, 45] == 7).all()
    for record in seen:
        block = int(record.block[0])
        part = slice(block * 32, min((block + 1) * 32, 50))
        shown = record.canvas[:, : part.stop - part.start]
        assert torch.equal(shown[frozen[:, part]], canvas[:, part][frozen[:, part]])
        inside = allowed[:, part].gather(-1, shown[..., None])[..., 0] | frozen[:, part] | noise.masked(shown)
        assert inside.all()


def test_denoising_starts_from_the_given_canvas():
    model, prompt = pair()[0], torch.randint(5, 512, (1, 4))
    canvas = torch.randint(5, 512, (1, 32))
    seen: list[StepRecord] = []
    dgemma.generate(model, prompt, max_new_tokens=32, steps=4, canvas=canvas, on_step=seen.append, noise_level=0.5)
    assert torch.equal(seen[0].canvas, canvas)
    assert [int(r.step[0]) for r in seen] == [2, 3]  # half the noise, so the last half of the steps
    torch.testing.assert_close(seen[0].temperature, torch.tensor([0.4 + 0.4 * 2 / 4]))


def test_knobs_and_states_may_change_between_steps():
    model, prompt = pair()[0], torch.randint(5, 512, (2, 4))
    bounds: list[float] = []

    def widen(record: StepRecord):
        bounds.append(record.knobs.sampler.bound)
        if int(record.step[0]) == 1:
            return {"sampler": dgemma.EntropyBound(bound=9e9)}
        if int(record.step[0]) == 2:
            assert record.accepted.all()
            return replace(record.state, canvas=torch.full_like(record.state.canvas, 9))
        if int(record.step[0]) == 3:
            assert (record.canvas == 9).all()
        return None

    dgemma.generate(model, prompt, max_new_tokens=32, steps=5, stop=None, on_step=widen)
    assert bounds == [0.1, 0.1, 9e9, 9e9, 9e9]
    with pytest.raises(ValueError, match=r"must be among state, .*sampler.*got \['bound'"):
        dgemma.generate(model, prompt, max_new_tokens=32, steps=2, stop=None, on_step=lambda record: {"bound": 3})


def test_omitted_noise_is_the_noise_that_the_checkpoint_learnt():
    model, prompt = pair()[0], torch.randint(5, 512, (2, 4))
    noise, knobs = dgemma.MaskNoise(512, mask_token_id=9), {"max_new_tokens": 32, "steps": 3, "eos_token_ids": []}
    model.generation = GenerationDefaults(noise={"kind": "mask", "mask_token_id": 9})
    seen: list[StepRecord] = []
    learnt = dgemma.generate(model, prompt, on_step=seen.append, **knobs)
    assert (seen[0].canvas == 9).all()
    assert torch.equal(learnt.tokens, dgemma.generate(model, prompt, noise=noise, **knobs).tokens)
    dgemma.infill(model, prompt, [(1, 3)], on_step=seen.append, steps=3)
    assert seen[-1].state.noise == noise


def test_another_noise_than_the_checkpoint_learnt_gives_one_warning(caplog):
    _warn_once.cache_clear()
    model, prompt = pair()[0], torch.randint(5, 512, (2, 4))
    knobs = {"max_new_tokens": 32, "steps": 1, "eos_token_ids": []}
    dgemma.generate(model, prompt, noise=dgemma.MaskNoise(512, mask_token_id=9), **knobs)  # no warning
    model.generation = GenerationDefaults(noise={"kind": "mask", "mask_token_id": 9})
    dgemma.generate(model, prompt, **knobs)
    assert caplog.messages == []
    for _ in range(2):
        dgemma.generate(model, prompt, noise=dgemma.UniformNoise(512), **knobs)
    assert caplog.messages == [
        "The checkpoint is for mask noise; its predictions may be unreliable under uniform noise."
    ]


def test_a_loop_over_step_equals_generate():
    model, prompt = pair()[0], torch.randint(5, 512, (2, 4))
    out = dgemma.generate(model, prompt, max_new_tokens=32, steps=5, seed=11, stop=None, eos_token_ids=[])
    knobs = Knobs(sampler=dgemma.EntropyBound(), temperature=dgemma.LinearTemperature())
    with torch.no_grad():
        cache = model.encode(prompt)
        state = dgemma.start_state(
            knobs, dgemma.UniformNoise(512), seeds=torch.tensor([11, 12]), canvas_len=32, num_steps=5
        )
        for _ in range(5):
            state, _ = dgemma.step(model, state, cache=cache, knobs=knobs)
    assert torch.equal(state.draft, out.new_tokens)


def test_streaming_gives_drafts_and_committed_blocks_for_any_batch():
    model, prompt = RowwiseDenoiser(), torch.randint(5, 64, (3, 7))
    events = list(dgemma.stream(model, prompt, seed=40, **options()))
    out = dgemma.generate(model, prompt, seed=40, **options())
    commits = [event for event in events if isinstance(event, BlockCommit)]
    assert torch.equal(torch.cat([c.tokens for c in commits], dim=1), out.new_tokens)
    assert torch.equal(torch.stack([c.steps for c in commits], dim=1), out.steps)
    records = [event for event in events if isinstance(event, StepRecord)]
    assert sum(len(record.rows) for record in records) == int(out.steps.sum()), "finished rows must cost nothing"


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (dgemma.EntropyBound(bound=9e9), 1),
        (dgemma.Threshold(tau=0.0), 1),
        (dgemma.Confidence(), 8),  # its quota: a share of the canvas each step
        (dgemma.sampling.ReMDM(), 8),  # it masks tokens again, so a full canvas is not done
    ],
    ids=["entropy-bound", "threshold", "confidence", "remdm"],
)
def test_a_canvas_with_nothing_open_takes_no_more_forwards(sampler, expected):
    model, prompt = pair()[0], torch.randint(5, 512, (2, 4))
    out = dgemma.generate(
        model,
        prompt,
        max_new_tokens=32,
        steps=8,
        noise=dgemma.MaskNoise(512),
        sampler=sampler,
        stop=None,
        temperature=1.0,
        eos_token_ids=[],
    )
    assert (out.steps == expected).all()


@dataclass
class SureDenoiser(RowwiseDenoiser):
    """Predicts one token everywhere with certainty, so that any other committed token is noise."""

    token: int = 7

    def denoise(self, canvas: Tensor, cache: PrefixCache, self_cond: object = None) -> Prediction:
        certain = torch.full((*canvas.shape, self.config.vocab_size), -40.0)
        certain[..., self.token] = 0.0
        return Prediction(certain)


UNIFORM, HYBRID = dgemma.UniformNoise(64), dgemma.HybridNoise(64)


@pytest.mark.parametrize(
    ("sampler", "noise"),
    [
        (dgemma.Ancestral(), UNIFORM),
        (dgemma.LeaveOneOutGibbs(), UNIFORM),
        (dgemma.EntropyBound(), UNIFORM),
        (dgemma.Ancestral(), HYBRID),
    ],
    ids=repr,
)
@pytest.mark.parametrize("stop", [dgemma.StableAndConfident(), dgemma.StepCap(steps=1), None], ids=repr)
def test_noise_over_tokens_is_never_committed_whatever_ends_the_canvas(sampler, noise, stop):
    options = {"max_new_tokens": 16, "steps": 6, "sampler": sampler, "noise": noise, "stop": stop}
    assert (dgemma.generate(SureDenoiser(), torch.full((3, 4), 5), **options).new_tokens == 7).all()


def test_a_stop_token_before_a_frozen_position_does_not_end_the_row():
    canvas = torch.full((2, 40), -1)
    canvas[0, 10:15] = 33  # in the first block; row 1 is frozen in the third
    canvas[1, 35] = 34
    out = dgemma.generate(
        SureDenoiser(token=1), torch.full((2, 3), 5), max_new_tokens=48, steps=3, canvas=canvas, frozen=canvas >= 0
    )
    assert torch.equal(out.new_tokens[:, :40][canvas >= 0], canvas[canvas >= 0])
    assert out.new_tokens[0, 15:17].tolist() == [1, 0]  # the first stop token after the frozen span ends the row
    assert out.new_tokens[1, 36:38].tolist() == [1, 0]


def test_continuing_a_cache_needs_no_new_prompt():
    model, prompt = pair()[0], torch.randint(5, 512, (2, 6))
    whole = dgemma.generate(model, prompt, max_new_tokens=32, steps=3)
    cached = dgemma.generate(model, prompt[:, :0], cache=model.encode(prompt), max_new_tokens=32, steps=3)
    assert torch.equal(cached.new_tokens, whole.new_tokens)


@pytest.mark.parametrize("sampler", [dgemma.Ancestral(), dgemma.LeaveOneOutGibbs()], ids=repr)
def test_the_last_step_ends_without_noise_under_any_schedule(sampler):
    """So the committed tokens are the sample on the canvas. A flat prediction's argmax would be token 0 everywhere."""
    noise = dgemma.UniformNoise(512, schedule=dgemma.schedule.ClippedLinear(0.3, 0.8))
    knobs = Knobs(sampler=sampler, temperature=dgemma.ConstantTemperature(1.0))
    state = dgemma.start_state(knobs, noise, seeds=torch.arange(2), canvas_len=32, num_steps=4)
    for _ in range(4):
        assert (sampler.noise_level(state) > 0).all()
        prediction = Prediction(torch.zeros(2, 32, 512))
        state = settle(state, prediction, sampler(prediction, state), knobs).state
    assert (sampler.noise_level(state) == 0).all()
    assert torch.equal(state.draft, state.canvas)
    assert state.draft.unique().numel() > 32


def test_a_written_padding_token_counts_as_a_token():
    options = {"max_new_tokens": 32, "steps": 4, "allowed": [0], "eos_token_ids": [9], "stop": None, "record": True}
    out = dgemma.generate(RowwiseDenoiser(), torch.full((1, 3), 5), **options)
    assert (out.new_tokens == 0).all()
    per_forward = out.new_tokens.shape[1] / int(out.steps.sum())
    assert out.tokens_per_forward.tolist() == out.trajectory.tokens_per_forward.tolist() == [per_forward]


def test_a_text_ends_at_its_length_or_at_an_earlier_stop_token():
    model = SureDenoiser()
    plan = read_plan(model, torch.full((3, 3), 5), max_new_tokens=16, eos_token_ids=[1])
    canvas_len = plan.canvas_len
    plan = replace(plan, text_len=torch.tensor([4, 4, canvas_len]))
    tokens = torch.full((3, canvas_len), 7)
    tokens[0, 2], tokens[1, 6] = 1, 1
    is_text, ends = plan.find_text(tokens, 0, torch.arange(3))
    assert is_text.sum(1).tolist() == plan.count_tokens(tokens).tolist() == [3, 4, canvas_len]
    assert is_text[0].tolist() == [True] * 3 + [False] * (canvas_len - 3)
    assert ends.tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("decide", "sentence"),
    [
        (lambda p, s: p.argmax, r"Careless must return a Decision about .*, got torch.int64 of shape"),
        (
            lambda p, s: dgemma.Decision(tokens=p.argmax[:, :4], write=s.open[:, :4], renoise=~s.open[:, :4]),
            r"Careless must return a Decision about the canvas's \(1, 16\) positions, got \(1, 4\)",
        ),
    ],
    ids=["no-decision", "another-canvas"],
)
def test_a_sampler_with_an_unusable_decision_is_named(decide, sentence):
    @dataclass(frozen=True)
    class Careless(dgemma.Sampler):
        def __call__(self, prediction, state):
            return decide(prediction, state)

    with pytest.raises(ValueError, match=sentence):
        dgemma.generate(RowwiseDenoiser(), torch.full((1, 3), 5), sampler=Careless())


def test_nan_weights_stop_the_run_at_the_step_where_they_appear():
    model, prompt = pair()[0], torch.randint(5, 512, (2, 4))

    def overflow(record: StepRecord):
        if int(record.block[0]) == 1 and int(record.step[0]) == 2:
            with torch.no_grad():
                model.norm.weight[3] = torch.nan

    sentence = r"Prediction\.entropy must be a number, got NaN at block 1, step 3, row 0\. Check the weights"
    with pytest.raises(FloatingPointError, match=sentence):
        dgemma.generate(
            model, prompt, max_new_tokens=64, steps=5, stop=None, seed=0, eos_token_ids=[], on_step=overflow
        )


def test_an_engine_reads_ahead_only_if_another_step_is_likely():
    answers = []

    class Ahead(RowwiseDenoiser):
        def read_ahead(self, values):
            answers.append(values.tolist())
            return answers[-1]

    prompt, knobs = torch.full((2, 3), 5), {"max_new_tokens": 16, "eos_token_ids": []}
    want, got = (dgemma.generate(model, prompt, steps=5, stop=None, **knobs) for model in (RowwiseDenoiser(), Ahead()))
    # The last step does not read ahead: no step follows it.
    assert answers == [[[left, left], [0, 0], [0, 0]] for left in (4, 3, 2, 1)]
    assert torch.equal(got.new_tokens, want.new_tokens)
    dgemma.generate(Ahead(), prompt, steps=5, stop=dgemma.StepCap(4), **knobs)
    assert len(answers) == 4


def test_a_changed_knob_holds_for_later_canvases():
    prompt = torch.tensor([[5, 6, 7], [9, 2, 4], [3, 3, 8]])
    temperatures = {}

    def cool(record):
        temperatures.setdefault(int(record.block[0]), float(record.temperature[0]))
        return {"temperature": 0.25} if int(record.block[0]) == 0 and int(record.step[0]) == 1 else None

    options = {"max_new_tokens": 64, "steps": 3, "stop": None, "temperature": 0.5}
    dgemma.generate(RowwiseDenoiser(), prompt, **options, eos_token_ids=[], on_step=cool)
    assert temperatures == {0: 0.5, 1: 0.25, 2: 0.25, 3: 0.25}


def test_the_end_of_a_canvas_follows_from_the_state_that_on_step_returns():
    prompt, knobs = torch.full((2, 3), 5), {"max_new_tokens": 16, "eos_token_ids": []}
    end = {"done": torch.tensor([True, True])}
    out = dgemma.generate(RowwiseDenoiser(), prompt, steps=5, stop=None, on_step=lambda record: end, **knobs)
    assert out.steps.tolist() == [[1], [1]]
    more = {"num_steps": torch.tensor([7, 2])}
    shorter = lambda record: more if len(record.rows) == 2 else None  # noqa: E731
    out = dgemma.generate(RowwiseDenoiser(), prompt, steps=5, stop=None, on_step=shorter, **knobs)
    assert out.steps.tolist() == [[7], [2]]


@pytest.mark.parametrize("inference", [False, True], ids=["no-grad", "inference-mode"])
@pytest.mark.parametrize("returned", [True, False], ids=["state", "nothing"])
def test_the_canvas_ends_if_on_step_writes_into_done(returned, inference):
    def end(record: StepRecord):
        record.state.done.fill_(True)
        return record.state if returned else None

    with torch.inference_mode(inference):
        out = dgemma.generate(RowwiseDenoiser(), torch.full((2, 3), 5), max_new_tokens=16, stop=None, on_step=end)
    assert out.steps.tolist() == [[1], [1]]


def test_a_stray_token_written_into_the_state_of_a_stream_is_refused():
    events = dgemma.stream(RowwiseDenoiser(), torch.full((2, 3), 5), max_new_tokens=16, steps=4, stop=None)
    record = next(events)
    record.state.canvas[1, 7] = 64
    sentence = r"A change between two steps must write tokens in \[0, 64\), got \d+\.\.64 at block 0, step 0, row 1"
    with pytest.raises(ValueError, match=sentence):
        next(events)


def test_rows_that_end_early_keep_their_drafts_if_a_denoiser_reuses_its_tensors():
    class OneBuffer(RowwiseDenoiser):
        draft = torch.zeros(2, 16, dtype=torch.int64)

        def step(self, state, *, cache, knobs):
            after, record = dgemma.step(self, state, cache=cache, knobs=knobs)
            draft = self.draft[: len(after.rows)].copy_(after.draft)
            after = replace(after, draft=draft)
            return after, replace(record, state=after)

    end_first = lambda record: {"done": record.rows == 0}  # noqa: E731
    knobs = {"max_new_tokens": 16, "steps": 4, "stop": None, "eos_token_ids": [], "on_step": end_first}
    prompt = torch.tensor([[5, 6, 7], [9, 8, 7]])
    want, got = (dgemma.generate(model, prompt, **knobs) for model in (RowwiseDenoiser(), OneBuffer()))
    assert got.steps.tolist() == [[1], [4]]
    assert torch.equal(got.new_tokens, want.new_tokens)


@pytest.mark.parametrize("token", [-1, 64])
def test_a_sampler_that_writes_ids_outside_the_vocabulary_is_named(token):
    @dataclass(frozen=True)
    class Stray(dgemma.Sampler):
        redecides: ClassVar[frozenset[str]] = frozenset({"uniform"})

        def __call__(self, prediction, state):
            here = ((state.rows == 1) & (state.step == 2))[:, None]
            tokens = torch.where(here, token, prediction.argmax)
            return dgemma.Decision(tokens=tokens, write=state.open, renoise=~state.open)

    sentence = r"Stray must write tokens in \[0, 64\), got .* at block 0, step 2, row 1\. Take them from the prediction"
    with pytest.raises(ValueError, match=sentence):
        dgemma.generate(RowwiseDenoiser(), torch.full((2, 3), 5), steps=3, stop=None, sampler=Stray())


@pytest.mark.parametrize("combine", [lambda rule: rule, lambda rule: dgemma.StepCap(9) | rule], ids=["alone", "paired"])
@pytest.mark.parametrize(
    ("answer", "got"),
    [
        (lambda s: s.step >= 2, r"torch.bool of shape \(2,\)"),  # two rows would unpack as (done, memory)
        (lambda s: (s.canvas > 3, None), r"torch.bool of shape \(2, 16\)"),
    ],
    ids=["no-memory", "by-position"],
)
def test_a_stop_rule_that_returns_anything_but_done_and_memory_is_named(answer, got, combine):
    @dataclass(frozen=True)
    class Careless(dgemma.StopRule):
        def __call__(self, prediction, state):
            return answer(state)

    with pytest.raises(ValueError, match=rf"Careless must return \(done, memory\), .* \(2,\), got {got}\. Return"):
        dgemma.generate(RowwiseDenoiser(), torch.full((2, 3), 5), stop=combine(Careless()))
