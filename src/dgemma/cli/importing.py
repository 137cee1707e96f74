"""Late imports: a command imports torch after it has read its options."""

import gc
import importlib
import os
import sys
from typing import Any


def import_quickly(module: str) -> Any:
    """Import a module, and torch with it, with settings that must be made before torch is imported.

    Example: `import_quickly("dgemma.values").parse_sampler("threshold")`.
    """
    if "torch" in sys.modules:
        return importlib.import_module(module)
    # Idle threads sleep instead of spinning, which halves the time of a small model on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Modules stay until the process ends. Looking for garbage among them would take half a second.
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        gc.freeze()
        gc.enable()
