"""A benchmark: training throughput beside a plain transformers loop, on the same objective, batch and precision.

    python examples/benchmark_training.py             # on a GPU: the 1B preset; without one: a toy that shows it runs
    python examples/benchmark_training.py --batch-size 4 --json results.json

Both train the same architecture on the same kind of rows: a prompt and one canvas. A step reads the row causally,
draws noise, denoises the canvas twice (the first time without gradients, for self-conditioning) and takes the
cross-entropy of the canvas and of every next token. First the two losses are compared on small equal weights: what is
timed is the same. Weights are bfloat16 on a GPU, float32 elsewhere.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import dgemma
from dgemma.train import TrainBatch
from dgemma.train.feed import row_seeds
from dgemma.train.loop import StepRecord, TrainConfig, train
from dgemma.train.objective import Objective

BETAS, WEIGHT_DECAY, LR = (0.95, 0.99), 1e-4, 1e-5


def weights_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class RandomRows:
    """Rows of random tokens: a prompt of `prompt_len` and one canvas."""

    def __init__(self, config: dgemma.ModelConfig, prompt_len: int) -> None:
        self.vocab_size, self.prompt_len, self.length = config.vocab_size, prompt_len, prompt_len + config.canvas_length

    def __call__(self, step: int, rows: range) -> TrainBatch:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(5, self.vocab_size, (rows.stop, self.length), generator=generator)[rows.start :]
        full = torch.full((len(rows),), 1)
        return TrainBatch(tokens=tokens, prompt_len=full * self.prompt_len, length=full * self.length)


def published_objective(config: dgemma.ModelConfig, **changes: Any) -> Objective:
    return Objective(noise=dgemma.UniformNoise(config.vocab_size), canvas_len=config.canvas_length, **changes)


def build_transformers(config: dgemma.ModelConfig, device: torch.device) -> torch.nn.Module:
    from transformers import DiffusionGemmaForBlockDiffusion
    from transformers.models.diffusion_gemma.configuration_diffusion_gemma import DiffusionGemmaConfig

    published = config.to_hf()
    published.pop("architectures")
    with torch.device(device):
        return DiffusionGemmaForBlockDiffusion(DiffusionGemmaConfig(**published)).to(weights_dtype(device))


def plain_loss(model: Any, tokens: Tensor, prompt_len: int, *, noise: float = 1.0, self_cond: float = 0.5) -> Tensor:
    """The published objective as one writes it with transformers: its own forwards, cross-entropy over all logits."""
    batch_size, length = tokens.shape
    canvas_len, vocab_size = length - prompt_len, model.config.text_config.vocab_size
    clean = tokens[:, prompt_len:]
    level = noise * torch.rand(batch_size, 1, device=tokens.device)
    replaced = torch.rand(clean.shape, device=tokens.device) < level
    canvas = torch.where(replaced, torch.randint_like(clean, vocab_size), clean)

    read = model.model.encoder(input_ids=tokens)
    cap = model.final_logit_softcapping
    causal = (model.lm_head(read.last_hidden_state[:, :-1]).float() / cap).tanh() * cap
    loss = F.cross_entropy(causal.flatten(0, 1), tokens[:, 1:].flatten())
    del causal

    # The canvas sees the prompt and itself; what the reading cached of the canvas's own text is hidden from it.
    seen = torch.ones(batch_size, length + canvas_len, dtype=torch.long, device=tokens.device)
    seen[:, prompt_len:length] = 0
    given = {
        "decoder_input_ids": canvas,
        "past_key_values": read.past_key_values,
        "decoder_attention_mask": seen,
        "decoder_position_ids": torch.arange(prompt_len, length, device=tokens.device)[None],
    }
    with torch.no_grad():
        first = model(**given).logits
    on = torch.rand(batch_size, device=tokens.device) < self_cond
    logits = model(**given, self_conditioning_logits=first, self_conditioning_mask=on).logits
    return loss + F.cross_entropy(logits.flatten(0, 1), clean.flatten())


def check_that_both_losses_are_one() -> None:
    """The same small weights, no noise, self-conditioning always on: nothing is left to chance, and losses agree."""
    from transformers import DiffusionGemmaForBlockDiffusion

    config = dgemma.presets.tiny().replace(sliding_window=128, initializer_range=0.1)
    model = dgemma.DiffusionGemma(config)
    rows = RandomRows(config, prompt_len=48)(0, range(3))
    objective = published_objective(config, t_range=(0.0, 0.0), self_cond_prob=1.0)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)
        plain = DiffusionGemmaForBlockDiffusion.from_pretrained(folder, dtype=torch.float32)
        theirs = plain_loss(plain, rows.tokens, 48, noise=0.0, self_cond=1.0)
        ours = objective.reduce(objective(model, rows, seeds=row_seeds(0, 0, range(3))))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)  # float32 on the CPU
    print(f"parity: loss {ours.item():.5f} here, {theirs.item():.5f} in transformers")


class Clock:
    """Seconds a step, the device waited for at both ends; the first steps compile and warm up."""

    def __init__(self, device: torch.device, warmup: int, repeats: int) -> None:
        self.device, self.warmup, self.repeats = device, warmup, repeats
        self.times: list[float] = []
        self.start = 0.0

    def tick(self) -> bool:
        """A step ended; whether enough were measured."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.times.append(now - self.start)
        if len(self.times) == self.warmup and self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.start = time.perf_counter()
        return len(self.times) >= self.warmup + self.repeats

    def result(self, name: str, tokens: int) -> dict[str, Any]:
        measured = self.times[self.warmup :]
        seconds = statistics.median(measured)
        peak = torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else None
        return {
            "name": name,
            "tokens_per_second": tokens / seconds,
            "milliseconds": seconds * 1e3,
            "range_ms": [min(measured) * 1e3, max(measured) * 1e3],
            "peak_GiB": peak,
        }


class Enough(Exception):
    """Ends a run from its `on_step`, with nothing more written."""


def measure_plain(config: dgemma.ModelConfig, options: argparse.Namespace, *, update: bool) -> dict[str, Any]:
    device, rows = options.device, RandomRows(config, options.prompt_len)
    model = build_transformers(config, device)
    how = f"{model.config._attn_implementation}, experts {getattr(model.config, '_experts_implementation', 'default')}"
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=device.type == "cuda"
    )
    clock = Clock(device, options.warmup, options.repeats)
    clock.start = time.perf_counter()
    done, step = False, 0
    while not done:
        tokens = rows(step, range(options.batch_size)).tokens.to(device, non_blocking=True)
        plain_loss(model, tokens, options.prompt_len).backward()
        if update:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        optimizer.zero_grad()
        step, done = step + 1, clock.tick()
    return clock.result(f"transformers ({how})", options.batch_size * rows.length)


def measure_ours(config: dgemma.ModelConfig, options: argparse.Namespace, *, update: bool) -> dict[str, Any]:
    device, rows = options.device, RandomRows(config, options.prompt_len)
    model = dgemma.DiffusionGemma(config, device=device, dtype=weights_dtype(device))
    clock = Clock(device, options.warmup, options.repeats)
    steps = options.warmup + options.repeats

    def on_step(record: StepRecord) -> None:
        if clock.tick():
            raise Enough

    settings = TrainConfig(
        steps=steps + 1,
        batch_size=options.batch_size,
        lr=LR if update else 0.0,
        betas=BETAS,
        weight_decay=WEIGHT_DECAY,
        precision="weights",
        compile=options.compile,
        log_every=steps + 1,
        checkpoint_every=steps + 1,
        progress=False,
    )
    name = f"dgemma ({'compiled layers' if options.compile else 'uncompiled'})"
    with tempfile.TemporaryDirectory() as folder:
        clock.start = time.perf_counter()
        with suppress(Enough):
            train(
                model,
                published_objective(config),
                rows,
                settings,
                out=folder,
                on_step=on_step,
                optimizer=None if update else NoUpdate,
            )
    return clock.result(name, options.batch_size * rows.length)


class NoUpdate(torch.optim.SGD):
    """Forward and backward alone: gradients are made and dropped."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(list(parameters.values()), lr=0.0)

    def step(self, closure: Any = None) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--preset", default="medium_1b" if on_gpu else "tiny")
    parser.add_argument("--batch-size", type=int, default=8 if on_gpu else 2)
    parser.add_argument("--prompt-len", type=int, default=704 if on_gpu else 32, help="with the canvas, in the window")
    parser.add_argument("--warmup", type=int, default=5 if on_gpu else 1)
    parser.add_argument("--repeats", type=int, default=15 if on_gpu else 1)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=on_gpu, help="dgemma's layers")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.device = torch.device("cuda" if on_gpu else "cpu")
    config: dgemma.ModelConfig = getattr(dgemma.presets, options.preset)()
    config = config.replace(sliding_window=max(config.sliding_window, options.prompt_len + config.canvas_length + 1))
    check_that_both_losses_are_one()

    results = []
    for work, update in (("forward + backward", False), ("forward + backward + AdamW", True)):
        for measure in (measure_plain, measure_ours):
            results.append({"work": work, **measure(config, options, update=update)})
            print(json.dumps(results[-1]), flush=True)
            gc.collect()
            torch.cuda.empty_cache()

    hardware = torch.cuda.get_device_name() if on_gpu else "CPU"
    length = options.prompt_len + config.canvas_length
    print(f"\n{options.preset}, {options.batch_size} rows of {length} tokens, {hardware}\n")
    print("| work | loop | tokens/s | ms a step | peak GiB | against transformers |")
    print("|---|---|---|---|---|---|")
    for plain, ours in zip(results[::2], results[1::2], strict=True):
        for result in (plain, ours):
            peak = "" if result["peak_GiB"] is None else f"{result['peak_GiB']:.1f}"
            ratio = result["tokens_per_second"] / plain["tokens_per_second"]
            print(
                f"| {result['work']} | {result['name']} | {result['tokens_per_second']:,.0f} "
                f"| {result['milliseconds']:.1f} | {peak} | {ratio:.2f} |"
            )
    if options.json is not None:
        options.json.write_text(
            json.dumps({"hardware": hardware, "torch": torch.__version__, "results": results}, indent=2)
        )


if __name__ == "__main__":
    main()
