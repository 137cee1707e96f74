"""Draws the pictures of the site from the recorded results: `python docs/pictures.py` writes docs/pictures/*.svg.

Colours of text and paper are CSS variables, so that a picture follows the light or dark setting of its reader.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "kernels" / "benchmarks" / "results" / "h200"
INK, PAPER, LINES = "#24292f", "#fffffe", "#d0d7de"  # replaced by variables
STYLE = f"""<style>
:root {{ --ink: {INK}; --paper: {PAPER}; --lines: {LINES} }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #d6dce4; --paper: #1b1f27; --lines: #3b424c }} }}
</style>"""
# Mid-tones that are distinct on both papers, also without red or green.
COLOURS = ["#3b82c4", "#e08b2c", "#3a9d7c", "#b65fb0", "#c2504a", "#7a8a99", "#a89b2c"]
OURS, THEIRS = COLOURS[0], COLOURS[5]
CANVAS_STEPS = 16
ROW_TOKENS = 704 + 256  # of the training benchmark, which has 8 rows


def read(file: Path) -> Any:
    return json.loads(file.read_text())


def bars(ax: Axes, title: str, rows: dict[str, float], note: str = "{:.1f}") -> None:
    """Draw horizontal bars; those of dgemma have another colour."""
    names = list(rows)
    ax.barh(names, list(rows.values()), color=[OURS if name.startswith("dgemma") else THEIRS for name in names])
    for name, value in rows.items():
        ax.annotate(note.format(value), (value, name), xytext=(4, 0), textcoords="offset points", va="center")
    ax.invert_yaxis()
    ax.margins(x=0.12)
    ax.set_title(title, loc="left")
    ax.tick_params(left=False, labelbottom=False, bottom=False)
    ax.spines[:].set_visible(False)


def curves(ax: Axes, title: str, lines: dict[str, list[tuple[float, float]]], ticks: list[int], **labels: str) -> None:
    """Draw a line per entry, with logarithmic x."""
    for colour, (name, points) in zip(COLOURS, lines.items(), strict=False):
        ax.plot(*zip(*sorted(points), strict=True), "o-", color=colour, markersize=4, label=name)
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    ax.minorticks_off()
    ax.set_title(title, loc="left")
    ax.set(**labels)
    ax.grid(axis="y")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize="small")


def forwards(ax: Axes) -> None:
    rows = {row["weights"]: row for row in read(RESULTS / "generate.json")["rows"] if row["batch"] == 1}
    ours = {f"dgemma, {name}": rows[name]["canvas_ms"] / CANVAS_STEPS for name in ("int4", "fp8", "bf16")}
    texts = [entry["output"] for entry in read(RESULTS / "step_transformers.json")["parts"]["transformers"]]
    eager, compiled = (float(re.search(r"([\d.]+) ms", text)[1]) for text in texts)
    theirs = {"vLLM, fp8 (published)": 12.4, "transformers, compiled": compiled, "transformers, eager": eager}
    bars(ax, "Milliseconds per forward, batch 1, one H200", ours | theirs)


def batches(ax: Axes) -> None:
    lines: dict[str, list[tuple[float, float]]] = {"bf16": [], "fp8": [], "int4": []}
    for row in read(RESULTS / "generate.json")["rows"]:
        lines[row["weights"]].append((row["batch"], row["canvas_ms"] / CANVAS_STEPS / row["batch"]))
    labels = {"xlabel": "rows in the batch", "ylabel": "ms per forward and row"}
    curves(ax, "Cost of a row in a batch", lines, [1, 2, 4, 8, 16], **labels)


def prompts(ax: Axes) -> None:
    runs = {"bf16": read(RESULTS / "prompts.json")["parts"], "fp8": read(RESULTS / "prompts_fp8.json")["parts"]}
    lines = {name: [(row["length"], row["ms"]) for row in parts["read"]] for name, parts in runs.items()}
    others = [row for row in runs["bf16"]["transformers"] if row["work"] == "read" and row["batch"] == 1]
    lines["transformers"] = [(row["length"], row["ms"]) for row in others]
    ticks = [256, 2048, 16384, 131072]
    curves(ax, "Time to read a prompt", lines, ticks, xlabel="tokens of the prompt", ylabel="ms")
    ax.set_yscale("log")


def families(group: str, value: str, skip: tuple[str, ...] = ()) -> dict[str, list[tuple[float, float]]]:
    """Return the points of each sampler that was measured with at least two settings."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in read(ROOT / "docs" / "results" / "samplers.json")[group]:
        name = re.sub(r",? [\d.]+( steps| nats)?$", "", row["label"])
        found.setdefault(name, []).append((row["forwards"], row[value]))
    return {name: points for name, points in found.items() if len(points) > 1 and name not in skip}


def sudokus(ax: Axes) -> None:
    lines = families("mask", "exact", skip=("Confidence, margin order",))
    ticks = [4, 6, 8, 12, 24, 48]
    curves(ax, "Sudokus solved, mask noise", lines, ticks, xlabel="forwards per puzzle", ylabel="share solved")


def texts(ax: Axes) -> None:
    lines = families("uniform", "nats")
    labels = {"xlabel": "forwards per canvas", "ylabel": "nats per token, by autoregression"}
    curves(ax, "Text, uniform noise (lower is better)", lines, [10, 12, 16, 24, 48], **labels)


def throughput(ax: Axes) -> None:
    runs = {run["loop"].split()[0]: run for run in read(RESULTS / "training.json")["results"] if "AdamW" in run["work"]}
    adapters = read(RESULTS / "training_adapters.json")["results"]
    rows = {f"{name}, 1B, all weights": 8000 * ROW_TOKENS / run["milliseconds"] for name, run in sorted(runs.items())}
    rows |= {f"{run['loop']}, 26B, LoRA".replace(", PEFT", " + PEFT"): run["tokens_per_second"] for run in adapters}
    bars(ax, "Training, tokens per second on one H200", rows, "{:,.0f}")


WIDE, HALF = (8, 2.6), (3.5, 3.2)  # inches; two halves share a line where a page has room
PICTURES = {
    "engines": (forwards, WIDE),
    "batches": (batches, HALF),
    "prompts": (prompts, HALF),
    "sudokus": (sudokus, HALF),
    "texts": (texts, HALF),
    "training": (throughput, WIDE),
}


def draw(folder: Path) -> None:
    """Write every picture."""
    folder.mkdir(exist_ok=True)
    settings = {"text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "font.size": 9}
    settings |= {"axes.edgecolor": LINES, "grid.color": LINES, "figure.facecolor": PAPER, "axes.facecolor": PAPER}
    settings |= {"svg.fonttype": "none", "svg.hashsalt": "dgemma", "font.family": "sans-serif"}
    for name, (content, size) in PICTURES.items():
        with matplotlib.rc_context(settings):
            figure = Figure(figsize=size, layout="constrained")
            content(figure.subplots())
            path = folder / f"{name}.svg"
            points = [line.get_xydata().round(3).tolist() for line in figure.axes[0].lines]
            figure.savefig(path, metadata={"Date": None, "Description": json.dumps(points)})
        svg = re.sub(r"(<svg [^>]*>)", lambda match: match[1] + STYLE, path.read_text(), count=1)
        head, body = svg.split("</style>", 1)
        for colour, variable in ((INK, "--ink"), (PAPER, "--paper"), (LINES, "--lines")):
            body = body.replace(colour, f"var({variable})")
        path.write_text(f"{head}</style>{body}")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "pictures")
