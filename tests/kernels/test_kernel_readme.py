"""The table of kernels/README.md repeats recorded results, cell by cell."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "kernels/benchmarks/results/h200"
MATRIX_RATE = 816e12  # bfloat16 FLOP/s, as in benchmarks/attention.py
TOKENS, HEADS, D, DENSE, VOCAB = 256, 16, 2816, 2112, 262_144


def read_table(heading: str) -> dict[str, list[str]]:
    """Return the rows of the first table under a heading by their first cell."""
    section = (ROOT / "kernels/README.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first: rest for first, *rest in rows}


def experts() -> dict[str, dict]:
    return {line["name"]: line for line in json.loads((RESULTS / "experts.json").read_text())["lines"]}


def recorded_us(start: str) -> float:
    """Return the microseconds of the line with this start in the attention and vocabulary runs, at batch 1."""
    text = (RESULTS / "attention_and_vocabulary.txt").read_text().split("batch 2:")[0]
    (line,) = [line for line in text.splitlines() if re.sub(r"\s+", " ", line.strip()).startswith(start)]
    return float(re.search(r"([\d.]+) us", line)[1])


def attention(kv_heads: int, head_dim: int, prefix: int, layer: str) -> tuple[float, float, float]:
    keys = prefix + TOKENS
    num_bytes = 2 * head_dim * (2 * kv_heads * keys + 2 * HEADS * TOKENS)
    time = recorded_us(f"hopper canvas {layer} T=256 B=1 prefix={prefix} ")
    return num_bytes, 4 * HEADS * TOKENS * keys * head_dim, time


def of_experts(name: str, flops: float = 0.0) -> tuple[float, float, float]:
    line = experts()[name]
    return line["bytes"], flops, line["us"]


def product(name: str) -> tuple[float, float, float]:
    num_bytes = 2 * (TOKENS * D + D * VOCAB + TOKENS * VOCAB)  # operands and result
    return num_bytes, 2 * TOKENS * D * VOCAB, recorded_us(name)


# Bytes, FLOP and microseconds of each row.
ROWS = {
    "prepare_qkv, sliding layer": lambda: (2 * TOKENS * 2 * 32 * 256, 0, recorded_us("qkv sliding T=256 B=1")),
    "attention, sliding layer": lambda: attention(8, 256, 1023, "sliding"),
    "attention, full layer": lambda: attention(2, 512, 1024, "full"),
    "attention_residual": lambda: of_experts("attention_residual, 256 tokens"),
    "route": lambda: of_experts("route, 256 tokens"),
    "sort_by_expert": lambda: of_experts("sort_by_expert, 256 tokens"),
    "expert_gate_up": lambda: of_experts("gate_up, 256 tokens, 128 experts"),
    "expert_down": lambda: of_experts("down, 256 tokens, 128 experts"),
    "dense_mlp, alone": lambda: of_experts("dense MLP, as it runs, 256 tokens", 6.0 * TOKENS * D * DENSE),
    "layer_tail": lambda: of_experts("layer_tail, 256 tokens"),
    "second half of a layer (attention_residual to layer_tail), overlapped": lambda: of_experts(
        "half layer, 256 tokens, 128 experts, 2 streams, dependent"
    ),
    "vocabulary_statistics": lambda: (2 * TOKENS * VOCAB, 0, recorded_us("statistics")),
    "soft_probabilities": lambda: (4 * TOKENS * VOCAB, 0, recorded_us("soft_probabilities")),
    "head product": lambda: product("head product"),
    "soft-embedding product": lambda: product("soft-embedding product"),
}


def bandwidth(file: str) -> float:
    return json.loads((RESULTS / file).read_text())["read_bandwidth"]


def cells(num_bytes: float, flops: float, time: float, rate: float) -> list[str]:
    floor = 1e6 * max(num_bytes / rate, flops / MATRIX_RATE)
    return [f"{num_bytes / 1e6:,.1f} MB", f"{floor:,.1f} µs", f"{time:,.1f} µs", f"{100 * floor / time:.0f} %"]


def test_the_table_has_exactly_the_recorded_operations():
    assert set(read_table("Measured")) == {*ROWS, "sample", "accept", "whole step"}


@pytest.mark.parametrize("row", ROWS)
def test_bytes_floor_time_and_share_are_the_recorded_ones(row):
    assert read_table("Measured")[row][1:] == cells(*ROWS[row](), bandwidth("experts.json"))


@pytest.mark.parametrize(("row", "line"), [("sample", "sample"), ("accept", "accept, renoise, stop")])
def test_kernels_bound_by_latency_have_only_a_time(row, line):
    assert read_table("Measured")[row][1:] == ["–", "–", f"{recorded_us(line):.1f} µs", "–"]


def test_the_step_is_the_recorded_one():
    (step,) = json.loads((RESULTS / "step.json").read_text())["parts"]["step"]
    row = cells(1e9 * step["gigabytes"], 0, 1e3 * step["step_ms"], bandwidth("step.json"))
    assert read_table("Measured")["whole step"][1:] == row
    assert row[-1] == f"{100 * step['of_read_bandwidth']:.0f} %"


def test_every_file_of_the_table_exists():
    files = {row[0].strip("`") for row in read_table("Measured").values()} - {"library"}
    assert [file for file in files if not (ROOT / "kernels/dgemma_kernels" / file).exists()] == []


RECORDED_STEPS = {
    "`bf16` |": "step.json",
    "`packed`:": "step_packed.json",
    "`fp8`:": "step_fp8.json",
    "`fp8` with": "step_fp8_float8.json",
    "`int4`:": "step_int4.json",
    "`nvfp4`:": "step_nvfp4.json",
}


@pytest.mark.parametrize(("row", "file"), RECORDED_STEPS.items(), ids=RECORDED_STEPS.values())
def test_steps_by_format_are_the_recorded_ones(row, file):
    (step,) = json.loads((RESULTS / file).read_text())["parts"]["step"]
    (line,) = [line for line in (ROOT / "kernels/README.md").read_text().splitlines() if line.startswith(f"| {row}")]
    assert line.split("|")[2].strip() == f"{step['step_ms']:.1f} ms"
