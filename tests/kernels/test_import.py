"""Importing the kernels without Triton, and with parts of it missing."""

import os
import subprocess
import sys

import pytest


def test_without_triton_the_error_says_in_one_sentence_what_to_install():
    script = "import sys; sys.modules['triton'] = None; import dgemma_kernels"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == (
        "ImportError: dgemma_kernels needs Triton, which is not installed: pip install 'dgemma[kernels]', or use "
        "dgemma itself, which needs neither Triton nor a GPU."
    )


@pytest.mark.slow
def test_import_needs_neither_gluon_nor_private_parts_of_the_interpreter():
    script = """
import sys
from triton.runtime import interpreter
sys.modules["triton.experimental.gluon"] = None
del interpreter._patch_lang_tensor, interpreter._convert_float
import dgemma_kernels
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
