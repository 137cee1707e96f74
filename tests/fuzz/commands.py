"""Odd command lines, run in the process: options, files and streams in random combinations."""

import contextlib
import io
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import dgemma
from dgemma.cli import main
from fuzz.files import tiny_model
from fuzz.harness import Family, UnsafeOutput
from fuzz.mutate import CONTROL, damage_bytes, damage_json_file, damage_safetensors

OPTIONS: dict[str, tuple[str, ...]] = {
    "generate": ("-n", "--steps", "--seed", "--temperature", "--top-k", "--top-p", "--sampler", "--noise", "--html"),
    "infill": ("--steps", "--seed", "--sampler", "--noise", "--html", "--temperature"),
    "edit": ("--level", "--keep", "--steps", "--seed", "--noise"),
    "info": ("--tensors", "--json"),
    "evaluate": ("--rows", "--canvases", "--samples", "--batch-size", "--noise", "--seed", "--separator"),
}
VALUES = (
    *("0", "1", "2", "8", "-1", "1e-50", "1e308", "nan", "inf", "0.5", "x", "", "9" * 30, CONTROL, "mask", "uniform"),
    *("hybrid", "threshold:tau=0.5", "ancestral", "entropy-bound:bound=-1", "threshold:tau=__import__('os')"),
    *("/dev/full", "/", "/nowhere/at/all", "words", "--json", "\ud800", "a" * 5000),
)
TEXTS = ("Once", "The ____ sat.", "", "-", CONTROL, "\ud800", "____", "a" * 300, "some words")
SAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]")


def prepare(folder: Path) -> Any:
    tiny_model().save_pretrained(folder / "checkpoint")
    dgemma.ByteTokenizer().save_pretrained(folder / "checkpoint")
    (folder / "words.txt").write_text("some words " * 20)
    torch.cuda.is_available = lambda: False  # type: ignore[assignment]
    return SimpleNamespace(folder=folder)


def attempt(context: Any, source: random.Random, folder: Path) -> None:
    command = source.choice(list(OPTIONS))
    model = context.folder / "checkpoint"
    if source.random() < 0.4:
        model = _damaged(model, source, folder)
    words = [command, *([str(model)] if command == "info" else ["-m", str(model)])]
    if command != "info":
        words += ["--steps", "2", "--quiet"] if command not in ("evaluate",) else ["--samples", "1", "--canvases", "2"]
        words += ["-n", "8"] if command == "generate" else []
    for _ in range(source.randrange(3)):
        option = source.choice((*OPTIONS[command], "--json", "--odd", CONTROL))
        value = source.choice(VALUES)
        if option == "--html":
            value = str(folder / "page.html") if source.random() < 0.5 else value
        words += [option] if option in ("--json", "--tensors") else [option, value]
    if command == "evaluate":
        words.append(source.choice((str(context.folder / "words.txt"), str(folder), CONTROL, "/dev/zero")))
    elif command != "info":
        words.append(source.choice(TEXTS))
    code, out, err = _run(words, source)
    shown = err + ("" if "--json" not in words else out)
    if "Traceback" in err or code not in (0, 1, 2, 130):
        raise UnsafeOutput(f"{words} -> {code}: {err[-200:]!r}")
    found = SAFE.search(shown)
    if found:
        raise UnsafeOutput(f"{words}: {found[0]!r} in the output")
    if code:
        raise SystemExit(code)


def _damaged(model: Path, source: random.Random, folder: Path) -> Path:
    copy = folder / source.choice(("copy", "a\x1b]0;b"))
    copy.mkdir()
    for path in model.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    path = source.choice(sorted(copy.iterdir()))
    damage = damage_safetensors if path.suffix == ".safetensors" else damage_json_file
    path.write_bytes(damage(path.read_bytes(), source) if source.random() < 0.9 else damage_bytes(b"x", source))
    return copy


def _run(words: list[str], source: random.Random) -> tuple[int, str, str]:
    out, err, before = io.StringIO(), io.StringIO(), sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(source.choice((b"", b"some words", b"\xff\xfe", b"\x1b[2J"))), "utf-8")
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(words)
    finally:
        sys.stdin = before
    return code, out.getvalue(), err.getvalue()


FAMILIES = [Family("commands", prepare, attempt, 8)]
