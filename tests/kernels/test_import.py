"""What a machine without Triton is told."""

import os
import subprocess
import sys


def test_without_triton_one_sentence_says_what_to_install():
    script = "import sys; sys.modules['triton'] = None; import dgemma_kernels"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == (
        "ImportError: dgemma_kernels needs Triton, which is not installed: pip install 'dgemma[kernels]', or use "
        "dgemma itself, which needs neither Triton nor a GPU."
    )
