"""`generate_many` on several GPUs and machines, with Ray.

Ray starts the workers, starts lost ones again, and repeats their prompts. Every worker has a whole model and its own
batch. One process reads the prompts and writes the file, so a run is continued as with `generate_many`.
"""

import asyncio
import importlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Unpack

from dgemma.checkpoint.tokenizer import Tokenizer
from dgemma.many.prompts import Completion, ManyOptions, Worker, read_many, run_prompts
from dgemma.model.denoiser import Denoiser
from dgemma.printing import install_command
from dgemma.run.options import TextOptions, select, takes_options

logger = logging.getLogger("dgemma")
_MOST_REPEATS = 2  # of a prompt whose worker is lost
_MOST_RESTARTS = 100  # of a worker


@takes_options(ManyOptions)
def generate_on_ray(
    load: Callable[[], Denoiser],
    prompts: Iterable[Any],
    *,
    workers: int,
    gpus_per_worker: float = 1,
    **options: Unpack[ManyOptions],
) -> Iterator[Completion]:
    """Run `generate_many` on a Ray cluster, with a model per worker. Results and file are those of `generate_many`.

    load: called once in each worker, returns its model. Each worker has at most twice `batch_size` prompts. If a
    worker is lost, Ray starts it again and repeats its prompts. A prompt that is lost three times raises Ray's error.
    Call `ray.init` first to choose a cluster. On a cluster without GPUs pass `gpus_per_worker=0`.

    Example: `generate_on_ray(lambda: DiffusionGemma.from_pretrained(path, device="cuda"), prompts, workers=8)`.
    """
    many = read_many("generate_on_ray", prompts, options)
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
    most = 2 * many["batch_size"]  # so that a prompt is there when a row becomes free
    actor = ray.remote(
        num_gpus=gpus_per_worker,
        max_restarts=_MOST_RESTARTS,
        max_task_retries=_MOST_REPEATS,
        max_concurrency=most + 1,  # and one call of `describe`
    )(_RayWorker)
    arguments = load, many["tokenizer"], many["batch_size"], dict(select(options, TextOptions))
    return run_prompts(_Team(ray, [actor.remote(*arguments) for _ in range(workers)], most), prompts, many)


class _RayWorker:
    """A `Worker` as a Ray actor: each call of `complete` is one prompt, and all calls in progress share a batch."""

    def __init__(
        self, load: Callable[[], Denoiser], tokenizer: Tokenizer | None, batch_size: int, options: Mapping[str, Any]
    ) -> None:
        self._worker = Worker(load(), tokenizer, batch_size, options)
        self._room = asyncio.Semaphore(batch_size)
        self._results: dict[int, asyncio.Future[Completion]] = {}  # of the prompts in the batch
        self._stepping: asyncio.Task[None] | None = None

    async def describe(self) -> dict[str, Any]:
        """Return the settings of the run."""
        return self._worker.settings

    async def complete(self, index: int, prompt: Any) -> Completion:
        """Add a prompt to the batch as soon as a row is free, and return its result."""
        async with self._room:
            self._worker.add(index, prompt)
            result = self._results[index] = asyncio.get_running_loop().create_future()
            if self._stepping is None or self._stepping.done():
                self._stepping = asyncio.create_task(self._step())
            return await result

    async def _step(self) -> None:
        """Step the batch until it is empty. Calls that arrive during a step add their prompts before the next one."""
        while self._results:
            try:
                completions = self._worker.finished()
            except Exception as error:
                for result in self._results.values():
                    result.set_exception(error)
                return
            for completion in completions:
                self._results.pop(completion.index).set_result(completion)
            await asyncio.sleep(0)


class _Team:
    """The workers on Ray, with the interface of one `Worker`. A free worker is listed once per prompt it may take."""

    def __init__(self, ray: Any, actors: list[Any], most: int) -> None:
        self._pool: Any = importlib.import_module("ray.util").ActorPool([a for _ in range(most) for a in actors])
        self.settings: dict[str, Any] = ray.get(actors[0].describe.remote())

    @property
    def has_room(self) -> bool:
        return self._pool.has_free()

    def add(self, index: int, prompt: Any) -> None:
        self._pool.submit(lambda actor, pair: actor.complete.remote(*pair), (index, prompt))

    def finished(self) -> list[Completion]:
        """Wait for a result."""
        return [self._pool.get_next_unordered()]
