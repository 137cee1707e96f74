"""Holes are filled and nothing else changes; canvases see the text after a hole; edits start from the text."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dgemma
from dgemma.sampling import Ancestral, Confidence, EntropyBound, StepCap
from dgemma.tasks.holes import place_canvas
from dgemma.tasks.infill import edit, infill, infill_row
from many.test_many import run_together

VOCAB, CANVAS_LEN = 512, 32
PROCESSES = {
    "uniform": (dgemma.UniformNoise(VOCAB), EntropyBound(bound=0.5)),
    "mask": (dgemma.MaskNoise(VOCAB), Confidence()),
    "hybrid": (dgemma.HybridNoise(VOCAB), Ancestral()),
}


def options(process, **more):
    noise, sampler = PROCESSES[process]
    return {"noise": noise, "sampler": sampler, "steps": 3, "stop": None, "seed": 5, **more}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = dgemma.presets.tiny().replace(num_hidden_layers=2, layer_types=("sliding_attention", "full_attention"))
    model = dgemma.DiffusionGemma(config)
    with torch.no_grad():
        model.embed_tokens.weight.mul_(20)  # predictions that are neither flat nor certain
    return model.eval()


def text(batch_size, length, seed=0):
    return torch.randint(5, VOCAB, (batch_size, length), generator=torch.Generator().manual_seed(seed))


def random_holes(batch_size, length, share, seed=1):
    holes = torch.rand(batch_size, length, generator=torch.Generator().manual_seed(seed)) < share
    holes[:, 0], holes[:, 1] = False, True
    return holes


@pytest.mark.parametrize(("process", "share"), [("uniform", 0.1), ("uniform", 0.6), ("mask", 0.6), ("hybrid", 0.1)])
def test_given_tokens_never_change_and_every_hole_is_written(model, process, share):
    tokens, holes = text(2, 75), random_holes(2, 75, share)
    holes[1, 20:60] = True  # longer than a canvas
    out = infill(model, tokens.masked_fill(holes, -1), holes, **options(process))
    assert torch.equal(out.tokens[~holes], tokens[~holes])
    assert bool((out.tokens[holes] >= 0).all())
    if process != "uniform":
        assert not bool((out.tokens == 4).any())  # no mask is left
    assert bool((out.log_probs[~holes] == 0).all())
    assert torch.equal(out.tokens_per_forward, holes.sum(1) / out.steps)


@pytest.mark.parametrize("process", PROCESSES)
def test_a_hole_under_one_canvas_is_generate_with_a_frozen_canvas(model, process):
    tokens = text(2, 60)
    out = infill(model, tokens, [(20, 26), (30, 33)], **options(process))
    canvas = tokens[:, 20:52].clone()
    holes = torch.zeros(2, CANVAS_LEN, dtype=torch.bool)
    holes[:, :6] = holes[:, 10:13] = True
    again = dgemma.generate(
        model,
        tokens[:, :20],
        canvas=canvas.masked_fill(holes, -1),
        frozen=~holes,
        max_new_tokens=CANVAS_LEN,
        eos_token_ids=(),
        progress=False,
        **options(process),
    )
    assert torch.equal(out.tokens[:, 20:52], again.new_tokens)
    assert torch.equal(out.tokens[:, :20], tokens[:, :20])


@pytest.mark.parametrize("holes", ["mask", "spans", "token"])
def test_all_forms_of_holes_mean_the_same(model, holes):
    tokens = text(2, 40)
    expected = infill(model, tokens, [(9, 12), (30, 31)], **options("mask")).tokens
    marked = torch.zeros(2, 40, dtype=torch.bool)
    marked[:, 9:12] = marked[:, 30] = True
    given_as = {"mask": marked, "spans": [(30, 31), (9, 12)], "token": 4}
    shown = tokens.masked_fill(marked, 4) if holes == "token" else tokens
    assert torch.equal(infill(model, shown, given_as[holes], **options("mask")).tokens, expected)


@pytest.mark.parametrize("process", ["uniform", "mask"])
def test_a_row_does_not_depend_on_its_batch(model, process):
    tokens, holes = text(2, 70), random_holes(2, 70, 0.3)
    holes[1, 5:55] = True
    together = infill(model, tokens, holes, **options(process))
    assert together.trajectories is None  # without record=True
    for row in range(2):
        one = (model, tokens[row : row + 1], holes[row : row + 1])
        alone = infill(*one, **options(process, seed=[5 + row]))
        assert torch.equal(together.tokens[row], alone.tokens[0])
        assert together.steps[row] == alone.steps[0]
        served = infill_row(*one, **options(process, seed=[5 + row]))
        run_together(model, [served])
        assert torch.equal(served.new_tokens, alone.tokens)  # in several canvases


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(model, side):
    tokens, holes = text(1, 50), random_holes(1, 50, 0.3)
    alone = infill(model, tokens, holes, **options("uniform"))
    other, pads = text(1, 63, seed=9), (13, 0) if side == "left" else (0, 13)
    padded, marked, mask = (torch.nn.functional.pad(x, pads) for x in (tokens, holes, torch.ones_like(tokens)))
    out = infill(
        model,
        torch.cat([padded, other]),
        torch.cat([marked, random_holes(1, 63, 0.3)]),
        attention_mask=torch.cat([mask, torch.ones_like(other)]),
        **options("uniform"),
    )
    assert torch.equal(out.tokens[0, mask[0] == 1], alone.tokens[0])
    assert bool((out.tokens[0, mask[0] == 0] == 0).all())


@pytest.mark.parametrize(("process", "how"), [("uniform", "infill"), ("mask", "edit"), ("hybrid", "infill")])
def test_written_tokens_stay_within_the_allowed_set(model, process, how):
    tokens = text(2, 70)
    allowed = torch.zeros(2, 70, VOCAB, dtype=torch.bool)
    generator = torch.Generator().manual_seed(3)
    allowed.scatter_(-1, torch.randint(5, VOCAB, (2, 70, 3), generator=generator), True)
    holes = random_holes(2, 70, 0.5)
    seen = []
    more = options(process, allowed=allowed, on_step=seen.append)
    if how == "infill":
        out = infill(model, tokens, holes, **more)
    else:
        out = edit(model, tokens, frozen=~holes, noise_level=0.6, **more)
    assert bool(allowed.gather(-1, out.tokens[..., None])[..., 0][holes].all())
    assert torch.equal(out.tokens[~holes], tokens[~holes])
    if process == "uniform":  # noise is also drawn from the allowed set
        first = seen[0]
        start = int(holes[0].nonzero()[0])
        under = slice(start, start + CANVAS_LEN)
        shown = allowed[:, under].gather(-1, first.canvas[..., None])[..., 0]
        assert bool(shown[holes[:, under]].all())


class CopyFromTheRight(dgemma.Denoiser):
    """Predicts the next token to the right on the canvas that is not a mask, and 1 if there is none."""

    generation = dgemma.GenerationDefaults()
    device = torch.device("cpu")

    def __init__(self, canvas_len):
        self.config = SimpleNamespace(canvas_length=canvas_len, vocab_size=VOCAB, max_position_embeddings=4096)

    def encode(self, tokens, cache=None, attention_mask=None):
        assert not bool((tokens == 4).any())  # a prefix is never noise
        return SimpleNamespace(select=lambda rows: self.encode(tokens[rows]), lengths=None)

    def denoise(self, canvas, cache, self_cond=None):
        best = torch.ones_like(canvas)
        following = torch.ones_like(canvas[:, 0])
        for position in range(canvas.shape[1] - 1, -1, -1):
            best[:, position] = following
            following = torch.where(canvas[:, position] == 4, following, canvas[:, position])
        return dgemma.Prediction(torch.nn.functional.one_hot(best, VOCAB).float() * 100)


@pytest.mark.parametrize("start", range(1, 60, 7))
@pytest.mark.parametrize("length", [1, 5, 12])
def test_a_hole_anywhere_sees_the_text_after_it(start, length):
    tokens = torch.arange(100, 180)[None]
    mask = {"noise": dgemma.MaskNoise(VOCAB), "sampler": EntropyBound(bound=100.0), "steps": 1}
    out = infill(CopyFromTheRight(16), tokens, [(start, start + length)], **mask)
    assert bool((out.tokens[0, start : start + length] == tokens[0, start + length]).all())


@pytest.mark.parametrize("length", [13, 16, 17, 40, 48])
def test_the_end_of_a_long_hole_sees_the_text_after_it(length):
    tokens = torch.arange(100, 180)[None]
    mask = {"noise": dgemma.MaskNoise(VOCAB), "sampler": EntropyBound(bound=100.0), "steps": 1}
    out = infill(CopyFromTheRight(16), tokens, [(10, 10 + length)], **mask)
    written = out.tokens[0, 10 : 10 + length]
    # The last canvas of 16 covers 4 tokens after the hole, so it fills the last 12 tokens of the hole.
    assert bool((written[-12:] == tokens[0, 10 + length]).all())
    assert int(out.steps[0]) <= -(-length // 16) + 1


@settings(deadline=None, max_examples=200)
@given(
    marks=st.lists(st.booleans(), min_size=2, max_size=60).filter(lambda marks: any(marks[1:])),
    canvas_len=st.integers(1, 20),
)
def test_canvases_cover_every_hole_and_no_prefix_contains_an_open_hole(marks, canvas_len):
    todo = torch.tensor([False, *marks[1:]])
    last_start, rounds = 0, 0
    while bool(todo.any()):
        start, keep_until = place_canvas(todo, canvas_len)
        first = int(todo.nonzero()[0])
        assert max(1, last_start) <= start <= first < keep_until <= min(start + canvas_len, len(todo))
        todo[start:keep_until] = False
        last_start, rounds = start, rounds + 1
    assert rounds <= len(marks)


@pytest.mark.parametrize(("process", "tail", "expected"), [("mask", None, 4), ("mask", 1, 1), ("uniform", 1, 1)])
def test_the_canvas_after_the_end_of_a_text_stays_masked_or_gets_the_given_token(model, process, tail, expected):
    tokens = text(1, 10)
    seen = []
    holes = torch.zeros(1, 10, dtype=torch.bool)
    holes[0, 4:6] = True
    marked = tokens.masked_fill(holes, -1)
    out = infill(model, marked, holes, on_step=seen.append, tail_token_id=tail, **options(process))
    state = seen[-1].state
    assert bool((state.canvas[0, 9:] == expected).all())  # the canvas lies over positions 1..32
    assert bool(state.frozen[0, :3].all() & state.frozen[0, 9:].all())
    assert torch.equal(out.tokens[~holes], tokens[~holes])
    assert bool((out.tokens[0, 4:6] > 0).all())


def test_masks_after_the_text_get_no_level_0_from_a_network_that_takes_levels(model):
    conditioned = dgemma.DiffusionGemma(model.config.replace(noise_conditioning=True))
    seen = []
    infill(conditioned, text(1, 10), [(4, 6)], on_step=seen.append, **options("mask"))
    assert not bool(seen[0].state.frozen[0, 9:].any())


@pytest.mark.parametrize("process", PROCESSES)
def test_an_edit_keeps_frozen_tokens_and_skips_steps_above_its_level(model, process):
    tokens = text(2, 80)
    frozen = torch.zeros(2, 80, dtype=torch.bool)
    frozen[:, :10] = frozen[:, 40:50] = True
    seen = []
    more = options(process, steps=10, on_step=seen.append)
    out = edit(model, tokens, noise_level=0.3, frozen=frozen, **more)
    assert torch.equal(out.tokens[frozen], tokens[frozen])
    assert int(seen[0].step[0]) == 7  # the first 7 of 10 steps are above level 0.3
    assert float(seen[0].noise_level[0]) == pytest.approx(0.3)
    canvases = len({int(record.block[0]) for record in seen})
    assert out.steps.tolist() == [3 * canvases] * 2


@pytest.mark.parametrize(("level", "steps"), [(0.5, 1), (0.3, 2), (0.74, 10), (0.01, 16)])
def test_the_text_of_an_edit_has_the_noise_level_of_its_first_step(model, level, steps):
    tokens = text(40, 1 + CANVAS_LEN)
    seen = []
    edit(model, tokens, noise_level=level, on_step=seen.append, **options("mask", steps=steps))
    shown = float(seen[0].noise_level[0])
    assert abs(shown - level) <= 1 / steps
    masked = float((seen[0].canvas == 4).float().mean())
    assert abs(masked - shown) < 4 * (shown * (1 - shown) / seen[0].canvas.numel()) ** 0.5 + 1e-9


def test_an_edit_starts_from_allowed_tokens(model):
    tokens = text(1, 40)
    allowed = torch.ones(1, 40, VOCAB, dtype=torch.bool)
    allowed[0, 7, int(tokens[0, 7])] = False
    out = edit(model, tokens, noise_level=1e-9, allowed=allowed, **options("mask", steps=10**6))
    changed = (out.tokens != tokens).nonzero().tolist()
    assert changed == [[0, 7]]  # only the token that is not allowed changes


@pytest.mark.parametrize("how", ["infill", "edit"])
def test_log_probs_are_those_of_the_model_on_the_first_canvas(model, how):
    tokens, seen = text(2, 50), []
    if how == "infill":
        out = infill(model, tokens, [(5, 9)], on_step=seen.append, **options("mask"))
    else:
        frozen = torch.ones(2, 50, dtype=torch.bool)
        frozen[:, 5:9] = False
        out = edit(model, tokens, frozen=frozen, noise_level=0.9, on_step=seen.append, **options("mask", steps=10))
    first = model.denoise(seen[0].canvas, model.encode(tokens[:, :5])).logits
    first[..., 4] = -torch.inf  # the mask is never predicted
    expected = first.log_softmax(-1).gather(-1, out.tokens[:, 5:37, None])[..., 0]
    torch.testing.assert_close(out.log_probs[:, 5:9], expected[:, :4])
    assert bool((out.log_probs[:, 9:] == 0).all())
    assert bool((out.log_probs[:, 5:9] < -1e-3).any())


class SureOfTheText(CopyFromTheRight):
    """Predicts 7 with certainty at the first `num_sure` positions of a canvas, and is flat after them."""

    def __init__(self, canvas_len, num_sure):
        super().__init__(canvas_len)
        self.num_sure = num_sure

    def denoise(self, canvas, cache, self_cond=None):
        logits = torch.zeros(*canvas.shape, VOCAB)
        logits[:, : self.num_sure, 7] = 100.0
        return dgemma.Prediction(logits)


@pytest.mark.parametrize(
    ("process", "sampler", "expected"),
    [
        ("uniform", EntropyBound(), 2),  # the argmax is stable after two
        ("mask", EntropyBound(bound=0.0), 1),  # certain positions have no entropy, so one step accepts all
    ],
)
def test_free_positions_after_the_text_do_not_delay_the_end(process, sampler, expected):
    seen = []
    stop = dgemma.StableAndConfident() if process == "uniform" else None
    tokens = text(1, 12)
    out = infill(
        SureOfTheText(32, num_sure=11),
        tokens,
        [(4, 7)],
        on_step=seen.append,
        **options(process, sampler=sampler, stop=stop, steps=30),
    )
    assert out.tokens[0, 4:7].tolist() == [7, 7, 7]
    assert int(out.steps) == expected
    assert bool(seen[-1].state.frozen[0, 11:].all()) == (process == "mask")


def two_canvases(model, how, **more):
    tokens = text(2, 75)
    if how == "edit":
        return edit(model, tokens, noise_level=0.6, **more)
    return infill(model, tokens, [(20, 26), (60, 64)], **more)


@pytest.mark.parametrize(("process", "how"), [("uniform", "edit"), ("mask", "infill"), ("hybrid", "edit")])
def test_every_canvas_is_recorded_and_replays_bit_for_bit(model, how, process, tmp_path):
    recorded = two_canvases(model, how, record=True, progress=False, **options(process, stop=StepCap(2)))
    assert len(recorded.trajectories) == 2 + (how == "edit")
    assert sum(len(trajectory) for trajectory in recorded.trajectories) == int(recorded.steps[0])
    for number, trajectory in enumerate(recorded.trajectories):
        trajectory.save(tmp_path / f"{number}.safetensors")
        again = dgemma.Trajectory.load(tmp_path / f"{number}.safetensors").replay(model)
        assert trajectory.difference(again) is None
        assert torch.equal(again.commits[0].tokens, trajectory[-1].draft)
    if how == "infill":
        assert torch.equal(recorded.trajectories[0].commits[0].tokens[:, :6], recorded.tokens[:, 20:26])


def test_a_record_has_the_rows_that_had_a_canvas(model):
    holes = torch.zeros(3, 75, dtype=torch.bool)
    holes[:, 5], holes[1, 70] = True, True
    seen = []
    out = infill(model, text(3, 75), holes, record=True, record_top=0, on_step=seen.append, **options("mask"))
    assert [trajectory.batch_size for trajectory in out.trajectories] == [3, 1]
    assert seen[-1].rows.tolist() == [1]
    assert out.trajectories[1].plan.seeds.tolist() == [[6]]


def test_a_recorded_infill_can_be_forked(model):
    (trajectory,) = infill(model, text(1, 40), [(8, 20)], record=True, **options("uniform")).trajectories
    assert torch.equal(trajectory.fork(model, step=1).new_tokens, trajectory.commits[0].tokens)
    forked = trajectory.fork(model, step=1, seed=99).new_tokens
    assert not torch.equal(forked[:, :12], trajectory.commits[0].tokens[:, :12])
    assert torch.equal(forked[:, 12:], trajectory.commits[0].tokens[:, 12:])  # the text stays


def test_a_text_may_have_as_many_tokens_as_the_model_has_positions():
    config = dgemma.presets.tiny().replace(max_position_embeddings=96)
    short = dgemma.DiffusionGemma(config)
    tokens = text(1, 96)
    out = infill(short, tokens, [(5, 9), (90, 96)], **options("mask"))
    assert torch.equal(out.tokens[:, 9:90], tokens[:, 9:90])
    with pytest.raises(ValueError, match=r"must be integer ids .* 1 to 96 positions.*, got .* \(1, 97\)"):
        infill(short, text(1, 97), [(5, 9)], **options("mask"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"holes": [(0, 2)]}, "mark a token in every row, but never the first"),
        ({"holes": [(5, 5)]}, r"must be spans .* 0 <= start < stop <= 20, .*got \[\(5, 5\)\]"),
        ({"holes": []}, "must mark a token in every row"),
        ({"tokens": torch.full((2, 20), 4), "noise": dgemma.MaskNoise(512)}, "must hold ids .* and no mask token"),
        ({"attention_mask": torch.ones(2, 3)}, r"attention_mask must be .* of the tokens' shape \(2, 20\)"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_any_work(arguments, sentence):
    call = {"tokens": text(2, 20), "holes": [(5, 8)], **arguments}

    class NoWork(CopyFromTheRight):
        def encode(self, *args, **kwargs):
            raise AssertionError("work was done")

    with pytest.raises(ValueError, match=sentence):
        infill(NoWork(16), call.pop("tokens"), call.pop("holes"), **call)


def test_a_recorded_infill_under_a_constraint_can_be_replayed(model):
    words = dgemma.Regex("[a-z]{3,6}", dgemma.ByteTokenizer())
    out = infill(model, text(2, 40), [(3, 8)], constraint=words, record=True, **options("mask"))
    assert out.trajectories[0].replay(model).difference(out.trajectories[0]) is None


def test_an_allowed_table_that_is_shorter_than_the_text_leaves_the_rest_free_under_a_constraint(model):
    words = dgemma.Regex("[a-z]{5}", dgemma.ByteTokenizer())
    allowed = torch.ones(1, 4, VOCAB, dtype=torch.bool)
    allowed[0, 3] = torch.arange(VOCAB) == dgemma.ByteTokenizer().encode("q", bos=False)[0]
    out = infill(model, text(2, 40), [(3, 8)], constraint=words, allowed=allowed, **options("mask"))
    written = [dgemma.ByteTokenizer().decode(row) for row in out.tokens[:, 3:8]]
    assert all(word.startswith("q") and word.isalpha() and len(word) == 5 for word in written)
