"""A language over tokens as a finite automaton, and the prediction of a step conditioned on it exactly.

A step predicts every position independently, p(x) = Π p_i(x_i). Conditioned on the text being in the language, p is a
Markov chain over the automaton's states. Sums over its paths give the conditioned marginals and joint samples. Maxima
give the most likely accepted text (forward-backward and Viterbi). This is exact for the prediction of one step, which
is a product; it is not the model's joint law. `dgemma_kernels.ops.automaton` has the functions of this file as kernels.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from dgemma.diffusion.prediction import Prediction

# The cost in nats of contradicting a decided token. It exceeds any difference between texts, so a decided token stays
# wherever the language permits it. exp(-COST) is 0 in float64, so samples keep such a token with certainty.
COST = 1e6
_PREFERENCE = 1e3  # the cost of contradicting a draft's token at a position that is still open
WIDE = 256
_ROW = 8  # arcs in a column or row of a `Fan`
_SLICE_ELEMENTS = 1 << 24  # float64 temporaries stay under 128 MiB


class Fan(NamedTuple):
    """The arcs at each state, in tables that kernels loop over.

    Most states have at most 8 arcs, which are in `few`. The arcs of other states are in `some`, in rows of 8.
    Index 0 has the arcs that leave a state, for backward passes; index 1 has those that reach it. Each element of `few`
    and `some` is a slot. It holds the state at the other end of an arc, or 0 if it has no arc. The slots of `few` are
    numbered first, then those of `some`.
    """

    few: Tensor  # (2, 8, Q) int64: a column per state, empty if the state has more than 8 arcs
    some: Tensor  # (2, n, 8) int64: rows of the states with more than 8 arcs; the last row is empty
    join: Tensor  # (2, m, width) int64: for each state with more than 8 arcs, its rows in `some`
    place: Tensor  # (2, Q) int64: the column of a state in `few`, or Q + its row in `join`
    arc: Tensor  # (2, slots) int64: the arc of each slot, E for no arc

    @classmethod
    def build(cls, arc_source: Tensor, arc_target: Tensor, num_states: int) -> "Fan":
        """Return the fan of arcs between states, (E,) each."""
        num_arcs, ends = len(arc_source), torch.stack((arc_source, arc_target))
        counts = torch.stack([end.bincount(minlength=num_states) for end in ends])  # (2, Q)
        order = ends.argsort(stable=True)
        state = ends.gather(1, order)
        rank = torch.arange(num_arcs, device=ends.device) - (counts.cumsum(1) - counts).gather(1, state)
        is_few = counts <= _ROW
        num_rows = torch.where(is_few, 0, counts + _ROW - 1) // _ROW  # (2, Q)
        first_row = num_rows.cumsum(1) - num_rows
        last_row = int(num_rows.sum(1).max())

        num_few = _ROW * num_states
        some_slot = num_few + first_row.gather(1, state) * _ROW + rank
        slot = torch.where(is_few.gather(1, state), rank * num_states + state, some_slot)
        arc = ends.new_full((2, num_few + _ROW * (last_row + 1)), num_arcs).scatter(1, slot, order)
        other = F.pad(ends.flip(0), (0, 1)).gather(1, arc)

        joined = is_few.int().argsort(dim=1, stable=True)[:, : int((~is_few).sum(1).max())]  # (2, m)
        index = torch.arange(int(num_rows.max()), device=ends.device)
        rows = first_row.gather(1, joined)[..., None] + index
        join = torch.where(index < num_rows.gather(1, joined)[..., None], rows, last_row)
        place = torch.where(is_few, torch.arange(num_states, device=ends.device), num_states - 1 + (~is_few).cumsum(1))
        few, some = other[:, :num_few].unflatten(1, (_ROW, -1)), other[:, num_few:].unflatten(1, (-1, _ROW))
        return cls(few.contiguous(), some.contiguous(), join, place, arc)


class IndexGroups(NamedTuple):
    """Indices in groups, in tables that kernels loop over."""

    member: Tensor  # (n,) int32: the indices, sorted by group
    first: Tensor  # (groups + 1,) int32: where each group begins in `member`
    order: Tensor  # (groups,) int32: the groups from large to small

    @classmethod
    def build(cls, group: Tensor, size: int) -> "IndexGroups":
        """Group the indices 0 .. n - 1 by their group numbers (n,), which are below `size`."""
        counts = group.bincount(minlength=size)
        order = counts.argsort(descending=True, stable=True)
        return cls(group.argsort(stable=True).int(), F.pad(counts.cumsum(0), (1, 0)).int(), order.int())


class Automaton(NamedTuple):
    """A deterministic automaton over tokens: V tokens in K classes with equal transitions, Q states, E arcs, L links.

    An arc is a pair of states. A link is a class whose tokens lead from the arc's source to its target. Arcs are sorted
    by source, links by arc.
    """

    token_class: Tensor  # (V,) int32
    next_state: Tensor  # (Q, K) int64, -1 where no accepted text continues
    arc_source: Tensor  # (E,) int64
    arc_target: Tensor  # (E,) int64
    link_class: Tensor  # (L,) int64
    link_arc: Tensor  # (L,) int64
    ends_text: Tensor  # (E,) bool: arcs of a stop token
    is_end: Tensor  # (Q,) bool: states after a stop token
    is_stop: Tensor  # (K,) bool: classes of stop tokens
    fan: Fan
    class_tokens: IndexGroups
    class_links: IndexGroups
    arc_links: IndexGroups
    arcs_out: IndexGroups  # by source
    arcs_in: IndexGroups  # by target
    wide_classes: Tensor  # (n,) int32: the classes with more than `WIDE` tokens, largest first

    @classmethod
    def build(cls, token_class: Tensor, next_state: Tensor, is_end: Tensor) -> "Automaton":
        """Return an automaton from its table (Q, K). `is_end` (Q,) marks states after the end of a text."""
        source, link_class = (next_state >= 0).nonzero(as_tuple=True)
        key, order = (source * len(next_state) + next_state[source, link_class]).sort(stable=True)
        arcs, link_arc = key.unique_consecutive(return_inverse=True)
        arc_source, arc_target = arcs // len(next_state), arcs % len(next_state)
        num_states, num_classes = next_state.shape
        class_tokens = IndexGroups.build(token_class.long(), num_classes)
        ends_text = is_end[arc_target] & ~is_end[arc_source]
        is_stop = any_by(ends_text[link_arc][None], link_class[order], num_classes)[0]
        return cls(
            token_class=token_class,
            next_state=next_state,
            arc_source=arc_source,
            arc_target=arc_target,
            link_class=link_class[order],
            link_arc=link_arc,
            ends_text=ends_text,
            is_end=is_end,
            is_stop=is_stop,
            fan=Fan.build(arc_source, arc_target, num_states),
            class_tokens=class_tokens,
            class_links=IndexGroups.build(link_class[order], num_classes),
            arc_links=IndexGroups.build(link_arc, len(arc_source)),
            arcs_out=IndexGroups.build(arc_source, num_states),
            arcs_in=IndexGroups.build(arc_target, num_states),
            wide_classes=class_tokens.order[: int((class_tokens.first.diff() > WIDE).sum())],
        )

    @property
    def num_states(self) -> int:
        return self.next_state.shape[0]

    @property
    def num_classes(self) -> int:
        return self.next_state.shape[1]

    def to(self, device: torch.device) -> "Automaton":
        """The same automaton on `device`."""
        return tree_map(lambda tensor: tensor.to(device), self)

    def advance(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Return the states (B,) after the texts (B, N) from `states` (B,); -1 after a text that does not fit."""
        classes = self.token_class[tokens].long()
        for at in range(tokens.shape[1]):
            reached = self.next_state[states.clamp(min=0), classes[:, at]]
            states = torch.where(states < 0, states, reached)
        return states


class Language(NamedTuple):
    """The texts that a canvas may become: paths of the automaton from `start` to a state in `end`."""

    automaton: Automaton
    start: Tensor  # (B,) int64: the state before the canvas
    end: Tensor  # (B, Q) bool: states from which the tokens after the canvas can complete the text
    may_end: Tensor | None = None  # (B, C) bool: positions where a stop token may end the text; None means all
    # (B, C) bool: positions outside the holes of `infill`, where the language does not constrain the token. The
    # automaton reads them as its last class, which separates the text of one hole from that of the next.
    gaps: Tensor | None = None

    def select(self, rows: Tensor) -> "Language":
        """Select rows (R,) of the batch."""
        chosen = [None if table is None else table.index_select(0, rows) for table in self[1:]]
        return Language(self.automaton, *chosen)  # type: ignore[arg-type]

    def ended(self, text: Tensor) -> Tensor:
        """The positions after the end of the text, (B, C) bool, in a canvas of tokens `text` (B, C)."""
        is_stop = self.automaton.is_stop[self.automaton.token_class[text].long()]
        return (is_stop.cumsum(1) > is_stop) | self.automaton.is_end[self.start][:, None]


def splice_languages(mine: Language | None, donor: Language | None, rows: Tensor, state_rows: int) -> Language | None:
    """Replace `rows` (R,) of `mine`, which has `state_rows` rows, by the R rows of `donor`.

    None is the language of all texts. Different automata become one, without the states that no row needs.
    """
    known = donor if mine is None else mine
    if known is None:
        return None
    left = _anything(known, state_rows) if mine is None else mine
    right = _anything(known, len(rows)) if donor is None else donor
    automaton, start, end = left.automaton, right.start, right.end
    if automaton.token_class is not right.automaton.token_class:
        automaton = _side_by_side(automaton, right.automaton)
        start = start + left.automaton.num_states
        end = F.pad(end, (left.automaton.num_states, 0))
    ends = F.pad(left.end, (0, automaton.num_states - left.end.shape[1])).index_copy(0, rows, end)
    may_end = left.may_end
    if right.may_end is not None or may_end is not None:
        everywhere = torch.ones_like(may_end[:1] if may_end is not None else right.may_end[:1])  # type: ignore[index]
        mine_ends = everywhere.expand(len(left.start), -1) if may_end is None else may_end
        donor_ends = everywhere.expand(len(rows), -1) if right.may_end is None else right.may_end
        may_end = mine_ends.index_copy(0, rows, donor_ends)
    spliced = Language(automaton, left.start.index_copy(0, rows, start), ends, may_end)
    return spliced if automaton is left.automaton else _reachable(spliced)


def _anything(known: Language, batch_size: int) -> Language:
    """The language of all texts over the vocabulary of a known language."""
    token_class = torch.zeros_like(known.automaton.token_class)
    automaton = Automaton.build(token_class, known.start.new_zeros(1, 1), known.end.new_zeros(1))
    return Language(automaton, known.start.new_zeros(batch_size), known.end.new_ones(batch_size, 1))


def _side_by_side(left: Automaton, right: Automaton) -> Automaton:
    """One automaton with the states of both, those of `left` first."""
    pairs = left.token_class.long() * right.num_classes + right.token_class
    used, token_class = pairs.unique(return_inverse=True)
    below = right.next_state[:, used % right.num_classes]
    below = torch.where(below < 0, below, below + left.num_states)
    table = torch.cat((left.next_state[:, used // right.num_classes], below))
    return Automaton.build(token_class.int(), table, torch.cat((left.is_end, right.is_end)))


def _reachable(language: Language) -> Language:
    """The language without the states that no row can reach."""
    automaton = language.automaton
    seen = _one_hot(language.start, automaton.num_states).any(0)
    while True:
        further = seen | any_by(seen[automaton.arc_source][None], automaton.arc_target, automaton.num_states)[0]
        if torch.equal(further, seen):
            break
        seen = further
    rank = torch.where(seen, seen.cumsum(0) - 1, -1)
    table = automaton.next_state[seen]
    table, column = torch.where(table < 0, table, rank[table]).unique(dim=1, return_inverse=True)
    token_class = column[automaton.token_class.long()].int()
    smaller = Automaton.build(token_class, table, automaton.is_end[seen])
    return Language(smaller, rank[language.start], language.end[:, seen], language.may_end)


class ClassBias(NamedTuple):
    """Adds bias (B, C, K) to the logits of the tokens in each class."""

    bias: Tensor
    token_class: Tensor  # (V,)

    def __call__(self, logits: Tensor, positions: slice) -> Tensor:
        return logits + self.bias[:, positions].to(logits.dtype).index_select(-1, self.token_class)


def condition(prediction: Prediction, language: Language, canvas: Tensor, fixed: Tensor) -> Prediction:
    """Condition a shaped prediction on a language, and on the tokens of `canvas` at `fixed` positions; both (B, C).

    The result is a `Prediction`. Its entropy, confidence and log-probabilities are those of the conditioned marginals.
    Its samples are joint samples, and its argmax is the most likely accepted text, so both are in the language.

    Example: `condition(prediction, language, state.canvas, ~state.open).entropy`.
    """
    joint = Joint(prediction, language, canvas, fixed)
    return prediction.with_joint(joint, JointBias(joint))


class JointBias(NamedTuple):
    """The bias of a joint law, computed when it is first needed."""

    joint: "Joint"

    def __call__(self, logits: Tensor, positions: slice) -> Tensor:
        return ClassBias(self.joint.bias, self.joint.language.automaton.token_class)(logits, positions)


class Passes(NamedTuple):
    """Log-sums over the paths that reach a state and that leave it, and the heaviest path that leaves it.

    All are (B, C + 1, Q) float64; index i is the state before position i.
    """

    forward: Tensor
    backward: Tensor
    best: Tensor


@dataclass(frozen=True, eq=False)
class Joint:
    """The joint law of a canvas: a prediction conditioned on a language and on the tokens at `fixed` positions.

    A fixed token that no accepted text has is replaced, because the committed text must be in the language.
    """

    prediction: Prediction  # shaped, before conditioning
    language: Language
    canvas: Tensor  # (B, C) int64
    fixed: Tensor  # (B, C) bool

    @property
    def _ops(self) -> Any:
        """The functions of this module, or their kernels."""
        return sys.modules[__name__] if self.prediction.automaton_ops is None else self.prediction.automaton_ops

    @cached_property
    def bias(self) -> Tensor:
        """The logarithm of M_i[k] = Σ_q forward_i[q] · backward_{i+1}[next_state(q, k)], (B, C, K).

        p_i(t) · M_i[class of t] is proportional to the conditioned marginal of token t. At a fixed position it is the
        marginal given all other positions.
        """
        bias: Tensor = self._ops.class_bias(self.language, self._passes)
        gaps = self.language.gaps
        return bias if gaps is None else bias.masked_fill(gaps[..., None], 0.0)

    def sample(self, u: Tensor) -> Tensor:
        """Draw a text from the joint law: one uniform per position, u (B, C) in [0, 1) → tokens (B, C).

        A uniform chooses the next state. Its remainder chooses the token between the two states, in vocabulary order.
        """
        path, rest = self._ops.sample_path(self.language, self._weights, self._passes.backward, u)
        return self._spell(path, lambda prediction: prediction.sample(rest), self.canvas, self.fixed)

    @cached_property
    def best(self) -> Tensor:
        """The most likely accepted text, (B, C)."""
        path = self._ops.best_path(self.language, self._best_weights, self._passes.best)
        return self._spell(path, lambda prediction: prediction.argmax, self.canvas, self.fixed)

    def project(self, draft: Tensor, decided: Tensor) -> Tensor:
        """Return the accepted text nearest to `draft` (B, C).

        It keeps the draft's tokens at `decided` positions if an accepted text has them, then as many others as
        possible. A draft in the language is returned unchanged.
        """
        if draft.device.type == "cpu" and torch.equal(draft, self.best):
            return draft  # only here, because the comparison would make a GPU wait
        cost = torch.where(decided, COST, _PREFERENCE).double()
        weights = self._arcs(self._kept(self._sums_and_maxima[1], draft, cost))
        path = self._ops.best_path(self.language, weights, self._ops.best_pass(self.language, weights))
        return self._spell(path, lambda prediction: prediction.argmax, draft, torch.ones_like(decided))

    @cached_property
    def _sums_and_maxima(self) -> tuple[Tensor, Tensor]:
        automaton = self.language.automaton
        return self._ops.class_sums(self.prediction, automaton)

    @property
    def _cost(self) -> Tensor:
        return torch.where(self.fixed, COST, 0.0).double()

    @cached_property
    def _weights(self) -> Tensor:
        """The log-weight of every arc at every position, (B, C, E)."""
        return self._arcs(self._kept(self._sums_and_maxima[0], self.canvas, self._cost), total=True)

    @cached_property
    def _best_weights(self) -> Tensor:
        return self._arcs(self._kept(self._sums_and_maxima[1], self.canvas, self._cost))

    @cached_property
    def _passes(self) -> Passes:
        return self._ops.passes(self.language, self._weights, self._best_weights)

    def _arcs(self, classes: Tensor, *, total: bool = False) -> Tensor:
        return self._ops.arc_weights(self.language, classes, total=total)

    def _kept(self, classes: Tensor, text: Tensor, cost: Tensor) -> Tensor:
        """The weights of classes (B, C, K) if contradicting `text` (B, C) costs `cost` (B, C).

        The weights are logarithms. Where the cost is above 0, the class of the text's token gets 0, so keeping it costs
        nothing.
        """
        own = self.language.automaton.token_class[text].long()[..., None]
        dearer = classes - cost[..., None]
        kept = torch.where(cost[..., None] > 0, dearer.scatter(-1, own, 0.0), classes)
        if self.language.gaps is not None:
            gap_only = _log(torch.arange(classes.shape[-1], device=classes.device) == classes.shape[-1] - 1)
            kept = torch.where(self.language.gaps[..., None], gap_only, kept)
        return kept

    def _spell(self, path: Tensor, pick: Callable[[Prediction], Tensor], text: Tensor, keeps: Tensor) -> Tensor:
        """Return tokens (B, C) along a path of states (B, C + 1).

        Where `keeps` is True and the token of `text` fits the path, it is kept. Elsewhere `pick` chooses from the
        prediction over the tokens that lead from one state to the next.
        """
        automaton = self.language.automaton
        between = automaton.next_state[path[:, :-1]] == path[:, 1:, None]  # (B, C, K)
        if self.language.gaps is not None:
            between = between | self.language.gaps[..., None]
        bias = torch.where(between, 0.0, -torch.inf)
        picked = pick(self.prediction.with_bias(ClassBias(bias, automaton.token_class)))
        own = automaton.token_class[text].long()[..., None]
        return torch.where(keeps & between.gather(-1, own)[..., 0], text, picked)


def class_sums(prediction: Prediction, automaton: Automaton) -> tuple[Tensor, Tensor]:
    """Return the log-sum and the maximum of the shaped logits over each class, both (B, C, K) float64."""
    index, num_classes = automaton.token_class.long(), automaton.num_classes
    maxima = [max_by(logits, index, num_classes) for logits in prediction.pieces()]
    pieces = zip(prediction.pieces(), maxima, strict=True)
    sums = [log_sum_by(logits, index, num_classes, top=top) for logits, top in pieces]
    return torch.cat(sums, dim=1).double(), torch.cat(maxima, dim=1).double()


def arc_weights(language: Language, classes: Tensor, *, total: bool) -> Tensor:
    """Combine the classes (B, C, K) of each arc, as a log-sum (`total`) or a maximum, (B, C, E)."""
    automaton = language.automaton
    combine = log_sum_by if total else max_by
    weights = combine(classes[..., automaton.link_class], automaton.link_arc, len(automaton.arc_source))
    if language.may_end is not None:
        weights = weights.masked_fill(~language.may_end[..., None] & automaton.ends_text, -torch.inf)
    return weights


def passes(language: Language, weights: Tensor, best_weights: Tensor) -> Passes:
    """Sum over paths by `weights`, forward and backward, and maximise over paths by `best_weights`; both (B, C, E)."""
    automaton, order = language.automaton, language.automaton.arcs_in.member.long()
    # One loop runs both passes: the states of the backward pass come first, then those of the forward pass. The
    # backward pass reads positions in reverse.
    values = torch.cat((_log(language.end), _log(_one_hot(language.start, automaton.num_states))), dim=1)
    other = torch.cat((automaton.arc_target, automaton.arc_source[order] + automaton.num_states))
    here = torch.cat((automaton.arc_source, automaton.arc_target[order] + automaton.num_states))
    first = torch.cat((automaton.arcs_out.first, automaton.arcs_in.first[1:] + len(order)))
    walked = _walk(values, torch.cat((weights.flip(1), weights[..., order]), dim=-1), first, here, other, total=True)
    backward, forward = walked.chunk(2, dim=-1)
    return Passes(forward, backward.flip(1), best_pass(language, best_weights))


def best_pass(language: Language, weights: Tensor) -> Tensor:
    """The weight of the heaviest path from each state to the end, (B, C + 1, Q) (Viterbi)."""
    automaton = language.automaton
    arcs = automaton.arcs_out.first, automaton.arc_source, automaton.arc_target
    return _walk(_log(language.end), weights.flip(1), *arcs, total=False).flip(1)


def _walk(values: Tensor, weights: Tensor, first: Tensor, here: Tensor, other: Tensor, *, total: bool) -> Tensor:
    """For each position and state, return the maximum over arcs of weight + value at the arc's other end.

    With `total`, return the log-sum-exp over arcs instead of the maximum.
    values (B, Q), weights (B, C, E), here and other (E,), sorted by `here` → (B, C + 1, Q). The arcs of state q are
    first[q] .. first[q + 1].
    """
    lengths = first.diff().long().expand_as(values).contiguous()
    here, other = here.expand(len(values), -1), other.expand(len(values), -1)
    steps = [values]
    for weight in weights.unbind(1):
        through = steps[-1].gather(1, other) + weight
        top = torch.segment_reduce(through, "max", lengths=lengths, axis=1, unsafe=True)
        if total:
            top = _finite(top)
            parts = (through - top.gather(1, here)).exp()
            top = top + torch.segment_reduce(parts, "sum", lengths=lengths, axis=1, unsafe=True).log()
        steps.append(top)
    return torch.stack(steps, dim=1)


def best_path(language: Language, weights: Tensor, best: Tensor) -> Tensor:
    """Return the states (B, C + 1) of the heaviest path through weights (B, C, E), given its `best_pass`."""
    automaton = language.automaton
    through = weights + best[:, 1:, automaton.arc_target]
    top = max_by(through, automaton.arc_source, automaton.num_states)[..., automaton.arc_source]
    arcs = torch.arange(len(automaton.arc_source), device=weights.device)
    candidates = torch.where(through >= top, -arcs.double(), -torch.inf)  # the first of equal arcs
    chosen = (-max_by(candidates, automaton.arc_source, automaton.num_states)).clamp(max=len(arcs) - 1).long()
    return follow(language, chosen)[0]


def sample_path(language: Language, weights: Tensor, backward: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a path, (B, C + 1), with one uniform per position, u (B, C). Also return each uniform's remainder, (B, C).

    P(arc | state) is proportional to exp(weight + backward of its target).
    """
    automaton, first_arc = language.automaton, language.automaton.arcs_out.first.long()
    through = weights + backward[:, 1:, automaton.arc_target]
    top = _finite(max_by(through, automaton.arc_source, automaton.num_states))
    width = (through - top[..., automaton.arc_source]).exp()
    # Arcs are sorted by source. The cumulative sums of one state are differences of those of all arcs.
    ends = F.pad(width.cumsum(-1), (1, 0))  # (B, C, E + 1)
    first = ends[..., first_arc[:-1]]
    total = ends[..., first_arc[1:]] - first
    target = (first + u[..., None].double() * total)[..., automaton.arc_source]
    is_below = (ends[..., 1:] <= target).double()
    num_below = torch.zeros_like(first).index_add_(-1, automaton.arc_source, is_below).long()
    # If rounding leaves no arc above the target, the last one with a positive width is taken.
    arcs = torch.arange(len(automaton.arc_source), device=u.device)
    last = max_by(torch.where(width > 0, arcs.double(), -1.0), automaton.arc_source, automaton.num_states)
    chosen = torch.minimum(first_arc[:-1] + num_below, last.clamp(min=0).long())
    path, taken = follow(language, chosen)
    cell = width.gather(-1, taken[..., None])[..., 0]
    before = ends.gather(-1, taken[..., None])[..., 0]
    aim = target.gather(-1, taken[..., None])[..., 0]
    return path, ((aim - before) / cell).nan_to_num(0.0).clamp(0.0, 1.0 - 2.0**-53)


def follow(language: Language, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Follow the chosen arc of every state, (B, C, Q), from the start: states (B, C + 1) and arcs (B, C)."""
    state, states, arcs = language.start, [language.start], []
    for at in range(chosen.shape[1]):
        arc = chosen[:, at].gather(1, state[:, None])[:, 0]
        state = language.automaton.arc_target[arc]
        states.append(state)
        arcs.append(arc)
    return torch.stack(states, dim=1), torch.stack(arcs, dim=1)


def class_bias(language: Language, passes: Passes) -> Tensor:
    """Return `Joint.bias`: the log-sum over paths with each class at each position, without that position's weight."""
    automaton = language.automaton
    arc = automaton.link_arc
    source, target = automaton.arc_source[arc], automaton.arc_target[arc]
    canvas_len = passes.forward.shape[1] - 1
    per_slice = max(1, _SLICE_ELEMENTS // (passes.forward.shape[0] * len(arc)))
    parts = []
    for start in range(0, canvas_len, per_slice):
        part = slice(start, min(start + per_slice, canvas_len))
        through = passes.forward[:, part][..., source] + passes.backward[:, part.start + 1 : part.stop + 1][..., target]
        if language.may_end is not None:
            through = through.masked_fill(~language.may_end[:, part, None] & automaton.ends_text[arc], -torch.inf)
        parts.append(log_sum_by(through, automaton.link_class, automaton.num_classes))
    bias = torch.cat(parts, dim=1)
    return bias - bias.amax(-1, keepdim=True)


def log_sum_by(values: Tensor, index: Tensor, size: int, *, top: Tensor | None = None) -> Tensor:
    """Log-sum of the values (..., n) that share an index (n,): (..., size), -inf where there are none.

    top: the result of `max_by`, if it is known.
    """
    base = _finite(max_by(values, index, size) if top is None else top)
    flat, flat_base = values.flatten(0, -2), base.flatten(0, -2)
    total = torch.zeros_like(flat_base).index_add_(1, index, (flat - flat_base[:, index]).exp())
    return base + total.log().view_as(base)


def max_by(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Maximum of the values (..., n) that share an index (n,): (..., size), -inf where there are none."""
    flat = values.flatten(0, -2)
    top = flat.new_full((len(flat), size), -torch.inf)
    return top.scatter_reduce_(1, index.expand_as(flat), flat, "amax").view(*values.shape[:-1], size)


def any_by(flags: Tensor, index: Tensor, size: int) -> Tensor:
    """Logical or of the flags (..., n) that share an index (n,): (..., size)."""
    return max_by(flags.float(), index, size) > 0


def _finite(values: Tensor) -> Tensor:
    """Replace -inf, the maximum of an empty set, by 0, so that it can be subtracted."""
    return values.masked_fill(values == -torch.inf, 0.0)


def _log(flags: Tensor) -> Tensor:
    return torch.where(flags, 0.0, -torch.inf).double()


def _one_hot(index: Tensor, size: int) -> Tensor:
    return F.one_hot(index, size).bool()
