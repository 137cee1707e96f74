"""Figures for papers and notebooks: entropy over a run, order of decisions, quality over speed.

Every function returns a new matplotlib figure, or draws on the axes `ax`. They do not use pyplot, so they work without
a display; a notebook shows the figure.
"""

import io
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from dgemma.checkpoint.tokenizer import Tokenizer
from dgemma.checks import typed
from dgemma.printing import install_command
from dgemma.run.recorded.trajectory import Trajectory
from dgemma.study.sweep import Sweep
from dgemma.view.frames import Array, read_frames, settled
from dgemma.view.heat import LIGHT
from dgemma.view.pieces import Pieces

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LABELLED = 60  # maximum number of positions whose tokens are written below the axis


@typed
def plot_entropy(
    trajectory: Trajectory, *, row: int = 0, tokenizer: Tokenizer | None = None, ax: "Axes | None" = None
) -> "Figure":
    """Plot the entropy in nats, steps down and positions across, with blocks side by side.

    With a tokenizer, the tokens of a short text are written below their positions.

    Example: `plot_entropy(out.trajectory).savefig("entropy.png")`.
    """
    frames = read_frames(trajectory, row, owner="plot_entropy")
    figure, ax = _axes(ax, "plot_entropy", size=(9, 4.2))
    num_steps, canvas_len = int(frames.step.max()) + 1, frames.canvas.shape[1]
    grid = np.full((num_steps, frames.num_blocks * canvas_len), np.nan)
    for i in np.flatnonzero(frames.step >= 0):
        start = frames.block[i] * canvas_len
        grid[frames.step[i], start : start + canvas_len] = frames.entropy[i]
    extent = (-0.5, grid.shape[1] - 0.5, num_steps + 0.5, 0.5)
    image = ax.imshow(grid, aspect="auto", cmap=_colours(), vmin=0, interpolation="nearest", extent=extent)
    for block in range(1, frames.num_blocks):
        ax.axvline(block * canvas_len - 0.5, color="0.15", linewidth=1.5)
    _entitle(ax, "Entropy, step by step", frames.num_blocks, canvas_len)
    ax.set(xlabel="position", ylabel="step")
    ax.locator_params(axis="y", integer=True)
    figure.colorbar(image, ax=ax, label="entropy (nats)", pad=0.015)
    _write_text(ax, frames.final, tokenizer)
    return figure


@typed
def plot_order(
    trajectory: Trajectory, *, row: int = 0, tokenizer: Tokenizer | None = None, ax: "Axes | None" = None
) -> "Figure":
    """Plot the step at which each position got its final token, one colour per block.

    Example: `plot_order(out.trajectory, tokenizer=tokenizer).savefig("order.png")`.
    """
    frames = read_frames(trajectory, row, owner="plot_order")
    figure, ax = _axes(ax, "plot_order", size=(9, 3.2))
    for block, steps in enumerate(settled(frames)):
        ax.plot(block * len(steps) + np.arange(len(steps)), steps + 1, ".", markersize=5)
    _entitle(ax, "When each position got its final token", frames.num_blocks, frames.final.shape[1])
    ax.set(xlabel="position", ylabel="settled at step", xlim=(-0.5, frames.final.size - 0.5))
    ax.locator_params(axis="y", integer=True)
    ax.grid(axis="y", color="0.9")
    ax.set_axisbelow(True)
    _write_text(ax, frames.final, tokenizer)
    return figure


@typed
def plot_frontier(sweep: Sweep, *, ax: "Axes | None" = None) -> "Figure":
    """Plot quality over tokens per forward. A family of samplers is a line, a sampler a labelled point with its error.

    The frontier is a grey line.

    Example: `plot_frontier(sweep(task, samplers)).savefig("sweep.png")`.
    """
    figure, ax = _axes(ax, "plot_frontier")
    best = sweep.frontier
    ax.plot([row.tokens_per_forward for row in best], [row.quality for row in best], color="0.7", zorder=0)
    has_lines = len(sweep.families) < len(sweep.rows)
    labels = []
    for name, rows in sweep.families.items():
        settings = [row.setting.split(", ") for row in rows]
        shared = [part for part in settings[0] if len(rows) > 1 and all(part in each for each in settings)]
        speeds, qualities = [row.tokens_per_forward for row in rows], [row.quality for row in rows]
        heights = [0.0 if row.error != row.error else row.error for row in rows]
        ax.errorbar(
            speeds,
            qualities,
            yerr=heights,
            fmt="o-" if len(rows) > 1 else "o",
            capsize=3,
            label=", ".join((name, *shared)),
        )
        for row, parts in zip(rows, settings, strict=True):
            text = ", ".join(part for part in parts if part not in shared) if has_lines else row.label
            point = (row.tokens_per_forward, row.quality)
            labels.append(ax.annotate(text, point, xytext=(5, 4), textcoords="offset points", fontsize="small"))
    ax.set(xlabel="new tokens / forward", ylabel="quality")
    ax.margins(x=0.15)
    if has_lines:
        ax.legend(fontsize="small")  # labels of points then omit what all points of a line share
    _spread(figure, labels)
    return figure


def _spread(figure: "Figure", labels: list[Any]) -> None:
    """Move each label up or down until it covers no earlier one."""
    figure.draw_without_rendering()
    placed: list[Any] = []
    for label in sorted(labels, key=lambda label: label.xy):
        for shift in (4, -11, 16, -23, 28, -35, 40):
            label.set_position((5, shift))
            box = label.get_window_extent()
            if not any(box.overlaps(other) for other in placed):
                break
        placed.append(box)


def _axes(ax: "Axes | None", owner: str, *, size: tuple[float, float] = (7, 4)) -> "tuple[Figure, Axes]":
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{owner} needs matplotlib. Install it with: {install_command('plots')}.") from error
    if ax is not None:
        return cast("Figure", ax.figure), ax

    class Picture(Figure):
        """A figure that a notebook shows without pyplot."""

        def _repr_png_(self) -> bytes:
            png = io.BytesIO()
            self.savefig(png, format="png", dpi=130)
            return png.getvalue()

    figure = Picture(figsize=size, layout="constrained")
    return figure, figure.add_subplot()


def _colours() -> Any:
    """Return the light palette reversed, so that white means certain."""
    from matplotlib.colors import LinearSegmentedColormap

    colours = ["#fffdf8", *reversed(LIGHT[::3])]
    return LinearSegmentedColormap.from_list("certainty", colours).with_extremes(bad="0.93")


def _entitle(ax: "Axes", title: str, num_blocks: int, canvas_len: int) -> None:
    """Set the title, and the number of each block if there are several."""
    ax.set_title(title, pad=18 if num_blocks > 1 else 6)
    for block in range(num_blocks if num_blocks > 1 else 0):
        middle, along = (block + 0.5) * canvas_len - 0.5, ax.get_xaxis_transform()
        ax.text(middle, 1.02, f"block {block + 1}", transform=along, ha="center", fontsize="small", color="0.35")


def _write_text(ax: "Axes", final: Array, tokenizer: Tokenizer | None) -> None:
    if tokenizer is None or final.size > _LABELLED:
        return
    pieces = [piece for line in final.tolist() for piece in Pieces(tokenizer)(line)]
    # A dollar sign would begin math mode.
    labels = [piece.strip().replace("\n", "⏎").replace("$", r"\$") or "␣" for piece in pieces]
    turned = max(map(len, labels)) > 2
    ax.set_xticks(range(final.size), labels, rotation=90 if turned else 0, fontsize=7, family="monospace")
    ax.set_xlabel("")
