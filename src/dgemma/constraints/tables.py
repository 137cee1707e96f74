"""Automata over tokens as tensors, with what a run adds: stop tokens after a text, or gaps between several texts."""

import numpy as np
import torch

from dgemma.constraints.automaton import Automaton
from dgemma.constraints.token_automaton import NO_STATE, TokenAutomaton, merge_columns


def with_stops(
    automaton: TokenAutomaton, stop_tokens: tuple[int, ...], vocab_size: int, free: int | None = None
) -> Automaton:
    """Add the state after the text, which stop tokens reach from final states, and return tensors.

    From that state every token leads back to it, because the text has already ended. Without stop tokens it is not
    reachable. From the state `free`, that of rows without a constraint, a stop token leads back like any other.
    """
    end = automaton.num_states
    num_classes = automaton.next_state.shape[1]
    classes = np.zeros(vocab_size, np.int64)
    classes[: len(automaton.token_class)] = automaton.token_class[:vocab_size]
    classes[list(stop_tokens)] = num_classes
    column = np.where(automaton.is_final, end, NO_STATE)
    if free is not None:
        column[free] = free
    table = np.column_stack((automaton.next_state, column))
    table = np.vstack((table, np.full((1, num_classes + 1), end)))
    classes, table = merge_columns(classes, table)
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
