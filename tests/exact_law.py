"""Enumeration of small languages, and the exact law of a sampler that reads one uniform per position."""

import itertools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dgemma.constraints.canvas_language import Language
from dgemma.constraints.tables import with_stops
from dgemma.constraints.token_automaton import TokenAutomaton

VOCAB_SIZE, CANVAS_LEN, STOP = 4, 3, 3
TEXTS = torch.tensor(list(itertools.product(range(VOCAB_SIZE), repeat=CANVAS_LEN)))  # (64, 3)


def random_language(seed: int, num_states: int = 4, *, stops: bool = True) -> Language:
    """Draw the language of a random automaton over three tokens and a stop token. It has 2 to 31 of the 64 texts."""
    generator = np.random.default_rng(seed)
    for _ in range(1000):
        table = np.column_stack((np.full(num_states, -1), generator.integers(-1, num_states, (num_states, 3))))
        is_final = generator.random(num_states) < 0.4
        automaton = TokenAutomaton(np.array([1, 2, 3, 0]), table.astype(np.int32), is_final)
        tensors = with_stops(automaton, (STOP,) if stops else (), VOCAB_SIZE)
        end = torch.from_numpy(np.append(is_final, True))[None]
        language = Language(tensors, torch.zeros(1, dtype=torch.int64), end)
        if 2 <= int(accepted(language).sum()) < len(TEXTS) // 2:
            return language
    raise AssertionError("No such automaton was found.")


def accepted(language: Language) -> Tensor:
    """The texts of the language, (64,) bool, by walking the transition table token by token."""
    table, classes = language.automaton.next_state.tolist(), language.automaton.token_class.tolist()
    found = []
    for text in TEXTS.tolist():
        state = int(language.start[0])
        for position, token in enumerate(text):
            before = state
            state = table[state][classes[token]] if state >= 0 else -1
            ends = state == len(table) - 1 != before
            if language.may_end is not None and ends and not bool(language.may_end[0, position]):
                state = -1
        found.append(state >= 0 and bool(language.end[0, state]))
    return torch.tensor(found)


def conditional(probabilities: Tensor, language: Language, fixed: dict[int, int] | None = None) -> Tensor:
    """The law of the texts (64,) under a product of probabilities (C, V), given the language and fixed tokens."""
    law = probabilities.gather(1, TEXTS.T).prod(0) * accepted(language)
    for position, token in (fixed or {}).items():
        others = probabilities[position, token]
        law = torch.where(TEXTS[:, position] == token, law / others, 0.0)
    return law / law.sum()


def law_of(sample: Callable[[Tensor], Tensor]) -> Tensor:
    """The law of the texts (64,) that `sample` makes of uniforms (R, C), where token i depends on uniforms 0..i.

    The cells of each uniform are found on a grid and their ends by bisection, for all beginnings of texts at once.
    """
    grid = torch.linspace(0, 1 - 2**-40, 513, dtype=torch.float64)
    text, middles = torch.zeros(1, 0, dtype=torch.int64), torch.zeros(1, 0, dtype=torch.float64)  # (beginnings, i)
    weight = torch.ones(1, dtype=torch.float64)
    for position in range(CANVAS_LEN):

        def draw(beginning: Tensor, u: Tensor) -> Tensor:
            rows = torch.full((len(u), CANVAS_LEN), 0.5, dtype=torch.float64)
            rows[:, :position], rows[:, position] = middles[beginning], u  # noqa: B023
            return sample(rows)[:, position]  # noqa: B023

        every = torch.arange(len(text))
        tokens = draw(every.repeat_interleave(len(grid)), grid.repeat(len(every))).view(-1, len(grid))
        beginning, cell = (tokens[:, 1:] != tokens[:, :-1]).nonzero(as_tuple=True)
        low, high, left = grid[cell], grid[cell + 1], tokens[beginning, cell]
        for _ in range(30 if len(cell) else 0):  # to 2**-39
            middle = (low + high) / 2
            same = draw(beginning, middle) == left
            low, high = torch.where(same, middle, low), torch.where(same, high, middle)
        beginning, order = torch.cat((every, beginning)).sort(stable=True)
        start = torch.cat((torch.zeros(len(every)), high))[order]
        end = start.roll(-1)
        end[end == 0] = 1.0  # the next cell belongs to another beginning
        middle = (start + end) / 2
        text = torch.cat((text[beginning], draw(beginning, middle)[:, None]), dim=1)
        middles = torch.cat((middles[beginning], middle[:, None]), dim=1)
        weight = weight[beginning] * (end - start)
    digits = VOCAB_SIZE ** torch.arange(CANVAS_LEN - 1, -1, -1)
    return torch.zeros(len(TEXTS), dtype=torch.float64).index_add(0, (text * digits).sum(1), weight)


def total_variation(law: Tensor, target: Tensor) -> float:
    return 0.5 * float((law - target).abs().sum())
