"""Handler that ends the `dgemma` command without a traceback if Ctrl-C is pressed while torch is being imported.

This module is imported first: the command's own handler is imported after torch. Other programs are not affected.
"""

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
