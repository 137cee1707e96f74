"""Typed decisions with the shipped models: probabilities of answers, calibrated, with abstention, and joint answers.

The text model decides which pronoun was left out, in sentences of books that it has not read. A temperature is fitted
to the first half. In the second half the model abstains where it is not sure. Then the Sudoku model answers for four
cells that have two solutions. Its independent answers rarely form a solution, and its joint answers almost always do.

    python examples/22_decisions.py --rows 300
"""

import argparse
import itertools
import math
import re
from pathlib import Path

import torch

import dgemma
from dgemma.data import sudoku

PRONOUNS = [" he", " she", " it", " they", " I", " you", " we"]
GRID = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"
CELLS = (48, 50, 66, 68)  # in two rows, two columns and two boxes
BOOKS = Path(dgemma.__file__).parent / "assets" / "text" / "held_out.txt"


def decide_pronouns(num_rows: int) -> None:
    model = dgemma.DiffusionGemma.from_pretrained("dgemma/text", dtype=torch.float32).eval()
    tokenizer = dgemma.Tokenizer.from_pretrained("dgemma/text")
    slot, text = dgemma.Slot(PRONOUNS, name="pronoun"), BOOKS.read_text()
    found = list(re.finditer("|".join(rf"{pronoun}\b" for pronoun in PRONOUNS), text))
    chosen = [at for at in found if at.start() > 400 and "\f" not in text[at.start() - 400 : at.end() + 100]]
    chosen = chosen[:: max(1, len(chosen) // num_rows)][:num_rows]
    # A generator: rows are made as they are needed, so there may be any number of them.
    templates = ([text[at.start() - 400 : at.start()], slot, text[at.end() : at.end() + 100]] for at in chosen)
    answers = list(dgemma.decide_many(model, templates, tokenizer=tokenizer))
    truths = [[at[0]] for at in chosen]
    half = len(answers) // 2
    temperature = dgemma.calibrate(answers[:half], truths[:half])
    print(f"{half} of {len(answers)} sentences give the temperature {temperature:.2f}. In the others:\n")
    print("threshold  answered  correct")
    for threshold in (0.0, 0.5, 0.8, 0.95):
        num_right = num_answered = 0
        for answer, (truth,) in zip(answers[half:], truths[half:], strict=True):
            law = answer["pronoun"].probabilities ** (1 / temperature)
            if law.max() / law.sum() >= threshold:
                num_answered += 1
                num_right += PRONOUNS[int(law.argmax())] == truth
        share = f"{num_right / num_answered:9.0%}" if num_answered else f"{'-':>9}"
        print(f"{threshold:9.2f}{num_answered / max(1, len(answers) - half):10.0%}{share}")
    at, law = chosen[-1], answers[-1]["pronoun"].probabilities.tolist()
    best = sorted(zip(law, PRONOUNS, strict=True), reverse=True)[:3]
    sentence = " ".join(f"{text[at.start() - 60 : at.start()]} ___{text[at.end() : at.end() + 40]}".split())
    print(f"\n...{sentence}...\n" + ", ".join(f"{pronoun.strip()} {p:.0%}" for p, pronoun in best))


def decide_cells() -> None:
    """Ask for four cells in which 9 and 4 can change places. All other cells are given."""
    model = dgemma.DiffusionGemma.from_pretrained("dgemma/sudoku", dtype=torch.float32).eval()
    grid = torch.as_tensor(sudoku.parse(GRID))[0].long()
    digits, puzzle = grid[list(CELLS[:2])].tolist(), grid.clone()
    puzzle[list(CELLS)] = 0
    options = sudoku.canvas_tokens(grid)[list(CELLS[:2])].tolist()
    slot = dgemma.Slot([[token] for token in options])
    on_canvas = (slot if token < 0 else [token] for token in sudoku.canvas_tokens(puzzle).tolist())
    template = [sudoku.prompt_tokens(puzzle).tolist(), *on_canvas]
    apart, jointly = (dgemma.slots(model, template, mode=mode) for mode in ("independent", "joint"))
    print("\nfour cells of a Sudoku  independent     joint")
    for combination in itertools.product(range(2), repeat=4):
        chosen = zip(apart.answers, combination, strict=True)
        alone = math.prod(float(answer.probabilities[index]) for answer, index in chosen)
        together = float(jointly.joint[combination])
        is_solution = combination in ((0, 1, 1, 0), (1, 0, 0, 1))
        written = " ".join(str(digits[index]) for index in combination)
        if is_solution or max(alone, together) > 0.05:
            print(f"{written:24}{alone:11.1%}{together:10.1%}{'  a solution' if is_solution else ''}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=60, help="sentences (%(default)s)")
    args = parser.parse_args()
    if args.rows < 2:
        parser.error(f"--rows must be at least 2, for a half with known answers, got {args.rows}")
    decide_pronouns(args.rows)
    decide_cells()
