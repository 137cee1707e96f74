"""info, bench and evaluate: their numbers agree with independent computations."""

import json
import math
import zlib
from dataclasses import replace

import pytest
from safetensors.torch import load_file

import dgemma
from dgemma.cli import parser


def test_info_counts_the_tensors_of_the_file(command, checkpoint):
    stored = load_file(checkpoint / "model.safetensors")
    found = json.loads(command("info", "--json", checkpoint).out)
    weights = [tensor for name, tensor in stored.items() if not name.endswith("layer_scalar")]  # those are buffers
    assert found["parameters"] == sum(weight.numel() for weight in weights)
    assert found["bytes"] == (checkpoint / "model.safetensors").stat().st_size
    assert {name: tensor["shape"] for name, tensor in found["tensors"].items()} == {
        name: list(tensor.shape) for name, tensor in stored.items()
    }
    # Two sliding layers with 2 heads of 16 and a full one with 1 of 32: keys and values of 2 bytes each.
    assert found["cache_bytes_per_token"] == 2 * 2 * (2 * 16 + 2 * 16 + 32)
    assert dgemma.ModelConfig.from_hf(found["config"]) == dgemma.ModelConfig.from_hf(checkpoint)


def test_info_prints_a_table_and_on_demand_the_tensors(command, checkpoint):
    short = command("info", checkpoint)
    assert "2 sliding, 1 full; width 64, window 24" in short.out
    long = command("info", "--tensors", checkpoint)
    assert long.out.startswith(short.out)
    names = [line.split()[0] for line in long.out.removeprefix(short.out).splitlines()]
    assert names == sorted(load_file(checkpoint / "model.safetensors"))


def test_info_prints_the_sampler_in_the_syntax_of_the_option(command, checkpoint, tmp_path):
    model = dgemma.DiffusionGemma.from_pretrained(checkpoint)
    sampler = dgemma.LeaveOneOutGibbs(choice_temperature=0.5)
    model.generation = replace(model.generation, sampler=dgemma.describe_sampler(sampler))
    model.save_pretrained(tmp_path)
    assert json.loads(command("info", "--json", tmp_path).out)["sampler"] == model.generation.sampler
    line = next(line for line in command("info", tmp_path).out.splitlines() if line.startswith("  sampler "))
    assert parser.sampler(line.split()[1]) == sampler


def test_info_without_a_name_lists_the_shipped_checkpoints(command):
    names = json.loads(command("info", "--json").out)["checkpoints"]
    assert {"dgemma/text", "dgemma/text-mask", "dgemma/sudoku"} <= set(names)
    assert all(command("info", name).code == 0 for name in names)
    lines = command("info").out.splitlines()
    assert lines[::3] == names
    assert all("DiffusionGemma of" in line or "weights of `dgemma/" in line for line in lines[1::3])
    assert all(line.startswith("  ") and line.endswith(".") for line in lines[1::3])
    assert all(line.startswith("  dgemma ") for line in lines[2::3])


def test_bench_times_are_consistent(command, checkpoint):
    ran = command(
        "bench", "-m", checkpoint, *("--batch-size", "2", "--prefix", "8", "--steps", "2", "--repeats", "3"), "--json"
    )
    found = json.loads(ran.out)
    times = found["milliseconds"]
    for timing in times.values():
        assert 0 < timing["fastest"] <= timing["median"] <= timing["slowest"]
    assert times["canvas"]["fastest"] > times["forward"]["fastest"]  # two forwards, the prefix and the commit
    assert found["tokens_per_second"] == pytest.approx(2 * 32 / (times["canvas"]["median"] / 1000))
    assert (found["batch"], found["fast"], found["weights"]) == (2, False, None)
    printed = command("bench", "-m", checkpoint, "--steps", "1", "--repeats", "1").out
    assert printed.startswith(f"{checkpoint} on CPU")
    assert "tokens per second" in printed


def test_bench_refuses_a_batch_that_no_memory_holds_before_it_allocates_one(command, checkpoint):
    ran = command("bench", "-m", checkpoint, "--batch-size", str(10**9))
    assert (ran.code, ran.out) == (2, "")
    assert "bench canvas must fit into the" in ran.err


@pytest.fixture
def words(tmp_path):
    file = tmp_path / "words.txt"
    file.write_text("to be or not to be, that is the question. " * 6)
    return file


def test_evaluate_finds_a_random_model_near_uniform_and_lists_compressors(command, checkpoint, words):
    ran = command("evaluate", "-m", checkpoint, "--samples", "2", "--canvases", "2", "--json", words)
    found = json.loads(ran.out)
    text = words.read_bytes()
    assert found["num_tokens"] == 253  # 252 bytes and the end of the text
    assert found["num_fill_tokens"] == 3  # up to a whole number of canvases
    assert found["causal"] == pytest.approx(math.log(384), abs=0.5)
    assert found["nelbo"] > found["causal"]  # the bound of a uniform prediction exceeds its causal cost
    assert found["bits_per_byte"] == pytest.approx(found["nelbo"] * 253 / 252 / math.log(2))
    assert found["gzip_bits_per_byte"] == 8 * len(zlib.compress(text, 9)) / len(text)
    assert 0 < found["xz_bits_per_byte"] < 8


def test_evaluate_of_some_rows_has_no_bits_per_byte(command, checkpoint, words):
    ran = command("evaluate", "-m", checkpoint, "--samples", "1", "--canvases", "1", "--rows", "1", "--json", words)
    found = json.loads(ran.out)
    assert found["num_tokens"] == 32
    assert found["bits_per_byte"] is None
    assert found["nelbo_error"] is None  # one row has no interval, and JSON no infinity
    assert "gzip_bits_per_byte" not in found
