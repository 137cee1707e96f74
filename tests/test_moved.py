"""Module paths of earlier versions, as CHANGELOG.md lists them, lead to the modules that replace them."""

import importlib
import re
import sys
from pathlib import Path

import pytest

import dgemma
from dgemma._moved import MOVED, REPLACED

CHANGELOG = (Path(__file__).parents[1] / "CHANGELOG.md").read_text()
EARLIER_NAMES = [
    ("dgemma.data.sudoku", "Completion", "CompletedPuzzles"),
    ("dgemma.serve.replay", "Replay", "ReplayPage"),
]
FOLDERS = {"dgemma.checkpoint", "dgemma.diffusion.language"}  # old paths that exist again, with other content


def expand(cell):
    """Return the paths in a cell: `a.b.c`, `d` is a.b.c and a.b.d."""
    paths, parent = [], ""
    for name in re.findall(r"`([\w.…]+)`", cell):
        parent = name.rpartition(".")[0] if "." in name else parent
        paths.append(name if "." in name else f"{parent}.{name}")
    return paths


def moved_modules():
    """Return the old path and the possible new paths of each module of `dgemma` in the table."""
    found = {}
    for before, now in re.findall(r"^\| (`dgemma\.[^|]*) \| ([^|]*) \|$", CHANGELOG, flags=re.MULTILINE):
        old_paths = expand(before)
        if "".join(old_paths).islower():  # otherwise the row has classes
            for old in set(old_paths) - FOLDERS:
                found[old] = {new.replace("…", old.rpartition(".")[2]) for new in expand(now)}
    return found


@pytest.mark.parametrize("old", sorted(moved_modules()))
def test_an_old_module_path_leads_to_its_replacement(old, monkeypatch):
    package, _, name = old.rpartition(".")
    monkeypatch.delitem(sys.modules, old, raising=False)
    monkeypatch.setattr(importlib.import_module(package), name, None, raising=False)  # restored after the test
    if old in REPLACED:
        with pytest.raises(ImportError, match=re.escape(f"{old} was replaced by dgemma.")) as error:
            importlib.import_module(old)
        assert set(re.findall(r"dgemma[\w.]+\w", str(error.value))) - {old} <= moved_modules()[old]
    else:
        with pytest.warns(DeprecationWarning, match=re.escape(f"{old} is now {MOVED[old]}.")):
            module = importlib.import_module(old)
        assert module is sys.modules[MOVED[old]]
        assert module.__spec__.name == MOVED[old] in moved_modules()[old]


def test_every_row_of_the_table_is_covered():
    assert {*MOVED, *REPLACED} - {"dgemma.train.train_for"} == set(moved_modules())


def test_importing_a_module_that_a_function_replaces_keeps_the_function():
    function = dgemma.generate
    with pytest.raises(ImportError, match=re.escape("dgemma.run.generate")):
        importlib.import_module("dgemma.generate")
    assert dgemma.generate is function


@pytest.mark.parametrize(("module", "old", "new"), EARLIER_NAMES)
def test_an_earlier_name_of_a_class_leads_to_the_class_with_a_warning(module, old, new):
    pytest.importorskip("uvicorn")
    found = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=re.escape(f"{module}.{old} is now {new}.")):
        assert getattr(found, old) is getattr(found, new)
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'stepz'"):
        found.stepz  # noqa: B018


def test_importing_train_for_names_its_replacement():
    with pytest.raises(ImportError, match=re.escape("TrainConfig(minutes=...)")):
        from dgemma.train import train_for  # noqa: F401


def test_other_missing_modules_stay_missing():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'dgemma\.stepz'"):
        importlib.import_module("dgemma.stepz")
