"""The bytes that each token of a tokenizer stands for."""

import json
import re
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import tokenizers

from dgemma.checkpoint.tokenizer import ByteTokenizer, Tokenizer
from dgemma.checks import require

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_known: "WeakKeyDictionary[Any, list[bytes | None]]" = WeakKeyDictionary()


def token_texts(tokenizer: Any) -> list[bytes | None]:
    """Return the bytes of every token id; None for special tokens, which have no text.

    tokenizer: from dgemma, from transformers (a fast one), or from the tokenizers library.
    """
    try:
        if tokenizer not in _known:
            _known[tokenizer] = _read(tokenizer)
        return _known[tokenizer]
    except TypeError:  # not hashable, or without weak references
        return _read(tokenizer)


def marker_id(tokenizer: Any, text: str) -> int | None:
    """Return the id of a special token by its text, None if the tokenizer has none."""
    return tokenizer.token_id(text) if isinstance(tokenizer, Tokenizer) else _pieces(tokenizer).token_to_id(text)


def _read(tokenizer: Any) -> list[bytes | None]:
    if isinstance(tokenizer, ByteTokenizer):
        first = tokenizer.first_byte
        return [None] * first + [bytes([byte]) for byte in range(tokenizer.vocab_size - first)]
    pieces = _pieces(tokenizer)
    decoders = list(_decoders(json.loads(pieces.decoder.__getstate__()))) if pieces.decoder is not None else []
    kinds = {decoder["type"] for decoder in decoders}
    if not kinds or not kinds <= {"ByteLevel", "ByteFallback", "Fuse", "Replace", "Metaspace", "Strip"}:
        rule, fix = "decode every token independently", "Use a byte-level or SentencePiece tokenizer."
        require(False, "A constraint's tokenizer", rule, sorted(kinds), fix)
    vocabulary = pieces.get_vocab(with_added_tokens=True)
    texts: list[bytes | None] = [None] * (max(vocabulary.values()) + 1)
    byte_of = _byte_of_characters() if "ByteLevel" in kinds else None
    for text, token in vocabulary.items():
        texts[token] = _bytes_of(text, byte_of, decoders)
    for token, added in pieces.get_added_tokens_decoder().items():
        texts[token] = None if added.special else added.content.encode()
    return texts


def _pieces(tokenizer: Any) -> tokenizers.Tokenizer:
    pieces = getattr(tokenizer, "backend_tokenizer", tokenizer)  # of dgemma and of transformers
    rule = "come from dgemma, from transformers (a fast one) or from the tokenizers library"
    require(isinstance(pieces, tokenizers.Tokenizer), "A constraint's tokenizer", rule, type(tokenizer))
    return pieces


def _decoders(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _decoders(part)
    else:
        yield decoder


def _bytes_of(text: str, byte_of: dict[str, int] | None, decoders: list[dict[str, Any]]) -> bytes | None:
    if byte_of is not None:
        return bytes(byte_of[char] for char in text) if all(char in byte_of for char in text) else None
    found = _BYTE_TOKEN.fullmatch(text)
    if found is not None and any(decoder["type"] == "ByteFallback" for decoder in decoders):
        return bytes([int(found[1], 16)])
    for decoder in decoders:
        if decoder["type"] == "Replace" and "String" in decoder["pattern"]:
            text = text.replace(decoder["pattern"]["String"], decoder["content"])
        elif decoder["type"] == "Metaspace":
            text = text.replace(decoder["replacement"], " ")
    return text.encode()


def _byte_of_characters() -> dict[str, int]:
    """The byte of each character in a byte-level vocabulary: printable Latin-1 as itself, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}
