"""Run the cells of notebooks in order and store their outputs, so that a code host shows them. Needs no Jupyter.

python examples/notebooks/execute.py examples/notebooks/*.ipynb
"""

import ast
import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LARGEST_PAGE = 50_000  # characters; a player of a whole run is larger, and a code host does not run its script


def run_cell(source: str, namespace: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Run a cell and return its outputs in the notebook format: printed text, the last value, and figures."""
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) and not source.rstrip().endswith(";") else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, type_ignores=[]), "cell", "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), namespace)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": as_lines(printed.getvalue())})
    for figure in map(plt.figure, plt.get_fignums()):
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=80, bbox_inches="tight")
        outputs.append({"output_type": "display_data", "data": picture(png.getvalue()), "metadata": {}})
    drawn = bool(plt.get_fignums())
    plt.close("all")
    if value is not None and not drawn:
        outputs.append(
            {"output_type": "execute_result", "execution_count": number, "data": shown(value), "metadata": {}}
        )
    return outputs


def shown(value: Any) -> dict[str, Any]:
    """Return a value as a notebook shows it: a picture, a page, a table or text."""
    if hasattr(value, "savefig"):
        png = io.BytesIO()
        value.savefig(png, format="png", dpi=80)
        return picture(png.getvalue())
    if hasattr(value, "_repr_markdown_"):
        return {"text/markdown": as_lines(value._repr_markdown_())}
    page = value._repr_html_() if hasattr(value, "_repr_html_") else ""
    if len(page) > LARGEST_PAGE:
        return {"text/plain": ["A page that replays the run. Run this cell to see it."]}
    return {"text/html": as_lines(page)} if page else {"text/plain": as_lines(repr(value))}


def picture(png: bytes) -> dict[str, Any]:
    return {"image/png": base64.b64encode(png).decode(), "text/plain": ["<Figure>"]}


def as_lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


for path in map(Path, sys.argv[1:]):
    notebook = json.loads(path.read_text())
    namespace: dict[str, Any] = {"__name__": "notebook"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, start=1):
        cell["outputs"] = run_cell("".join(cell["source"]), namespace, number)
        cell["execution_count"] = number
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    print(f"{path}: {path.stat().st_size:,} bytes")
