"""Odd requests to every route of the server, odd schemas, patterns and grammars, and damaged result files."""

import contextlib
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import dgemma
from fuzz.files import prompt, tiny_model
from fuzz.harness import Family, UnsafeOutput
from fuzz.mutate import CONTROL, ODD_JSON, damage_bytes, damage_json, dump_json

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None, 2]}, "maxItems": 3},
        "date": {"type": "string", "format": "date"},
        "code": {"type": "string", "pattern": "^[A-Z]{2}\\d+$"},
        "next": {"$ref": "#/$defs/leaf"},
    },
    "required": ["name"],
    "$defs": {"leaf": {"anyOf": [{"type": "null"}, {"const": 3}, {"type": "number", "exclusiveMinimum": 1}]}},
}
# Values that belong into a schema, so that damage often leaves one that is built.
ODD_SCHEMA = [
    *ODD_JSON,
    *(["string", "null"], {"type": "string"}, {"$ref": "#"}, {"$ref": "#/properties/age"}, {"oneOf": [True, False]}),
    *({"allOf": [{"type": "integer"}]}, "^.*a.{9}$", "[" * 500, "(a|b)*c{3}", "\\p{L}+", "(?i)a", "date-time", "uuid"),
    *({"type": "string", "maxLength": 10**6}, {"enum": ["ab" * 6000]}, {"minItems": 40}, {"maxItems": -3}, 40, 19_999),
]
RED = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)
TOOL = {"type": "function", "function": {"name": "look", "description": "d", "parameters": SCHEMA}}
BODIES = [
    (
        "/v1/chat/completions",
        {
            "model": "toy",
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]},
                {"role": "user", "content": [{"type": "text", "text": "<turn|>hi"}]},
            ],
            "max_completion_tokens": 8,
            "temperature": 0.5,
            "seed": 1,
            "stop": ["x"],
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "boolean"}}},
            "tools": [TOOL],
            "tool_choice": "auto",
        },
    ),
    (
        "/v1/chat/completions",
        {
            "model": "toy",
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": RED, "detail": "low"}}]}
            ],
            "max_tokens": 8,
            "n": 2,
            "logprobs": True,
            "top_logprobs": 2,
            "response_format": {"type": "json_object"},
        },
    ),
    ("/v1/completions", {"model": "toy", "prompt": ["once", "a"], "max_tokens": 8, "n": 2, "logprobs": 3, "stop": "a"}),
    (
        "/v1/completions",
        {
            "model": "toy",
            "prompt": "<mask>once",
            "max_tokens": 8,
            "top_p": 0.9,
            "top_k": 3,
            "steps": 2,
            "stream": True,
            "drafts": True,
            "stream_options": {"include_usage": True},
            "stop": "a",
        },
    ),
    ("/v1/infill", {"model": "toy", "tokens": [200, 201, 202, 203, 204], "holes": [[1, 2], [3, 4]], "seed": 2}),
    (
        "/v1/systemone",
        {
            "model": "toy",
            "state": {"a": [1]},
            "questions": {
                "q": {"type": "choice", "instructions": "?", "criteria": {"a": None, "b": "c"}},
                "r": {"type": "noul", "instructions": "?"},
                "s": {"type": "score", "instructions": "?", "criteria": ["low", "high"]},
            },
        },
    ),
]
PATHS = (
    *("/", "/health", "/metrics", "/replay", "/page.js", "/page.{}"),
    *("/v1/models", "/v1/models/toy", "/%00", "/a" * 99),
)


def prepare_requests(folder: Path) -> Any:
    from dgemma.serve.app import create_app  # imports the optional server

    create_app  # noqa: B018
    torch.set_num_threads(1)
    model = dgemma.DiffusionGemma(dgemma.presets.tiny(vision=True)).eval()
    model.reset_parameters(torch.Generator().manual_seed(0))
    return SimpleNamespace(model=model, client=None)


def client_of(context: Any) -> Any:
    """Return a client of a server in this worker: threads do not survive a fork."""
    if context.client is None:
        from starlette.testclient import TestClient

        from dgemma.serve.app import create_app
        from dgemma.serve.gate import Limits

        app = create_app(context.model, dgemma.ByteTokenizer(), name="toy", limits=Limits(tokens=32, seconds=20.0))
        context.client = TestClient(app, base_url="http://localhost", raise_server_exceptions=False)
        context.client.__enter__()
    return context.client


def attempt_request(context: Any, source: random.Random, folder: Path) -> None:
    client = client_of(context)
    if source.random() < 0.05:
        answer = client.get(source.choice(PATHS), headers={"x": "a" * source.choice((1, 5000))})
    else:
        path, body = source.choice(BODIES)
        odd = ODD_SCHEMA if source.random() < 0.2 else ODD_JSON
        content = dump_json(damage_json(body, source, odd=odd) if source.random() < 0.95 else body)
        if source.random() < 0.1:
            content = damage_bytes(content, source)
        kind = "application/json" if source.random() < 0.97 else source.choice(("text/plain", "", CONTROL[:3]))
        with contextlib.suppress(UnicodeEncodeError):
            kind.encode("ascii")
        answer = client.post(path, content=content, headers={"content-type": kind.encode("ascii", "replace")})
    if answer.status_code >= 500 and answer.status_code not in (501, 503, 504):
        raise UnsafeOutput(f"{answer.status_code} {answer.text[:200]}")
    if "Traceback" in answer.text:
        raise UnsafeOutput(answer.text[:200])
    if answer.status_code >= 400:
        error = answer.json()["error"]
        if set(error) != {"message", "type", "param", "code"} or not error["message"]:
            raise UnsafeOutput(answer.text[:200])
        raise SystemExit(1)


GRAMMARS = (
    'start: NUMBER | "(" start "+" start ")"\nNUMBER: /[0-9]+/',
    'start: item ("," item)*\nitem: WORD\nWORD: /[a-z]{1,4}/i',
    'start: a\na: b b\nb: c c | "x"\nc: "y" | a "z"',
)
PATTERNS = ("[a-z]+(, [a-z]+)*", "(a|b)*c{3,9}", r"\d{4}-\d{2}", ".*a.{5}", "x[^y]{0,30}y", "(?:é|😀){2}", r"\p{Lu}\w*")
PIECES = (*"()[]{}", "{9}", "{0,99999}", "*", "+?", *"|\\^$", ".*", "(?i)", "(?=", "\0", CONTROL)


def damage_text(text: str, source: random.Random) -> str:
    """Return a text with pieces of patterns inserted, removed or repeated."""
    for _ in range(source.choice((0, 1, 1, 2, 4))):
        at = source.randrange(len(text) + 1)
        piece = source.choice(PIECES) * source.choice((1, 1, 1, 2, 50, 3000))
        end = at + source.choice((0, 0, 1, 3))
        text = text[:at] + piece + text[end:]
    return text


def attempt_constraint(context: Any, source: random.Random, folder: Path) -> None:
    tokenizer, kind = dgemma.ByteTokenizer(), source.randrange(4)
    if kind == 0:
        constraint = dgemma.Regex(damage_text(source.choice(PATTERNS), source), tokenizer)
    elif kind == 1:
        depth = source.choice((0, 1, 2, 3, 10**9))
        constraint = dgemma.Grammar(damage_text(source.choice(GRAMMARS), source), tokenizer, depth=depth)
    elif kind == 2:
        tool = damage_json(TOOL, source, odd=ODD_SCHEMA) if source.random() < 0.5 else TOOL
        constraint = dgemma.ToolCalls([tool], tokenizer, most=source.choice((1, 2)))
    else:
        depth = source.choice((1, 3, 50, 10**9))
        constraint = dgemma.JsonSchema(damage_json(SCHEMA, source, odd=ODD_SCHEMA), tokenizer, depth=depth)
    if source.random() < 0.25:  # a build takes most of the time of a case
        constraint.automaton.trimmed()


def prepare_results(folder: Path) -> Any:
    model = tiny_model()
    list(dgemma.generate_many(model, list(prompt(3)), out=folder / "run.jsonl", batch_size=2, **RUN))
    return SimpleNamespace(model=model, data=(folder / "run.jsonl").read_bytes())


RUN: dict[str, Any] = {"max_new_tokens": 8, "steps": 2, "seed": 0, "progress": False}


def attempt_result(context: Any, source: random.Random, folder: Path) -> int:
    """Go on with a damaged file of results."""
    lines = context.data.splitlines(keepends=True)
    at = source.randrange(len(lines))
    if source.random() < 0.3:
        data = damage_bytes(context.data, source)
    else:
        line = lines[at]
        with contextlib.suppress(ValueError):
            line = dump_json(damage_json(json.loads(line), source)) + b"\n"
        lines[at] = line if source.random() < 0.8 else b"[" * 5000
        data = b"".join(lines)
    file = folder / "run.jsonl"
    file.write_bytes(data)
    results = list(dgemma.generate_many(context.model, list(prompt(3)), out=file, batch_size=2, **RUN))
    for result in results:
        tokens = torch.as_tensor(result.new_tokens)
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < context.model.config.vocab_size:
            raise UnsafeOutput(f"tokens outside the vocabulary: {tokens.tolist()}")
    return len(data)


FAMILIES = [
    Family("requests", prepare_requests, attempt_request, 10),
    Family("constraints", lambda folder: None, attempt_constraint, 8),
    Family("result files", prepare_results, attempt_result, 6),
]
