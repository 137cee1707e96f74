"""Pages are code: their Python blocks run, in order, in one namespace; the README's commands are the ones CI uses."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", ["README.md", "docs/extending.md"])
def test_python_blocks_run_as_printed(page):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    assert len(blocks) >= 5
    namespace: dict[str, object] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{page} block {number}", "exec"), namespace)


def test_the_sampler_in_the_readme_is_under_forty_lines():
    (sampler,) = re.findall(r"(class \w+\(dgemma\.Sampler\).*?)\n\n\nfor", README, flags=re.DOTALL)
    assert len(sampler.splitlines()) < 40


def test_two_commands_make_their_own_environment_and_name_files_that_exist():
    commands = re.findall(r"^python3 -m venv .*$", README, flags=re.MULTILINE)
    assert len(commands) == 2
    assert ".venv/bin/dgemma generate" in commands[0]
    assert 'dgemma = "dgemma.cli:main"' in (ROOT / "pyproject.toml").read_text()
    assert commands[1].endswith("-m pytest")
    assert "grep -m1 -E '^python3 -m venv .*pytest$' README.md" in (ROOT / ".ci/run").read_text()


def test_every_file_the_readme_names_exists():
    for name in re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.(?:py|md|txt))[:`]", README):
        assert any((root / name).exists() for root in (ROOT, ROOT / "src/dgemma")), name


def test_the_readme_lists_every_numbered_example():
    listed = set(re.findall(r"`(\d\d_[a-z_]+)`", README))
    assert listed == {path.stem for path in (ROOT / "examples").glob("[0-9]*.py")}


def test_pictures_the_readme_shows_exist():
    for name in re.findall(r"!\[[^]]*\]\(([^)]+)\)", README):
        assert (ROOT / name).is_file(), name
