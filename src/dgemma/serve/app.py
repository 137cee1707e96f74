"""The server's routes: chats, completions, infilling, typed decisions, models, health, metrics, and web pages."""

import contextlib
import html
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from functools import lru_cache
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from dgemma.checkpoint.tokenizer import Tokenizer
from dgemma.checks import require
from dgemma.model.denoiser import Denoiser
from dgemma.serve.engine import Engine
from dgemma.serve.errors import ApiError
from dgemma.serve.gate import Gate, Limits
from dgemma.serve.metrics import Metrics
from dgemma.serve.protocol import ChatRequest, CompletionRequest, DecisionRequest, InfillRequest, describe_mistake
from dgemma.serve.service import Service
from dgemma.serve.turns import Builders, Door
from dgemma.view.html import read_policy


def create_app(
    model: Denoiser,
    tokenizer: Tokenizer,
    *,
    name: str,
    batch_size: int = 8,
    api_key: str | None = None,
    limits: Limits | None = None,
    hosts: tuple[str, ...] | None = None,
    replay: str | None = None,
    adapters: Mapping[str, Denoiser] | None = None,
    frames: str = "'none'",
) -> FastAPI:
    """Return the server as an ASGI application; run it with uvicorn.

    name: the id that clients pass as `model`. batch_size: requests that run together. hosts: values of the Host
    header that are answered; None answers all. With an api_key, requests need `Authorization: Bearer KEY`; it may hold
    several keys, one per line, and then each key is a client.
    replay: a page of `to_html`, shown at /replay; a click there removes a word, and the model fills the hole.
    adapters: models with other adapters, by the ids that clients pass; see `dgemma.train.share_weights`.
    frames: which pages may show that page in a frame, as the values of `frame-ancestors`.

    Example: `uvicorn.run(create_app(model, tokenizer, name="text"), host="127.0.0.1", port=8000)`.
    """
    require(batch_size >= 1, "create_app batch_size", "be >= 1", batch_size)
    limits = limits or Limits()
    policy = None if replay is None else f"{read_policy(replay)}; frame-ancestors {frames}"
    engine = Engine(model, batch_size=batch_size, max_queue=limits.queue, prefix_bytes=limits.prefix_bytes)
    first = Service(model, tokenizer, name, engine, limits, Metrics(engine), Builders(engine))
    others = {other: replace(first, name=other, model=adapted) for other, adapted in (adapters or {}).items()}
    services = {name: first, **others}

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(engine.stop)

    # The interactive documentation of FastAPI loads scripts from other hosts.
    app = FastAPI(title="dgemma", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.engine = engine
    _describe_errors(app)
    _add_api(app, services)
    _add_pages(app, first, bool(api_key), replay, policy)
    door = Door(engine, most=limits.per_client, seconds=limits.seconds)
    app.add_middleware(
        Gate,
        limits=limits,
        api_key=api_key,
        hosts=hosts,
        metrics=first.metrics,
        door=door,
        takes_images=model.takes_images,
    )
    return app


def _describe_errors(app: FastAPI) -> None:
    """Give every error OpenAI's shape."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return JSONResponse(error.body(), error.status, headers=error.headers())

    @app.exception_handler(RequestValidationError)
    async def bad_body(request: Request, error: RequestValidationError) -> Response:
        return await api_error(request, describe_mistake(list(error.errors())))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        if error.status_code == 400:  # FastAPI could not parse the body
            return await api_error(request, describe_mistake([{"type": "json_invalid"}]))
        return await api_error(request, ApiError(error.status_code, f"{error.detail}: {request.url.path[:200]}"))

    @app.exception_handler(Exception)
    async def failure(request: Request, error: Exception) -> Response:
        return await api_error(request, ApiError(500, f"The server failed: {type(error).__name__}."))


def _add_api(app: FastAPI, services: dict[str, Service]) -> None:
    """Add the routes for programs. The field `model` of a request chooses a service."""
    first = next(iter(services.values()))
    engine = first.engine

    def find(name: str) -> Service:
        if name not in services:
            message = f"The model {name[:100]!r} does not exist. This server has {', '.join(map(repr, services))}."
            raise ApiError(404, message, param="model", code="model_not_found")
        return services[name]

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await find(body.model).answer(body, request)

    @app.post("/v1/completions")
    async def complete(body: CompletionRequest, request: Request) -> Response:
        return await find(body.model).answer(body, request)

    @app.post("/v1/infill")
    async def infill(body: InfillRequest, request: Request) -> dict[str, Any]:
        return await (first if body.model is None else find(body.model)).infill(body, request)

    @app.post("/v1/systemone")
    async def systemone(body: DecisionRequest, request: Request) -> Response:
        # Names of questions come back in ASCII, because a client can send half a surrogate pair.
        return Response(json.dumps(await find(body.model).decide(body, request)), media_type="application/json")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.describe() for service in services.values()]}

    @app.get("/v1/models/{path:path}")
    async def one_model(path: str) -> dict[str, Any]:
        return find(path).describe()

    @app.get("/health")
    async def health() -> Response:
        waiting, running = engine.num_waiting, engine.num_running
        content = {"status": engine.status, "waiting": waiting, "running": running}
        return JSONResponse(content, 200 if engine.status == "ok" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(first.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_pages(app: FastAPI, service: Service, needs_key: bool, replay: str | None, policy: str | None) -> None:
    """Add the routes for a browser."""

    @app.get("/")
    async def page() -> Response:
        converses = service.tokenizer.has_chat_template
        parts = {
            "images": "" if service.model.takes_images else "hidden",
            "key": "" if needs_key else "hidden",
            "task": "Write something" if converses else "This model continues texts: write the beginning of one",
            "name": html.escape(service.name),
        }
        text = _read("page.html")
        for name, part in parts.items():
            text = text.replace("{{" + name + "}}", part)
        return HTMLResponse(text)

    @app.get("/replay")
    async def recorded() -> Response:
        if replay is None or policy is None:
            raise ApiError(404, "No run to replay. Start the server with: dgemma serve --replay FILE")
        return HTMLResponse(replay, headers={"Content-Security-Policy": policy})

    @app.get("/page.{kind}")
    async def part(kind: str) -> Response:
        if kind not in ("css", "js"):
            raise ApiError(404, f"Not Found: /page.{kind}")
        return Response(_read(f"page.{kind}"), media_type=f"text/{'css' if kind == 'css' else 'javascript'}")


@lru_cache
def _read(file: str) -> str:
    return resources.files("dgemma.serve").joinpath(file).read_text(encoding="utf-8")
