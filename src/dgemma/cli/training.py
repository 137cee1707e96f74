"""`dgemma train` and `dgemma evaluate`: train on text files, and measure the likelihood of a text."""

import argparse
import lzma
import math
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from dgemma.checkpoint.images import ImageProcessor
from dgemma.checkpoint.tokenizer import Tokenizer
from dgemma.checks import Words, require
from dgemma.cli import loading, output
from dgemma.data.documents import Document, list_files, read_dataset, read_documents
from dgemma.data.sudoku.encoding import load_tokenizer
from dgemma.data.text import PromptSource, TextSource, TokenFile, scan
from dgemma.data.token_file import describe_files
from dgemma.diffusion.noise import Noise
from dgemma.location import resolve
from dgemma.model import presets
from dgemma.model.config import GenerationDefaults, ModelConfig
from dgemma.model.denoiser import require_vision
from dgemma.model.diffusion import DiffusionGemma
from dgemma.printing import one_line
from dgemma.quantization.weights import quantized_weights
from dgemma.run.generate import generate
from dgemma.sampling.ancestral import Ancestral
from dgemma.train import TrainConfig, evaluate, recipes, train
from dgemma.train.batch import BatchSource
from dgemma.train.checkpoints import lock_folder
from dgemma.train.learning import REWARDS, PolicyGradient, Problems
from dgemma.train.learning.rewards import find_reward
from dgemma.train.log import TrainLog, TrainResult, TrainStep
from dgemma.train.lora import LoRA, add_lora, merge_lora
from dgemma.train.parallel import ADAPTERS
from dgemma.view.terminal import LiveView

_NUM_AVERAGED = 50  # reported losses are means over this many last steps, because single batches vary
_SAMPLE_SECONDS = 30  # between two samples of a run
_SAMPLE_PART = 10  # sampling takes at most one tenth of the time
_SHORT = 5  # minutes; in a shorter run compiling takes more time than it saves
_SHORT_WARMUP = 10  # steps; a run of a few minutes on a CPU may have only 20 in all
_STOP_MARKERS = ("<turn|>", "<|tool_response>")  # tokens that end a turn, in vocabularies that have them


def run_evaluate(arguments: argparse.Namespace) -> None:
    """Measure the likelihood of text files."""
    _require_source(arguments)
    tokenizer = Tokenizer.from_pretrained(arguments.model)
    with tempfile.TemporaryDirectory() as folder:
        file = TokenFile.write(_documents(arguments), tokenizer, folder)
        _note_separator(arguments, file)
        _require_text(file)
        model = loading.load_model(arguments)
        row_len = model.config.canvas_length * arguments.canvases
        rows = scan(file, row_len=row_len, context=row_len)
    is_whole = arguments.rows is None or arguments.rows >= rows.batch_size
    likelihood = evaluate(
        model,
        rows,
        loading.make_noise(arguments, model, tokenizer),
        num_rows=arguments.rows,
        num_samples=arguments.samples,
        batch_size=arguments.batch_size,
        num_bytes=file.num_bytes if is_whole else None,
        seed=arguments.seed,
    )
    if not is_whole:
        output.print_note("Bits per byte need the whole text. Omit --rows to see them.")
    compressed = _compress(arguments) if is_whole else {}
    if arguments.json:
        output.print_json(likelihood.summary() | {f"{name}_bits_per_byte": bits for name, bits in compressed.items()})
        return
    print(likelihood)
    for name, bits in compressed.items():
        print(f"{name + ', bits per byte':22}{bits:10.4f}")


def _documents(arguments: argparse.Namespace) -> Iterator[Document]:
    """Return the documents of the files, or of --dataset NAME:CONFIG:SPLIT."""
    if arguments.dataset is None:
        return read_documents(arguments.files, separator=arguments.separator)
    name, config, split = f"{arguments.dataset}::".split(":")[:3]
    return read_dataset(name, config or None, split=split or "train")


def _require_source(arguments: argparse.Namespace) -> None:
    fits = bool(arguments.files) != bool(arguments.dataset) and not (arguments.dataset and arguments.separator)
    rule, fix = "have files, or a --dataset without --separator", "Name a .txt or .jsonl file."
    require(fits, "the command line", rule, arguments.files, fix)


def _compress(arguments: argparse.Namespace) -> dict[str, float]:
    """Return the bits per byte of general compressors, which learn from this text alone."""
    text = "".join(document.text for document in _documents(arguments)).encode()
    # The preset's dictionary of 64 MiB would take hundreds of MiB of memory for any text.
    size = min(max(len(text), 4096), 1 << 26)
    best = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": size}
    packed = {"gzip": zlib.compress(text, 9), "xz": lzma.compress(text, filters=[best])}
    return {name: 8 * len(data) / len(text) for name, data in packed.items()}


def run_train(arguments: argparse.Namespace) -> int:
    """Train on text files, or with --rl on runs; return 130 if the run was stopped."""
    _require_source(arguments)
    final = arguments.out / "final"
    if final.is_dir() and not any(arguments.out.glob("step-*")):
        if arguments.json:
            output.print_json({"final": str(final), "new_steps": 0})
        else:
            output.print_text(f"Already finished: {final}. Train on with -m {final} and another --out.")
        return 0
    if arguments.rl:
        return _learn_from_runs(arguments)
    tokenizer = Tokenizer.from_pretrained(arguments.model)
    if arguments.dataset is None:
        made_from = describe_files(arguments.files, tokenizer, separator=arguments.separator)
    else:
        made_from = {"dataset": arguments.dataset, "tokenizer": arguments.model}
    new_folders = [path for path in (arguments.out, *arguments.out.parents) if not path.exists()]
    with lock_folder(arguments.out):
        try:
            file = _keep_tokens(arguments, tokenizer, arguments.out / "tokens", made_from)
            _require_text(file)
        except ValueError:  # leave no empty folders
            if new_folders:
                shutil.rmtree(new_folders[0])
            for parent in new_folders[1:]:
                parent.rmdir()
            raise
        return _train_on(arguments, tokenizer, file)


def _learn_from_runs(arguments: argparse.Namespace) -> int:
    """Learn from the model's own runs on prompts with answers."""
    require(len(arguments.files) == 1, "dgemma train --rl", "have one file", arguments.files)
    preset, fix = arguments.preset, "Name one with -m. Runs of random weights have nothing to learn from."
    require(preset is None, "dgemma train --rl", "start from a checkpoint", Words(f"--preset {preset}"), fix)
    tokenizer = load_tokenizer(arguments.model, ModelConfig.from_hf(resolve(arguments.model)))
    batch = {"batch_size": arguments.batch_size or 4, "updates": arguments.updates, "seed": arguments.seed}
    problems, reward = Problems.read(arguments.files[0], tokenizer, **batch), find_reward(arguments.reward)
    if arguments.reward in REWARDS:
        reward([""] * len(problems.answers), problems.answers)  # so that an answer of a wrong kind is an error now
    model = _new_model(arguments, tokenizer)
    if arguments.lora:
        add_lora(model, LoRA(rank=arguments.lora, alpha=2.0 * arguments.lora), seed=arguments.seed)
    chosen = {
        "max_new_tokens": arguments.max_new_tokens,
        "steps": arguments.run_steps,
        "sampler": arguments.sampler,
        "noise": loading.make_noise(arguments, model, tokenizer),
    }
    objective = PolicyGradient(
        problems=problems,
        reward=reward,
        tokenizer=tokenizer,
        options={name: value for name, value in chosen.items() if value is not None},
        group=arguments.group,
        speed_weight=arguments.speed or 0.0,
        kl_weight=arguments.kl or 0.0,
    )
    config = _config(arguments, model, problems.batch_size, arguments.lr or 1e-5)
    options = {"allow_changes": arguments.allow_changes, "trackers": arguments.track}
    result = train(model, objective, problems, config, out=arguments.out, **options)
    means = _means(result.log, {"run/reward": "reward", "run/forwards": "forwards"})
    return _finish(arguments, model, tokenizer, result, means)


def _config(arguments: argparse.Namespace, model: DiffusionGemma, batch_size: int, lr: float) -> TrainConfig:
    return TrainConfig(
        steps=arguments.steps if arguments.minutes is None else None,
        minutes=arguments.minutes,
        batch_size=batch_size,
        micro_batch_size=arguments.micro_batch_size,
        lr=lr,
        warmup=_SHORT_WARMUP if model.device.type == "cpu" and arguments.minutes else min(100, arguments.steps // 10),
        ema_decay=arguments.ema,
        precision="mixed" if model.device.type == "cuda" and model.dtype == torch.float32 else "weights",
        seed=arguments.seed,
    )


def _finish(
    arguments: argparse.Namespace,
    model: DiffusionGemma,
    tokenizer: Tokenizer,
    result: TrainResult,
    means: dict[str, float],
) -> int:
    """Merge adapters, save the tokenizer so that -m can name the folder, and print a summary; return the exit code.

    The checkpoints of a finished run are several times as large as its result, and are removed.
    """
    final = result.final
    if final is None:  # the loop has logged where it stopped
        return 130
    if arguments.lora:
        errors = merge_lora(model, quantized="requantize" if any(quantized_weights(model)) else None)
        if errors:
            output.print_note(
                f"Rounded {len(errors)} merged weights to their formats again, with a relative error of at most "
                f"{max(errors.values()):.1%}. The exact adapters are in {final / ADAPTERS}."
            )
        model.save_pretrained(final)
    tokenizer.save_pretrained(final)
    for checkpoint in arguments.out.glob("step-*"):
        shutil.rmtree(checkpoint)
    if arguments.json:
        counts = {"final": str(final), "step": result.step, "new_steps": result.num_new_steps}
        output.print_json({**counts, **means, "tokens_per_second": result.tokens_per_second})
    else:
        window = f" over the last {_NUM_AVERAGED}" if result.step > _NUM_AVERAGED else ""
        text = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in means.items())
        output.print_text(f"Wrote {final} after {output.counted(result.step, 'step')}. Means{window}: {text}.")
    return 0


def _train_on(arguments: argparse.Namespace, tokenizer: Tokenizer, file: TokenFile) -> int:
    _note_separator(arguments, file)
    model = _new_model(arguments, tokenizer)
    # On a CPU, many small steps teach more in a few minutes than a few large ones.
    on_cpu = model.device.type == "cpu"
    arguments.batch_size = arguments.batch_size or (1 if on_cpu else 16)
    arguments.canvases = arguments.canvases or (2 if on_cpu else 4)
    source = _source(arguments, file, model.config.canvas_length)
    lr = arguments.lr or (1.5e-4 if arguments.preset is None else 1e-3)
    config = _config(arguments, model, arguments.batch_size, lr)
    noise = loading.make_noise(arguments, model, tokenizer)
    objective = recipes.dgemma(model.config, noise=noise, fill_token=tokenizer.eos_token_id)
    output.print_note(
        f"{model.num_parameters():,} weights, {file.num_tokens:,} tokens of text; "
        f"the log is {arguments.out / 'log.jsonl'}."
    )
    factor = _bits_per_byte_factor(file, model.config.canvas_length)
    if file.images is not None:
        require_vision(model)
    if arguments.lora:
        lora = LoRA(rank=arguments.lora, alpha=2.0 * arguments.lora)
        if file.images is not None:
            lora = replace(lora, targets=(*lora.targets, "vision_projection"))
        add_lora(model, lora, seed=arguments.seed)
    with _door(model, config):
        result = train(
            model,
            objective,
            source,
            config,
            out=arguments.out,
            allow_changes=arguments.allow_changes,
            trackers=arguments.track,
            on_step=None if arguments.json else _Samples(model, tokenizer, noise, factor),
        )
    return _finish(arguments, model, tokenizer, result, _losses(result.log, factor))


def _door(model: DiffusionGemma, config: TrainConfig) -> AbstractContextManager[None]:
    """Return the kernels of training on a GPU, except for a short run, which would mostly compile."""
    if model.device.type != "cuda" or (config.minutes is not None and config.minutes < _SHORT):
        return nullcontext()
    try:
        from dgemma_kernels import accelerate_training
    except ImportError as error:
        output.print_note(f"Training without kernels: {error}")
        return nullcontext()
    return accelerate_training(model)


def _losses(log: TrainLog, factor: float | None) -> dict[str, float]:
    """Return the mean of each term over the last steps: nats per token, and bits per byte of running text."""
    names = {"loss/decoder": "denoising_nats_per_token", "loss/causal": "autoregressive_nats_per_token"}
    means = _means(log, names)
    if factor is not None and "autoregressive_nats_per_token" in means:
        means["autoregressive_bits_per_byte"] = factor * means["autoregressive_nats_per_token"]
    return means


def _means(log: TrainLog, names: dict[str, str]) -> dict[str, float]:
    columns = {spoken: log.column(name)[1][-_NUM_AVERAGED:] for name, spoken in names.items()}
    return {name: sum(values) / len(values) for name, values in columns.items() if values}


def _bits_per_byte_factor(file: TokenFile, canvas_len: int) -> float | None:
    """Return the factor from nats per scored token to bits per byte. The fill of a document's last canvas is scored.

    It is None for prompts and answers, because only answers are scored.
    """
    num_scored = canvas_len * int((-(-np.diff(file.starts) // canvas_len)).sum())
    has_prompts = int(file.prompt_len.max()) > 1
    return None if has_prompts else num_scored / file.num_bytes / math.log(2)


class _Samples:
    """Callback of `train` that shows and logs a sample every `_SAMPLE_SECONDS`, or less often if sampling is slow.

    For running text it adds the mean bits per byte since the last sample. `factor` converts nats per token to
    bits per byte.
    """

    def __init__(self, model: DiffusionGemma, tokenizer: Tokenizer, noise: Noise, factor: float | None = None) -> None:
        self.model, self.tokenizer, self.noise, self.factor = model, tokenizer, noise, factor
        self.pause: float = _SAMPLE_SECONDS
        self._begin()

    def _begin(self) -> None:
        self.last = time.monotonic()
        self.nats: Tensor | float = 0.0
        self.num_tokens: Tensor | float = 0.0

    def __call__(self, step: TrainStep) -> dict[str, Any] | None:
        self.nats = self.nats + step.sums["causal"].sum()
        self.num_tokens = self.num_tokens + step.counts["causal"].sum()
        began = time.monotonic()
        if began - self.last < self.pause:
            return None
        prompt = torch.tensor([[self.tokenizer.bos_token_id]], device=self.model.device)
        self.model.eval()
        with tqdm.external_write_mode(file=sys.stderr), LiveView(self.tokenizer) as view:  # hides the progress bar
            # Not the checkpoint's sampler, which may be for other noise.
            tokens = generate(
                self.model,
                prompt,
                max_new_tokens=self.model.config.canvas_length,
                noise=self.noise,
                sampler=Ancestral(),
                steps=16,
                stop=None,
                on_step=view,
            ).new_tokens[0]
        self.model.train()
        note: dict[str, Any] = {"sample": self.tokenizer.decode(tokens)}
        bits = ""
        if self.factor is not None:
            note["bits_per_byte"] = float(self.factor * self.nats / self.num_tokens)
            bits = f", {note['bits_per_byte']:.3f} bits per byte"
        # tqdm prints above the progress bar
        line = f"step {step.step}{bits}: {one_line(note['sample'])}"
        tqdm.write(output.wrapped(line) if sys.stderr.isatty() else line, file=sys.stderr)
        self._begin()
        self.pause = max(self.pause, _SAMPLE_PART * (self.last - began))
        return note


def _new_model(arguments: argparse.Namespace, tokenizer: Tokenizer) -> DiffusionGemma:
    """Return the checkpoint, or random weights of a preset's size for the tokenizer's vocabulary."""
    if arguments.preset is None:
        return loading.load_model(arguments, dtype=torch.float32).train()
    config = getattr(presets, arguments.preset)().replace(
        vocab_size=tokenizer.vocab_size,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    device, dtype = loading.pick_device(arguments), loading.pick_dtype(arguments) or torch.float32
    model = DiffusionGemma(config, device=device, dtype=dtype)
    model.reset_parameters(torch.Generator(device).manual_seed(arguments.seed))
    stops = (tokenizer.eos_token_id, *(tokenizer.token_id(marker) for marker in _STOP_MARKERS))
    model.generation = GenerationDefaults(
        eos_token_id=tuple(stop for stop in stops if stop is not None), pad_token_id=tokenizer.pad_token_id
    )
    return model


def _require_text(file: TokenFile) -> None:
    """Raise ValueError if every text and every answer is empty."""
    if file.num_bytes == 0:
        raise ValueError("the files must have a text or an answer that is not empty, got none. Add one to the files.")


def _note_separator(arguments: argparse.Namespace, file: TokenFile) -> None:
    """Print a line if the separator occurs in no file."""
    if arguments.separator is not None and file.num_documents == len(list_files(arguments.files)):
        hint = f" In bash, write $'{arguments.separator}'." if "\\" in arguments.separator else ""
        output.print_note(f"--separator {arguments.separator!r} is in no file, so each file is one document.{hint}")


def _keep_tokens(
    arguments: argparse.Namespace, tokenizer: Tokenizer, folder: Path, made_from: dict[str, Any]
) -> TokenFile:
    """Return the tokens of the files, cached in the run's folder; raise ValueError if the text has changed."""
    if (folder / "about.json").is_file():
        file = TokenFile.open(folder)
        if file.made_from == made_from:
            return file
        has_begun = any(arguments.out.glob("step-*"))
        if file.made_from is not None and has_begun and not arguments.allow_changes:
            both = {**file.made_from, **made_from}
            difference = next(name for name in both if file.made_from.get(name) != made_from.get(name))
            raise ValueError(
                f"the text must stay as in the run in {arguments.out}, got another {difference}. Choose another --out, "
                "or pass --allow-changes."
            )
    images = ImageProcessor.from_pretrained(arguments.model)
    return TokenFile.write(_documents(arguments), tokenizer, folder, images=images, made_from=made_from)


def _source(arguments: argparse.Namespace, file: TokenFile, canvas_len: int) -> BatchSource:
    """Return a source of rows of whole canvases for running text, or of one row per prompt."""
    longest_prompt = int(file.prompt_len.max())
    of_batches = {"batch_size": arguments.batch_size, "seed": arguments.seed}
    if longest_prompt == 1:  # only begin-of-text
        text = TextSource(file=file, canvas_len=canvas_len, num_canvases=arguments.canvases, **of_batches)
        _note_few_rows(arguments, text.num_rows)
        return text
    num_without = int((file.prompt_len == 1).sum())
    if num_without:
        raise ValueError(
            f"the files must be all prompts and answers or all running text, got {num_without} of "
            f"{file.num_documents} documents without a prompt. Train on one kind after the other."
        )
    max_len = longest_prompt + canvas_len * arguments.canvases
    num_cut = int((np.diff(file.starts) > max_len).sum())
    if num_cut:
        output.print_note(
            f"{num_cut} of {file.num_documents} answers are cut: with their prompts they have more than {max_len} "
            "tokens. Raise --canvases for more."
        )
    _note_few_rows(arguments, file.num_documents)
    return PromptSource(file=file, max_len=max_len, **of_batches)


def _note_few_rows(arguments: argparse.Namespace, num_rows: int) -> None:
    """Print a line if every step reads all rows."""
    if num_rows <= arguments.batch_size:
        output.print_note(
            f"The files have {output.counted(num_rows, 'row')} and a step takes {arguments.batch_size}, so every step "
            "reads all of the text. Many steps would memorise it. Use more text or fewer --steps."
        )
