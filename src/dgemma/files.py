"""Reading and writing of files, for the whole library: bounded reads of regular files, and atomic writes.

Readers open regular files only, so that a pipe or a device neither hangs nor fills the memory. They check sizes, dtypes
and shapes against the length of the file before anything is allocated, and they never unpickle. Writers write next to
the target, flush and rename. After a failure the old file is unchanged, no temporary file is left, and the error is one
line.
"""

import errno
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open

from dgemma.printing import printable

if TYPE_CHECKING:
    from torch import Tensor

_MOST_BYTES = 1 << 26  # limit for files that are read whole; Gemma's tokenizer.json has half of that
_MOST_LEVELS = 64  # of nested JSON
_CHUNK = 1 << 24  # bytes read at a time
_TEMPORARY = re.compile(r"\.dgemma-(\d+)-[0-9a-f]{16}\.new")


class WriteError(OSError):
    """A file could not be written; the message is one line."""

    def __str__(self) -> str:
        return str(self.strerror)


def open_file(path: str | Path) -> BinaryIO:
    """Open a regular file to read its bytes; raise for a folder, a pipe or a device instead of waiting for it."""
    path = Path(path)
    try:
        # Without O_NONBLOCK, opening a pipe waits for a writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except FileNotFoundError:
        raise FileNotFoundError(f"{_name(path)} does not exist. Check the path.") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{_name(path)} cannot be opened: {reason}. Check the path.") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{_name(path)} must be a regular file, got a folder, a pipe or a device.")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: str | Path, *, most: int = _MOST_BYTES) -> bytes:
    """Read a whole file of at most `most` bytes."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"{_name(path)} must have at most {most:,} bytes, got {size:,}. Check the file.")
        return file.read(size)


def crc32_of(path: str | Path) -> int:
    """Return the CRC-32 of a file."""
    crc32 = 0
    with open_file(path) as file:
        while chunk := file.read(_CHUNK):
            crc32 = zlib.crc32(chunk, crc32)
    return crc32


def read_text(path: str | Path, *, most: int = _MOST_BYTES) -> str:
    """Read a whole UTF-8 file."""
    try:
        return read_bytes(path, most=most).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{_name(path)} must be UTF-8, got {error.reason} at byte {error.start}.") from None


def read_json(path: str | Path) -> dict[str, Any]:
    """Read a file that holds one JSON object."""
    return parse_json(read_text(path), _name(path))


def parse_json(text: str, owner: str) -> dict[str, Any]:
    """Return the JSON object in a text; `owner` names its place in errors."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{owner} is not valid JSON ({printable(str(error))}). Download or save it again.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{owner} must hold a JSON object, got {type(content).__name__}. Download or save it again.")
    level: list[Any] = [content]
    depth = 0
    while level:
        depth += 1
        lists = [value.values() if isinstance(value, dict) else value for value in level]
        level = [item for items in lists for item in items if isinstance(item, dict | list)]
    if depth > _MOST_LEVELS:  # later a copy, a repr or a comparison would exceed Python's stack
        raise ValueError(f"{owner} must nest at most {_MOST_LEVELS} levels, got {depth}. Download or save it again.")
    return content


def read_json_lines(path: str | Path) -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of each line of a file of JSON lines, without empty lines."""
    with open_file(path) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError) as error:
                    reason = printable(str(getattr(error, "msg", error)))
                    start = line.strip()[:60].decode(errors="replace")
                    got = f"{_name(path)}:{number} must be JSON, got {start!r}: {reason}."
                    raise ValueError(f"{got} Mend or delete this line.") from None
                yield f"{_name(path)}:{number}", value


@contextmanager
def open_tensors(path: str | Path, *, device: str = "cpu") -> Iterator[Any]:
    """Open a safetensors file as `safe_open` does; raise ValueError for a damaged one.

    safetensors checks every offset, shape and dtype against the length of the file.
    """
    open_file(path).close()
    try:
        with safe_open(str(path), framework="pt", device=device) as file:
            unsafe = next((name for name in file.keys() if printable(name) != name), None)  # noqa: SIM118 (no mapping)
            if unsafe is not None:
                raise ValueError(f"{_name(path)} must name tensors in printable characters, got {unsafe!r}.")
            yield file
    except ValueError as error:
        if "UntypedStorage" in str(error):  # Ctrl-C inside a read, which torch reports in this way
            raise KeyboardInterrupt from None
        raise
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{_name(path)} is truncated or damaged ({printable(str(error))}). Download or save it again."
        ) from None


def read_array(path: str | Path, *, dtypes: Collection[str]) -> np.ndarray:
    """Read a NumPy .npy file whose dtype is one of `dtypes`."""
    open_file(path).close()
    try:
        # Mapped, so that a header with a huge shape allocates nothing: the file is too short for it.
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        kind = array.dtype
    except Exception as error:  # the header is a Python literal, whose parser can raise anything
        raise ValueError(f"{_name(path)} is not a NumPy array ({printable(str(error))}).") from None
    if kind.name not in dtypes or array.offset + array.nbytes != os.path.getsize(path):
        rule = f"must hold {' or '.join(dtypes)} values that fill it"
        raise ValueError(f"{_name(path)} {rule}, got {kind} of shape {array.shape}.")
    return np.array(array)


def map_array(path: str | Path, *, dtype: str, count: int) -> np.ndarray:
    """Memory-map a file of exactly `count` numbers, read-only."""
    with open_file(path) as file:
        size, needed = os.fstat(file.fileno()).st_size, count * np.dtype(dtype).itemsize
        if size != needed:
            raise ValueError(f"{_name(path)} must have {needed:,} bytes, got {size:,}. Write it again.")
        return np.memmap(file, dtype=dtype, mode="r", shape=(count,)) if count else np.empty(0, dtype)


@contextmanager
def new_file(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder. After the block its bytes are flushed and it replaces `path`.

    If the block raises, the temporary file is removed and the old file stays. Errors of the operating system
    become a `WriteError`. A device such as /dev/null gets the bytes, because it cannot be replaced.

    Example: `with new_file("log.csv") as new: new.write_text(text)`.
    """
    target = Path(os.path.realpath(path))
    if not target.exists() or target.is_file():
        with new_files([target]) as (new,):
            yield new
        return
    with writing(path), tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "new"
        descriptor = os.open(target, os.O_WRONLY | os.O_NONBLOCK)  # a pipe that nobody reads is refused
        os.set_blocking(descriptor, True)
        with os.fdopen(descriptor, "wb") as device, (Path(folder) / "new").open("rb") as content:
            shutil.copyfileobj(content, device)


@contextmanager
def new_files(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Do what `new_file` does for several files of one folder: all are flushed before the first replaces its target.

    They replace their targets in the order of `paths`. If the disk is full, no target changes. If the process is
    killed in between, the first targets are new and the others old.
    """
    folder = paths[0].parent
    new = [folder / f".dgemma-{os.getpid()}-{secrets.token_hex(8)}.new" for _ in paths]
    with writing(paths[0] if len(paths) == 1 else folder):
        try:
            modes = []
            for path, target in zip(new, paths, strict=True):
                if target.is_dir():  # it cannot be replaced
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
                path.touch()
                modes.append(stat.S_IMODE((target if target.exists() else path).stat().st_mode))
            yield new
            for path, mode in zip(new, modes, strict=True):
                path.chmod(mode)  # some writers make a file that other users cannot read
                flush(path)
            for path, target in zip(new, paths, strict=True):
                os.replace(path, target)
        except BaseException:
            for path in new:
                with suppress(OSError):
                    path.unlink(missing_ok=True)
            raise
        flush(folder)


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Turn errors of the operating system inside the block into a `WriteError` that names `path`."""
    name = _name(path)
    try:
        yield
    except (WriteError, BrokenPipeError):
        raise
    except Exception as error:
        found = re.search(r"\(os error (\d+)\)", str(error))  # safetensors and tokenizers report errors as text
        code = int(found[1]) if found else getattr(error, "errno", None)
        if code is None:  # not an error of the operating system
            raise
        if code == errno.ENOENT:
            folder = printable(str(Path(path).parent))
            raise FileNotFoundError(
                f"{name} cannot be written: its folder does not exist. Create {folder} first."
            ) from None
        reason = os.strerror(code) if found else getattr(error, "strerror", None) or str(error)
        fix = " Free some space or choose another folder." if code in (errno.ENOSPC, errno.EDQUOT) else ""
        sentence = f"{name} could not be written: {printable(reason)}. Existing files are unchanged.{fix}"
        raise WriteError(code, sentence) from error


def check_writable(path: str | Path) -> None:
    """Raise an OSError unless a file can be written. A new file is removed again."""
    target = Path(os.path.realpath(path))  # of a link, the new file is removed and not the link
    is_new = not target.exists()
    target.open("ab").close()
    if is_new:
        target.unlink()


def clear_temporaries(folder: Path) -> None:
    """Remove the temporary files that killed processes of this machine left in a folder."""
    for path in folder.glob(".dgemma-*.new"):
        found = _TEMPORARY.fullmatch(path.name)
        if found and not _is_running(int(found[1])):
            path.unlink(missing_ok=True)


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write a file atomically."""
    with new_file(path) as new:
        new.write_bytes(data)


def write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 file atomically."""
    write_bytes(path, text.encode())


def write_json(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object atomically."""
    with new_file(path) as new:
        fill_json(new, content)


def write_tensors(path: str | Path, tensors: Mapping[str, "Tensor"], *, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file atomically. Unlike with `save_file`, other users can read it if the umask permits."""
    with new_file(path) as new:
        fill_tensors(new, tensors, metadata=metadata)


def fill_json(new: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object to a path that `new_file` or `new_files` yielded."""
    new.write_text(json.dumps(content, indent=2) + "\n")


def fill_tensors(new: Path, tensors: Mapping[str, "Tensor"], *, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file to a path that `new_file` or `new_files` yielded."""
    from safetensors.torch import save_file  # not at the top, because it imports torch

    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    needed, free = sum(tensor.nbytes for tensor in whole.values()), shutil.disk_usage(new.parent).free
    if needed > free:
        raise OSError(errno.ENOSPC, f"{needed:,} bytes are needed, {free:,} are free")
    save_file(whole, new, metadata=metadata)


def flush(path: Path) -> None:
    """Flush the bytes of a file, or the names in a folder, to the disk."""
    if path.is_dir() and os.name != "posix":  # Windows cannot open a folder
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _name(path: str | Path) -> str:
    """The path as an error message shows it."""
    return printable(str(path))


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # for example another user's process
        pass
    return True
