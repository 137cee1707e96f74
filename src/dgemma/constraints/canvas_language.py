"""A language over tokens: the texts that the canvases of a batch may become, as paths of an automaton."""

from typing import NamedTuple

import torch
from torch import Tensor

from dgemma.constraints.automaton import Automaton


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
        is_stop = self.automaton.is_stop[:, self.automaton.token_class[text].long()]  # (S, B, C)
        is_stop = (is_stop & self.end.T[self.automaton.end_states, :, None]).any(0)
        is_stop = is_stop if self.may_end is None else is_stop & self.may_end
        return (is_stop.cumsum(1) > is_stop) | self.automaton.is_end[self.start][:, None]

    def splice(self, donor: "Language", rows: Tensor) -> "Language":
        """Replace `rows` (R,) by the R rows of `donor`, which has the same automaton."""
        may_end = _splice_flags(self.may_end, donor.may_end, rows, len(self.start), absent=True)
        gaps = _splice_flags(self.gaps, donor.gaps, rows, len(self.start), absent=False)
        start, end = self.start.index_copy(0, rows, donor.start), self.end.index_copy(0, rows, donor.end)
        return Language(self.automaton, start, end, may_end, gaps)

    def has_automaton_of(self, other: "Language") -> bool:
        """Return True if both languages have the same automaton, perhaps in other tensors."""
        mine, theirs, names = self.automaton, other.automaton, ("token_class", "next_state", "is_end")
        return mine is theirs or all(torch.equal(getattr(mine, name), getattr(theirs, name)) for name in names)


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
