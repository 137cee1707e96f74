"""The training benchmark compares two loops with the same loss, and runs without a GPU."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "kernels" / "benchmarks"


pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]  # of transformers


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Return a function that runs a benchmark with these arguments and returns its results."""

    def run(script, *arguments):
        monkeypatch.syspath_prepend(BENCHMARKS)
        monkeypatch.setattr(sys, "argv", [script, *arguments, "--output", str(tmp_path / "out.json")])
        runpy.run_path(str(BENCHMARKS / script), run_name="__main__")
        return json.loads((tmp_path / "out.json").read_text())

    return run


def test_both_loops_have_the_same_loss_and_are_timed(run, capsys):
    results = run("training.py")["results"]
    printed = capsys.readouterr().out
    here, there = re.search(r"parity: loss ([\d.]+) here, ([\d.]+) in transformers", printed).groups()
    assert float(here) == pytest.approx(float(there), rel=1e-4)
    assert len(re.findall(r"^\| (?:transformers|dgemma).*\|$", printed, flags=re.MULTILINE)) == len(results) == 4
    # Random weights predict uniformly: both terms start near the entropy of 512 tokens.
    assert all(result["loss"] == pytest.approx(2 * 6.24, rel=0.1) for result in results)


def test_adapters_are_trained_and_timed(run):
    (result,) = run("training.py", "--lora", "--peft-rows", "0", "--steps", "2")["results"]
    assert (result["loop"], result["rows"]) == ("dgemma", 2)
    assert result["loss"] == pytest.approx(2 * 6.24, rel=0.1)
    assert result["tokens_per_second"] == pytest.approx(2 * 64 / result["milliseconds"] * 1e3)


def test_updates_on_runs_are_timed_by_part(run):
    results = run("learning.py", "--parts", "speed")["speed"]
    assert [result["loop"] for result in results] == ["plain", "accelerate_training"]
    for result in results:
        shares = [result[part] for part in ("runs", "scoring", "gradients and step")]
        assert sum(shares) == pytest.approx(1)
        assert min(shares) >= 0
