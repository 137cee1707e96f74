"""Paths of an automaton: sums and maxima over them (forward-backward and Viterbi), and random draws.

`dgemma_kernels.ops.automaton` has these functions as kernels.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.constraints.automaton import Automaton, first_of_each, log_flags, log_sum_by, max_by
from dgemma.constraints.canvas_language import Language
from dgemma.diffusion.law import finite, safe_log
from dgemma.diffusion.prediction import Prediction

_SLICE_ELEMENTS = 1 << 24  # float64 temporaries stay under 128 MiB


class Passes(NamedTuple):
    """Log-sums over the paths that reach a state and that leave it, and the heaviest path that leaves it.

    All are (B, C + 1, Q) float64; index i is the state before position i.
    """

    forward: Tensor
    backward: Tensor
    best: Tensor


def class_sums(prediction: Prediction, automaton: Automaton) -> tuple[Tensor, Tensor]:
    """Return the log-sum and the maximum of the shaped logits over each class, both (B, C, K) float64."""
    index, num_classes = automaton.token_class.long(), automaton.num_classes
    maxima = [max_by(logits, index, num_classes) for logits in prediction.pieces()]
    pieces = zip(prediction.pieces(), maxima, strict=True)
    sums = [log_sum_by(logits, index, num_classes, top=top) for logits, top in pieces]
    return torch.cat(sums, dim=1).double(), torch.cat(maxima, dim=1).double()


def arc_weights(language: Language, classes: Tensor, *, total: bool) -> Tensor:
    """Combine the weights (B, C, K) of each arc's classes into one weight per arc, (B, C, E).

    With `total` it is the log-sum of their weights, otherwise the maximum.
    """
    automaton = language.automaton
    combine = log_sum_by if total else max_by
    weights = combine(classes[..., automaton.link_class], automaton.link_arc, len(automaton.arc_source))
    if language.may_end is not None:
        weights = weights.masked_fill(~language.may_end[..., None] & automaton.ends_text, -torch.inf)
    return weights


def passes(language: Language, weights: Tensor, best_weights: Tensor) -> Passes:
    """Sum over paths by `weights`, forward and backward, and maximise over paths by `best_weights`; both (B, C, E)."""
    source, target = language.automaton.arc_source, language.automaton.arc_target
    backward = _walk(log_flags(language.end), weights.flip(1), source, target, total=True).flip(1)
    order = target.argsort(stable=True)
    is_start = F.one_hot(language.start, language.automaton.num_states).bool()
    forward = _walk(log_flags(is_start), weights[..., order], target[order], source[order], total=True)
    return Passes(forward, backward, best_pass(language, best_weights))


def best_pass(language: Language, weights: Tensor) -> Tensor:
    """The weight of the heaviest path from each state to the end, (B, C + 1, Q) (Viterbi)."""
    automaton = language.automaton
    here, other = automaton.arc_source, automaton.arc_target
    return _walk(log_flags(language.end), weights.flip(1), here, other, total=False).flip(1)


def _walk(values: Tensor, weights: Tensor, here: Tensor, other: Tensor, *, total: bool) -> Tensor:
    """For each position and state, return the maximum over arcs of weight + value at the arc's other end.

    With `total`, return the log-sum-exp over arcs instead of the maximum.
    An arc updates the value of state `here` (E,) and reads that of state `other` (E,). Arcs are sorted by `here`.
    values (B, Q), weights (B, C, E) → (B, C + 1, Q).
    """
    lengths = first_of_each(here, values.shape[1]).diff().expand_as(values).contiguous()
    here, other = here.expand(len(values), -1), other.expand(len(values), -1)
    steps = [values]
    for weight in weights.unbind(1):
        through = steps[-1].gather(1, other) + weight
        top = torch.segment_reduce(through, "max", lengths=lengths, axis=1, unsafe=True)
        if total:
            top = finite(top).detach()
            parts = (through - top.gather(1, here)).exp()
            top = top + safe_log(torch.segment_reduce(parts, "sum", lengths=lengths, axis=1, unsafe=True))
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
    """Draw a path, (B, C + 1), with one uniform per position, u (B, C). Also return new uniforms, (B, C).

    P(arc | state) is proportional to exp(weight + backward of its target). A new uniform is the place of the old one in
    its arc's interval, rescaled to [0, 1).
    """
    automaton = language.automaton
    first_arc = first_of_each(automaton.arc_source, automaton.num_states)
    through = weights + backward[:, 1:, automaton.arc_target]
    top = finite(max_by(through, automaton.arc_source, automaton.num_states))
    width = (through - top[..., automaton.arc_source]).exp()
    # Arcs are sorted by source, so the sums over one state's arcs are differences of the sums over all arcs.
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
    """Return `Joint.bias`: for each position and class, the log-sum over the paths that have this class there.

    The weight of the position itself is not included.
    """
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
