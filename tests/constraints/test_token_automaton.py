"""The minimal automaton over bytes, compared with a plain version of its algorithm."""

import numpy as np
import pytest

from dgemma.constraints.token_automaton import NO_STATE, ByteAutomaton, _equivalent

SIZES = [(1, 1), (7, 2), (40, 3), (200, 1), (60, 5)]  # states and bytes with transitions


def plain_blocks(automaton):
    """Number the states such that those that accept the same texts have the same number (Moore, 1956).

    Start with two blocks, final states and others. Split blocks whose states have successors in different blocks.
    """
    block, table = automaton.is_final.astype(int).tolist(), automaton.next_state.tolist()
    while True:
        after = [tuple(NO_STATE if to == NO_STATE else block[to] for to in row) for row in table]
        numbers = {}
        finer = [numbers.setdefault(key, len(numbers)) for key in zip(block, after, strict=True)]
        if len(numbers) == len(set(block)):
            return finer
        block = finer


def random_automaton(num_states, num_bytes, seed):
    """Return an automaton with few arcs, and with each state copied one to three times."""
    source = np.random.default_rng(seed)
    table = source.integers(NO_STATE, num_states, (num_states, num_bytes))
    table[source.random(table.shape) < 0.4] = NO_STATE
    copies = np.repeat(np.arange(num_states), source.integers(1, 4, num_states))
    places = [np.flatnonzero(copies == state) for state in range(num_states)]
    next_state = np.full((len(copies), 256), NO_STATE, np.int32)
    for at, state in enumerate(copies):
        next_state[at, :num_bytes] = [NO_STATE if to == NO_STATE else source.choice(places[to]) for to in table[state]]
    return ByteAutomaton(next_state, (source.random(num_states) < 0.3)[copies])


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_states_are_merged_exactly_if_they_accept_the_same_texts(size, seed):
    automaton = random_automaton(*size, seed)
    plain, merged = plain_blocks(automaton), _equivalent(*automaton).tolist()
    assert len(set(zip(plain, merged, strict=True))) == len(set(plain)) == len(set(merged))
    smaller = automaton.minimised()
    assert len(smaller.is_final) == len(set(plain)) == len(set(plain_blocks(smaller)))


def test_positions_in_a_long_cycle_are_told_apart():
    length = 90
    next_state = np.full((2 * length, 256), NO_STATE, np.int32)
    next_state[:, 0] = np.roll(np.arange(2 * length), -1)  # one cycle that repeats a shorter one twice
    is_final = np.arange(2 * length) % length == 0
    assert len(ByteAutomaton(next_state, is_final).minimised().is_final) == length
