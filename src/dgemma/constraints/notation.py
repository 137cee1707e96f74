"""The notation of values, such as JSON, and patterns of JSON schemas (ECMA-262) as patterns of strings in it."""

import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from dgemma.constraints.patterns import either

Ranges = Sequence[tuple[int, int]]  # of characters, by code
Refuse = Callable[[str], NoReturn]  # with the part of a pattern that cannot be converted

_CODE = r"\\u[0-9A-Fa-f]{4}|\\x[0-9A-Fa-f]{2}|\\[pP]\{\w+\}|\\."
_SET = re.compile(r"\[\^?(?:\\.|[^\]\\])+\]", re.DOTALL)
_PIECES = re.compile(rf"\[\^?(?:\\.|[^\]\\])*(?:\]|\\?\Z)|{_CODE}|\(\?(?:i?:|P?<\w+>)|\(\?|.", re.DOTALL)
_SET_PIECES = re.compile(rf"{_CODE}|.", re.DOTALL)
# ECMA-262, Python and Rust differ on character classes. Here a class has the characters that all three include. A
# negated class excludes every character that any of the three includes.
_CLASSES = {r"\d": "0-9", r"\w": "0-9A-Za-z_", r"\s": " "}
_NEGATED = {r"\d": r"\d", r"\w": r"0-9A-Za-z_\x80-\U0010ffff", r"\s": r"\s\x1c-\x1f\ufeff"}
_CONTROLS = {"\\t": 9, "\\n": 10, "\\v": 11, "\\f": 12, "\\r": 13}
_BREAKS = ((10, 10), (13, 13), (0x2028, 0x2029))


def _escape_json(text: str) -> str:
    return re.escape(json.dumps(text, ensure_ascii=False)[1:-1])


def _quote_json(name: str) -> str:
    return f'"{_escape_json(name)}"'


def _spell(ranges: Ranges) -> str:
    """Spell ranges of characters as the content of a set."""
    return "".join("-".join(map(_spell_code, sorted({first, last}))) for first, last in ranges)


def _spell_code(code: int) -> str:
    if 0x20 <= code < 0x7F:
        return re.escape(chr(code))
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


@dataclass(frozen=True, kw_only=True)
class Notation:
    """The syntax of values: JSON by default."""

    quote: str = '"'
    special: Ranges = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x7F, 0x9F))  # in a string only as escapes
    escapes: tuple[str, ...] = (r'\\["\\/bft]', r"\\[nr]")  # the second has the line breaks
    text: str | None = None  # pattern of a string of any length; None means `char` repeated
    escape: Callable[[str], str] = _escape_json  # a string's characters, between the quotes
    key: Callable[[str], str] = _quote_json
    null: str = "null"
    space: str = "[ ]?"
    depth: int = 3  # of a schema that refers to itself

    @property
    def char(self) -> str:
        """One character of a string."""
        return f"(?:{'|'.join((f'[^{_spell(self.special)}]', *self.escapes))})"

    @property
    def dot(self) -> str:
        """One character of a string that is not a line break."""
        return f"(?:{'|'.join((f'[^{_spell((*self.special, *_BREAKS))}]', *self.escapes[:1]))})"

    def search(self, pattern: str, refuse: Refuse) -> str:
        """Convert an ECMA-262 pattern to the pattern of a string in this notation, without its quotes.

        No set matches a character that needs an escape.

        Example: `Notation().search("^[a-c]$", refuse)` is "(?:[a-c])".
        """
        special, any_char, out, previous = _spell(self.special), self.char, "", ""
        body = pattern.removeprefix("^")
        tail = re.search(r"(?<!\\)(?:\\\\)*\$$", body)
        before = "" if pattern.startswith("^") else f"{any_char}*"
        after = f"{any_char}*" if tail is None else ""
        pieces = _PIECES.findall(body if tail is None else body[:-1])
        depths = [0, *itertools.accumulate(piece.startswith("(") - (piece == ")") for piece in pieces)]
        if min(depths) < 0 or depths[-1] > 0:
            refuse("unpaired brackets")  # together with what is around them, they could have another meaning
        for piece in pieces:
            if piece[0] == "[":
                out += self._set(piece, refuse)
            elif piece in _CLASSES:
                out += f"[{_CLASSES[piece]}]"
            elif piece.lower() in _CLASSES:
                out += f"[^{_NEGATED[piece.lower()]}{special}]"
            elif _is_property(piece):
                out += f"[{piece}&&[^{special}]]"
            elif piece == ".":
                out += self.dot
            elif piece in ("^", "$"):
                refuse("inner anchors")
            elif piece == "(?":
                refuse("flags and look-around")
            elif piece == "+" and previous in ("*", "+", "?", "}"):
                refuse("possessive repetitions")
            elif piece in tuple("()|*+?{}") or piece.startswith("(?"):
                out += piece
            else:
                code = _code_of(piece, refuse)
                if not self._plain([(code, code)]):
                    refuse("quotes and escapes")
                out += _spell([(code, code)])
            previous = piece
        return f"{before}(?:{out}){after}"

    def _set(self, text: str, refuse: Refuse) -> str:
        """A pattern for a set such as "[^a-z]", with those of its characters that need no escape."""
        is_negated = text.startswith("[^")
        if _SET.fullmatch(text) is None:
            refuse("empty or open brackets")  # Python reads [] differently
        pieces = _SET_PIECES.findall(text[1 + is_negated : -1])
        named, properties, ranges, at = "", list[str](), list[tuple[int, int]](), 0
        while at < len(pieces):
            piece, following = pieces[at], pieces[at + 1 : at + 3]
            at += 1
            if piece in _CLASSES:
                named += (_NEGATED if is_negated else _CLASSES)[piece]
            elif _is_property(piece):
                properties.append(piece)
            elif piece.lower() in _CLASSES:
                refuse(f"{piece} inside brackets")
            else:
                first = last = _code_of(piece, refuse)
                if len(following) == 2 and following[0] == "-" and following[1] not in _CLASSES:
                    last = _code_of(following[1], refuse)
                    at += 2
                if last < first:
                    refuse("ranges that end before they begin")
                ranges.append((first, last))
        special = _spell(self.special)
        if is_negated:
            return f"[^{named}{''.join(properties)}{_spell(ranges)}{special}]"
        plain = named + _spell(self._plain(ranges))
        ways = [f"[{plain}]"] * bool(plain) + [f"[{name}&&[^{special}]]" for name in properties]
        return str(either(ways)) if ways else refuse("quotes and escapes")

    def _plain(self, ranges: Ranges) -> Ranges:
        """Ranges without the characters that need an escape."""
        for low, high in self.special:
            halves = [
                half for first, last in ranges for half in ((first, min(last, low - 1)), (max(first, high + 1), last))
            ]
            ranges = sorted({(first, last) for first, last in halves if first <= last})
        return ranges


def _is_property(piece: str) -> bool:
    return piece.startswith((r"\p{", r"\P{"))


def _code_of(piece: str, refuse: Refuse) -> int:
    """The code of a character that a pattern spells, such as "a", "\\." or "\\x20"."""
    if _is_property(piece):
        refuse(f"ranges to {piece}")
    if len(piece) > 2:
        code = int(piece[2:], 16)
        return code if not 0xD800 <= code < 0xE000 else refuse(piece)
    if piece in _CONTROLS:
        return _CONTROLS[piece]
    char = piece.removeprefix("\\")
    return ord(char) if char and (char == piece or not char.isalnum()) else refuse(piece)
