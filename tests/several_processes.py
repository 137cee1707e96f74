"""Training on several gloo processes of one machine: the function of each process, and a launcher for tests."""

import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dgemma
from dgemma.model.config import FULL, SLIDING
from dgemma.train.batch import BatchSource, TrainBatch
from dgemma.train.distributed import FullySharded
from dgemma.train.loop import TrainConfig, train
from dgemma.train.lora import LoRA, add_lora
from dgemma.train.objective import Objective
from dgemma.train.parallel import Parallel
from fork_server import fork_server, free_port
from image_prompts import IMAGE, random_images

CONFIG = dgemma.presets.tiny().replace(
    vocab_size=61,  # not divisible by any number of processes
    hidden_size=24,
    intermediate_size=20,
    moe_intermediate_size=12,
    num_hidden_layers=2,
    layer_types=(SLIDING, FULL),
    sliding_window=6,
    num_experts=4,
    head_dim=8,
    global_head_dim=8,
    canvas_length=8,
)
SEEING = CONFIG.replace(vision_config=dgemma.presets.tiny(vision=True).vision_config, carried={"image_token_id": IMAGE})
OBJECTIVE = Objective(noise=dgemma.UniformNoise(CONFIG.vocab_size), canvas_len=8, canvases="all")


def source(step: int, rows: range) -> TrainBatch:
    """Rows of several lengths, so that means over tokens, over rows and over processes differ."""
    generators = [torch.Generator().manual_seed(1000 * step + row) for row in rows]
    tokens = torch.stack([torch.randint(3, CONFIG.vocab_size, (20,), generator=g) for g in generators])
    length = torch.tensor([20 - 2 * row for row in rows])
    return TrainBatch(tokens=tokens, prompt_len=torch.full((len(rows),), 3), length=length)


def uneven_source(step: int, rows: range) -> TrainBatch:
    """Rows without prompts. Only the first four have a second canvas, which can attend to the first."""
    length = torch.tensor([16 if row < 4 else 8 for row in rows])
    batch = source(step, rows)
    return TrainBatch(tokens=batch.tokens, prompt_len=torch.zeros(len(rows), dtype=torch.int64), length=length)


def source_with_images(step: int, rows: range) -> TrainBatch:
    """Rows of `source` whose first ones have an image of two tokens. The second of two processes has only text."""
    batch = source(step, rows)
    tokens = batch.tokens.where(batch.tokens != IMAGE, 3)
    seeing = torch.tensor([row < 3 for row in rows])
    tokens[seeing, 1:3] = IMAGE
    images = tuple(random_images([(6, 3)], seed=row) if row < 3 else None for row in rows)
    return replace(batch, tokens=tokens, frozen=tokens == IMAGE, images=images)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training run: arguments of FullySharded and TrainConfig, and the step after which it is interrupted."""

    out: Path
    parallel: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    stop: int | None = None
    dies: int | None = None  # the rank whose process exits after the first step
    lora: bool = False
    model: dgemma.ModelConfig = CONFIG
    objective: Objective = OBJECTIVE
    source: BatchSource = source
    dtype: torch.dtype = torch.float64  # hides the order of summation, but not errors in the method


def run_alone(job: Job) -> None:
    _train(job, Parallel())


def run_together(job: Job) -> None:
    """Run the job in this process, as one of several."""
    with FullySharded(**job.parallel) as parallel:
        _train(job, parallel)


def _train(job: Job, parallel: Parallel) -> None:
    # Only the main process has the right weights. Other even ranks have no weights, and odd ranks have wrong ones.
    on_meta = parallel.rank % 2 == 0 and not parallel.is_main and not job.lora
    model = dgemma.DiffusionGemma(job.model, dtype=job.dtype, device="meta" if on_meta else "cpu")
    if not on_meta:
        model.reset_parameters(torch.Generator().manual_seed(parallel.rank))
    if job.lora:
        add_lora(model, LoRA(rank=2))
    settings = {"steps": 3, "batch_size": 8, "lr": 1e-2, "warmup": 1, "ema_decay": 0.5, "precision": "weights"}
    config = TrainConfig(**(settings | {"log_every": 1, "progress": False} | job.config))

    def on_step(record: Any) -> bool:
        if parallel.rank == job.dies:
            os._exit(9)
        return record.step == job.stop

    train(model, job.objective, job.source, config, out=job.out, parallel=parallel, on_step=on_step)


def launch(num_processes: int, function: Callable[[Job], None], jobs: Sequence[Job]) -> list[list[str]]:
    """Run jobs one after another on the same processes, with the environment that torchrun sets.

    Returns the traceback of every process for every job, "" where it succeeded.
    """
    context = fork_server()
    ports = [free_port() for _ in jobs]
    results = context.Queue()
    processes = [
        context.Process(target=_run, args=(rank, num_processes, ports, results, function, jobs), daemon=True)
        for rank in range(num_processes)
    ]
    for process in processes:
        process.start()
    errors = [["died"] * num_processes for _ in jobs]
    expected = sum(num_processes - (job.dies is not None) for job in jobs)
    for _ in range(expected):
        number, rank, error = results.get(timeout=300)
        errors[number][rank] = error
    for process in processes:
        process.join(timeout=30)
    return errors


def _run(
    rank: int, num_processes: int, ports: list[int], results: Any, function: Callable, jobs: Sequence[Job]
) -> None:
    torch.set_num_threads(1)
    for number, (job, port) in enumerate(zip(jobs, ports, strict=True)):
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_processes)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        try:
            function(job)
            results.put((number, rank, ""))
        except Exception:
            results.put((number, rank, traceback.format_exc()))
            if dist.is_initialized():
                dist.destroy_process_group()
