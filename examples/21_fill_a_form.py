"""Fill a form about a story, live in the terminal: every draft that you see is already a valid form.

The form is a regular expression. Its blanks accept only names and things of the story. The script prints the text of
each blank. The shipped model is small and learnt stories, not questions. It finds the name, and the home in some
stories.

    python examples/21_fill_a_form.py
    python examples/21_fill_a_form.py --story "Once upon a time a boy called Ben lived in a tower. He had a blue kite."
"""

import argparse
import re

import torch

import dgemma
from dgemma.view import LiveView

STORY = "Once upon a time there was a fox named Max. He lived in a small house near the river, and he was happy."
FORM = {"name": "\n\nThen ", "home": " lived in the "}
COMMON = {"a", "the", "in", "of", "to", "and", "was", "had", "she", "he", "her", "his", "there", "once", "upon", "time"}
COMMON |= {"near", "called", "named", "lived"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--story", default=STORY)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model = dgemma.DiffusionGemma.from_pretrained("dgemma/text", dtype=torch.float32).eval()
    tokenizer = dgemma.Tokenizer.from_pretrained("dgemma/text")
    words = "|".join(COMMON)
    runs = re.split(rf"\W*\b(?:{words})\b\W*|[^\w ]+\s*", options.story, flags=re.IGNORECASE)
    parts = [run.split()[at:] for run in runs for at in range(len(run.split()))]  # "small village" and "village"
    phrases = dict.fromkeys(" ".join(part) for part in parts)
    names = [phrase for phrase in phrases if phrase[0].isupper()]
    things = [phrase for phrase in phrases if phrase[0].islower()]
    if not (names and things):
        parser.error(f"--story must have a name and a thing that the form can take, got {options.story!r}")
    blanks = [f"({'|'.join(names if field == 'name' else things)})" for field in FORM]
    pattern = "".join(re.escape(text) + blank for text, blank in zip(FORM.values(), blanks, strict=True)) + r"\."
    constraint = dgemma.Regex(pattern, tokenizer)
    prompt = tokenizer.encode_batch([options.story]).tokens
    with LiveView(tokenizer, prefix=options.story) as view:
        out = dgemma.generate(
            model,
            prompt,
            constraint=constraint,
            temperature=0.3,
            steps=12,
            max_new_tokens=64,
            seed=options.seed,
            on_step=view,
        )
    found = re.fullmatch(pattern, tokenizer.decode(out.new_tokens[0]))
    assert found is not None
    for field, word in zip(FORM, found.groups(), strict=True):
        print(f"{field:>6}: {word}")


if __name__ == "__main__":
    main()
