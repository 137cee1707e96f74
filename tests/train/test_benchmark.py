"""The training benchmark compares two loops with the same loss, and runs without a GPU."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "kernels" / "benchmarks"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # of transformers
def test_both_loops_have_the_same_loss_and_are_timed(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", ["training.py", "--output", str(tmp_path / "out.json")])
    runpy.run_path(str(BENCHMARKS / "training.py"), run_name="__main__")
    printed = capsys.readouterr().out
    here, there = re.search(r"parity: loss ([\d.]+) here, ([\d.]+) in transformers", printed).groups()
    assert float(here) == pytest.approx(float(there), rel=1e-4)
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert len(re.findall(r"^\| (?:transformers|dgemma).*\|$", printed, flags=re.MULTILINE)) == len(results) == 4
    # Random weights predict uniformly: both terms start near the entropy of 512 tokens.
    assert all(result["loss"] == pytest.approx(2 * 6.24, rel=0.1) for result in results)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # of transformers
def test_adapters_are_trained_and_timed(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    arguments = ["--lora", "--peft-rows", "0", "--steps", "2", "--output", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", ["training.py", *arguments])
    runpy.run_path(str(BENCHMARKS / "training.py"), run_name="__main__")
    (result,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert (result["loop"], result["rows"]) == ("dgemma", 2)
    assert result["loss"] == pytest.approx(2 * 6.24, rel=0.1)
    assert result["tokens_per_second"] == pytest.approx(2 * 64 / result["milliseconds"] * 1e3)


@pytest.mark.slow
def test_updates_on_runs_are_timed_by_part(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", ["learning.py", "--parts", "speed", "--output", str(tmp_path / "out.json")])
    runpy.run_path(str(BENCHMARKS / "learning.py"), run_name="__main__")
    results = json.loads((tmp_path / "out.json").read_text())["speed"]
    assert [result["loop"] for result in results] == ["plain", "accelerate_training"]
    for result in results:
        shares = [result[part] for part in ("runs", "scoring", "gradients and step")]
        assert sum(shares) == pytest.approx(1)
        assert min(shares) >= 0
