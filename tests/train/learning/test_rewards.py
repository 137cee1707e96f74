"""Rewards, and the problems that they judge."""

import json

import pytest
import torch

import dgemma
from dgemma.train.learning import Problems
from dgemma.train.learning.rewards import countdown, exact, json_equal, numeric, regex, sudoku

SOLUTION = "".join(str((3 * row + row // 3 + column) % 9 + 1) for row in range(9) for column in range(9))


def test_exact_ignores_white_space_at_the_ends_only():
    assert exact([" 42\n", "4 2", "42.", ""], ["42", "42", 42, ""]) == [1.0, 0.0, 0.0, 1.0]


def test_numeric_compares_the_last_number_exactly():
    texts = ["3 and 4 make 7", "7.0", "-7", "1,234", "0.30", "none", "7 or 8"]
    assert numeric(texts, [7, 7, "-7", 1234, "0.3", 7, 7]) == [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    # A subtraction, powers of ten as Python prints them, and more digits than Python reads.
    texts = ["12-7", "0.00001", "-5", "1e22", "9" * 5000]
    assert numeric(texts, [7, 1e-5, 1e-5, 1e22, 9]) == [1.0, 1.0, 0.0, 1.0, 0.0]


def test_regex_matches_the_whole_text():
    assert regex(["17 May", "17 May 2020"], [r"\d+ [A-Z][a-z]+"] * 2) == [1.0, 0.0]


def test_json_compares_values_and_refuses_what_is_not_json():
    texts = ['{"b": 2, "a": 1}', "[1, 2", '"x"', "null", '"Paris"', "true", "[1.0]"]
    answers = [{"a": 1, "b": 2}, [1, 2], '"x"', "not json", "Paris", 1, "[1]"]
    assert json_equal(texts, answers) == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    with pytest.raises(ValueError, match="json_equal answer must be a value of JSON"):
        json_equal(["1"], [{1}])


def test_sudoku_checks_rows_columns_boxes_and_clues():
    puzzle = "".join("." if place % 3 else digit for place, digit in enumerate(SOLUTION))
    other = SOLUTION.translate(str.maketrans("12", "21"))  # valid, but with other clues
    swapped = SOLUTION[9:18] + SOLUTION[:9] + SOLUTION[18:]  # valid without clues
    latin = "".join(str((row + column) % 9 + 1) for row in range(9) for column in range(9))  # boxes repeat digits
    texts = [SOLUTION, other, swapped, swapped, latin, SOLUTION[:-1]]
    assert sudoku(texts, [puzzle, puzzle, puzzle, "0" * 81, "0" * 81, puzzle]) == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]


def test_countdown_calculates_exactly_and_uses_each_number_once():
    answer = {"numbers": [2, 5, 6], "target": 20}
    texts = [
        "(6 - 2) * 5",
        "(6-2)*5 = 20",
        "5*2*2",
        "6/0",
        "6**2",
        "__import__('os')",
        "20",
        "(6 - 2 * 5",
        "(6-2)*5 = 7",
    ]
    assert countdown(texts, [answer] * len(texts)) == [1.0, 1.0, *[0.0] * 7]
    answers = [{"numbers": [6, 5, 5], "target": 6}, {"numbers": [1, 3, 3], "target": 1}]
    assert countdown(["6/5*5", "1/3*3"], answers) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("reward", "answer"), [(numeric, None), (regex, "("), (regex, 5), (sudoku, "123"), (countdown, '{"target": 3}')]
)
def test_an_answer_that_no_text_can_have_is_refused(reward, answer):
    with pytest.raises(ValueError, match=f"^{reward.__name__} answer must (be|have) .*, got "):
        reward([""], [answer])


def test_every_epoch_has_every_prompt_once_and_updates_share_prompts():
    problems = Problems(prompts=[[n] for n in range(7)], answers=list(range(7)), batch_size=3, updates=2)
    rows = [problems(step, range(3)) for step in range(14)]
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        assert torch.equal(first.tokens, second.tokens)
        assert torch.equal(first.text, second.text)
    seen = torch.cat([batch.tokens[:, 0] for batch in rows[::2]]).tolist()
    assert sorted(seen[:7]) == sorted(seen[7:14]) == sorted(seen[14:]) == list(range(7))
    assert seen[:7] != seen[7:14]
    numbers = torch.cat([batch.text for batch in rows[::2]])
    assert problems.places(numbers) == seen
    seeds = problems.run_seeds(numbers, 4)
    assert len(set(seeds.flatten().tolist())) == seeds.numel()
    assert torch.equal(problems(4, range(1, 3)).tokens, rows[4].tokens[1:])


def test_problems_are_read_from_json_lines(tmp_path):
    path, tokenizer = tmp_path / "sums.jsonl", dgemma.ByteTokenizer()
    lines = [{"prompt": "2+3=", "answer": 5}, {"prompt": "10+3=", "answer": "13"}]
    path.write_text("\n".join(map(json.dumps, lines)))
    problems = Problems.read(path, tokenizer, batch_size=2)
    assert problems.answers == [5, "13"]
    batch = problems(0, range(2))
    texts = [tokenizer.decode(row[:length]) for row, (_, length) in zip(batch.tokens, batch.spans, strict=True)]
    assert sorted(texts) == ["10+3=", "2+3="]
    path.write_text('{"prompt": "2+3="}')
    with pytest.raises(
        ValueError, match=r'sums.jsonl:1 must be an object with "answer" and either "prompt" or "messages"'
    ):
        Problems.read(path, tokenizer, batch_size=1)
    path.write_text('{"messages": [], "answer": 5}')
    with pytest.raises(ValueError, match=r"sums.jsonl:1: Tokenizer.chat messages must hold at least one turn"):
        Problems.read(path, tokenizer, batch_size=1)
