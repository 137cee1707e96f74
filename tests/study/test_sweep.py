"""`sweep`: means, tables, paired differences, the area under a curve, a plot, and runs that continue."""

import csv
import io
import math
from types import SimpleNamespace

import pytest
import torch

import dgemma
from dgemma.sampling import EntropyBound
from dgemma.study.sweep import Sweep, SweepRow, sweep


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return dgemma.DiffusionGemma(dgemma.presets.tiny()).eval()


def task_of(model):
    prompt = torch.full((2, 4), 9)

    def task(sampler, seed):
        out = dgemma.generate(model, prompt, sampler=sampler, seed=seed, steps=3, max_new_tokens=32, eos_token_ids=())
        return (out.new_tokens % 2 == 0).float().mean(1), out

    return task


def row(label, quality, speed):
    counts = {"forwards": 1.0, "seconds": 0.0, "runs": 1}
    return SweepRow(label=label, quality=quality, error=float("nan"), tokens_per_forward=speed, **counts)


def test_a_sweep_reports_the_means_of_what_generate_did(model):
    samplers = [EntropyBound(bound=0.1), EntropyBound(bound=3.0, greedy=True)]
    result = sweep(task_of(model), samplers, seeds=range(3))
    assert [r.label for r in result.rows] == ["EntropyBound()", "EntropyBound(bound=3.0, greedy=True)"]
    for sampler, r in zip(samplers, result.rows, strict=True):
        runs = [task_of(model)(sampler, seed) for seed in range(3)]
        qualities = torch.cat([quality for quality, _ in runs]).double()
        assert r.quality == pytest.approx(qualities.mean().item())
        assert r.error == pytest.approx((qualities.std() / 6**0.5).item())
        speeds = torch.cat([out.tokens_per_forward for _, out in runs])
        assert r.tokens_per_forward == pytest.approx(speeds.mean().item())
        assert r.forwards == 3.0
        assert r.runs == 3


def test_the_table_has_two_forms(tmp_path):
    result = Sweep((row("a|b", 0.5, 2.0), row("<c>", 1 / 3, 10.0)))
    lines = result.to_markdown().splitlines()
    assert lines[0].startswith("| sampler | quality |")
    assert lines[2].startswith("| a\\|b | 0.5000 |  | 2.00 |")
    read = list(csv.DictReader(io.StringIO(result.to_csv(tmp_path / "sweep.csv"))))
    assert (tmp_path / "sweep.csv").read_text() == result.to_csv()
    assert float(read[1]["quality"]) == 1 / 3
    assert result._repr_markdown_() == result.to_markdown()
    assert lines[3].startswith("| &lt;c> | 0.3333 |")


def test_the_frontier_holds_the_rows_that_no_other_row_beats():
    rows = (row("slow", 0.9, 1.0), row("beaten", 0.5, 3.0), row("middle", 0.8, 4.0), row("fast", 0.2, 9.0))
    assert [r.label for r in Sweep(rows).frontier] == ["slow", "middle", "fast"]
    assert [r.label for r in Sweep((row("a", 1.0, 1.0), row("b", 1.0, 1.0))).frontier] == ["a"]


def graded(qualities):
    """A task whose qualities are given by sampler and seed."""

    def task(sampler, seed):
        quality = torch.tensor(qualities[sampler][seed])
        forwards = torch.arange(1, len(quality) + 1)
        return quality, SimpleNamespace(steps=forwards[:, None], tokens_per_forward=8.0 / forwards)

    return task


def test_differences_are_paired_by_example_after_the_mean_over_seeds():
    result = sweep(
        graded({"a": [[1.0, 0.0, 1.0], [1.0, 1.0, 0.5]], "b": [[0.5] * 3, [0.5] * 3]}), ["a", "b"], seeds=[0, 1]
    )
    # The means of a are 1, 0.5 and 0.75, so the differences are 0.5, 0 and 0.25. Student's t for 2 degrees is 4.303.
    value, error = result.compare("'a'", "'b'")
    assert value == pytest.approx(0.25)
    assert error == pytest.approx(4.303 * 0.25 / math.sqrt(3), rel=1e-3)
    with pytest.raises(KeyError, match="c"):
        result.compare("'a'", "c")


def test_a_task_with_one_number_per_run_is_paired_by_seed():
    one = sweep(graded({"a": [[1.0], [0.0]], "b": [[0.5], [0.25]]}), {"a": "a", "b": "b"}, seeds=[0, 1])
    value, error = one.compare("a", "b")
    assert value == pytest.approx(0.125)
    assert error == pytest.approx(12.706 * math.sqrt(0.28125) / math.sqrt(2), rel=1e-3)  # t for 1 degree


def test_the_area_under_parallelism_is_that_of_the_paper():
    rows = (row("EB(0.1)", 0.8, 1.0), row("EB(0.5)", 0.8, 2.0), row("EB(1)", 0.78, 4.0), row("EB(9)", 0.5, 8.0))
    rows += (row("T, 0.9", 0.6, 3.0),)
    areas = Sweep(rows).aup()
    # 1 · 0.8 for the slowest, then two trapezoids; 0.78 weighs exp(-3 (1 - 0.975)); 0.5 is too far below 0.8.
    assert areas["EB"] == pytest.approx(0.8 + 0.8 + 2 * (0.8 + 0.78 * math.exp(-0.075)) / 2)
    assert areas["T"] == pytest.approx(1.8)
    with pytest.raises(ValueError, match=r"Sweep.aup must have qualities in \[0, 1\]"):
        Sweep((row("nats", 4.2, 1.0),)).aup()


def test_a_sweep_that_was_killed_continues_where_it_stopped(tmp_path):
    calls, path = [], tmp_path / "sweep.jsonl"
    qualities = {"a": [[1.0, 0.0], [0.5, 0.5]], "b": [[0.0, 0.0], [1.0, 1.0]]}

    def task(sampler, seed):
        calls.append((sampler, seed))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return graded(qualities)(sampler, seed)

    samplers = {"a": "a", "b": "b"}
    with pytest.raises(KeyboardInterrupt):
        sweep(task, samplers, seeds=[0, 1], out=path)
    result = sweep(task, samplers, seeds=[0, 1], out=path)
    assert calls == [("a", 0), ("a", 1), ("b", 0), ("b", 0), ("b", 1)]
    whole = sweep(graded(qualities), samplers, seeds=[0, 1])
    assert [r.examples for r in result.rows] == [r.examples for r in whole.rows]
    with pytest.raises(ValueError, match="must be continued with the settings that it began with, got seeds"):
        sweep(task, samplers, seeds=[0, 2], out=path)


def test_a_task_may_return_a_list_of_results():
    parts = [
        SimpleNamespace(steps=torch.tensor([2, 3]), tokens_per_forward=2.0),
        SimpleNamespace(steps=[4], tokens_per_forward=1),
    ]
    (found,) = sweep(lambda sampler, seed: ([0.0, 1.0], parts), {"many": None}).rows
    assert (found.quality, found.forwards, found.tokens_per_forward) == (0.5, 4.5, 1.5)
