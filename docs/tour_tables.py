"""Tables of all folders and files, from the sources: a hook of mkdocs fills them into tour.md when the site is built.

    python docs/tour_tables.py

prints them.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ("src/dgemma", "kernels/dgemma_kernels")


def first_sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring, without its full stop."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=[\w)`])\.(?= |$)", paragraph)[0].replace("|", "\\|")


def imported_folders(folder: Path) -> Iterator[str]:
    """Yield the folders of dgemma that a folder's modules import."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            names = [alias.name for alias in node.names] if module == "dgemma" else (module or "").split(".")[1:2]
            if module and module.split(".")[0] == "dgemma":
                yield from (name for name in names if name != folder.name and (folder.parent / name).is_dir())


def folder_table() -> list[str]:
    """Return a table of the folders of dgemma, those that import the fewest others first."""
    imports = {path.parent: set(imported_folders(path.parent)) for path in (ROOT / "src/dgemma").glob("*/__init__.py")}
    lines = ["| folder | content | imports |", "|---|---|---|"]
    for folder, names in sorted(imports.items(), key=lambda item: (len(item[1]), item[0])):
        listed = ", ".join(f"`{name}`" for name in sorted(names))
        lines.append(f"| `{folder.name}` | {first_sentence(folder / '__init__.py')} | {listed} |")
    return lines


def file_tables() -> list[str]:
    """Return a heading and a table of files for each folder of both packages."""
    lines = []
    for folder in (folder for package in PACKAGES for folder in sorted((ROOT / package).rglob("")) if folder.is_dir()):
        files = sorted(path for path in folder.glob("*.py") if not path.name.startswith("__"))
        if files:
            rows = [f"| `{path.name}` | {first_sentence(path)} |" for path in files]
            lines += [f"### {folder.relative_to(ROOT)}", "", "| file | content |", "|---|---|", *rows, ""]
    return lines[:-1]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page of the site with its tables; mkdocs calls this for every page."""
    if page.file.src_uri == "tour.md":
        for comment, table in (("table of folders", folder_table()), ("tables of files", file_tables())):
            before, after = markdown.split(f"<!-- {comment} -->")
            markdown = "\n".join((before, *table, after))
    return markdown


if __name__ == "__main__":
    print(*folder_table(), "", *file_tables(), sep="\n")
