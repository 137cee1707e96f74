"""Settings of the `dgemma` command that must be made before torch is imported. Other programs are not affected.

Ctrl-C during the import ends the command without a traceback. Idle threads sleep instead of spinning, which halves the
time of a small model on a busy machine.
"""

import os
import sys
from pathlib import Path
from types import TracebackType


def _is_command() -> bool:
    """Return whether this process is `dgemma …` or `python -m dgemma …`."""
    words = sys.orig_argv
    if sys.argv[:1] == ["-m"] and "-m" in words:  # sys.argv[0] is "-m" until Python has found the module
        return words[words.index("-m") + 1 :][:1] == ["dgemma"]
    return bool(sys.argv) and Path(sys.argv[0]).stem == "dgemma"


def _end_quietly(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
        return
    print("\nStopped.", file=sys.stderr)
    sys.exit(130)


if _is_command():
    sys.excepthook = _end_quietly
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
