"""Automata over tokens, built from an automaton over bytes and the bytes of each token.

Each token is a function from states to states of the byte automaton. Few functions exist: inside a JSON string,
thousands of tokens have the same one. The function of a token is built byte by byte. Tokens that have the same function
so far and the same next byte share one computation.
"""

from typing import NamedTuple, Self

import numpy as np
import torch

from dgemma.diffusion.automaton import Automaton

NO_STATE = -1
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
    arcs = np.unique(columns[columns != NO_STATE].astype(np.int64) * num_states + sources)  # by target
    first_arc = np.searchsorted(arcs, np.arange(num_states + 1) * num_states)
    longest = _longest((arcs % num_states).tolist(), first_arc.tolist())
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
        counts = first_arc[moved + 1] - first_arc[moved]
        at = np.repeat(first_arc[moved] - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        suspects = np.unique(arcs[at] % num_states)
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
        state, column = np.nonzero(self.next_state >= 0)
        arcs = np.unique(np.stack((self.next_state[state, column], state)), axis=1)
        reached, steps = self.is_final, 0
        while reached.any():
            steps += 1
            before = np.zeros_like(reached)
            before[arcs[1, reached[arcs[0]]]] = True
            reached = before & (distance < 0)
            distance[reached] = steps
        return distance

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
        return type(self)(*_merge_columns(self.token_class, table), self.is_final[useful])


def spell_tokens(automaton: ByteAutomaton, tokens: list[bytes | None]) -> TokenAutomaton:
    """Turn an automaton over bytes into one over tokens, given each token's bytes; None for a token without text."""
    num_states = len(automaton.is_final)
    table = np.vstack((automaton.next_state, np.full((1, 256), NO_STATE, np.int32)))
    table[table == NO_STATE] = num_states  # a last state that is never left
    texts = [b"" if text is None else text for text in tokens]
    lengths = np.array([len(text) for text in texts])
    starts = np.cumsum(lengths) - lengths
    data = np.frombuffer(b"".join(texts), np.uint8)
    functions = _Functions(table)
    token_function = np.where(lengths > 0, 0, functions.nowhere)  # each token's function so far: the identity at first
    for depth in range(int(lengths.max(initial=0))):
        longer = np.flatnonzero((lengths > depth) & (token_function != functions.nowhere))
        if len(longer):
            token_function[longer] = functions.followed_by(token_function[longer], data[starts[longer] + depth])
    columns = functions.table[:, :num_states].copy()  # (K, S)
    columns[columns == num_states] = NO_STATE
    classes, next_state = _merge_columns(token_function.astype(np.int32), columns.T)
    return TokenAutomaton(classes, next_state, automaton.is_final).trimmed()


class _Functions:
    """Functions from states to states, numbered. 0 is the identity; `nowhere` leads to a state that is never left."""

    nowhere = 1

    def __init__(self, table: np.ndarray) -> None:
        self._after = np.ascontiguousarray(table.T)  # (256, S + 1)
        identity = np.arange(len(table), dtype=np.int32)
        self._rows = [identity, np.full_like(identity, len(table) - 1)]
        self._numbers = {row.tobytes(): number for number, row in enumerate(self._rows)}
        self._known: dict[int, int] = {}

    @property
    def table(self) -> np.ndarray:
        return np.stack(self._rows)

    def followed_by(self, functions: np.ndarray, byte: np.ndarray) -> np.ndarray:
        """Return each function (n,) followed by the transition of its byte (n,)."""
        keys, inverse = np.unique(functions.astype(np.int64) * 256 + byte, return_inverse=True)
        for key in keys.tolist():
            if key not in self._known:
                row = self._after[key % 256][self._rows[key // 256]]
                name = row.tobytes()
                if name not in self._numbers:
                    self._numbers[name] = len(self._rows)
                    self._rows.append(row)
                self._known[key] = self._numbers[name]
        return np.array([self._known[key] for key in keys.tolist()])[inverse]


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
    classes, table = _merge_columns(token_class.reshape(-1), np.vstack(parts))
    return TokenAutomaton(classes, table, np.concatenate([automaton.is_final for automaton in automata])), starts


def with_stops(automaton: TokenAutomaton, stop_tokens: tuple[int, ...], vocab_size: int) -> Automaton:
    """Add the state after the text, which stop tokens reach from final states, and return tensors.

    From that state every token leads back to it, because the text has already ended. Without stop tokens it is not
    reachable.
    """
    end = automaton.num_states
    num_classes = automaton.next_state.shape[1]
    classes = np.zeros(vocab_size, np.int64)
    classes[: len(automaton.token_class)] = automaton.token_class[:vocab_size]
    classes[list(stop_tokens)] = num_classes
    column = np.where(automaton.is_final, end, NO_STATE)
    table = np.column_stack((automaton.next_state, column))
    table = np.vstack((table, np.full((1, num_classes + 1), end)))
    classes, table = _merge_columns(classes, table)
    is_end = torch.arange(end + 1) == end
    return Automaton.build(torch.from_numpy(classes), torch.from_numpy(table).long(), is_end)


def with_gaps(automaton: TokenAutomaton, starts: list[int], vocab_size: int) -> tuple[Automaton, list[int]]:
    """Add a last class, without tokens, for positions between two texts. Also return the new start states.

    The class leads from a final state to a new start state, and from the new start state to itself. The new start state
    also has the transitions of the old one. `starts`, in ascending order, are the first states of the automata that
    `unite` put together.
    """
    num_states = automaton.num_states
    # The new start state of each state's automaton.
    fresh = num_states + np.searchsorted(starts, np.arange(num_states), side="right") - 1
    gap = np.append(np.where(automaton.is_final, fresh, NO_STATE), num_states + np.arange(len(starts)))
    table = np.vstack((automaton.next_state, automaton.next_state[starts]))
    table = np.column_stack((table, gap))
    classes = np.zeros(vocab_size, np.int32)
    classes[: len(automaton.token_class)] = automaton.token_class[:vocab_size]
    is_end = torch.zeros(len(table), dtype=torch.bool)
    built = Automaton.build(torch.from_numpy(classes), torch.from_numpy(table).long(), is_end)
    return built, [num_states + at for at in range(len(starts))]


def marker(token: int) -> str:
    """The private character that stands for a marker token in a pattern."""
    return chr(FIRST_MARKER + token)


def plain_bytes(text: bytes) -> bytes | None:
    """A token's bytes, None if they could spell a marker's private character."""
    return None if _MARKER_BYTE in text else text


def _merge_columns(token_class: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merge classes with equal columns of table (Q, K). Class 0 leads nowhere; the others are sorted by first token."""
    used, inverse = np.unique(token_class, return_inverse=True)
    columns = np.ascontiguousarray(table[:, used].T.astype(np.int32))  # (K', Q)
    empty = np.full((1, columns.shape[1]), NO_STATE, np.int32)
    first_token = np.full(len(used), len(token_class))
    np.minimum.at(first_token, inverse.reshape(-1), np.arange(len(token_class)))
    order = np.argsort(first_token)
    numbers: dict[bytes, int] = {empty.tobytes(): 0}
    rows, number_of = [empty[0]], np.empty(len(used), np.int32)
    for column in order.tolist():
        name = columns[column].tobytes()
        if name not in numbers:
            numbers[name] = len(rows)
            rows.append(columns[column])
        number_of[column] = numbers[name]
    return number_of[inverse.reshape(-1)], np.stack(rows).T.astype(np.int32)
