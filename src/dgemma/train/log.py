"""The log of a run: a line of JSON a step in `log.jsonl`; as columns, as CSV, as a picture."""

import csv
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class TrainLog:
    """A run's log. Every step has a line with loss, "loss/TERM", gradient norm and learning rate; every so often also
    the throughput and how evenly the routers load their experts. What `evaluate` said is a line of "evaluation/NAME".

    Example: `steps, losses = TrainLog(Path("run/log.jsonl")).column("loss")`.
    """

    path: Path

    def lines(self) -> list[dict[str, Any]]:
        """All lines; one that a killed process left unfinished does not count."""
        if not self.path.is_file():
            return []
        lines = []
        for text in self.path.read_text().splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                break
        return lines

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        with self.path.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def sync(self) -> None:
        """Bring what was written to the disk."""
        if self.path.is_file():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())

    def cut(self, last_step: int) -> None:
        """Forget what came after `last_step`: a resumed run writes it again."""
        kept = [line for line in self.lines() if line["step"] <= last_step]
        new = self.path.with_suffix(".new")
        new.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(new, self.path)

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """The steps that have `name`, and its values there."""
        lines = [line for line in self.lines() if name in line]
        return [line["step"] for line in lines], [line[name] for line in lines]

    def to_csv(self, path: str | Path) -> None:
        """The numbers as CSV, a row a step, empty where a step has none. The routers' load is in the JSON alone.

        Example: `result.log.to_csv("run.csv")`.
        """
        rows: dict[int, dict[str, Any]] = {}  # by step: what was evaluated after it is a line of its own
        for line in self.lines():
            rows.setdefault(line["step"], {}).update(
                {k: v for k, v in line.items() if isinstance(v, int | float | str)}
            )
        names = list(dict.fromkeys(name for row in rows.values() for name in row))
        with Path(path).open("w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(rows.values())

    def plot(self, path: str | Path | None = None, *, smooth: int = 50) -> "Figure":
        """Loss and terms against the step, means over `smooth` steps; saved to `path` if one is given.

        Example: `result.log.plot("loss.png")`.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise ImportError("TrainLog.plot needs matplotlib. Install it with `pip install dgemma[plots]`.") from None
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot(xlabel="step", ylabel="loss")
        names = dict.fromkeys(name for line in self.lines() for name in line if name.split("/")[0] == "loss")
        for name in names:
            steps, values = self.column(name)
            windows = (values[max(0, end - smooth) : end] for end in range(1, len(values) + 1))
            axes.plot(steps, [sum(window) / len(window) for window in windows], label=name)
        axes.legend()
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure
