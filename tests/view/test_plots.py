"""Figures show the right numbers without a display or pyplot, and a missing matplotlib is reported."""

import sys

import numpy as np
import pytest

from dgemma.study.sweep import Sweep, SweepRow
from dgemma.view import plots
from view.converging import record

pytest.importorskip("matplotlib")


@pytest.fixture(autouse=True)
def no_pyplot_and_no_display(monkeypatch):
    """pyplot has global state, so importing it raises here."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    monkeypatch.delenv("DISPLAY", raising=False)


def test_the_heatmap_holds_the_entropies_of_every_step_and_block(recorded, tmp_path):
    out, _ = recorded
    figure = plots.plot_entropy(out.trajectory, row=1)
    grid = figure.axes[0].images[0].get_array()
    steps = out.steps[1].tolist()
    assert grid.shape == (max(steps), 128)
    step = out.trajectory.at(block=1, step=2)
    assert np.allclose(grid[2, 64:], step.entropy[step.rows.tolist().index(1)].numpy())
    assert np.ma.masked_invalid(grid).count() == 64 * sum(steps)
    assert figure.axes[0].get_title() == "Entropy, step by step"
    assert [(text.get_text(), text.get_position()[0]) for text in figure.axes[0].texts] == [
        ("block 1", 31.5),
        ("block 2", 95.5),
    ]
    assert [line.get_xdata()[0] for line in figure.axes[0].lines] == [63.5], "where the second block begins"
    figure.savefig(tmp_path / "entropy.png")
    assert (tmp_path / "entropy.png").stat().st_size > 5000


def test_the_order_has_one_point_per_position_within_the_blocks_steps(recorded):
    out, _ = recorded
    figure = plots.plot_order(out.trajectory)
    first, second = figure.axes[0].lines
    assert first.get_xdata().tolist() == list(range(64))
    assert second.get_xdata().tolist() == list(range(64, 128))
    assert 1 <= first.get_ydata().min() <= first.get_ydata().max() <= int(out.steps[0, 0])


def test_a_short_text_with_dollar_signs_is_written_below_its_positions():
    out, tokenizer = record("Cost: $5 & up", canvas_len=16)
    figure = plots.plot_order(out.trajectory, tokenizer=tokenizer)
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert labels[:8] == ["C", "o", "s", "t", ":", "␣", r"\$", "5"]
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_labels_of_a_frontier_neither_overlap_nor_repeat_what_all_share():
    counts = {"quality": 0.5, "error": 0.0, "forwards": 1, "seconds": 1, "runs": 1}
    speeds = {f"Threshold(tau=0.{n}, greedy=True)": 2 + n / 100 for n in range(5)} | {"Confidence, 12 steps": 2.2}
    rows = [SweepRow(label=label, tokens_per_forward=speed, **counts) for label, speed in speeds.items()]
    ax = plots.plot_frontier(Sweep(tuple(rows))).axes[0]
    assert [text.get_text() for text in ax.texts] == [*(f"tau=0.{n}" for n in range(5)), "12 steps"]
    assert {text.get_text() for text in ax.get_legend().get_texts()} == {"Threshold, greedy=True", "Confidence"}
    boxes = [text.get_window_extent() for text in ax.texts]
    assert not any(one.overlaps(other) for at, one in enumerate(boxes) for other in boxes[:at])


@pytest.mark.parametrize("plot", [plots.plot_entropy, plots.plot_order])
def test_a_run_instead_of_its_trajectory_is_refused(plot, recorded):
    with pytest.raises(ValueError, match=r"trajectory must be Trajectory, .*Pass out\.trajectory"):
        plot(recorded[0])


def test_without_matplotlib_one_sentence_says_what_to_install(monkeypatch, recorded):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(
        ImportError, match=r"^plot_order needs matplotlib\. Install it with: pip install -e \"\.\[plots\]\"\.$"
    ):
        plots.plot_order(recorded[0].trajectory)
