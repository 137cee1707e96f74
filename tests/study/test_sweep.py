"""`sweep`: means, a table in three forms, a plot, and the frontier."""

import csv
import io
import sys

import pytest
import torch

import dgemma
from dgemma.sampling import EntropyBound
from dgemma.study.sweep import Sweep, SweepRow, sweep
from dgemma.view.plots import plot_frontier


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


def test_names_and_other_settings_are_passed_through():
    seen = []

    def task(options, seed):
        seen.append((options["steps"], seed))
        return 0.5, dgemma.Generation(
            tokens=torch.zeros(1, 1),
            new_tokens=torch.zeros(1, 1),
            steps=torch.tensor([[options["steps"]]]),
            tokens_per_forward=torch.tensor([8.0 / options["steps"]]),
            cache=None,
            trajectory=None,
        )

    result = sweep(task, {"few": {"steps": 2}, "many": {"steps": 8}}, seeds=[4, 5])
    assert seen == [(2, 4), (2, 5), (8, 4), (8, 5)]
    assert [(r.label, r.tokens_per_forward, r.forwards) for r in result.rows] == [("few", 4.0, 2.0), ("many", 1.0, 8.0)]


def test_the_table_has_three_forms(tmp_path):
    result = Sweep((row("a|b", 0.5, 2.0), row("<c>", 1 / 3, 10.0)))
    lines = result.to_markdown().splitlines()
    assert lines[0].startswith("| sampler | quality |")
    assert lines[2].startswith("| a\\|b | 0.5000 |  | 2.00 |")
    read = list(csv.DictReader(io.StringIO(result.to_csv(tmp_path / "sweep.csv"))))
    assert (tmp_path / "sweep.csv").read_text() == result.to_csv()
    assert float(read[1]["quality"]) == 1 / 3
    assert "<td>&lt;c&gt;</td>" in result._repr_html_()


def test_the_frontier_holds_the_rows_that_no_other_row_beats():
    rows = (row("slow", 0.9, 1.0), row("beaten", 0.5, 3.0), row("middle", 0.8, 4.0), row("fast", 0.2, 9.0))
    assert [r.label for r in Sweep(rows).frontier] == ["slow", "middle", "fast"]
    assert [r.label for r in Sweep((row("a", 1.0, 1.0), row("b", 1.0, 1.0))).frontier] == ["a"]


def test_the_plot_shows_every_sampler(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # a plot must not touch what other figures share
    ax = plot_frontier(Sweep((row("a", 0.5, 2.0), row("b", 0.25, 10.0)))).axes[0]
    assert [text.get_text() for text in ax.texts] == ["a", "b"]
    points = [tuple(container[0].get_xydata()[0]) for container in ax.containers]
    assert points == [(2.0, 0.5), (10.0, 0.25)]


def test_without_matplotlib_the_plot_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"needs matplotlib\. Install it with: pip install 'dgemma\[plots\]'"):
        plot_frontier(Sweep((row("a", 0.5, 2.0),)))


def test_sweeps_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="at least one sampler and one seed, got 0 and 1"):
        sweep(lambda sampler, seed: None, [])
    with pytest.raises(ValueError, match=r"must return \(quality, generation\), got float"):
        sweep(lambda sampler, seed: 0.5, [EntropyBound()])
    with pytest.raises(ValueError, match=r"got EntropyBound\(\) twice"):
        sweep(lambda sampler, seed: 0.5, [EntropyBound(), EntropyBound(bound=0.1)])


def test_one_sampler_alone_is_refused_by_name():
    with pytest.raises(ValueError, match=r"samplers must be a list, got one EntropyBound. Write \[sampler\]"):
        sweep(lambda sampler, seed: None, dgemma.EntropyBound())
