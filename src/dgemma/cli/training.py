"""`dgemma train` and `dgemma evaluate`: learn from text files, and say how well a text is known."""

import argparse
import json
import lzma
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch

from dgemma import presets
from dgemma.cli import options
from dgemma.data.text import PromptSource, TextSource, TokenFile, read_documents, scan
from dgemma.model import DiffusionGemma
from dgemma.tokenizer import Tokenizer
from dgemma.train.batch import BatchSource
from dgemma.train.likelihood import Likelihood, evaluate
from dgemma.train.loop import TrainConfig, train
from dgemma.train.lora import LoRA, add_lora, merge_lora
from dgemma.train.objective import Objective

_PRESETS = ("tiny", "small")


def add_commands(commands: Any) -> None:
    """Put the two commands on the parser."""
    parser = commands.add_parser(
        "evaluate",
        help="how well a model knows a text, in nats and bits per byte",
        description="The likelihood of text files: the diffusion bound with its interval and where it comes from, the "
        "same weights word by word, and two compressors beside them.",
    )
    _add_files(parser)
    options.add_model_options(parser, default="dgemma/text")
    parser.add_argument("--noise", choices=("uniform", "mask", "hybrid"), default="uniform", help="(%(default)s)")
    parser.add_argument("--rows", type=int, metavar="R", help="evaluate the first R rows only")
    parser.add_argument("--canvases", type=int, default=4, metavar="K", help="canvases a row (%(default)s)")
    parser.add_argument("--samples", type=int, default=8, metavar="N", help="noise levels a canvas (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, metavar="B", help="rows at once (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="same seed, same number (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=_evaluate)

    parser = commands.add_parser(
        "train",
        help="train or fine-tune a model on text files",
        description="Train on .txt files (running text) or .jsonl files (prompts and answers). A run that was stopped, "
        "by Ctrl-C or by force, goes on where it was when the same command is given again.",
        epilog="example: dgemma train stories.txt --out run --preset small --steps 5000",
    )
    _add_files(parser)
    parser.add_argument("--out", required=True, metavar="FOLDER", help="for log, checkpoints and the final model")
    options.add_model_options(parser, default="dgemma/text")
    parser.add_argument(
        "--preset", choices=_PRESETS, help="begin with random weights of this size; -m then gives the tokenizer only"
    )
    group = parser.add_argument_group("training")
    group.add_argument("--noise", choices=("uniform", "mask", "hybrid"), default="uniform", help="(%(default)s)")
    group.add_argument(
        "--lora", type=int, metavar="RANK", help="train adapters of this rank, and merge them at the end"
    )
    group.add_argument("--steps", type=int, default=1000, metavar="N", help="(%(default)s)")
    group.add_argument("--batch-size", type=int, default=16, metavar="B", help="rows a step (%(default)s)")
    group.add_argument("--micro-batch-size", type=int, metavar="B", help="rows at once; changes memory, not the result")
    group.add_argument("--canvases", type=int, default=4, metavar="K", help="canvases a row (%(default)s)")
    group.add_argument("--lr", type=float, default=1.5e-4, metavar="RATE", help="peak learning rate (%(default)s)")
    group.add_argument("--ema", type=float, metavar="DECAY", help="keep an average of the weights, for instance 0.999")
    group.add_argument("--compile", action="store_true", help="compile the layers: slow to start, then faster")
    group.add_argument("--seed", type=int, default=0, metavar="S", help="same seed, same run (%(default)s)")
    parser.set_defaults(run=_train)


def _add_files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help=".txt or .jsonl files, or folders of them")
    parser.add_argument(
        "--separator", metavar="TEXT", help="what parts the documents of a .txt file (none: one document)"
    )


def _evaluate(arguments: argparse.Namespace) -> None:
    model, tokenizer = options.load_model(arguments), options.load_tokenizer(arguments)
    noise = options.read_noise(arguments.noise, model.config.vocab_size, tokenizer.mask_token_id)
    with tempfile.TemporaryDirectory() as folder:
        file = _tokenise(arguments, tokenizer, folder)
        canvas_len = model.config.canvas_length
        rows = scan(file, row_len=canvas_len * arguments.canvases, context=canvas_len * arguments.canvases)
        whole = arguments.rows is None or arguments.rows >= rows.batch_size
        if not whole:
            rows = rows.select(slice(0, arguments.rows))
        found = evaluate(
            model,
            rows.to(model.device),
            noise,
            num_samples=arguments.samples,
            batch_size=arguments.batch_size,
            num_bytes=file.num_bytes if whole else None,
            seed=arguments.seed,
        )
        compressed = _compress(arguments) if whole else {}
    _report(arguments, found, compressed)


def _compress(arguments: argparse.Namespace) -> dict[str, float]:
    """Bits per byte of general compressors, which know no English and pay for learning it from this text alone."""
    text = "".join(
        document.text for document in read_documents(arguments.files, separator=arguments.separator)
    ).encode()
    packed = {"gzip": zlib.compress(text, 9), "xz": lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)}
    return {name: 8 * len(data) / len(text) for name, data in packed.items()}


def _report(arguments: argparse.Namespace, found: Likelihood, compressed: dict[str, float]) -> None:
    if arguments.json:
        print(json.dumps(found.summary() | {f"{name}_bits_per_byte": bits for name, bits in compressed.items()}))
        return
    print(found)
    for name, bits in compressed.items():
        print(f"{name + ', bits per byte':22}{bits:10.4f}")


def _train(arguments: argparse.Namespace) -> None:
    tokenizer = options.load_tokenizer(arguments)
    model = _new_model(arguments, tokenizer)
    model.train()
    canvas_len = model.config.canvas_length
    objective = Objective(
        noise=options.read_noise(arguments.noise, model.config.vocab_size, tokenizer.mask_token_id),
        canvas_len=canvas_len,
        fill_token=tokenizer.eos_token_id,
        canvases="all",
    )
    config = TrainConfig(
        steps=arguments.steps,
        batch_size=arguments.batch_size,
        micro_batch_size=arguments.micro_batch_size,
        lr=arguments.lr,
        warmup=min(100, arguments.steps // 10),
        ema_decay=arguments.ema,
        compile=arguments.compile,
        precision="mixed" if model.device.type == "cuda" else "weights",
        seed=arguments.seed,
    )
    out = Path(arguments.out)
    file = _tokenise(arguments, tokenizer, out / "tokens")
    source = _source(arguments, file, canvas_len)
    if arguments.lora:
        add_lora(model, LoRA(rank=arguments.lora, alpha=2.0 * arguments.lora), seed=arguments.seed)
    result = train(model, objective, source, config, out=out)
    if result.interrupted:
        print(f"Stopped after step {result.step}. The same command goes on from there.", file=sys.stderr)
        return
    _finish(arguments, model, tokenizer, out)


def _new_model(arguments: argparse.Namespace, tokenizer: Tokenizer) -> DiffusionGemma:
    """The checkpoint to go on from, in float32, or random weights of a preset's size for the tokenizer's vocabulary."""
    device = options.pick_device(arguments.device)
    dtype = options.read_dtype(arguments.dtype) or torch.float32
    if arguments.preset is None:
        return DiffusionGemma.from_pretrained(arguments.model, dtype=dtype, device=device)
    config = getattr(presets, arguments.preset)().replace(
        vocab_size=tokenizer.vocab_size,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = DiffusionGemma(config, device=device, dtype=dtype)
    model.reset_parameters(torch.Generator(device).manual_seed(arguments.seed))
    return model


def _tokenise(arguments: argparse.Namespace, tokenizer: Tokenizer, folder: str | Path) -> TokenFile:
    return TokenFile.write(read_documents(arguments.files, separator=arguments.separator), tokenizer, folder)


def _source(arguments: argparse.Namespace, file: TokenFile, canvas_len: int) -> BatchSource:
    """Rows of whole canvases from running text; a row each where there are prompts."""
    if int(file.prompt_len.max()) > 1:  # more than begin-of-text
        longest = int(file.prompt_len.max()) + canvas_len * arguments.canvases
        return PromptSource(file=file, max_len=longest, batch_size=arguments.batch_size, seed=arguments.seed)
    return TextSource(
        file=file,
        canvas_len=canvas_len,
        num_canvases=arguments.canvases,
        batch_size=arguments.batch_size,
        seed=arguments.seed,
    )


def _finish(arguments: argparse.Namespace, model: DiffusionGemma, tokenizer: Tokenizer, out: Path) -> None:
    """A folder that -m can name: the weights with any adapters merged, and the tokenizer."""
    if arguments.lora:
        merge_lora(model)
        model.save_pretrained(out / "final")
    tokenizer.save_pretrained(out / "final")
    print(f"Wrote {out / 'final'}. Try: dgemma generate -m {out / 'final'} …")
