"""A short run of the fuzz suite: no crash, hang, execution, excessive memory, raw error or silent acceptance."""

import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("run.py")


@pytest.mark.slow
def test_damaged_files_odd_arguments_and_odd_commands_are_refused_in_one_sentence():
    done = subprocess.run(
        [sys.executable, str(RUN), "--cases", "500", "--seed", "1000000"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
