"""Train on several processes, with the same losses as on one.

Without torchrun, this script starts two processes of itself under torchrun. They need no GPU. The commands below are
for a machine with eight GPUs, and for four such machines:

    torchrun --nproc-per-node 8 examples/16_several_gpus.py
    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 examples/16_several_gpus.py
"""

import os
import subprocess
import sys
import tempfile

import torch

import dgemma
from dgemma.train import Objective, TrainBatch, TrainConfig, TrainResult, train
from dgemma.train.distributed import FullySharded
from dgemma.train.parallel import Parallel

MODEL = dgemma.presets.tiny().replace(canvas_length=16)
OBJECTIVE = Objective(noise=dgemma.UniformNoise(MODEL.vocab_size), canvas_len=16)
CONFIG = TrainConfig(steps=3, batch_size=8, lr=3e-3, warmup=1, precision="weights", log_every=1, progress=False)


def count_up(step: int, rows: range) -> TrainBatch:
    """Return rows of consecutive ids. The first id depends only on step and row, so any process can make any row."""
    starts = torch.tensor([3 + (31 * step + 7 * row) % 400 for row in rows])
    tokens = starts[:, None] + torch.arange(20)
    return TrainBatch(tokens=tokens, prompt_len=torch.full((len(rows),), 4), length=torch.full((len(rows),), 20))


def run(parallel: Parallel, out: str) -> TrainResult:
    torch.manual_seed(0)
    return train(dgemma.DiffusionGemma(MODEL), OBJECTIVE, count_up, CONFIG, out=out, parallel=parallel)


def main() -> None:
    # Each process holds half of the experts. With `--nproc-per-node 8` there are four such pairs.
    with FullySharded(expert_parallel=2) as parallel, tempfile.TemporaryDirectory() as folder:
        together = run(parallel, sys.argv[1] if len(sys.argv) > 1 else "runs/several_gpus")
        if not parallel.is_main:
            return
        alone = run(Parallel(), folder)
        _, losses = together.log.column("loss")
        _, expected = alone.log.column("loss")
        for step, (loss, one) in enumerate(zip(losses, expected, strict=True), start=1):
            print(f"step {step}: loss {loss:.5f} on {parallel.world_size} processes, {one:.5f} on one")
        print(f"the whole model is in {together.final}")


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", __file__, folder]
            env = {"OMP_NUM_THREADS": "1", **os.environ}  # torchrun would set it too, with a warning
            print(subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout, end="")
