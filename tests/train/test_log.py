"""The log in a file: cut where a run goes on, read past what a killed process left, as columns, CSV and picture."""

import csv
import sys

import pytest

from dgemma.train.log import TrainLog

LINES = [
    {"step": 1, "loss": 2.0, "loss/decoder": 1.5, "lr": 0.1},
    {"step": 2, "loss": 1.0, "loss/decoder": 0.5, "lr": 0.2, "router": [{"load": [0.5, 0.5]}], "evenness": 1.0},
    {"step": 2, "evaluation/accuracy": 0.75},
]


@pytest.fixture
def log(tmp_path) -> TrainLog:
    made = TrainLog(tmp_path / "log.jsonl")
    made.append(LINES[:1])
    made.append(LINES[1:])
    return made


def test_what_is_written_is_read_back(log):
    assert log.lines() == LINES
    assert log.column("loss") == ([1, 2], [2.0, 1.0])
    assert log.column("evaluation/accuracy") == ([2], [0.75])


def test_an_unfinished_last_line_does_not_count(log):
    with log.path.open("a") as file:
        file.write('{"step": 3, "lo')
    assert log.lines() == LINES
    log.cut(1)
    log.append([{"step": 2, "loss": 5.0}])
    assert log.column("loss") == ([1, 2], [2.0, 5.0])


def test_csv_has_a_row_a_step_and_a_column_a_number(log, tmp_path):
    log.to_csv(tmp_path / "log.csv")
    with (tmp_path / "log.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["loss"] for row in rows] == ["2.0", "1.0"]
    assert [row["evaluation/accuracy"] for row in rows] == ["", "0.75"]
    assert "router" not in rows[0]


def test_the_plot_draws_the_loss_and_its_terms(log, tmp_path):
    pytest.importorskip("matplotlib")
    figure = log.plot(tmp_path / "loss.png", smooth=2)
    curves = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].get_lines()}
    assert curves == {"loss": [2.0, 1.5], "loss/decoder": [1.5, 1.0]}
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_one_sentence_says_so(log, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install dgemma\[plots\]"):
        log.plot()
