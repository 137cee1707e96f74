"""The README's figures of the kernels are those of the recorded run."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


COLUMNS = {"step.json": 3, "step_fp8.json": 4}  # of the README's table, by the recorded run


@pytest.fixture(scope="module", params=COLUMNS)
def file(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def parts(file) -> dict[str, list[dict]]:
    return json.loads((ROOT / "kernels/benchmarks/results" / file).read_text())["parts"]


@pytest.fixture(scope="module")
def row(file):
    return lambda first_cell: cell(first_cell, COLUMNS[file])


def cell(first_cell: str, column: int) -> str:
    """A cell of the README's table, of the row that begins so."""
    (line,) = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith(f"| {first_cell}")]
    return line.split("|")[column].strip()


def test_steps_are_the_recorded_ones(parts, row):
    batches = {part["batch"]: part["step_ms"] for part in parts["batches"]}
    prefixes = {part["prefix"]: part["step_ms"] for part in parts["prefixes"]}
    assert row("one denoising step") == f"**{parts['step'][0]['step_ms']:.1f} ms**"
    assert row("the same with 84 experts") == f"{parts['skewed'][0]['step_ms']:.1f} ms"
    assert row("batch 2, 4, 8").startswith(f"{batches[2]:.1f}, {batches[4]:.1f}, {batches[8]:.0f} ")
    assert row("prefix 0, 16,384, 131,072") == f"{prefixes[0]:.1f}, {prefixes[16384]:.1f}, {prefixes[131072]:.1f} ms"


def test_tokens_a_second_are_the_recorded_ones(parts, row):
    one, two, four = (part["tokens_per_s"] for part in parts["generate"] if part["prompt"] == 256)
    assert row("16 steps and the commit").startswith(f"**{one:,.0f}**, {two:,.0f}, {four:,.0f} tokens/s")
    assert row("word by word") == f"{parts['words'][0]['ms_a_token']:.1f} ms a token"


def test_peak_memory_is_the_recorded_one(parts, row):
    assert row("peak memory").partition(";")[0] == f"{parts['memory'][0]['peak_gib'] * 2**30 / 1e9:.1f} GB"


def test_the_first_token_is_the_recorded_one():
    recorded = json.loads((ROOT / "kernels/benchmarks/results/first_token.json").read_text())["parts"]["build"][0]
    assert cell("first token", COLUMNS["step.json"]).startswith(
        f"{recorded['first_token_s']:.0f} s with nothing compiled yet"
    )


@pytest.mark.parametrize(
    ("first_cell", "work"),
    [("forward and backward", "forward + backward"), ("and AdamW", "forward + backward + AdamW")],
)
def test_training_throughput_is_the_recorded_one(first_cell, work):
    recorded = json.loads((ROOT / "kernels/benchmarks/results/training.json").read_text())["results"]
    line = next(line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith(f"| {first_cell} |"))
    cells = [cell.strip().replace("*", "") for cell in line.split("|")[2:4]]
    measured = [result for result in recorded if result["work"] == work]  # transformers' loop first
    for cell, result in zip(cells, measured, strict=True):
        tokens = result["tokens_per_second"] * result["milliseconds"] / 1000
        rates = sorted(tokens / (milliseconds / 1000) for milliseconds in result["rounds_ms"])
        middle, least, most = (f"{round(rate, -2):,.0f}" for rate in (result["tokens_per_second"], rates[0], rates[-1]))
        assert cell == f"{middle} tokens/s ({least}–{most}), {result['peak_GiB']:.1f} GiB"
