"""The thread that runs the model: requests wait in a queue, share batches, and get events as their text is written."""

import asyncio
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from dgemma.many.batch import Batch, BatchRow, Scores
from dgemma.many.prefixes import PREFIX_BYTES, SharedPrefixes
from dgemma.model.denoiser import Denoiser
from dgemma.serve.errors import ApiError, shut_down, timed_out

Result = TypeVar("Result")

_MOST_DEBT = 10.0  # seconds
_MOST_AHEAD = 1.0  # seconds of debt of a client whose next requests are read
_PATIENCE = 1  # seconds for the last step when the engine stops


class Draft(NamedTuple):
    """The canvas of a request after a step: the tokens that it would write if it ended now."""

    block: int
    step: int
    tokens: list[int]


class Written(NamedTuple):
    """All tokens that a request has written so far, after one more block."""

    tokens: list[int]
    steps: list[int]  # forwards of each block
    ended: bool
    scores: Sequence[Scores] = ()  # of each block, if the request wants them


Event = Draft | Written | ApiError


@dataclass(eq=False)
class Job:
    """One row of a request in the engine. The rows of a request have one inbox, in the thread of its event loop."""

    row: BatchRow
    model: Denoiser
    client: str
    deadline: float
    wants_drafts: bool
    loop: asyncio.AbstractEventLoop
    inbox: asyncio.Queue[tuple["Job", Event]]
    cancelled: bool = False
    has_draft: bool = False  # in the inbox

    def send(self, event: Event) -> None:
        """Add an event, from the engine's thread. A client that reads slowly gets fewer drafts."""

        def put() -> None:
            if isinstance(event, Draft):
                if self.has_draft:
                    return
                self.has_draft = True
            self.inbox.put_nowait((self, event))

        with suppress(RuntimeError):  # the loop has closed, with its clients
            self.loop.call_soon_threadsafe(put)


async def read_events(jobs: Sequence[Job]) -> AsyncIterator[tuple[Job, Draft | Written]]:
    """Yield drafts and written blocks of a request until all of its rows have ended. Raise if one fails."""
    running = set(jobs)
    while running:
        job, event = await jobs[0].inbox.get()
        if isinstance(event, ApiError):
            raise event
        if isinstance(event, Draft):
            job.has_draft = False
        elif event.ended:
            running.discard(job)
        yield job, event


@dataclass(eq=False)
class Call:
    """A function that waits for a thread, and the future of its result."""

    function: Callable[[], Any]
    client: str = ""
    future: Future[Any] = field(default_factory=Future)

    def run(self) -> None:
        """Run the function, and set the future."""
        if self.future.set_running_or_notify_cancel():
            try:
                self.future.set_result(self.function())
            except BaseException as error:
                self.future.set_exception(error)


class Engine:
    """Runs at most `batch_size` requests at a time in one thread; up to `max_queue` more wait.

    Requests with the same model, sampler, temperature, noise and constraint share a batch, and its clients share the
    time of its steps. The next step is of the client that had the least time. While others are here, a client has at
    most its equal share of the places. A request that fails, is cancelled or runs out of time frees its place; the
    others go on.
    """

    def __init__(self, model: Denoiser, *, batch_size: int, max_queue: int, prefix_bytes: int = PREFIX_BYTES) -> None:
        self.model, self.batch_size, self.max_queue = model, batch_size, max_queue
        self.prefixes = SharedPrefixes(prefix_bytes)  # of all requests
        self.num_steps = 0  # of all batches
        self._queue: deque[Job] = deque()
        self._calls: deque[Call] = deque()
        self._running: dict[BatchRow, Job] = {}
        self._batches: dict[Any, Batch] = {}
        self._debt: dict[str, float] = {}  # seconds that a client had more than the one that had the least
        self._debt_of_batch: dict[Any, float] = {}
        self._changed = threading.Condition()
        self._stopping = False
        self._numbers = itertools.count()
        self._ready = threading.Event()  # the model is warm
        self._thread = threading.Thread(target=self._work, name="dgemma-engine", daemon=True)
        self._thread.start()
        self._ready.wait(1.0)  # so that a model with nothing to prepare is ready at once

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def num_rows(self, client: str) -> int:
        """The rows of a client that wait or run."""
        with self._changed:
            return sum(job.client == client and not job.cancelled for job in (*self._queue, *self._running.values()))

    @property
    def is_alive(self) -> bool:
        # A thread that refused all requests takes a moment to end.
        return not self._stopping and self._thread.is_alive()

    @property
    def status(self) -> str:
        """Return "ok", "warming up" before the first request can be answered, or "failed"."""
        if not self.is_alive:
            return "failed"
        return "ok" if self._ready.is_set() else "warming up"

    def submit(
        self,
        rows: Sequence[BatchRow],
        *,
        seconds: float,
        client: str = "",
        drafts: bool = False,
        model: Denoiser | None = None,
    ) -> list[Job]:
        """Queue the rows of a request, for the engine's model or another one: all of them, or none.

        If the queue is full, the client with the most waiting requests gets a 429 for its last one.
        """
        jobs: list[Job] = []
        end, loop, inbox = time.monotonic() + seconds, asyncio.get_running_loop(), asyncio.Queue[tuple[Job, Event]]()
        try:
            for row in rows:
                row.index = next(self._numbers)
                job = Job(row, model or self.model, client, end, drafts, loop, inbox)
                self._append(job, self._queue)
                jobs.append(job)
        except ApiError:
            for job in jobs:
                self.cancel(job)
            raise
        return jobs

    async def call(self, function: Callable[[], Result], client: str = "") -> Result:
        """Run a function of the model in the engine's thread, between two steps."""
        call = Call(function, client)
        self._append(call, self._calls)
        result: Result = await asyncio.wrap_future(call.future)
        return result

    @contextmanager
    def charged(self, client: str) -> Iterator[None]:
        """Charge the time of the block."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.charge(client, time.monotonic() - start)

    def charge(self, client: str, seconds: float) -> None:
        """Count time of a client, in this thread or another: other clients go first until they had the same."""
        with self._changed:
            self._debt[client] = self._debt.get(client, 0.0) + seconds

    def is_ahead(self, client: str) -> bool:
        """Return True if others have requests here, and had at least a second less than this client."""
        with self._changed:
            jobs = {job.client for job in (*self._queue, *self._running.values())}
            others = (jobs | {call.client for call in self._calls}) - {client}
            return bool(others) and self._debt.get(client, 0.0) > _MOST_AHEAD and not self._stopping

    def cancel(self, job: Job) -> None:
        """Drop a request whose client has gone or has enough text."""
        with self._changed:
            job.cancelled = True
            self._changed.notify()

    def stop(self) -> None:
        """End the thread after its present step. Requests that are not finished get a 503, even during a long step."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(timeout=_PATIENCE)
        self._refuse_all()

    def _append(self, item: Any, queue: deque[Any]) -> None:
        with self._changed:
            if not self.is_alive:
                raise shut_down()
            if len(self._queue) + len(self._calls) >= self.max_queue:
                self._make_room(item.client)
            queue.append(item)
            self._changed.notify()

    def _make_room(self, client: str) -> None:
        num_waiting = len(self._queue) + len(self._calls)
        full = ApiError(429, f"{num_waiting} requests are waiting already. Try again later.", code="queue_full")
        waiting = Counter(job.client for job in self._queue)
        greediest = max(waiting, key=waiting.__getitem__, default=client)
        if waiting[greediest] <= waiting[client] + 1:
            raise full
        last = next(job for job in reversed(self._queue) if job.client == greediest)
        self._queue.remove(last)
        last.send(full)

    def _refuse_all(self) -> None:
        """Send a 503 to whoever waits, now and from now on."""
        with self._changed:
            self._stopping = True
            for job in (*self._queue, *self._running.values()):
                job.send(shut_down())
            for call in self._calls:
                if not call.future.done():
                    call.future.set_exception(shut_down())

    def _work(self) -> None:
        try:
            self.model.warm_up(self.batch_size)
            self._ready.set()
            self._run()
        finally:  # also if the model cannot be prepared
            self._refuse_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._queue or self._calls or self._running or self._stopping):
                    self._changed.wait()
                if self._stopping:
                    return
                self._drop()
                self._admit()
                self._batches = {key: batch for key, batch in self._batches.items() if len(batch)}
                calls = {(call.client,): call for call in reversed(self._calls)}  # the first of each client
                clients = {key: [call.client] for key, call in calls.items()}
                for job in self._running.values():
                    clients.setdefault(_key(job), []).append(job.client)
                if not clients:
                    continue
                key = self._choose(clients)
                if key in calls:
                    self._calls.remove(calls[key])
            start = time.monotonic()
            if key in calls:
                calls[key].run()
            else:
                self._step(key, self._batches[key])
            seconds = time.monotonic() - start
            self._debt_of_batch[key] = self._debt_of_batch.get(key, 0.0) + seconds
            for client in clients[key]:
                self.charge(client, seconds / len(clients[key]))

    def _choose(self, clients: dict[Any, list[str]]) -> Any:
        """Return the next of the batches, or calls, with these clients: the client that had the least time has one."""
        least = min(self._debt.get(client, 0.0) for names in clients.values() for client in names)
        # Clients that are not here keep their debt. It shrinks as others get time.
        self._debt = {name: min(debt - least, _MOST_DEBT) for name, debt in self._debt.items() if debt > least}
        least = min(self._debt_of_batch.get(key, 0.0) for key in clients)
        self._debt_of_batch = {key: self._debt_of_batch.get(key, 0.0) - least for key in clients}
        debts = {key: min(self._debt.get(client, 0.0) for client in names) for key, names in clients.items()}
        return min(clients, key=lambda key: (debts[key], self._debt_of_batch[key]))

    def _drop(self) -> None:
        """Remove requests that are cancelled or out of time."""
        now = time.monotonic()
        for job in (*self._queue, *self._running.values()):
            if job.deadline < now and not job.cancelled:
                job.cancelled = True
                job.send(timed_out())
        self._queue = deque(job for job in self._queue if not job.cancelled)
        for row in [row for row, job in self._running.items() if job.cancelled]:
            self._batches[_key(self._running.pop(row))].remove(row)

    def _admit(self) -> None:
        while self._queue and len(self._running) < self.batch_size:
            running = Counter(job.client for job in self._running.values())
            # Clients take turns: first the one with the fewest rows, then the one that had the least time.
            job = min(self._queue, key=lambda job: (running[job.client], self._debt.get(job.client, 0.0)))
            present = {job.client for job in (*self._queue, *self._running.values())}
            if running[job.client] >= max(self.batch_size // len(present), 1):
                break
            self._queue.remove(job)
            self._running[job.row] = job
            self._batches.setdefault(_key(job), Batch(job.model, self.prefixes)).add(job.row)

    def _step(self, key: Any, batch: Batch) -> None:
        try:
            finished = batch.step()
            self.num_steps += 1
            for row in finished:
                tokens, counts = row.new_tokens[0].tolist(), row.steps[0].tolist()
                self._running[row].send(Written(tokens, counts, row.ended, tuple(row.scores)))
            if any(self._running[row].wants_drafts for row in self._running):
                for row, steps, draft in batch.drafts():
                    if self._running[row].wants_drafts:
                        self._running[row].send(Draft(len(row.commits), steps, draft.tolist()))
            for row in finished:
                if row.ended:
                    del self._running[row]
        except Exception as error:
            # The batch is lost, and the server goes on. Tensors of the failed step are freed with it.
            del self._batches[key]
            for row in [row for row, job in self._running.items() if _key(job) == key]:
                self._running.pop(row).send(ApiError(500, f"The model failed: {type(error).__name__}: {error}"))


def _key(job: Job) -> Any:
    """Return what the rows of a batch share."""
    plan = job.row.plan
    return id(job.model), plan.knobs, plan.noise, None if plan.language is None else id(plan.language.automaton)
