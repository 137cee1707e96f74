"""The commands and their options. No module imported here imports torch, so mistakes are reported at once."""

import argparse
from pathlib import Path
from typing import Any

from dgemma.cli import options, types

_FORMATS = ("int4", "int8", "fp8", "nvfp4")
_PRESETS = ("tiny", "small")
API_KEY = "DGEMMA_API_KEY"  # environment variable of `dgemma serve`


def add_commands(commands: Any) -> None:
    """Add every command to the parser. Each command sets `module`, the file that has its `run_COMMAND`."""
    for add in (
        *(_add_generate, _add_race, _add_chat, _add_infill, _add_edit, _add_sudoku),
        *(_add_info, _add_bench, _add_quantize, _add_evaluate, _add_train, _add_serve),
    ):
        add(commands)


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="continue a prompt",
        usage="dgemma generate [OPTION ...] [PROMPT ...]",
        description="Continue a prompt. A terminal shows the canvas while it is denoised: the prompt is bold, certain "
        "words are plain, uncertain ones are coloured, and noise is faint.",
        epilog=lambda: (
            "examples:\n"
            '  dgemma generate "Once upon a time"\n'
            '  dgemma generate --steps 16 --html run.html "It was"\n'
            '  dgemma generate --regex "[A-Z][a-z]+ [0-9]+" "The train left at"\n'
            "  dgemma generate --json - < prompt.txt\n"
            "  dgemma generate --input prompts.jsonl --out run.jsonl\n"
            "      many prompts; the same command continues a run that was stopped\n\n" + types.describe_samplers()
        ),
    )
    _add_prompt(parser)
    _add_length(parser, "maximum number of tokens to write")
    parser.add_argument("--chat", action="store_true", help="send the prompt as a user's turn, with the chat template")
    group = parser.add_argument_group("many prompts")
    group.add_argument(
        "--input",
        metavar="FILE",
        help='JSON lines, each a text, {"prompt": …} or {"messages": […]}; a line may have its own seed, '
        "max_new_tokens and id",
    )
    group.add_argument(
        "--out",
        type=types.writable_file,
        metavar="FILE",
        help="JSON lines file for the results; prompts with a result in it are skipped",
    )
    _add_batch_size(group, earlier="--slots", default=8, help="prompts at a time")
    _add_options(parser)


def _add_batch_size(parser: Any, *, earlier: str, default: int, help: str) -> None:
    """Add `--batch-size`, and the name that it had in earlier versions, which the help does not show."""
    # If two exclusive options are given, argparse overlooks one whose value equals its default. So these options have
    # no default, and the parser has one.
    parser.set_defaults(batch_size=default)
    either = parser.add_mutually_exclusive_group()
    help = f"{help} ({default})"
    either.add_argument("--batch-size", type=types.count, default=argparse.SUPPRESS, metavar="B", help=help)
    either.add_argument(earlier, dest="batch_size", type=types.count, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def _add_race(commands: Any) -> None:
    parser = commands.add_parser(
        "race",
        help="watch diffusion and autoregressive writing next to each other",
        usage="dgemma race [OPTION ...] [PROMPT ...]",
        description="Continue a prompt twice with the same weights: by diffusion, and autoregressively. Both get the "
        "same time on the device. The autoregressive temperature is that of --temperature, or 0.8.",
        epilog='example:\n  dgemma race "Once upon a time"',
    )
    _add_prompt(parser)
    _add_length(parser, "maximum number of tokens to write", default=128)
    _add_options(parser, constraints=False, pictures=False)


def _add_chat(commands: Any) -> None:
    parser = commands.add_parser(
        "chat",
        help="have a conversation",
        usage="dgemma chat [OPTION ...]",
        description="Have a conversation, one line per turn. Leave with Ctrl-D or an empty line. Earlier turns stay in "
        "the cache. A checkpoint without a chat template continues your text instead.",
        epilog="examples:\n  dgemma chat -m google/diffusiongemma-26B-A4B-it --fast\n"
        "  dgemma chat --json < questions.txt\n      one JSON object per turn",
    )
    _add_length(parser, "maximum number of tokens per turn")
    parser.add_argument("--thinking", action="store_true", help="let the model think first; show thoughts in brackets")
    _add_options(parser, constraints=False, pictures=False)


def _add_infill(commands: Any) -> None:
    parser = commands.add_parser(
        "infill",
        help="fill the holes of a text",
        usage="dgemma infill [OPTION ...] [TEXT ...]",
        description="Fill the holes of a text. The model sees the text on both sides. Two or more underscores are a "
        "hole, with one token per underscore.",
        epilog="example:\n"
        '  dgemma infill "Once upon a time there was a fox named Max. He lived ________, and he was happy."',
    )
    parser.add_argument(
        "text", nargs="*", metavar="TEXT", help="the text with its holes; - or nothing reads standard input"
    )
    _add_options(parser, model="dgemma/text-mask")  # under mask noise, the network can tell the holes from the text


def _add_edit(commands: Any) -> None:
    parser = commands.add_parser(
        "edit",
        help="rewrite a text in place",
        usage="dgemma edit [OPTION ...] [TEXT ...]",
        description="Rewrite a text: add noise up to a level, then denoise it.",
        epilog='example:\n  dgemma edit --level 0.4 --keep "the old man" "It was the old man who spoke."',
    )
    parser.add_argument("text", nargs="*", metavar="TEXT", help="the text; - or nothing reads standard input")
    parser.add_argument(
        "--level",
        type=types.positive(1.0),
        default=0.5,
        metavar="L",
        help="share of the text that becomes noise; 1 replaces all of it (%(default)s)",
    )
    parser.add_argument("--keep", action="append", default=[], metavar="WORDS", help="words to keep; may be repeated")
    _add_options(parser)


def _add_sudoku(commands: Any) -> None:
    parser = commands.add_parser(
        "sudoku",
        help="solve a Sudoku and watch the board fill",
        usage="dgemma sudoku [OPTION ...] [PUZZLE ...]",
        description="Solve a Sudoku by diffusion. The model predicts all cells in parallel and keeps the most certain "
        "first. If the output is a pipe, the command prints the solution. If it made the puzzle, it prints "
        "the puzzle first. The exit code is 1 if the answer breaks a rule.",
        epilog="examples:\n  dgemma sudoku --givens 24 --seed 7\n      make a hard puzzle and solve it\n"
        "  dgemma sudoku - < puzzle.txt\n      81 characters; white space is ignored",
    )
    parser.add_argument(
        "puzzle",
        nargs="*",
        metavar="PUZZLE",
        help="81 cells, row by row; '0', '.', '_' and '*' are blanks; '-' reads standard input (default: a new puzzle)",
    )
    parser.add_argument(
        "--givens",
        type=types.whole(23, 81),
        default=30,
        metavar="N",
        help="number of clues of a new puzzle (%(default)s)",
    )
    parser.add_argument(
        "--retry",
        type=types.whole(0),
        default=0,
        metavar="K",
        help="if the answer breaks a rule, try up to K equivalent puzzles with permuted rows, columns and digits "
        "(%(default)s)",
    )
    parser.add_argument(
        "--write-clues", action="store_true", help="let the model write the clues too, instead of freezing them"
    )
    options.add_model_options(parser, default="dgemma/sudoku")
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--steps", type=types.count, default=48, metavar="N", help="maximum number of denoising steps (%(default)s)"
    )
    options.add_sampler_option(
        group, default="entropy-bound:bound=0.01,greedy=True; the end of `dgemma generate --help` lists all"
    )
    options.add_noise_option(group, choices=("mask", "uniform"))
    options.add_seed_option(group, help="seed of the new puzzle and of sampling")
    options.add_view_options(parser)
    parser.set_defaults(module="sudoku")


def _add_info(commands: Any) -> None:
    parser = commands.add_parser(
        "info",
        help="describe a checkpoint: config, tensors and memory",
        usage="dgemma info [OPTION ...] [CHECKPOINT]",
        description="Describe a checkpoint: its geometry, its tensors and the memory it needs. Weights are not read. "
        "From a hub repository, only the config is downloaded.",
        epilog="examples:\n  dgemma info\n      list the checkpoints that ship with dgemma\n"
        "  dgemma info google/diffusiongemma-26B-A4B-it",
    )
    parser.add_argument(
        "checkpoint",
        nargs="?",
        metavar="CHECKPOINT",
        help="folder, hub id or dgemma/NAME (default: list the checkpoints that ship with dgemma)",
    )
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    options.add_json_option(parser)
    parser.set_defaults(module="listing")


def _add_bench(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="time a model on this machine",
        usage="dgemma bench [OPTION ...]",
        description="Time the encoding of the prefix, one forward over the canvas, and a whole canvas with all its "
        "steps. Each line shows the median, the fastest and the slowest of several runs.",
        epilog="example:\n  dgemma bench --batch-size 4 --steps 16",
    )
    _add_batch_size(parser, earlier="--batch", default=1, help="rows per batch")
    parser.add_argument(
        "--prefix", type=types.count, default=64, metavar="P", help="tokens in the prefix (%(default)s)"
    )
    parser.add_argument(
        "--steps",
        type=types.count,
        default=16,
        metavar="N",
        help="denoising steps per canvas, without early stop (%(default)s)",
    )
    parser.add_argument(
        "--repeats",
        type=types.count,
        default=10,
        metavar="R",
        help="timed runs; whole canvases are timed a third as often (%(default)s)",
    )
    options.add_model_options(parser, default="dgemma/text")
    options.add_json_option(parser)
    parser.set_defaults(module="study")


def _add_quantize(commands: Any) -> None:
    parser = commands.add_parser(
        "quantize",
        help="write a quantised copy of a checkpoint",
        usage="dgemma quantize CHECKPOINT --to FORMAT --out FOLDER [OPTION ...]",
        description="Quantise a checkpoint and write compressed-tensors files in the layout for vLLM. "
        "Routers, self-conditioning, norms and the embedding stay as they are.",
        epilog="example:\n  dgemma quantize google/diffusiongemma-26B-A4B-it --to int4 --out 26b-int4",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder, hub id or dgemma/NAME")
    parser.add_argument(
        "--to", required=True, choices=_FORMATS, metavar="FORMAT", help=f"format of the experts: {', '.join(_FORMATS)}"
    )
    parser.add_argument("--out", required=True, metavar="FOLDER", help="new folder")
    parser.add_argument(
        "--dense",
        choices=(*_FORMATS, "none"),
        default="fp8",
        metavar="FORMAT",
        help="format of attention and dense MLPs, or none to leave them unquantised (%(default)s)",
    )
    parser.add_argument("--group-size", type=types.count, metavar="N", help="columns per scale in int4 (64)")
    parser.add_argument(
        "--zero-points", action="store_true", help="give each group of int4 a zero point: smaller errors, more bytes"
    )
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        help="text file for GPTQ, which reduces the errors of int4. Needs memory for the unquantised model",
    )
    options.add_device_option(parser)
    options.add_json_option(parser)
    parser.set_defaults(module="quantizing")


def _add_evaluate(commands: Any) -> None:
    parser = commands.add_parser(
        "evaluate",
        help="measure the likelihood of a text, in nats and bits per byte",
        usage="dgemma evaluate [OPTION ...] FILE [FILE ...]",
        description="Measure the likelihood of text files. The table shows the diffusion bound with its interval and "
        "its parts, the autoregressive likelihood of the same weights, and two compressors for comparison.",
        epilog="example:\n  dgemma evaluate held_out.txt --samples 4",
    )
    _add_files(parser)
    parser.add_argument("--rows", type=types.count, metavar="R", help="only the first R rows (all)")
    parser.add_argument("--canvases", type=types.count, default=4, metavar="K", help="canvases per row (%(default)s)")
    parser.add_argument(
        "--samples", type=types.count, default=8, metavar="N", help="noise levels per canvas (%(default)s)"
    )
    parser.add_argument(
        "--batch-size",
        type=types.count,
        default=8,
        metavar="B",
        help="rows per forward; does not change the result (%(default)s)",
    )
    options.add_noise_option(parser)
    options.add_seed_option(parser, help="the same seed gives the same number")
    options.add_model_options(parser, default="dgemma/text", fast=False)
    options.add_json_option(parser)
    parser.set_defaults(module="training")


def _add_train(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="train or fine-tune a model on text files",
        usage="dgemma train [OPTION ...] --out FOLDER FILE [FILE ...]",
        description="Train on .txt files (running text) or .jsonl files (prompts and answers, or chats with "
        '"messages"). A run that was stopped or killed continues from its last checkpoint if you repeat the command.',
        epilog="examples:\n  dgemma train stories.txt --out run --preset small --steps 5000\n      from scratch\n"
        "  dgemma train answers.jsonl --out run --lora 8\n      adapters on the checkpoint that -m names\n"
        "  dgemma generate -m run/final …\n      afterwards",
    )
    _add_files(parser)
    parser.add_argument(
        "--out",
        required=True,
        type=Path,
        metavar="FOLDER",
        help="folder for log.jsonl, checkpoints and, at the end, final/",
    )
    parser.add_argument(
        "--preset",
        choices=_PRESETS,
        metavar="SIZE",
        help="start from random weights of this size: tiny for a CPU, small for a GPU; -m then only gives the "
        "tokenizer",
    )
    group = parser.add_argument_group("training")
    length = group.add_mutually_exclusive_group()
    length.add_argument("--steps", type=types.count, default=1000, metavar="N", help="number of updates (%(default)s)")
    length.add_argument("--minutes", type=types.positive(), metavar="M", help="train for M minutes, instead of --steps")
    group.add_argument("--batch-size", type=types.count, metavar="B", help="rows per step (16, or 4 on a CPU)")
    group.add_argument(
        "--micro-batch-size", type=types.count, metavar="B", help="rows per forward; changes the memory, not the result"
    )
    group.add_argument(
        "--canvases", type=types.whole(2), default=4, metavar="K", help="canvases per row, 2 or more (%(default)s)"
    )
    group.add_argument(
        "--lr", type=types.positive(), metavar="RATE", help="peak learning rate (1.5e-4, or 1e-3 with --preset)"
    )
    group.add_argument(
        "--lora", type=types.count, metavar="RANK", help="train adapters of this rank and merge them at the end"
    )
    group.add_argument(
        "--ema", type=types.share, metavar="DECAY", help="average the weights with this decay, for instance 0.999"
    )
    options.add_noise_option(group, help="the noise to train under")
    group.add_argument("--compile", action="store_true", help="compile the layers: a slower start, then faster steps")
    options.add_seed_option(group, help="the same seed gives the same run")
    group.add_argument("--allow-changes", action="store_true", help="allow a continued run to change its settings")
    options.add_model_options(parser, default="dgemma/text", fast=False, default_dtype="float32")
    options.add_json_option(parser)
    parser.set_defaults(module="training")


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model on this machine",
        usage="dgemma serve [OPTION ...]",
        description="Serve a model with an OpenAI-compatible API, and a page to try it. Needs pip install "
        "'dgemma[serve]'.",
        epilog="examples:\n  dgemma serve\n      then open http://127.0.0.1:8000\n"
        "  dgemma serve -m google/diffusiongemma-26B-A4B-it --fast --batch-size 16\n"
        "  dgemma serve --replay run.html\n      then open /replay: click a word of the run, and the model writes it "
        "again\n\n"
        f"If the variable {API_KEY} is set, requests need that key.",
    )
    options.add_model_options(parser, default="dgemma/text")
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", metavar="NAME", help="address to listen on (%(default)s)")
    group.add_argument(
        "--port", type=types.whole(1, 65535), default=8000, metavar="N", help="port to listen on (%(default)s)"
    )
    group.add_argument("--name", metavar="NAME", help="the model's name for clients (as in -m)")
    _add_batch_size(group, earlier="--slots", default=8, help="requests that are denoised together")
    group.add_argument(
        "--max-queue", type=types.count, default=256, metavar="N", help="requests that may wait (%(default)s)"
    )
    group.add_argument(
        "--max-tokens", type=types.count, default=4096, metavar="N", help="maximum tokens per answer (%(default)s)"
    )
    group.add_argument(
        "--max-seconds",
        type=types.positive(),
        default=300.0,
        metavar="S",
        help="maximum seconds per answer (%(default)s)",
    )
    group.add_argument("--replay", metavar="FILE", help="web page that --html wrote, to show at /replay")
    parser.set_defaults(module="serving")


def _add_prompt(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompt", nargs="*", metavar="PROMPT", help="the text to continue; - or nothing reads standard input"
    )


def _add_length(parser: argparse.ArgumentParser, what: str, default: int = 256) -> None:
    parser.add_argument(
        "-n",
        "--max-new-tokens",
        type=types.count,
        default=default,
        metavar="N",
        help=f"{what}, rounded up to whole canvases (%(default)s)",
    )


def _add_options(
    parser: argparse.ArgumentParser, *, model: str = "dgemma/text", constraints: bool = True, pictures: bool = True
) -> None:
    options.add_model_options(parser, default=model)
    options.add_sampling_options(parser)
    if constraints:
        options.add_constraint_options(parser)
    options.add_view_options(parser, pictures=pictures)
    parser.set_defaults(module="writing")


def _add_files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help=".txt or .jsonl files, or folders of them")
    parser.add_argument(
        "--separator",
        type=types.some_text,
        metavar="TEXT",
        help="text between the documents of a .txt file (none: one document)",
    )
