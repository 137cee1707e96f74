"""Rewards: plain functions of the texts of some runs and the answers of their problems; one number per text.

Yours is any function with the same two arguments. Those here return 1.0 for a right text and 0.0 for any other. They
raise ValueError for an answer that no text can have.
"""

import ast
import json
import operator
import re
import runpy
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dgemma.checks import require

Reward = Callable[[Sequence[str], Sequence[Any]], Sequence[float]]

_NUMBER = re.compile(r"(?:(?<!\d)-)?\d[\d,]*(?:\.\d+)?(?:[eE][+-]?\d{1,3})?")  # in "5-3", the last one is 3
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_MOST_CHARACTERS = 200  # of an expression; `ast` would recurse deeply into a long one


def exact(texts: Sequence[str], answers: Sequence[Any]) -> list[float]:
    """Reward a text that equals the answer, apart from white space at its ends.

    Example: `exact([" 42\\n"], ["42"])` is `[1.0]`.
    """
    return [float(text.strip() == str(answer).strip()) for text, answer in zip(texts, answers, strict=True)]


def numeric(texts: Sequence[str], answers: Sequence[Any]) -> list[float]:
    """Reward a text whose last number is the answer.

    Example: `numeric(["3 and 4 make 7.0"], [7])` is `[1.0]`.
    """

    def last_number(text: str) -> Fraction | None:
        found = _NUMBER.findall(text)
        try:
            return Fraction(found[-1].replace(",", "")) if found else None
        except ValueError:  # Python reads no number of thousands of digits
            return None

    right = [last_number(str(answer)) for answer in answers]
    for answer, number in zip(answers, right, strict=True):
        require(number is not None, "numeric answer", "have a number", answer)
    return [float(last_number(text) == number) for text, number in zip(texts, right, strict=True)]


def regex(texts: Sequence[str], answers: Sequence[Any]) -> list[float]:
    """Reward a text that the answer, a regular expression, matches as a whole.

    Example: `regex(["17 May"], [r"\\d+ [A-Z][a-z]+"])` is `[1.0]`.
    """

    def is_right(text: str, answer: Any) -> bool:
        try:
            return re.fullmatch(answer, text.strip()) is not None
        except (re.error, TypeError) as error:
            raise ValueError(f"regex answer must be a regular expression, got {answer!r}: {error}.") from None

    return [float(is_right(text, answer)) for text, answer in zip(texts, answers, strict=True)]


def json_equal(texts: Sequence[str], answers: Sequence[Any]) -> list[float]:
    """Reward a text that is JSON with the value of the answer, which may be a value or its JSON text.

    Example: `json_equal(['{"b": 2, "a": 1}'], [{"a": 1, "b": 2}])` is `[1.0]`.
    """
    missing = object()  # equals no value

    def read(text: str) -> Any:
        try:  # Python's True equals 1, but not these pairs
            numbers: Any = {"parse_int": lambda digits: (int, int(digits)), "parse_float": lambda x: (int, float(x))}
            return json.loads(text, **numbers)
        except (ValueError, RecursionError):
            return missing

    def right(answer: Any) -> Any:
        value = read(answer) if isinstance(answer, str) else missing
        try:
            return read(json.dumps(answer)) if value is missing else value
        except TypeError as error:
            raise ValueError(f"json_equal answer must be a value of JSON, got {answer!r}: {error}.") from None

    values = [right(answer) for answer in answers]
    return [float(read(text) == value) for text, value in zip(texts, values, strict=True)]


def sudoku(texts: Sequence[str], answers: Sequence[Any]) -> list[float]:
    """Reward a valid grid that keeps the clues. The answer is the puzzle or its solution, 0 or "." for a blank.

    Example: `sudoku([solution], [puzzle])` is `[1.0]`.
    """

    def is_right(text: str, answer: Any) -> bool:
        digits, clues = re.sub(r"\s", "", text), re.sub(r"\s", "", str(answer)).replace(".", "0")
        is_puzzle = re.fullmatch("[0-9]{81}", clues) is not None
        require(is_puzzle, "sudoku answer", "have 81 digits, 0 or '.' for a blank", answer)
        if not re.fullmatch("[1-9]{81}", digits):
            return False
        rows = [digits[9 * row : 9 * row + 9] for row in range(9)]
        boxes = ["".join(row[3 * b : 3 * b + 3] for row in rows[3 * a : 3 * a + 3]) for a in range(3) for b in range(3)]
        units = [*rows, *map("".join, zip(*rows, strict=True)), *boxes]
        keeps_clues = all(clue in ("0", digit) for clue, digit in zip(clues, digits, strict=True))
        return keeps_clues and all(len(set(unit)) == 9 for unit in units)

    return [float(is_right(text, answer)) for text, answer in zip(texts, answers, strict=True)]


def countdown(texts: Sequence[str], answers: Sequence[Any]) -> list[float]:
    """Reward an expression that makes the target from the numbers, each used at most once; "= target" may follow.

    An answer is a dictionary with "numbers" and "target".

    Example: `countdown(["(6 - 2) * 5 = 20"], [{"numbers": [2, 5, 6], "target": 20}])` is `[1.0]`.
    """

    def is_right(text: str, answer: Any) -> bool:
        is_problem = isinstance(answer, Mapping) and {"numbers", "target"} <= answer.keys()
        require(is_problem, "countdown answer", 'be a dictionary with "numbers" and "target"', answer)
        expression, equals, result = (part.strip() for part in text.partition("="))
        is_expression = re.fullmatch(rf"[\d+\-*/() ]{{1,{_MOST_CHARACTERS}}}", expression)
        if not is_expression or (equals and result != str(answer["target"])):
            return False
        used = Counter(int(number) for number in re.findall(r"\d+", expression))
        try:
            value = _calculate(ast.parse(expression, mode="eval").body)
        except (SyntaxError, ZeroDivisionError):
            return False
        return used <= Counter(answer["numbers"]) and value == answer["target"]

    return [float(is_right(text, answer)) for text, answer in zip(texts, answers, strict=True)]


def _calculate(node: ast.expr) -> Fraction:
    """Return the exact value of +, -, * and / on whole numbers."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_calculate(node.left), _calculate(node.right))
    raise SyntaxError("not an expression of numbers")


REWARDS: Mapping[str, Reward] = {
    "exact": exact,
    "numeric": numeric,
    "regex": regex,
    "json": json_equal,
    "sudoku": sudoku,
    "countdown": countdown,
}


def find_reward(name: str) -> Reward:
    """Return a reward of `REWARDS`, or your own: "module:function" or "file.py:function" is imported."""
    source, colon, function = name.rpartition(":")
    if not colon:
        rule, fix = f"be one of {', '.join(REWARDS)}", "Name your own as module:function or file.py:function."
        require(name in REWARDS, "reward", rule, name, fix)
        return REWARDS[name]
    if source.endswith(".py"):
        sys.path.insert(0, str(Path(source).resolve().parent))  # as `python file.py` does, for modules next to it
    try:
        module: Any = SimpleNamespace(**runpy.run_path(source)) if source.endswith(".py") else import_module(source)
        reward: Reward = getattr(module, function)
    except Exception as error:  # your code may raise anything
        raise ValueError(f"reward must be importable, got {name!r} ({type(error).__name__}: {error}).") from error
    require(callable(reward), "reward", "be a function", name)
    return reward
