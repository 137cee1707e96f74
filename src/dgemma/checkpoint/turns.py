"""The text of chat turns: messages on their way to a template, and a model's turn as thought, answer and tool calls."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dgemma.checks import require
from dgemma.files import parse_json

Message = Mapping[str, Any]

IMAGE_MARKER = "<|image|>"  # stands for a whole image before `place_images`, and then for each of its vectors
THOUGHT_START = "<|channel>thought"
# An unclosed thought runs to the end: the token limit cut it off.
_THOUGHT = re.compile(re.escape(THOUGHT_START) + r"\n?(.*?)(?:<channel\|>|\Z)", re.DOTALL)
_TOOL_CALL = re.compile(r"<\|tool_call>(.*?)(?:<tool_call\|>|\Z)", re.DOTALL)
_TOOL_QUOTE = '<|"|>'


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A function call by the model. `arguments` is None if its text cannot be parsed."""

    name: str
    arguments: dict[str, Any] | None
    text: str  # as the model wrote it, between the markers


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The parts of a model turn. `thought` is None without a thought channel, and "" if it is empty."""

    answer: str
    thought: str | None
    tool_calls: tuple[ToolCall, ...]

    @classmethod
    def of(cls, text: str) -> "Reply":
        """Split the text of a model turn."""
        thoughts = [match.strip() for match in _THOUGHT.findall(text)]
        answer = _THOUGHT.sub("", text)
        calls = tuple(_parse_tool_call(match) for match in _TOOL_CALL.findall(answer))
        # A turn that calls a tool ends with the start of the tool's response.
        answer = _TOOL_CALL.sub("", answer).removesuffix("<|tool_response>")
        return cls(answer=answer.strip(), thought="\n".join(thoughts) if thoughts else None, tool_calls=calls)


def _parse_tool_call(text: str) -> ToolCall:
    """Parse `call:name{key:<|"|>text<|"|>,count:3}`: JSON with bare keys and a special quote token."""
    name, brace, body = text.strip().removeprefix("call:").partition("{")
    pieces = (brace + body).split(_TOOL_QUOTE)
    for index, piece in enumerate(pieces):
        if index % 2 == 1:
            pieces[index] = json.dumps(piece)
        else:
            piece = re.sub(r"([{,]\s*)([\w.-]+)(\s*:)", r'\1"\2"\3', piece)
            pieces[index] = re.sub(r"\bNone\b", "null", piece)  # the published template writes null as None
    arguments = None
    with suppress(ValueError):
        arguments = parse_json("".join(pieces), "a tool call")
    return ToolCall(name=name.strip(), arguments=arguments, text=text)


def without_thought(message: Message) -> dict[str, Any]:
    """Return a message for the history. The thought channel of a model turn is removed."""
    check_parts(message)
    content = message.get("content")
    if message.get("role") not in ("assistant", "model") or content is None:
        return dict(message)
    if isinstance(content, str):
        return {**message, "content": _THOUGHT.sub("", content).strip()}
    require(isinstance(content, list | tuple), "Tokenizer.chat content", "be a text or a list of parts", content)
    cleaned = [{**part, "text": _THOUGHT.sub("", part["text"]).strip()} if _is_text(part) else part for part in content]
    return {**message, "content": cleaned}


def check_parts(message: Message) -> None:
    """Raise for parts that templates leave out or replace by the marker of a video. Tools may answer in other parts."""
    content, rule = message.get("content"), 'be {"type": "text", "text": "…"} or {"type": "image"}'
    for part in content if isinstance(content, list | tuple) and message.get("role") != "tool" else ():
        is_image = isinstance(part, Mapping) and part.get("type") == "image"
        require(is_image or _is_text(part), "a part of Tokenizer.chat content", rule, part)


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)


def as_turns(messages: Sequence[Message], *, thinking: bool, add_generation_prompt: bool) -> str:
    """Return a conversation in the published turn format, without tools: the template of `ByteTokenizer`."""
    turns = [(message["role"], _plain_text(message.get("content")).strip()) for message in messages]
    system, text = "", ""
    if turns[0][0] == "system":
        (_, system), *turns = turns
    if system or thinking:
        text += "<|turn>system\n" + ("<|think|>\n" if thinking else "") + f"{system}<turn|>\n"
    for name, content in turns:
        role = {"assistant": "model", "model": "model", "user": "user"}.get(name)
        require(role is not None, "ByteTokenizer.chat role", "be user or assistant here", name)
        text += f"<|turn>{role}\n{content}<turn|>\n"
    return text + ("<|turn>model\n" if add_generation_prompt else "")


def _plain_text(content: Any) -> str:
    """Return a message's content as text. A list of parts is joined, with a marker for every image."""
    if isinstance(content, list | tuple):
        content = "".join(part["text"] if _is_text(part) else IMAGE_MARKER for part in content)
    require(isinstance(content, str), "ByteTokenizer.chat content", "be a text, or a list of parts", content)
    return content
