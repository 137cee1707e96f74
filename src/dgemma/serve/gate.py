"""Middleware for all routes: checks of host, API key and content type; limits on uploads and connections; headers."""

import asyncio
import base64
import hashlib
import hmac
import json
import re
import socket
import time
from collections import Counter
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, cast

import uvicorn
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from dgemma.constraints.build import stop_builds
from dgemma.many.prefixes import PREFIX_BYTES
from dgemma.serve.errors import ApiError, shut_down
from dgemma.serve.metrics import Metrics
from dgemma.serve.turns import Door

_OPEN_PATHS = ("/", "/page.css", "/page.js", "/health")  # need no API key
_PATHS = (
    *(*_OPEN_PATHS, "/replay", "/metrics", "/v1/chat/completions", "/v1/completions"),
    *("/v1/infill", "/v1/systemone", "/v1/models"),
)
# A picture in a body, whose slashes JSON may escape. Short ones count as text: a million would take long to parse.
_PICTURE = re.compile(rb"(?i:data:image\\?/[\w.+-]{1,32};base64,)[\w+/=\\-]{1024,}", re.ASCII)
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds on the requests of clients."""

    body: int = 1 << 20  # bytes, without pictures
    pictures: int = 1 << 24  # bytes of a body with its pictures, if the model reads pictures
    body_seconds: float = 10.0  # to send a request
    tokens: int = 4096  # of an answer
    queue: int = 256  # requests that wait
    per_client: int = 64  # answers of one client, running or waiting
    prefix_bytes: int = PREFIX_BYTES  # of prefixes that requests share
    seconds: float = 300.0  # for one answer, including its wait
    fetch_images: bool = False  # whether to fetch pictures from the web


class Gate:
    """Middleware that reads each body within its limits, before any route sees it."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: Limits,
        api_key: str | None,
        hosts: tuple[str, ...] | None,
        metrics: Metrics,
        door: Door,
        takes_images: bool = False,
    ) -> None:
        self._app, self._limits, self._hosts, self._metrics, self._door = app, limits, hosts, metrics, door
        self._most = max(limits.body, limits.pictures) if takes_images else limits.body
        self._num_bytes = Counter[str]()  # of the bodies of each client
        self._keys = [_digest(key.encode()) for key in (api_key or "").split("\n") if key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status, client, body = time.monotonic(), None, "", bytearray()

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)  # the page of a recorded run has another policy
            await send(message)

        try:
            try:
                scope["dgemma.client"] = client = self._check(scope)
                async with self._door.enter(client) if scope["method"] == "POST" else nullcontext():
                    await self._read(receive, client, body)
                    await self._app(scope, _replay(bytes(body), receive), send_with_headers)
            except ApiError as error:
                await _send_error(error, send_with_headers, asks=scope["path"] == "/replay")
        except asyncio.CancelledError:  # the server stops
            if status is None:
                await _send_error(shut_down(), send_with_headers)
        finally:
            self._num_bytes[client] -= len(body)
            self._num_bytes += Counter()  # forgets clients without requests
            path = scope["path"] if scope["path"] in _PATHS else "other"  # a bounded number of labels
            self._metrics.requests.labels(path, str(status or 500)).inc()
            self._metrics.seconds.observe(time.monotonic() - start)

    def _check(self, scope: Scope) -> str:
        """Check the headers, and return the name of the client."""
        headers, client = Headers(scope=scope), (scope.get("client") or ("", 0))[0]
        # A page of another site can reach a local server through a name that resolves to 127.0.0.1.
        host = re.sub(r":\d*$", "", headers.get("host", ""))
        if self._hosts is not None and host.lower() not in self._hosts:
            raise ApiError(421, f"The server does not answer for this host. Use {self._hosts[0]}.", code="wrong_host")
        if self._keys and scope["path"] not in _OPEN_PATHS:
            sent = _sent_key(headers.get("authorization", ""))
            # Clients send a key outside ASCII as UTF-8 or as Latin-1. Headers are decoded as Latin-1.
            digests = [_digest(sent.encode(form)) for form in ("latin-1", "utf-8")]
            fits = [any(hmac.compare_digest(digest, key) for digest in digests) for key in self._keys]
            if not any(fits):
                message = "The API key is missing or wrong. Send it as `Authorization: Bearer KEY`."
                raise ApiError(401, message, code="invalid_api_key")
            if len(self._keys) > 1:  # one key says nothing about who sends it
                client = f"key {fits.index(True)}"
        if scope["method"] == "POST":
            # A page of another site cannot send this type without a CORS preflight.
            if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
                raise ApiError(415, "The body must be JSON. Send the header Content-Type: application/json.")
            length = headers.get("content-length")
            if length is not None and (not length.isdecimal() or int(length) > self._most):
                raise self._too_large()
        return client

    async def _read(self, receive: Receive, client: str, body: bytearray) -> None:
        """Read a body. The bodies of a client together have as many bytes as its requests without pictures may have."""
        most_of_client = max(self._most, self._limits.per_client * self._limits.body)
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                is_whole = False
                while not is_whole:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(400, "The client left before the end of its request.")
                    body += (part := message.get("body", b""))
                    self._num_bytes[client] += len(part)
                    if len(body) > self._most:
                        raise self._too_large()
                    if self._num_bytes[client] > most_of_client:
                        sentence = "The requests of this client have too many bytes together. Try again later."
                        raise ApiError(429, sentence, code="too_many_requests")
                    is_whole = not message.get("more_body", False)
        except TimeoutError:
            sentence = f"The request took longer than {self._limits.body_seconds:g} seconds to arrive."
            raise ApiError(408, sentence, code="timeout") from None
        if len(body) > self._limits.body and len(_PICTURE.sub(b"", body)) > self._limits.body:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        rule = f"at most {self._limits.body:,} bytes"
        if self._most > self._limits.body:
            rule += f" without its pictures, and {self._most:,} with them"
        return ApiError(413, f"The body must have {rule}.", code="body_too_large")


class PatientProtocol(H11Protocol):
    """HTTP for uvicorn, with limits on connections.

    A request must arrive within `seconds` of its first byte, and a client must go on reading its answer. If there are
    more than `most` connections, the client with the most unused ones loses the older half of these.
    """

    seconds: float = 10.0
    most: int = 512

    def connection_made(self, transport: Any) -> None:
        """Start the timer of a new connection, and make room for it."""
        super().connection_made(transport)
        self._born = self.loop.time()
        self._timer: asyncio.TimerHandle | None = self.loop.call_later(self.seconds, self._give_up)
        if len(self.connections) > self.most:
            others = cast(set[PatientProtocol], self.connections)
            self._make_room([other for other in others if not other.transport.is_closing()])

    def data_received(self, data: bytes) -> None:
        """Start the timer at the first byte of a request, and stop it when its headers are complete."""
        super().data_received(data)
        if not self._waits:
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.seconds, self._give_up)

    def pause_writing(self) -> None:
        """Close the connection if the client does not read."""
        super().pause_writing()
        self._stop_timer()
        self._timer = self.loop.call_later(self.seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the timer."""
        super().resume_writing()
        self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        super().connection_lost(exc)
        self._stop_timer()

    @property
    def _waits(self) -> bool:
        """True if the connection has no request."""
        return self.cycle is None or self.cycle.response_complete

    def _make_room(self, others: list["PatientProtocol"]) -> None:
        if len(others) > self.most:
            idle = sorted((other for other in others if other._waits), key=lambda other: other._born)
            hosts = [other.client and other.client[0] for other in idle]
            ((greediest, _),) = Counter(hosts).most_common(1)
            own = [other for other, host in zip(idle, hosts, strict=True) if host == greediest]
            for other in own[: len(own) // 2 + 1]:  # many, because a search for each new connection would take long
                other.transport.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        if self._waits and not self.transport.is_closing():
            body = json.dumps(ApiError(408, "The request did not arrive in time.", code="timeout").body()).encode()
            head = f"HTTP/1.1 408 Request Timeout\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
            self.transport.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            self.transport.close()


class QuickServer(uvicorn.Server):
    """A server that stops at once: answers that are not finished become a 503. uvicorn would wait for them."""

    def __init__(self, app: ASGIApp) -> None:
        config = uvicorn.Config(
            app,
            http=PatientProtocol,
            ws="none",
            log_level="error",  # a client can cause warnings
            server_header=False,
            timeout_keep_alive=75,  # longer than clients keep unused connections, so that they close them first
            timeout_graceful_shutdown=1,
            backlog=128,  # so many connections may be accepted before `PatientProtocol` counts them
        )
        super().__init__(config)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop the engine of the application, then the server."""
        await run_in_threadpool(self.config.app.state.engine.stop)  # type: ignore[union-attr]
        stop_builds()
        await super().shutdown(sockets)
        stop_builds()  # of requests that waited for the first ones


def _sent_key(authorization: str) -> str:
    """Return the key of a header `Bearer KEY`, or `Basic` with the key as password, as browsers ask for it."""
    kind, _, key = authorization.partition(" ")
    key = key.strip(" \t")
    if kind.lower() == "basic":
        with suppress(ValueError):
            return base64.b64decode(key).decode("latin-1").partition(":")[2]
    return key if kind.lower() == "bearer" else ""


def _digest(key: bytes) -> bytes:
    """Return a hash of the key, so that a comparison takes the same time for every length."""
    return hashlib.sha256(key).digest()


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that yields the body again, and then what the client does next."""
    whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return whole.pop() if whole else await receive()

    return replayed


async def _send_error(error: ApiError, send: Send, *, asks: bool = False) -> None:
    """Send an error. If the key is missing and `asks` is True, a browser asks for it."""
    body = json.dumps(error.body()).encode()
    # The rest of the request is not read, so the connection cannot be used again.
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers.append((b"connection", b"close"))
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers().items()]
    if asks and error.status == 401:
        headers.append((b"www-authenticate", b'Basic realm="dgemma: the API key is the password"'))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
