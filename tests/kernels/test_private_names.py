"""No module of the kernels reads a private name of another module."""

import ast
from pathlib import Path

import dgemma
import dgemma_kernels

KERNELS = Path(dgemma_kernels.__file__).parent
SOURCES = [*KERNELS.rglob("*.py"), *Path(dgemma.__file__).parent.rglob("*.py")]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(tree: ast.AST) -> tuple[set[str], dict[str, int]]:
    """Return the private names that a module defines, and the lines where it reads or imports a private name."""
    defined, read = set(), {}
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                defined.add(name)
            case ast.Attribute(attr=name, value=ast.Name(id="self"), ctx=ast.Store()):
                defined.add(name)
            case ast.Attribute(attr=name, lineno=line):
                read[name] = line
            case ast.ImportFrom(names=names, lineno=line):
                read |= {alias.name: line for alias in names}
    return set(filter(is_private, defined)), {name: line for name, line in read.items() if is_private(name)}


def test_no_module_of_the_kernels_reads_a_private_name_of_another_module():
    names = {path: private_names(ast.parse(path.read_text(encoding="utf-8"))) for path in SOURCES}
    # Names that none of our modules defines belong to torch, Triton or Python.
    ours = set().union(*(defined for defined, _ in names.values())) - {"_replace", "_asdict"}  # of a NamedTuple
    found = [
        f"{path.relative_to(KERNELS)}:{line} {name}"
        for path, (defined, read) in names.items()
        if path.is_relative_to(KERNELS)
        for name, line in read.items()
        if name in ours - defined
    ]
    assert names[KERNELS / "engine" / "cache.py"][0] >= {"_FREE_SHARE", "_step_up", "_buffers", "_lengths"}
    assert found == []
