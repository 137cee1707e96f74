"""Importing the kernels without Triton, and with parts of it missing."""

import os
import subprocess
import sys

import pytest

import dgemma_kernels


def run(script: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=120)


def test_without_triton_the_error_says_in_one_sentence_what_to_install():
    done = run("import sys; sys.modules['triton'] = None; import dgemma_kernels")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == (
        'ImportError: dgemma_kernels needs Triton, which is not installed: pip install -e ".[kernels]", or use '
        "dgemma itself, which needs neither Triton nor a GPU."
    )


@pytest.mark.slow
def test_import_needs_neither_gluon_nor_private_parts_of_the_interpreter():
    done = run("""
import sys
from triton.runtime import interpreter
sys.modules["triton.experimental.gluon"] = None
del interpreter._patch_lang_tensor, interpreter._convert_float
import dgemma_kernels
""")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_kernels_of_training_load_without_the_engine_and_the_model_class():
    done = run("""
import sys
from dgemma_kernels.ops import grouped
from dgemma_kernels.ops.heads import kernel
from dgemma_kernels.ops.residual import kernel
import dgemma_kernels
print(*(name for name in sys.modules if name.startswith(("dgemma_kernels.engine", "dgemma.model.diffusion"))))
print(dgemma_kernels.accelerate.__module__)
""")
    assert done.stdout.splitlines() == ["", "dgemma_kernels.engine.denoiser"], done.stderr


def test_the_package_lists_its_public_names_and_refuses_others():
    assert dir(dgemma_kernels) == ["FusedDenoiser", "accelerate", "accelerate_training"]
    with pytest.raises(AttributeError, match="module 'dgemma_kernels' has no attribute 'speed_up'"):
        _ = dgemma_kernels.speed_up
