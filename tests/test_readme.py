"""Documents are code: their Python blocks run, their links resolve, and the files and names they mention exist."""

import ast
import importlib
import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from dgemma import sampling
from dgemma.cli.parser import TABLES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
GUIDES = sorted((ROOT / "docs").glob("*.md"))
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *(ROOT / "kernels" / name for name in ("README.md", "LOG.md")),
    *GUIDES,
    *sorted((ROOT / "docs" / "api").glob("*.md")),
    *sorted((ROOT / "src/dgemma/assets").glob("*/README.md")),
]
UNCHECKED = (ROOT / "kernels/LOG.md",)  # it also names files that are gone
# Blocks that need a GPU or the published weights have `<!-- not run: why -->` on the line before.
RUN_BLOCK = re.compile(r"(?<!-->\n)^```python\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)


def relative(page: Path) -> str:
    return str(page.relative_to(ROOT))


def run_blocks(page: Path) -> None:
    """Run a page's Python blocks in order, in one namespace."""
    namespace: dict[str, object] = {}
    for number, block in enumerate(RUN_BLOCK.findall(page.read_text())):
        exec(compile(block, f"{relative(page)} block {number}", "exec"), namespace)


QUICK = ("README", "extending", "learning")
PRINTED = [page for page in (ROOT / "README.md", *GUIDES) if RUN_BLOCK.search(page.read_text())]
MARKED = [pytest.param(page, marks=[] if page.stem in QUICK else pytest.mark.slow, id=page.stem) for page in PRINTED]


@pytest.mark.parametrize("page", MARKED)
def test_python_blocks_of_a_page_run_as_printed(page, request, tmp_path, monkeypatch):
    if page.stem not in ("samplers", "extending", "learning"):  # samplers counts solved Sudokus
        request.getfixturevalue("shallow")
    if page.stem == "learning":  # it writes files
        monkeypatch.chdir(tmp_path)
    run_blocks(page)


def test_blocks_that_are_not_run_say_why_and_parse():
    for page in (ROOT / "README.md", *GUIDES):
        text = page.read_text()
        skipped = re.findall(r"^<!-- not run: [^\n]+ -->\n```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
        assert len(skipped) + len(RUN_BLOCK.findall(text)) == text.count("```python"), relative(page)
        for block in skipped:
            ast.parse(block)


def test_two_commands_make_their_own_environment():
    commands = re.findall(r"^python3 -m venv .*$", README, flags=re.MULTILINE)
    assert len(commands) == 2
    assert ".venv/bin/dgemma generate" in commands[0]
    assert 'dgemma = "dgemma.cli:main"' in (ROOT / "pyproject.toml").read_text()
    assert commands[1].endswith("-m pytest")
    assert "grep -m1 -E '^python3 -m venv .*pytest$' README.md" in (ROOT / ".ci/run").read_text()


def test_version_and_repository_are_the_same_in_every_file():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {project['version']}\n" in citation
    assert f"\nrepository-code: {project['urls']['Repository']}\n" in citation
    assert f"\n## {project['version']}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_pages_and_help_print_the_command_that_installs_an_extra_from_a_clone():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    texts = {page: page.read_text() for page in (*PAGES, TABLES)}
    commands = [found for text in texts.values() for found in re.findall(r"pip install [^`\n]*\[[^`\n]*?\]\S", text)]
    assert len(commands) > 5
    for command in commands:
        (names,) = re.findall(r'-e "\.\[([\w,]+)\]"', command)
        assert set(names.split(",")) <= set(extras)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_of_a_page_resolve(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    for target in targets:
        if target.startswith("https://"):
            assert re.fullmatch(r"https://[\w.-]+\.[a-z]+(/[\w./#~%-]*)?", target), target
            continue
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.exists(), f"{relative(page)} links to {target}"
        assert not anchor or anchor in anchors(linked), f"{relative(page)} links to {target}"


@pytest.mark.parametrize("page", [page for page in PAGES if page not in UNCHECKED], ids=relative)
def test_files_that_a_page_names_exist(page):
    for name in re.findall(r"`((?:[\w.-]+/)+[\w*.-]*)(?:: \w+)?`", page.read_text()):
        folders = ("", "src", "src/dgemma", "kernels", "kernels/dgemma_kernels", "kernels/benchmarks")
        if name.split("/")[0] in {"runs", "dgemma", "google", "site", ".venv", "out"}:  # written later, or on the hub
            continue
        roots = (page.parent, *(ROOT / folder for folder in folders))
        assert any(list(root.glob(name.rstrip("/"))) for root in roots), f"{relative(page)} names {name}"


def test_every_page_is_in_the_navigation_of_the_site():
    listed = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE))
    assert listed == {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}


def test_names_on_the_api_pages_exist():
    for page in (ROOT / "docs/api").glob("*.md"):
        for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), flags=re.MULTILINE):
            if name.startswith("dgemma_kernels"):
                pytest.importorskip("triton")
            owner, _, last = name.rpartition(".")
            found = hasattr(importlib.import_module(owner), last) or importlib.util.find_spec(name) is not None
            assert found, f"{relative(page)} names {name}"


def test_the_tour_of_the_site_has_a_sentence_about_every_file():
    sys.path.insert(0, str(ROOT / "docs"))
    tables = importlib.import_module("tour_tables")
    page = SimpleNamespace(file=SimpleNamespace(src_uri="tour.md"))
    tour = tables.on_page_markdown((ROOT / "docs/tour.md").read_text(), page=page)
    rows = re.findall(r"^\| `(\w+\.py)` \| (.+) \|$", tour, flags=re.MULTILINE)
    packages = (ROOT / "src/dgemma", ROOT / "kernels/dgemma_kernels")
    files = [path.name for package in packages for path in package.rglob("*.py") if path.name[:2] != "__"]
    assert sorted(name for name, _ in rows) == sorted(files)
    assert all(sentence.strip() for _, sentence in rows)


def test_the_sampler_table_has_every_sampler_with_the_noise_it_is_valid_for():
    table = (ROOT / "docs/samplers.md").read_text().split("## The sixteen samplers")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([a-z, ]+) \|", table, flags=re.MULTILINE))
    public = {name: getattr(sampling, name) for name in sampling.__all__}
    samplers = {
        name: kind for name, kind in public.items() if isinstance(kind, type) and issubclass(kind, sampling.Sampler)
    }
    del samplers["Sampler"]
    assert len(samplers) == 16
    assert {name: set(noise.split(", ")) for name, noise in rows.items()} == {
        name: set(kind.valid_for) for name, kind in samplers.items()
    }
