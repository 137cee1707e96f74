"""The Sudoku command checks every answer and never changes clues."""

import json

import pytest

from data.test_sudoku import PUZZLE, SOLUTION


def test_a_solution_is_recognised(command, solver):
    """One cell is blank. The answer is right for seeds that write 5, and wrong for the others."""
    answers = {}
    for seed in range(40):
        almost = "0" + SOLUTION[1:]
        words = ("--steps", "1", "--sampler", "ancestral", "--seed", seed)
        ran = command("sudoku", "-m", solver, *words, almost)
        answers[ran.out[0]] = ran
        assert ran.out[1:] == SOLUTION[1:] + "\n"
        if "5" in answers and len(answers) > 1:
            break
    for digit, ran in answers.items():
        right = digit == "5"
        assert ran.code == (0 if right else 1)
        assert ran.err.startswith("Solved, in 1 step, 1 blank." if right else "Wrong: the answer breaks a rule")
    assert "5" in answers
    assert len(answers) > 1


def test_white_space_and_all_symbols_for_blanks_are_accepted(command, solver):
    rows = [PUZZLE[i : i + 9] for i in range(0, 81, 9)]
    drawn = "\n".join([rows[0].replace("0", "."), rows[1].replace("0", "_"), rows[2].replace("0", " * "), *rows[3:]])
    ran = command("sudoku", "-m", solver, "--steps", "1", "--json", "-", stdin=drawn.encode())
    assert json.loads(ran.out)["puzzle"] == PUZZLE


def test_a_new_puzzle_has_the_requested_clues_and_depends_on_the_seed(command, solver):
    def puzzle(seed):
        ran = command("sudoku", "-m", solver, "--steps", "1", "--json", "--givens", "33", "--seed", seed)
        return json.loads(ran.out)["puzzle"]

    first = puzzle(1)
    assert 81 - first.count("0") == 33
    assert puzzle(1) == first
    assert puzzle(2) != first


def test_more_than_one_solution_is_reported(command, solver):
    # Two rows of the solution are blank, so some of their digits can be swapped.
    ran = command("sudoku", "-m", solver, "--steps", "1", "0" * 27 + SOLUTION[27:])
    assert "The puzzle has more than one solution." in ran.err


@pytest.mark.parametrize("noise", ["mask", "uniform"])
def test_clues_that_the_model_writes_itself_are_checked_too(command, solver, noise):
    ran = command("sudoku", "-m", solver, "--steps", "1", "--write-clues", "--noise", noise, SOLUTION)
    assert ran.code == 1
    assert ran.err.startswith("Wrong")


def test_a_wrong_answer_is_retried_up_to_the_limit(command, solver, tmp_path):
    words = ("sudoku", "-m", solver, "--steps", "1", PUZZLE)
    assert command(*words).err.endswith(" --retry 3 would try again.\n")
    ran = command(*words, "--retry", "2", "--json", "--html", tmp_path / "run.html")
    found = json.loads(ran.out)
    assert ran.code == 1
    assert (found["right"], found["attempts"], found["steps"]) == (False, 3, 3)
    assert set(found["solution"]) <= set("123456789")
    assert all(clue in ("0", answer) for clue, answer in zip(PUZZLE, found["solution"], strict=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-2.html", "run-3.html", "run.html"]
