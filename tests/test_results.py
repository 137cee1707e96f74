"""Tables in documents equal the recorded results. Only table cells are compared, not prose."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RECORDED = {"bf16": "step.json", "packed": "step_packed.json", "fp8": "step_fp8.json"}  # by column
GIB = 2**30 / 1e9  # gigabytes

Table = dict[str, dict[str, str]]


def read_table(page: str, heading: str) -> Table:
    """Return the first table under a heading: rows by their first cell, cells by their column, without bold."""
    _, found, section = (ROOT / page).read_text().partition(f"\n## {heading}\n")
    assert found, f"{page} has no heading {heading!r}"
    lines = [line for line in section.split("\n## ")[0].splitlines() if line.startswith("|")]
    header, _, *rows = [[cell.strip().replace("*", "") for cell in line.split("|")[1:-1]] for line in lines]
    return {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in rows if len(row) == len(header)}


def recorded(file: str) -> dict[str, list[dict[str, Any]]]:
    return json.loads((ROOT / "kernels/benchmarks/results/h200" / file).read_text())["parts"]


def milliseconds(part: dict[str, Any]) -> str:
    """Format a step's time, with its spread if the spread exceeds 1 ms."""
    time, spread = part["step_ms"], part["spread_ms"]
    return f"{time:.1f}" if spread < 1 else f"{time:.0f} ± {spread:.0f}"


def transformers_step() -> dict[str, list[str]]:
    """Return milliseconds, least, most and peak GiB of transformers, eager and compiled."""
    eager, compiled = ((*part.values(),)[0] for part in recorded("step_transformers.json")["transformers"])
    assert "eager" in eager
    assert "compiled" in compiled
    return {"eager": re.findall(r"\d+\.\d", eager), "compiled": re.findall(r"\d+\.\d", compiled)}


@pytest.mark.parametrize("column", RECORDED)
def test_step_times_are_the_recorded_ones(column):
    table, parts = read_table("docs/benchmarks.md", "One denoising step"), recorded(RECORDED[column])
    expected = {
        "batch 1, prefix 1,024": milliseconds(parts["step"][0]),
        "84 experts active": milliseconds(parts["skewed"][0]),
    }
    expected |= {f"batch {part['batch']}": milliseconds(part) for part in parts["batches"] if part["batch"] > 1}
    prefixes = {part["prefix"]: part for part in parts["prefixes"]}
    expected |= {f"prefix {prefix:,}": milliseconds(prefixes[prefix]) for prefix in (0, 16384, 131072)}
    assert {row: cells[column] for row, cells in table.items()} == expected


def generated() -> list[dict[str, Any]]:
    return json.loads((ROOT / "kernels/benchmarks/results/h200/generate.json").read_text())["rows"]


def test_tokens_per_second_are_the_recorded_ones():
    expected: Table = {}
    for row in generated():
        rates = {f"batch {row['batch']}": row["tokens_per_s"], "autoregressive, batch 1": 1e3 / row["token_ms"]}
        for name, rate in rates.items():
            expected.setdefault(name, {})[row["weights"]] = f"{rate:,.0f}"
    assert read_table("docs/benchmarks.md", "Tokens per second") == expected


@pytest.mark.parametrize("column", RECORDED)
def test_memory_is_the_recorded_one(column):
    table, memory = read_table("docs/benchmarks.md", "Memory"), recorded(RECORDED[column])["memory"][0]
    assert table["peak, GB"][column] == f"{memory['peak_gib'] * GIB:.1f}"
    if column != "bf16":
        assert table["in use afterwards, GB"][column] == f"{memory['held_gib'] * GIB:.1f}"


PROMPTS = {"bf16": "prompts.json", "fp8": "prompts_fp8.json"}  # by column


def whole_or_tenths(ms: float | None) -> str:
    return "" if ms is None else f"{ms:.1f}" if ms < 1000 else f"{ms:,.0f}"


def prompts_table() -> Table:
    """Return the rows of both formats: measured, goal, floor, and transformers' time from the run in bfloat16."""
    table: Table = {}
    for column, file in PROMPTS.items():
        for part in recorded(file)["table"]:
            if part["row"] == "first call":
                continue
            cells = table.setdefault(part["row"], {})
            shown = (lambda ms: "" if ms is None else f"{ms:.2f}") if "token" in part["row"][-5:] else whole_or_tenths
            cells[column] = milliseconds(part | {"step_ms": part["ms"]}) if "spread_ms" in part else shown(part["ms"])
            cells |= {f"goal of {column}": shown(part["goal_ms"]), f"floor of {column}": shown(part["floor_ms"])}
            if column == "bf16":
                cells["transformers"] = whole_or_tenths(part["transformers_ms"])
    return table


def test_prompts_steps_and_tokens_are_the_recorded_ones():
    table = read_table("docs/benchmarks.md", "Prompts, large batches and single tokens")
    shown = {row: {column: cell for column, cell in cells.items() if cell} for row, cells in table.items()}
    assert shown == {
        row: {column: cell for column, cell in cells.items() if cell} for row, cells in prompts_table().items()
    }


def test_times_of_images_are_the_recorded_ones():
    lines = (ROOT / "kernels/benchmarks/results/h200/images.txt").read_text()
    expected = {}
    for size in (1, 8):
        text, rest, seen, tower, added, rate = re.search(
            rf"^batch {size}: text (\S+) ms, without image tokens (\S+), with images (\S+)\n.*tower (\S+) ms.*\n"
            r".*alone (\S+) ms\n +(\S+) images",
            lines,
            re.M,
        ).groups()
        added = f"{float(added) / size:.2f}"
        their_tower, their_text, their_seen, their_rate, theirs, ours = re.search(
            rf"^transformers, batch {size}: the tower (\S+) ms\n +text (\S+) ms, with images (\S+) ms, (\S+) images"
            r".*\n  beyond the text (\S+) ms per image, ours (\S+) ms",
            lines,
            re.M,
        ).groups()
        expected[f"dgemma, batch {size}"] = [seen, text, ours, rest, added, tower, rate]
        expected[f"transformers, batch {size}"] = [their_seen, their_text, theirs, "–", "–", their_tower, their_rate]
    assert {row: [*cells.values()] for row, cells in read_table("docs/images.md", "Speed").items()} == expected


KINDS = {
    "experts": ("_expert_", "_experts_many"),
    "attention": ("_attention_hopper", "_attention_kernel", "_attention_window", "_combine", "_round_cache"),
    "other products": ("nvjet", "cublasLt", "_multiply_", "_dense_mlp", "_partial_scores", "_route_row"),
}


def profile_table() -> Table:
    """Return measured and least milliseconds by kind of kernel, for every row that misses its goal.

    A profile names its sixteen longest kernels. The others, and those of no kind, count as "the rest".
    """
    table: Table = {}
    for column, file in PROMPTS.items():
        parts = recorded(file)
        for row in parts["table"]:
            if not row["goal_ms"] or row["ms"] <= row["goal_ms"]:
                continue
            what = "token" if row["row"] == "autoregressive token" else row["row"]
            kernels = {part["kernel"]: part["us"] / 1e3 for part in parts["profile"] if part["what"] == what}
            total = kernels.pop("all")
            times = {
                kind: sum(ms for kernel, ms in kernels.items() if any(name in kernel for name in names))
                for kind, names in KINDS.items()
            }
            cells = {
                kind: f"{whole_or_tenths(ms)} / {whole_or_tenths(row['floors'][kind])}" for kind, ms in times.items()
            }
            cells |= {"the rest": whole_or_tenths(total - sum(times.values())), "all kernels": whole_or_tenths(total)}
            table[f"{what}, {column}"] = cells
    return table


def test_every_missed_goal_has_its_recorded_profile():
    assert read_table("docs/benchmarks.md", "Where the time goes") == profile_table()


def test_memory_under_load_is_the_recorded_one():
    names = {("the same step", "text"): "one canvas of `dgemma/text`"}
    names |= {("random shapes", "text"): "random texts, `dgemma/text`"}
    names |= {("random shapes", "small"): "random texts, a model of two layers as wide as `dgemma/text`"}
    expected = {}
    for (what, model), name in names.items():
        report = json.loads((ROOT / f"kernels/benchmarks/results/h200/soak_{model}.json").read_text())
        assert report["same_tokens_at_the_end"]
        rows = [row for row in report["rows"] if row["what"] == what]
        half = rows[len(rows) // 2 :]
        memory = {
            column: f"{min(row[key] for row in half):,.0f}–{max(row[key] for row in half):,.0f}"
            for column, key in (("reserved, MiB", "torch"), ("of it for graphs, MiB", "of_graphs"))
        }
        expected[name] = {"steps": f"{rows[-1]['steps']:,}", "shapes": f"{rows[-1].get('shapes', 1):,}", **memory}
    assert read_table("docs/benchmarks.md", "Under load") == expected


def test_the_price_of_batch_invariance_is_the_recorded_one():
    table, expected = read_table("docs/benchmarks.md", "The price of `batch_invariant`"), {}
    for part in recorded("step_invariant.json")["invariant"]:
        place = f"batch {part['batch']}" if part["prefix"] == 1024 else f"prefix {part['prefix']:,}"
        name = f"step, {place}" if part["what"] == "step" else "autoregressive token"
        times = {"default, ms": f"{part['ms']:.1f}", "`batch_invariant`, ms": f"{part['invariant_ms']:.1f}"}
        expected[name] = times | {"ratio": f"{part['ratio']:.2f}"}
    assert table == expected


def test_the_comparison_with_transformers_is_of_one_recorded_run():
    table, ours = read_table("docs/benchmarks.md", "Next to transformers"), recorded("step_transformers.json")
    for kind, (step, least, most, peak) in transformers_step().items():
        expected = {"step, ms": step, "range, ms": f"{least}–{most}", "peak memory, GB": f"{float(peak) * GIB:.0f}"}
        assert table[f"transformers, {kind}"] == expected
    peak = f"{ours['memory'][0]['peak_gib'] * GIB:.1f}"
    assert table["dgemma, `accelerate`"]["step, ms"] == f"{ours['step'][0]['step_ms']:.1f}"
    assert table["dgemma, `accelerate`"]["peak memory, GB"] == peak


def test_the_first_token_is_the_recorded_one():
    table = read_table("docs/benchmarks.md", "First call")
    first = recorded("prompts.json")["first"][0]
    assert table["nothing compiled yet"]["seconds"] == f"{first['first_call_s']:.1f}"
    assert table["compiled before, same process"]["seconds"] == f"{first['second_call_s']:.1f}"


def test_the_throughput_of_many_prompts_is_the_recorded_one():
    rates = json.loads((ROOT / "kernels/benchmarks/results/h200/many.json").read_text())["tokens_per_s"]
    rows, others = list(read_table("docs/many.md", "Throughput").values()), ("dropping", "padded", "one")
    assert [row["tokens/s"] for row in rows] == [f"{rates[way]:,.0f}" for way in ("many", *others)]
    faster = [f"{rates['many'] / rates[way]:.2f} ×" for way in others]
    assert [row["`generate_many` is faster by"] for row in rows] == ["", *faster]


def test_the_memory_of_four_bit_experts_is_the_recorded_one():
    table = read_table("docs/quantized.md", "Memory of the 26B model")
    run = json.loads((ROOT / "kernels/benchmarks/results/h200/generate_18gb.json").read_text())
    columns = {"weights, GB": "stored_gb", "peak, GB": "peak_gb", "reserved, GB": "reserved_gb"}
    expected = {row["weights"]: {name: f"{row[key]:.1f}" for name, key in columns.items()} for row in run["rows"]}
    assert table == expected
    assert all(row["reserved_gb"] <= run["memory_cap_gb"] == 18.0 for row in run["rows"])


def training_results() -> dict[tuple[str, str], dict[str, Any]]:
    results = json.loads((ROOT / "kernels/benchmarks/results/h200/training.json").read_text())["results"]
    return {(result["loop"].split(" ")[0], result["work"]): result for result in results}


@pytest.mark.parametrize("loop", ["transformers", "dgemma"])
def test_training_throughput_is_the_recorded_one(loop):
    table, results = read_table("docs/benchmarks.md", "Training throughput"), training_results()
    works = {
        "forward + backward": ("forward and backward", "peak memory without AdamW, GiB"),
        "forward + backward + AdamW": ("forward, backward and AdamW", "peak memory with AdamW, GiB"),
    }
    for work, (rate_row, memory_row) in works.items():
        result = results[loop, work]
        tokens = result["tokens_per_second"] * result["milliseconds"] / 1000
        rates = sorted(1000 * tokens / milliseconds for milliseconds in result["rounds_ms"])
        middle, least, most = (f"{round(rate, -2):,.0f}" for rate in (result["tokens_per_second"], rates[0], rates[-1]))
        assert table[rate_row][loop] == f"{middle} ({least}–{most})"
        assert table[memory_row][loop] == f"{result['peak_GiB']:.1f}"


def test_training_of_adapters_is_the_recorded_one():
    results = json.loads((ROOT / "kernels/benchmarks/results/h200/training_adapters.json").read_text())["results"]
    table = read_table("docs/benchmarks.md", "Training adapters")
    for result in results:
        column = "dgemma" if result["loop"] == "dgemma" else "transformers with PEFT"
        expected = {
            "rows": f"{result['rows']}",
            "adapters, millions of weights": f"{result['adapter_weights'] / 1e6:.0f}",
            "tokens/s": f"{round(result['tokens_per_second'], -1):,.0f}",
            "ms per step": f"{result['milliseconds']:.0f}",
            "first step, s": f"{result['first_step_s']:.0f}",
            "peak memory, GiB": f"{result['peak_GiB']:.1f}",
        }
        assert {row: table[row][column] for row in expected} == expected
    times, floors = results[0]["by_operation_ms"], results[0]["floors_ms"]
    for name, floor in floors.items():  # the second table of the section: ms, floor
        assert [*table[name].values()] == [f"{times[name]:.0f}", f"{floor:.0f}"]
    small = sum(time for name, time in times.items() if name not in floors)
    others = {"copies, sorting, optimizer and other small kernels": small}
    others["gaps between kernels"] = results[0]["milliseconds"] - sum(times.values())
    for name, time in others.items():
        assert [*table[name].values()] == [f"{time:.0f}", "–"]


def test_qlora_is_the_recorded_one():
    run = json.loads((ROOT / "kernels/benchmarks/results/h200/qlora.json").read_text())
    (row,) = read_table("docs/quantized.md", "QLoRA").items()
    (result,) = run["results"]
    assert result["reserved_gb"] < run["memory_cap_gb"] == 24
    assert row == (
        f"{run['stored_gb']:.1f}",
        {
            "peak, GB": f"{result['peak_gb']:.1f}",
            "reserved, GB": f"{result['reserved_gb']:.1f}",
            "ms per step": f"{result['milliseconds']:.0f}",
            "tokens/s": f"{round(result['tokens_per_second'], -1):,.0f}",
        },
    )


def test_the_five_numbers_of_the_readme_are_the_recorded_ones():
    rows = list(read_table("README.md", "Five numbers").values())
    here, theirs, training = recorded("step_transformers.json"), transformers_step(), training_results()
    memory = recorded("step.json")["memory"][0]
    # A canvas has 256 tokens and takes 16 forwards.
    rate = {
        row["weights"]: f"{256_000 / 16 / row['tokens_per_s']:.1f} ({row['tokens_per_s']:,.0f})"
        for row in generated()
        if row["batch"] == 1
    }
    throughput = {loop: result["tokens_per_second"] for (loop, work), result in training.items() if "AdamW" in work}
    sudoku = read_table("docs/sudoku.md", "Exact grids and steps")["entropy bound 0.1"]
    expected = [
        (f"{here['step'][0]['step_ms']:.1f} ms", [theirs["compiled"][0], theirs["eager"][0]]),
        (f"{rate['bf16']} in bfloat16, {rate['fp8']} in fp8, {rate['int4']} with experts in int4", []),
        (f"{memory['peak_gib'] * GIB:.1f} GB", [f"{float(theirs['eager'][3]) * GIB:.0f} GB"]),
        (
            f"{round(throughput['dgemma'], -2):,.0f} tokens/s",
            [f"{round(throughput['transformers'], -2):,.0f} tokens/s"],
        ),
        (sudoku["mask, 30–45 clues"].replace(", ", " in ") + " steps", []),
    ]
    for row, (ours, others) in zip(rows, expected, strict=True):
        assert row["dgemma"] == ours
        assert all(other in row["for comparison"] for other in others)


@pytest.mark.parametrize(
    ("heading", "group"),
    [
        ("Measured under mask noise", "mask"),
        ("Measured under uniform noise", "uniform"),
        ("Text under mask noise", "mask text"),
        ("Stop rules measured under mask noise", "mask stop rules"),
        ("Stop rules measured under uniform noise", "uniform stop rules"),
    ],
)
def test_sampler_tables_are_the_recorded_ones(heading, group):
    table = read_table("docs/samplers.md", heading)
    rows = json.loads((ROOT / "docs/results/samplers.json").read_text())[group]
    assert list(table) == [row["label"] for row in rows]
    for row in rows:
        expected = {"forwards": f"{row['forwards']:.1f}"}
        if "exact" in row:
            expected |= {"exact grids": f"{row['exact']:.1%}", "standard error": f"{row['error']:.1%}"}
        else:
            expected |= {"nats per token": f"{row['nats']:.2f}", "standard error": f"{row['error']:.2f}"}
            expected |= {"repeats": f"{row['repeats']:.1%}", "distinct pairs": f"{row['distinct_pairs']:.3f}"}
        assert {name: cell.replace(" %", "%") for name, cell in table[row["label"]].items()} == expected


SUDOKU_ROWS = {  # of the page: order and setting of the recorded run
    "random, 12 steps": ("random", "12 steps"),
    "confidence, 12 steps": ("confidence", "12 steps"),
    "margin, 12 steps": ("margin", "12 steps"),
    "random, one cell per step": ("random", "81 steps"),
    "confidence, one cell per step": ("confidence", "81 steps"),
    "margin, one cell per step": ("margin", "81 steps"),
    "entropy bound 0.01": ("entropy", "0.01 nats"),
    "entropy bound 0.1": ("entropy", "0.1 nats"),
    "entropy bound 0.1, clues not frozen": ("entropy, clues not frozen", "0.1 nats"),
}


def sudoku_cells(order: str, setting: str) -> dict[str, list[str]]:
    """Return the share of exact grids and the mean steps by number of clues."""
    rows = json.loads((ROOT / "docs/results/sudoku.json").read_text())["rows"]
    return {
        row["kind"].removesuffix(" givens").replace("-", "–"): [f"{100 * row['exact']:.1f} %", f"{row['steps']:.1f}"]
        for row in rows
        if (row["order"], row["setting"]) == (order, setting)
    }


def test_sudoku_tables_of_mask_noise_are_the_recorded_ones():
    table = read_table("docs/sudoku.md", "Exact grids and steps")
    for row, (order, setting) in SUDOKU_ROWS.items():
        for clues, cell in sudoku_cells(order, setting).items():
            assert table[row][f"mask, {clues} clues"] == ", ".join(cell[:1] if setting == "12 steps" else cell), row
    for retries, cells in read_table("docs/sudoku.md", "Try again").items():
        expected = {
            f"{clues} clues": ", ".join(cell) for clues, cell in sudoku_cells("retry", f"{retries} times").items()
        }
        assert cells == expected


def test_the_card_of_the_sudoku_model_has_the_recorded_results():
    card = (ROOT / "src/dgemma/assets/sudoku/README.md").read_text()
    rows = {f"entropy bound {bound}": ("entropy", f"{bound} nats") for bound in (0.01, 0.1, 0.5)}
    for row, source in (rows | {"confidence, 12 steps": ("confidence", "12 steps")}).items():
        cells = sudoku_cells(*source)
        assert f"| {row} | {' | '.join(cells['30–45'] + cells['24–29'])} |" in card


def test_scores_of_the_harness_are_the_recorded_ones():
    table = read_table("docs/evaluation.md", "The shipped models")
    runs = json.loads((ROOT / "docs/results/evaluation.json").read_text())
    found = {}
    for run in runs:
        protocol = run["protocol"]
        for task, scores in run["results"].items():
            (name,) = (name for name in ("exact_match,none", "acc,none", "bits_per_byte,none") if name in scores)
            error = scores.get(name.replace(",none", "_stderr,none"))
            spread = f" ± {error:.3f}" if isinstance(error, float) else ""
            kind = "" if task == "dgemma_sudoku" else f", {protocol['likelihood']}"
            found[f"`{task}`{kind}"] = f"{scores[name]:.3f}{spread}"
    assert {row: cells["score"] for row, cells in table.items()} == found


def test_quality_of_quantised_weights_is_the_recorded_one():
    formats = json.loads((ROOT / "docs/results/quantized.json").read_text())["formats"]
    quality = {
        name: {
            "text, diffusion bound": f"{found['dgemma/text']['bits_per_byte']:.3f}",
            "text, autoregressive": f"{found['dgemma/text']['causal_bits_per_byte']:.3f}",
            "text, steps": f"{found['dgemma/text']['steps_per_canvas']:.1f}",
            "Sudoku, bound": f"{found['dgemma/sudoku']['nats_per_cell']:.4f}",
            "Sudoku, exact grids": f"{100 * found['dgemma/sudoku']['exact']:.1f} %",
            "Sudoku, steps": f"{found['dgemma/sudoku']['steps_per_canvas']:.1f}",
        }
        for name, found in formats.items()
    }
    assert read_table("docs/quantized.md", "Quality") == quality
    larger = {
        name: {
            "diffusion bound": f"{found['larger']['bits_per_byte']:.3f}",
            "autoregressive": f"{found['larger']['causal_bits_per_byte']:.3f}",
            "steps": f"{found['larger']['steps_per_canvas']:.1f}",
        }
        for name, found in formats.items()
        if "larger" in found
    }
    assert read_table("docs/quantized.md", "Quality of a larger text model") == larger
    rounding = {
        name: {kind: f"{100 * error:.1f} %" for kind, error in found["rounding"].items()}
        for name, found in formats.items()
        if "rounding" in found
    }
    assert read_table("docs/quantized.md", "Rounding errors") == rounding


def test_accuracy_under_a_constraint_is_the_recorded_one():
    table = read_table("docs/constraints.md", "Accuracy")
    results = json.loads((ROOT / "docs/results/constraints.json").read_text())
    expected = {}
    for row in results["ways"]:
        cells = {"one smudge": f"{100 * row['one']:.1f} %", "two smudges": f"{100 * row['two']:.1f} %"}
        cells["valid"] = f"{100 * row['valid']:.0f} %" if "valid" in row else ""
        expected[row["way"]] = cells | {"forwards": f"{row['forwards']:.1f}" if "forwards" in row else ""}
    assert table == expected


def test_scores_before_and_after_finetuning_are_the_recorded_ones():
    results = json.loads((ROOT / "docs/results/finetuned_sudoku.json").read_text())
    table = list(read_table("docs/training.md", "Fine-tune a text model on Sudoku").items())
    runs = (("before", results["before"]), *((how, results[how]["after"]) for how in ("full", "lora")))
    for (row, cells), (how, scores) in zip(table, runs, strict=True):
        easy, hard = scores["40-45 givens"], scores["30-39 givens"]
        expected = [f"{kind['exact']:.1%}, {kind['steps']:.1f}".replace("%", " %") for kind in (easy, hard)]
        expected.append(f"{hard['clues']:.1%}".replace("%", " %"))
        run = results[how]
        expected.append("" if how == "before" else f"{run['steps']:,}, {run['seconds']:.0f} s")
        assert how == "before" or f"{run['trained_weights'] / 1e6:.1f}M weights" in row
        assert list(cells.values()) == expected, row


@pytest.mark.slow
def test_the_pictures_show_the_recorded_results(tmp_path):
    pytest.importorskip("matplotlib")
    script = importlib.util.spec_from_file_location("pictures", ROOT / "docs" / "pictures.py")
    pictures = importlib.util.module_from_spec(script)
    script.loader.exec_module(pictures)
    pictures.draw(tmp_path)
    numbers = re.compile(r"<text[^>]*>([^<]+)</text>|<dc:description>([^<]+)<")  # labels, and the points of lines
    for name in pictures.PICTURES:
        new, stored = ((folder / f"{name}.svg").read_text() for folder in (tmp_path, ROOT / "docs" / "pictures"))
        assert numbers.findall(new) == numbers.findall(stored), f"Draw {name} again: python docs/pictures.py"
