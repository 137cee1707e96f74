"""The constraint of a run: its automaton, the state of each row, and the states from which a text can still end.

All of it is computed before the first forward. So a constraint that cannot be met is refused before any work.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dgemma.checks import Words, require
from dgemma.constraints.automaton import Automaton, any_by
from dgemma.constraints.build import KeptResults
from dgemma.constraints.canvas_language import Language
from dgemma.constraints.languages import Regex
from dgemma.constraints.tables import with_gaps, with_stops
from dgemma.constraints.token_automaton import TokenAutomaton, unite
from dgemma.diffusion.noise import Noise
from dgemma.diffusion.span import Span

_MOST_BYTES = 1 << 27  # of converted automata that are kept for later runs; an engine's tables take as much again
Constraint = Regex | Sequence[Regex | None] | None


class RunLanguage(NamedTuple):
    """The language of a run of B rows: the state of each row at the start, and the states in which a block may end."""

    automaton: Automaton
    start: Tensor  # (B,) int64
    ends: Tensor  # (blocks, B, Q) bool
    may_end: Tensor | None = None  # (B, N) bool: positions where a stop token is allowed; None means all
    gaps: Tensor | None = None  # (B, N) bool: positions between two texts

    def part(self, block: int, states: Tensor, rows: Tensor, canvas_len: int) -> Language:
        """The language of one block for some rows (R,). `states` (R,) are the states before the block."""
        part = slice(block * canvas_len, (block + 1) * canvas_len)
        parts = [None if table is None else table[rows, part] for table in (self.may_end, self.gaps)]
        return Language(self.automaton, states, self.ends[block, rows], *parts)

    def advance(self, states: Tensor, tokens: Tensor) -> Tensor:
        """The states (R,) after a committed block (R, C). With gaps there is only one canvas, so none are needed."""
        if self.gaps is not None:
            return states
        reached = self.automaton.advance(states, tokens)
        if bool((reached < 0).any()):
            got, fix = Words("a text outside the language"), "Do not change the draft in on_step."
            require(False, "generate constraint", "hold for every committed block", got, fix)
        return reached

    def to(self, device: torch.device) -> "RunLanguage":
        """The same language on `device`."""
        rows = [None if table is None else table.to(device) for table in self[1:]]
        return RunLanguage(_convert(Automaton.to, self.automaton, device), *rows)  # type: ignore[arg-type]


def read_constraint(
    constraint: Constraint,
    span: Span,
    noise: Noise,
    *,
    batch_size: int,
    max_new_tokens: int,
    canvas_len: int,
    stop_tokens: tuple[int, ...],
    device: torch.device,
) -> RunLanguage | None:
    """Check the constraint of a run against its length, its frozen tokens and its allowed tokens.

    A text ends within `max_new_tokens` if one can. Otherwise it may fill the last canvas.
    """
    if constraint is None:
        return None
    num_positions = math.ceil(max_new_tokens / canvas_len) * canvas_len
    tokens, start, free = _unite("generate", constraint, batch_size, noise.vocab_size)
    automaton = _convert(with_stops, tokens, stop_tokens, noise.vocab_size, free)
    span, rows = span.to(torch.device("cpu")), torch.arange(batch_size)
    may_end = None
    if free is not None or (span.frozen is not None and bool(span.frozen.any())):
        may_end = span.may_end(0, num_positions, rows) & (start != (-1 if free is None else free))[:, None]
    factors = _Factors(automaton, span, noise, may_end, batch_size)
    accepts = torch.from_numpy(np.append(tokens.is_final, True)).expand(batch_size, -1)
    reach = factors.reach(accepts, num_positions)
    for row in (~reach[0][rows, start]).nonzero()[:, 0].tolist():
        rule, fix = "fit into max_new_tokens and agree with frozen and allowed", "Raise max_new_tokens or allow more."
        shortest = f"texts of at least {tokens.shortest()[int(start[row])]} tokens for {num_positions} in row {row}"
        require(False, "generate constraint", rule, shortest, fix)
    ends = torch.stack(reach[canvas_len::canvas_len])
    if max_new_tokens < num_positions:
        # The output is cut at max_new_tokens, so the stop token may come right after it, but not later.
        within = factors.reach(automaton.is_end.expand(batch_size, -1), max_new_tokens + 1)
        fits = within[0][rows, start][:, None]  # (B, 1)
        ends = torch.where(fits, torch.stack([*within[canvas_len:-1:canvas_len], within[-1]]), ends)
        in_time = ~fits | (torch.arange(num_positions) <= max_new_tokens)
        may_end = in_time if may_end is None else may_end & in_time
    on_device = _convert(Automaton.to, automaton, device)
    return RunLanguage(on_device, start.to(device), ends.to(device), None if may_end is None else may_end.to(device))


class HoleLanguage:
    """The constraint of `infill` and `edit`: each contiguous run of holes is a text of the language.

    holes (B, N) marks the positions to write, and allowed (B or 1, N or 1, V) the tokens that may be written.
    """

    def __init__(self, owner: str, constraint: Constraint, holes: Tensor, allowed: Tensor | None, noise: Noise) -> None:
        batch_size, self.holes = len(holes), holes.cpu()
        tokens, start, _ = _unite(owner, constraint, batch_size, noise.vocab_size)
        starts = sorted(set(start.tolist()))
        self.automaton, before = with_gaps(tokens, starts, noise.vocab_size)
        self.first = torch.tensor([before[starts.index(state)] for state in start.tolist()])  # (B,)
        is_final = torch.from_numpy(tokens.is_final)
        accepts = torch.cat((is_final, torch.ones(len(starts), dtype=torch.bool)))
        table = None if allowed is None else allowed.cpu()
        factors = _Factors(self.automaton, Span(allowed=table), noise, None, batch_size, self.holes)
        reach = factors.reach(accepts.expand(batch_size, -1), self.holes.shape[1])
        self.reach = torch.stack(reach)  # (N + 1, B, Q): states from which the rest of the text can fit
        missed = (~self.reach[0, torch.arange(batch_size), self.first]).nonzero()[:, 0].tolist()
        if missed:
            runs = itertools.groupby(self.holes[missed[0]].tolist())
            lengths = sorted({len(list(run)) for is_hole, run in runs if is_hole})
            rule = f"have texts of exactly the holes' lengths, which no text has in row {missed[0]}"
            require(False, f"{owner} constraint", rule, lengths, "Change their lengths.")

    def canvases(self, rows: Sequence[Any], canvas_len: int) -> RunLanguage:
        """The language of one canvas per row.

        Each of `rows` has the attributes `index`, `tokens` (n,) and `place.start`, where the canvas starts in the text.
        """
        found = [self._canvas(row.index, row.tokens, row.place.start, canvas_len) for row in rows]
        start, ends, gaps = (torch.stack(column) for column in zip(*found, strict=True))
        return RunLanguage(self.automaton, start, ends[None], None, gaps)

    def _canvas(self, row: int, text: Tensor, start: int, canvas_len: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the state before a canvas, the states where it may end (Q,), and the positions outside holes (C,)."""
        holes = self.holes[row]
        own = self.automaton.token_class[text[:start]].long()
        state = self.first[row]
        for token_class in torch.where(holes[:start], own, self.automaton.num_classes - 1):
            state = self.automaton.next_state[state, token_class]
        stop = min(start + canvas_len, len(holes))
        gaps = torch.nn.functional.pad(~holes[start:stop], (0, canvas_len - (stop - start)), value=True)
        return state, self.reach[stop, row], gaps


@dataclass(frozen=True)
class _Factors:
    """The arcs that can be taken at each position, given the frozen and the allowed tokens; on the CPU."""

    automaton: Automaton
    span: Span
    noise: Noise
    may_end: Tensor | None
    batch_size: int
    holes: Tensor | None = None  # (B, N) bool: elsewhere only the class of gaps is taken, the last one

    def reach(self, accepts: Tensor, num_positions: int) -> list[Tensor]:
        """The states before each position from which an accepted text can follow: N + 1 times (B, Q) bool."""
        reach = [accepts]
        for position in reversed(range(num_positions)):
            if position >= self.first_plain and len(reach) > 1 and torch.equal(reach[-1], reach[-2]):
                reach.append(reach[-1])  # the arcs are the same here, so the states stay the same
            else:
                taken = self.arcs(position) & reach[-1][:, self.automaton.arc_target]
                reach.append(any_by(taken, self.automaton.arc_source, self.automaton.num_states))
        return reach[::-1]

    @cached_property
    def first_plain(self) -> int:
        """The first position after the frozen tokens, the allowed sets and the holes."""
        tables = (*vars(self.span).values(), self.holes)
        return max(0 if table is None or table.shape[1] == 1 else table.shape[1] for table in tables)

    def arcs(self, position: int) -> Tensor:
        """The arcs that some token can take at a position, (B, E) bool."""
        classes = self._allowed(position)
        canvas, frozen = self.span.canvas, self.span.frozen
        if canvas is not None and frozen is not None and position < frozen.shape[1]:
            own = self.automaton.token_class[canvas[:, position].clamp(min=0)].long()
            frozen_class = torch.nn.functional.one_hot(own, self.automaton.num_classes).bool()
            classes = torch.where(frozen[:, position, None], frozen_class, classes)
        if self.holes is not None:
            is_gap = torch.arange(self.automaton.num_classes) == self.automaton.num_classes - 1
            classes = torch.where(self.holes[:, position, None], classes, is_gap)
        arcs = any_by(classes[:, self.automaton.link_class], self.automaton.link_arc, len(self.automaton.arc_source))
        if self.may_end is not None:
            arcs = arcs & (self.may_end[:, position, None] | ~self.automaton.ends_text)
        return arcs.expand(self.batch_size, -1)

    def _allowed(self, position: int) -> Tensor:
        """The classes of tokens (see `Automaton`) with an allowed token at a position, (B or 1, K) bool."""
        table = self.span.allowed
        if table is not None and table.shape[1] > 1 and position < table.shape[1]:
            return self._classes(table[:, position])
        return self._everywhere

    @cached_property
    def _everywhere(self) -> Tensor:
        table = self.span.allowed
        return self._classes(None if table is None or table.shape[1] > 1 else table[:, 0])

    def _classes(self, allowed: Tensor | None) -> Tensor:
        """The classes of the tokens (B or 1, V) that are allowed and not the mask."""
        usable = self.noise.proposable(None if allowed is None else allowed[:, None], torch.device("cpu"))
        if usable is None:
            usable = torch.ones(1, 1, self.noise.vocab_size, dtype=torch.bool)
        return any_by(usable[:, 0], self.automaton.token_class.long(), self.automaton.num_classes)


_automata = KeptResults(_MOST_BYTES)


def _convert(convert: Callable[..., Automaton], source: Any, *settings: Any) -> Automaton:
    """Return `convert(source, *settings)`, which is kept."""

    def build() -> tuple[Any, int]:
        built = convert(source, *settings)
        # `source` is kept too: while it exists, no other object has its id.
        return (source, built), sum(leaf.nbytes for leaf in tree_leaves((source, built)) if hasattr(leaf, "nbytes"))

    pair: tuple[Any, Automaton] = _automata.find((convert, id(source.next_state), *settings), build)
    return pair[1]


def _unite(
    owner: str, constraint: Constraint, batch_size: int, vocab_size: int
) -> tuple[TokenAutomaton, Tensor, int | None]:
    """One automaton for all rows, each row's start state (B,), and that of rows without a constraint, if any."""
    listed = [constraint] * batch_size if isinstance(constraint, Regex) or constraint is None else list(constraint)
    fits = len(listed) == batch_size and all(one is None or isinstance(one, Regex) for one in listed)
    rule = f"be a value such as Regex(pattern, tokenizer), or a list of {batch_size} values or Nones, one per row"
    require(fits, f"{owner} constraint", rule, constraint)
    distinct = list(dict.fromkeys(listed))
    for num_tokens in {len(one.automaton.token_class) for one in distinct if one is not None}:
        # A model's vocabulary is often padded, but never to twice its size.
        rule = f"be built with the model's tokenizer, which has at most {vocab_size} tokens and at least half as many"
        fits = num_tokens <= vocab_size < 2 * num_tokens
        require(fits, f"{owner} constraint", rule, num_tokens, "Build it with Tokenizer.from_pretrained(checkpoint).")
    automata = [_padded(None if one is None else one.automaton, vocab_size) for one in distinct]
    united, starts = (automata[0], [0]) if len(automata) == 1 else unite(automata)
    state = dict(zip(distinct, starts, strict=True))
    return united, torch.tensor([state[one] for one in listed]), state.get(None)


def _padded(automaton: TokenAutomaton | None, vocab_size: int) -> TokenAutomaton:
    """The automaton over the model's vocabulary; None means that every text is accepted."""
    if automaton is None:
        return TokenAutomaton(np.ones(vocab_size, np.int32), np.array([[-1, 0]], np.int32), np.ones(1, bool))
    missing = vocab_size - len(automaton.token_class)
    return automaton._replace(token_class=np.pad(automaton.token_class, (0, missing)))
