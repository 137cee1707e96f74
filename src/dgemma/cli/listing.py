"""`dgemma info` without a checkpoint: list those that ship with dgemma, without importing torch."""

import argparse
import re
from pathlib import Path

from dgemma.cli import output
from dgemma.cli.importing import import_quickly

_ASSETS = Path(__file__).parents[1] / "assets"


def run_info(arguments: argparse.Namespace) -> None:
    """Describe a checkpoint, or list those that ship with dgemma."""
    if arguments.checkpoint is not None:
        import_quickly("dgemma.cli.study").describe_checkpoint(arguments)
        return
    folders = shipped()
    if arguments.json:
        output.print_json({"checkpoints": [f"dgemma/{folder.name}" for folder in folders]})
    else:
        print("\n".join(map(_introduce, folders)) or "No checkpoint ships with this copy of dgemma.")


def shipped() -> list[Path]:
    """Return the folders of the checkpoints that ship with dgemma."""
    return [config.parent for config in sorted(_ASSETS.glob("*/config.json"))]


def _introduce(folder: Path) -> str:
    """Return a shipped checkpoint's name, and the first sentence and first command of its README."""
    page = (folder / "README.md").read_text()
    sentence = re.search(r"^[A-Z].*?\.(?=\s)", page, re.MULTILINE)
    command = re.search(r"^    (dgemma .*)", page, re.MULTILINE)
    lines = [found[found.lastindex or 0] for found in (sentence, command) if found]
    return "\n  ".join([f"dgemma/{folder.name}", *lines])
