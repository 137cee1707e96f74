"""A finite automaton over tokens, and reductions over values that share an arc, a state or a class."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass, tree_map

from dgemma.diffusion.law import finite, safe_log


@dataclass(frozen=True, eq=False)
class Automaton:
    """A deterministic automaton over tokens: V tokens in K classes, Q states, E arcs, L links.

    Tokens of one class have equal transitions. An arc is a pair of states. A link is an arc and a class whose tokens
    lead from the arc's source to its target. Arcs are sorted by source, links by arc.
    """

    token_class: Tensor  # (V,) int32
    next_state: Tensor  # (Q, K) int64, -1 where no accepted text continues
    arc_source: Tensor  # (E,) int64
    arc_target: Tensor  # (E,) int64
    link_class: Tensor  # (L,) int64
    link_arc: Tensor  # (L,) int64
    ends_text: Tensor  # (E,) bool: arcs of a stop token
    is_end: Tensor  # (Q,) bool: states after a stop token
    end_states: Tensor  # (S,) int64: the states of `is_end`
    is_stop: Tensor  # (S, K) bool: classes of the stop tokens that reach an end state

    @classmethod
    def build(cls, token_class: Tensor, next_state: Tensor, is_end: Tensor) -> "Automaton":
        """Return an automaton from its table (Q, K). `is_end` (Q,) marks states after the end of a text."""
        source, link_class = (next_state >= 0).nonzero(as_tuple=True)
        key, order = (source * len(next_state) + next_state[source, link_class]).sort(stable=True)
        arcs, link_arc = key.unique_consecutive(return_inverse=True)
        arc_source, arc_target = arcs // len(next_state), arcs % len(next_state)
        ends_text = is_end[arc_target] & ~is_end[arc_source]
        end_states = is_end.nonzero()[:, 0]
        stops = ends_text & (arc_target == end_states[:, None])  # (S, E)
        return cls(
            token_class=token_class,
            next_state=next_state,
            arc_source=arc_source,
            arc_target=arc_target,
            link_class=link_class[order],
            link_arc=link_arc,
            ends_text=ends_text,
            is_end=is_end,
            end_states=end_states,
            is_stop=any_by(stops[:, link_arc], link_class[order], next_state.shape[1]),
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


register_dataclass(Automaton)


def log_sum_by(values: Tensor, index: Tensor, size: int, *, top: Tensor | None = None) -> Tensor:
    """Log-sum of the values (..., n) that share an index (n,): (..., size), -inf where there are none.

    top: the result of `max_by`, if it is known.
    """
    base = finite(max_by(values, index, size) if top is None else top).detach()
    flat, flat_base = values.flatten(0, -2), base.flatten(0, -2)
    total = torch.zeros_like(flat_base).index_add_(1, index, (flat - flat_base[:, index]).exp())
    return base + safe_log(total).view_as(base)


def max_by(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Maximum of the values (..., n) that share an index (n,): (..., size), -inf where there are none."""
    flat = values.flatten(0, -2)
    top = flat.new_full((len(flat), size), -torch.inf)
    return top.scatter_reduce_(1, index.expand_as(flat), flat, "amax").view(*values.shape[:-1], size)


def any_by(flags: Tensor, index: Tensor, size: int) -> Tensor:
    """Logical or of the flags (..., n) that share an index (n,): (..., size)."""
    return max_by(flags.float(), index, size) > 0


def first_of_each(index: Tensor, size: int) -> Tensor:
    """Return where each value below `size` begins in an ascending index (n,), and n at the end: (size + 1,) int64."""
    return torch.searchsorted(index, torch.arange(size + 1, device=index.device))


def log_flags(flags: Tensor) -> Tensor:
    """Return 0 where a flag is set and -inf elsewhere, in float64."""
    return torch.where(flags, 0.0, -torch.inf).double()
