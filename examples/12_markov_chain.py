"""Train on a text whose likelihood is known, and measure how close each kind of noise comes to it.

Each text has 30 tokens of a random Markov chain with 254 states, the check of Eso-LM (arXiv:2506.01928). The exact
entropy is known, about 1.72 nats per token. No bound can be lower, and the bound of an exact model equals it. Masks
show how much of a canvas is noise. Uniform noise does not. A network that gets the noise level as an input can be
exact. A network without it must infer the level, which causes a gap. The bars show the contribution of each noise
level, from 0 to 1, to the gap.

    python examples/12_markov_chain.py                           all four runs; without a GPU, on a smaller chain
    python examples/12_markov_chain.py --run mask --out markov   one run, its numbers in markov/mask/result.json
                                                                 (run the same command again to resume)
"""

import argparse
import json
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import dgemma
from dgemma.diffusion import draws
from dgemma.diffusion.schedule import InverseSmoothstep, Linear, Schedule
from dgemma.model.config import FULL, SLIDING
from dgemma.train import (
    Bound,
    CrossEntropy,
    LeaveOneOut,
    Objective,
    TrainBatch,
    TrainConfig,
    evaluate,
    muon,
    nelbo,
    soften_attention,
    train,
)
from dgemma.train.estimates import Curve, mean_of_rows


@dataclass(frozen=True, kw_only=True, eq=False)
class MarkovChain:
    """p(x) = first[x_0] · move[x_0, x_1] · move[x_1, x_2] · …

    Example: `MarkovChain.random().entropy(30) / 30` is about 1.72 nats per token.
    """

    first: Tensor  # (V,) float64
    move: Tensor  # (V, V) float64, from row to column

    @classmethod
    def random(cls, num_states: int = 254, num_successors: int = 7, seed: int = 0) -> "MarkovChain":
        """Return a chain in which each state has `num_successors` random successors with Dirichlet(1) weights.

        Example: `MarkovChain.random(num_states=32, num_successors=4, seed=1)`.
        """
        state = torch.arange(num_states)
        seeds, zero = torch.full_like(state, seed), torch.zeros_like(state)
        order = draws.uniform(seeds, zero, state, num_states, "successor")  # (V, V)
        cut = order.kthvalue(num_successors, dim=-1).values[:, None]
        weight = -torch.log1p(-draws.uniform(seeds, zero, state, num_states, "weight"))  # exponential: Dirichlet(1)
        move = torch.where(order <= cut, weight, 0.0)
        first = torch.full((num_states,), 1 / num_states, dtype=torch.float64)
        return cls(first=first, move=move / move.sum(-1, keepdim=True))

    @property
    def num_states(self) -> int:
        return self.first.shape[0]

    def sample(self, u: Tensor) -> Tensor:
        """Draw one text per row by inverse CDF: u (B, L) in [0, 1) → tokens (B, L).

        Example: `chain.sample(torch.rand(8, 30, dtype=torch.float64))`.
        """
        ends, token = self._cells
        largest = 1 - self.num_states * (1 + self.num_states) * 2.0**-53  # otherwise r + u may round to r + 1
        u = u.double().clamp(max=largest)
        row, tokens = torch.zeros_like(u[:, 0], dtype=torch.int64), []
        for position in range(u.shape[1]):
            tokens.append(token[torch.searchsorted(ends, row + u[:, position], right=True)])
            row = tokens[-1] + 1
        return torch.stack(tokens, dim=1)

    @cached_property
    def _cells(self) -> tuple[Tensor, Tensor]:
        """Return the CDFs of all rows as one sorted list, with the token of each entry. Row r lies in (r, r + 1].

        Row 0 is for the first token, row 1 + i for the successors of state i. A binary search in the list needs no copy
        of a row. Tokens of probability zero are omitted, so that the list of a sparse chain fits into the CPU cache.
        """
        cells = torch.cat((self.first[None], self.move))  # (1 + V, V)
        ends, row_number = cells.cumsum(-1), torch.arange(len(cells), device=cells.device)
        ends = ends / ends[:, -1:] + row_number[:, None]
        return ends[cells > 0], cells.nonzero()[:, 1]

    def nll(self, tokens: Tensor) -> Tensor:
        """Return -log p of whole texts: tokens (B, L) → (B,) float64, in nats."""
        return -(self.first[tokens[:, 0]].log() + self.move[tokens[:, :-1], tokens[:, 1:]].log().sum(-1))

    def leave_one_out(self, z: Tensor, noise: dgemma.Noise, noise_level: Tensor) -> Tensor:
        """Return p(x_i | z without z_i) of noised texts. For these predictions, the bound of `nelbo` equals `nll`.

        z (B, L) and noise_level (B,) → (B, L, noise.vocab_size) float64. Tokens that are not states have probability 0.
        The noised chain is a hidden Markov model. One forward and one backward pass give all positions.

        Example: `nelbo.integrand(noise, chain.leave_one_out(z, noise, t).log(), x, z, t, parametrisation="loo")`.
        """
        alpha, states = 1 - noise_level.double(), torch.arange(self.num_states, device=z.device)
        of_noise = noise.marginal(alpha.new_zeros(len(z), noise.vocab_size), alpha).gather(1, z)  # (B, L)
        clean = noise.clean_share(noise_level.double())
        likelihood = of_noise[..., None] + clean[:, None, None] * (z[..., None] == states)  # (B, L, V): q(z_i | x_i)
        move = self.move.to(z.device)
        before, after = [self.first.to(z.device).expand_as(likelihood[:, 0])], [torch.ones_like(likelihood[:, 0])]
        for position in range(1, z.shape[1]):
            before.append(_normed((before[-1] * likelihood[:, position - 1]) @ move))
            after.append(_normed((after[-1] * likelihood[:, -position]) @ move.T))
        joint = torch.stack(before, dim=1) * torch.stack(after[::-1], dim=1)
        return F.pad(_normed(joint), (0, noise.vocab_size - self.num_states))

    def entropy(self, length: int) -> float:
        """Return the expectation of `nll` over texts of this length, in nats: a lower bound for every model."""
        of_move = -torch.xlogy(self.move, self.move).sum(-1)  # (V,)
        total, law = -torch.xlogy(self.first, self.first).sum(), self.first
        for _ in range(length - 1):
            total, law = total + law @ of_move, law @ self.move
        return float(total)


def _normed(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


@dataclass(frozen=True, kw_only=True)
class MarkovSource:
    """Batches of new texts: a `BatchSource`. With `bos`, each text starts with this frozen token.

    The first token has its own distribution. Attention sees only relative positions, not the beginning of a text. So
    without `bos` no network is exact on a canvas of pure noise.

    Example: `MarkovSource(chain=MarkovChain.random(), bos=255)(0, range(64)).tokens` is (64, 31).
    """

    chain: MarkovChain
    length: int = 30
    bos: int | None = None
    seed: int = 0

    def __call__(self, step: int, rows: range) -> TrainBatch:
        row = torch.arange(rows.start, rows.stop)
        u = draws.uniform(torch.full_like(row, self.seed), row, torch.full_like(row, step), self.length, "text")
        tokens, frozen = self.chain.sample(u), None
        if self.bos is not None:
            tokens = F.pad(tokens, (1, 0), value=self.bos)
            frozen = F.pad(torch.zeros(len(row), self.length, dtype=torch.bool), (1, 0), value=True)
        length = torch.full_like(row, tokens.shape[1])
        return TrainBatch(tokens=tokens, prompt_len=torch.zeros_like(row), length=length, frozen=frozen)


@torch.no_grad()
def gap_by_level(
    model: dgemma.DiffusionGemma,
    tokens: Tensor,
    noise: dgemma.Noise,
    chain: MarkovChain,
    *,
    parametrisation: nelbo.Parametrisation = "mean",
    lowest_level: float = 1e-3,
    num_bins: int = 10,
    samples_per_bin: int = 3,
    seed: int = 0,
) -> Curve:
    """Return how much a model's bound exceeds the exact posterior's, per token, in equal bins of noise levels.

    tokens (B, 1 + L): texts with a first token `bos`, as `MarkovSource` makes them. The schedule must be linear. The
    sum over bins estimates `Likelihood.gap`. Its variance is small, because both bounds use the same noise.

    Example: `gap_by_level(model, source(0, range(512)).tokens, noise, source.chain, parametrisation="loo").nats`.
    """
    tokens, num_samples = tokens.to(model.device), num_bins * samples_per_bin
    rows, x, gaps = torch.arange(len(tokens), device=tokens.device), tokens[:, 1:], []
    for sample in range(num_samples):
        when = torch.full_like(rows, seed), rows, torch.full_like(rows, sample)
        u_time, u_event, u_token = (draws.uniform(*when, x.shape[1], name) for name in ("time", "event", "noise"))
        level = lowest_level + (1 - lowest_level) * (sample + u_time[:, 0]) / num_samples
        z = noise.corrupt(x, level, u_event, u_token)
        canvas, known_level = torch.cat([tokens[:, :1], z], dim=1), level if model.takes_noise_level else None
        logits = model.denoise(canvas, model.new_cache(len(canvas)), noise_level=known_level).logits[:, 1:]
        exact = nelbo.integrand(noise, chain.leave_one_out(z, noise, level).log(), x, z, level, parametrisation="loo")
        ours = nelbo.integrand(noise, logits, x, z, level, parametrisation=parametrisation)
        gaps.append((ours - exact).sum(1) * (1 - lowest_level) / num_samples)
    by_level = torch.stack(gaps, dim=1).unflatten(1, (num_bins, -1)).sum(-1).cpu()  # (B, bins)
    edges = torch.linspace(lowest_level, 1, num_bins + 1, dtype=torch.float64)
    return mean_of_rows(edges, by_level, torch.full((len(x), 1), x.shape[1]), 0.95)


def make_config(
    *, num_states: int = 254, length: int = 30, hidden_size: int = 512, num_hidden_layers: int = 5
) -> dgemma.ModelConfig:
    """Return a dense network for short texts, by default of 24 million weights. A canvas is a text.

    The last two token ids are the mask and the token that every text begins with. All heads have one size, every layer
    sees the whole text, and rope_theta is small.
    """
    rope = {"rope_type": "default", "rope_theta": 100.0}
    return dgemma.ModelConfig(
        vocab_size=num_states + 2,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        canvas_length=length + 1,
        num_hidden_layers=num_hidden_layers,
        layer_types=(SLIDING,) * (num_hidden_layers - 1) + (FULL,),
        sliding_window=max(64, length + 1),
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=hidden_size // 4,
        num_global_key_value_heads=4,
        global_head_dim=hidden_size // 4,
        num_experts=1,
        top_k_experts=1,
        moe_intermediate_size=64,
        rope_parameters={SLIDING: rope, FULL: rope},
        max_position_embeddings=max(256, length + 1),
    )


@dataclass(frozen=True, kw_only=True)
class Size:
    num_states: int = 254
    num_successors: int = 7
    length: int = 30
    hidden_size: int = 512
    num_layers: int = 5
    steps: int = 9000
    batch_size: int = 1536
    lr: float = 2e-3
    num_test_rows: int = 8192


TINY = Size(num_states=6, num_successors=2, length=8, hidden_size=32, num_layers=2, steps=20, batch_size=32, lr=1e-2)
SIZES = {"full": Size(), "tiny": replace(TINY, num_test_rows=64)}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A kind of noise, with or without the noise level as an input, and its loss.

    The bound needs logits of p(x | z without this position), and most losses below train them. The published loss, in
    `uniform-mean`, trains p(x | z) instead, and `evaluate` converts the logits with the true level.
    """

    level_input: bool = False
    levels: Schedule = field(default=Linear())  # for training; the bound does not depend on it
    objective: dict[str, Any]  # fields of `Objective`
    momentum: float = 0.95  # Muon's
    full: dict[str, int] = field(default_factory=dict)  # fields of `Size` that this run replaces at the full size


RUNS = {
    # The bound weights the sum over a text's masked positions by 1/t. The mean over them has about the same weight
    # and less variance.
    "mask": Run(objective={"loss": CrossEntropy(scored="noised"), "reduction": "example"}),
    # Most of the gap is at middle levels, so these are drawn most often.
    "uniform-with-level": Run(
        level_input=True,
        levels=InverseSmoothstep(),
        objective={"loss": LeaveOneOut(), "t_range": (1e-6, 1 - 1e-6)},
        # This run learns slowest. On a chain of 24 states, twice the batch reduced the excess loss to 0.79 of its
        # value. Twice the steps reduced it to 0.69 of its value, and a momentum of 0.9 reduced it by 5 to 10 %. Other
        # learning rates, schedules and decays did not help.
        momentum=0.9,
        full={"steps": 13_000, "batch_size": 2048},
    ),
    "uniform": Run(objective={"loss": Bound(parametrisation="loo")}),
    "uniform-mean": Run(objective={"loss": CrossEntropy()}),
}


def run(name: str, size: Size, out: Path, device: str) -> None:
    """Train, evaluate on new texts, and record how far the bound is from the exact likelihood."""
    choice, began = RUNS[name], time.perf_counter()
    config = make_config(
        num_states=size.num_states, length=size.length, hidden_size=size.hidden_size, num_hidden_layers=size.num_layers
    ).replace(noise_conditioning=choice.level_input)
    torch.manual_seed(0)
    model = dgemma.DiffusionGemma(config, device=device)
    soften_attention(model)
    masks = dgemma.MaskNoise(config.vocab_size, mask_token_id=size.num_states)
    noise = masks if name == "mask" else dgemma.UniformNoise(config.vocab_size)
    objective = Objective(
        noise=replace(noise, schedule=choice.levels),
        canvas_len=config.canvas_length,
        self_cond_prob=0.0,
        causal_weight=0.0,
        **choice.objective,
    )
    chain = MarkovChain.random(size.num_states, size.num_successors)
    source = MarkovSource(chain=chain, length=size.length, bos=size.num_states + 1, seed=1)
    training = TrainConfig(
        steps=size.steps,
        batch_size=size.batch_size,
        warmup=size.steps // 20,
        final_lr=0.02,
        ema_decay=0.995,
        precision="mixed" if device == "cuda" else "weights",
        checkpoint_every=max(1, size.steps // 6),
    )
    optimizer = partial(muon, lr=size.lr, momentum=choice.momentum)
    with ExitStack() as stack:
        if device == "cuda":
            from dgemma_kernels import accelerate_training  # needs Triton

            stack.enter_context(accelerate_training(model))
        outcome = train(model, objective, source, training, out=out, optimizer=optimizer)
    if outcome.interrupted:
        raise SystemExit(1)
    train_end = time.perf_counter()
    test = replace(source, seed=2)(0, range(size.num_test_rows))
    means = "mean" if isinstance(objective.loss, CrossEntropy) else "loo"
    found = evaluate(model, test, noise, batch_size=1024, num_samples=32, lowest_level=1e-3, parametrisation=means)
    gap = found.gap(chain.nll(test.tokens[:, 1:]))  # on the same texts: a narrower interval than the bound's
    level_gaps = gap_by_level(model, test.tokens[:2048], noise, chain, parametrisation=means)
    rate, seconds = chain.entropy(size.length) / size.length, time.perf_counter() - began
    result = {"run": name, "rate": rate, "gap": gap.value, "gap_error": gap.error, "steps": size.steps}
    result |= {"parameters": model.num_parameters(), "train_seconds": train_end - began, "seconds": seconds}
    result |= {"gap_by_level": level_gaps.nats.tolist(), "gap_by_level_error": level_gaps.error.tolist()}
    (out / "result.json").write_text(json.dumps({**result, "likelihood": found.summary()}, indent=1) + "\n")
    heights = 7 * (level_gaps.nats / level_gaps.nats.max().clamp(min=1e-9)).clamp(min=0)
    bars = "".join("▁▂▃▄▅▆▇█"[round(height)] for height in heights.tolist())
    print(f"{name:22}{rate:8.4f}{found.nelbo.value:9.4f}{gap!s:>20}  {bars}{seconds:9.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--run", choices=[*RUNS, "all"], default="all")
    parser.add_argument("--size", choices=SIZES, default="full" if on_gpu else "tiny")
    parser.add_argument("--steps", type=int, help="training steps; default: the size's")
    parser.add_argument("--out", type=Path, help="folder for checkpoints and result.json; default: temporary")
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    options = parser.parse_args()
    print(f"{'noise':22}{'exact':>8}{'bound':>9}{'gap, nats/token':>20}  {'by level':10}{'seconds':>9}")
    with tempfile.TemporaryDirectory() as scratch:
        for name in RUNS if options.run == "all" else [options.run]:
            size = SIZES[options.size]
            size = replace(size, **RUNS[name].full) if options.size == "full" else size
            out = (options.out or Path(scratch)) / name
            run(name, replace(size, steps=size.steps if options.steps is None else options.steps), out, options.device)


if __name__ == "__main__":
    main()
