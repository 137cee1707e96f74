"""Every operation has a kernel and, next to it, a reference with the same signature."""

import importlib
import inspect
from pathlib import Path

import pytest

from dgemma_kernels import ops

FOLDERS = sorted(path.parent.name for path in Path(ops.__file__).parent.glob("*/__init__.py"))
# parameters that change speed and rounding only
TUNING = {
    "attention": {"kernel", "tile", "num_splits", "part", "position", "rotary_pairs"},
    "dense_mlp": {"config"},
    "expert_gate_up": {"config"},
    "expert_down": {"config"},
    "layer_tail": {"alone"},
    "multiply_experts": {"config"},
    "multiply_row": {"early"},
    "route": {"one_order"},
}


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_reference_has_the_parameters_of_its_kernel(folder):
    operation = importlib.import_module(f"dgemma_kernels.ops.{folder}")
    reference = importlib.import_module(f"dgemma_kernels.ops.{folder}.reference")
    twins = {
        name: getattr(reference, name)
        for name in operation.__all__
        if inspect.isfunction(getattr(reference, name, None))
    }
    assert twins
    for name, twin in twins.items():
        parameters = inspect.signature(getattr(operation, name)).parameters
        of_kernel = [parameter for parameter in parameters if parameter not in TUNING.get(name, ())]
        assert of_kernel == list(inspect.signature(twin).parameters), name


@pytest.mark.parametrize("folder", FOLDERS)
def test_public_functions_of_a_kernel_have_a_docstring_with_an_example(folder):
    operation = importlib.import_module(f"dgemma_kernels.ops.{folder}")
    functions = [getattr(operation, name) for name in operation.__all__ if inspect.isfunction(getattr(operation, name))]
    assert functions
    assert [function.__name__ for function in functions if "Example: " not in (function.__doc__ or "")] == []
