"""Tokens as pieces of text: one string per position, safe to display, with its width in cells."""

import unicodedata
from collections.abc import Sequence
from functools import lru_cache

from dgemma.checkpoint.tokenizer import Tokenizer
from dgemma.checks import require
from dgemma.printing import printable
from dgemma.view.board import Board

MASK = "░"
STATIC = "▖▗▘▝▚▞"  # for tokens that have no text of their own
_BROKEN = "\ufffd"  # the decoded text of an incomplete character
_LONGEST_CHARACTER = 4  # bytes of UTF-8
_SOFT_HYPHEN = "\u00ad"


class Pieces:
    """Converts each token id to a text; without a tokenizer, to the id itself. The mask token is ░.

    If a character spans several tokens, the first has its text and the others are empty. Invalid bytes are shown as ▖
    to ▞.

    Example: `Pieces(ByteTokenizer())(ByteTokenizer().encode("é!", bos=False))` is `["é", "", "!"]`.
    """

    def __init__(self, tokenizer: Tokenizer | Board | None, *, mask_token: int | None = None) -> None:
        fits = tokenizer is None or isinstance(tokenizer, Tokenizer | Board)
        fix = "Use dgemma.Tokenizer.from_pretrained(folder)."
        require(fits, "tokenizer", "be a dgemma.Tokenizer or None", type(tokenizer), fix)
        self.tokenizer = tokenizer
        self._known: dict[int, str] = {} if mask_token is None else {mask_token: MASK}
        self._broken: set[int] = set()

    def __call__(self, tokens: Sequence[int]) -> list[str]:
        texts = [self.one(token) for token in tokens]
        start = 0
        while start < len(tokens):
            start += self._join(tokens[start : start + _LONGEST_CHARACTER], texts, start)
        return texts

    def one(self, token: int) -> str:
        """Return the text of a token without context."""
        if token not in self._known:
            text = str(token) if self.tokenizer is None else self.tokenizer.decode([token], skip_special=False)
            if _BROKEN in text:
                self._broken.add(token)
                text = text.replace(_BROKEN, STATIC[token % len(STATIC)])
            self._known[token] = printable(text) or f"⟨{token}⟩"
        return self._known[token]

    def _join(self, tokens: Sequence[int], texts: list[str], start: int) -> int:
        """Merge the first tokens if they form one character; return their number."""
        for length in range(1, len(tokens) + 1):
            if tokens[length - 1] not in self._broken or self.tokenizer is None:
                break
            whole = self.tokenizer.decode(tokens[:length], skip_special=False)
            if _BROKEN not in whole:
                texts[start : start + length] = [printable(whole), *[""] * (length - 1)]
                return length
        return 1


def width(text: str) -> int:
    """Return the terminal cells of a printable text: 2 for wide characters, 0 for combining marks.

    Example: `width("né語")` is 4, however the é is composed.
    """
    return len(text) if text.isascii() else sum(map(_width, text))


@lru_cache(maxsize=4096)
def _width(character: str) -> int:
    if character == _SOFT_HYPHEN:
        return 1
    # Hangul vowels and finals combine with their initial.
    if unicodedata.category(character) in ("Mn", "Me", "Cf") or "\u1160" <= character <= "\u11ff":
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
