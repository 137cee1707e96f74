"""A finite automaton over tokens, stored as tables for fast loops on the CPU and the GPU."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from dgemma.diffusion.reductions import any_by

WIDE = 256
_ROW = 8  # arcs in a column or row of a `Fan`


class Fan(NamedTuple):
    """The arcs at each state, in tables that kernels loop over.

    Most states have at most 8 arcs, which are in `few`. The arcs of other states are in `some`, in rows of 8.
    The first dimension of each table is a direction: 0 for the arcs that leave a state (for backward passes), 1 for
    those that reach it. Each element of `few` and `some` is a slot. It holds the state at the other end of an arc. A
    slot without an arc holds 0, and its entry in `arc` is E, the number of arcs. The slots of `few` are numbered first,
    then those of `some`.
    """

    few: Tensor  # (2, 8, Q) int64: a column per state, empty if the state has more than 8 arcs
    some: Tensor  # (2, n, 8) int64: rows of the states with more than 8 arcs; the last row is empty
    join: Tensor  # (2, m, width) int64: for each state with more than 8 arcs, its rows in `some`
    place: Tensor  # (2, Q) int64: the column of a state in `few`, or Q + its row in `join`
    arc: Tensor  # (2, slots) int64: the arc of each slot, E for no arc

    @classmethod
    def build(cls, arc_source: Tensor, arc_target: Tensor, num_states: int) -> "Fan":
        """Return the fan of the arcs arc_source[e] → arc_target[e], e < E."""
        # Number the arcs of each state.
        num_arcs, ends = len(arc_source), torch.stack((arc_source, arc_target))
        counts = torch.stack([end.bincount(minlength=num_states) for end in ends])  # (2, Q)
        order = ends.argsort(stable=True)
        state = ends.gather(1, order)
        rank = torch.arange(num_arcs, device=ends.device) - (counts.cumsum(1) - counts).gather(1, state)

        # Place them in a column of `few`, or in whole rows of `some`.
        is_few = counts <= _ROW
        num_rows = torch.where(is_few, 0, counts + _ROW - 1) // _ROW  # (2, Q)
        first_row = num_rows.cumsum(1) - num_rows
        last_row = int(num_rows.sum(1).max())
        num_few = _ROW * num_states
        some_slot = num_few + first_row.gather(1, state) * _ROW + rank
        slot = torch.where(is_few.gather(1, state), rank * num_states + state, some_slot)
        arc = ends.new_full((2, num_few + _ROW * (last_row + 1)), num_arcs).scatter(1, slot, order)
        other = F.pad(ends.flip(0), (0, 1)).gather(1, arc)
        few, some = other[:, :num_few].unflatten(1, (_ROW, -1)), other[:, num_few:].unflatten(1, (-1, _ROW))

        # List the rows of each state with more than 8 arcs.
        joined = is_few.int().argsort(dim=1, stable=True)[:, : int((~is_few).sum(1).max())]  # (2, m)
        index = torch.arange(int(num_rows.max()), device=ends.device)
        rows = first_row.gather(1, joined)[..., None] + index
        join = torch.where(index < num_rows.gather(1, joined)[..., None], rows, last_row)
        place = torch.where(is_few, torch.arange(num_states, device=ends.device), num_states - 1 + (~is_few).cumsum(1))
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
            is_stop=any_by(stops[:, link_arc], link_class[order], num_classes),
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
