"""Texts from a random Markov chain, whose exact likelihood and entropy are known, as a source of batches.

This is the check of Eso-LM (arXiv:2506.01928): 254 states, 30 tokens, in the paper about 1.73 nats per token. No model
can score below the entropy, and a good model should reach it.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.checks import require, require_field
from dgemma.diffusion import draws, nelbo
from dgemma.diffusion.noise import Noise
from dgemma.diffusion.schedule import Linear
from dgemma.model.diffusion import DiffusionGemma
from dgemma.train.batch import TrainBatch
from dgemma.train.estimates import Curve, mean_of_rows


@dataclass(frozen=True, kw_only=True, eq=False)
class MarkovChain:
    """p(x) = first[x_0] · move[x_0, x_1] · move[x_1, x_2] · …

    Example: `MarkovChain.random().entropy(30) / 30` is about 1.72 nats per token.
    """

    first: Tensor  # (V,) float64
    move: Tensor  # (V, V) float64, from row to column

    def __post_init__(self) -> None:
        is_square = self.move.shape == 2 * self.first.shape
        require_field(is_square, self, "move", f"be square, for {self.num_states} states")
        for name in ("first", "move"):
            table = getattr(self, name).double()
            sums_to_one = torch.allclose(table.sum(-1), torch.ones(()).double(), atol=1e-9)
            require_field(sums_to_one and table.min() >= 0, self, name, "hold probabilities that sum to 1")
            object.__setattr__(self, name, table)

    @classmethod
    def random(cls, num_states: int = 254, num_successors: int = 7, seed: int = 0) -> "MarkovChain":
        """Return a chain in which each state has `num_successors` random successors with Dirichlet(1) weights.

        Example: `MarkovChain.random(num_states=32, num_successors=4, seed=1)`.
        """
        fits = 1 <= num_successors <= num_states
        require(fits, "MarkovChain num_successors", f"be from 1 to {num_states}", num_successors)
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

    def leave_one_out(self, z: Tensor, noise: Noise, noise_level: Tensor) -> Tensor:
        """Return p(x_i | z without z_i) of noised texts. For these predictions, the bound of `nelbo` equals `nll`.

        z (B, L) and noise_level (B,) → (B, L, noise.vocab_size) float64. Tokens that are not states have probability 0.
        The noised chain is a hidden Markov model. One forward and one backward pass give all positions.

        Example: `nelbo.integrand(noise, chain.leave_one_out(z, noise, t).log(), x, z, t, parametrisation="loo")`.
        """
        covers = noise.vocab_size >= self.num_states
        require(covers, "MarkovChain.leave_one_out noise", f"cover the chain's {self.num_states} states", noise)
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

    @property
    def entropy_rate(self) -> float:
        """The entropy that each further token adds to a long text, in nats."""
        # The stationary distribution.
        system = torch.cat(
            [self.move.T - torch.eye(self.num_states, dtype=torch.float64), torch.ones_like(self.first)[None]]
        )
        target = torch.zeros(self.num_states + 1, dtype=torch.float64)
        target[-1] = 1.0
        law = torch.linalg.lstsq(system, target[:, None], driver="gelsd").solution[:, 0]
        return float(law @ -torch.xlogy(self.move, self.move).sum(-1))


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
    model: DiffusionGemma,
    tokens: Tensor,
    noise: Noise,
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
    fix = "The bound does not depend on the schedule."
    is_linear = isinstance(noise.schedule, Linear)
    require(is_linear, "gap_by_level noise", "have a Linear schedule", noise.schedule, fix)
    for name, value in (("num_bins", num_bins), ("samples_per_bin", samples_per_bin)):
        require(value >= 1, f"gap_by_level {name}", "be at least 1", value)
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
