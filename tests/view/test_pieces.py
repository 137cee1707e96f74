"""Texts of tokens: whole characters, no control characters, and the widths of terminals."""

import pytest

import dgemma
from dgemma.printing import printable
from dgemma.view.pieces import MASK, STATIC, Pieces, width


def test_a_character_of_several_bytes_is_shown_at_its_first_byte():
    tokenizer = dgemma.ByteTokenizer()
    ids = tokenizer.encode("né語🙂!", bos=False)
    assert Pieces(tokenizer)(ids) == ["n", "é", "", "語", "", "", "🙂", "", "", "", "!"]


def test_invalid_bytes_are_shown_as_symbols_and_leave_their_neighbours_unchanged():
    tokenizer = dgemma.ByteTokenizer()
    lead, tail = tokenizer.encode("é", bos=False)
    first, between, second = Pieces(tokenizer)([lead, *tokenizer.encode("x", bos=False), tail])
    assert between == "x"
    assert first in STATIC
    assert second in STATIC


def test_without_a_tokenizer_ids_are_shown_and_the_mask_is_a_block():
    assert Pieces(None, mask_token=4)([7, 4, 262143]) == ["7", MASK, "262143"]


def test_a_tokenizer_of_another_library_is_refused():
    with pytest.raises(ValueError, match=r"must be a dgemma.Tokenizer or None, got the class dict. Use"):
        Pieces({})


@pytest.mark.parametrize(
    "text",
    ["\x1b[2J", "\x9b2J", "\r", "\x07", "\x7f", "\u2028", "\u2029", "\u202e", "\u2066", "\ud800", "\x00", "\x85"],
    ids=lambda text: f"U+{ord(text[0]):04X}",
)
def test_printable_removes_control_and_direction_characters(text):
    shown = printable(text)
    assert text[0] not in shown
    assert shown.isprintable()
    shown.encode()


def test_printable_keeps_ordinary_text():
    text = "a\tb\nç 語 👍🏽 e\u0301 \u200d"
    assert printable(text) == text


WIDTHS = {"abc": 3, "語": 2, "ｱ": 1, "Ａ": 2, "é": 1, "e\u0301": 1, "\u200b": 0, "🙂": 2, "한": 2, "░": 1}
WIDTHS |= {"\u1112\u1161\u11ab": 2, "\u00ad": 1, "ก็": 1, "\ufe0f": 0}


@pytest.mark.parametrize(("text", "cells"), WIDTHS.items())  # from wcwidth, the table that terminals follow
def test_width_is_the_number_of_terminal_cells(text, cells):
    assert width(text) == cells
