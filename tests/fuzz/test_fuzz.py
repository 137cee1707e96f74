"""A short run of the fuzz suite: no crash, hang, execution, excessive memory, raw error or silent acceptance."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fuzz.mutate import damage_bytes, damage_json, damage_safetensors

RUN = Path(__file__).with_name("run.py")


@pytest.mark.slow
def test_damaged_files_odd_arguments_and_odd_commands_are_refused_in_one_sentence():
    done = subprocess.run(
        [sys.executable, str(RUN), "--cases", "500", "--seed", "1000000"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def test_damage_is_the_same_for_the_same_seed_and_differs_between_seeds():
    data = bytes(range(256))
    assert damage_bytes(data, random.Random(3)) == damage_bytes(data, random.Random(3))
    assert len({damage_bytes(data, random.Random(seed)) for seed in range(50)}) > 40
    assert damage_json({"a": [1, 2]}, random.Random(3)) == damage_json({"a": [1, 2]}, random.Random(3))


def test_a_damaged_header_keeps_the_form_of_a_safetensors_file(tmp_path):
    save_file({"a": torch.zeros(2), "b": torch.ones(3)}, tmp_path / "x", metadata={"k": '{"v": 1}'})
    data = (tmp_path / "x").read_bytes()
    damaged = [damage_safetensors(data, random.Random(seed), metadata="k") for seed in range(40)]
    assert len(set(damaged)) > 20
    assert sum(len(each) > 8 for each in damaged) > 30
