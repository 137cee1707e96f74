"""Typed decisions: a probability for every allowed answer, in the request and response form of vLLM's /v1/systemone.

The types of questions have vLLM's names: "noul" for yes or no, "choice" for one of several options, and "score" for a
level of a scale. vLLM reads the probability of one label token. Here `dgemma.decide_many` compares whole options by
the chain rule, so they may have several tokens.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from dgemma.checkpoint.tokenizer import IMAGE_MARKER, Tokenizer
from dgemma.many.prefixes import SharedPrefixes
from dgemma.model.denoiser import Denoiser
from dgemma.model.vision.images import Images
from dgemma.serve.errors import ApiError
from dgemma.serve.protocol import Question
from dgemma.tasks.slots import FilledTemplate, Slot, Template, decide_many

_MOST_OPTIONS = 64


class TypedAnswer(NamedTuple):
    """The answer to one question, and the number of tokens that were read for it."""

    name: str
    answer: dict[str, Any]
    num_tokens: int


def answer_questions(
    model: Denoiser,
    tokenizer: Tokenizer,
    state: Any,
    questions: Mapping[str, Question],
    images: Images | None = None,
    prefixes: SharedPrefixes | None = None,
) -> Iterator[TypedAnswer]:
    """Check questions about images and `state`, a text or a JSON value; yield answers. One forward answers several."""
    options = {name: _options(name, question) for name, question in questions.items()}
    pieces: dict[str, Template] = {}
    num_tokens: dict[str, int] = {}
    limit = model.config.max_position_embeddings - model.config.canvas_length
    for name, question in questions.items():
        prompt = _prompt(tokenizer, state, question, options[name], 0 if images is None else len(images))
        num_tokens[name] = len(prompt if images is None else tokenizer.place_images(prompt, images))
        pieces[name] = [prompt] if images is None else _with_images(tokenizer, prompt, images)
        if num_tokens[name] > limit:
            message = f"questions.{name} must have at most {limit} tokens with the state, got {num_tokens[name]}."
            raise ApiError(400, message, param="questions", code="context_length_exceeded")
    written = {name: [tokenizer.encode(one, bos=False, markers=False) for one in options[name]] for name in options}
    templates: list[Template] = [[*pieces[name], Slot(written[name])] for name in options]
    decided = decide_many(model, templates, tokenizer=tokenizer, prefixes=prefixes, progress=False)
    return _read_answers(decided, questions, options, num_tokens)


def _read_answers(
    decided: Iterator[FilledTemplate],
    questions: Mapping[str, Question],
    options: Mapping[str, dict[str, Any]],
    num_tokens: Mapping[str, int],
) -> Iterator[TypedAnswer]:
    try:
        for name, filled in zip(questions, decided, strict=True):
            law = filled.answers[0].probabilities.tolist()
            yield TypedAnswer(name, _answer(questions[name], options[name], law), num_tokens[name])
    except ValueError as error:
        message = str(error)
        for number, name in enumerate(questions):
            message = message.replace(f"decide_many templates[{number}]", f"questions.{name}")
        raise ApiError(400, message, param="questions", code="invalid_value") from None


def _prompt(
    tokenizer: Tokenizer, state: Any, question: Question, options: dict[str, Any], num_images: int
) -> list[int]:
    """Return the ids of a question, after a marker for each image."""
    prompt = f"{_as_text(state)}\n\n{_ask(question, options)}\n"
    if tokenizer.has_chat_template:
        parts = [*[{"type": "image"}] * num_images, {"type": "text", "text": prompt}]
        return tokenizer.chat([{"role": "user", "content": parts if num_images else prompt}])
    marks = tokenizer.encode(IMAGE_MARKER * num_images)
    return [*marks, *tokenizer.encode(f"{prompt}Answer: ", bos=False, markers=False)]


def _with_images(tokenizer: Tokenizer, prompt: list[int], images: Images) -> Template:
    """Return a prompt as pieces: the images, and the ids between their markers."""
    marker, pieces, start = tokenizer.token_id(IMAGE_MARKER), list[Any](), 0
    for number, at in enumerate(at for at, token in enumerate(prompt) if token == marker):
        pieces += [prompt[start:at], images.select([number])]
        start = at + 1
    return [piece for piece in (*pieces, prompt[start:]) if len(piece)]


def _options(name: str, question: Question) -> dict[str, Any]:
    """Return the allowed answers of a question, with their descriptions."""
    criteria, place = question.criteria, f"questions.{name}.criteria"
    if question.type == "noul":
        if criteria is None or (isinstance(criteria, dict) and criteria.keys() <= {"true", "false"}):
            return {"yes": (criteria or {}).get("true"), "no": (criteria or {}).get("false")}
        rule = "be null, or describe true and false"
    elif question.type == "score":
        if isinstance(criteria, list) and 2 <= len(criteria) <= 10:
            return {str(level): description for level, description in enumerate(criteria)}
        rule = "be a list of 2 to 10 levels, the lowest first"
    else:
        if isinstance(criteria, dict) and 2 <= len(criteria) <= _MOST_OPTIONS and all(criteria):
            return criteria
        rule = f"map 2 to {_MOST_OPTIONS} options to descriptions or null"
    raise ApiError(400, f"{place} must {rule}.", param=place)


def _ask(question: Question, options: dict[str, Any]) -> str:
    described = [name if text is None else f"{name}: {_as_text(text)}" for name, text in options.items()]
    return "\n".join([question.instructions, *described, f"Answer with one of: {', '.join(options)}."])


def _answer(question: Question, options: dict[str, Any], probabilities: list[float]) -> dict[str, Any]:
    if question.type == "noul":
        return {"type": "noul", "noul": probabilities[0]}
    entropy = -sum(p * math.log(p) for p in probabilities if p > 0)
    answer: dict[str, Any] = {
        "type": question.type,
        "probabilities": dict(zip(options, probabilities, strict=True)),
        "confidence": 1 - entropy / math.log(len(options)),
    }
    if question.type == "score":
        score = sum(level * p for level, p in enumerate(probabilities))
        return {**answer, "score": score, "legend": {level: _as_text(text) for level, text in options.items()}}
    return {**answer, "choice": max(answer["probabilities"], key=answer["probabilities"].get)}


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
