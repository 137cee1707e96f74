"""From a request to its answer: reads a request into plans for the engine, and submits them."""

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool

from dgemma.checkpoint.tokenizer import Tokenizer
from dgemma.checks import require
from dgemma.constraints.build import KeptResults
from dgemma.constraints.languages import JsonSchema, Regex, ToolCalls
from dgemma.constraints.token_text import token_texts
from dgemma.many.batch import BatchRow
from dgemma.model.denoiser import Denoiser
from dgemma.model.vision.images import Images
from dgemma.run.options import default_sampler
from dgemma.run.plan import read_plan
from dgemma.serve.answer import Answer, AnswerChoice
from dgemma.serve.decisions import TypedAnswer, answer_questions
from dgemma.serve.engine import Engine, Job, Written, read_events
from dgemma.serve.errors import ApiError, has_left, in_json, time_limit, too_many
from dgemma.serve.gate import Limits
from dgemma.serve.images import chat_urls, read_images
from dgemma.serve.log_probs import LogProbs
from dgemma.serve.metrics import Metrics
from dgemma.serve.protocol import (
    CalledTool,
    ChatRequest,
    CompletionRequest,
    DecisionRequest,
    ImagePart,
    InfillRequest,
    TextRequest,
    ToolChoice,
    describe_refusal,
)
from dgemma.serve.text import GrowingText
from dgemma.serve.turns import Builders
from dgemma.tasks.infill import infill_row
from dgemma.view.pieces import Pieces

_MOST_BYTES = 1 << 27  # of constraints that are kept for later requests
_MOST_STATES = 10_000  # of a constraint; a step of the model takes longer with more
_ANY_VALUE = {"type": ["string", "number", "boolean", "null", "array", "object"]}
_ANY_OBJECT = {"type": "object", "additionalProperties": _ANY_VALUE}
_COLDEST = 1e-3  # the temperature that replaces 0 for samplers that always draw


def build_constraint(key: str, tokenizer: Tokenizer) -> tuple[Regex | ValueError, int]:
    """Return the constraint of a schema or of tools, or the error of one that cannot be built; and its bytes."""
    ((kind, source),) = json.loads(key).items()
    try:
        built = JsonSchema(source, tokenizer) if kind == "schema" else ToolCalls(source, tokenizer)
        num_bytes = len(key) + len(built.pattern) + sum(table.nbytes for table in built.automaton)
        rule = f"have at most {_MOST_STATES} states on this server"
        require(built.automaton.num_states <= _MOST_STATES, "The schema", rule, built.automaton.num_states)
        return built, num_bytes
    except ValueError as error:
        return ValueError(str(error)), len(key)  # without the frames that the first one holds


@dataclass(frozen=True)
class Service:
    """The state that all requests to a model share, and the methods that answer a request."""

    model: Denoiser
    tokenizer: Tokenizer
    name: str
    engine: Engine
    limits: Limits
    metrics: Metrics
    builders: Builders
    constraints: KeptResults = field(default_factory=lambda: KeptResults(_MOST_BYTES))

    def describe(self) -> dict[str, Any]:
        """Return the model as /v1/models lists it."""
        return {
            "id": self.name,
            "object": "model",
            "created": 0,
            "owned_by": "dgemma",
            "max_model_len": self.model.config.max_position_embeddings,
            "canvas_length": self.model.config.canvas_length,
        }

    async def answer(self, body: ChatRequest | CompletionRequest, request: Request) -> Response:
        """Run a request; return its whole answer, or a stream of it."""
        texts = await self._prepare(body, request)
        rows = [BatchRow(text.plan, num_top=body.num_top) for text in texts]
        jobs = self._submit(rows, request, drafts=body.drafts and bool(body.stream))
        choices = [
            AnswerChoice(index, text, job, None if body.num_top is None else LogProbs(self.tokenizer))
            for index, (text, job) in enumerate(zip(texts, jobs, strict=True))
        ]
        answer = Answer(body, choices, self.name, self.tokenizer, self.engine, self.metrics)
        if body.stream:
            headers = {"Cache-Control": "no-store"}
            return StreamingResponse(answer.stream(), media_type="text/event-stream", headers=headers)
        async with self.watched(jobs, request):
            return JSONResponse(await answer.whole())

    async def infill(self, body: InfillRequest, request: Request) -> dict[str, Any]:
        """Fill the holes of a text."""
        tokens, limit = _as_row(body.tokens, self.model, param="tokens"), self.model.config.max_position_embeddings
        if tokens.shape[1] > limit:
            message = f"tokens must have at most {limit} ids, got {tokens.shape[1]}."
            raise ApiError(400, message, param="tokens", code="context_length_exceeded")
        try:
            row = await run_in_threadpool(infill_row, self.model, tokens, body.holes, seed=body.seed)
        except ValueError as error:
            message = in_json(str(error).replace("[(start, stop), ...]", "[[start, stop], ...]"))
            raise ApiError(400, message, param="holes", code="invalid_value") from None
        jobs = self._submit([row], request)
        async with self.watched(jobs, request):
            written = [event async for _, event in read_events(jobs) if isinstance(event, Written)][-1]
        self.metrics.forwards.inc(sum(written.steps))
        return {"tokens": written.tokens, "pieces": Pieces(self.tokenizer)(written.tokens), "steps": sum(written.steps)}

    async def decide(self, body: DecisionRequest, request: Request) -> dict[str, Any]:
        """Answer the questions of a /v1/systemone request, a few at a time between the steps of other requests."""
        answers, num_tokens, client = {}, 0, _client(request)
        async with time_limit(self.limits.seconds):
            found = await run_in_threadpool(self.engine.charged(client)(self._ask), body)
            for _ in body.questions:
                if await request.is_disconnected():
                    raise has_left()
                name, answers[name], num_read = await self.engine.call(partial(next, found), client)
                num_tokens += num_read
        usage = {"input_tokens": num_tokens, "output_tokens": 0}
        return {"model": self.name, "answers": answers, "usage": usage}

    def _ask(self, body: DecisionRequest) -> Iterator[TypedAnswer]:
        urls = {f"images.{number}": url for number, url in enumerate(body.images)}
        images = read_images(self.model, urls, may_fetch=self.limits.fetch_images)
        return answer_questions(self.model, self.tokenizer, body.state, body.questions, images, self.engine.prefixes)

    @contextlib.asynccontextmanager
    async def watched(self, jobs: list[Job], request: Request) -> AsyncIterator[None]:
        """Drop the rows of a request when its client leaves, and at the end."""

        async def leave() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            for job in jobs:
                job.send(has_left())

        watcher = asyncio.create_task(leave())
        try:
            yield
        finally:
            watcher.cancel()
            for job in jobs:
                self.engine.cancel(job)

    def _submit(self, rows: list[BatchRow], request: Request, *, drafts: bool = False) -> list[Job]:
        """Queue the rows of a request, if its client may have so many."""
        client, seconds = _client(request), self.limits.seconds
        if self.engine.num_rows(client) + len(rows) > self.limits.per_client:
            raise too_many(self.limits.per_client)
        return self.engine.submit(rows, seconds=seconds, client=client, drafts=drafts, model=self.model)

    async def _prepare(self, body: ChatRequest | CompletionRequest, request: Request) -> list[GrowingText]:
        """Plan a request in another thread. A constraint takes seconds, so its client waits for a turn to build it."""
        key, client = _constraint_key(body), _client(request)
        plan = partial(self.engine.charged(client)(self._plan), body, key)
        if key is None or key in self.constraints:
            return await run_in_threadpool(plan)
        async with time_limit(self.limits.seconds):
            return await self.builders.run(plan, client, request)

    def _plan(self, body: ChatRequest | CompletionRequest, key: str | None) -> list[GrowingText]:
        """Check a request, and return the text of each choice, with its plan. Choice i has the request's seed + i."""
        is_chat, num_choices = isinstance(body, ChatRequest), body.n or 1
        limit_name, max_tokens = body.most_tokens
        max_tokens = min(self.model.generation.max_new_tokens, self.limits.tokens) if max_tokens is None else max_tokens
        if max_tokens > self.limits.tokens:
            message = f"{limit_name} must be at most {self.limits.tokens}, got {max_tokens}."
            raise ApiError(400, message, param=limit_name, code="invalid_value")
        if is_chat and body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true.", param="top_logprobs", code="invalid_value")
        num_rows = num_choices * (1 if is_chat else len(body.prompts))
        most = min(self.limits.queue, self.limits.per_client)
        if num_rows > most:
            message = f"n must ask for at most {most} choices of all prompts, got {num_rows}."
            raise ApiError(400, message, param="n", code="invalid_value")
        options = self._options(body) | {"max_new_tokens": max_tokens}
        options["seed"] = [secrets.randbits(62) if body.seed is None else body.seed]
        texts = list[GrowingText]()
        try:
            if body.num_top is not None:
                token_texts(self.tokenizer)
            if key is not None:
                found = self.constraints.find(key, partial(build_constraint, key, self.tokenizer))
                if isinstance(found, ValueError):
                    raise found
                options["constraint"] = found
            for tokens, images in [self._read_chat(body)] if is_chat else ((prompt, None) for prompt in body.prompts):
                if isinstance(tokens, str):
                    tokens = self.tokenizer.encode(tokens, markers=False)
                plan = read_plan(self.model, _as_row(tokens, self.model), images=images, **options)
                for _ in range(num_choices):
                    own = replace(plan, seeds=plan.seeds + len(texts))
                    as_reply = is_chat and self.tokenizer.has_chat_template
                    texts.append(GrowingText(self.tokenizer, own, body.stops, max_tokens, as_reply=as_reply))
        except ImportError as error:
            raise ApiError(501, str(error)) from None
        except (ValueError, TypeError) as error:
            raise describe_refusal(str(error), body) from None
        return texts

    def _options(self, body: TextRequest) -> dict[str, Any]:
        options: dict[str, Any] = {"steps": body.steps, "top_k": body.top_k}
        options["top_p"] = None if body.top_p == 1 else body.top_p
        if body.temperature == 0:
            sampler: Any = default_sampler(self.model)
            if hasattr(sampler, "greedy"):
                options["sampler"] = replace(sampler, greedy=True)
            else:
                options["temperature"] = _COLDEST
        elif body.temperature is not None:
            options["temperature"] = float(body.temperature)
        return options

    def _read_chat(self, body: ChatRequest) -> tuple[list[int] | str, Images | None]:
        """Return the tokens of a chat, or without a chat template the texts of all turns; and its images."""
        for number, each in enumerate(body.messages):
            if each.content is None and not each.tool_calls:
                place = f"messages.{number}.content"
                raise ApiError(400, f"{place} is required.", param=place, code="missing_required_parameter")
        images = read_images(self.model, chat_urls(body.messages), may_fetch=self.limits.fetch_images)
        if not self.tokenizer.has_chat_template:
            if body.tools or images is not None:
                message = "tools and images need a chat template, which this model does not have. Leave them out."
                raise ApiError(400, message, param="tools" if body.tools else "messages")
            return "\n".join(message.text for message in body.messages), None
        messages = []
        for number, message in enumerate(body.messages):
            role = "system" if message.role == "developer" else message.role
            turn: dict[str, Any] = {"role": role, "content": message.text}
            if any(isinstance(part, ImagePart) for part in message.parts):
                turn["content"] = [
                    {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": part.text}
                    for part in message.parts
                ]
            for index, call in enumerate(message.tool_calls or []):
                place = f"messages.{number}.tool_calls.{index}.function.arguments"
                called = {"name": call.function.name, "arguments": _read_arguments(call, place)}
                turn.setdefault("tool_calls", []).append({"type": "function", "function": called})
            messages.append(turn | message.model_dump(include={"tool_call_id", "name"}, exclude_none=True))
        listed = [] if body.tool_choice == "none" else body.tools or []
        tools = [tool.model_dump(exclude_none=True) for tool in listed]
        return self.tokenizer.chat(messages, thinking=body.thinking, tools=tools or None, images=images), images


def _client(request: Request) -> str:
    name: str = request.scope["dgemma.client"]  # of `Gate`
    return name


def _constraint_key(body: ChatRequest | CompletionRequest) -> str | None:
    """Return the JSON of a schema or of required tools, which the text must follow."""
    form, chat = body.response_format, body if isinstance(body, ChatRequest) else None
    if form is not None and form.type == "json_schema":
        if form.json_schema is None:
            raise ApiError(400, "response_format.json_schema is required.", param="response_format.json_schema")
        return json.dumps({"schema": form.json_schema.schema_})
    if form is not None and form.type == "json_object":
        return json.dumps({"schema": _ANY_OBJECT})
    if chat is not None and (chat.tool_choice == "required" or isinstance(chat.tool_choice, ToolChoice)):
        tools = [tool.model_dump(exclude_none=True) for tool in chat.tools or []]
        if isinstance(chat.tool_choice, ToolChoice):
            tools = [tool for tool in tools if tool["function"]["name"] == chat.tool_choice.function.name]
        if not tools:
            raise ApiError(400, "tool_choice must name one of the tools.", param="tool_choice")
        return json.dumps({"tools": tools})
    return None


def _read_arguments(call: CalledTool, place: str) -> dict[str, Any]:
    """Return the arguments of a tool call in an earlier turn."""
    try:
        arguments = json.loads(call.function.arguments or "{}")  # clients write "" for none
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ApiError(400, f"{place} must be a JSON object, written as a text.", param=place, code="invalid_value")
    return arguments


def _as_row(tokens: list[int], model: Denoiser, param: str = "prompt") -> Any:
    vocab_size = model.config.vocab_size
    if not tokens or not all(0 <= token < vocab_size for token in tokens):
        raise ApiError(400, f"{param} must hold at least one token, with ids below {vocab_size}.", param=param)
    return torch.tensor([tokens], dtype=torch.int64, device=model.device)
