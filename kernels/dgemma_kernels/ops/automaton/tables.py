"""The tables of an automaton over which the kernels loop, in the order in which they read them."""

from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import register_dataclass, tree_map

from dgemma.constraints.automaton import Automaton

_WIDE = 256
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


@dataclass(frozen=True, eq=False)
class TabledAutomaton(Automaton):
    """An automaton with its tables.

    A captured step has one in its static state. So the tables are inputs of the graph, and nothing builds them there.
    """

    fan: Fan
    class_tokens: IndexGroups
    class_links: IndexGroups
    arc_links: IndexGroups
    arcs_out: IndexGroups  # by source
    wide_classes: Tensor  # (n,) int32: the classes with more than `_WIDE` tokens, largest first


register_dataclass(TabledAutomaton)
_built: WeakKeyDictionary[Automaton, TabledAutomaton] = WeakKeyDictionary()


def with_tables(automaton: Automaton) -> TabledAutomaton:
    """Return the automaton with its tables. The first call for an automaton builds them, and waits for the device.

    Example: `with_tables(language.automaton).fan`.
    """
    if isinstance(automaton, TabledAutomaton):
        return automaton
    if automaton not in _built:
        tables = _build_tables(automaton.to(torch.device("cpu")))  # their sizes depend on values
        moved = tree_map(lambda table: table.to(automaton.next_state.device), tables)
        _built[automaton] = TabledAutomaton(**vars(automaton), **moved)
    return _built[automaton]


def _build_tables(automaton: Automaton) -> dict[str, Any]:
    num_states, num_classes = automaton.num_states, automaton.num_classes
    class_tokens = IndexGroups.build(automaton.token_class.long(), num_classes)
    return {
        "fan": Fan.build(automaton.arc_source, automaton.arc_target, num_states),
        "class_tokens": class_tokens,
        "class_links": IndexGroups.build(automaton.link_class, num_classes),
        "arc_links": IndexGroups.build(automaton.link_arc, len(automaton.arc_source)),
        "arcs_out": IndexGroups.build(automaton.arc_source, num_states),
        "wide_classes": class_tokens.order[: int((class_tokens.first.diff() > _WIDE).sum())],
    }
