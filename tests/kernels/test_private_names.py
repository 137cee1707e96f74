"""No module reads or writes a private name of another module."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOREIGN = {
    "src/dgemma": {
        *("_parameters", "_version"),  # of torch
        *("_foreach_add_", "_foreach_div_", "_foreach_lerp", "_foreach_lerp_", "_foreach_mul_"),
        "_foreach_norm",
        *("_asdict", "_fields", "_replace"),  # of a NamedTuple
    },
    "kernels/dgemma_kernels": {
        *("_compiled_call_impl", "_dynamo", "_foreach_add_", "_foreach_zero_"),  # of torch
        *("_C", "_cuda_endAllocateToPool", "_cuda_releasePool", "_foreach_copy_", "_modules", "_scaled_mm"),  # of torch
        *("_convert_float", "_patch_lang_tensor", "_reinterpret"),  # of Triton
        "_replace",  # of a NamedTuple
    },
}


def private_names(source: str) -> tuple[set[str], set[str]]:
    """Return the private names that a module defines, and those that it uses of another object.

    The other object may be a module. Names of `self` may come from a base class, so they are not counted as used.
    """
    defined, used = set(), set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                defined.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, value=ast.Name(id="self")):
                defined.add(name)
            case ast.Attribute(attr=name):
                used.add(name)
            case ast.ImportFrom(names=names):
                used |= {alias.name for alias in names}
    defined, used = (set(filter(is_private, names)) for names in (defined, used))
    return defined, used - defined


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


@pytest.mark.parametrize("package", FOREIGN)
def test_no_module_uses_a_private_name_of_another_module(package):
    paths = (ROOT / package).rglob("*.py")
    found = {str(path): private_names(path.read_text(encoding="utf-8"))[1] for path in paths}
    assert {path: names - FOREIGN[package] for path, names in found.items() if names - FOREIGN[package]} == {}
    assert set().union(*found.values()) == FOREIGN[package]  # each of them is still used


def test_private_names_are_found():
    source = "from a import _b\nclass C:\n    def _d(self): self._e = x._f + self._g + g._d.__doc__\nh._i[0] = j._k = 1"
    assert private_names(source) == ({"_d", "_e", "_g"}, {"_b", "_f", "_i", "_k"})
