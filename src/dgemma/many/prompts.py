"""Many prompts through one model: `generate_many` keeps every place in a batch busy, and can be resumed."""

import hashlib
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Unpack

import numpy as np
import torch
from torch import Tensor

from dgemma.checkpoint.identity import fingerprint
from dgemma.checkpoint.images import encode_text, image_digest, processor_of, take_images
from dgemma.checkpoint.tokenizer import Tokenizer
from dgemma.checks import as_int, as_lists, check_types, require, short_repr, show
from dgemma.files import read_json_lines
from dgemma.many.batch import Batch, BatchRow
from dgemma.many.prefixes import SharedPrefixes
from dgemma.many.run_file import RunFile
from dgemma.model.denoiser import Denoiser, check_denoiser
from dgemma.model.vision.images import Images
from dgemma.printing import progress_bar
from dgemma.run.options import Default, TextOptions, fill_in, select, takes_options
from dgemma.run.plan import Plan, read_plan
from dgemma.values import identify

_REPORT_SECONDS = 30  # between two lines of progress, where no bar can be shown
_PROMPT_KEYS = ("prompt", "messages", "tokens")
_OWN_KEYS = ("id", "seed", "max_new_tokens", "images")


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The result of one prompt of `generate_many`."""

    index: int  # the prompt's place in `prompts`
    seed: int
    new_tokens: Tensor  # (N,) on the host, padded after the stop token, like a row of `generate`
    steps: Tensor  # (blocks,) steps per block
    tokens_per_forward: float
    text: str | None  # None without a tokenizer
    id: Any = None  # copied from a prompt that is a dictionary
    prompt: Any = None  # as it was in `prompts`

    __repr__ = short_repr


class ManyOptions(TextOptions, total=False):
    """Options of `generate_many`, which describes them, and of `generate_on_ray`."""

    batch_size: Annotated[int, Default(8)]
    out: str | Path | None
    tokenizer: Tokenizer | None
    in_order: Annotated[bool, Default(True)]
    progress: Annotated[bool, Default(True)]


@takes_options(ManyOptions)
def generate_many(
    model: Denoiser, prompts: Iterable[Any], *, prefixes: SharedPrefixes | None = None, **options: Unpack[ManyOptions]
) -> Iterator[Completion]:
    """Generate from many prompts, `batch_size` at a time, and yield a `Completion` for each.

    When a row finishes, the next prompt takes its place; the other rows do not wait. In float32 on a CPU the tokens are
    those of `generate`, prompt by prompt, unless rounding decides between two almost equally probable tokens.

    - `prompts`: any iterable. It is read as rows become free. A prompt is a text, a chat (a list of messages), token
      ids (N,), or a dictionary with "prompt", "messages" or "tokens". A dictionary may also have "id", which is copied
      into the result, its own "seed" and "max_new_tokens", and "images", a list of files. A text begins with its
      images, unless it has a `<|image|>` for each. Those of a chat are parts of its messages.
    - `seed`: prompt i has seed + i.
    - `out`: a file of JSON lines. Each result is appended when it is finished. A second call with the same arguments
      continues after a kill, and also yields the results that are already in the file.
    - `tokenizer`: for texts and chats. The default is that of the checkpoint that the model was loaded from.
    - `prefixes`: prompts that begin with the same tokens read them once. Pass a `SharedPrefixes` to share them with
      other calls, or to bound their memory.
    - `in_order`: False yields results as they finish.
    - `progress` shows a progress bar, with the time left if `prompts` has a length, or a line now and then in a pipe.
    - All other options are those of `generate`, and apply to every prompt.

    Example: `for result in dgemma.generate_many(model, ["Once", "It was"], out="run.jsonl"): print(result.text)`.
    """
    check_denoiser("generate_many", model)
    many = read_many("generate_many", prompts, options)
    worker = Worker(model, many["tokenizer"], many["batch_size"], select(options, TextOptions), prefixes)
    return run_prompts(worker, prompts, many)


def read_many(owner: str, prompts: Iterable[Any], options: ManyOptions) -> ManyOptions:
    """Check what the types of the options of `generate_many` do not say, and fill in the defaults."""
    many = fill_in(options, ManyOptions)
    require(many["batch_size"] >= 1, f"{owner} batch_size", "be an integer of at least 1", many["batch_size"])
    is_one = isinstance(prompts, str | bytes | Mapping) or getattr(prompts, "ndim", 1) == 0
    require(not is_one, f"{owner} prompts", "be a collection of prompts", prompts, "Write [prompt].")
    return many


class PromptFile:
    """Prompts in a file of JSON lines, each a text, a list of messages or a dictionary. It is read line by line.

    With `as_chats`, a text is a user's turn.
    """

    def __init__(self, path: str | Path, *, as_chats: bool = False) -> None:
        self.path, self.as_chats = Path(path), as_chats

    def __len__(self) -> int:
        return sum(1 for _ in read_json_lines(self.path))

    def __iter__(self) -> Iterator[Any]:
        for place, line in read_json_lines(self.path):
            try:
                entry = dict(_as_entry(line, "a line"))
            except ValueError:
                rule = 'be a prompt, such as {"prompt": "Once"} or {"messages": [...]}'
                raise ValueError(f"{place} must {rule}, got {show(line)}.") from None
            if self.as_chats and "prompt" in entry:
                entry["messages"] = [{"role": "user", "content": entry.pop("prompt")}]
            yield entry


def _as_entry(prompt: Any, owner: str) -> Mapping[str, Any]:
    """Return any form of prompt as a dictionary with "prompt", "messages" or "tokens"."""
    if isinstance(prompt, Mapping):
        present = [key for key in _PROMPT_KEYS if key in prompt]
        unknown = sorted(prompt.keys() - {*_PROMPT_KEYS, *_OWN_KEYS})
        if len(present) != 1 or unknown:
            raise ValueError(
                f"{owner} must have one of {', '.join(_PROMPT_KEYS)}, and may have {', '.join(_OWN_KEYS)}, "
                f"got {', '.join(map(str, prompt)) or 'nothing'}."
            )
        return {**prompt, **_as_entry(prompt[present[0]], owner)}
    if isinstance(prompt, str):
        return {"prompt": prompt}
    listed = as_lists(prompt) if isinstance(prompt, Tensor | np.ndarray) else prompt
    if isinstance(listed, Sequence) and len(listed):
        if all(isinstance(message, Mapping) for message in listed):
            return {"messages": listed}
        if all(as_int(token) is not None for token in listed):
            return {"tokens": listed}
    raise ValueError(f"{owner} must be a text, a chat or token ids (N,), got {show(prompt)}.")


def _take_images(entry: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return the messages of an entry without their pictures, and the pictures of the entry."""
    messages, sources = take_images(entry.get("messages", ()))
    listed = entry.get("images") or ()
    fits = isinstance(listed, list | tuple) and not (listed and messages)
    require(fits, "images", "be a list of pictures of a text; those of a chat are parts of its messages", listed)
    return messages, [*sources, *listed]


class Worker:
    """One model with its batch, which takes prompts and returns the results of those that are finished."""

    def __init__(
        self,
        model: Denoiser,
        tokenizer: Tokenizer | None,
        batch_size: int,
        options: Mapping[str, Any],
        prefixes: SharedPrefixes | None = None,
    ) -> None:
        seed = as_int(options.get("seed", 0))
        require(seed is not None, "generate_many seed", "be an integer", options.get("seed"), "Prompt i has seed + i.")
        self._model, self._options, self._seed, self._batch_size = model, dict(options), seed or 0, batch_size
        self._tokenizer = tokenizer
        if tokenizer is None and model.source is not None:
            with suppress(FileNotFoundError):  # token ids need no tokenizer
                self._tokenizer = Tokenizer.from_pretrained(model.source)
        self._batch = Batch(model, prefixes)
        self._running: dict[int, Any] = {}  # prompts by index
        self._plan({"tokens": [0]}, self._seed)  # reports bad options now

    @property
    def has_room(self) -> bool:
        return len(self._batch) < self._batch_size

    def add(self, index: int, prompt: Any) -> None:
        """Take a prompt. It starts at the next step."""
        entry = _as_entry(prompt, f"generate_many prompt {index}")
        seed = self._seed + index if entry.get("seed") is None else entry["seed"]
        try:
            self._batch.add(BatchRow(self._plan(entry, seed), index=index))
        except ValueError as error:
            raise ValueError(f"generate_many prompt {index}: {error}") from None
        self._running[index] = prompt

    def finished(self) -> list[Completion]:
        """Take one step of all prompts, and return the results of those that finished in it."""
        return [self._complete(row) for row in self._batch.step() if row.ended]

    def _complete(self, row: BatchRow) -> Completion:
        new_tokens, prompt = row.new_tokens[0], self._running.pop(row.index)
        return Completion(
            index=row.index,
            seed=int(row.plan.seeds[0, 0]),
            new_tokens=new_tokens,
            steps=row.steps[0],
            tokens_per_forward=int(row.plan.count_tokens(row.new_tokens)) / sum(int(c.forwards) for c in row.commits),
            text=None if self._tokenizer is None else self._tokenizer.decode(new_tokens),
            id=prompt.get("id") if isinstance(prompt, Mapping) else None,
            prompt=prompt,
        )

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Everything that the tokens depend on, except the prompts, as JSON values."""
        plan = self._plan({"tokens": [0]}, self._seed)
        return {
            "seed": self._seed,
            "max_new_tokens": plan.num_blocks * plan.canvas_len,
            "steps": plan.num_steps,
            "noise": identify(plan.noise),
            **{name: identify(value) for name, value in vars(plan.knobs).items()},
            "eos_token_ids": list(plan.eos_token_ids),
            "allowed": identify(plan.span.allowed),
            "constraint": getattr(self._options.get("constraint"), "pattern", None),
            "may_end": identify(None if plan.language is None else plan.language.may_end),
            "canvas_length": plan.canvas_len,
            **({} if self._model.image_tokens is None else {"image_tokens": self._model.image_tokens}),
            "pad_token_id": plan.pad_token_id,
            "config": _digest(repr(self._model.config).encode()),
            "weights": fingerprint(self._model),
            "tokenizer": None if self._tokenizer is None else self._tokenizer.fingerprint,
        }

    def _plan(self, entry: Mapping[str, Any], seed: Any) -> Plan:
        options = {**self._options, "seed": [seed]}
        if entry.get("max_new_tokens") is not None:
            options["max_new_tokens"] = entry["max_new_tokens"]
        messages, sources = _take_images(entry)
        images = processor_of(self._model)(sources) if sources else None
        tokens = torch.tensor([self._tokens(entry, messages, images)], dtype=torch.int64, device=self._model.device)
        return read_plan(self._model, tokens, images=images, **options)

    def _tokens(self, entry: Mapping[str, Any], messages: list[dict[str, Any]], images: Images | None) -> list[int]:
        if "tokens" in entry:
            tokens, vocab_size = list(entry["tokens"]), self._model.config.vocab_size
            require(all(0 <= token < vocab_size for token in tokens), "tokens", f"be ids in [0, {vocab_size})", tokens)
            return tokens
        if self._tokenizer is None:
            raise ValueError(
                "generate_many tokenizer must be set for texts and chats, got None. Pass "
                "tokenizer=Tokenizer.from_pretrained(path), or prompts of token ids."
            )
        if "prompt" in entry:
            return encode_text(self._tokenizer, entry["prompt"], images)
        return self._tokenizer.chat(messages, images=images)


def run_prompts(workers: Any, prompts: Iterable[Any], many: ManyOptions) -> Iterator[Completion]:
    """Yield the result of every prompt, and write it to the file; results that are in the file are read from it.

    workers: a `Worker`, or several with the members of one.
    """
    file = None if many["out"] is None else RunFile(many["out"], workers.settings)
    completed = _complete(workers, enumerate(prompts), file)
    total = len(prompts) if isinstance(prompts, Sized) else None
    return _show(_sort(completed) if many["in_order"] else completed, total=total, progress=many["progress"])


def _complete(workers: Any, prompts: Iterator[tuple[int, Any]], file: RunFile | None) -> Iterator[Completion]:
    """Yield results as they finish, or as they are found in the file."""
    num_running = 0
    with nullcontext() if file is None else file:
        while True:
            while workers.has_room and (following := next(prompts, None)) is not None:
                index, prompt = following
                if file is not None and index in file:
                    yield _load(file, index, prompt)
                else:
                    workers.add(index, prompt)
                    num_running += 1
            if not num_running:
                return
            for completion in workers.finished():
                num_running -= 1
                if file is not None:
                    file.append(_store(file, completion))
                yield completion


def _store(file: RunFile, completion: Completion) -> dict[str, Any]:
    """Return a result as a line of the file, with a digest of its prompt. Padding is left out."""
    tokens = completion.new_tokens.tolist()
    while tokens and tokens[-1] == file.settings["pad_token_id"]:
        tokens.pop()
    digest = _prompt_digest(completion.index, completion.prompt)
    stored = {**vars(completion), "new_tokens": tokens, "steps": completion.steps.tolist(), "prompt": digest}
    return {name: value for name, value in stored.items() if value is not None}


def _load(file: RunFile, index: int, prompt: Any) -> Completion:
    """Return a result of the file, for the same prompt."""
    canvas_len, vocab_size = file.settings["canvas_length"], file.settings["noise"]["vocab_size"]

    def build(line: dict[str, Any]) -> tuple[str, Completion]:
        digest, tokens, steps = (line.pop(name) for name in ("prompt", "new_tokens", "steps"))
        padding = len(steps) * canvas_len - len(tokens)
        limits = (vocab_size, tokens), (2**31, steps)
        if padding < 0 or not all(type(x) is int and 0 <= x < most for most, values in limits for x in values):
            raise ValueError
        new_tokens = torch.tensor([*tokens, *[file.settings["pad_token_id"]] * padding], dtype=torch.int64)
        completion = Completion(**{"text": None, **line}, new_tokens=new_tokens, steps=torch.tensor(steps))
        check_types(completion)
        return digest, completion

    digest, completion = file.read(index, build)
    if digest != _prompt_digest(index, prompt):
        raise ValueError(
            f"{file.path} must be continued with the prompts that it began with, but prompt {index} differs. "
            "Use the old prompts, or another file."
        )
    return replace(completion, prompt=prompt)


def _sort(completed: Iterator[Completion]) -> Iterator[Completion]:
    """Yield results by index. A result that finishes early waits for all results before it."""
    early: dict[int, Completion] = {}
    following = 0
    for completion in completed:
        early[completion.index] = completion
        while following in early:
            yield early.pop(following)
            following += 1


def _show(completed: Iterator[Completion], *, total: int | None, progress: bool) -> Iterator[Completion]:
    with progress_bar(desc="generating", unit="prompt", total=total, show=progress) as bar:
        began = reported = time.monotonic()
        for number, completion in enumerate(completed, start=1):
            bar.update()
            now = time.monotonic()
            if progress and bar.disable and now - reported >= _REPORT_SECONDS:  # no terminal
                of_all = "" if total is None else f" of {total}"
                print(f"generating: {number}{of_all} prompts in {now - began:.0f} s", file=sys.stderr, flush=True)
                reported = now
            yield completion


def _prompt_digest(index: int, prompt: Any) -> str:
    entry = _as_entry(prompt, f"generate_many prompt {index}")
    content = {name: value for name, value in entry.items() if name not in ("id", "images")}
    messages, sources = _take_images(entry)
    if sources:  # by their pixels, because a file may have changed
        content |= {"images": [image_digest(source) for source in sources]}
        content |= {"messages": messages} if messages else {}
    return _digest(json.dumps(content, sort_keys=True, default=str).encode())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
