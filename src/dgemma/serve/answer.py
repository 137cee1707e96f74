"""The answer to one request in OpenAI's form, whole or as a stream. It has one or several choices."""

import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from dgemma.checkpoint.tokenizer import Tokenizer
from dgemma.serve.engine import Draft, Engine, Job, Written, read_events
from dgemma.serve.errors import ApiError
from dgemma.serve.log_probs import LogProbs
from dgemma.serve.metrics import Metrics
from dgemma.serve.protocol import ChatRequest, CompletionRequest
from dgemma.serve.text import GrowingText
from dgemma.view.pieces import Pieces


@dataclass(frozen=True, eq=False)
class AnswerChoice:
    """One row of a request, and its text so far."""

    index: int
    text: GrowingText
    job: Job
    log_probs: LogProbs | None  # None: the request wants none


class Answer:
    """The answer to one request."""

    def __init__(
        self,
        body: ChatRequest | CompletionRequest,
        choices: Sequence[AnswerChoice],
        name: str,
        tokenizer: Tokenizer,
        engine: Engine,
        metrics: Metrics,
    ) -> None:
        self._body, self._choices, self._engine, self._metrics = body, choices, engine, metrics
        self._is_chat = isinstance(body, ChatRequest)
        self._id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        self._frame = {"id": self._id, "object": kind, "created": int(time.time()), "model": name}
        self._start, self._pieces = time.monotonic(), Pieces(tokenizer)

    async def whole(self) -> dict[str, Any]:
        """Wait for the end of all texts."""
        last: dict[AnswerChoice, Written] = {}
        try:
            async for choice, event in self._events():
                if not isinstance(event, Draft):
                    self._add(choice, event)
                    last[choice] = event
        finally:
            self._end()
        choices = []
        for choice in self._choices:
            part: dict[str, Any] = {"message": self._message(choice)} if self._is_chat else {"text": choice.text.text}
            part |= {"index": choice.index, "logprobs": self._log_probs(choice, last[choice])}
            choices.append(part | {"finish_reason": self._finish_reason(choice)})
        return {
            **self._frame,
            "object": "chat.completion" if self._is_chat else "text_completion",
            "choices": choices,
            "usage": self._usage(),
            "dgemma": _counts(self._choices),
        }

    async def stream(self) -> AsyncIterator[str]:
        """Yield server-sent events: a chunk per block, drafts if they are requested, and the end."""
        try:
            if self._is_chat:
                for choice in self._choices:
                    yield self._chunk(choice, {"role": "assistant", "content": ""})
            async for choice, event in self._events():
                if isinstance(event, Draft):
                    yield self._draft(choice, event)
                    continue
                self._add(choice, event)
                new, log_probs = choice.text.delta(), self._log_probs(choice, event)
                if new or log_probs:
                    yield self._chunk(choice, {"content": new} if self._is_chat else new, log_probs=log_probs)
                if choice.text.finish_reason is None:
                    continue
                if calls := self._tool_calls(choice):
                    yield self._chunk(choice, {"tool_calls": [{"index": at, **call} for at, call in enumerate(calls)]})
                reason, counts = self._finish_reason(choice), _counts([choice])
                yield self._chunk(choice, {} if self._is_chat else "", finish_reason=reason, counts=counts)
            if self._body.stream_options is not None and self._body.stream_options.include_usage:
                yield _event({**self._frame, "choices": [], "usage": self._usage()})
            yield "data: [DONE]\n\n"
        except ApiError as error:  # the status is sent already
            yield _event(error.body())
        finally:  # also if the client has left
            self._end()

    async def _events(self) -> AsyncIterator[tuple[AnswerChoice, Draft | Written]]:
        """Yield the events of all choices as they come, until every text has ended."""
        choices = {choice.job: choice for choice in self._choices}
        async for job, event in read_events([*choices]):
            if choices[job].text.finish_reason is None:
                yield choices[job], event
            if all(choice.text.finish_reason is not None for choice in self._choices):
                return  # the jobs that a stop string ended write no more

    def _add(self, choice: AnswerChoice, event: Written) -> None:
        if not any(other.text.steps for other in self._choices):
            self._metrics.first_block.observe(time.monotonic() - self._start)
        choice.text.add(event)
        if choice.text.finish_reason is not None:
            self._engine.cancel(choice.job)  # a stop string ends it early

    def _end(self) -> None:
        texts = [choice.text for choice in self._choices]
        self._metrics.tokens.inc(sum(text.num_tokens for text in texts))
        self._metrics.forwards.inc(sum(sum(text.steps) for text in texts))
        if any(text.finish_reason is None for text in texts):
            self._metrics.abandoned.inc()
        for choice in self._choices:
            self._engine.cancel(choice.job)

    def _chunk(
        self,
        choice: AnswerChoice,
        new: Any,
        *,
        log_probs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        counts: dict[str, Any] | None = None,
    ) -> str:
        part = {"index": choice.index, "delta" if self._is_chat else "text": new}
        part |= {"logprobs": log_probs, "finish_reason": finish_reason}
        extension = {} if counts is None else {"dgemma": counts}
        return _event({**self._frame, "choices": [part], **extension})

    def _draft(self, choice: AnswerChoice, draft: Draft) -> str:
        pieces = self._pieces(draft.tokens)
        content = {"choice": choice.index, "block": draft.block, "step": draft.step, "pieces": pieces}
        return _event({**self._frame, "choices": [], "dgemma": {"draft": content}})

    def _log_probs(self, choice: AnswerChoice, written: Written) -> dict[str, Any] | None:
        """Return the log-probabilities of tokens that are not sent yet."""
        if choice.log_probs is None:
            return None
        form = choice.log_probs.chat if self._is_chat else choice.log_probs.completion
        return form(written.scores, choice.text.num_tokens)

    def _message(self, choice: AnswerChoice) -> dict[str, Any]:
        calls, reply, text = self._tool_calls(choice), choice.text.reply, choice.text.text
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"tool_calls": calls, "content": text or None}
        if reply is not None and reply.thought is not None:
            message["reasoning_content"] = reply.thought
        return message

    def _tool_calls(self, choice: AnswerChoice) -> list[dict[str, Any]]:
        if choice.text.reply is None or not isinstance(self._body, ChatRequest) or not self._body.tools:
            return []
        calls = [call for call in choice.text.reply.tool_calls if call.arguments is not None]
        calls = calls[:1] if self._body.parallel_tool_calls is False else calls
        functions = [{"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)} for call in calls]
        return [
            {"id": f"call_{self._id[-12:]}_{choice.index}_{at}", "type": "function", "function": function}
            for at, function in enumerate(functions)
        ]

    def _finish_reason(self, choice: AnswerChoice) -> str | None:
        return "tool_calls" if self._tool_calls(choice) else choice.text.finish_reason

    def _usage(self) -> dict[str, int]:
        """Count the tokens of all choices, and each prompt once."""
        prompts = self._choices[:: self._body.n or 1]
        prompt = sum(choice.text.plan.prompt_tokens.shape[1] for choice in prompts)
        new = sum(choice.text.num_tokens for choice in self._choices)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _counts(choices: Sequence[AnswerChoice]) -> dict[str, Any]:
    """Return the seed of the first choice, the forwards of all blocks, and tokens per forward."""
    steps = [num_steps for choice in choices for num_steps in choice.text.steps]
    rate = sum(choice.text.num_tokens for choice in choices) / sum(steps) if steps else 0.0
    return {"seed": int(choices[0].text.plan.seeds[0, 0]), "steps": steps, "tokens_per_forward": rate}


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
