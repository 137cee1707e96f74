"""A lock on the folder of a training run. The operating system releases it when the process ends, for any reason."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dgemma.files import writing

try:
    import fcntl
except ImportError:  # not on Windows, where runs are not locked
    fcntl = None  # type: ignore[assignment]

_LOCK_FILE = ".lock"
_owners: dict[Path, int] = {}  # folders that this process has locked, and the threads that did it


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is created if it is missing; raise ValueError if another run holds it.

    A thread that holds the lock may take it again.

    Example: `with lock_folder(Path("run")): ...`.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    key = folder.resolve()
    if fcntl is None or _owners.get(key) == threading.get_ident():
        yield
        return
    with writing(folder / _LOCK_FILE):
        descriptor = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"train out must be a folder that no other run is using, got {folder}. Wait for that run, or choose "
                "another folder."
            ) from None
        _owners[key] = threading.get_ident()
        yield
    finally:
        _owners.pop(key, None)
        os.close(descriptor)
