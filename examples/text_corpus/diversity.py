"""Measure how varied texts are: distinct runs of words, and sentences that occur more than once.

    python examples/text_corpus/diversity.py runs/corpus/parts/*.txt

Each file is one kind of text, with a form feed between documents. All kinds are measured on equally many words, because
repetition grows with the amount of text.
"""

import argparse
import re
from collections import Counter
from pathlib import Path

_WORD = re.compile(r"\w+(?:'\w+)*|<[^>\s]+>|[^\w\s]")
_END = re.compile(r"(?<=[.!?])[\"']?\s+|\n+|\f")


def sample(text: str, num_words: int) -> list[list[str]]:
    """Return the words of whole documents from equal steps through the text, `num_words` in all or a little more."""
    documents = text.split("\f")
    order = sorted(range(len(documents)), key=lambda number: (number * 0.6180339887) % 1)
    chosen, count = [], 0
    for number in order:
        words = _WORD.findall(documents[number])
        chosen.append(words)
        count += len(words)
        if count >= num_words:
            break
    return chosen


def count_distinct(documents: list[list[str]], length: int) -> int:
    """Return how many different runs of `length` words the documents have."""
    return len({hash(tuple(words[at : at + length])) for words in documents for at in range(len(words) - length + 1)})


def repeated_share(text: str) -> float:
    """Return the share of sentences, of four words or more, that the text repeats exactly."""
    counts = Counter(sentence for sentence in _END.split(text) if sentence.count(" ") >= 3)
    return sum(count for count in counts.values() if count > 1) / max(1, counts.total())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--words", type=int, default=500_000, help="measure this many words of each (%(default)s)")
    args = parser.parse_args()
    print(f"{'distinct runs per million words':34} {'4 words':>9} {'8 words':>9} {'repeated sentences':>20}")
    for path in args.files:
        documents = sample(path.read_text("utf-8"), args.words)
        scale = 1e6 / sum(map(len, documents))
        text = "\f".join(" ".join(words) for words in documents)
        runs = [f"{count_distinct(documents, length) * scale:9,.0f}" for length in (4, 8)]
        print(f"{path.stem:34} {runs[0]} {runs[1]} {repeated_share(text):19.1%}")
