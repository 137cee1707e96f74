"""Files: bounded reads of regular files, atomic writes, and one sentence for every failure."""

import errno
import os
import shutil
import stat
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dgemma import files
from dgemma.printing import one_line, printable, to_json


def read_integers(path):
    return files.read_array(path, dtypes=("int64",))


@pytest.mark.parametrize("read", [files.read_bytes, files.read_json, read_integers])
def test_pipes_devices_and_folders_are_refused_without_waiting(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "endless", "folder"):
        with pytest.raises(ValueError, match=rf"{name} must be a regular file"):
            read(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="nothing does not exist"):
        read(tmp_path / "nothing")


def test_a_large_file_is_refused_before_it_is_read(tmp_path):
    with (tmp_path / "sparse.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="must have at most 67,108,864 bytes, got 1,099,511,627,776"):
        files.read_json(tmp_path / "sparse.json")


@pytest.mark.parametrize("text", ["[" * 100_000, "[1]", "{", '{"a": ' + "9" * 5000 + "}"])
def test_json_that_is_no_object_is_refused_by_name(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=r"a\.json (is not valid JSON|must hold a JSON object)"):
        files.read_json(tmp_path / "a.json")


def test_an_array_must_fill_its_file_before_anything_is_allocated(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(6).reshape(2, 3))
    assert files.read_array(tmp_path / "a.npy", dtypes=("int64",)).tolist() == [[0, 1, 2], [3, 4, 5]]
    data = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "a.npy").write_bytes(data.replace(b"(2, 3)", b"(2, 9)"))
    with pytest.raises(ValueError, match=r"is not a NumPy array \(mmap length is greater than file size"):
        files.read_array(tmp_path / "a.npy", dtypes=("int64",))
    np.save(tmp_path / "o.npy", np.array([print]), allow_pickle=True)
    with pytest.raises(ValueError, match="is not a NumPy array"):
        files.read_array(tmp_path / "o.npy", dtypes=("int64",))


def test_a_tensor_name_with_control_characters_is_refused(tmp_path):
    files.write_tensors(tmp_path / "a", {"\x1b]0;title\x07": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"printable characters, got '\\x1b"), files.open_tensors(tmp_path / "a"):
        pass


def fill_the_disk(path):
    with files.new_file(path) as new:
        new.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_failed_write_leaves_the_old_file_and_no_temporary_one(tmp_path, monkeypatch):
    files.write_text(tmp_path / "a.txt", "old")
    with pytest.raises(OSError, match=r"a\.txt could not be written: No space left .*unchanged\. Free some") as caught:
        fill_the_disk(tmp_path / "a.txt")
    assert caught.value.errno == errno.ENOSPC
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(OSError, match="400 bytes are needed, 10 are free"):
        files.write_tensors(tmp_path / "b", {"a": torch.zeros(100)})


def test_several_files_are_written_before_the_first_is_replaced(tmp_path):
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.write_text("old")
    with pytest.raises(FileNotFoundError), files.new_files(paths) as (a, b):
        (a.write_text("new"), b.with_name("nothing").read_text())
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="Is a directory"), files.new_files([paths[0], tmp_path / "folder"]) as (a, _):
        a.write_text("new")
    assert [path.read_text() for path in paths] == ["old", "old"]


def test_a_written_file_keeps_its_mode_and_its_link(tmp_path):
    files.write_text(tmp_path / "a", "one")
    (tmp_path / "a").chmod(0o640)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    files.write_tensors(tmp_path / "link", {"x": torch.zeros(1)})
    assert (tmp_path / "link").is_symlink()
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_a_device_is_written_and_not_replaced():
    files.write_text("/dev/null", "text")
    files.write_tensors("/dev/null", {"a": torch.zeros(3)})
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_pipe_that_nobody_reads_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="pipe could not be written: No such device"):
        files.write_text(tmp_path / "pipe", "text")


def test_temporary_files_of_killed_processes_are_removed_and_those_of_living_ones_stay(tmp_path):
    script = "import os; print(os.getpid())"
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, timeout=60)
    dead = tmp_path / f".dgemma-{int(finished.stdout)}-{'0' * 16}.new"
    alive = tmp_path / f".dgemma-{os.getpid()}-{'0' * 16}.new"
    for path in (dead, alive):
        path.touch()
    files.clear_temporaries(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [alive.name]


def test_text_from_outside_reaches_no_terminal_raw():
    hostile = "\x1b]0;title\x07\x9b2J\u202e\ud800 é語"
    for safe in (printable(hostile), one_line(hostile), to_json({hostile: hostile})):
        assert safe.isprintable()
        assert "é語" in safe
    assert len(one_line("x" * 5000)) == 1000
