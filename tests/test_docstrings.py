"""Docstrings start with a noun or a verb; their examples parse, and their calls match the library's signatures."""

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import dgemma

ROOT = Path(__file__).parents[1]


@cache
def modules() -> list[ModuleType]:
    found = (module.name for module in pkgutil.walk_packages(dgemma.__path__, "dgemma."))
    needs_harness = () if importlib.util.find_spec("lm_eval") else ("dgemma.eval.harness",)
    return [importlib.import_module(name) for name in found if not name.endswith(("__main__", *needs_harness))]


@cache
def names() -> dict[str, object]:
    """Return modules by name, and everything that they define."""
    known: dict[str, object] = {module.__name__.rpartition(".")[2]: module for module in modules()}
    for module in modules():
        own = {name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
        known |= {name: getattr(module, name) for name in own}
    return known | {"dgemma": dgemma}


def examples() -> Iterator[tuple[str, str]]:
    """Yield the place and the code of each example; examples with an ellipsis are skipped, because they cannot run."""
    for module in modules():
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            _, found, text = (ast.get_docstring(node) or "").partition("\nExample: ")
            for code in re.findall(r"`([^`]+)`", text.split("\n\n")[0]) if found else ():
                if "..." not in code:
                    yield f"{module.__name__}.{node.name}", " ".join(code.split())


def mismatches(code: str) -> Iterator[str]:
    """Yield calls into the library whose arguments do not match the signature."""
    for call in (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        try:
            signature = inspect.signature(eval(name if re.fullmatch(r"[\w.]+", name) else "None", names()))
        except (NameError, AttributeError, TypeError, ValueError):  # a variable of the example, or a builtin
            continue
        spread = any(isinstance(part, ast.Starred) for part in call.args) or any(k.arg is None for k in call.keywords)
        try:
            if not spread:
                signature.bind(*call.args, **{keyword.arg or "": keyword.value for keyword in call.keywords})
        except TypeError as error:
            yield f"{ast.unparse(call)}: {error}"


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of every docstring of both packages and of the benchmarks."""
    for folder in ("src", "kernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                    yield f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'module')}", text


def test_docstrings_start_with_a_noun_or_a_verb():
    question = re.compile(r"(What|Which|Whether|How|Where|When|Who)\b")
    assert not [place for place, text in docstrings() if question.match(text)]


def test_examples_parse_and_their_calls_match_signatures():
    found = list(examples())
    assert len(found) > 150
    assert not [(place, mismatch) for place, code in found for mismatch in mismatches(code)]


def test_a_call_that_does_not_match_is_found():
    assert list(mismatches("train(model, recipes.official_jax(), source, config, out='run')"))
    assert list(mismatches("generate(model, prompt, max_new_tokens=3)")) == []
