"""The vocabulary pass of a step: parity against float64, then time for 256 positions of 262,144 logits per user.

    PYTHONPATH=src:kernels python kernels/benchmarks/vocabulary.py [--sweep]

It also times the same work in eager PyTorch, as transformers does it, and the matrix products before and after it.
"""

import argparse
import itertools
from typing import Any

import torch
from timing import demand_parity, describe_run, measure_read_bandwidth, time_graph
from torch import Tensor

from dgemma.diffusion import draws
from dgemma.diffusion.prediction import Prediction
from dgemma_kernels.ops.accept import kernel as accept_kernel
from dgemma_kernels.ops.accept import reference as accept_reference
from dgemma_kernels.ops.accept.kernel import Before
from dgemma_kernels.ops.vocabulary import kernel as vocabulary
from dgemma_kernels.ops.vocabulary.kernel import (
    Shaping,
    pack_allowed,
    sample,
    soft_probabilities,
    vocabulary_statistics,
)

VOCAB, HIDDEN, CANVAS, SOFTCAP = 262_144, 2816, 256, 30.0
LIMITS: dict[str, Any] = {"bound": 0.1, "confidence": 0.005, "vocab_size": VOCAB}
CHECKED_ROWS = 16  # only these rows are copied to float64
# The largest logit, cap 30 over temperature 0.4, has a float32 error of about 2e-5. This is also the relative error of
# its probability.
LIMIT = 5e-5


def draw(num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw head outputs from flat to peaked, a temperature and uniforms."""
    logits = torch.randn(num_rows, VOCAB, device="cuda", dtype=torch.bfloat16) * 4
    logits[torch.arange(num_rows), torch.randint(VOCAB, (num_rows,))] += (
        torch.linspace(0, 60, num_rows).bfloat16().cuda()
    )
    return logits, torch.full((1,), 0.4083, device="cuda"), torch.rand(num_rows, device="cuda", dtype=torch.float64)


def check(logits: Tensor, temperature: Tensor, u: Tensor) -> None:
    some = torch.linspace(0, logits.shape[0] - 1, CHECKED_ROWS, device="cuda").long()
    logits, u = logits[some].contiguous(), u[some]
    shaped = SOFTCAP * torch.tanh(logits.double() / SOFTCAP) / temperature.double()
    law = torch.distributions.Categorical(logits=shaped)
    statistics = vocabulary_statistics(logits, Shaping(temperature))
    best = law.probs.topk(2).values
    demand_parity("entropy", statistics.entropy, law.entropy(), LIMIT)
    demand_parity("confidence", statistics.confidence, best[:, 0], LIMIT)
    demand_parity("margin", statistics.margin, best[:, 0] - best[:, 1], LIMIT)
    demand_parity("log_normalizer", statistics.log_normalizer, shaped.logsumexp(-1), LIMIT)
    same_argmax = (statistics.argmax == logits.argmax(-1)).sum().item()
    tokens = sample(logits, statistics, u, Shaping(temperature))
    same_tokens = (tokens == Prediction(shaped[None]).sample(u[None])[0]).sum().item()
    print(f"parity: argmax equal in {same_argmax} of {CHECKED_ROWS} rows, samples in {same_tokens}")
    if same_argmax < CHECKED_ROWS or same_tokens < CHECKED_ROWS - 1:
        raise SystemExit("PARITY FAILED, nothing timed: argmax or samples differ by more than a rounding tie.")
    weights, scale = soft_probabilities(logits, statistics, Shaping(temperature))
    exact = shaped.bfloat16().double().softmax(-1)
    demand_parity("soft_probabilities", weights.double() * scale[:, None], exact, 5e-3)
    allowed = torch.rand(1, VOCAB, device="cuda") < 0.3
    masked = vocabulary_statistics(logits, Shaping(temperature, allowed=pack_allowed(allowed)))
    law = torch.distributions.Categorical(probs=shaped.masked_fill(~allowed, -torch.inf).softmax(-1))
    demand_parity("entropy over allowed tokens", masked.entropy, law.entropy(), LIMIT)


def check_accept(state: dict[str, Any]) -> None:
    got, want = (module.accept(Before(**state), **LIMITS) for module in (accept_kernel, accept_reference))
    noise = draws.integers(draws.uniform(state["seeds"], state["block"], state["step"], CANVAS, "noise"), VOCAB)
    moved = (got.accepted != want.accepted).sum().item()
    if moved > len(state["done"]) or not torch.equal(got.canvas[got.renoised], noise[got.renoised]):
        raise SystemExit(f"PARITY FAILED, nothing timed: accept differs at {moved} positions, or its noise does.")
    for name in ("open", "draft", "done", "recent", "verdict"):
        if not torch.equal(getattr(got, name), getattr(want, name)):
            raise SystemExit(f"PARITY FAILED, nothing timed: accept leaves another {name} than its reference.")


def draw_state(batch: int) -> dict[str, Any]:
    tokens = torch.randint(VOCAB, (4, batch, CANVAS), device="cuda")
    rows = torch.arange(batch, device="cuda")
    frozen = torch.rand(batch, CANVAS, device="cuda") < 0.1
    return {
        "entropy": torch.rand(batch, CANVAS, device="cuda") ** 8,
        "tokens": tokens[0],
        "argmax": tokens[1],
        "canvas": tokens[2],
        "open": ~frozen,
        "frozen": frozen,
        "draft": tokens[3],
        "recent": tokens[1][:, None].clone(),
        "done": rows % 4 == 3,
        "seeds": rows + 7,
        "block": rows * 0,
        "step": rows * 0 + 5,
        "num_steps": rows * 0 + 48,
    }


def eager(logits: Tensor, temperature: Tensor) -> tuple[Tensor, ...]:
    """Run the same step as transformers does, with float32 (R, V) intermediates."""
    processed = torch.tanh(logits.float() / SOFTCAP) * SOFTCAP / temperature
    probabilities = processed.softmax(-1)
    entropy = torch.distributions.Categorical(logits=processed, validate_args=False).entropy()
    soft = processed.bfloat16().softmax(-1, dtype=torch.float32).bfloat16()
    return torch.multinomial(probabilities, 1), processed.argmax(-1), entropy, soft


def line(name: str, median: float, spread: float, num_bytes: float, bandwidth: float) -> None:
    rate = num_bytes / (median * 1e-3)
    share = f"{rate / 1e12:5.2f} TB/s, {rate / bandwidth:4.0%} of read bandwidth" if num_bytes else ""
    print(f"  {name:42} {1e3 * median:8.1f} us ±{1e3 * spread:5.1f}  {share}", flush=True)


def measure(batch: int, embedding: Tensor, bandwidth: float) -> None:
    logits, temperature, u = draw(batch * CANVAS)
    state = draw_state(batch)
    statistics = vocabulary_statistics(logits, Shaping(temperature))
    soft = soft_probabilities(logits, statistics, Shaping(temperature)).weights
    hidden = torch.randn(batch * CANVAS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    num_bytes = logits.numel() * 2
    weight_bytes = embedding.numel() * 2 + num_bytes
    line("statistics", *time_graph(lambda: vocabulary_statistics(logits, Shaping(temperature))), num_bytes, bandwidth)
    line("sample", *time_graph(lambda: sample(logits, statistics, u, Shaping(temperature)), calls=8), 0, bandwidth)
    timed = time_graph(lambda: soft_probabilities(logits, statistics, Shaping(temperature)))
    line("soft_probabilities", *timed, 2 * num_bytes, bandwidth)
    line(
        "accept, renoise, stop",
        *time_graph(lambda: accept_kernel.accept(Before(**state), **LIMITS), calls=8),
        0,
        bandwidth,
    )
    line("head product", *time_graph(lambda: hidden @ embedding.T), weight_bytes, bandwidth)
    line("soft-embedding product", *time_graph(lambda: soft @ embedding), weight_bytes, bandwidth)
    if batch == 1:
        line("all but the products, eager PyTorch", *time_graph(lambda: eager(logits, temperature)), 0, bandwidth)


def sweep(logits: Tensor, temperature: Tensor) -> None:
    num_rows = logits.shape[0]
    shaping = vocabulary.shape_logits(logits, Shaping(temperature, SOFTCAP))
    results = []
    for chunk, num_warps in itertools.product((1024, 2048, 4096, 8192, 16_384), (2, 4, 8, 16)):
        if not 8 <= chunk // (32 * num_warps) <= 128:
            continue
        chunks = torch.empty((3, num_rows, VOCAB // chunk), device="cuda")

        def run(chunk: int = chunk, num_warps: int = num_warps, chunks: Tensor = chunks) -> None:
            vocabulary._sweep_kernel[(VOCAB // chunk, num_rows)](
                logits, shaping, *chunks, VOCAB, CHUNK=chunk, num_warps=num_warps
            )

        results.append((*time_graph(run, calls=4), chunk, num_warps))
    print("sweep of the statistics kernel, 256 rows:")
    for median, spread, chunk, num_warps in sorted(results):
        print(f"  {1e3 * median:8.1f} us ±{1e3 * spread:4.1f}  chunk={chunk:<6} warps={num_warps}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="time chunk sizes of the statistics kernel as well")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA GPU; on this machine run the tests in tests/kernels instead.")
    torch.manual_seed(0)
    print(describe_run())
    check(*draw(CANVAS))
    check_accept(draw_state(8))
    bandwidth = measure_read_bandwidth()
    print(f"read bandwidth {bandwidth / 1e12:.2f} TB/s")
    embedding = torch.randn(VOCAB, HIDDEN, device="cuda", dtype=torch.bfloat16) / HIDDEN**0.5
    for batch in (1, 2, 4):
        print(f"batch {batch}:")
        measure(batch, embedding, bandwidth)
    if arguments.sweep:
        sweep(*draw(CANVAS)[:2])


if __name__ == "__main__":
    main()
