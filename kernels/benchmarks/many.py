"""Many prompts at the published size: `generate_many` against batches of `generate` and one prompt at a time.

python kernels/benchmarks/many.py                    about two minutes on an H200
python kernels/benchmarks/many.py --prompts 16 --canvases 4

Weights are random bfloat16, which never write a stop token by themselves. So lengths are drawn: a prompt has 32 to
1,024 tokens, and an answer 1 to 12 canvases by a long-tailed law, a lognormal with sigma 1.2. Every canvas takes the
same number of steps, with the published sampler. Only canvases of the answers count, so the four ways have the same
count:

- one: `generate`, one prompt at a time
- padded: `generate` on fixed batches whose rows all run to the end of the longest
- dropping: `generate` on the same batches; a stop token ends a row, and `generate` drops it from the batch
- many: `generate_many` with batches of the same size
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import describe_run, results_folder, seconds_of
from torch import Tensor

import dgemma
from dgemma_kernels import accelerate

GPU = torch.device("cuda")
STOP_TOKEN = 106
TEXT_IDS = (200, 250_000)  # without markers and images
SETTINGS = ("prompts", "canvases", "batch_size", "steps")


class Workload:
    """Prompts of mixed length, and the number of canvases that each answer has."""

    def __init__(self, count: int, longest: int, canvas_len: int) -> None:
        generator = torch.Generator().manual_seed(0)
        sizes = (torch.rand(count, generator=generator) * math.log(1024 / 32)).exp() * 32
        self.prompts = [torch.randint(*TEXT_IDS, (int(n),), generator=generator) for n in sizes]
        drawn = torch.empty(count).log_normal_(0.3, 1.2, generator=generator).ceil()
        self.canvases = drawn.clamp(max=longest).int().tolist()
        self.canvas_len = canvas_len

    def padded(self, rows: range) -> tuple[Tensor, Tensor]:
        """Return prompts (B, P), padded on the left, and their mask."""
        prompts = [self.prompts[row] for row in rows]
        width = max(map(len, prompts))
        tokens = torch.stack([torch.nn.functional.pad(prompt, (width - len(prompt), 0)) for prompt in prompts])
        mask = torch.stack([torch.arange(width) >= width - len(prompt) for prompt in prompts])
        return tokens.to(GPU), mask.to(GPU)

    def stops(self, rows: range) -> dict[str, Tensor]:
        """Return the options `canvas` and `frozen` (B, N) of `generate` for a stop token at the end of each answer."""
        ends = torch.tensor([self.canvases[row] * self.canvas_len - 1 for row in rows])
        canvas = torch.full((len(rows), int(ends.max()) + 1), -1)
        canvas.scatter_(1, ends[:, None], STOP_TOKEN)
        return {"canvas": canvas.to(GPU), "frozen": (canvas >= 0).to(GPU)}


def run_batches(model: dgemma.Denoiser, work: Workload, size: int, options: dict[str, Any], *, drop: bool) -> list[int]:
    """Run fixed batches of `size` prompts with `generate`; return the canvases that each row wrote."""
    written: list[int] = []
    for start in range(0, len(work.prompts), size):
        rows = range(start, min(start + size, len(work.prompts)))
        tokens, mask = work.padded(rows)
        stops: dict[str, Any] = work.stops(rows) if drop else {}
        longest = max(work.canvases[row] for row in rows) * work.canvas_len
        ids = [STOP_TOKEN] if drop else []
        out = dgemma.generate(
            model, tokens, attention_mask=mask, max_new_tokens=longest, eos_token_ids=ids, **stops, **options
        )
        written += (out.steps > 0).sum(1).tolist()
    return written


def run_many(model: dgemma.Denoiser, work: Workload, batch_size: int, options: dict[str, Any]) -> list[int]:
    """Run `generate_many`; return the canvases of each prompt."""
    pairs = zip(work.prompts, work.canvases, strict=True)
    prompts = ({"tokens": tokens, "max_new_tokens": canvases * work.canvas_len} for tokens, canvases in pairs)
    return [
        len(result.steps)
        for result in dgemma.generate_many(model, prompts, batch_size=batch_size, eos_token_ids=[], **options)
    ]


def check_parity(
    model: dgemma.Denoiser, work: Workload, batch_size: int, options: dict[str, Any]
) -> tuple[float, float]:
    """Return the share of tokens that equal those of one prompt at a time, for `generate_many` and for a batch.

    In bfloat16, sums depend on the batch, so texts written by random weights diverge after some steps.
    """
    rows = range(batch_size)
    options = {**options, "max_new_tokens": 1, "eos_token_ids": []}
    alone = torch.cat(
        [dgemma.generate(model, work.prompts[row][None].to(GPU), seed=[row], **options).new_tokens for row in rows]
    )
    tokens, mask = work.padded(rows)
    batch = dgemma.generate(model, tokens, attention_mask=mask, **options).new_tokens
    results = dgemma.generate_many(model, work.prompts[:batch_size], batch_size=batch_size // 2, **options)
    many = torch.stack([result.new_tokens for result in results])
    return share_equal(many, alone), share_equal(batch, alone)


def share_equal(left: Tensor, right: Tensor) -> float:
    return float((left.cpu() == right.cpu()).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--canvases", type=int, default=12, help="the most canvases of an answer")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12, help="steps of each canvas")
    parser.add_argument("--ways", nargs="+", default=["many", "dropping", "padded", "one"])
    parser.add_argument("--output", type=Path, help="by default results/<gpu>/many.json")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA GPU; on this machine run tests/many/test_many.py instead.")
    output = arguments.output or results_folder() / "many.json"
    torch.manual_seed(0)
    config = dgemma.presets.diffusiongemma_26b_a4b()
    model = accelerate(dgemma.DiffusionGemma(config, device=GPU, dtype=torch.bfloat16).requires_grad_(False))
    work = Workload(arguments.prompts, arguments.canvases, config.canvas_length)
    batch_size = arguments.batch_size
    options: dict[str, Any] = {"steps": arguments.steps, "stop": None, "progress": False}
    ways: dict[str, Callable[..., list[int]]] = {
        "many": lambda options=options: run_many(model, work, batch_size, options),
        "dropping": lambda options=options: run_batches(model, work, batch_size, options, drop=True),
        "padded": lambda options=options: run_batches(model, work, batch_size, options, drop=False),
        "one": lambda options=options: run_batches(model, work, 1, options, drop=False),
    }
    report: dict[str, Any] = {"run": describe_run(), **{name: getattr(arguments, name) for name in SETTINGS}}
    report["written_canvases"] = work.canvases
    report["prompt_tokens"] = sum(map(len, work.prompts))
    many, batch = check_parity(model, work, batch_size, {**options, "steps": 3})
    report["agree_with_one"] = {"many": many, "batch": batch}
    print(
        f"{describe_run()}\n{sum(work.canvases)} canvases. Tokens equal to those of single prompts: {many:.3f} with "
        f"generate_many, {batch:.3f} in a batch",
        flush=True,
    )
    if many < batch - 0.1:
        raise SystemExit(
            "PARITY FAILED, nothing timed. The share of tokens that equal those of single prompts is too small: "
            f"{many:.3f} in generate_many, {batch:.3f} in a batch of generate."
        )
    for name in ("many", "dropping"):  # capture the graphs of every batch size
        if ways[name]({**options, "steps": 2}) != work.canvases:
            raise SystemExit(f"PARITY FAILED, nothing timed: {name} wrote another number of canvases.")
    tokens = sum(work.canvases) * config.canvas_length
    report["seconds"] = {}
    for name in arguments.ways:
        report["seconds"][name] = seconds = seconds_of(ways[name])
        print(f"[{name}] {seconds:.2f} s, {tokens / seconds:.0f} tokens/s", flush=True)
        report["tokens_per_s"] = {way: tokens / s for way, s in report["seconds"].items()}
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
