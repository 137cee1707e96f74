"""`dgemma generate`, `chat`, `infill` and `edit`: text out of noise, watched as it settles."""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from dgemma.cli import options, output
from dgemma.generate import Generation, OnStep, generate
from dgemma.infill import Infilling, edit, infill
from dgemma.tokenizer import Tokenizer
from dgemma.view.terminal import LiveView

_HOLE = re.compile(r"_{2,}")


def add_commands(commands: Any) -> None:
    """Put the four commands on the parser."""
    parser = commands.add_parser(
        "generate",
        help="continue a prompt, watching the canvas settle",
        description="Continue a prompt. On a terminal the canvas is shown as it settles, coloured by confidence.",
    )
    parser.add_argument("prompt", nargs="*", help="the text to continue; from standard input when left out or -")
    parser.add_argument("-n", "--max-new-tokens", type=int, default=256, metavar="N", help="(%(default)s)")
    parser.add_argument("--chat", action="store_true", help="treat the prompt as a user's turn, by the chat template")
    _finish(parser, _generate, pictures=True)

    parser = commands.add_parser(
        "chat",
        help="a conversation",
        description="A conversation, one line a turn. Leave with Ctrl-D or an empty line. The prefix is read once and "
        "kept between turns. A checkpoint without a chat template continues the text instead.",
    )
    parser.add_argument("-n", "--max-new-tokens", type=int, default=256, metavar="N", help="a turn (%(default)s)")
    parser.add_argument("--thinking", action="store_true", help="ask for a thought channel, shown dimmed")
    _finish(parser, _chat)

    parser = commands.add_parser(
        "infill",
        help="fill the holes of a text",
        description="Fill the holes of a text, seeing what stands on both sides. Two underscores or more are a hole of "
        "as many tokens.",
        epilog='example: dgemma infill "The ____ sat on the ____ mat."',
    )
    parser.add_argument("text", nargs="*", help="the text with its holes; from standard input when left out or -")
    _finish(parser, _infill)

    parser = commands.add_parser(
        "edit",
        help="rewrite a text in place",
        description="Rewrite a text in place: noise it to a level, then denoise it from there.",
        epilog='example: dgemma edit --level 0.4 --keep "the old man" "It was the old man who spoke."',
    )
    parser.add_argument("text", nargs="*", help="the text; from standard input when left out or -")
    parser.add_argument("--level", type=float, default=0.5, metavar="L", help="0 keeps, 1 forgets it (%(default)s)")
    parser.add_argument("--keep", action="append", default=[], metavar="WORDS", help="words that stay; repeatable")
    _finish(parser, _edit)


def _finish(parser: argparse.ArgumentParser, run: Any, *, pictures: bool = False) -> None:
    options.add_model_options(parser, default="dgemma/text")
    options.add_sampling_options(parser)
    output.add_view_options(parser, pictures=pictures)
    parser.set_defaults(run=run)


def _generate(arguments: argparse.Namespace) -> None:
    text = options.read_text(arguments.prompt)
    model, denoiser = options.load_denoiser(arguments)
    tokenizer = options.load_tokenizer(arguments)
    ids = tokenizer.chat(text) if arguments.chat else tokenizer.encode(text)
    prompt = torch.tensor([ids], device=model.device)
    with _live(arguments, tokenizer, prefix="" if arguments.chat else text) as view:
        out = generate(
            denoiser,
            prompt,
            max_new_tokens=arguments.max_new_tokens,
            on_step=view,
            record=bool(arguments.html or arguments.gif),
            **options.sampling_options(arguments, model, tokenizer),
        )
    output.write_pictures(arguments, out.trajectory, tokenizer)
    written = tokenizer.decode(out.new_tokens[0])
    if arguments.json:
        output.print_json(
            prompt=text, text=written, tokens=out.new_tokens[0].tolist(), seed=arguments.seed, **_counts(out)
        )
    else:
        output.print_text(written if arguments.chat else text + written)


def _chat(arguments: argparse.Namespace) -> None:
    model, denoiser = options.load_denoiser(arguments)
    tokenizer = options.load_tokenizer(arguments)
    settings = options.sampling_options(arguments, model, tokenizer)
    converses = tokenizer.has_chat_template
    if not converses:
        print(f"{arguments.model} has no chat template: it continues what you write.", file=sys.stderr)
    messages: list[dict[str, str]] = []
    read: list[int] = []  # the tokens in the cache
    cache = None
    while line := _read_line():
        messages.append({"role": "user", "content": line})
        if converses:
            asked = tokenizer.chat(messages, thinking=arguments.thinking)
        else:
            asked = [*read, *tokenizer.encode(line, bos=not read)]
        if asked[: len(read)] != read:  # the template renders the past differently from how it was written
            cache, read = None, []
        prompt = torch.tensor([asked[len(read) :]], device=model.device)
        with _live(arguments, tokenizer) as view:
            out = generate(
                denoiser, prompt, cache=cache, max_new_tokens=arguments.max_new_tokens, on_step=view, **settings
            )
        new = [token for token in out.new_tokens[0].tolist() if token != tokenizer.pad_token_id]
        reply = tokenizer.reply(new)
        if reply.thought and not arguments.json:
            output.print_text(f"({reply.thought})")
        answer = reply.answer if converses else tokenizer.decode(new)
        if arguments.json:
            output.print_json(text=answer, thought=reply.thought, **_counts(out))
        else:
            output.print_text(answer)
        messages.append({"role": "assistant", "content": reply.answer})
        read, cache = [*asked, *new], out.cache


def _infill(arguments: argparse.Namespace) -> None:
    text = options.read_text(arguments.text)
    model, denoiser = options.load_denoiser(arguments)
    tokenizer = options.load_tokenizer(arguments)
    ids, is_hole = _tokens_with_holes(text, tokenizer)
    _fill(
        arguments,
        text,
        tokenizer,
        lambda view: infill(
            denoiser,
            torch.tensor([ids], device=model.device),
            torch.tensor([is_hole], device=model.device),
            on_step=view,
            **options.sampling_options(arguments, model, tokenizer),
        ),
    )


def _edit(arguments: argparse.Namespace) -> None:
    text = options.read_text(arguments.text)
    model, denoiser = options.load_denoiser(arguments)
    tokenizer = options.load_tokenizer(arguments)
    ids, is_kept = _tokens_with_kept(text, arguments.keep, tokenizer)
    _fill(
        arguments,
        text,
        tokenizer,
        lambda view: edit(
            denoiser,
            torch.tensor([ids], device=model.device),
            noise_level=arguments.level,
            frozen=torch.tensor([is_kept], device=model.device),
            on_step=view,
            **options.sampling_options(arguments, model, tokenizer),
        ),
    )


def _fill(
    arguments: argparse.Namespace, text: str, tokenizer: Tokenizer, write: Callable[[OnStep | None], Infilling]
) -> None:
    """Run `infill` or `edit` under the live view and print what came of it."""
    with _live(arguments, tokenizer) as view:
        out = write(view)
    written = tokenizer.decode(out.tokens[0])
    if arguments.json:
        log_probs = [round(value, 4) for value in out.log_probs[0].tolist()]
        output.print_json(given=text, text=written, tokens=out.tokens[0].tolist(), log_probs=log_probs, **_counts(out))
    else:
        output.print_text(written)


def _tokens_with_holes(text: str, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Ids of a text, and which of them are holes: a run of underscores is as many."""
    ids, is_hole = [tokenizer.bos_token_id], [False]
    end = 0
    for hole in _HOLE.finditer(text):
        _extend(ids, is_hole, tokenizer.encode(text[end : hole.start()], bos=False), False)
        _extend(ids, is_hole, [tokenizer.pad_token_id] * len(hole.group()), True)
        end = hole.end()
    _extend(ids, is_hole, tokenizer.encode(text[end:], bos=False), False)
    if not any(is_hole):
        raise ValueError('needs a text with holes. Write two underscores or more: "The ____ sat on the mat."')
    return ids, is_hole


def _tokens_with_kept(text: str, kept: Sequence[str], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Ids of a text, and which of them belong to words that stay."""
    missing = [words for words in kept if words not in text]
    if missing:
        raise ValueError(f"--keep must name words of the text, got {missing[0]!r}.")
    ids, is_kept = [tokenizer.bos_token_id], [True]
    pattern = "|".join(re.escape(words) for words in sorted(kept, key=len, reverse=True)) or r"(?!)"
    for piece in re.split(f"({pattern})", text):
        if piece:
            _extend(ids, is_kept, tokenizer.encode(piece, bos=False), piece in kept)
    return ids, is_kept


def _extend(ids: list[int], marks: list[bool], new: list[int], mark: bool) -> None:
    ids.extend(new)
    marks.extend([mark] * len(new))


def _live(arguments: argparse.Namespace, tokenizer: Tokenizer, prefix: str = "") -> AbstractContextManager[Any]:
    """The live view where somebody looks, else nothing."""
    if not output.somebody_looks(arguments):
        return nullcontext()
    return LiveView(tokenizer, prefix=prefix, keep_blocks=arguments.command in ("generate", "chat"))


def _read_line() -> str:
    """What the user says next; empty at the end."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return ""


def _counts(out: Generation | Infilling) -> dict[str, Any]:
    return {"steps": int(out.steps.sum()), "tokens_per_forward": round(float(out.tokens_per_forward[0]), 3)}
