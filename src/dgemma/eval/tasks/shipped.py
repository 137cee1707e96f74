"""Documents of the tasks in this folder, from text and puzzles that need no download."""

import random
from typing import Any

from datasets import Dataset, DatasetDict

from dgemma.data.sudoku import generate_puzzles
from dgemma.files import read_text
from dgemma.location import resolve

_NUM_QUESTIONS = 32
_CONTEXT, _ANSWER = 48, 12  # words


def sudoku(**_: Any) -> DatasetDict:
    """Return 64 puzzles of the test split with 24 to 29 clues, and their solutions."""
    puzzles = generate_puzzles(64, givens=(24, 29), split="test", seed=1)
    both = zip(puzzles.puzzles.tolist(), puzzles.solutions.tolist(), strict=True)
    rows = [{"puzzle": _digits(puzzle).replace("0", "."), "solution": _digits(solution)} for puzzle, solution in both]
    return DatasetDict(test=Dataset.from_list(rows))


def held_out(**_: Any) -> DatasetDict:
    """Return paragraphs of books that `dgemma/text` was not trained on."""
    return DatasetDict(test=Dataset.from_list([{"text": text} for text in _paragraphs()]))


def cloze(**_: Any) -> DatasetDict:
    """Return beginnings of held-out passages with four continuations, three of them from other passages."""
    words, draw = " ".join(_paragraphs()).split(), random.Random(0)
    last = len(words) - _CONTEXT - _ANSWER
    rows = []
    for number in range(_NUM_QUESTIONS):
        start = number * last // _NUM_QUESTIONS
        places = [start + _CONTEXT, *(draw.randrange(last) for _ in range(3))]
        draw.shuffle(places)
        choices = [" ".join(words[place : place + _ANSWER]) for place in places]
        context = " ".join(words[start : start + _CONTEXT])
        rows.append({"context": context, "choices": choices, "answer": places.index(start + _CONTEXT)})
    return DatasetDict(test=Dataset.from_list(rows))


def _paragraphs() -> list[str]:
    text = read_text(resolve("dgemma/text") / "held_out.txt")
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n") if paragraph.strip()]


def _digits(row: list[int]) -> str:
    return "".join(map(str, row))
