"""`generate_many` on several GPUs and machines: `generate_on_ray` with Ray, `generate_with_torchrun` with torchrun.

Every worker has a whole model and its own batch. One process reads the prompts, hands them out, and writes the file, so
a run has one file and continues like that of `generate_many`.
"""

import importlib
import itertools
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Unpack

import torch.distributed as dist

from dgemma.checkpoint.tokenizer import Tokenizer
from dgemma.run.batch import Batch
from dgemma.run.many import (
    Completion,
    PromptReader,
    load_completion,
    present,
    restore_completion,
    store_completion,
)
from dgemma.run.options import TextOptions, takes_options
from dgemma.run.run_file import RunFile
from dgemma.run.step import Denoiser

_MOST_TRIES = 3  # of a prompt whose worker is lost each time
_POLL_SECONDS = 0.02


class Worker:
    """One model with its batch: takes prompts, and returns those that are finished.

    Example: `Worker(load, None, 8, {"steps": 16}).work([(0, "Once"), (1, "It was")])`.
    """

    def __init__(
        self,
        load: Callable[[], Denoiser],
        tokenizer: Tokenizer | None,
        slots: int,
        options: Mapping[str, Any],
    ) -> None:
        self.model, self.slots = load(), slots
        self.reader = PromptReader(self.model, tokenizer, options)
        self._batch = Batch(self.model)
        self._waiting: deque[tuple[int, Any]] = deque()
        self._running: dict[int, Any] = {}

    def describe(self) -> dict[str, Any]:
        """Return the settings of the run."""
        return self.reader.describe()

    @property
    def num_prompts(self) -> int:
        """The number of prompts that are not finished."""
        return len(self._waiting) + len(self._running)

    def work(self, prompts: Iterable[tuple[int, Any]] = ()) -> list[dict[str, Any]]:
        """Take more prompts, step until at least one prompt is finished, and return the finished ones as stored."""
        self._waiting += prompts
        finished: list[dict[str, Any]] = []
        while self.num_prompts and not finished:
            finished = self.step()
        return finished

    def step(self) -> list[dict[str, Any]]:
        """Take one step of the batch, and return the prompts that finished in it."""
        while self._waiting and len(self._batch) < self.slots:
            index, prompt = self._waiting.popleft()
            self._batch.add(self.reader.read(index, prompt))
            self._running[index] = prompt
        ended = [row for row in self._batch.step() if row.ended]
        prompts = [self._running.pop(row.index) for row in ended]
        return [
            store_completion(self.reader.complete(row, prompt), prompt, row.plan.pad_token_id)
            for row, prompt in zip(ended, prompts, strict=True)
        ]


@takes_options(TextOptions)
def generate_on_ray(
    load: Callable[[], Denoiser],
    prompts: Iterable[Any],
    *,
    workers: int,
    gpus_per_worker: float = 1,
    slots: int = 8,
    out: str | Path | None = None,
    tokenizer: Tokenizer | None = None,
    in_order: bool = True,
    progress: bool = True,
    **options: Unpack[TextOptions],
) -> Iterator[Completion]:
    """Run `generate_many` on a Ray cluster, with a model per worker. Results and file are those of `generate_many`.

    load: called once in each worker, returns its model. Each worker has at most twice `slots` prompts. If a worker is
    lost, its prompts go to the others, and Ray starts it again; a prompt that was lost three times raises an error.
    Call `ray.init` first to choose a cluster. Needs `pip install "dgemma[ray]"`.

    Example: `generate_on_ray(lambda: DiffusionGemma.from_pretrained(path, device="cuda"), prompts, workers=8)`.
    """
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise ImportError('generate_on_ray needs Ray. Install it with: pip install "dgemma[ray]"') from None
    actor = ray.remote(num_gpus=gpus_per_worker, max_restarts=-1)(Worker)
    actors = [actor.remote(load, tokenizer, slots, dict(options)) for _ in range(workers)]
    settings = ray.get(actors[0].describe.remote())
    file = None if out is None else RunFile(out, settings)
    completed = _on_ray(ray, actors, enumerate(prompts), settings, most=2 * slots, file=file)
    return present(completed, prompts, in_order=in_order, progress=progress)


def _on_ray(
    ray: Any,
    actors: list[Any],
    prompts: Iterator[tuple[int, Any]],
    settings: Mapping[str, Any],
    *,
    most: int,
    file: RunFile | None,
) -> Iterator[Completion]:
    """Hand out prompts and yield results as they finish. Each worker has one call in progress."""
    held: list[dict[int, Any]] = [{} for _ in actors]  # prompts of each worker
    calls: dict[Any, int] = {}
    again: deque[tuple[int, Any]] = deque()
    tries: dict[int, int] = {}
    with nullcontext() if file is None else file:
        try:
            while True:
                for at in set(range(len(actors))) - set(calls.values()):
                    new: list[tuple[int, Any]] = []
                    while len(held[at]) + len(new) < most:
                        following = again.popleft() if again else next(prompts, None)
                        if following is None:
                            break
                        if file is not None and following[0] in file:
                            yield load_completion(file, *following)
                        else:
                            new.append(following)
                    held[at].update(new)
                    if held[at]:
                        calls[actors[at].work.remote(new)] = at
                if not calls:
                    return
                ready, _ = ray.wait(list(calls), num_returns=1)
                at = calls.pop(ready[0])
                try:
                    results = ray.get(ready[0])
                except ray.exceptions.RayActorError as error:
                    for index, prompt in held[at].items():
                        tries[index] = tries.get(index, 0) + 1
                        if tries[index] == _MOST_TRIES:
                            message = f"generate_on_ray lost a worker {_MOST_TRIES} times with prompt {index}: {error}"
                            raise RuntimeError(message) from None
                        again.append((index, prompt))
                    held[at].clear()
                    continue
                for result in results:
                    if file is not None:
                        file.append(result)
                    del held[at][result["index"]]
                    yield restore_completion({k: v for k, v in result.items() if k != "prompt"}, settings)
        finally:
            for actor in actors:
                ray.kill(actor)


@takes_options(TextOptions)
def generate_with_torchrun(
    model: Denoiser,
    prompts: Iterable[Any],
    *,
    slots: int = 8,
    out: str | Path | None = None,
    tokenizer: Tokenizer | None = None,
    in_order: bool = True,
    progress: bool = True,
    **options: Unpack[TextOptions],
) -> Iterator[Completion]:
    """Run `generate_many` in every process of torchrun. The first process writes the file and yields all results.

    Each process loads its own model and iterates over the same prompts. A free slot takes the next prompt of all, so
    fast processes do more. The other processes yield nothing. If a process is lost, torchrun ends all of them; with
    `--max-restarts` it starts them again, and they continue from the file.

    Example, started with `torchrun --nproc-per-node 8 many.py`:

        for result in generate_with_torchrun(model, prompts, out="run.jsonl"):
            print(result.index)
    """
    store, rank, world_size = next(iter(dist.rendezvous("env://")))
    # The store outlives a restart, so each attempt has its own keys.
    shared = dist.PrefixStore(f"dgemma-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    worker = Worker(lambda: model, tokenizer, slots, options)
    file = RunFile(out, worker.describe()) if out is not None and rank == 0 else None
    if rank > 0:
        done = set(json.loads(shared.get("done")))
        for result in _take_turns(worker, prompts, shared, done):
            number = shared.add("results", 1)
            shared.set(f"result-{number}", json.dumps(result))
        shared.add("finished", 1)
        return iter(())
    stored = [] if file is None else list(file)
    shared.set("done", json.dumps(stored))
    completed = _first_process(worker, prompts, shared, set(stored), file, world_size)
    return present(completed, prompts, in_order=in_order, progress=progress)


def _take_turns(worker: Worker, prompts: Iterable[Any], shared: dist.Store, done: set[int]) -> Iterator[dict[str, Any]]:
    """Take prompts as slots become free, and yield finished ones. Prompts that other processes took are skipped."""
    remaining = enumerate(prompts)
    is_exhausted = False
    new: list[tuple[int, Any]] = []
    while worker.num_prompts or not is_exhausted:
        while not is_exhausted and worker.num_prompts + len(new) < worker.slots:
            wanted = shared.add("next", 1) - 1
            if wanted in done:
                continue
            found = next(itertools.dropwhile(lambda pair, wanted=wanted: pair[0] < wanted, remaining), None)  # type: ignore[misc]
            is_exhausted = found is None
            new += [] if found is None else [found]
        yield from worker.work(new)
        new = []


def _first_process(
    worker: Worker,
    prompts: Iterable[Any],
    shared: dist.Store,
    done: set[int],
    file: RunFile | None,
    world_size: int,
) -> Iterator[Completion]:
    settings = worker.describe()
    again = enumerate(prompts)  # a second pass, for results that are in the file
    num_read = 0
    with nullcontext() if file is None else file:
        if file is not None and done:
            for index, prompt in itertools.takewhile(lambda pair: pair[0] <= max(done), again):
                if index in done:
                    yield load_completion(file, index, prompt)

        def keep(result: dict[str, Any]) -> Completion:
            if file is not None:
                file.append(result)
            return restore_completion({k: v for k, v in result.items() if k != "prompt"}, settings)

        def arrived() -> Iterator[dict[str, Any]]:
            nonlocal num_read
            while num_read < shared.add("results", 0):
                num_read += 1
                key = f"result-{num_read}"
                yield json.loads(shared.get(key))
                shared.delete_key(key)

        for result in _take_turns(worker, prompts, shared, done):
            yield keep(result)
            yield from map(keep, arrived())
        while True:
            is_last = shared.add("finished", 0) == world_size - 1
            yield from map(keep, arrived())
            if is_last:
                return
            time.sleep(_POLL_SECONDS)
