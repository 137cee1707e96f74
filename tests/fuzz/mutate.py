"""Random damage: to bytes, to JSON, and to the header of a safetensors file."""

import copy
import json
import math
import random
import struct
from typing import Any

CONTROL = "\x1b]0;title\x07\x9b2J\u202e"
ODD_JSON: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 2**31, 2**62, 2**64, 10**30, -(2**63), 0.5, -0.5, 1e308, 1e-300),
    *(math.nan, math.inf, "", "x", "O", "object", "uint8", "float32", "../../etc/passwd", "/dev/zero", "a" * 3000),
    *(CONTROL, "\ud800", [], {}, [[]], [None], {"": {}}, [1, 2, 3], {"kind": "mask"}, {"class": "os:system"}),
    *([2**40, 2**40], [0, 2**60], [-1], ["x"], {"tensor": "x"}, {"bits": "x", "shape": [2**40]}),
]


def damage_bytes(data: bytes, source: random.Random) -> bytes:
    """Return the bytes with one to three random changes."""
    changed = bytearray(data)
    for _ in range(source.choice((1, 1, 1, 2, 3))):
        kind = source.randrange(8)
        at = (
            source.randrange(len(changed) + 1) if source.random() < 0.5 else source.randrange(min(len(changed), 64) + 1)
        )
        size = source.choice((1, 1, 2, 4, 8, 64))
        if kind == 0 and changed:
            changed[at % len(changed)] ^= 1 << source.randrange(8)
        elif kind == 1:
            del changed[at:]
        elif kind == 2:
            changed[at:at] = source.randbytes(size)
        elif kind == 3:
            changed[at : at + size] = source.randbytes(size)
        elif kind == 4:
            changed[at : at + size] = bytes(size)
        elif kind == 5:
            changed[at : at + size] = b"\xff" * size
        elif kind == 6:
            del changed[at : at + size]
        else:
            changed += changed[at : at + 4 * size]
    return bytes(changed)


def damage_json(value: Any, source: random.Random, *, odd: list[Any] = ODD_JSON) -> Any:
    """Return a deep copy of a JSON value with one to three nodes replaced, removed, added or exchanged."""
    value = json.loads(json.dumps(value))
    for _ in range(source.choice((1, 1, 1, 2, 3))):
        places: list[tuple[Any, Any]] = []
        _list_places(value, places)
        if not places:
            return copy.deepcopy(source.choice(odd))
        holder, key = source.choice(places)
        kind = source.randrange(6)
        if kind <= 2:
            holder[key] = copy.deepcopy(source.choice(odd))
        elif kind == 3:
            del holder[key]
        elif kind == 4 and isinstance(holder, dict):
            holder[source.choice(("", "extra", CONTROL, "step", "kind", "__class__"))] = copy.deepcopy(
                source.choice(odd)
            )
        else:
            other, other_key = source.choice(places)
            holder[key] = json.loads(json.dumps(other.get(other_key) if isinstance(other, dict) else holder[key]))
    return value


def _list_places(value: Any, places: list[tuple[Any, Any]]) -> None:
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            places.append((value, key))
            _list_places(value[key], places)


def dump_json(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", errors="surrogatepass")


def damage_json_file(data: bytes, source: random.Random) -> bytes:
    """Damage a JSON file as a value, or sometimes as bytes."""
    if source.random() < 0.2:
        return damage_bytes(data, source)
    return dump_json(damage_json(json.loads(data), source))


def damage_safetensors(data: bytes, source: random.Random, *, metadata: str | None = None) -> bytes:
    """Damage a safetensors file: its bytes, its header, or JSON inside an entry of its metadata."""
    size = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    kind = source.random()
    if kind < 0.25:
        return damage_bytes(data, source)
    if kind < 0.7 and metadata is not None and metadata in header.get("__metadata__", {}):
        inner = json.loads(header["__metadata__"][metadata])
        header["__metadata__"][metadata] = json.dumps(damage_json(inner, source))
    elif kind < 0.8:
        names = [name for name in header if name != "__metadata__"]
        one, two = source.choice(names), source.choice(names)
        header[one], header[two] = header[two], header[one]
    else:
        header = damage_json(header, source)
    text = dump_json(header)
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body
