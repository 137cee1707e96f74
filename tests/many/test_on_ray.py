"""Many prompts on Ray: every prompt is answered once, also if a worker is lost."""

import json
import os
import signal
import sys
import time

import pytest
import torch

import dgemma
from dgemma.many import on_ray
from dgemma.many.on_ray import generate_on_ray
from dgemma.many.prompts import Worker
from rowwise import RowwiseDenoiser

PROMPTS = [[5 + at % 50, 6 + at % 7] for at in range(40)]
OPTIONS = {"max_new_tokens": 48, "steps": 3, "eos_token_ids": [1, 2, 3]}


class Mortal(RowwiseDenoiser):
    """Ends its process in the middle of the run, once."""

    def step(self, *arguments, **options):
        time.sleep(0.01)
        steps, path = getattr(self, "steps", 0) + 1, os.environ.get("DIES_ONCE", "")
        self.steps = steps
        if steps == 12 and path and not os.path.exists(path):
            with open(path, "w"):
                os.kill(os.getpid(), signal.SIGKILL)
        return dgemma.step(self, *arguments, **options)


@pytest.mark.slow
def test_ray_answers_every_prompt_once_when_a_worker_is_killed(tmp_path, monkeypatch, caplog):
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_worker_niceness", "0")
    died = tmp_path / "died"
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "DIES_ONCE": str(died)}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80 << 20})
    try:
        cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
        ray.init(address=cluster.address, runtime_env={"env_vars": environment}, log_to_driver=False)
        options = {**OPTIONS, "workers": 2, "gpus_per_worker": 0, "batch_size": 3, "out": tmp_path / "run.jsonl"}
        results = list(generate_on_ray(Mortal, PROMPTS, **options))
        monkeypatch.setattr(on_ray, "_Team", None)  # it would wait
        with pytest.raises(TypeError):
            generate_on_ray(Mortal, PROMPTS, workers=1)
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert died.exists(), "no worker was lost"
    assert "waits for a GPU: a worker needs 1, the cluster has 0. Use gpus_per_worker=0" in caplog.text
    check(results, tmp_path / "run.jsonl")


def check(results, path):
    """Every prompt has the tokens of `generate_many`, once, in the results and in the file."""
    wanted = list(dgemma.generate_many(RowwiseDenoiser(), PROMPTS, **OPTIONS))
    assert [result.index for result in results] == list(range(40))
    for got, want in zip(results, wanted, strict=True):
        assert torch.equal(got.new_tokens, want.new_tokens)
        assert torch.equal(got.steps, want.steps)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["settings"] == Worker(RowwiseDenoiser(), None, 1, OPTIONS).settings
    assert sorted(line["index"] for line in lines[1:]) == list(range(40))
