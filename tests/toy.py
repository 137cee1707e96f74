"""Toy T0, a three-token Markov text with exact denoisers, and the exact law of any sampler run on it.

The text: three tokens from {0, 1, 2}, p(x) = FIRST[x0]·NEXT[x0, x1]·NEXT[x1, x2]. `JOINT` is its law over the 27
`SEQUENCES`. Mask and hybrid noise use token 3 as the mask (vocab_size 4); uniform noise has vocab_size 3.

    from toy import mask_noise, propagate, total_variation
    result = propagate(EntropyBound(bound=0.0), mask_noise(), steps=3)
    assert total_variation(result.law) < 1e-12          # result.law is (27,), result.nfe the expected forwards

`propagate` keeps every reachable state with its probability. At each step it divides the range of every uniform that
the sampler draws into cells, within which the decision is constant. It runs the real sampler once per combination of
cells. When the sampler first draws `state.uniform("token")`, each state is split into one row per combination of the
cells of this purpose, "token". The uniforms are the midpoints of the cells, and the weight is the product of their
widths. Then the sampler is called again. Purposes are found in the order of their use, so the cells of a later purpose
may depend on the draws of an earlier one. Rows that end in the same state are merged after the step.

Cells known here: "token" (the inverse CDF of the prediction) and "noise" (refill, only where something returns to
noise). For every other purpose pass `cells={"event": f}` with f(prediction, state) returning one of
  - inner boundaries (R, C, n), ascending in [0, 1], for a uniform per position (repeat a boundary for an empty cell);
  - inner boundaries (R, n) for a `state.row_uniform`, n = 0 if the decision does not depend on it;
  - `Points(values (R, n, C) or (R, n), weights (R, n))` for joint draws that are not a product of cells. An example is
    an order by uniforms: `permutations(state)` returns every order of the positions with equal weight.
R counts the rows of `state`, whose `injected` holds the purposes already drawn (`state.uniform("token")` works).
The boundaries are checked: the sampler must make the same decision near both ends of each cell.

`independent=True` is for samplers whose decision at a position reads only that position's uniforms (ancestral, ReMDM):
then positions are enumerated separately and multiplied, so that 256 steps are fast enough. The sampler must have no
memory. `propagate` then commits the canvas itself, without the sampler's `final`. A short joint run of the same sampler
should check the independence.

Time: exact denoisers of uniform and hybrid noise must know the level, so `propagate` calls `denoiser.at(level)` first.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import dgemma
from dgemma.diffusion.decision import Decision
from dgemma.diffusion.noise import HybridNoise, MaskNoise, Noise, UniformNoise
from dgemma.diffusion.prediction import Prediction
from dgemma.diffusion.state import DenoiseState
from dgemma.run.knobs import Knobs
from dgemma.run.step import settle
from dgemma.sampling.base import Sampler
from dgemma.sampling.gibbs import LeaveOneOutGibbs
from dgemma.sampling.temperature import ConstantTemperature

LENGTH, NUM_TOKENS, MASK = 3, 3, 3
FIRST = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
NEXT = torch.tensor([[0.8, 0.15, 0.05], [0.1, 0.7, 0.2], [0.25, 0.05, 0.7]], dtype=torch.float64)
SEQUENCES = torch.tensor(list(itertools.product(range(NUM_TOKENS), repeat=LENGTH)))  # (27, 3)
JOINT = (
    FIRST[SEQUENCES[:, 0]] * NEXT[SEQUENCES[:, 0], SEQUENCES[:, 1]] * NEXT[SEQUENCES[:, 1], SEQUENCES[:, 2]]
)  # (27,)

mask_noise = partial(MaskNoise, NUM_TOKENS + 1, mask_token_id=MASK)
uniform_noise = partial(UniformNoise, NUM_TOKENS)
hybrid_noise = partial(HybridNoise, NUM_TOKENS + 1, mask_token_id=MASK)


def total_variation(law: Tensor, target: Tensor = JOINT) -> float:
    return 0.5 * (law - target).abs().sum().item()


def divergence(law: Tensor, target: Tensor = JOINT) -> float:
    """KL(target ‖ law), nats."""
    return torch.xlogy(target, target / law).sum().item()


def likelihood(noise: Noise, level: Tensor) -> Tensor:
    """q(z | x) written from the papers, not from dgemma.diffusion.noise: level (R,) → (R, x, z)."""
    t = level[:, None, None]
    same = torch.eye(NUM_TOKENS, dtype=torch.float64)
    if noise.kind == "uniform":
        return (1 - t) * same + t / NUM_TOKENS
    if noise.kind == "mask":
        return torch.cat([(1 - t) * same, t.expand(-1, NUM_TOKENS, 1)], dim=-1)
    bulge = 2**noise.gamma * noise.uniform_share / (1 - noise.uniform_share) * (t * (1 - t)) ** (noise.gamma / 2)
    tokens = (1 - t) * same + bulge / NUM_TOKENS
    return torch.cat([tokens, t.expand(-1, NUM_TOKENS, 1)], dim=-1) / (1 + bulge)


@dataclass(frozen=True)
class Network(dgemma.Denoiser):
    """The exact network of a joint: log p(x at l | canvas), or without position l ("loo"), by enumeration.

    `noise` is the noise over the three real tokens, `vocab_size` the width of the logits. Set the level with
    `.at(level)`: a float, (R,), or (R, 3) for one level per position. A mask network does not depend on it.
    """

    joint: Tensor
    noise: Noise
    vocab_size: int
    parametrisation: str = "mean"
    level: Tensor | None = None

    def at(self, level: Tensor | float) -> "Network":
        level = torch.as_tensor(level, dtype=torch.float64)
        return replace(self, level=level[None] if level.dim() == 0 else level)

    def probabilities(self, canvas: Tensor) -> Tensor:
        """canvas (R, 3) → (R, 3, V)."""
        needs_none = self.noise.kind == "mask" or self.level is None
        level = torch.full((1,), 0.5, dtype=torch.float64) if needs_none else self.level
        level = (level[:, None] if level.dim() == 1 else level).expand(canvas.shape)
        table = likelihood(self.noise, level.reshape(-1)).unflatten(0, canvas.shape)  # (R, 3, x, z)
        of_token = table.gather(-1, canvas[..., None, None].expand(-1, -1, NUM_TOKENS, 1))[..., 0]  # (R, 3, x)
        factors = of_token[:, torch.arange(LENGTH), SEQUENCES]  # (R, 27, 3)
        found = torch.zeros(*canvas.shape, self.vocab_size, dtype=torch.float64)
        for position in range(LENGTH):
            kept = [at for at in range(LENGTH) if self.parametrisation == "mean" or at != position]
            weight = self.joint * factors[..., kept].prod(-1)  # (R, 27)
            found[:, position].index_add_(1, SEQUENCES[:, position], weight)
        return found / found.sum(-1, keepdim=True)

    def denoise(
        self, canvas: Tensor, cache: Any = None, self_cond: Any = None, self_cond_mask: Any = None
    ) -> Prediction:
        return Prediction(self.probabilities(canvas).log())


def exact_network(noise: Noise, parametrisation: str = "mean") -> Network:
    """Return the exact network of T0."""
    return Network(JOINT, noise, noise.vocab_size, parametrisation)


class Points(NamedTuple):
    """Joint values of one purpose's uniforms and their probabilities."""

    values: Tensor  # (R, n, C), or (R, n) for a uniform per row
    weights: Tensor  # (R, n)


Cells = Callable[[Prediction, DenoiseState], "Tensor | Points"]


def permutations(state: DenoiseState) -> Points:
    """Every order of the positions, equally likely: for samplers that sort a uniform per position."""
    orders = torch.tensor(list(itertools.permutations(range(state.canvas_len))), dtype=torch.float64)
    values = ((orders + 0.5) / state.canvas_len).expand(state.batch_size, -1, -1)
    return Points(values, torch.full(values.shape[:2], 1 / len(orders), dtype=torch.float64))


def route_cells(prediction: Prediction, state: DenoiseState) -> Tensor:
    """The "event" boundaries of `noise.transition`, given the tokens drawn."""
    x0 = prediction.sample(state.uniform("token"))
    levels = state.noise_level, state.next_noise_level
    clean, stay = state.noise.routes(x0, state.canvas, *levels, allowed=state.allowed)
    return torch.stack([clean, clean + stay], dim=-1)


def gibbs_cells(sampler: LeaveOneOutGibbs, choice: Callable[[DenoiseState], Any] = permutations) -> dict[str, Cells]:
    """The uniforms at which `LeaveOneOutGibbs` changes its decision, from its definition. `choice`: of positions."""

    def is_ancestral(state: DenoiseState) -> bool:
        return bool(sampler.clock(state)[0][0])

    def tokens_from(prediction: Prediction, state: DenoiseState) -> Prediction:
        """What tokens are drawn from: the mean in an ancestral step, leave-one-out in a correction."""
        if is_ancestral(state) == (sampler.parametrisation == "mean"):
            return prediction
        convert = state.noise.to_mean if is_ancestral(state) else state.noise.to_loo
        return Prediction(convert(prediction.logits, state.canvas, state.memory))

    def token(prediction: Prediction, state: DenoiseState) -> Tensor:
        return _token_cells(tokens_from(prediction, state), state)

    def event(prediction: Prediction, state: DenoiseState) -> Tensor:
        if not is_ancestral(state):
            return (1 - state.memory)[:, None, None].expand(-1, LENGTH, 1)
        levels = {"noise_level": state.memory, "next_noise_level": sampler.clock(state)[1]}
        return route_cells(tokens_from(prediction, state), replace(state, **levels))

    def position(prediction: Prediction, state: DenoiseState) -> Any:
        return torch.zeros(state.batch_size, LENGTH, 0).double() if is_ancestral(state) else choice(state)

    return {"token": token, "event": event, "position": position}


class Result(NamedTuple):
    law: Tensor  # (27,) over SEQUENCES; sums to 1 unless a mask was committed
    nfe: float  # expected forwards
    states: "Law"  # the last states, for other statistics


class Law(NamedTuple):
    """Distinct states, one per row, and their probabilities."""

    state: DenoiseState
    weight: Tensor  # (R,)


def initial(noise: Noise, sampler: Sampler, steps: int, stop: Any = None) -> Law:
    """The law of the first canvas."""
    canvas = SEQUENCES if noise.kind == "uniform" else torch.full((1, LENGTH), MASK)
    state = fresh_state(canvas, noise, steps)
    state = replace(state, memory=sampler.start(state))
    state = replace(state, stop_memory=stop.start(state) if stop is not None else None)
    return Law(state, torch.full((len(canvas),), 1 / len(canvas), dtype=torch.float64))


@dataclass(frozen=True, kw_only=True)
class InjectedState(DenoiseState):
    """A state whose uniforms of some purposes are given."""

    injected: Mapping[str, Tensor] = field(default_factory=dict)

    def uniform(self, purpose: str) -> Tensor:
        return self.injected[purpose] if purpose in self.injected else super().uniform(purpose)

    def row_uniform(self, purpose: str) -> Tensor:
        return self.injected[purpose] if purpose in self.injected else super().row_uniform(purpose)


def inject(state: DenoiseState, uniforms: Mapping[str, Tensor]) -> InjectedState:
    """Return the state with these uniforms, by purpose."""
    return InjectedState(**{f.name: getattr(state, f.name) for f in fields(DenoiseState)}, injected=uniforms)


def fresh_state(canvas: Tensor, noise: Noise, steps: int) -> InjectedState:
    """A state at step 0 over the given canvases (R, C), everything open."""
    rows = canvas.shape[0]
    zeros = torch.zeros(rows, dtype=torch.int64)
    time = torch.ones(rows, dtype=torch.float64)
    return InjectedState(
        canvas=canvas,
        open=torch.ones_like(canvas, dtype=torch.bool),
        frozen=torch.zeros_like(canvas, dtype=torch.bool),
        draft=canvas,
        done=torch.zeros(rows, dtype=torch.bool),
        block=zeros,
        step=zeros,
        num_steps=zeros + steps,
        noise_level=1 - noise.schedule.alpha(time),
        next_noise_level=1 - noise.schedule.alpha(time - 1 / steps),
        temperature=torch.ones(rows),
        seeds=zeros,
        rows=torch.arange(rows),
        noise=noise,
    )


@dataclass(frozen=True, eq=False)
class _Ending(Sampler):
    """The `final` and `revises` of a sampler, for a step whose decision is already made."""

    sampler: Sampler
    may_revise: bool
    redecides: frozenset[str] = frozenset()

    @property
    def revises(self) -> bool:
        return self.may_revise

    def final(self, prediction: Prediction, state: DenoiseState) -> Tensor:
        return self.sampler.final(prediction, state)


def update(
    prediction: Prediction,
    decision: Decision,
    sampler: Sampler,
    state: DenoiseState,
    stop: Any = None,
    independent: bool = False,
) -> DenoiseState:
    """Return the state after the real step applies a decision.

    With independent positions, a single position cannot tell that the whole canvas is closed.
    """
    ending = _Ending(sampler, independent or sampler.revises, sampler.redecides)
    knobs = Knobs(sampler=ending, temperature=ConstantTemperature(value=1.0), stop=stop)
    after = settle(state, prediction, decision, knobs).state
    return replace(after, injected={}, self_cond=None)


def propagate(
    sampler: Sampler,
    noise: Noise,
    *,
    steps: int,
    denoiser: Any = None,
    cells: Mapping[str, Cells] | None = None,
    stop: Any = None,
    shape: Mapping[str, Any] | None = None,
    independent: bool = False,
    start: Law | None = None,
    level: Callable[[DenoiseState], Tensor] = lambda state: state.noise_level,
    check: bool = True,
) -> Result:
    """The exact law of what `sampler` commits after `steps` steps, and the expected number of forwards.

    shape: arguments for `Prediction.shaped`. start: a law to start from instead of pure noise; its clock continues.
    level: returns the denoiser's noise level, (R,), for a sampler with its own clock. check: try both ends of every
    cell. A long run may skip this if a short run has checked its cells.
    """
    denoiser = denoiser if denoiser is not None else exact_network(noise)
    law = start if start is not None else initial(noise, sampler, steps, stop)
    nfe = 0.0
    for _ in range(steps):
        ended = law.state.done
        nfe += law.weight[~ended].sum().item()
        running = _split(law, ~ended)
        if len(running.weight):
            net = denoiser.at(level(running.state)) if hasattr(denoiser, "at") else denoiser
            running = advance(running, sampler, net, cells or {}, stop, shape or {}, independent, check)
        law = _concat(_split(law, ended), running)
    codes = torch.where((law.state.draft < NUM_TOKENS).all(-1), law.state.draft @ torch.tensor([9, 3, 1]), 27)
    total = torch.zeros(28, dtype=torch.float64).index_add(0, codes, law.weight)
    return Result(total[:27], nfe, law)


def advance(
    law: Law,
    sampler: Sampler,
    denoiser: Any,
    cells: Mapping[str, Cells],
    stop: Any = None,
    shape: Mapping[str, Any] | None = None,
    independent: bool = False,
    check: bool = True,
) -> Law:
    """One step of the law."""
    prediction = denoiser.denoise(law.state.canvas, None).shaped(**(shape or {}))
    parents = torch.arange(len(law.weight))
    rows = _Rows(law.state, prediction, parents, torch.ones(len(parents), LENGTH if independent else 1).double())
    rows, decision = _run(rows, sampler, cells, independent)
    if check:
        _check_cells(rows, sampler, decision)
    if decision.renoise.any():
        whole = rows._replace(parent=torch.arange(len(rows.parent)))
        refilled = _expand(whole, "noise", _noise_cells(rows.state, decision.renoise), independent)
        decision = _take(decision, refilled.parent)
        rows = refilled._replace(parent=rows.parent[refilled.parent])
    new = update(rows.prediction, decision, sampler, rows.state, stop, independent)
    if independent:
        assert new.memory is None, "independent=True multiplies positions, which memory could couple."
        return _product(law, new, rows)
    return _merge(Law(new, law.weight[rows.parent] * rows.weight[:, 0]))


class _Rows(NamedTuple):
    state: DenoiseState
    prediction: Prediction
    parent: Tensor  # (R,) the row each came from
    weight: Tensor  # (R, 1), or (R, C) where positions are independent
    cells: tuple[tuple[str, Tensor, Tensor], ...] = ()  # purpose, start and width, for the check


class _Undrawn(Exception):
    """The sampler asked for a purpose whose cells are not enumerated yet."""


class _Recorder(dict):
    """Uniforms by purpose. A missing purpose raises `_Undrawn` with its name."""

    def __contains__(self, purpose: object) -> bool:
        return True

    def __missing__(self, purpose: str) -> Tensor:
        raise _Undrawn(purpose)


def _run(rows: _Rows, sampler: Sampler, cells: Mapping[str, Cells], independent: bool) -> tuple[_Rows, Decision]:
    """The sampler on every combination of cells."""
    known: dict[str, Cells] = {"token": _token_cells, **cells}
    while True:
        try:
            state = replace(rows.state, injected=_Recorder(rows.state.injected))
            return rows, sampler(rows.prediction, state)
        except _Undrawn as undrawn:
            purpose = undrawn.args[0]
            if purpose not in known:
                raise ValueError(f"propagate cells must name {purpose!r}, which the sampler draws.") from None
            rows = _expand(rows, purpose, known[purpose](rows.prediction, rows.state), independent)


def _token_cells(prediction: Prediction, state: DenoiseState) -> Tensor:
    return prediction.logits.softmax(-1).cumsum(-1)[..., :-1]


def _noise_cells(state: DenoiseState, renoise: Tensor) -> Tensor:
    noise = state.noise
    thirds = torch.arange(1, NUM_TOKENS, dtype=torch.float64) / NUM_TOKENS
    share = torch.zeros_like(state.next_noise_level)
    if noise.kind == "mask":
        share = torch.ones_like(share)
    if noise.kind == "hybrid":
        table = likelihood(noise, state.next_noise_level)  # (R, x, z): x = 0 becomes 1, 2 by the uniform part alone
        share = table[:, 0, MASK] / (table[:, 0, MASK] + NUM_TOKENS * table[:, 0, 1])
    bounds = torch.cat([share[:, None], share[:, None] + (1 - share[:, None]) * thirds], dim=-1)[:, None]  # (R, 1, 3)
    return torch.where(renoise[..., None], bounds, 1.0)  # one cell where nothing is refilled


def _expand(rows: _Rows, purpose: str, cells: "Tensor | Points", independent: bool) -> _Rows:
    """Every row once per combination of this purpose's cells."""
    num_rows = len(rows.parent)
    if isinstance(cells, Points):
        values, weights = cells.values, cells.weights[..., None].expand(*cells.weights.shape, rows.weight.shape[-1])
        start, widths = values, torch.zeros_like(values)
    else:
        per_row = cells.dim() == 2
        cells = cells[:, None] if per_row else cells.expand(num_rows, LENGTH, -1)  # (R, C or 1, n)
        ends = torch.nn.functional.pad(cells, (1, 0), value=0.0)
        ends = torch.nn.functional.pad(ends, (0, 1), value=1.0).clamp(0, 1)
        width = ends.diff(dim=-1).clamp(min=0)  # (R, C, n + 1)
        num_cells = width.shape[-1]
        if independent and not per_row:
            combos = torch.arange(num_cells)[:, None].expand(-1, LENGTH)
        else:
            combos = torch.cartesian_prod(*[torch.arange(num_cells)] * cells.shape[1]).reshape(-1, cells.shape[1])
        index = combos.T.expand(num_rows, -1, -1)  # (R, C, m)
        start, widths = (x.gather(-1, index).transpose(1, 2) for x in (ends[..., :-1], width))  # (R, m, C)
        weights = widths if independent else widths.prod(-1, keepdim=True)
        if per_row:
            start, widths = start[..., 0], widths[..., 0]
    keep = (weights > 0).any(-1)  # (R, m)
    source = torch.arange(num_rows)[:, None].expand_as(keep)[keep]
    state, start, widths = _take(rows.state, source), start[keep], widths[keep]
    return _Rows(
        replace(state, injected={**state.injected, purpose: start + widths / 2}),
        _take_prediction(rows.prediction, source),
        rows.parent[source],
        rows.weight[source] * weights[keep],
        (*((name, *(u[source] for u in ends)) for name, *ends in rows.cells), (purpose, start, widths)),
    )


def _check_cells(rows: _Rows, sampler: Sampler, decision: Decision) -> None:
    """Near both ends of its cells, every row must decide what it decided in the middle."""
    for share in (1e-6, 1 - 1e-6):
        corner = {purpose: start + share * width for purpose, start, width in rows.cells}
        other = sampler(rows.prediction, replace(rows.state, injected=corner))
        same = (other.write == decision.write) & (other.renoise == decision.renoise)
        same &= (other.tokens == decision.tokens) | ~decision.write
        if not (same | (rows.weight < 1e-12)).all():  # very narrow cells are below rounding
            raise AssertionError("A cell holds two decisions: the boundaries passed to propagate are wrong.")


def _product(law: Law, new: DenoiseState, rows: _Rows) -> Law:
    """The law of whole canvases from independent positions."""
    vocab = max(new.noise.vocab_size, NUM_TOKENS)
    code = new.canvas * 2 + new.open  # (R, C)
    per_position = torch.zeros(len(law.weight), LENGTH, 2 * vocab, dtype=torch.float64)
    position = torch.arange(LENGTH).expand_as(code)
    per_position.index_put_((rows.parent[:, None].expand_as(code), position, code), rows.weight, accumulate=True)
    weight = torch.einsum("r,ra,rb,rc->abc", law.weight, *per_position.unbind(1))
    index = (weight > 0).nonzero()  # (n, 3)
    state = _take(new, torch.zeros(len(index), dtype=torch.int64))
    state = replace(state, canvas=index // 2, open=(index % 2).bool(), draft=index // 2)
    return Law(state, weight[tuple(index.T)])


def _merge(law: Law) -> Law:
    """Merge equal states."""
    told_apart = {name: value for name, value in _fields(law.state).items() if name != "rows"}
    columns = [_columns(leaf) for leaf in pytree.tree_leaves(told_apart) if isinstance(leaf, Tensor)]
    group = torch.zeros(len(law.weight), dtype=torch.int64)
    for column in torch.cat(columns, dim=-1).T:  # several times faster than `unique(dim=0)`
        if (column != column[0]).any():
            _, value = column.unique(return_inverse=True)
            _, group = (len(column) * group + value).unique(return_inverse=True)
    weight = torch.zeros(int(group.max()) + 1, dtype=torch.float64).index_add(0, group, law.weight)
    first = torch.full_like(weight, len(group), dtype=torch.int64)
    first = first.scatter_reduce(0, group, torch.arange(len(group)), "amin")
    return Law(_take(law.state, first), weight)


def _columns(leaf: Tensor) -> Tensor:
    """Return a leaf as float64 columns. They are rounded, so that memories computed along two paths are equal."""
    flat = leaf.reshape(leaf.shape[0], -1).double()
    return torch.where(flat.isfinite(), (flat * 1e9).round() / 1e9, flat.sign() * 1e300)


def _fields(state: Any) -> dict[str, Any]:
    return {name: getattr(state, name) for name in type(state).__dataclass_fields__ if name != "noise"}


def _take(value: Any, index: Tensor) -> Any:
    """Rows of a state or decision: every tensor in it indexed along its first dimension."""

    def pick(leaf: Any) -> Any:
        return leaf[index] if isinstance(leaf, Tensor) else leaf

    return replace(
        value, **{k: pick(v) if isinstance(v, Tensor) else pytree.tree_map(pick, v) for k, v in _fields(value).items()}
    )


def _take_prediction(prediction: Prediction, index: Tensor) -> Prediction:
    return Prediction(prediction.logits[index])


def _split(law: Law, keep: Tensor) -> Law:
    index = keep.nonzero()[:, 0]
    return Law(_take(law.state, index), law.weight[index])


def _concat(first: Law, second: Law) -> Law:
    if not len(first.weight) or not len(second.weight):
        return second if len(second.weight) else first
    left, spec = pytree.tree_flatten(_fields(first.state))
    right, _ = pytree.tree_flatten(_fields(second.state))
    joined = [torch.cat([a, b]) if isinstance(a, Tensor) else a for a, b in zip(left, right, strict=True)]
    state = replace(first.state, **pytree.tree_unflatten(joined, spec))
    return Law(state, torch.cat([first.weight, second.weight]))
