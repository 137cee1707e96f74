"""Compilation in other processes: this process only loads the kernels, unless the others are gone."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from torch._inductor import async_compile

from dgemma_kernels.ops import ahead

pytestmark = pytest.mark.compile


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Results of `compile_ahead.py`, with other processes and after their end."""
    switches = ("TRITON_INTERPRET", "TRITON_OVERRIDE_ARCH", "TORCHINDUCTOR_COMPILE_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in switches}
    folder = str(tmp_path_factory.mktemp("kernels"))
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": folder}
    command = [sys.executable, Path(__file__).with_name("compile_ahead.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("others", "num_built"), [("alive", 0), ("dead", 2)])
def test_other_processes_compile_and_this_one_does_without_them(found, others, num_built):
    assert found[others]["built"] == num_built
    assert found[others]["kernels"] == ["CompiledKernel"] * 2
    assert found[others]["launchers"] == ["_fill_kernel"] * 2
    assert found[others]["is over"]


@pytest.mark.parametrize("name", ["async_compile", "runtime.cache_dir_utils", "AsyncCompile"])
def test_nothing_starts_with_a_torch_that_lacks_a_private_name(name, monkeypatch):
    if name == "AsyncCompile":
        monkeypatch.delattr(async_compile.AsyncCompile, "process_pool")
    else:
        monkeypatch.setitem(sys.modules, f"torch._inductor.{name}", None)  # importing it then raises ImportError
    called = []
    ahead.start([partial(called.append, name)])
    ahead.finish()
    assert called == []


def test_two_threads_may_finish_at_once(monkeypatch):
    class Mode:
        ended = 0

        def __exit__(self, *_):
            self.ended += 1

    class Shared(list):
        def __len__(self):  # another thread takes the last element after this one has asked for the length
            length = super().__len__()
            if length == 1:
                self.pop()
            return length

    modes = [Mode(), Mode()]
    monkeypatch.setattr(ahead, "_started", Shared(modes))
    ahead.finish()
    assert modes[1].ended == 1
    assert not list(ahead._started)
