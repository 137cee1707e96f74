"""From a request to its answer: a plan for the engine, and the text in OpenAI's form, whole or as a stream."""

import asyncio
import contextlib
import json
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool

from dgemma.checkpoint.tokenizer import Tokenizer
from dgemma.checks import require
from dgemma.constraints.languages import JsonSchema, Regex, ToolCalls
from dgemma.model.denoiser import Denoiser
from dgemma.run.knobs import default_sampler
from dgemma.run.plan import Plan, read_plan
from dgemma.run.rows import Rows
from dgemma.serve.decisions import answer_questions
from dgemma.serve.engine import Call, Draft, Engine, Job, Result, Written
from dgemma.serve.errors import ApiError, timed_out
from dgemma.serve.gate import Limits
from dgemma.serve.metrics import Metrics
from dgemma.serve.protocol import (
    CalledTool,
    ChatRequest,
    CompletionRequest,
    DecisionRequest,
    InfillRequest,
    TextRequest,
    ToolChoice,
)
from dgemma.serve.text import GrowingText
from dgemma.tasks.infill import infill_row
from dgemma.view.pieces import Pieces

_MOST_BYTES = 1 << 27  # of constraints that are kept for later requests
_MOST_STATES = 10_000  # of a constraint; a step of the model takes longer with more
_MOST_BUILDS = 16  # constraints that wait to be built
_COLDEST = 1e-3  # the temperature that replaces 0 for samplers that always draw


class KeptConstraints:
    """The most recent constraints of requests and the errors of those that cannot be built, up to `most_bytes`."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._kept = most_bytes, OrderedDict[str, tuple[Regex | ValueError, int]]()

    def __contains__(self, key: str) -> bool:
        return key in self._kept

    def find(self, key: str, tokenizer: Tokenizer) -> Regex:
        """Return the constraint of a schema or of tools, and build it if it is not kept; raise its ValueError."""
        found, _ = self._kept.get(key) or self._add(key, tokenizer)
        if isinstance(found, ValueError):
            raise found
        return found

    def _add(self, key: str, tokenizer: Tokenizer) -> tuple[Regex | ValueError, int]:
        ((kind, source),) = json.loads(key).items()
        num_bytes = len(key)
        built: Regex | ValueError
        try:
            built = JsonSchema(source, tokenizer) if kind == "schema" else ToolCalls(source, tokenizer)
            num_bytes += len(built.pattern) + sum(table.nbytes for table in built.automaton)
            rule = f"have at most {_MOST_STATES} states on this server"
            require(built.automaton.num_states <= _MOST_STATES, "The schema", rule, built.automaton.num_states)
        except ValueError as error:
            built = error.with_traceback(None)
        self._kept[key] = (built, num_bytes)
        while len(self._kept) > 1 and sum(size for _, size in list(self._kept.values())) > self._most_bytes:
            self._kept.popitem(last=False)
        return built, num_bytes


@dataclass(frozen=True)
class Service:
    """The state that all requests share, and the methods that answer a request."""

    model: Denoiser
    tokenizer: Tokenizer
    name: str
    engine: Engine
    limits: Limits
    metrics: Metrics
    constraints: KeptConstraints = field(default_factory=lambda: KeptConstraints(_MOST_BYTES))
    builders: "Builders" = field(default_factory=lambda: Builders())

    def check_model(self, name: str) -> None:
        """Raise a 404 for a model that is not served."""
        if name != self.name:
            message = f"The model {name[:100]!r} does not exist. This server has {self.name!r}."
            raise ApiError(404, message, param="model", code="model_not_found")

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
        self.check_model(body.model)
        plan, text = await self._prepare(body, _client(request))
        job = self._submit(Rows(plan), request, drafts=body.drafts and bool(body.stream))
        answer = Answer(self, body, plan, text, job)
        if body.stream:
            return StreamingResponse(
                answer.stream(), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
            )
        return JSONResponse(await answer.whole(request))

    async def infill(self, body: InfillRequest, request: Request) -> dict[str, Any]:
        """Fill the holes of a text."""
        if body.model is not None:
            self.check_model(body.model)
        tokens, limit = _as_row(body.tokens, self.model, param="tokens"), self.model.config.max_position_embeddings
        if tokens.shape[1] > limit:
            message = f"tokens must have at most {limit} ids, got {tokens.shape[1]}."
            raise ApiError(400, message, param="tokens", code="context_length_exceeded")
        try:
            row = await run_in_threadpool(infill_row, self.model, tokens, body.holes, seed=body.seed)
        except ValueError as error:
            raise ApiError(400, str(error), param="holes", code="invalid_value") from None
        job = self._submit(row, request)
        async with self.watched(job, request):
            written = [event async for event in job.events() if isinstance(event, Written)][-1]
        self.metrics.forwards.inc(sum(written.steps))
        return {"tokens": written.tokens, "pieces": Pieces(self.tokenizer)(written.tokens), "steps": sum(written.steps)}

    async def decide(self, body: DecisionRequest, request: Request) -> dict[str, Any]:
        """Answer the questions of a /v1/systemone request, a few at a time between the steps of other requests."""
        self.check_model(body.model)
        end, answers, num_tokens = time.monotonic() + self.limits.seconds, {}, 0
        found = await run_in_threadpool(answer_questions, self.model, self.tokenizer, body.state, body.questions)
        for _ in body.questions:
            if await request.is_disconnected() or time.monotonic() > end:
                raise timed_out()
            name, answers[name], num_read = await self.engine.call(partial(next, found), _client(request))
            num_tokens += num_read
        usage = {"input_tokens": num_tokens, "output_tokens": 0}
        return {"model": self.name, "answers": answers, "usage": usage}

    @contextlib.asynccontextmanager
    async def watched(self, job: Job, request: Request) -> AsyncIterator[None]:
        """Drop a request when its client leaves, and at the end."""

        async def leave() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            job.send(ApiError(499, "The client has left."))

        watcher = asyncio.create_task(leave())
        try:
            yield
        finally:
            watcher.cancel()
            self.engine.cancel(job)

    def _submit(self, row: Rows, request: Request, *, drafts: bool = False) -> Job:
        return self.engine.submit(row, seconds=self.limits.seconds, client=_client(request), drafts=drafts)

    async def _prepare(self, body: ChatRequest | CompletionRequest, client: str) -> tuple[Plan, GrowingText]:
        """Plan a request in another thread. Constraints take seconds, so they get two threads and a queue of their own.

        A constraint that is known already needs no queue.
        """
        key = _constraint_key(body)
        plan = partial(self.engine.charged(client)(self._plan), body, key)
        if key is None or key in self.constraints:
            return await run_in_threadpool(plan)
        try:
            async with asyncio.timeout(self.limits.seconds):
                return await self.builders.run(plan)
        except TimeoutError:
            raise timed_out() from None

    def _plan(self, body: ChatRequest | CompletionRequest, key: str | None) -> tuple[Plan, GrowingText]:
        """Check a request, and return its plan and its text."""
        is_chat = isinstance(body, ChatRequest)
        max_tokens = (body.max_completion_tokens if is_chat else None) or body.max_tokens
        max_tokens = min(self.model.generation.max_new_tokens, self.limits.tokens) if max_tokens is None else max_tokens
        if max_tokens > self.limits.tokens:
            message = f"max_tokens must be at most {self.limits.tokens}, got {max_tokens}."
            raise ApiError(400, message, param="max_tokens", code="invalid_value")
        options = self._options(body) | {"max_new_tokens": max_tokens}
        options["seed"] = [secrets.randbits(62) if body.seed is None else body.seed]
        try:
            if key is not None:
                options["constraint"] = self.constraints.find(key, self.tokenizer)
            tokens = self._read_chat(body) if is_chat else body.prompt
            if isinstance(tokens, str):
                tokens = self.tokenizer.encode(tokens, markers=False)
            plan = read_plan(self.model, _as_row(tokens, self.model), **options)
        except ImportError as error:
            raise ApiError(501, str(error)) from None
        except (ValueError, TypeError) as error:
            code = "context_length_exceeded" if "max_position_embeddings" in str(error) else "invalid_value"
            raise ApiError(400, str(error), code=code) from None
        text = GrowingText(
            self.tokenizer,
            stops=body.stops,
            max_tokens=max_tokens,
            eos=plan.eos_token_ids,
            pad=plan.pad_token_id,
            as_reply=is_chat and self.tokenizer.has_chat_template,
        )
        return plan, text

    def _options(self, body: TextRequest) -> dict[str, Any]:
        options: dict[str, Any] = {"steps": body.steps, "top_k": body.top_k}
        options["top_p"] = None if body.top_p == 1 else body.top_p
        if body.temperature == 0:
            sampler = default_sampler(self.model)
            if is_dataclass(sampler) and "greedy" in {field.name for field in fields(sampler)}:
                options["sampler"] = replace(sampler, greedy=True)
            else:
                options["temperature"] = _COLDEST
        elif body.temperature is not None:
            options["temperature"] = float(body.temperature)
        return options

    def _read_chat(self, body: ChatRequest) -> list[int] | str:
        """Return the tokens of a chat, or without a chat template the texts of all turns."""
        if not self.tokenizer.has_chat_template:
            if body.tools:
                raise ApiError(400, "tools must be empty: this model has no chat template.", param="tools")
            return "\n".join(message.text for message in body.messages)
        messages = []
        for number, message in enumerate(body.messages):
            role = "system" if message.role == "developer" else message.role
            turn: dict[str, Any] = {"role": role, "content": message.text}
            for index, call in enumerate(message.tool_calls or []):
                place = f"messages.{number}.tool_calls.{index}.function.arguments"
                called = {"name": call.function.name, "arguments": _read_arguments(call, place)}
                turn.setdefault("tool_calls", []).append({"type": "function", "function": called})
            messages.append(turn | message.model_dump(include={"tool_call_id", "name"}, exclude_none=True))
        tools = (
            None if body.tool_choice == "none" else [tool.model_dump(exclude_none=True) for tool in body.tools or []]
        )
        return self.tokenizer.chat(messages, thinking=body.thinking, tools=tools or None)


class Builders:
    """Runs functions that take seconds, two at a time. Their threads do not keep the process from ending."""

    def __init__(self) -> None:
        self._places, self._num_waiting = asyncio.Semaphore(2), 0

    async def run(self, function: Callable[[], Result]) -> Result:
        """Return the result of a function; raise a 429 if too many wait already."""
        if self._num_waiting >= _MOST_BUILDS:
            raise ApiError(429, "Too many constraints are waiting to be built. Try again later.", code="queue_full")
        self._num_waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._num_waiting -= 1
        call = Call(function)
        threading.Thread(target=call.run, daemon=True).start()
        try:
            result: Result = await asyncio.wrap_future(call.future)
            return result
        finally:
            self._places.release()


def _client(request: Request) -> str:
    return "" if request.client is None else request.client.host


def _constraint_key(body: ChatRequest | CompletionRequest) -> str | None:
    """Return the JSON of a schema or of required tools, which the text must follow."""
    form, chat = body.response_format, body if isinstance(body, ChatRequest) else None
    if form is not None and form.type == "json_schema":
        if form.json_schema is None:
            raise ApiError(400, "response_format.json_schema is required.", param="response_format.json_schema")
        return json.dumps({"schema": form.json_schema.schema_})
    if chat is not None and (chat.tool_choice == "required" or isinstance(chat.tool_choice, ToolChoice)):
        tools = [tool.model_dump(exclude_none=True) for tool in chat.tools or []]
        if isinstance(chat.tool_choice, ToolChoice):
            tools = [tool for tool in tools if tool["function"]["name"] == chat.tool_choice.function.name]
        if not tools:
            raise ApiError(400, "tool_choice must name one of the tools.", param="tool_choice")
        return json.dumps({"tools": tools})
    return None


class Answer:
    """The answer to one request in OpenAI's form."""

    def __init__(
        self, service: Service, body: ChatRequest | CompletionRequest, plan: Plan, text: GrowingText, job: Job
    ) -> None:
        self._service, self._body, self._plan, self._text, self._job = service, body, plan, text, job
        self._is_chat = isinstance(body, ChatRequest)
        self._id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        self._frame = {"id": self._id, "object": kind, "created": int(time.time()), "model": service.name}
        self._start, self._pieces = time.monotonic(), Pieces(service.tokenizer)

    async def whole(self, request: Request) -> dict[str, Any]:
        """Wait for the end of the text. If the client leaves, the request is dropped."""
        try:
            async with self._service.watched(self._job, request):
                async for event in self._job.events():
                    if not isinstance(event, Draft):
                        self._add(event)
                    if self._text.finish_reason is not None:
                        break
        finally:
            self._end()
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": self._finish_reason()}
        choice |= {"message": self._message()} if self._is_chat else {"text": self._text.text}
        return {
            **self._frame,
            "object": "chat.completion" if self._is_chat else "text_completion",
            "choices": [choice],
            "usage": self._usage(),
            "dgemma": self._counts(),
        }

    async def stream(self) -> AsyncIterator[str]:
        """Yield server-sent events: a chunk per block, drafts if they are requested, and the end."""
        try:
            if self._is_chat:
                yield self._chunk({"role": "assistant", "content": ""})
            async for event in self._job.events():
                if isinstance(event, Draft):
                    yield self._draft(event)
                    continue
                self._add(event)
                if new := self._text.delta():
                    yield self._chunk({"content": new} if self._is_chat else new)
                if self._text.finish_reason is not None:
                    break
            if calls := self._tool_calls():
                yield self._chunk({"tool_calls": [{"index": at, **call} for at, call in enumerate(calls)]})
            yield self._chunk({} if self._is_chat else "", self._finish_reason(), self._counts())
            if self._body.stream_options is not None and self._body.stream_options.include_usage:
                yield _event({**self._frame, "choices": [], "usage": self._usage()})
            yield "data: [DONE]\n\n"
        except ApiError as error:  # the status is sent already
            yield _event(error.body())
        finally:  # also if the client has left
            self._end()

    def _add(self, event: Any) -> None:
        if not self._text.steps:
            self._service.metrics.first_block.observe(time.monotonic() - self._start)
        self._text.add(event)

    def _end(self) -> None:
        metrics = self._service.metrics
        metrics.tokens.inc(self._text.num_tokens)
        metrics.forwards.inc(sum(self._text.steps))
        if self._text.finish_reason is None:
            metrics.abandoned.inc()
        self._service.engine.cancel(self._job)

    def _chunk(self, new: Any, finish_reason: str | None = None, counts: dict[str, Any] | None = None) -> str:
        part = {"delta" if self._is_chat else "text": new}
        choice = {"index": 0, **part, "logprobs": None, "finish_reason": finish_reason}
        extension = {} if counts is None else {"dgemma": counts}
        return _event({**self._frame, "choices": [choice], **extension})

    def _draft(self, draft: Draft) -> str:
        content = {"block": draft.block, "step": draft.step, "pieces": self._pieces(draft.tokens)}
        return _event({**self._frame, "choices": [], "dgemma": {"draft": content}})

    def _message(self) -> dict[str, Any]:
        calls, reply = self._tool_calls(), self._text.reply
        message: dict[str, Any] = {"role": "assistant", "content": self._text.text, "refusal": None}
        if calls:
            message |= {"tool_calls": calls, "content": self._text.text or None}
        if reply is not None and reply.thought is not None:
            message["reasoning_content"] = reply.thought
        return message

    def _tool_calls(self) -> list[dict[str, Any]]:
        if self._text.reply is None or not isinstance(self._body, ChatRequest) or not self._body.tools:
            return []
        calls = [call for call in self._text.reply.tool_calls if call.arguments is not None]
        functions = [{"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)} for call in calls]
        return [
            {"id": f"call_{self._id[-12:]}_{at}", "type": "function", "function": function}
            for at, function in enumerate(functions)
        ]

    def _finish_reason(self) -> str | None:
        return "tool_calls" if self._tool_calls() else self._text.finish_reason

    def _usage(self) -> dict[str, int]:
        prompt, new = self._plan.prompt_tokens.shape[1], self._text.num_tokens
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def _counts(self) -> dict[str, Any]:
        steps = self._text.steps
        rate = self._text.num_tokens / sum(steps) if steps else 0.0
        return {"seed": int(self._plan.seeds[0, 0]), "steps": steps, "tokens_per_forward": rate}


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


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
