"""Every operation has a kernel and, next to it, a reference with the same signature."""

import importlib
import inspect
from pathlib import Path

import pytest

from dgemma_kernels import ops

OPS = Path(ops.__file__).parent
FOLDERS = sorted(path.parent.name for path in OPS.glob("*/__init__.py"))
# parameters that change speed and rounding only
TUNING = {
    "attend_patches": {"tile"},
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
def test_every_reference_has_the_parameters_of_its_kernel_which_has_an_example(folder):
    reference, twins = importlib.import_module(f"dgemma_kernels.ops.{folder}.reference"), {}
    for module in {"kernel", "float8", "adapters", "groups"} & {path.stem for path in (OPS / folder).glob("*.py")}:
        operation = importlib.import_module(f"dgemma_kernels.ops.{folder}.{module}")
        own = {n: f for n, f in vars(operation).items() if getattr(f, "__module__", "") == operation.__name__}
        twins |= {
            name: function for name, function in own.items() if inspect.isfunction(getattr(reference, name, None))
        }
    assert twins
    for name, function in twins.items():
        of_kernel = [
            name for name in inspect.signature(function).parameters if name not in TUNING.get(function.__name__, ())
        ]
        assert of_kernel == list(inspect.signature(getattr(reference, name)).parameters), name
        assert "Example: " in function.__doc__, name
