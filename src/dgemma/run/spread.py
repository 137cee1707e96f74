"""`generate_many` on several GPUs and machines: `generate_on_ray` with Ray, `generate_with_torchrun` with torchrun.

Every worker has a whole model and its own batch, and takes the next prompt when it has a free slot. One process writes
the file. So a run has one file, and is continued as with `generate_many`.
"""

import importlib
import itertools
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, Unpack

import torch.distributed as dist

from dgemma.checkpoint.tokenizer import Tokenizer
from dgemma.model.denoiser import Denoiser
from dgemma.printing import install_command
from dgemma.run.batch import Batch
from dgemma.run.many import (
    Completion,
    ManyOptions,
    ManyOrSlots,
    PromptReader,
    load_completion,
    present,
    read_many,
    restore_completion,
    store_completion,
    takes_slots,
)
from dgemma.run.options import TextOptions, select, takes_options
from dgemma.run.run_file import RunFile

logger = logging.getLogger("dgemma")
_MOST_TRIES = 3  # attempts at a prompt whose worker is lost each time
_POLL_SECONDS = 0.02


class Worker:
    """One model with its batch: takes prompts, and returns those that are finished.

    Example: `Worker(load, None, 8, {"steps": 16}).work([(0, "Once"), (1, "It was")])`.
    """

    def __init__(
        self,
        load: Callable[[], Denoiser],
        tokenizer: Tokenizer | None,
        batch_size: int,
        options: Mapping[str, Any],
    ) -> None:
        self.model, self.batch_size = load(), batch_size
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
        """Take more prompts, step until at least one is finished, and return the results as lines of the file."""
        self._waiting += prompts
        finished: list[dict[str, Any]] = []
        while self.num_prompts and not finished:
            finished = self.step()
        return finished

    def step(self) -> list[dict[str, Any]]:
        """Take one step of the batch, and return the prompts that finished in it."""
        while self._waiting and len(self._batch) < self.batch_size:
            index, prompt = self._waiting.popleft()
            self._batch.add(self.reader.read(index, prompt))
            self._running[index] = prompt
        ended = [row for row in self._batch.step() if row.ended]
        prompts = [self._running.pop(row.index) for row in ended]
        return [
            store_completion(self.reader.complete(row, prompt), prompt, row.plan.pad_token_id)
            for row, prompt in zip(ended, prompts, strict=True)
        ]


@takes_slots
@takes_options(ManyOptions)
def generate_on_ray(
    load: Callable[[], Denoiser],
    prompts: Iterable[Any],
    *,
    workers: int,
    gpus_per_worker: float = 1,
    **options: Unpack[ManyOrSlots],
) -> Iterator[Completion]:
    """Run `generate_many` on a Ray cluster, with a model per worker. Results and file are those of `generate_many`.

    load: called once in each worker, returns its model. Each worker has at most twice `batch_size` prompts. If a
    worker is lost, its prompts go to the others, and a new one is started. A prompt that was lost three times raises an
    error. Call `ray.init` first to choose a cluster. Needs `pip install -e ".[ray]"`.

    Example: `generate_on_ray(lambda: DiffusionGemma.from_pretrained(path, device="cuda"), prompts, workers=8)`.
    """
    many, of_text = read_many("generate_on_ray", prompts, options), dict(select(options, TextOptions))
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise ImportError(f"generate_on_ray needs Ray. Install it with: {install_command('ray')}") from None
    if not ray.is_initialized():
        ray.init()
    num_gpus = ray.cluster_resources().get("GPU", 0)
    if num_gpus < gpus_per_worker:
        logger.warning(
            "generate_on_ray waits for a GPU: a worker needs %g, the cluster has %g. Use gpus_per_worker=0 on CPUs.",
            gpus_per_worker,
            num_gpus,
        )
    actor = ray.remote(num_gpus=gpus_per_worker)(Worker)
    tokenizer, batch_size = many["tokenizer"], many["batch_size"]
    team = _Team(ray, lambda: actor.remote(load, tokenizer, batch_size, of_text), workers, most=2 * batch_size)
    file = None if many["out"] is None else RunFile(many["out"], team.settings)
    completed = team.run(enumerate(prompts), file)
    return present(completed, prompts, in_order=many["in_order"], progress=many["progress"])


class _Team:
    """The workers of a run on Ray. Each has one call in progress; its first call ends when its model is loaded."""

    def __init__(self, ray: Any, make: Callable[[], Any], size: int, *, most: int) -> None:
        self._ray, self._make, self._most = ray, make, most
        self._actors = [make() for _ in range(size)]
        self._held: list[dict[int, Any]] = [{} for _ in self._actors]  # the prompts of each worker
        self._calls = {actor.describe.remote(): at for at, actor in enumerate(self._actors)}
        self._ready: set[int] = set()  # workers whose model is loaded
        self._again: deque[tuple[int, Any]] = deque()  # prompts of lost workers
        self._tries: dict[Any, int] = {}  # losses by prompt, or by worker if its model was not loaded yet
        first, _ = ray.wait(list(self._calls), num_returns=1)
        self.settings: dict[str, Any] = ray.get(first[0])

    def run(self, prompts: Iterator[tuple[int, Any]], file: RunFile | None) -> Iterator[Completion]:
        """Yield results as they finish, or as they are found in the file."""
        with nullcontext() if file is None else file:
            try:
                while True:
                    for at in sorted(self._ready - set(self._calls.values())):
                        yield from self._hand_out(at, prompts, file)
                    if not any(self._held) and not self._again and self._ready:
                        return
                    for result in self._wait():
                        if file is not None:
                            file.append(result)
                        yield _restore(result, self.settings)
            finally:
                for actor in self._actors:
                    self._ray.kill(actor)

    def _hand_out(self, at: int, prompts: Iterator[tuple[int, Any]], file: RunFile | None) -> Iterator[Completion]:
        """Give a worker as many prompts as it may have. Yield the results that are already in the file."""
        new: list[tuple[int, Any]] = []
        while len(self._held[at]) + len(new) < self._most:
            following = self._again.popleft() if self._again else next(prompts, None)
            if following is None:
                break
            if file is not None and following[0] in file:
                yield load_completion(file, *following)
            else:
                new.append(following)
        self._held[at].update(new)
        if self._held[at]:
            self._calls[self._actors[at].work.remote(new)] = at

    def _wait(self) -> list[dict[str, Any]]:
        """Wait until one call ends, and return its results."""
        done, _ = self._ray.wait(list(self._calls), num_returns=1)
        at = self._calls.pop(done[0])
        try:
            results = self._ray.get(done[0])
        except self._ray.exceptions.RayActorError as error:
            self._replace(at, error)
            return []
        if at not in self._ready:
            self._ready.add(at)  # the call was `describe`
            return []
        for result in results:
            del self._held[at][result["index"]]
        return results

    def _replace(self, at: int, error: Exception) -> None:
        """Start a new worker in the place of a lost one. Its prompts go to the next free workers."""
        lost = list(self._held[at]) if at in self._ready else [f"worker {at}"]
        for item in lost:
            self._tries[item] = self._tries.get(item, 0) + 1
            if self._tries[item] == _MOST_TRIES:
                raise RuntimeError(f"generate_on_ray lost a worker {_MOST_TRIES} times at {item}: {error}") from None
        self._again += self._held[at].items()
        self._held[at] = {}
        self._ready.discard(at)
        self._actors[at] = self._make()
        self._calls[self._actors[at].describe.remote()] = at


@takes_slots
@takes_options(ManyOptions)
def generate_with_torchrun(
    model: Denoiser, prompts: Iterable[Any], **options: Unpack[ManyOrSlots]
) -> Iterator[Completion]:
    """Run `generate_many` in every process of torchrun. The first process writes the file and yields all results.

    Each process loads its own model and iterates over the same prompts. A free slot takes the next prompt that no
    process has taken, so fast processes do more. The other processes yield nothing. If a process is lost, torchrun ends
    all of them; with `--max-restarts` it starts them again, and they continue from the file.

    Example, started with `torchrun --nproc-per-node 8 many.py`:

        for result in generate_with_torchrun(model, prompts, out="run.jsonl"):
            print(result.index)
    """
    many = read_many("generate_with_torchrun", prompts, options)
    store, rank, world_size = next(iter(dist.rendezvous("env://")))
    # The store outlives a restart, so each attempt has its own keys.
    shared = dist.PrefixStore(f"dgemma-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    worker = Worker(lambda: model, many["tokenizer"], many["batch_size"], select(options, TextOptions))
    file = RunFile(many["out"], worker.describe()) if many["out"] is not None and rank == 0 else None
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
    return present(completed, prompts, in_order=many["in_order"], progress=many["progress"])


def _take_turns(worker: Worker, prompts: Iterable[Any], shared: dist.Store, done: set[int]) -> Iterator[dict[str, Any]]:
    """Take prompts as rows become free, and yield finished ones. Prompts that other processes took are skipped."""
    remaining = enumerate(prompts)
    is_exhausted = False
    new: list[tuple[int, Any]] = []
    while worker.num_prompts or not is_exhausted:
        while not is_exhausted and worker.num_prompts + len(new) < worker.batch_size:
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
            return _restore(result, settings)

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


def _restore(result: dict[str, Any], settings: Mapping[str, Any]) -> Completion:
    return restore_completion({name: value for name, value in result.items() if name != "prompt"}, settings)
