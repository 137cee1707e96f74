"""No module of the kernels reads a private name of another module."""

import ast
from pathlib import Path

import dgemma_kernels

KERNELS = Path(dgemma_kernels.__file__).parent
FOREIGN = {
    *("_C", "_cuda_endAllocateToPool", "_cuda_releasePool", "_foreach_copy_", "_modules", "_scaled_mm"),  # of torch
    *("_convert_float", "_patch_lang_tensor", "_reinterpret"),  # of Triton
    *("_asdict", "_replace"),  # of a NamedTuple
}


def private_names(source: str) -> tuple[set[str], set[str]]:
    """Return the private names that a module defines, and those that it reads from another object or module."""
    defined, read = set(), set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                defined.add(name)
            case ast.Attribute(attr=name, value=ast.Name(id="self"), ctx=ast.Store()):
                defined.add(name)
            case ast.Attribute(attr=name):
                read.add(name)
            case ast.ImportFrom(names=names):
                read |= {alias.name for alias in names}
    return set(filter(is_private, defined)), set(filter(is_private, read))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def test_no_module_of_the_kernels_reads_a_private_name_of_another_module():
    found = {path: private_names(path.read_text(encoding="utf-8")) for path in KERNELS.rglob("*.py")}
    others = {str(path.relative_to(KERNELS)): read - defined for path, (defined, read) in found.items()}
    assert {path: names - FOREIGN for path, names in others.items() if names - FOREIGN} == {}
    assert set().union(*others.values()) == FOREIGN  # each of them is still used


def test_private_names_are_found():
    source = "from a import _b\nclass C:\n    def _d(self): self._e = x._f + self._e + g._d.__doc__"
    assert private_names(source) == ({"_d", "_e"}, {"_b", "_d", "_e", "_f"})
