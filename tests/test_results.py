"""The README's figures of the kernels are those of the recorded runs."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COLUMNS = {"step.json": 3, "step_packed.json": 4, "step_fp8.json": 5}  # of the README's table, by the recorded run


@pytest.fixture(scope="module", params=COLUMNS)
def file(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def parts(file) -> dict[str, list[dict]]:
    return read_parts(file)


def read(file: str) -> str:
    return (ROOT / file).read_text()


def read_parts(file: str) -> dict[str, list[dict]]:
    return json.loads(read(f"kernels/benchmarks/results/{file}"))["parts"]


@pytest.fixture(scope="module")
def row(file):
    return lambda first_cell: cell(first_cell, COLUMNS[file])


def cell(first_cell: str, column: int) -> str:
    """A cell of the README's table, of the row that begins so."""
    (line,) = [line for line in read("README.md").splitlines() if line.startswith(f"| {first_cell}")]
    return line.split("|")[column].strip()


def say_step(part: dict) -> str:
    """Milliseconds, and by how much they spread where that is more than one."""
    time, spread = part["step_ms"], part["spread_ms"]
    return f"{time:.1f}" if spread < 1 else f"{time:.0f} ± {spread:.0f}"


def test_steps_are_the_recorded_ones(parts, row):
    prefixes = {part["prefix"]: part["step_ms"] for part in parts["prefixes"]}
    assert row("one denoising step") == f"**{parts['step'][0]['step_ms']:.1f} ms**"
    assert row("the same with 84 experts") == f"{parts['skewed'][0]['step_ms']:.1f} ms"
    assert row("batch 2, 4, 8") == f"{', '.join(say_step(part) for part in parts['batches'] if part['batch'] > 1)} ms"
    assert row("prefix 0, 16,384, 131,072") == f"{prefixes[0]:.1f}, {prefixes[16384]:.1f}, {prefixes[131072]:.1f} ms"


def test_tokens_a_second_are_the_recorded_ones(parts, row):
    one, two, four = (part["tokens_per_s"] for part in parts["generate"] if part["prompt"] == 256)
    assert row("16 steps and the commit").startswith(f"**{one:,.0f}**, {two:,.0f}, {four:,.0f} tokens/s")
    assert row("word by word") == f"{parts['words'][0]['ms_a_token']:.1f} ms a token"


def test_peak_memory_is_the_recorded_one(parts, row):
    assert row("peak memory").partition(";")[0] == f"{parts['memory'][0]['peak_gib'] * 2**30 / 1e9:.1f} GB"


def test_the_first_token_is_the_recorded_one():
    seconds = read_parts("first_token.json")["build"][0]["first_token_s"]
    assert cell("first token", COLUMNS["step.json"]).startswith(f"{seconds:.0f} s with nothing compiled yet")
    assert f"with nothing compiled yet {seconds:.1f} s" in read("kernels/README.md")
    assert f"{seconds:.0f} s instead of 24 to the first token" in read("CHANGELOG.md")


def test_transformers_figures_are_those_of_the_command_that_timed_our_step_as_well():
    parts = read_parts("step_transformers.json")
    ours, (eager, compiled) = parts["step"][0]["step_ms"], (part["said"] for part in parts["transformers"])
    assert eager.startswith("transformers, eager: ")
    assert compiled.startswith("transformers, compiled, ")
    slow, least, most, peak = re.findall(r"\d+\.\d", eager)
    fast, lowest, highest, other_peak = re.findall(r"\d+\.\d", compiled)
    assert peak == other_peak

    in_table = f"{slow} ms ({least}–{most}) eager, {fast} ({lowest}–{highest}) compiled"
    assert cell("one denoising step", 6) == f"{in_table}; `accelerate` on that machine {ours:.1f}"
    assert cell("peak memory", 6) == f"{float(peak) * 2**30 / 1e9:.0f} GB"
    assert f"where our step takes {ours:.2f} ms (`step.py --parts parity step profile" in read("kernels/README.md")
    in_text = f"eager {slow} ms ({least} to {most}), compiled {fast} ms ({lowest} to {highest})"
    assert f"{in_text}, both with a peak of {peak} GiB" in read("kernels/README.md")
    assert f"{ours:.1f} ms where transformers takes {fast} compiled and {slow} eager" in read("CHANGELOG.md")

    plain, packed, float8 = (f"{read_parts(file)['step'][0]['step_ms']:.1f}" for file in COLUMNS)
    assert f"in {ours:.1f} ms on an H200 ({plain} on a faster one), where transformers takes" in read("README.md")
    assert f"where transformers takes {fast} compiled and {slow} eager; {packed} with the experts'" in read("README.md")
    assert f"without loss, {float8} with them in fp8: " in read("README.md")


def test_both_machines_tokens_a_second_are_the_recorded_ones():
    slower, *others = (read_parts(file)["generate"] for file in ("step_transformers.json", *COLUMNS))
    one, faster, packed, fp8 = (f"{rows[0]['tokens_per_s']:,.0f}" for rows in (slower, *others))
    assert f": {one} ({faster}), {packed} and {fp8} tokens/s for one user" in read("README.md")
    assert f" ms and {one} tokens/s, in 4 min 48 s" in read("README.md")
    long = f"{slower[3]['tokens_per_s']:,.0f}"
    two, four, long_two, long_four = (f"× {slower[i]['against_batch_1']:.2f}" for i in (1, 2, 4, 5))
    assert f" {one} tokens/s ({two}, {four}) and {long} ({long_two}, {long_four});" in read("kernels/README.md")


@pytest.mark.parametrize(
    ("first_cell", "work"),
    [("forward and backward", "forward + backward"), ("and AdamW", "forward + backward + AdamW")],
)
def test_training_throughput_is_the_recorded_one(first_cell, work):
    recorded = json.loads(read("kernels/benchmarks/results/training.json"))["results"]
    line = next(line for line in read("README.md").splitlines() if line.startswith(f"| {first_cell} |"))
    cells = [cell.strip().replace("*", "") for cell in line.split("|")[2:4]]
    measured = [result for result in recorded if result["work"] == work]  # transformers' loop first
    for cell, result in zip(cells, measured, strict=True):
        tokens = result["tokens_per_second"] * result["milliseconds"] / 1000
        rates = sorted(tokens / (milliseconds / 1000) for milliseconds in result["rounds_ms"])
        middle, least, most = (f"{round(rate, -2):,.0f}" for rate in (result["tokens_per_second"], rates[0], rates[-1]))
        assert cell == f"{middle} tokens/s ({least}–{most}), {result['peak_GiB']:.1f} GiB"
