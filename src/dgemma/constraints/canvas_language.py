"""A language over tokens: the texts that the canvases of a batch may become, as paths of an automaton."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.constraints.automaton import Automaton, any_by


class Language(NamedTuple):
    """The texts that a canvas may become: paths of the automaton from `start` to a state in `end`."""

    automaton: Automaton
    start: Tensor  # (B,) int64: the state before the canvas
    end: Tensor  # (B, Q) bool: states from which the tokens after the canvas can complete the text
    may_end: Tensor | None = None  # (B, C) bool: positions where a stop token may end the text; None means all
    # (B, C) bool: positions outside the holes of `infill`, where the language does not constrain the token. There
    # the automaton reads its last class, whatever the token is. This class separates one hole from the next.
    gaps: Tensor | None = None

    def select(self, rows: Tensor) -> "Language":
        """Select rows (R,) of the batch."""
        chosen = [None if table is None else table.index_select(0, rows) for table in self[1:]]
        return Language(self.automaton, *chosen)  # type: ignore[arg-type]

    def ended(self, text: Tensor) -> Tensor:
        """The positions after the end of the text, (B, C) bool, in a canvas of tokens `text` (B, C)."""
        # Rows of a spliced language can have different stop tokens. Each row has the end states that it may end in.
        is_stop = self.automaton.is_stop[:, self.automaton.token_class[text].long()]  # (S, B, C)
        is_stop = (is_stop & self.end.T[self.automaton.end_states, :, None]).any(0)
        is_stop = is_stop if self.may_end is None else is_stop & self.may_end
        return (is_stop.cumsum(1) > is_stop) | self.automaton.is_end[self.start][:, None]

    @staticmethod
    def splice(mine: "Language | None", donor: "Language | None", rows: Tensor, shape: torch.Size) -> "Language":
        """Replace `rows` (R,) of `mine`, the language of canvases of this shape (B, C), by the R rows of `donor`.

        None is the language of all texts, but not both may be None. Different automata become one, without the states
        that no row needs.
        """
        known = donor if mine is None else mine
        assert known is not None
        left = _anything(known, *shape) if mine is None else mine
        right = _anything(known, len(rows), shape[1]) if donor is None else donor
        automaton, start, end = left.automaton, right.start, right.end
        if not _equal(automaton, right.automaton):
            automaton = _side_by_side(automaton, right.automaton)
            start = start + left.automaton.num_states
            end = F.pad(end, (left.automaton.num_states, 0))
        ends = F.pad(left.end, (0, automaton.num_states - left.end.shape[1])).index_copy(0, rows, end)
        may_end = _splice_flags(left.may_end, right.may_end, rows, shape[0], absent=True)
        gaps = _splice_flags(left.gaps, right.gaps, rows, shape[0], absent=False)
        spliced = Language(automaton, left.start.index_copy(0, rows, start), ends, may_end, gaps)
        return spliced if automaton is left.automaton else _reachable(spliced)


def _equal(left: Automaton, right: Automaton) -> bool:
    names = ("token_class", "next_state", "is_end")
    return left is right or all(torch.equal(getattr(left, name), getattr(right, name)) for name in names)


def _splice_flags(
    mine: Tensor | None, donor: Tensor | None, rows: Tensor, state_rows: int, *, absent: bool
) -> Tensor | None:
    """Replace `rows` of flags (B, C) by a donor's. A table that is None holds `absent` everywhere."""
    known = donor if mine is None else mine
    if known is None:
        return None
    default = torch.full_like(known[:1], absent)
    mine = default.expand(state_rows, -1) if mine is None else mine
    return mine.index_copy(0, rows, default.expand(len(rows), -1) if donor is None else donor)


def _anything(known: Language, batch_size: int, canvas_len: int) -> Language:
    """The language of all texts over the vocabulary of a known language. No stop token ends a text of it."""
    token_class = torch.zeros_like(known.automaton.token_class)
    automaton = Automaton.build(token_class, known.start.new_zeros(1, 1), known.end.new_zeros(1))
    never = known.end.new_zeros(batch_size, canvas_len)
    return Language(automaton, known.start.new_zeros(batch_size), known.end.new_ones(batch_size, 1), never)


def _side_by_side(left: Automaton, right: Automaton) -> Automaton:
    """One automaton with the states of both, those of `left` first. Its last class has no tokens, for gaps."""
    pairs = left.token_class.long() * right.num_classes + right.token_class
    used, token_class = pairs.unique(return_inverse=True)
    used = F.pad(used, (0, 1), value=left.num_classes * right.num_classes - 1)  # the last classes of both
    below = right.next_state[:, used % right.num_classes]
    below = torch.where(below < 0, below, below + left.num_states)
    table = torch.cat((left.next_state[:, used // right.num_classes], below))
    return Automaton.build(token_class.int(), table, torch.cat((left.is_end, right.is_end)))


def _reachable(language: Language) -> Language:
    """The language without the states that no row can reach. The last class, for gaps, stays the last."""
    automaton = language.automaton
    seen = F.one_hot(language.start, automaton.num_states).bool().any(0)
    while True:
        further = seen | any_by(seen[automaton.arc_source][None], automaton.arc_target, automaton.num_states)[0]
        if torch.equal(further, seen):
            break
        seen = further
    rank = torch.where(seen, seen.cumsum(0) - 1, -1)
    table = automaton.next_state[seen]
    table = torch.where(table < 0, table, rank[table])
    columns, column = table[:, :-1].unique(dim=1, return_inverse=True)
    token_class = column[automaton.token_class.long()].int()
    smaller = Automaton.build(token_class, torch.cat((columns, table[:, -1:]), dim=1), automaton.is_end[seen])
    return language._replace(automaton=smaller, start=rank[language.start], end=language.end[:, seen])
