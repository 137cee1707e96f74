"""Imports have no cycles, respect the layers of folders, and are rarely inside functions."""

import ast
import functools
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = (ROOT / "src", ROOT / "kernels")

# Packages that functions may import: optional ones, slow ones, and modules that not every system has.
OPTIONAL = {"PIL", "beartype", "datasets", "gguf", "huggingface_hub", "lark", "lm_eval", "matplotlib", "outlines_core"}
OPTIONAL |= {"pydantic", "ray", "readline", "resource", "tokenizers", "torch._inductor", "tqdm", "transformers"}
# Modules of ours that functions import, each with its reason.
IN_FUNCTIONS = {
    # Showing a text must load neither Sudoku nor training, which Sudoku imports.
    "dgemma.view.board": {"dgemma.data.sudoku.encoding"},
    "dgemma.view.terminal": {"dgemma.data.sudoku"},
    # The list of checkpoints needs no torch.
    "dgemma.cli.output": {"dgemma.view.gif", "dgemma.view.html"},
    # A command line is read without torch, and mostly without NumPy.
    "dgemma.cli.parser": {"dgemma.files"},
    "dgemma.files": {"safetensors.torch"},
    # `import dgemma` loads torch only when a name is read.
    "dgemma": {"dgemma._public"},
    # Each door loads on first use, because it imports the model.
    "dgemma_kernels": {"dgemma_kernels.engine.denoiser", "dgemma_kernels.training.door"},
    # Kernels, training and the server are optional or slow.
    "dgemma.cli.training": {"dgemma_kernels"},
    "dgemma.cli.loading": {"dgemma.train", "dgemma_kernels", "dgemma_kernels.engine.weights"},
    "dgemma.cli.models": {"dgemma.serve.app", "dgemma.serve.gate"},
    "dgemma.eval.__main__": {"dgemma.eval.harness"},
    # Kernels for Hopper, which need a Triton with Gluon.
    "dgemma_kernels.ops.attention.float8": {"dgemma_kernels.ops.attention.hopper_float8"},
    "dgemma_kernels.ops.attention.kernel": {f"dgemma_kernels.ops.attention.{x}" for x in ("hopper", "hopper_shared")},
    "dgemma_kernels.ops.experts.kernel": {f"dgemma_kernels.ops.experts.{x}" for x in ("hopper", "hopper_many")},
    "dgemma_kernels.ops.grouped.kernel": {"dgemma_kernels.ops.grouped.hopper"},
}
ABOVE_RUN = {"many", "tasks", "study", "train", "data", "view", "cli"}
# The folders that a folder must not import.
FORBIDDEN = {
    "dgemma.diffusion": {"constraints", "model", "sampling", "run", "checkpoint", *ABOVE_RUN},
    "dgemma.quantization": {"diffusion", "model", "constraints", "sampling", "run", "checkpoint", *ABOVE_RUN},
    "dgemma.model": {"constraints", "checkpoint", "run", "sampling", *ABOVE_RUN},
    "dgemma.sampling": {"constraints", "model", "run", "checkpoint", *ABOVE_RUN},
    "dgemma.constraints": {"sampling", "run", *ABOVE_RUN},
    "dgemma.run": ABOVE_RUN,
    "dgemma.many": {"tasks", "study", "train", "data", "view", "cli"},
    "dgemma.tasks": {"study", "train", "data", "view", "cli"},
    "dgemma.study": {"train", "data", "view", "cli"},
    "dgemma.checkpoint": {"sampling", "run", *ABOVE_RUN},
    "dgemma.train": {"tasks", "study", "data", "view", "cli"},
    "dgemma.data": {"view", "cli"},
    "dgemma.view": {"serve", "cli", "eval"},
    "dgemma.serve": {"study", "train", "data", "cli", "eval"},
    "dgemma.eval": {"view", "serve", "cli"},
    "dgemma_kernels.formats": {"ops", "engine"},
    "dgemma_kernels.ops": {"engine", "training"},
    "dgemma_kernels.engine": {"training"},
}
# Cycles may contain only these imports.
IN_CYCLES = {
    ("dgemma", "dgemma._public"),  # reading a public name imports its module
    ("dgemma_kernels", "dgemma_kernels.engine.denoiser"),
    ("dgemma_kernels", "dgemma_kernels.training.door"),
}


@functools.cache
def modules() -> dict[str, Path]:
    found = {}
    for source in SOURCES:
        for path in sorted(source.glob("dgemma*/**/*.py")):
            parts = path.relative_to(source).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def targets(node: ast.AST) -> Iterator[str]:
    """Yield the modules that an import statement, or a call of `import_module` with a literal, names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "Imports are absolute."
        for alias in node.names:
            submodule = f"{node.module}.{alias.name}"
            yield submodule if submodule in modules() else str(node.module)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "import_module":
        yield from (name.value for name in node.args if isinstance(name, ast.Constant))


def imports(node: ast.AST, *, in_function: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield each imported module, and True if it is imported inside a function (not in a TYPE_CHECKING block)."""
    yield from ((target, in_function) for target in targets(node))
    inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for child in ast.iter_child_nodes(node):
        yield from imports(child, in_function=inside)


@functools.cache
def imports_by_module() -> dict[str, list[tuple[str, bool]]]:
    return {name: list(imports(ast.parse(path.read_text()))) for name, path in modules().items()}


def cycle(found: dict[str, list[tuple[str, bool]]]) -> str | None:
    """Return a cycle of imports, those of functions included. An import also imports the packages around a module."""
    graph = {
        name: {
            package
            for target, _ in targets
            if (name, target) not in IN_CYCLES
            for package in packages(target)
            if package in found and not f"{name}.".startswith(f"{package}.")  # its own packages are already imported
        }
        for name, targets in found.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " -> ".join(reversed(error.args[1]))
    return None


def packages(module: str) -> list[str]:
    """Return the packages around a module, and the module itself."""
    parts = module.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def test_modules_have_no_import_cycles_not_even_through_functions_and_packages():
    assert len(modules()) > 150
    assert cycle(imports_by_module()) is None


def test_a_cycle_through_a_function_and_a_package_is_detected():
    of_function, of_package = [("b.c", True)], [("a", False)]
    assert cycle({"a": of_function, "b": of_package, "b.c": []}) in ("a -> b -> a", "b -> a -> b")
    assert cycle({"a": of_function, "b": [("b.c", False)], "b.c": []}) is None


@pytest.mark.parametrize("function", ["import_module", "importlib.import_module"])
def test_an_import_inside_a_function_or_by_a_function_is_detected(function):
    script = "if TYPE_CHECKING:\n    from dgemma.run import plan\ndef f():\n    from dgemma import view"
    assert list(imports(ast.parse(script))) == [("dgemma.run.plan", False), ("dgemma.view", True)]
    script = f"def f(name):\n    {function}('dgemma.view')\n    {function}(name)\n{function}('dgemma.run')"
    assert list(imports(ast.parse(script))) == [("dgemma.view", True), ("dgemma.run", False)]


def test_functions_import_only_what_is_listed_with_a_reason():
    found = {name: {target for target, inside in every if inside} for name, every in imports_by_module().items()}
    ours = {
        name: {target for target in targets if not OPTIONAL & {*packages(target)}} for name, targets in found.items()
    }
    assert {name: targets for name, targets in ours.items() if targets} == IN_FUNCTIONS


def test_folders_import_only_folders_below_them():
    wrong = []
    for name, found in imports_by_module().items():
        folder = ".".join(name.split(".")[:2])
        for target, in_function in found:
            top, _, rest = target.partition(".")
            below = rest.split(".")[0] not in FORBIDDEN.get(folder, set())
            if top == folder.split(".")[0] and not below and not in_function:
                wrong.append(f"{name} -> {target}")
            if folder.split(".")[0] == "dgemma" and top == "dgemma_kernels":
                assert in_function, f"{name} must work without Triton"
    assert wrong == []


PLAIN = ("diffusion", "sampling", "quantization", "model", "constraints", "run", "many", "tasks", "train", "checkpoint")
# Autograd functions in these folders, each with its reason. Those that only save time are in `dgemma_kernels.training`.
GRADIENTS = {
    ("dgemma.quantization.weights", "_DecodedProduct"),  # keeps codes: decoded weights would not fit into memory
    ("dgemma.train.recipes", "_WithSlope"),  # the gradient of a loss that is never computed
    ("dgemma.train.distributed", "_Exchange"),  # between processes
}


def test_plain_folders_import_no_kernels_and_define_no_gradient_for_speed():
    gradients = set()
    for name, path in modules().items():
        if not name.startswith(tuple(f"dgemma.{folder}" for folder in PLAIN)):
            continue
        assert not any(target.startswith("dgemma_kernels") for target, _ in imports_by_module()[name]), name
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and any("autograd" in ast.unparse(base) for base in node.bases):
                gradients.add((name, node.name))
    assert gradients == GRADIENTS


# Files in these folders that branch on the device, each with its reason. What only saves time is behind a door.
DEVICE_BRANCHES = {
    "dgemma.model.diffusion",  # tensors on the "meta" device have no values
    "dgemma.model.attention",  # a bug of torch's attention on GPUs
    "dgemma.train.batch",  # reading lengths would wait for a GPU; page-locked memory exists only for one
    "dgemma.run.arguments",  # a GPU and a CPU report their memory in different ways
    "dgemma.train.log",  # the same
}


def device_branches(node: ast.AST) -> list[str]:
    """Return each comparison of a device's type, and each `is_cuda`, as code."""
    compared = [n for n in ast.walk(node) if isinstance(n, ast.Compare) and "device.type" in ast.unparse(n)]
    read = [n for n in ast.walk(node) if isinstance(n, ast.Attribute) and n.attr in ("is_cuda", "is_cpu")]
    return [ast.unparse(branch) for branch in compared + read]


def test_plain_folders_branch_on_the_device_only_where_a_reason_is_given():
    plain = {name: path for name, path in modules().items() if name.startswith(tuple(f"dgemma.{x}" for x in PLAIN))}
    assert {name for name, path in plain.items() if device_branches(ast.parse(path.read_text()))} == DEVICE_BRANCHES
    script = "y = fast(x) if x.device.type == 'cuda' or x.is_cuda else x"
    assert device_branches(ast.parse(script)) == ["x.device.type == 'cuda'", "x.is_cuda"]


def test_nothing_imports_the_top_of_the_package():
    assert [name for name, found in imports_by_module().items() if ("dgemma", False) in found] == []
