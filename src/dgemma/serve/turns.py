"""Turns of clients: each has so many requests, and waits while it had more of the server's time than the others."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from fastapi import Request

from dgemma.serve.engine import Call, Engine, Result
from dgemma.serve.errors import has_left, time_limit, too_many

_COST = 0.01  # seconds that a request is charged in advance, to read it and to write its answer
_PAUSE = 0.05  # seconds between two looks at the engine


class Lines:
    """A line per client. The first of each line has its turn when its client is not ahead of the others."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._locks = WeakValueDictionary[str, asyncio.Lock]()  # of clients that have somebody in line

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Wait for a turn. The next one of the client waits until this one has ended."""
        async with self._locks.setdefault(client, asyncio.Lock()):
            while self._engine.is_ahead(client):
                await asyncio.sleep(_PAUSE)
            yield


class Door:
    """Lets requests in before they are read: at most `most` of a client at a time, and clients in turns."""

    def __init__(self, engine: Engine, *, most: int, seconds: float) -> None:
        self._engine, self._most, self._seconds = engine, most, seconds
        self._lines, self._inside = Lines(engine), Counter[str]()

    @asynccontextmanager
    async def enter(self, client: str) -> AsyncIterator[None]:
        """Count a request until its answer has ended. Raise a 429 if its client has too many."""
        if self._inside[client] >= self._most:
            raise too_many(self._most)
        self._inside[client] += 1
        try:
            async with time_limit(self._seconds), self._lines.turn(client):
                self._engine.charge(client, _COST)
            yield
        finally:
            self._inside[client] -= 1
            self._inside += Counter()  # forgets clients without requests


class Builders:
    """Runs functions that take seconds: two at a time, of different clients.

    Their threads do not keep the process from ending.
    """

    def __init__(self, engine: Engine) -> None:
        self._lines, self._places = Lines(engine), asyncio.Semaphore(2)

    async def run(self, function: Callable[[], Result], client: str, request: Request) -> Result:
        """Return the result of a function, unless the client leaves before its turn."""
        async with self._lines.turn(client), self._places:
            if await request.is_disconnected():
                raise has_left()
            call = Call(function)
            threading.Thread(target=call.run, daemon=True).start()
            result: Result = await asyncio.wrap_future(call.future)
            return result
