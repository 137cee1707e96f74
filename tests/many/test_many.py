"""Many prompts: rows replace one another without changing any tokens, and a killed run continues."""

import json
import os
import re
import signal
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import dgemma
from dgemma import ByteTokenizer, Prediction
from dgemma.constraints.token_automaton import TokenAutomaton
from dgemma.many.batch import Batch, BatchRow
from dgemma.many.run_file import RunFile
from dgemma.run.loop import drain, run_plan
from dgemma.run.plan import read_plan
from every_sampler import SAMPLERS, STOP_RULES, noises
from fork_server import start_script
from rowwise import RowwiseDenoiser

PROMPTS = [list(range(5, 5 + length)) for length in (3, 17, 1, 9, 24, 2)]


@dataclass
class Conditioned(RowwiseDenoiser):
    """Also reads the last prediction, so that a row with a neighbour's self-conditioning is noticed."""

    def denoise(self, canvas, cache, self_cond=None, self_cond_mask=None):
        logits = super().denoise(canvas, cache).logits
        if self_cond is None:
            return Prediction(logits)
        last = self_cond.argmax if isinstance(self_cond, Prediction) else self_cond.argmax(-1)
        return Prediction(logits.roll(1, -1) + (last % 3)[..., None])


def expected(model, prompts, seed=0, **options):
    """The results of `generate`, prompt by prompt."""
    rows = [torch.tensor([prompt]) for prompt in prompts]
    return [dgemma.generate(model, row, seed=[seed + at], **options) for at, row in enumerate(rows)]


def assert_equal(results, wanted):
    assert [result.index for result in results] == list(range(len(wanted)))
    for got, want in zip(results, wanted, strict=True):
        assert torch.equal(got.new_tokens, want.new_tokens[0])
        assert torch.equal(got.steps, want.steps[0])
        assert got.tokens_per_forward == pytest.approx(float(want.tokens_per_forward[0]))


def run_together(model, rows):
    """Run rows in one batch until all have ended."""
    batch = Batch(model)
    for row in rows:
        batch.add(row)
    while len(batch):
        batch.step()


@dataclass(frozen=True, kw_only=True)
class Staggered(dgemma.StopRule):
    """Ends canvases after one to five steps, depending on the row and the block."""

    def __call__(self, prediction, state):
        return state.step > (state.seeds * 7 + state.block * 3) % 5, None


OPTIONS = {"max_new_tokens": 48, "steps": 6, "stop": Staggered(), "eos_token_ids": [1, 2, 3]}


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5])
def test_every_batch_size_gives_the_tokens_of_generate(batch_size):
    model = Conditioned()
    wanted = expected(model, PROMPTS, seed=40, **OPTIONS)
    assert len({len(want.steps[0]) for want in wanted}) > 1, "rows are meant to end after different numbers of blocks"
    assert len({steps for want in wanted for steps in want.steps[0].tolist()}) > 1
    assert_equal(list(dgemma.generate_many(model, PROMPTS, batch_size=batch_size, seed=40, **OPTIONS)), wanted)


def one_of_each(values):
    """The instance with default options of every class."""
    return {"argvalues": {type(value): value for value in reversed(values)}.values(), "ids": lambda v: type(v).__name__}


@pytest.mark.parametrize("sampler", **one_of_each(SAMPLERS))
def test_rows_at_different_steps_share_a_batch_under_every_sampler(sampler):
    model = Conditioned()
    for noise in noises(sampler, 64)[:1]:
        options = {"sampler": sampler, "noise": noise, "steps": 3, "stop": None, "max_new_tokens": 32}
        assert_equal(
            list(dgemma.generate_many(model, PROMPTS[:3], batch_size=2, **options)),
            expected(model, PROMPTS[:3], **options),
        )


@pytest.mark.parametrize("stop", **one_of_each(STOP_RULES))
def test_rows_at_different_steps_share_a_batch_under_every_stop_rule(stop):
    model, options = Conditioned(), {"stop": stop, "steps": 4, "max_new_tokens": 32}
    assert_equal(
        list(dgemma.generate_many(model, PROMPTS[:3], batch_size=2, **options)), expected(model, PROMPTS[:3], **options)
    )


def test_the_real_model_writes_the_tokens_of_generate():
    model = dgemma.DiffusionGemma(dgemma.presets.tiny())
    options = {"max_new_tokens": 64, "steps": 3, "eos_token_ids": [5, 6], "top_p": 0.9, "allowed": range(400)}
    wanted = expected(model, PROMPTS, **options)
    assert len({len(want.steps[0]) for want in wanted}) > 1
    assert_equal(list(dgemma.generate_many(model, PROMPTS, batch_size=3, **options)), wanted)


def test_guidance_works_row_by_row():
    model = dgemma.Guided(Conditioned(), strength=0.5, unconditional=4)
    assert_equal(
        list(dgemma.generate_many(model, PROMPTS[:4], batch_size=2, **OPTIONS)), expected(model, PROMPTS[:4], **OPTIONS)
    )


def test_prompts_are_read_only_when_a_slot_is_free():
    taken = []

    def prompts():
        for at in range(100):
            taken.append(at)
            yield [5 + at % 50]

    results = dgemma.generate_many(RowwiseDenoiser(), prompts(), batch_size=3, in_order=False, **OPTIONS)
    for number in range(1, 5):
        next(results)
        assert len(taken) <= 3 + number


def test_texts_chats_and_dictionaries_are_prompts():
    model = RowwiseDenoiser(dgemma.presets.tiny().replace(vocab_size=384, canvas_length=16))
    tokenizer = ByteTokenizer()
    chat = [{"role": "user", "content": "hi"}]
    named, brief = {"prompt": "hi", "id": "a", "seed": 0}, {"messages": chat, "max_new_tokens": 16}
    prompts = ["hi", chat, torch.tensor([7, 8]), named, brief]
    options = {**OPTIONS, "eos_token_ids": []}
    plain, talk, ids, again, short = dgemma.generate_many(model, prompts, tokenizer=tokenizer, **options)
    assert torch.equal(plain.new_tokens, again.new_tokens)
    assert (again.id, again.seed, plain.id, talk.seed) == ("a", 0, None, 1)
    want = dgemma.generate(model, torch.tensor([tokenizer.chat(chat)]), seed=[1], **options)
    assert torch.equal(talk.new_tokens, want.new_tokens[0])
    assert talk.text == tokenizer.decode(want.new_tokens[0])
    assert (len(ids.new_tokens), len(short.new_tokens)) == (48, 16)


def test_a_checkpoint_brings_its_own_tokenizer():
    model = dgemma.DiffusionGemma.from_pretrained("dgemma/text")
    (result,) = dgemma.generate_many(model, ["Once upon a time"], max_new_tokens=1, steps=1)
    assert result.text == dgemma.Tokenizer.from_pretrained("dgemma/text").decode(result.new_tokens)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[5], 3.5], {}, "prompt 1 must be a text, a chat or token ids"),
        ([{"text": "a"}], {}, "prompt 0 must have one of prompt, messages, tokens"),
        ([[5], [5, 99]], {}, r"prompt 1: tokens must be ids in \[0, 64\), got \[5, 99\]"),
        ([[5], [5] * 9999], {}, "prompt 1: generate must stay within max_position_embeddings"),
        ([[5], [5]], {"seed": 2**63 - 1}, r"prompt 1: .*seed must be .*, got \[9223372036854775808\]"),
        (["hi"], {}, "tokenizer must be set for texts and chats"),
    ],
)
def test_bad_arguments_are_named(prompts, options, message):
    with pytest.raises(ValueError, match=message):
        list(dgemma.generate_many(RowwiseDenoiser(), prompts, **{"steps": 1, **options}))


def test_a_removed_row_frees_its_place_and_the_others_go_on():
    model, options = Conditioned(), {**OPTIONS, "stop": None}
    wanted = expected(model, PROMPTS[:3], **options)
    batch = Batch(model)
    prompts = (torch.tensor([prompt]) for prompt in PROMPTS[:3])
    rows = [BatchRow(read_plan(model, prompt, seed=[at], **options), index=at) for at, prompt in enumerate(prompts)]
    for row in rows:
        batch.add(row)
    batch.step()
    batch.remove(rows[1])
    assert len(batch) == 2
    while len(batch):
        batch.step()
    for at in (0, 2):
        assert torch.equal(rows[at].new_tokens, wanted[at].new_tokens)


def test_rows_with_given_tokens_over_several_blocks_share_a_batch_with_plain_rows():
    """A row is defined by its plan. In the second row, a canvas may end once its first six positions are decided."""
    model = Conditioned()
    options = {"max_new_tokens": 48, "steps": 4, "noise": dgemma.MaskNoise(64), "sampler": dgemma.Confidence()}
    canvas = torch.full((1, 40), -1)
    canvas[0, 10:30] = 21
    plans = [
        read_plan(model, torch.tensor([prompt]), seed=[at], **options, **more)
        for at, (prompt, more) in enumerate(
            zip(PROMPTS, ({}, {"canvas": canvas, "frozen": canvas >= 0}, {}), strict=False)
        )
    ]
    awaited = torch.arange(48)[None] % 16 < 6
    plans[1] = replace(plans[1], span=replace(plans[1].span, awaited=awaited))
    rows = [BatchRow(plan, index=at) for at, plan in enumerate(plans)]
    run_together(model, rows)
    for row, plan in zip(rows, plans, strict=True):
        want = drain(run_plan(model, plan))
        assert torch.equal(row.new_tokens, want.new_tokens)
        assert torch.equal(row.steps, want.steps)
    assert rows[1].new_tokens[0, 10:30].tolist() == [21] * 20


class AnyText(dgemma.Regex):
    """The language of all texts, as a constraint."""

    def __init__(self):
        automaton = TokenAutomaton(np.zeros(64, np.int32), np.zeros((1, 1), np.int32), np.ones(1, bool))
        self.__dict__.update(automaton=automaton, pattern="", tokenizer=None)


@pytest.mark.parametrize("noise", [dgemma.UniformNoise(64), dgemma.MaskNoise(64)])
def test_a_row_with_none_in_a_list_of_constraints_is_a_plain_row(noise):
    model, prompt = Conditioned(), torch.tensor([PROMPTS[0], PROMPTS[0]])
    options = {"max_new_tokens": 32, "steps": 4, "noise": noise, "eos_token_ids": [21]}
    plain, listed = (dgemma.generate(model, prompt, constraint=c, **options) for c in (None, [None, AnyText()]))
    assert torch.equal(listed.new_tokens[0], plain.new_tokens[0])
    assert torch.equal(listed.steps[0], plain.steps[0])


def run(path, prompts=PROMPTS, **changes):
    return list(dgemma.generate_many(Conditioned(), prompts, out=path, **{**OPTIONS, "batch_size": 2, **changes}))


@pytest.mark.parametrize("in_order", [True, False])
def test_a_run_that_stopped_anywhere_continues_with_the_same_results(tmp_path, in_order):
    path = tmp_path / "run.jsonl"
    whole = run(path)
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + len(PROMPTS)
    for kept, torn in ((0, b""), (0, lines[0][:-1]), (1, b""), (3, lines[3][:-1]), (6, lines[6][:9])):
        path.write_bytes(b"".join(lines[:kept]) + torn)
        results = run(path, in_order=in_order, batch_size=3)
        assert kept or in_order == ([result.index for result in results] == list(range(len(PROMPTS))))
        for got, want in zip(sorted(results, key=lambda result: result.index), whole, strict=True):
            assert torch.equal(got.new_tokens, want.new_tokens)
            assert torch.equal(got.steps, want.steps)
            assert (got.seed, got.text, got.tokens_per_forward) == (want.seed, want.text, want.tokens_per_forward)
        assert sorted(path.read_bytes().splitlines()) == sorted(line.strip() for line in lines)


def test_a_finished_run_is_read_back_without_a_forward(tmp_path, monkeypatch):
    path = tmp_path / "run.jsonl"
    whole = run(path)
    monkeypatch.setattr(Conditioned, "step", None)
    assert [result.new_tokens.tolist() for result in run(path)] == [result.new_tokens.tolist() for result in whole]


def test_another_length_in_whole_canvases_is_another_setting_only_under_a_constraint(tmp_path):
    run(tmp_path / "free.jsonl", max_new_tokens=15)
    run(tmp_path / "free.jsonl", max_new_tokens=16)
    run(tmp_path / "run.jsonl", max_new_tokens=15, constraint=AnyText())
    with pytest.raises(ValueError, match="settings that it began with, got may_end"):
        run(tmp_path / "run.jsonl", max_new_tokens=16, constraint=AnyText())


def test_other_settings_prompts_and_files_are_refused(tmp_path):
    path = tmp_path / "run.jsonl"
    run(path)
    before = path.read_bytes()
    for changes, message in (
        ({"steps": 5}, "settings that it began with, got steps 5 instead of 6"),
        ({"seed": 1}, "got seed 1 instead of 0"),
        ({"sampler": dgemma.EntropyBound(bound=0.5)}, "got sampler .*EntropyBound"),
        ({"prompts": PROMPTS[::-1]}, "must be continued with the prompts that it began with, but prompt 0 differs"),
    ):
        with pytest.raises(ValueError, match=message):
            run(path, **changes)
    assert path.read_bytes() == before
    for content in (b"notes\n", b'{"a": 1}\n', b"no newline", b"[]\n", b"{"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="must be a new file, or one that this run began"):
            run(path)
        assert path.read_bytes() == content
    for line in (b"{}", b"[]", b'{"index": -1}', b"[" * 5000, before.splitlines()[1]):
        path.write_bytes(before + line + b"\n")
        with pytest.raises(ValueError, match=r"must hold one result per line, each .* in line 8"):
            run(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda line: line.pop("seed"),
        lambda line: line.update(extra=1),
        lambda line: line.update(steps=3),
        lambda line: line.update(new_tokens=[5, 64]),
        lambda line: line.update(new_tokens=[5] * 500),
    ],
    ids=["missing", "extra", "no-list", "outside-vocabulary", "too-long"],
)
def test_a_damaged_result_is_refused_in_one_sentence(tmp_path, change):
    path = tmp_path / "run.jsonl"
    run(path, prompts=PROMPTS[:2])
    header, first, second = path.read_text().splitlines()
    damaged = json.loads(second)
    change(damaged)
    path.write_text("\n".join((header, first, json.dumps(damaged), "")))
    with pytest.raises(ValueError, match=r"run\.jsonl must hold complete results, got something else for index 1"):
        run(path, prompts=PROMPTS[:2])


@pytest.mark.skipif(os.name != "posix", reason="files are locked on POSIX only")
def test_a_file_that_another_run_writes_is_refused(tmp_path):
    with RunFile(tmp_path / "run.jsonl", {}), pytest.raises(ValueError, match="another one has it open"):
        RunFile(tmp_path / "run.jsonl", {})


RESUMED = """
import signal, sys, torch, dgemma
last, moment = map(float, sys.argv[2:])
torch.manual_seed(0)
model = dgemma.DiffusionGemma(dgemma.presets.tiny())
prompts = ([5 + at % 400, 6] for at in range(40))
for result in dgemma.generate_many(model, prompts, batch_size=4, out=sys.argv[1], steps=2, max_new_tokens=64):
    if result.index == last:
        signal.setitimer(signal.ITIMER_PROF, moment)
"""


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_loses_and_repeats_nothing(tmp_path):
    """A signal ends the process after a few milliseconds of its CPU time, however busy the machine is."""
    path, calm = tmp_path / "killed.jsonl", tmp_path / "calm.jsonl"
    for file, last, moment, ends_by in (
        *((path, 4 * at, 0.002 * (at + 1), -signal.SIGPROF) for at in range(4)),
        *((file, 99, 1, 0) for file in (path, calm)),
    ):
        process = start_script(RESUMED, file, last, moment)
        process.join(120)
        assert process.exitcode == ends_by
    lines = [[json.loads(line) for line in file.read_text().splitlines()] for file in (path, calm)]
    assert lines[0][0] == lines[1][0]
    indices = [line["index"] for line in lines[0][1:]]
    assert sorted(indices) == list(range(40))
    assert sorted(lines[0][1:], key=lambda line: line["index"]) == sorted(lines[1][1:], key=lambda line: line["index"])


def test_results_carry_their_prompts_also_from_a_file(tmp_path):
    model, prompts = RowwiseDenoiser(), [{"tokens": PROMPTS[0], "id": "a"}, PROMPTS[1]]
    for _ in range(2):
        results = dgemma.generate_many(model, prompts, out=tmp_path / "run.jsonl", **OPTIONS)
        assert [result.prompt for result in results] == prompts


def test_piped_progress_is_a_plain_line_now_and_then(monkeypatch, capsys):
    monkeypatch.setattr("dgemma.many.prompts._REPORT_SECONDS", 0)
    list(dgemma.generate_many(RowwiseDenoiser(), PROMPTS[:2], **OPTIONS))
    assert re.fullmatch(r"generating: 1 of 2 prompts in \d+ s\ngenerating: 2 of 2 .*\n", capsys.readouterr().err)
    list(dgemma.generate_many(RowwiseDenoiser(), PROMPTS[:2], progress=False, **OPTIONS))
    assert capsys.readouterr().err == ""
