"""Every example runs at a size that takes seconds, and prints what its docstring promises."""

import json
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

import dgemma
from dgemma.checkpoint.images import processor_of
from dgemma_kernels.ops.vocabulary import kernel as vocabulary

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
ASSETS = ROOT / "src" / "dgemma" / "assets"
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Return a function that runs an example in a temporary folder and returns its output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT / "kernels")])
    )  # for its subprocesses

    def run(name: str, *arguments: str) -> str:
        (path,) = (path for path in EXAMPLES if path.name.startswith(name))
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_numbers_have_no_gaps_and_every_example_is_run_here():
    numbers = [int(path.name[:2]) for path in EXAMPLES]
    assert numbers == list(range(1, len(numbers) + 1))
    here = Path(__file__).read_text()
    for path in EXAMPLES:
        assert f'run("{path.name[:2]}"' in here, path.name


def test_generate_writes_a_canvas_after_the_prompt(run):
    printed = run("01", "Once upon a time", "--steps", "4")
    assert "\nOnce upon a time" in printed
    assert "64 tokens in 4 forwards" in printed
    assert len(re.findall(r"^step +\d", printed, flags=re.MULTILINE)) == 4


@pytest.mark.usefixtures("shallow")
def test_watch_writes_a_page_and_pictures(run, tmp_path):
    assert "8 forwards for two canvases" in run("02", "--steps", "4", "--out", "pictures")
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "pictures").iterdir()}
    assert sizes.keys() == {"run.html", "entropy.png", "order.png", "run.gif"}
    assert min(sizes.values()) > 5000


@pytest.mark.usefixtures("shallow")
def test_write_a_sampler_compares_four(run):
    printed = run("03", "--steps", "4")
    nats = [float(value) for value in re.findall(r"([\d.]+) nats per token", printed)]
    assert len(nats) == 4
    assert printed.startswith("OnTime()\n")
    assert all(0 < value < 30 for value in nats)


@pytest.mark.usefixtures("shallow")
def test_infill_and_edit_keep_frozen_tokens(run):
    printed = run("04", "--steps", "4")
    sides = r"^Once upon .* He lived\[.+\], and he was happy\.$"
    assert len(re.findall(sides, printed, flags=re.MULTILINE)) == 3
    assert re.search(r"beginning frozen: +Once upon a time there was a young duck", printed)


def test_only_allowed_tokens_are_written(run):
    printed = run("05", "--steps", "4")
    (without_e,) = re.findall(r"^without e: (.*)$", printed, flags=re.MULTILINE)
    assert len(without_e) > 64
    assert "e" not in without_e.lower()
    assert re.search(r"In the year 18\d\d", printed)
    shares = {noun: float(share) for noun, share in re.findall(r"^  (\w+) +([\d.]+)%$", printed, flags=re.MULTILINE)}
    assert sum(shares.values()) == pytest.approx(100, abs=0.3)
    assert max(shares, key=shares.get) == "ship"  # out of ship, king and cake


@pytest.mark.usefixtures("shallow")
def test_study_a_run_prints_every_layer(run):
    printed = run("06", "--steps", "4")
    for layer in range(2):
        (line,) = re.findall(rf"layer {layer}: (.*)$", printed, flags=re.MULTILINE)
        assert sum(int(share) for share in re.findall(r"(\d+)%", line)) == pytest.approx(100, abs=4)
    (thirds,) = re.findall(r"from the left: (.*)$", printed, flags=re.MULTILINE)
    assert all(0 <= float(third) <= 4 for third in thirds.split(","))


@pytest.mark.usefixtures("shallow")
def test_forks_equal_the_run_before_their_change(run):
    printed = run("07", "--steps", "4")  # asserts that an unchanged fork equals the run
    same = [int(share) for share in re.findall(r"(\d+)% of the positions as in the run", printed)]
    assert len(same) == 4
    assert min(same) < 100
    assert " a kite" in printed.splitlines()[-1]


def test_a_text_model_is_trained_on_files_and_its_checkpoint_generates(run, tmp_path):
    printed = run("08", "--steps", "2", "--batch-size", "2", "--out", "out", "--device", "cpu")
    assert re.search(r"^causal +\d+\.\d+", printed, flags=re.MULTILINE)
    assert json.loads((tmp_path / "out" / "results.json").read_text())["steps"] == 2
    options = ("--num-prompts", "2", "--new-tokens", "32", "--out", "samples.md", "--device", "cpu")
    run("18", "--model", "out/checkpoint", *options)
    page, shipped = ((path / "samples.md").read_text() for path in (tmp_path, ASSETS / "text"))
    assert re.findall("^#.*$", page, flags=re.MULTILINE) == re.findall("^#.*$", shipped, flags=re.MULTILINE)
    assert page.count("\n> **It was a dark night, and the old captain**") == 4


def test_likelihood_ranks_language_before_shuffled_words_before_reversed_letters(run):
    printed = run("09", "--rows", "2", "--samples", "2")
    rows = [re.split(r"  +", line) for line in printed.splitlines()[1:4]]
    causal = [float(row[-1]) for row in rows]  # the bound of two samples is too wide to rank
    assert [row[0] for row in rows] == ["as it was written", "its words shuffled", "its letters reversed"]
    assert causal == sorted(causal)


def test_sudoku_is_trained_and_solving_orders_are_compared(run, tmp_path):
    sizes = ("--steps", "2", "--batch-size", "2", "--layers", "1", "--pool", "4", "--num-tests", "2")
    more = ("--denoising-steps", "2", "--workers", "1", "--device", "cpu", "--puzzles", "puzzles")
    assert run("10", *sizes, *more, "--prepare-only") == ""
    assert len(list((tmp_path / "puzzles").iterdir())) == 4
    for noise, num_settings in (("mask", 3 + 7 + 1), ("uniform", 2 + 3 + 7 + 7 + 1)):  # and four numbers of retries
        for start, out in ((), noise), ((), noise), (("--start", f"{noise}/checkpoint"), f"{noise}-own"):
            run("10", *sizes, *more, *start, "--noise", noise, "--out", out)
            results = json.loads((tmp_path / out / "results.json").read_text())
            assert results["test_grids_with_a_key_trained_on"] == 0
            assert results["before"]["24-29 givens"]["exact"] == results["trained"]["24-29 givens"]["exact"] == 0
            assert [scores["bound"] for scores in results["validation"]] == [0.1, 0.2, 0.3, 0.5]
            assert results["train_steps"] == 2
            assert results["puzzles_per_second"] > 0  # also in a call that only continues
        options = ("--num-tests", "2", "--max-steps", "1", "--puzzles", "puzzles", "--device", "cpu")
        printed = run("17", "--model", f"{noise}/checkpoint", *options, "--out", noise)
        rows = json.loads((tmp_path / noise / "orders.json").read_text())
        assert len(rows) == len(printed.splitlines()) - 1 == 2 * (num_settings + 4)
        # No grid is solved here, so every puzzle is tried again.
        assert all(row["steps"] == 1 + int(row["setting"][0]) * (row["order"] == "retry") for row in rows)
        assert (tmp_path / noise / "steps.png").stat().st_size > 5000


@pytest.mark.usefixtures("shallow")
def test_sudoku_is_finetuned_in_both_ways(run, tmp_path):
    sizes = ("--steps", "1", "--batch-size", "2", "--pool", "4", "--num-tests", "2", "--denoising-steps", "1")
    run("11", *sizes, "--workers", "1", "--out", "out", "--device", "cpu")
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["lora"]["trained_weights"] < results["full"]["trained_weights"]
    assert results["full"]["steps"] == results["lora"]["steps"] == 1
    assert results["lora"]["after"]["30-39 givens"].keys() >= {"exact", "cells", "clues", "steps"}


def test_no_bound_on_a_markov_chain_is_below_its_entropy(run, tmp_path):
    printed = run("12", "--size", "tiny", "--steps", "3", "--device", "cpu", "--out", "out")
    rows = [line.split() for line in printed.splitlines()[1:]]
    assert [row[0] for row in rows] == ["mask", "uniform-with-level", "uniform", "uniform-mean"]
    assert all(float(bound) > float(exact) for _, exact, bound, *_ in rows)
    result = json.loads((tmp_path / "out" / "uniform-with-level" / "result.json").read_text())
    assert sum(result["gap_by_level"]) == pytest.approx(result["gap"], abs=2 * result["gap_error"])


def test_the_gradient_of_the_first_step_needs_the_chain_of_steps(run):
    printed = run("13", "--updates", "2")
    norms = dict(re.findall(r"^(through|cut) +\|d loss .* = (\S+)$", printed, flags=re.MULTILINE))
    assert float(norms["through"]) > 0
    assert float(norms["cut"]) == 0
    assert len(re.findall(r"squares( +[\d.]+%){6}", printed)) == 2


def test_kernels_generate_the_same_tokens_as_the_reference(run, monkeypatch):
    if not torch.cuda.is_available():
        monkeypatch.setattr(vocabulary, "CHUNK", 64)  # the interpreter is slow on large chunks
    printed = run("14")
    assert len(re.findall(r"^(?:reference|kernels) .* tokens/s$", printed, flags=re.MULTILINE)) >= 2
    if not torch.cuda.is_available():
        assert "4 of 4 tokens are the same" in printed


def test_parameters_of_the_published_model_are_counted_without_its_weights(run, monkeypatch):
    monkeypatch.delenv("DGEMMA_CHECKPOINT", raising=False)
    assert "25,823,778,864 parameters" in run("15")


def test_two_processes_have_the_losses_of_one(run):
    losses = re.findall(r"loss ([\d.]+) on 2 processes, ([\d.]+) on one", run("16"))
    assert len(losses) == 3
    for together, alone in losses:
        assert float(together) == pytest.approx(float(alone), abs=1e-3)  # float32 sums in another order


@pytest.mark.usefixtures("shallow")
def test_samplers_and_stop_rules_are_compared_under_both_kinds_of_noise(run, tmp_path):
    run("19", "--num-tests", "1", "--num-prompts", "2", "--max-steps", "1", "--out", "out", "--device", "cpu")
    results = json.loads((tmp_path / "out" / "samplers.json").read_text())
    assert results.pop("run").startswith("cpu, torch ")
    assert results.keys() == {"mask", "mask stop rules", "uniform", "uniform stop rules", "mask text"}
    assert all(
        row["forwards"] <= 1
        for rows in results.values()
        for row in rows
        if "itself" not in row["label"] and "autoregressive" not in row["label"]
    )


def test_a_wrapped_bert_repeats_the_letters_it_reads(run):
    printed = run("20", "--steps", "180")
    texts = re.findall(r"\b[a-z]{12}\b", printed)
    assert sum(text == text[:3] * 4 for text in texts) >= 6  # three prompts twice, one infilled text
    bound, exact = map(float, re.findall(r"nats per text: bound ([\d.]+), exact ([\d.]+)", printed)[0])
    assert exact < bound < exact + 3


def test_a_form_about_a_story_is_filled_with_its_words(run):
    pytest.importorskip("outlines_core")
    printed = run("21", "--seed", "0")
    assert re.search(r"name: Max\n +home: [a-z ]+\n", printed)


def test_decisions_abstain_and_joint_answers_fit_together(run):
    printed = run("22", "--rows", "8")
    rows = re.findall(r"^ +([\d.]+) +(\d+)% +(?:(\d+)%|-)$", printed, flags=re.MULTILINE)
    answered = [int(share) for _, share, _ in rows]
    assert answered[0] == 100
    assert answered == sorted(answered, reverse=True)
    solutions = re.findall(r"^[49] .* ([\d.]+)% +([\d.]+)%  a solution$", printed, flags=re.MULTILINE)
    assert sum(float(alone) for alone, _ in solutions) < 50
    assert sum(float(joint) for _, joint in solutions) > 99


def test_smudged_dates_are_restored_with_a_calendar(run, tmp_path):
    printed = run("23", "--steps", "1", "--num-tests", "1", "--tries", "2", "--out", "dates")
    results = json.loads((tmp_path / "dates" / "results.json").read_text())
    ways = {row["way"]: row for row in results["ways"]}
    assert {name: row["valid"] for name, row in ways.items() if name.startswith(("exact", "masking"))} == {
        "exact": 1,
        "exact, one forward": 1,
        "masking": 1,
        "masking, one forward": 1,
    }
    assert len(re.findall(r"^\w{3} .* → \w{3} \d\d \w{3} 19\d\d$", printed, flags=re.MULTILINE)) == 1


def test_learning_from_runs_reports_both_stages(run):
    printed = run("24", "--examples", "2", "--runs", "10")
    numbers = re.findall(
        r"^after \d+ updates on \w+: +([\d.]+)% right, ([\d.]+) forwards$", printed, flags=re.MULTILINE
    )
    assert len(numbers) == 2
    assert all(1 <= float(forwards) <= 3 for _, forwards in numbers)
    assert re.search(r"update  10: reward [01]\.\d{3}, forwards [123]\.\d\d", printed)


def test_distillation_to_fewer_steps_reports_both_models(run):
    printed = run("25", "--examples", "2", "--distil", "2", "--texts", "64")
    assert len(re.findall(r"^(before|after) distillation:( +\d+\.\d%){6}$", printed, flags=re.MULTILINE)) == 2


def test_answers_about_drawings_are_counted_with_right_and_wrong_drawings(run, tmp_path):
    printed = run("26", "--steps", "2", "--tests", "8", "--out", "drawings")
    shares = re.findall(r"^(with its|with another|most frequent) \w+ +([\d.]+)% right", printed, flags=re.MULTILINE)
    assert len(shares) == 3
    tokenizer = dgemma.Tokenizer.from_pretrained(tmp_path / "drawings" / "model")
    model = dgemma.DiffusionGemma.from_pretrained(tmp_path / "drawings" / "model")
    images = processor_of(model)([tmp_path / "drawings" / "drawing.png"])
    assert images.num_tokens == (64,)
    turn = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Where is red?"}]}]
    words = tokenizer.decode(tokenizer.chat(turn, images=images), skip_special=False).split()
    assert (words[:2], words[-4:]) == (["<bos>", "<|image>"], ["where", "is", "red", "?"])
