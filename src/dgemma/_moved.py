"""Module paths and class names of earlier versions: each leads to its replacement with a DeprecationWarning.

An import fails, and names the replacement, if a function now has the module's name or if several modules replace it.
"""

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_FOLDERS = {
    "checkpoint": "stored_sizes tokenizer",
    "diffusion": "draws noise prediction schedule state",
    "model": "config gemma4 presets",
    "run": "archive arguments changes plan records trajectory",
    "tasks": "guidance",
}
MOVED = {f"dgemma.{name}": f"dgemma.{folder}.{name}" for folder, names in _FOLDERS.items() for name in names.split()}
MOVED |= {
    "dgemma.causal": "dgemma.tasks.autoregressive",
    "dgemma.denoiser": "dgemma.model.denoiser",
    "dgemma.progress": "dgemma.printing",
    "dgemma.serve.trial": "dgemma.constraints.trial",
    "dgemma.train.balance": "dgemma.train.recipes",
    "dgemma.train.budget": "dgemma.train.loop",
    "dgemma.train.description": "dgemma.train.checkpoints",
    "dgemma.train.expert_parallel": "dgemma.train.distributed",
    "dgemma.train.feed": "dgemma.train.batch",
    "dgemma.train.fused": "dgemma.model.fused",
    "dgemma.train.initial": "dgemma.train.recipes",
    "dgemma.train.interrupt": "dgemma.train.loop",
    "dgemma.train.lock": "dgemma.train.checkpoints",
    "dgemma.train.lora.expert_products": "dgemma.train.lora.experts",
    "dgemma.train.lora.files": "dgemma.train.lora",
    "dgemma.train.lora.settings": "dgemma.train.lora.linear",
    "dgemma.train.noising": "dgemma.train.canvases",
    "dgemma.train.packed": "dgemma.train.one_pass",
    "dgemma.train.readers": "dgemma.train.one_pass",
    "dgemma.train.replay": "dgemma.train.update",
    "dgemma.train.sharded_state": "dgemma.train.parallel",
    "dgemma.train.state_files": "dgemma.train.parallel",
    "dgemma.train.stopping": "dgemma.train.loop",
}
REPLACED = {
    "dgemma.generate": "dgemma.run.generate",
    "dgemma.infill": "dgemma.tasks.infill",
    "dgemma.observe": "dgemma.study.observe",
    "dgemma.sampling.named": "dgemma.values and dgemma.run.defaults",
    "dgemma.slots": "dgemma.tasks.slots",
    "dgemma.sweep": "dgemma.study.sweep",
    "dgemma.train.muon": "dgemma.train.optimizer",
    "dgemma.train.records": "dgemma.train.log and dgemma.train.objective",
    "dgemma.train.train_for": "TrainConfig(minutes=...)",  # a function, imported with `from dgemma.train import`
}


class _Finder:
    """Finds the old paths. It is also their loader."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in MOVED or name in REPLACED else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None: the import system then makes an empty module, which `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        if old in REPLACED:
            raise ImportError(f"{old} was replaced by {REPLACED[old]}. Change the import.")
        warnings.warn(f"{old} is now {MOVED[old]}. Change the import.", DeprecationWarning, stacklevel=2)
        sys.modules[old] = importlib.import_module(MOVED[old])


def earlier_names(module: str, **names: str) -> Callable[[str], Any]:
    """Return a module's `__getattr__`, which leads from earlier names of its classes to the current ones.

    Example: `__getattr__ = earlier_names(__name__, Replay="ReplayPage")`.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        message = f"{module}.{name} is now {names[name]}. Change the name."
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[module], names[name])

    return find


sys.meta_path.append(_Finder())
