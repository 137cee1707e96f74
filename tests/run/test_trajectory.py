"""A recorded run is complete, and can be saved, replayed bit for bit and forked."""

import functools
import json
import math
from dataclasses import dataclass, replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import dgemma
from dgemma import values
from dgemma.run.recorded.trajectory import Trajectory
from dgemma.sampling import Ancestral, Confidence, EntropyBound, StepCap
from dgemma.sampling.stopping import StopRule

VOCAB, CANVAS_LEN, STEPS = 512, 32, 5
ANY = tuple(range(5, VOCAB))
PROCESSES = {
    "uniform": (dgemma.UniformNoise(VOCAB), EntropyBound(bound=0.5)),
    "mask": (dgemma.MaskNoise(VOCAB), Confidence(order="margin")),
    "hybrid": (dgemma.HybridNoise(VOCAB), Ancestral()),
}


@dataclass(frozen=True)
class RowByRow(StopRule):
    """Row i is done after 2 + i steps, so that rows finish one after another."""

    def __call__(self, prediction, state):
        return state.step >= 2 + state.rows, None


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = dgemma.presets.tiny().replace(num_hidden_layers=1, layer_types=("full_attention",), num_experts=2)
    model = dgemma.DiffusionGemma(config)
    with torch.no_grad():
        model.embed_tokens.weight.mul_(20)  # predictions that are neither flat nor certain
    return model.eval()


@pytest.fixture(scope="module")
def prompt():
    return torch.randint(5, VOCAB, (3, 7), generator=torch.Generator().manual_seed(1))


def options(process="uniform", **more):
    noise, sampler = PROCESSES[process]
    chosen = {"noise": noise, "sampler": sampler, "steps": STEPS, "stop": RowByRow(), "max_new_tokens": 2 * CANVAS_LEN}
    return {**chosen, "temperature": 0.7, "eos_token_ids": (), "seed": 3, "progress": False, **more}


@pytest.fixture(scope="module")
def recorded(model, prompt):
    return dgemma.generate(model, prompt, record=True, **options())


def test_a_replay_with_other_weights_says_where_it_differs(prompt, model, recorded):
    torch.manual_seed(5)
    other = dgemma.DiffusionGemma(dgemma.presets.tiny())
    with pytest.raises(RuntimeError, match=r"differs from the run at block 0, step 0, row 0: "):
        recorded.trajectory.replay(other)
    parted = recorded.trajectory.replay(other, strict=False)
    assert parted.difference(recorded.trajectory) is not None


def test_the_record_equals_what_a_callback_gets(model, prompt):
    seen = []
    out = dgemma.generate(model, prompt, record=True, record_top=3, on_step=seen.append, **options())
    assert len(out.trajectory) == len(seen)
    for kept, record in zip(out.trajectory, seen, strict=True):
        assert torch.equal(kept.rows.long(), record.rows)
        assert torch.equal(kept.canvas.long(), record.canvas)
        assert torch.equal(kept.argmax.long(), record.prediction.logits.argmax(-1))
        assert torch.equal(kept.accepted, record.accepted)
        assert torch.equal(kept.draft.long(), record.state.draft)
        entropy = torch.distributions.Categorical(logits=record.prediction.logits).entropy()
        torch.testing.assert_close(kept.entropy, entropy, rtol=1e-4, atol=1e-4)
        best = record.prediction.logits.softmax(-1).topk(3)
        assert torch.equal(kept.top_tokens.long(), best.indices)
        torch.testing.assert_close(kept.top_probabilities.float(), best.values, rtol=1e-3, atol=1e-4)


def test_a_record_of_a_tiny_vocabulary_has_all_of_its_tokens():
    model = dgemma.DiffusionGemma(dgemma.presets.tiny().replace(vocab_size=3, canvas_length=8))
    prompt, more = torch.tensor([[2, 0, 1]]), {"record": True, "steps": 2, "progress": False}
    out = dgemma.generate(model, prompt, max_new_tokens=8, **more)
    assert out.trajectory[0].top_tokens.sort(-1).values.unique(dim=1).tolist() == [[[0, 1, 2]]]
    filled = dgemma.infill(model, prompt, [(1, 2)], **more)
    assert filled.trajectories[0][0].top_tokens.shape == (1, 8, 3)
    for run in (dgemma.generate, functools.partial(dgemma.infill, holes=[(1, 2)])):
        with pytest.raises(ValueError, match=r"record_top must be from 0 to the vocabulary's 3, got 4\."):
            run(model, prompt, record_top=4, **more)


def test_finished_rows_are_absent_and_their_forwards_are_counted(recorded):
    trajectory = recorded.trajectory
    # Rows are done after 2, 3 and 4 steps of each of the two blocks.
    expected = torch.tensor([[1, 1, 1], [1, 1, 1], [0, 1, 1], [0, 0, 1]] * 2, dtype=torch.bool)
    assert torch.equal(trajectory.present, expected)
    assert trajectory.array("canvas").shape == (8, 3, CANVAS_LEN)
    assert trajectory.array("top_tokens").shape == (8, 3, CANVAS_LEN, 5)
    assert bool((trajectory.array("canvas")[~expected] == -1).all())
    assert bool(trajectory.array("entropy")[~expected].isnan().all())
    assert not bool(trajectory.array("accepted")[~expected].any())
    assert torch.equal(trajectory.num_forwards, torch.tensor([[2, 2], [3, 3], [4, 4]]))
    assert torch.equal(trajectory.new_tokens, recorded.new_tokens)
    assert torch.equal(trajectory.tokens_per_forward, recorded.tokens_per_forward)
    assert trajectory.at(block=1, step=3).rows.tolist() == [2]


@pytest.mark.parametrize("process", PROCESSES)
def test_a_saved_trajectory_loads_completely_and_replays_bit_for_bit(model, prompt, process, tmp_path):
    canvas = torch.full((3, 40), -1).index_fill(1, torch.tensor([2, 35]), 9)
    more = {"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7, [1] * 7]), "top_k": 40, "top_p": 0.95}
    more |= {"canvas": canvas, "frozen": canvas == 9, "allowed": [ANY]}
    out = dgemma.generate(model, prompt, record=True, **options(process, **more))
    out.trajectory.save(tmp_path / "run.safetensors")
    loaded = Trajectory.load(tmp_path / "run.safetensors")
    assert loaded.difference(out.trajectory) is None
    assert loaded.plan.knobs == out.trajectory.plan.knobs
    assert loaded.plan.noise == out.trajectory.plan.noise
    assert torch.equal(loaded.plan.span.allowed, out.trajectory.plan.span.allowed)
    again = loaded.replay(model)
    assert again.difference(out.trajectory) is None
    assert torch.equal(again.new_tokens, out.new_tokens)


def test_the_file_is_plain_safetensors_and_compact(recorded, tmp_path):
    path = tmp_path / "run.safetensors"
    recorded.trajectory.save(path)
    with safe_open(str(path), framework="pt") as file:
        assert file.get_tensor("steps.canvas").dtype == torch.int16
        assert file.get_tensor("steps.entropy").shape == (18, CANVAS_LEN)  # 2 × (2 + 3 + 4) rows that were there
        assert "EntropyBound" in file.metadata()["dgemma"]
    # Per position of a row's step: 4 token ids, 2 float32, 5 candidates of 2 + 2 bytes, 3 bits.
    assert path.stat().st_size < 18 * CANVAS_LEN * (4 * 2 + 2 * 4 + 5 * 4 + 3 / 8) * 1.1 + 8000


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99], ids=["empty", "inside", "last-bytes"])
def test_a_truncated_file_is_refused_in_one_sentence(recorded, tmp_path, share):
    path = tmp_path / "run.safetensors"
    recorded.trajectory.save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ValueError, match=r"run\.safetensors is (not a complete trajectory file|truncated or damaged)"):
        Trajectory.load(path)


@pytest.mark.parametrize(("name", "value"), [("entropy", math.nan), ("confidence", 1.5), ("temperature", -1.0)])
def test_a_number_that_no_run_records_is_refused(recorded, tmp_path, name, value):
    path = tmp_path / "run.safetensors"
    recorded.trajectory.save(path)
    with safe_open(str(path), framework="pt") as file:
        tensors, metadata = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
    tensors[f"steps.{name}"].view(-1)[3] = value
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(ValueError, match=rf"steps\.{name} must be in \[0, .*\], got torch.float32 of shape"):
        Trajectory.load(path)


@pytest.mark.parametrize("missing", [0, 1, 4], ids=["first", "second", "first-of-the-next-block"])
def test_a_file_that_lacks_a_step_is_refused(recorded, tmp_path, missing):
    whole = recorded.trajectory
    partial = Trajectory(whole.plan, top=whole.top)
    partial.commits, partial.steps = whole.commits, [*whole.steps[:missing], *whole.steps[missing + 1 :]]
    partial.save(tmp_path / "run.safetensors")
    with pytest.raises(ValueError, match="sizes must be a block, a step and a number of rows, in order"):
        Trajectory.load(tmp_path / "run.safetensors")


def test_other_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        Trajectory.load(tmp_path / "nothing")
    save_file({"tensor": torch.zeros(1)}, tmp_path / "other", metadata={"dgemma": '{"kind": "checkpoint"}'})
    with pytest.raises(ValueError, match="must be a trajectory file of dgemma, got another safetensors file"):
        Trajectory.load(tmp_path / "other")


def test_a_lambda_as_temperature_can_be_replayed_but_not_after_loading(model, prompt, tmp_path):
    warm = lambda step, num_steps: torch.full_like(step, 0.6, dtype=torch.float32)  # noqa: E731
    out = dgemma.generate(model, prompt, record=True, **options(temperature=warm))
    out.trajectory.replay(model)
    out.trajectory.save(tmp_path / "run")
    loaded = Trajectory.load(tmp_path / "run")
    assert loaded.difference(out.trajectory) is None
    with pytest.raises(ValueError, match=r"made with .*lambda.*does not know\. Only its name was saved"):
        loaded.replay(model)


@dataclass(frozen=True, kw_only=True)
class Bold(EntropyBound):
    """A sampler outside the library."""

    bound: float = 3.0


def namesake():
    """Another class with the name and fields of one in the library."""

    @dataclass(frozen=True, kw_only=True)
    class EntropyBound(Bold):
        pass

    EntropyBound.__qualname__ = "EntropyBound"
    return EntropyBound


def test_only_the_same_class_is_rebuilt(model, prompt, tmp_path):
    impostor = namesake()
    out = dgemma.generate(model, prompt, record=True, **options())
    out.trajectory.save(tmp_path / "run")
    for classes in ((), (impostor,)):
        loaded = Trajectory.load(tmp_path / "run", classes=classes)
        assert type(loaded.plan.knobs.sampler) is EntropyBound
        loaded.replay(model)

    own = dgemma.generate(model, prompt, record=True, **options(sampler=Bold()))
    own.trajectory.save(tmp_path / "own")
    assert type(Trajectory.load(tmp_path / "own").plan.knobs.sampler) is Bold
    theirs = dgemma.generate(model, prompt, record=True, **options(sampler=impostor()))
    theirs.trajectory.save(tmp_path / "theirs")
    assert type(Trajectory.load(tmp_path / "theirs").plan.knobs.sampler) is impostor


def test_a_class_of_the_library_is_found_by_its_name_after_it_has_moved(model, prompt, tmp_path):
    out = dgemma.generate(model, prompt, record=True, **options("mask"))
    tensors: dict[str, torch.Tensor] = {}
    written = json.dumps(values.describe_value(out.trajectory.plan, tensors))
    # Earlier versions had these modules at the top of the package.
    earlier = written.replace("dgemma.diffusion.", "dgemma.").replace("dgemma.run.", "dgemma.")
    assert "dgemma.noise:MaskNoise" in earlier
    plan = values.rebuild_value(json.loads(earlier), tensors)
    assert (plan.noise, plan.knobs) == (out.trajectory.plan.noise, out.trajectory.plan.knobs)
    assert torch.equal(plan.seeds, out.trajectory.plan.seeds)


@pytest.mark.parametrize("process", PROCESSES)
def test_a_fork_without_change_equals_the_run(model, prompt, process):
    out = dgemma.generate(model, prompt, record=True, **options(process))
    for block, at in [(0, 0), (0, 2), (1, 0), (1, 3)]:
        fork = out.trajectory.fork(model, block=block, step=at)
        assert out.trajectory.difference(fork.trajectory) is None
        assert torch.equal(fork.tokens, out.tokens)
        assert torch.equal(fork.steps, out.steps)
        assert torch.equal(fork.tokens_per_forward, out.tokens_per_forward)
        assert torch.equal(fork.cache.lengths, out.cache.lengths)


@pytest.mark.parametrize(
    "change",
    [{"sampler": EntropyBound(bound=30.0)}, {"temperature": 0.05}, {"seed": 77}, {"stop": StepCap(5)}, {"top_k": 1}],
    ids=lambda change: next(iter(change)),
)
def test_a_fork_with_a_change_shares_the_beginning_and_then_differs(model, recorded, change):
    run = recorded.trajectory
    fork = recorded.trajectory.fork(model, block=1, step=1, **change).trajectory
    place = next(i for i, s in enumerate(run) if (s.block, s.index) == (1, 1))
    assert torch.equal(fork.commits[0].tokens, run.commits[0].tokens)
    for mine, theirs in zip(run.steps[:place], fork.steps[:place], strict=True):
        assert torch.equal(mine.canvas, theirs.canvas)
        assert torch.equal(mine.top_probabilities, theirs.top_probabilities)
    assert torch.equal(run[place].canvas, fork[place].canvas)  # the step before the change wrote this canvas
    assert run.difference(fork).startswith("block 1, step ")
    assert fork.difference(fork.replay(model)) is None


def test_a_new_seed_at_step_zero_is_the_run_of_that_seed_for_the_block(model, prompt):
    one = options(max_new_tokens=CANVAS_LEN)
    first = dgemma.generate(model, prompt, record=True, **one).trajectory
    second = dgemma.generate(model, prompt, record=True, **{**one, "seed": 90}).trajectory
    assert first.difference(second) is not None
    assert first.fork(model, seed=90).trajectory.difference(second) is None


def test_a_new_seed_applies_to_all_rows_and_later_blocks(model, recorded):
    fork = recorded.trajectory.fork(model, block=0, step=2, seed=90).trajectory
    # Row 0 was done before this step of block 0, so its new seed applies from block 1 on.
    assert fork.at(block=0, step=1).seeds.tolist() == [3, 4, 5]
    assert fork.at(block=0, step=2).seeds.tolist() == [91, 92]
    assert fork.at(block=1, step=0).seeds.tolist() == [90, 91, 92]


def test_a_spliced_row_continues_like_the_donor_did(model, prompt):
    one = options(max_new_tokens=CANVAS_LEN, stop=None)
    host = dgemma.generate(model, prompt, record=True, **one)
    donor = dgemma.generate(model, prompt, record=True, **{**one, "seed": 90})
    row = torch.tensor([1])
    state = donor.trajectory.moment(model, step=2).state.select(row)
    spliced = host.trajectory.moment(model, step=2).state.splice(row, state)
    fork = host.trajectory.fork(model, step=2, state=spliced)
    assert torch.equal(fork.new_tokens[[0, 2]], host.new_tokens[[0, 2]])
    assert torch.equal(fork.new_tokens[1], donor.new_tokens[1])
    assert not torch.equal(host.new_tokens[1], donor.new_tokens[1])
    assert fork.trajectory.difference(fork.trajectory.replay(model)) is None


def test_a_row_can_come_from_a_run_with_an_equal_constraint(model, prompt):
    pytest.importorskip("outlines_core")
    runs = []
    for seed in (3, 90):
        constraint = dgemma.Regex(f"[a-h]{{{CANVAS_LEN}}}", dgemma.ByteTokenizer())
        one = options(max_new_tokens=CANVAS_LEN, stop=None, seed=seed, constraint=constraint)
        runs.append(dgemma.generate(model, prompt, record=True, **one))
    host, donor = (run.trajectory for run in runs)
    row = torch.tensor([1])
    state = donor.moment(model, step=2).state.select(row)
    spliced = host.moment(model, step=2).state.splice(row, state)
    fork = host.fork(model, step=2, state=spliced)
    assert torch.equal(fork.new_tokens[1], runs[1].new_tokens[1])
    assert not torch.equal(fork.new_tokens[1], runs[0].new_tokens[1])


def meddle(record):
    """All a callback may do: write tokens, close positions, edit self-conditioning, change sampler and temperature."""
    if int(record.block[0]) == 0 and int(record.step[0]) == 0:
        written = record.state.canvas.clone().index_fill(1, torch.tensor([4]), 11)
        state = replace(record.state, canvas=written, open=record.state.open & (torch.arange(CANVAS_LEN) < 5))
        return {"state": state, "sampler": EntropyBound(bound=2.0)}
    if int(record.step[0]) == 1:
        return {"self_cond": record.prediction.logits * 0.5, "temperature": 0.3}
    return None


def test_a_replay_repeats_the_changes_of_a_callback(model, prompt, tmp_path):
    out = dgemma.generate(model, prompt, record=True, on_step=meddle, **options())
    plain = dgemma.generate(model, prompt, record=True, **options())
    assert out.trajectory.difference(plain.trajectory) is not None
    assert out.trajectory.replay(model).difference(out.trajectory) is None
    out.trajectory.save(tmp_path / "run")
    assert Trajectory.load(tmp_path / "run").replay(model).difference(out.trajectory) is None


def write_in_place(record):
    """Write a canvas, a frozen position and a finished row in place, and return a changed knob."""
    state = record.state
    if int(state.step[0]) == 2:
        state.canvas[:, :4] = 77
        state.frozen[:, 1] = True
    if int(state.step[0]) == 3 and 2 in state.rows.tolist():
        state.done[state.rows == 2] = True
        return {"sampler": replace(record.knobs.sampler)}
    return None


@pytest.mark.parametrize("process", ["uniform", "mask"])
def test_a_replay_repeats_writes_in_place(model, prompt, process, tmp_path):
    settings = options(process, stop=None, record=True)
    out = dgemma.generate(model, prompt, on_step=write_in_place, **settings)
    assert not torch.equal(out.new_tokens, dgemma.generate(model, prompt, **settings).new_tokens)
    assert (out.new_tokens[:, 1] == 77).all()
    assert dgemma.generate(model, prompt, on_step=lambda record: None, **settings).trajectory.changes == []
    out.trajectory.save(tmp_path / "run.safetensors")
    again = Trajectory.load(tmp_path / "run.safetensors").replay(model)  # raises if they differ
    assert torch.equal(again.new_tokens, out.new_tokens)
    assert torch.equal(out.trajectory.fork(model, block=1, step=1).new_tokens, out.new_tokens)
    shared = {name: value for name, value in settings.items() if name not in ("max_new_tokens", "eos_token_ids")}
    filled = dgemma.infill(model, prompt.repeat(1, 3), [(2, 9)], on_step=write_in_place, **shared)
    for trajectory in filled.trajectories:
        assert trajectory.changes
        trajectory.replay(model)


def test_a_fork_repeats_the_earlier_changes_of_a_callback(model, prompt):
    recorded = dgemma.generate(model, prompt, record=True, on_step=meddle, **options()).trajectory
    places = [(c.block, c.index) for c in recorded.changes]
    for block, at in ((0, 0), (0, 2), (1, 0), (1, 2)):
        fork = recorded.fork(model, block=block, step=at, on_step=meddle)
        assert recorded.difference(fork.trajectory) is None
        without = recorded.fork(model, block=block, step=at)  # without changes, all recorded changes are repeated
        assert recorded.difference(without.trajectory) is None
        assert [(c.block, c.index) for c in without.trajectory.changes] == places
        changed = recorded.fork(model, block=block, step=at, top_k=3)  # later changes are dropped
        before = {place for place in places if place <= (block, at)}
        assert {(c.block, c.index) for c in changed.trajectory.changes} == before | {(block, at)}


def test_a_state_for_a_fork_overrides_earlier_changes(model, prompt):
    out = dgemma.generate(model, prompt, record=True, on_step=meddle, **options())
    state = out.trajectory.moment(model, block=0, step=1).state
    assert bool((state.canvas[:, 4] == 11).all())  # the callback wrote 11 there
    canvas = torch.full_like(state.canvas, 17)
    fork = out.trajectory.fork(model, block=0, step=1, state=replace(state, canvas=canvas))
    assert bool((fork.trajectory.at(block=0, step=1).canvas == 17).all())
    kept = fork.trajectory.changes[0].values
    assert kept["sampler"] == EntropyBound(bound=2.0)  # the callback's knobs still apply
    assert kept.keys() == {"sampler", "canvas", "open"}  # of a whole state, only what differs is kept
    same = out.trajectory.fork(model, block=0, step=1, canvas=canvas)  # the positions that the callback closed stay so
    assert same.trajectory.difference(fork.trajectory) is None


def test_forks_can_be_forked(model, recorded):
    first = recorded.trajectory.fork(model, block=0, step=1, temperature=0.2).trajectory
    second = first.fork(model, block=1, step=1, seed=8).trajectory
    assert first.difference(second).startswith("block 1, step 1")
    assert second.difference(second.replay(model)) is None
    assert second.difference(second.fork(model, block=1, step=2).trajectory) is None


def test_a_run_from_a_cache_needs_that_cache(model, prompt):
    cache = model.encode(prompt)
    before = cache.clone()
    out = dgemma.generate(model, prompt[:, :2], cache=cache, record=True, **options())
    with pytest.raises(ValueError, match=r"cache must have the tokens per row \[7, 7, 7\] .*, got None"):
        out.trajectory.replay(model)
    with pytest.raises(ValueError, match=r"got \[73, 73, 73\]"):
        out.trajectory.replay(model, cache=out.cache)
    assert out.trajectory.difference(out.trajectory.replay(model, cache=before)) is None
    assert before.lengths.tolist() == [7, 7, 7]  # copied, not extended
