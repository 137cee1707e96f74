"""`dgemma generate`, `chat`, `infill` and `edit`: text from noise, with a live view."""

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from dgemma.checkpoint.images import encode_text, processor_of
from dgemma.checkpoint.tokenizer import Tokenizer
from dgemma.cli import loading, output
from dgemma.cli.loading import Writer
from dgemma.many.prompts import PromptFile, generate_many
from dgemma.model.vision.images import Images
from dgemma.run.generate import generate
from dgemma.run.recorded.trajectory import Generation
from dgemma.tasks.infill import Infilling, edit, infill
from dgemma.view.terminal import LiveView

_HOLE = re.compile(r"_{2,}|\[\.\.\.\]|\[…\]")
_LENGTHS = (1, 2, 3, 4, 6, 8, 12)  # tokens that are tried for a hole of any length


def run_generate(arguments: argparse.Namespace) -> None:
    """Continue one prompt, or the prompts of --input."""
    if arguments.input or arguments.out:
        _generate_many(arguments)
        return
    text = loading.join_words(arguments.prompt)
    writer = loading.load_writer(arguments)
    tokenizer = writer.tokenizer
    _note_length(arguments, writer)
    if text.endswith(" ") and "constraint" not in writer.settings:
        output.print_note("The prompt ends with a space. Words bring their own, so leave it out.")
    if arguments.chat and not tokenizer.has_chat_template:
        raise ValueError(f"--chat needs a model with a chat template, {arguments.model} has none. Remove --chat.")
    images = _read_images(arguments, writer)
    tokens = (
        tokenizer.chat(_turn(text, images), images=images) if arguments.chat else encode_text(tokenizer, text, images)
    )
    prefix = "" if arguments.chat else text
    out, view = _write(arguments, writer, tokens, prefix=prefix, images=images, record=output.is_recorded(arguments))
    output.write_pictures(arguments, tokenizer, out.recorded)
    new = [token for token in _written(out, writer) if token != tokenizer.pad_token_id]
    answer = tokenizer.decode(new)
    if arguments.json:
        output.print_json({"prompt": text, "text": answer, "tokens": new, "seed": arguments.seed, **_counts(out)})
    else:
        output.print_text(answer if arguments.chat else text + answer)
    _print_counts(view, out)


def _generate_many(arguments: argparse.Namespace) -> None:
    if not (arguments.input and arguments.out) or arguments.prompt:
        raise ValueError("--input and --out must be used together, without a prompt. Name both files.")
    if arguments.json or arguments.image or output.is_recorded(arguments):
        raise ValueError(
            "--json, --image, --html and --gif must not be used with --input. The results are in the file of --out."
        )
    prompts = PromptFile(arguments.input, as_chats=arguments.chat)
    num_prompts = len(prompts)  # now, so that a missing file is noticed before the model is loaded
    writer = loading.load_writer(arguments)
    _note_length(arguments, writer)
    results = generate_many(
        writer.denoiser,
        prompts,
        batch_size=arguments.batch_size,
        out=arguments.out,
        tokenizer=writer.tokenizer,
        in_order=False,
        max_new_tokens=arguments.max_new_tokens,
        progress=not arguments.quiet,
        **writer.settings,
    )
    try:
        for _ in results:
            pass
    except KeyboardInterrupt:
        output.print_note(f"\nFinished results are in {arguments.out}. The same command continues.")
        raise
    if not arguments.quiet:
        print(f"{arguments.out} holds {output.counted(num_prompts, 'result')}.", file=sys.stderr)


def run_chat(arguments: argparse.Namespace) -> None:
    """Have a conversation."""
    with suppress(ImportError):  # not on every system
        import readline  # noqa: F401
    writer = loading.load_writer(arguments)
    tokenizer = writer.tokenizer
    _note_length(arguments, writer)
    converses = tokenizer.has_chat_template
    if not converses:
        is_shipped = arguments.model.startswith("dgemma/text")
        what = "writes stories and is no assistant" if is_shipped else "has no chat template and continues your text"
        opening, other = "Once upon a time there was", "google/diffusiongemma-26B-A4B-it"
        output.print_note(f'{arguments.model} {what}. Type "{opening}". For answers: dgemma chat -m {other}')
    first_seed = writer.settings.pop("seed")
    images = _read_images(arguments, writer)
    messages: list[dict[str, Any]] = []
    cached_tokens: list[int] = []
    cache = None
    while line := _read_line():
        messages += [{"role": "user", "content": line}] if messages else _turn(line, images)
        if converses:
            tokens = tokenizer.chat(messages, thinking=arguments.thinking, images=images)
        else:
            is_first = not cached_tokens
            new_tokens = encode_text(tokenizer, line, images) if is_first else tokenizer.encode(f"\n{line}", bos=False)
            tokens = [*cached_tokens, *new_tokens]
        if tokens[: len(cached_tokens)] != cached_tokens:  # the template renders earlier turns differently
            cache, cached_tokens = None, []
        seed = first_seed + len(messages) // 2  # each turn draws its own noise
        unread = images if cache is None else None  # a cache holds them
        out, view = _write(arguments, writer, tokens[len(cached_tokens) :], seed=seed, cache=cache, images=unread)
        new = _written(out, writer)
        cached_tokens, cache = [*tokens, *new], out.cache
        reply = tokenizer.reply(new)
        answer = reply.answer if converses else tokenizer.decode(new)
        messages.append({"role": "assistant", "content": answer})
        if arguments.json:
            output.print_json({"text": answer, "thought": reply.thought, "seed": seed, **_counts(out)})
        else:
            output.print_text(f"({reply.thought})\n{answer}" if reply.thought else answer)
        _print_counts(view, out)


def _read_images(arguments: argparse.Namespace, writer: Writer) -> Images | None:
    return processor_of(writer.denoiser)(arguments.image) if arguments.image else None


def _turn(text: str, images: Images | None) -> list[dict[str, Any]]:
    """Return a user's turn: its images, then its text."""
    if images is None:
        return [{"role": "user", "content": text}]
    return [{"role": "user", "content": [{"type": "image"}] * len(images) + [{"type": "text", "text": text}]}]


def _write(
    arguments: argparse.Namespace, writer: Writer, tokens: list[int], *, prefix: str = "", **options: Any
) -> tuple[Generation, LiveView | None]:
    """Run `generate` under the live view, if there is one."""
    with _view(arguments, writer, prefix=prefix) as view:
        out = generate(
            writer.denoiser,
            writer.tokens(tokens),
            max_new_tokens=arguments.max_new_tokens,
            on_step=view,
            progress=not arguments.quiet,
            **writer.settings,
            **options,
        )
    return out, view


def _note_length(arguments: argparse.Namespace, writer: Writer) -> None:
    """Print one line if -n is rounded up. Under a constraint a text ends within -n if it can."""
    num_tokens, canvas_len = arguments.max_new_tokens, writer.denoiser.config.canvas_length
    constraint = writer.settings.get("constraint")
    fits = constraint is not None and constraint.automaton.shortest()[0] <= num_tokens
    whole = num_tokens + -num_tokens % canvas_len
    is_refused = whole > writer.denoiser.config.max_position_embeddings
    if num_tokens < whole and not (fits or is_refused or arguments.quiet):
        output.print_note(f"-n {num_tokens} is rounded up to {whole}, a multiple of the canvas length {canvas_len}.")


def run_infill(arguments: argparse.Namespace) -> None:
    """Fill the holes of a text."""
    text = loading.join_words(arguments.text)
    if not _HOLE.search(text):
        raise ValueError('The text must have a hole: "The ____ sat down." or "The [...] sat down."')
    writer = loading.load_writer(arguments)
    pad = writer.tokenizer.pad_token_id

    def cut(length: int) -> tuple[list[int], list[bool]]:
        """Return ids and holes, with this length for holes of any length."""
        return _tokenise(text, _HOLE.pattern, writer.tokenizer, lambda hole: [pad] * (hole.count("_") or length))

    has_any_length, constraint = any("[" in hole for hole in _HOLE.findall(text)), writer.settings.get("constraint")
    lengths = constraint.automaton.lengths(_LENGTHS[-1]) if constraint is not None else _LENGTHS
    texts = [cut(length) for length in lengths or _LENGTHS]  # if no length fits, `infill` refuses
    ids, is_hole = texts[_find_likeliest(arguments, writer, texts) if has_any_length else 0]
    _fill(arguments, text, writer, infill, ids, holes=writer.tokens(is_hole))


@torch.inference_mode()
def _find_likeliest(
    arguments: argparse.Namespace, writer: Writer, texts: Sequence[tuple[list[int], list[bool]]]
) -> int:
    """Fill the holes of several texts, and return the index of the most likely one.

    Texts of different lengths are compared by their log-likelihood in the causal mode.
    """
    columns = [torch.tensor((ids, is_hole, [True] * len(ids))).T for ids, is_hole in texts]
    model = writer.denoiser
    tokens, holes, real = pad_sequence(columns, batch_first=True).to(model.device).unbind(-1)
    options = {**writer.settings, "seed": [writer.settings["seed"]] * len(texts), "progress": not arguments.quiet}
    scores = []
    for row, kept in zip(infill(model, tokens, holes.bool(), attention_mask=real, **options).tokens, real, strict=True):
        text = row[None, kept.bool()]
        log_probs = model.causal_logits(text)[:, :-1].log_softmax(-1)
        scores.append(float(log_probs.gather(-1, text[:, 1:, None]).sum()))
    return scores.index(max(scores))


def run_edit(arguments: argparse.Namespace) -> None:
    """Rewrite a text in place."""
    text = loading.join_words(arguments.text)
    missing = [words for words in arguments.keep if words not in text or not words]
    if missing:
        raise ValueError(f"--keep must name words of the text, got {missing[0]!r}.")
    writer = loading.load_writer(arguments)
    # The longest first, so that a phrase takes precedence over its parts.
    pattern = "|".join(re.escape(words) for words in sorted(arguments.keep, key=len, reverse=True)) or "(?!)"
    ids, is_kept = _tokenise(text, pattern, writer.tokenizer)
    if arguments.keep and all(is_kept[1:]):
        raise ValueError("--keep must leave words to rewrite, got the whole text. Keep fewer words.")
    _fill(arguments, text, writer, edit, ids, noise_level=arguments.level, frozen=writer.tokens(is_kept))


def _tokenise(
    text: str, pattern: str, tokenizer: Tokenizer, marked: Callable[[str], list[int]] | None = None
) -> tuple[list[int], list[bool]]:
    """Return the ids of a text and whether each belongs to a match of `pattern`; `marked` gives the ids of a match."""
    # A token that starts a word includes the space before it, so a match includes that space too.
    space = " ?" if len(tokenizer.encode(" a", bos=False)) == 1 else ""
    pattern = f"{space}(?:{pattern})"
    ids, marks = [tokenizer.bos_token_id], [False]
    for piece in re.split(f"({pattern})", text):
        is_marked = re.fullmatch(pattern, piece) is not None
        new = marked(piece) if is_marked and marked is not None else tokenizer.encode(piece, bos=False)
        ids += new
        marks += [is_marked] * len(new)
    return ids, marks


def _fill(
    arguments: argparse.Namespace, text: str, writer: Writer, fill: Callable[..., Infilling], ids: list[int], **how: Any
) -> None:
    """Run `infill` or `edit` under the live view and print the result."""
    tokenizer = writer.tokenizer
    with _view(arguments, writer) as view:
        out = fill(
            writer.denoiser,
            writer.tokens(ids),
            # Models that were tuned on whole replies expect end tokens after the text.
            tail_token_id=tokenizer.eos_token_id if tokenizer.has_chat_template else None,
            on_step=view,
            record=output.is_recorded(arguments),
            progress=not arguments.quiet,
            **how,
            **writer.settings,
        )
    output.write_pictures(arguments, tokenizer, *(out.trajectories or ()))
    answer = tokenizer.decode(out.tokens[0])
    if arguments.json:
        log_probs = [round(value, 4) for value in out.log_probs[0].tolist()]
        result = {"given": text, "text": answer, "tokens": out.tokens[0].tolist(), "log_probs": log_probs}
        output.print_json({**result, "seed": arguments.seed, **_counts(out)})
    else:
        output.print_text(answer)
    _print_counts(view, out)


def _print_counts(view: LiveView | None, out: Generation | Infilling) -> None:
    """Print the line that stays after a live view: tokens written, forwards and seconds."""
    if view is not None:
        num_forwards = int(out.steps.sum())
        num_tokens = round(num_forwards * float(out.tokens_per_forward[0]))
        tokens, forwards = output.counted(num_tokens, "token"), output.counted(num_forwards, "forward")
        print(f"{tokens}, {forwards}, {view.seconds:.1f} s", file=sys.stderr)


@contextmanager
def _view(arguments: argparse.Namespace, writer: Writer, prefix: str = "") -> Iterator[LiveView | None]:
    """Run the block under the live view, if there is one; yield the view or None."""
    view: AbstractContextManager[LiveView | None] = nullcontext()
    if output.is_watched(arguments):
        view = LiveView(
            writer.tokenizer,
            prefix=prefix,
            keep_blocks=arguments.command in ("generate", "chat"),
            eos_token_ids=writer.denoiser.generation.eos_token_id,
        )
    # On a CPU, autograd's bookkeeping would make the steps of a small model 4 % slower.
    with torch.inference_mode(writer.denoiser.device.type == "cpu"), view as shown:
        yield shown


def _read_line() -> str:
    """Read the user's next line; empty at the end of the input."""
    is_asked = sys.stdin.isatty() and sys.stdout.isatty()
    try:
        return input("> " if is_asked else "")
    except EOFError:
        print("\n" if is_asked else "", end="")
        return ""
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input must be UTF-8, got {error.reason}.") from None


def _written(out: Generation, writer: Writer) -> list[int]:
    """Return the new tokens up to and including the stop token."""
    new: Sequence[int] = out.new_tokens[0].tolist()
    stops = writer.denoiser.generation.eos_token_id
    end = next((i for i, token in enumerate(new, start=1) if token in stops), len(new))
    return list(new[:end])


def _counts(out: Generation | Infilling) -> dict[str, Any]:
    return {"steps": int(out.steps.sum()), "tokens_per_forward": round(float(out.tokens_per_forward[0]), 3)}
