"""Notebooks are stored with small outputs, and their cells run in order, without Jupyter."""

import ast
import io
import json
import re
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples" / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path: Path) -> list[str]:
    cells = json.loads(path.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def show(source: str, namespace: dict[str, object]) -> object:
    """Run a cell and return the value of its last expression, as a notebook would show it."""
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, type_ignores=[]), "cell", "exec"), namespace)
    return None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), namespace)


def draw(figure) -> bytes:
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()


def test_there_are_four_notebooks_in_order():
    assert [path.name[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04"]


@each_notebook
def test_a_notebook_is_stored_with_small_outputs_of_a_run_in_order(path):
    nbformat.validate(nbformat.read(path, as_version=4))
    notebook = json.loads(path.read_text())
    assert path.stat().st_size < 200_000
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [output for output in outputs if output["output_type"] == "error"]


@pytest.mark.slow
@each_notebook
@pytest.mark.usefixtures("shallow")
def test_cells_run_in_order_and_something_is_drawn(path, monkeypatch, tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "notebook"}
    sources = [re.sub(r'"steps": \d+', '"steps": 4', source) for source in code_cells(path)]  # enough to draw something
    shown = [show(source, namespace) for source in sources]
    pages = [page for value in shown if (page := getattr(value, "_repr_html_", str)())]
    pictures = [draw(value) for value in shown if hasattr(value, "savefig")]
    assert pictures
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert all(page.startswith("<") for page in pages)
    tables = [value for value in shown if hasattr(value, "_repr_markdown_")]
    assert pages or tables or path.name[:2] in ("03", "04")
    assert not list(tmp_path.iterdir())  # a notebook writes no files
