"""Automata over tokens, built from an automaton over bytes and the bytes of each token.

Each token is a function from states to states of the byte automaton. Few functions exist: inside a JSON string,
thousands of tokens have the same one. The function of a token is built byte by byte. Tokens that have the same function
so far and the same next byte share one computation.
"""

from hashlib import blake2b
from typing import NamedTuple, Self

import numpy as np

NO_STATE = -1
_MOST_LINKS = 4_000_000  # pairs of a state and a class of tokens
_MOST_CELLS = 1 << 24  # of the table of states and classes
_MOST_LOOKUPS = 1 << 28  # of states, while tokens are spelled; they take about 2 seconds
# A marker such as <|tool_call> is one private character in a pattern. Only its token can spell it: in UTF-8 all these
# characters begin with `_MARKER_BYTE`, and no other token may contain that byte. Unicode assigns no text to them.
FIRST_MARKER = 0x100000
_MARKER_BYTE = 0xF4


class ByteAutomaton(NamedTuple):
    """A deterministic automaton over bytes; state 0 is the start."""

    next_state: np.ndarray  # (S, 256) int32, NO_STATE where no accepted text continues
    is_final: np.ndarray  # (S,) bool

    def minimised(self) -> Self:
        """Merge the states that accept the same texts."""
        label = _equivalent(self.next_state, self.is_final)
        member = np.unique(label, return_index=True)[1]
        order = np.argsort(np.where(label[member] == label[0], -1, member))  # the start first
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        table = np.append(rank[label], NO_STATE).astype(np.int32)[self.next_state[member[order]]]
        return type(self)(table, self.is_final[member[order]])


class _Before:
    """The states before each state: those of state i are `sources[first[i] : first[i + 1]]`."""

    def __init__(self, targets: np.ndarray, sources: np.ndarray, num_states: int) -> None:
        arcs = np.unique(targets.astype(np.int64) * num_states + sources)
        self.sources = arcs % num_states
        self.first = np.searchsorted(arcs, np.arange(num_states + 1) * num_states)

    def __call__(self, states: np.ndarray) -> np.ndarray:
        """Return the states before any of `states` (n,), in ascending order."""
        counts = self.first[states + 1] - self.first[states]
        at = np.repeat(self.first[states] - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        return np.unique(self.sources[at])


def _equivalent(next_state: np.ndarray, is_final: np.ndarray) -> np.ndarray:
    """Return a label (S,) per state; states that accept the same texts have the same label.

    Blocks of states are split until all states of a block have successors in the same blocks. Before the first split,
    two states are in different blocks if the longest texts after them differ in length. This way, long repetitions take
    few rounds. To compare states, the blocks of their successors are hashed. After a split, only the suspects are
    compared again: the predecessors of states that left their block.
    """
    distinct = dict.fromkeys(column.tobytes() for column in next_state.T)  # bytes such as "a" to "z" often agree
    columns = np.stack([np.frombuffer(column, next_state.dtype) for column in distinct])  # (K, S)
    randoms = np.random.default_rng(0).integers(1, 2**63, len(columns), dtype=np.uint64) | np.uint64(1)
    num_states = len(is_final)
    sources = np.broadcast_to(np.arange(num_states), columns.shape)[columns != NO_STATE]
    before = _Before(columns[columns != NO_STATE], sources, num_states)
    longest = _longest(before.sources.tolist(), before.first.tolist())
    label = np.unique(2 * longest + is_final, return_inverse=True)[1]
    num_labels = int(label.max()) + 1
    size = np.bincount(label, minlength=num_states + 2)  # of each block
    block_hash = np.zeros(num_states + 2, np.uint64)
    suspects = np.arange(num_states)
    while len(suspects):
        found = np.zeros(len(suspects), np.uint64)
        for column, random in zip(columns, randoms, strict=True):
            after = column[suspects]
            mixed = np.where(after == NO_STATE, 0, label[after] + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            found += (mixed ^ (mixed >> np.uint64(29))) * random
        order = np.lexsort((found, label[suspects]))
        suspects, found, block = suspects[order], found[order], label[suspects[order]]
        is_first = np.append(True, (block[1:] != block[:-1]) | (found[1:] != found[:-1]))
        part = np.cumsum(is_first) - 1  # a part is the suspects of one block with equal hashes
        part_block, part_hash, part_size = block[is_first], found[is_first], np.bincount(part)
        has_rest = np.bincount(block, minlength=len(size))[part_block] < size[part_block]
        stays = has_rest & (part_hash == block_hash[part_block])
        # If all states of a block are suspects, its largest part keeps the label.
        by_size = np.lexsort((-part_size, part_block))
        largest = by_size[np.unique(part_block[by_size], return_index=True)[1]]
        largest = largest[~has_rest[largest]]
        stays[largest] = True
        block_hash[part_block[largest]] = part_hash[largest]
        new = num_labels + np.arange((~stays).sum())
        num_labels += len(new)
        np.subtract.at(size, part_block[~stays], part_size[~stays])
        size[new], block_hash[new] = part_size[~stays], part_hash[~stays]
        part_block[~stays] = new
        label[suspects] = part_block[part]
        moved = suspects[~stays[part]]
        suspects = before(moved)
    return np.unique(label, return_inverse=True)[1]


def _longest(sources: list[int], first_arc: list[int]) -> np.ndarray:
    """Return the length (S,) of the longest path from each state, -1 if there are paths of any length.

    The arcs into state i come from `sources[first_arc[i] : first_arc[i + 1]]`.
    """
    num_states = len(first_arc) - 1
    num_ahead = np.bincount(sources, minlength=num_states).tolist()  # successors whose length is unknown
    length = [0] * num_states
    known = [state for state in range(num_states) if num_ahead[state] == 0]
    for state in known:  # it grows
        for source in sources[first_arc[state] : first_arc[state + 1]]:
            length[source] = length[state] + 1  # the successor whose length is known last has the longest path
            num_ahead[source] -= 1
            if num_ahead[source] == 0:
                known.append(source)
    return np.where(np.array(num_ahead) > 0, -1, length)


class TokenAutomaton(NamedTuple):
    """A deterministic automaton over tokens without stop tokens; state 0 is the start."""

    token_class: np.ndarray  # (V,) int32; class 0 has no transition
    next_state: np.ndarray  # (Q, K) int32
    is_final: np.ndarray  # (Q,) bool

    @property
    def num_states(self) -> int:
        return len(self.is_final)

    def shortest(self) -> np.ndarray:
        """The smallest number of tokens from each state to a final one, (Q,); -1 where there is no path."""
        distance = np.where(self.is_final, 0, -1)
        source, column = np.nonzero(self.next_state >= 0)
        before = _Before(self.next_state[source, column], source, self.num_states)
        newest, steps = np.flatnonzero(self.is_final), 0
        while len(newest):
            steps += 1
            reached = before(newest)
            newest = reached[distance[reached] < 0]
            distance[newest] = steps
        return distance

    def lengths(self, most: int) -> list[int]:
        """The numbers of tokens, from 1 to `most`, that a text can have."""
        states, found = np.array([0]), []
        for length in range(1, most + 1):
            ahead = np.unique(self.next_state[states])
            states = ahead[ahead >= 0]
            found += [length] if self.is_final[states].any() else []
        return found

    def reaches(self) -> np.ndarray:
        """The states that some text leads to, (Q,) bool."""
        seen = np.zeros(self.num_states, dtype=bool)
        newest = np.array([0])
        while len(newest):
            seen[newest] = True
            ahead = np.unique(self.next_state[newest])
            newest = ahead[(ahead >= 0) & ~np.append(seen, True)[ahead]]
        return seen

    def trimmed(self) -> Self:
        """Keep the states between the start and a final one. The start always stays."""
        useful = self.reaches() & (self.shortest() >= 0)
        useful[0] = True
        rank = np.append(np.where(useful, np.cumsum(useful) - 1, NO_STATE), NO_STATE)
        table = rank[self.next_state[useful]]
        return type(self)(*merge_columns(self.token_class, table), self.is_final[useful])


def spell_tokens(automaton: ByteAutomaton, tokens: list[bytes | None]) -> TokenAutomaton:
    """Turn an automaton over bytes into one over tokens, given each token's bytes; None for a token without text."""
    texts = [b"" if text is None else text for text in tokens]
    lengths = np.array([len(text) for text in texts])
    starts = np.cumsum(lengths) - lengths
    data = np.frombuffer(b"".join(texts), np.uint8)
    functions = _Functions(automaton.next_state)
    token_function = np.where(lengths > 0, 0, functions.nowhere)  # each token's function so far: the identity at first
    for depth in range(int(lengths.max(initial=0))):
        longer = np.flatnonzero((lengths > depth) & (token_function != functions.nowhere))
        if len(longer):
            token_function[longer] = functions.followed_by(token_function[longer], data[starts[longer] + depth])
    used, token_class = np.unique(token_function, return_inverse=True)
    classes, next_state = merge_columns(token_class.astype(np.int32), functions.table(used))
    return TokenAutomaton(classes, next_state, automaton.is_final).trimmed()


class TooLarge(Exception):
    """Raised while an automaton grows beyond the limits."""


class _Functions:
    """Functions from some states to states, numbered. 0 is the identity, and `nowhere` is defined for no state.

    Only the states with a successor are stored: in a long text, most tokens fit at few places.
    """

    nowhere = 1

    def __init__(self, table: np.ndarray) -> None:
        self._after = np.ascontiguousarray(table.T)  # (256, S)
        states = np.arange(len(table), dtype=np.int32)
        self._pairs = [(states, states), (states[:0], states[:0])]  # sources and targets of each function
        self._numbers = {_digest(pair): number for number, pair in enumerate(self._pairs)}
        self._known: dict[int, int] = {}
        self._num_lookups = self._num_stored = 0

    def table(self, functions: np.ndarray) -> np.ndarray:
        """Return the functions (K,) as the columns of a table (S, K)."""
        num_states = self._after.shape[1]
        num_links = sum(len(self._pairs[function][0]) for function in functions)
        if num_links > _MOST_LINKS or num_states * len(functions) > _MOST_CELLS:
            raise TooLarge(f"{num_links} transitions over {len(functions)} kinds of tokens from {num_states} states")
        table = np.full((len(functions), num_states), NO_STATE, np.int32)
        for row, function in zip(table, functions, strict=True):
            sources, targets = self._pairs[function]
            row[sources] = targets
        return table.T

    def followed_by(self, functions: np.ndarray, byte: np.ndarray) -> np.ndarray:
        """Return each function (n,) followed by the transition of its byte (n,)."""
        keys, inverse = np.unique(functions.astype(np.int64) * 256 + byte, return_inverse=True)
        for key in keys.tolist():
            if key not in self._known:
                self._known[key] = self._number(self._pairs[key // 256], self._after[key % 256])
        return np.array([self._known[key] for key in keys.tolist()])[inverse]

    def _number(self, pair: tuple[np.ndarray, np.ndarray], after: np.ndarray) -> int:
        """Return the number of a function followed by `after` (S,), which may be new."""
        self._num_lookups += len(pair[0])
        targets = after[pair[1]]
        goes_on = targets != NO_STATE
        pair = pair[0][goes_on], targets[goes_on]
        name = _digest(pair)
        if name not in self._numbers:
            self._numbers[name] = len(self._pairs)
            self._pairs.append(pair)
            self._num_stored += len(pair[0])
        if self._num_lookups > _MOST_LOOKUPS or self._num_stored > 4 * _MOST_LINKS:
            raise TooLarge(f"more than {self._num_lookups} ways to read a part of a token")
        return self._numbers[name]


def _digest(arrays: tuple[np.ndarray, ...]) -> bytes:
    return blake2b(b"".join(array.tobytes() for array in arrays), digest_size=16).digest()


def unite(automata: list[TokenAutomaton]) -> tuple[TokenAutomaton, list[int]]:
    """Put automata next to each other, with joint classes. Also return the start state of each."""
    sizes = [automaton.num_states for automaton in automata]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    of_token = np.stack([automaton.token_class for automaton in automata])  # (A, V)
    combined, token_class = np.unique(of_token, axis=1, return_inverse=True)
    parts = [
        np.where(automaton.next_state[:, classes] >= 0, automaton.next_state[:, classes] + start, NO_STATE)
        for automaton, classes, start in zip(automata, combined, starts, strict=True)
    ]
    classes, table = merge_columns(token_class.reshape(-1), np.vstack(parts))
    return TokenAutomaton(classes, table, np.concatenate([automaton.is_final for automaton in automata])), starts


def marker(token: int) -> str:
    """The private character that stands for a marker token in a pattern."""
    return chr(FIRST_MARKER + token)


def plain_bytes(text: bytes) -> bytes | None:
    """A token's bytes, None if they could spell a marker's private character."""
    return None if _MARKER_BYTE in text else text


def merge_columns(token_class: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merge classes with equal columns of table (Q, K). Class 0 leads nowhere; the others are sorted by first token."""
    used, first_token, inverse = np.unique(token_class, return_index=True, return_inverse=True)
    columns = np.ascontiguousarray(table.T, np.int32)  # (K, Q)
    empty = np.full(len(table), NO_STATE, np.int32)
    numbers, kept = {_digest((empty,)): 0}, list[int]()
    number_of = np.empty(len(used), np.int32)
    for at in np.argsort(first_token).tolist():
        name = _digest((columns[used[at]],))
        if name not in numbers:
            kept.append(int(used[at]))
            numbers[name] = len(kept)
        number_of[at] = numbers[name]
    return number_of[inverse.reshape(-1)], np.vstack((empty, columns[kept])).T
