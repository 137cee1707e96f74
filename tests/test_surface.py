"""The public surface: `import dgemma` is quick, and its folders are attributes."""

import os
import subprocess
import sys


def test_folders_are_attributes_that_load_when_they_are_first_used():
    script = """
import sys, dgemma
assert not {"dgemma.train", "dgemma.view", "dgemma.data", "matplotlib"} & set(sys.modules)
dgemma.train.Objective, dgemma.view.to_html, dgemma.view.plots.plot_entropy, dgemma.data.sudoku
assert "matplotlib" not in sys.modules
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
