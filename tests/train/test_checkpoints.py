"""A checkpoint is complete or absent, whenever the process is killed. One run at a time uses a folder."""

import os
import shutil
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dgemma.train.checkpoints import Checkpoints, lock_folder
from dgemma.train.parallel import Parallel


class Killed(BaseException):
    """Simulates kill -9: nothing catches it and nothing cleans up."""


def checkpoints(folder: Path, parallel: Parallel | None = None, keep_last: int = 2) -> Checkpoints:
    return Checkpoints(folder=folder, keep_last=keep_last, parallel=parallel or Parallel())


def state(step: int) -> dict[str, torch.Tensor]:
    return {"model.a": torch.full((3,), float(step)), "optimizer.a.step": torch.tensor(step)}


def read(saved: Checkpoints) -> int:
    """Return the step of the last checkpoint, after checking that all its parts agree."""
    latest = saved.latest()
    assert latest is not None
    tensors = state(-1)
    saved.load(latest, tensors)
    step = saved.read_run(latest)["step"]
    assert tensors["model.a"].tolist() == [step] * 3
    assert tensors["optimizer.a.step"] == step
    assert latest.name == f"step-{step:06d}"
    return step


def test_only_the_last_checkpoints_stay(tmp_path):
    saved = checkpoints(tmp_path, keep_last=2)
    for step in (0, 5, 10, 1_000_000):
        saved.save(step, state(step), {"step": step})
    assert saved.steps() == [10, 1_000_000]
    assert read(saved) == 1_000_000


def test_death_at_any_call_to_the_file_system_leaves_the_old_checkpoint_or_the_new(tmp_path, monkeypatch):
    outcomes = []
    for deadly_call in range(100):
        saved = checkpoints(tmp_path / str(deadly_call), keep_last=1)
        saved.save(1, state(1), {"step": 1})
        calls = []

        def dying(call, deadly_call=deadly_call, calls=calls):
            def run(*args, **kwargs):
                calls.append(call)
                if len(calls) - 1 == deadly_call:
                    raise Killed
                return call(*args, **kwargs)

            return run

        with monkeypatch.context() as patch:
            for owner, name in ((os, "rename"), (os, "replace"), (os, "fsync"), (shutil, "rmtree"), (Path, "mkdir")):
                patch.setattr(owner, name, dying(getattr(owner, name)))
            try:
                saved.save(2, state(2), {"step": 2})
                break
            except Killed:
                pass
        outcomes.append(read(saved))
        # The first rename makes it valid. The second begins to remove the old one.
        assert outcomes[-1] == (2 if calls[:deadly_call].count(os.rename) else 1)
        saved.clear_unfinished()
        assert not list(saved.folder.glob(".*"))
        saved.save(3, state(3), {"step": 3})
        assert read(saved) == 3
    assert {1, 2} == set(outcomes)
    assert len(outcomes) > 10


@pytest.mark.parametrize("file", ["state-00000-of-00001.safetensors", "run.json"])
def test_a_damaged_checkpoint_is_named_together_with_the_one_before(tmp_path, file):
    saved = checkpoints(tmp_path)
    for step in (999_999, 1_000_000):  # as strings they sort in the other order
        saved.save(step, state(step), {"step": step})
    damaged = tmp_path / "step-1000000" / file
    damaged.write_bytes(damaged.read_bytes()[:-5])
    message = r"step-1000000 must be a complete checkpoint, .*Delete that folder to continue from step-999999"
    with pytest.raises(ValueError, match=message):
        read(saved)
    shutil.rmtree(damaged.parent)
    assert read(saved) == 999_999


def test_a_single_flipped_bit_is_detected(tmp_path):
    saved = checkpoints(tmp_path)
    path = saved.save(1, state(1), {"step": 1})
    file = path / "state-00000-of-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1  # in a tensor, because the format only checks its header
    file.write_bytes(data)
    tensors = state(7)
    with pytest.raises(
        ValueError, match=r"but state-00000-of-00001\.safetensors has changed since it was written\. Delete"
    ):
        saved.load(path, tensors)
    assert tensors["model.a"].tolist() == [7.0] * 3
    file.unlink()
    with pytest.raises(ValueError, match="must be a complete checkpoint"):
        saved.load(path, tensors)


@pytest.mark.parametrize(
    "run",
    [
        *('{"step": 1}', "null", "[" * 100_000, '{"step": 2, "files": {"a": 1}}'),
        '{"step": 1, "files": {"../../passwd": 1}}',
    ],
)
def test_a_wrong_description_of_the_run_is_damage(tmp_path, run):
    saved = checkpoints(tmp_path)
    path = saved.save(1, state(1), {"step": 1})
    (path / "run.json").write_text(run)
    with pytest.raises(
        ValueError, match=r"step-000001 must be a complete checkpoint, but .*Delete that folder to begin"
    ):
        saved.load(path, state(7))


def test_a_full_disk_leaves_the_checkpoints_and_nothing_else(tmp_path, monkeypatch):
    saved = checkpoints(tmp_path)
    saved.save(1, state(1), {"step": 1})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3))
    with pytest.raises(OSError, match=r"No space|bytes are needed, 3 are free\. Existing files are unchanged"):
        saved.save(2, state(2), {"step": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert read(saved) == 1


def test_a_tensor_of_another_shape_means_another_model_and_not_damage(tmp_path):
    saved = checkpoints(tmp_path)
    path = saved.save(1, state(1), {"step": 1})
    tensors = state(7) | {"optimizer.a.step": torch.zeros(2)}
    with pytest.raises(ValueError, match=r"belongs to another model: optimizer\.a\.step has .* is \(2,\)\. Continue"):
        saved.load(path, tensors)
    assert tensors["model.a"].tolist() == [7.0] * 3  # and nothing was loaded


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path):
    ready, tell = os.pipe()
    process = os.fork()
    if process == 0:
        with lock_folder(tmp_path):
            os.write(tell, b"x")
            signal.pause()
    os.read(ready, 1)
    with pytest.raises(ValueError, match="must be a folder that no other run is using"), lock_folder(tmp_path):
        pass
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    with lock_folder(tmp_path):
        pass


def test_a_thread_may_lock_twice_and_another_thread_may_not(tmp_path):
    errors = []

    def other():
        try:
            with lock_folder(tmp_path):
                pass
        except ValueError as error:
            errors.append(error)

    with lock_folder(tmp_path), lock_folder(tmp_path):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(60)
    assert len(errors) == 1
