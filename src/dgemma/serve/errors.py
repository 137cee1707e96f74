"""Errors of the server in OpenAI's shape: a status, a sentence, and the parameter that is wrong."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 500: "server_error"}

_CONSTANTS = {"None": "null", "True": "true", "False": "false"}
_QUOTED, _PAIR = r"""(?<!\w)'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\"""", r"\((-?\d+, -?\d+)\)"
_QUOTED_OR_PYTHON = re.compile(rf"{_QUOTED}|{_PAIR}|\b(None|True|False)\b")


class ApiError(Exception):
    """An error that a client gets as JSON."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """Return the JSON object of the response."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        param = None if self.param is None else encodable(self.param)
        return {"error": {"message": encodable(self.message), "type": kind, "param": param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Return the headers of the response."""
        return {"Retry-After": "1"} if self.status in (429, 503) else {}


def timed_out() -> ApiError:
    return ApiError(504, "The request took longer than the server allows.", code="timeout")


@asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[None]:
    """Raise a 504 if the block takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise timed_out() from None


def has_left() -> ApiError:
    return ApiError(499, "The client has left.")


def too_many(most: int) -> ApiError:
    message = f"This client has {most} requests or choices at work already. Try again later."
    return ApiError(429, message, code="too_many_requests")


def shut_down() -> ApiError:
    return ApiError(503, "The server is shutting down. Try again later.")


def in_json(message: str) -> str:
    """Write Python's constants as JSON does, and pairs of numbers as lists, except in quotes."""

    def replace(found: re.Match[str]) -> str:
        return f"[{found[1]}]" if found[1] else _CONSTANTS.get(found[2], found[0])

    return _QUOTED_OR_PYTHON.sub(replace, message)


def encodable(text: str) -> str:
    """Replace lone surrogates, which JSON can express and UTF-8 cannot."""
    return text.encode(errors="replace").decode()
