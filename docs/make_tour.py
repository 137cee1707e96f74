"""Write the file tree of tour.md from the first sentence of each module's docstring: python docs/make_tour.py."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tour.md"
PACKAGES = ("src/dgemma", "kernels/dgemma_kernels")
START, END = "<!-- tree: python docs/make_tour.py -->", "<!-- end of tree -->"


def first_sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring, without its full stop."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=[\w)`])\.(?= |$)", paragraph)[0]


def folders() -> Iterator[Path]:
    """Yield the packages and their sub-packages in reading order."""
    for package in PACKAGES:
        yield from sorted({path.parent for path in (ROOT / package).rglob("*.py")})


def tree() -> str:
    """Return a heading and a table of files for each folder."""
    lines = []
    for folder in folders():
        files = sorted(path for path in folder.glob("*.py") if not path.name.startswith("__"))
        purpose = first_sentence(folder / "__init__.py") if (folder / "__init__.py").exists() else ""
        if not files:
            continue
        lines += [f"### {folder.relative_to(ROOT)}", "", *([f"{purpose}.", ""] if purpose else [])]
        lines += ["| file | content |", "|---|---|"]
        lines += [f"| `{path.name}` | {first_sentence(path).replace('|', chr(92) + '|')} |" for path in files]
        lines += [""]
    return "\n".join(lines)


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(START)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{START}\n\n{tree()}\n{END}{after}")
