"""Training throughput next to a plain transformers loop, on the same objective, batch and precision.

python kernels/benchmarks/training.py                                  on a GPU the 1B preset, elsewhere a toy
python kernels/benchmarks/training.py --batch-size 4 --output out.json
python kernels/benchmarks/training.py --profile --rounds 2             dgemma alone, and how busy the GPU is
python kernels/benchmarks/training.py --lora --preset diffusiongemma_26b_a4b --profile    adapters, next to PEFT's

Both loops train the same architecture on rows of a prompt and a canvas. A step reads the row causally, draws noise,
denoises the canvas twice (first without gradients, for self-conditioning) and takes the cross-entropy of the canvas and
of every next token. Before anything is timed, the losses of both loops are compared on a tiny model with equal weights.
The timed weights are bfloat16 on a GPU, float32 elsewhere. On a GPU, dgemma trains within `accelerate_training`.

With --lora, dgemma trains adapters of rank 8 on all its targets and recomputes activations. PEFT's adapters are on
attention and the dense MLP only. Its loop stores activations, because transformers cannot recompute those of its
encoder. So it gets fewer rows.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers_training
from timing import describe_run
from torch import Tensor, nn
from transformers import DiffusionGemmaForBlockDiffusion

import dgemma
from dgemma.train import LoRA, Objective, TrainBatch, TrainConfig, add_lora, train
from dgemma.train.log import TrainStep
from dgemma_kernels import accelerate_training

ON_GPU = torch.cuda.is_available()
RANK = 8  # of adapters
OPERATIONS = {  # by a part of a kernel's name; the first that matches
    "triton_": "functions between products",  # compiled
    "_norm_heads": "functions between products",
    "_rms_norm": "functions between products",
    "_after_": "functions between products",
    "_attention_residual": "functions between products",
    "_choices_": "sorting and counting",
    "sdpa": "attention",
    "fmha": "attention",
    "flash": "attention",
    "GroupProblemShape": "products by expert",
    "grouped": "products by expert",
    "multiply_tokens": "products by expert",
    "nvjet": "matrix products",
    "gemm": "matrix products",
    "cutlass": "matrix products",
    "splitK": "matrix products",
    "softmax": "softmax",
    "multi_tensor_apply": "optimizer and norm of the gradient",
    "gather": "gathers and scatters",
    "scatter": "gathers and scatters",
    "index": "gathers and scatters",
    "CatArray": "copies",
    "copy": "copies",
    "Memcpy": "copies",
    "Memset": "copies",
    "Sort": "sorting and counting",
    "sort": "sorting and counting",
    "scan": "sorting and counting",
    "TopK": "sorting and counting",
    "reduce": "sums",
}
DEVICE, DTYPE = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)


def fine_tuning_loss(model: dgemma.DiffusionGemma, tokens: Tensor, prompt_len: int, **changes: Any) -> Tensor:
    """Return the published objective for the training loop, for rows (B, T) of a prompt and one canvas."""
    noise = dgemma.UniformNoise(model.config.vocab_size)
    objective = Objective(noise=noise, canvas_len=model.config.canvas_length, **changes)
    batch_size, length = tokens.shape
    ones = torch.ones(batch_size, dtype=torch.int64, device=tokens.device)
    spans = ((prompt_len, length),) * batch_size  # known on the host: reading the device would wait for it
    batch = TrainBatch(tokens=tokens, prompt_len=ones * prompt_len, length=ones * length, spans=spans)
    return objective.reduce(objective(model, batch, seeds=torch.randint_like(ones, 2**62)))


def build(config: dgemma.ModelConfig) -> dgemma.DiffusionGemma:
    return dgemma.DiffusionGemma(config, device=DEVICE, dtype=DTYPE)


def door(model: dgemma.DiffusionGemma) -> AbstractContextManager[None]:
    return accelerate_training(model) if ON_GPU else nullcontext()


def demand_equal_losses() -> None:
    """Check that both loops have the same loss for a tiny model, without noise and with self-conditioning."""
    model = dgemma.DiffusionGemma(dgemma.presets.tiny().replace(sliding_window=128, initializer_range=0.1))
    tokens = torch.randint(5, model.config.vocab_size, (3, 48 + model.config.canvas_length))
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)
        plain = DiffusionGemmaForBlockDiffusion.from_pretrained(folder, dtype=torch.float32)
        theirs = transformers_training.fine_tuning_loss(plain, tokens, 48, noise=0.0, self_cond=1.0)
        ours = fine_tuning_loss(model, tokens, 48, t_range=(0.0, 0.0), self_cond_prob=1.0)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)  # float32 on the CPU
    print(f"parity: loss {ours.item():.5f} here, {theirs.item():.5f} in transformers")


def measure(step: Callable[[], Tensor], options: argparse.Namespace) -> dict[str, Any]:
    """Time rounds of several steps, with a wait for the device only before and after a round."""
    losses, times = [step() for _ in range(options.warmup)], []
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(options.rounds):
        torch.stack(losses).tolist()  # waits
        began = time.perf_counter()
        losses = [step() for _ in range(options.steps)]
        last = torch.stack(losses).tolist()[-1]
        times.append((time.perf_counter() - began) / options.steps * 1e3)
    peak = torch.cuda.max_memory_allocated() / 2**30 if ON_GPU else 0.0
    return {"milliseconds": statistics.median(times), "rounds_ms": times, "peak_GiB": peak, "loss": last}


def profile(step: Callable[[], Tensor], milliseconds: float, num_steps: int = 3) -> None:
    """Print the GPU time of a step by kernel, against the `milliseconds` measured without the profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as watched:
        for _ in range(num_steps):
            step()
        torch.cuda.synchronize()
    print_kernels(watched, milliseconds, num_steps)


def print_kernels(watched: torch.profiler.profile, milliseconds: float, num_steps: int) -> dict[str, float]:
    """Print the GPU time of a profiled step by operation and by kernel; return the milliseconds by operation."""
    kernels = [event for event in watched.key_averages() if event.self_device_time_total > 0]
    kernels.sort(key=lambda kernel: -kernel.self_device_time_total)
    by_operation: Counter[str] = Counter()
    for kernel in kernels:
        by_operation[operation_of(kernel.key)] += kernel.self_device_time_total / num_steps / 1e3
    busy, launches = sum(by_operation.values()), sum(kernel.count for kernel in kernels) / num_steps
    share = busy / milliseconds
    print(f"\nthe GPU computes {busy:.1f} of {milliseconds:.1f} ms per step ({share:.0%}), {launches:.0f} kernels:")
    for operation, each in by_operation.most_common():
        print(f"{each:8.2f} ms {operation}")
    print()
    for kernel in kernels[:25]:
        each = kernel.self_device_time_total / num_steps / 1e3
        print(f"{each:8.2f} ms {kernel.count / num_steps:7.0f} × {kernel.key[:90]}")
    return dict(by_operation.most_common())


def floors(config: dgemma.ModelConfig, num_rows: int, prompt_len: int) -> dict[str, float]:
    """Return the least milliseconds of a step that trains adapters, by operation, on an H200.

    Products run at 750 TFLOP/s. Products of adapters are not counted, except those of experts' matrices that have the
    hidden size as a dimension. Functions between products read their inputs and write their outputs once, at 4.3 TB/s.
    """
    width, noisy = config.hidden_size, num_rows * config.canvas_length
    text_len, seen = prompt_len + config.canvas_length - 1, prompt_len + config.canvas_length
    both = num_rows * text_len + noisy
    dense, inner = config.intermediate_size, config.top_k_experts * config.moe_intermediate_size
    products = 4.0 * config.vocab_size * width * (both + noisy)  # logits and their gradient; soft embeddings
    experts = attention = moved = 0.0
    for number in range(config.num_hidden_layers):
        shape = config.layer_shape(number)
        heads, queries = config.num_attention_heads, config.num_attention_heads * shape.head_dim
        keys = shape.num_key_value_heads * shape.head_dim
        outer = width * queries
        weights = 2 * outer + width * (keys * (2 if shape.is_sliding else 1) + 3 * dense + config.num_experts)
        products += 2 * (weights * (3 * both + noisy) - outer * both)  # attention's output is not computed again
        products += 2 * width * config.num_experts * RANK * (2 * (both + noisy) + 5 * both)
        experts += 2 * 3 * width * inner * (both + noisy + 2 / 3 * both + both)
        pairs = num_rows * heads * shape.head_dim * 4
        causal, full = pairs * text_len * text_len / 2, pairs * config.canvas_length * seen
        scores = 2 * (causal + full) + full + 2.5 * (causal + full)
        if shape.head_dim > 256:  # by matrix products
            products += scores
        else:
            attention += scores
        # Values per token that norms, heads, GeGLUs and the experts' sums read and write: forward and recomputation,
        # forward only, gradient.
        of_heads, sums = 2 * (queries + 2 * keys) + 2 * queries, (1 + config.top_k_experts) * width
        once = 8 * width + of_heads + 3 * dense
        again = 4 * width + sums
        gradient = 24 * width + 1.5 * of_heads + 5 * dense + 6 * inner + sums
        moved += 2 * (once * (2 * both + noisy) + again * (both + noisy) + gradient * both)
    moved += 2 * 3 * config.vocab_size * both
    milliseconds = {"matrix products": products, "products by expert": experts, "attention": attention}
    return {name: flop / 750e9 for name, flop in milliseconds.items()} | {"functions between products": moved / 4.3e9}


def operation_of(kernel: str) -> str:
    """Return the operation that a kernel belongs to, from its name."""
    return next((operation for part, operation in OPERATIONS.items() if part in kernel), "other elementwise kernels")


def compare_adapters(config: dgemma.ModelConfig, options: argparse.Namespace) -> None:
    """Train adapters with `train`, then with transformers and PEFT; print a row for each."""
    length = options.prompt_len + config.canvas_length
    results: list[dict[str, Any]] = []

    def report(loop: str, rows: int, adapters: list[nn.Parameter], found: dict[str, Any]) -> None:
        size, speed = sum(weight.numel() for weight in adapters), rows * length / found["milliseconds"] * 1e3
        if not results:
            print("| loop | rows | adapters, M | tokens/s | ms per step | first step, s | peak GiB | loss |")
            print("|---|---|---|---|---|---|---|---|")
        results.append({"loop": loop, "rows": rows, "adapter_weights": size, "tokens_per_second": speed, **found})
        print(f"| {loop} | {rows} | {size / 1e6:.1f} | {speed:,.0f} | {found['milliseconds']:.1f} |", end="")
        print(f" {found['first_step_s']:.1f} | {found['peak_GiB']:.1f} | {found['loss']:.2f} |", flush=True)
        write(results, options.output)

    model = dgemma.DiffusionGemma(config, device=DEVICE, dtype=DTYPE)
    adapters = add_lora(model, LoRA(rank=RANK))
    report("dgemma", options.batch_size, adapters, run_train(model, length, options))
    if options.peft_rows:
        del model, adapters
        gc.collect()
        torch.cuda.empty_cache()
        plain = transformers_training.build(config, DEVICE, DTYPE)
        theirs = transformers_training.add_lora(plain, RANK)
        optimizer = torch.optim.AdamW(theirs, lr=1e-5, betas=(0.95, 0.99), fused=ON_GPU)

        def step() -> Tensor:
            tokens = torch.randint(5, config.vocab_size, (options.peft_rows, length), device=DEVICE)
            loss = transformers_training.fine_tuning_loss(plain, tokens, options.prompt_len)
            loss.backward()
            nn.utils.clip_grad_norm_(theirs, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        began = time.perf_counter()
        step().item()
        first = time.perf_counter() - began
        report("transformers, PEFT", options.peft_rows, theirs, {"first_step_s": first, **measure(step, options)})


def run_train(model: dgemma.DiffusionGemma, length: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run `train` with kernels and recomputed activations; return its pace after the warm-up."""
    objective = Objective(noise=dgemma.UniformNoise(model.config.vocab_size), canvas_len=model.config.canvas_length)
    clock: dict[str, float] = {}
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    last = options.warmup + options.rounds * options.steps

    def source(step: int, rows: range) -> TrainBatch:
        clock.setdefault("began", time.perf_counter())
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(5, model.config.vocab_size, (len(rows), length), generator=generator)
        ones = torch.ones(len(rows), dtype=torch.int64)
        return TrainBatch(tokens=tokens, prompt_len=ones * options.prompt_len, length=ones * length)

    def on_step(record: TrainStep) -> None:
        if record.step == 1:
            record.loss.item()
            clock["first"] = time.perf_counter() - clock["began"]
            clock["first_from_call"] = time.perf_counter() - clock["called"]
        if record.step == options.warmup:
            record.loss.item()
            clock["warm"] = time.perf_counter()
        if record.step == last:
            record.loss.item()
            clock["last"] = time.perf_counter()
            if options.profile:
                profiler.start()
        if record.step == last + 1:
            record.loss.item()
            profiler.stop()

    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    config = TrainConfig(
        steps=last + options.profile,
        batch_size=options.batch_size,
        precision="weights",
        recompute_activations=True,
        log_every=options.steps,
        progress=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        clock["called"] = time.perf_counter()
        with door(model):
            result = train(model, objective, source, config, out=folder, on_step=on_step)
        losses = result.log.column("loss")[1]
    milliseconds = (clock["last"] - clock["warm"]) / (last - options.warmup) * 1e3
    peak = torch.cuda.max_memory_allocated() / 2**30 if ON_GPU else 0.0
    by_operation, least = {}, {}
    if options.profile:
        by_operation = print_kernels(profiler, milliseconds, 1)
        least = floors(model.config, options.batch_size, options.prompt_len)
        print("\nfloors: " + ", ".join(f"{name} {each:.1f} ms" for name, each in least.items()))
    return {
        "milliseconds": milliseconds,
        "first_step_s": clock["first"],
        "first_step_from_the_call_s": clock["first_from_call"],
        "peak_GiB": peak,
        "reserved_GiB": torch.cuda.max_memory_reserved() / 2**30 if ON_GPU else 0.0,
        "loss": losses[-1],
        "by_operation_ms": by_operation,
        "floors_ms": least,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="medium_1b" if ON_GPU else "tiny")
    parser.add_argument("--batch-size", type=int, default=8 if ON_GPU else 2)
    parser.add_argument("--prompt-len", type=int, default=704 if ON_GPU else 32)
    parser.add_argument("--warmup", type=int, default=5 if ON_GPU else 1, help="steps before the first round")
    parser.add_argument("--rounds", type=int, default=5 if ON_GPU else 1)
    parser.add_argument("--steps", type=int, default=4 if ON_GPU else 1, help="steps per round")
    parser.add_argument("--lora", action="store_true", help="train adapters of rank 8 instead of all weights")
    parser.add_argument("--peft-rows", type=int, default=2, help="rows of PEFT's loop with --lora; 0 leaves it out")
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument(
        "--profile", action="store_true", help="print the kernels of dgemma's steps; without --lora, run dgemma alone"
    )
    options = parser.parse_args()
    if options.profile and not ON_GPU:
        parser.error("--profile must run on a GPU, and there is none. Leave it out.")
    demand_equal_losses()

    config: dgemma.ModelConfig = getattr(dgemma.presets, options.preset)()
    shape = (options.batch_size, options.prompt_len + config.canvas_length)
    config = config.replace(sliding_window=max(config.sliding_window, shape[1] + 1))  # both models see everything
    print(f"\n{options.preset}, {shape[0]} rows of {shape[1]} tokens, {describe_run()}\n")
    if options.lora:
        compare_adapters(config, options)
        return
    print(
        "| loop | work | tokens/s | times transformers | ms per step | peak GiB | loss |\n|---|---|---|---|---|---|---|"
    )
    results: list[dict[str, Any]] = []

    def run(loop: str, model: Any, loss_of: Callable[..., Tensor]) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.95, 0.99), fused=ON_GPU)
        for update in (False, True):

            def step(update: bool = update) -> Tensor:
                loss = loss_of(model, torch.randint(5, config.vocab_size, shape, device=DEVICE), options.prompt_len)
                loss.backward()
                if update:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                optimizer.zero_grad()
                return loss.detach()

            work = "forward + backward" + " + AdamW" * update
            found = {"loop": loop, "work": work, **measure(step, options)}
            found["tokens_per_second"] = shape[0] * shape[1] / found["milliseconds"] * 1e3
            results.append(found)
            ratio = (
                found["tokens_per_second"] / results[update]["tokens_per_second"]
            )  # against the first loop with the same work
            print(f"| {loop} | {work} | {found['tokens_per_second']:,.0f} | {ratio:.2f} |", end="")
            print(f" {found['milliseconds']:.1f} | {found['peak_GiB']:.1f} | {found['loss']:.2f} |", flush=True)
        if options.profile:
            profile(step, results[-1]["milliseconds"])

    def run_dgemma() -> None:
        model = build(config)
        with door(model):
            run("dgemma", model, fine_tuning_loss)

    if options.profile:
        run_dgemma()
        return
    plain = transformers_training.build(config, DEVICE, DTYPE)
    ways = f"{plain.config._attn_implementation}, {plain.config.text_config._experts_implementation}"
    run(f"transformers ({ways})", plain, transformers_training.fine_tuning_loss)
    del plain
    gc.collect()
    torch.cuda.empty_cache()
    run_dgemma()
    write(results, options.output)


def write(results: list[dict[str, Any]], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps({"run": describe_run(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
