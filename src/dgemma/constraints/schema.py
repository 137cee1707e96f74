"""JSON schemas as regular expressions, in the syntax of JSON or of another notation such as tool calls.

Every text that matches is valid under the schema. Keywords that a regular expression cannot express are refused, never
ignored. Not every valid value matches: properties come in their declared order, and no others are added.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

from dgemma.checks import require, show

Schema = Any  # a dictionary, True or False
Ranges = Sequence[tuple[int, int]]  # of characters, by code

_NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"})
_ANNOTATIONS = _NOTES | {"discriminator", "$schema", "$id", "$defs", "definitions"}
_KEYWORDS = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems", "uniqueItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "boolean": frozenset(),
    "null": frozenset(),
}
_MOST_CHARS = 10_000_000  # of the patterns of all parts of a schema
_COMBINERS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_DAY = "(?:0[1-9]|1[0-9]|2[0-8])"
_DATE = rf"[0-9]{{4}}-(?:(?:0[1-9]|1[0-2])-{_DAY}|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_FORMATS = {
    "date": _DATE.replace("[0-9]{4}", "[12][0-9]{3}", 1),
    "time": _TIME,
    "date-time": f"{_DATE.replace('[0-9]{4}', '[12][0-9]{3}', 1)}T{_TIME}",
    "uuid": "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "email": r"[a-z0-9_+-]+(?:\.[a-z0-9_+-]+)*@[a-z0-9-]+(?:\.[a-z0-9-]+)+",
}
_INTEGER = "-?(?:0|[1-9][0-9]*)"
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
_MOST_DIGITS, _MOST_DECIMALS = 15, 12  # float64 tells numbers of 15 digits apart, so rounding moves none to a bound


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


def schema_pattern(schema: Schema, notation: Notation) -> str:
    """Return a regular expression of the values that are valid under a schema, in a notation.

    Example: `schema_pattern({"type": "boolean"}, Notation())` is "(?:true|false)".
    """
    try:
        with refuse_deep("JsonSchema.schema"):
            pattern = _Compiler(schema, notation).value(schema, "#", ())
    except (TypeError, AttributeError, ArithmeticError, LookupError) as error:
        raise ValueError(f"JsonSchema.schema must be a JSON schema, got {show(schema)}: {error}.") from None
    if pattern is None:
        raise ValueError("JsonSchema.schema must have a valid value, got a schema that no value fits.")
    return pattern


@contextmanager
def refuse_deep(owner: str) -> Iterator[None]:
    """Raise a ValueError in place of a RecursionError.

    Example: `with refuse_deep("JsonSchema.schema"): json.loads(text)`.
    """
    try:
        yield
    except RecursionError:
        raise ValueError(f"{owner} must nest less deep, got one that Python cannot follow. Lower its depth.") from None


@dataclass
class Size:
    """The characters of all patterns of a schema or grammar, which are limited.

    Example: `Size("Grammar.grammar").add(len(pattern))`.
    """

    owner: str
    num_chars: int = 0

    def add(self, num_chars: int) -> None:
        """Refuse a source whose nested references or optional properties make its pattern too long."""
        self.num_chars += num_chars
        rule, fix = f"expand to at most {_MOST_CHARS} characters of patterns", "Use fewer references."
        require(self.num_chars <= _MOST_CHARS, self.owner, rule, self.num_chars, fix)


@dataclass
class _Compiler:
    root: Schema
    notation: Notation
    size: Size = field(default_factory=lambda: Size("JsonSchema.schema"))

    def value(self, schema: Schema, where: str, refs: tuple[str, ...]) -> str | None:
        """A pattern for the values of a schema; None if there are none. `refs` are the references being expanded."""
        pattern = self._value(schema, where, refs)
        self.size.add(100 + len(pattern or ""))
        return pattern

    def _value(self, schema: Schema, where: str, refs: tuple[str, ...]) -> str | None:
        if schema is True or schema == {}:
            return self._anything()
        if schema is False:
            return None
        if not isinstance(schema, Mapping):
            _refuse("hold schemas", schema, where)
        combiner = next((name for name in _COMBINERS if name in schema), None)
        if combiner is not None:
            rest = {"type"} if combiner in ("const", "enum") else set()
            self._refuse_others(schema, where, {combiner} | rest)
            return getattr(self, f"_{combiner.removeprefix('$').lower()}")(schema, where, refs)
        types = _types_of(schema)
        if types is None:
            self._refuse_others(schema, where, {"type"})
            _refuse("have a known type", schema, where)
        self._refuse_others(schema, where, {"type"}.union(*(_KEYWORDS[kind] for kind in types)))
        return either([getattr(self, f"_{kind}")(schema, where, refs) for kind in types])

    def _refuse_others(self, schema: Mapping[str, Any], where: str, known: set[str]) -> None:
        unknown = sorted(schema.keys() - known - _ANNOTATIONS)
        if unknown:
            fix = "Remove it, and check the value afterwards."
            _refuse("use keywords that a regular expression can express", unknown[0], where, fix)

    def _ref(self, schema: Mapping[str, Any], where: str, refs: tuple[str, ...]) -> str | None:
        name = schema["$ref"]
        target = self._target(name)
        if not str(name).startswith("#") or target is None:
            _refuse("refer only to parts of itself (#/...)", {"$ref": name}, where)
        if refs.count(name) >= self.notation.depth:
            return None
        return self.value(target, name, (*refs, name))

    def _const(self, schema: Mapping[str, Any], where: str, refs: tuple[str, ...]) -> str | None:
        return self._enum({**schema, "enum": [schema["const"]]}, where, refs)

    def _enum(self, schema: Mapping[str, Any], where: str, refs: tuple[str, ...]) -> str | None:
        types = _types_of(schema) if "type" in schema else tuple(_KEYWORDS)
        fitting = [value for value in schema["enum"] if types is None or _kind_of(value) & set(types)]
        return either([self._literal(value) for value in fitting])

    def _anyof(self, schema: Mapping[str, Any], where: str, refs: tuple[str, ...]) -> str | None:
        return either([self.value(one, f"{where}/anyOf/{i}", refs) for i, one in enumerate(schema["anyOf"])])

    def _oneof(self, schema: Mapping[str, Any], where: str, refs: tuple[str, ...]) -> str | None:
        options = schema["oneOf"]
        for i, one in enumerate(options):
            for j in range(i):
                if not self._disjoint(one, options[j]):
                    fix = "Use anyOf, or give each a property with its own const."
                    _refuse("have oneOf with options that exclude each other", [options[j], one], where, fix)
        return self._anyof({"anyOf": options}, where, refs)

    def _allof(self, schema: Mapping[str, Any], where: str, refs: tuple[str, ...]) -> str | None:
        if len(schema["allOf"]) != 1:
            _refuse("have allOf with one schema", schema["allOf"], where, "Merge the schemas into one.")
        return self.value(schema["allOf"][0], f"{where}/allOf/0", refs)

    def _disjoint(self, left: Schema, right: Schema) -> bool:
        """True if it is certain that no value is valid under both schemas."""
        left, right = self._resolved(left), self._resolved(right)
        if not isinstance(left, Mapping) or not isinstance(right, Mapping):
            return left is False or right is False
        listed = [_values_of(one) for one in (left, right)]
        if listed[0] is not None and listed[1] is not None:  # in Python, unlike in JSON, True is 1
            return not any(a == b and _kind_of(a) & _kind_of(b) for a in listed[0] for b in listed[1])
        kinds = [_all_kinds(one) for one in (left, right)]
        if not kinds[0] & kinds[1]:
            return True
        shared = set(left.get("required", ())) & set(right.get("required", ()))
        both = left.get("properties", {}), right.get("properties", {})
        named = (name for name in sorted(shared) if name in both[0] and name in both[1])
        objects = _types_of(left) == _types_of(right) == ("object",)
        return objects and any(self._disjoint(both[0][name], both[1][name]) for name in named)

    def _resolved(self, schema: Schema) -> Schema:
        for _ in range(self.notation.depth):
            if not isinstance(schema, Mapping) or "$ref" not in schema:
                break
            schema = self._target(schema["$ref"]) or {}
        return schema

    def _target(self, name: Any) -> Schema | None:
        """The part of the schema that a reference names, None if there is none."""
        target = self.root
        for part in str(name).split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            target = target.get(part) if isinstance(target, Mapping) else None
        return target

    def _string(self, schema: Mapping[str, Any], where: str, refs: tuple[str, ...]) -> str | None:
        quote, char = self.notation.quote, self.notation.char
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if "pattern" in schema:
            self._refuse_others(schema, where, {"type", "pattern"})
            return f"{quote}{self._search(schema['pattern'], where)}{quote}"
        if "format" in schema:
            self._refuse_others(schema, where, {"type", "format"})
            if schema["format"] not in _FORMATS:
                _refuse(f"have a format among {', '.join(_FORMATS)}", schema["format"], where, "Use pattern.")
            return f"{quote}(?:{_FORMATS[schema['format']]}){quote}"
        if most is not None and most < least:
            return None
        if least == 0 and most is None and self.notation.text is not None:
            return f"{quote}{self.notation.text}{quote}"
        return f"{quote}{char}{{{least},{'' if most is None else most}}}{quote}"

    def _search(self, pattern: str, where: str) -> str:
        """Convert an ECMA-262 pattern to the pattern of a string in the notation.

        No set matches a character that needs an escape.
        """
        special, any_char, out, previous = _spell(self.notation.special), self.notation.char, "", ""

        def refuse(part: str) -> NoReturn:
            _refuse(f"have a pattern without {part}", pattern, where)

        body = pattern.removeprefix("^")
        tail = re.search(r"(?<!\\)(?:\\\\)*\$$", body)
        before = "" if pattern.startswith("^") else f"{any_char}*"
        after = f"{any_char}*" if tail is None else ""
        for piece in _PIECES.findall(body if tail is None else body[:-1]):
            if piece[0] == "[":
                out += self._set(piece, refuse)
            elif piece in _CLASSES:
                out += f"[{_CLASSES[piece]}]"
            elif piece.lower() in _CLASSES:
                out += f"[^{_NEGATED[piece.lower()]}{special}]"
            elif _is_property(piece):
                out += f"[{piece}&&[^{special}]]"
            elif piece == ".":
                out += self.notation.dot
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

    def _set(self, text: str, refuse: Callable[[str], NoReturn]) -> str:
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
        special = _spell(self.notation.special)
        if is_negated:
            return f"[^{named}{''.join(properties)}{_spell(ranges)}{special}]"
        plain = named + _spell(self._plain(ranges))
        ways = [f"[{plain}]"] * bool(plain) + [f"[{name}&&[^{special}]]" for name in properties]
        return str(either(ways)) if ways else refuse("quotes and escapes")

    def _plain(self, ranges: Ranges) -> Ranges:
        """Ranges without the characters that need an escape."""
        for low, high in self.notation.special:
            halves = [
                half for first, last in ranges for half in ((first, min(last, low - 1)), (max(first, high + 1), last))
            ]
            ranges = sorted({(first, last) for first, last in halves if first <= last})
        return ranges

    def _integer(self, schema: Mapping[str, Any], where: str, refs: tuple[str, ...]) -> str | None:
        return _integers(*_bounds(schema, where, whole=True))

    def _number(self, schema: Mapping[str, Any], where: str, refs: tuple[str, ...]) -> str | None:
        if not schema.keys() & _KEYWORDS["number"]:
            return rf"{_INTEGER}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{{1,2}})?"
        low, high = _bounds(schema, where, whole=False)
        return _numbers(low, high, "exclusiveMinimum" in schema, "exclusiveMaximum" in schema)

    def _boolean(self, schema: Mapping[str, Any], where: str, refs: tuple[str, ...]) -> str:
        return "(?:true|false)"

    def _null(self, schema: Mapping[str, Any], where: str, refs: tuple[str, ...]) -> str:
        return self.notation.null

    def _array(self, schema: Mapping[str, Any], where: str, refs: tuple[str, ...]) -> str | None:
        if schema.get("uniqueItems"):
            _refuse("not require uniqueItems", True, where, "Check it afterwards.")
        space = self.notation.space
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        first = [
            self.value(one, f"{where}/prefixItems/{i}", refs) for i, one in enumerate(schema.get("prefixItems", ()))
        ]
        if None in first:
            return None
        item = self.value(schema.get("items", True), f"{where}/items", refs) if not first or "items" in schema else None
        fewest = max(least - len(first), 0)
        largest = 0 if item is None else None if most is None else most - len(first)
        if largest is not None and largest < fewest:
            return None
        comma = f",{space}"
        inner = comma.join(str(one) for one in first)
        if largest != 0:
            more = "" if largest is None else largest - 1
            items = f"(?:{item})(?:{comma}(?:{item})){{{max(fewest - 1, 0)},{more}}}"
            if first:
                inner += f"(?:{comma}{items})" + ("" if fewest else "?")
            else:
                inner = items if fewest else f"(?:{items})?"
        return rf"\[{space}{inner}{space}\]" if inner else rf"\[{space}\]"

    def _object(self, schema: Mapping[str, Any], where: str, refs: tuple[str, ...]) -> str | None:
        space, required = self.notation.space, list(schema.get("required", ()))
        properties = {**schema.get("properties", {})}
        others = schema.get("additionalProperties", True)
        properties.update({name: others for name in required if name not in properties})
        if not properties:
            return self._map(others, where, refs)
        comma, pieces = f",{space}", []
        for name, one in properties.items():
            value = self.value(one, f"{where}/properties/{name}", refs)
            if value is not None:
                pieces.append((f"{self.notation.key(name)}:{space}(?:{value})", name in required))
            elif name in required:
                return None
        if not any(is_required for _, is_required in pieces):
            self.size.add(sum(len(piece) * (at + 1) for at, (piece, _) in enumerate(pieces)))  # see `_in_order`
        return rf"\{{{space}{_in_order(pieces, comma)}{space}\}}"

    def _map(self, values: Schema, where: str, refs: tuple[str, ...]) -> str | None:
        """An object with any keys."""
        space = self.notation.space
        value = self.value(values, f"{where}/additionalProperties", refs)
        if value is None:
            return rf"\{{{space}\}}"
        key = self._string({}, where, refs) if self.notation.quote == '"' else r"[A-Za-z_][A-Za-z0-9_.-]*"
        pair = f"{key}:{space}(?:{value})"
        return rf"\{{{space}(?:{pair}(?:,{space}{pair})*)?{space}\}}"

    def _anything(self) -> str:
        """Any value, but arrays and objects hold only plain values: strings, numbers, booleans and null."""
        plain = {"type": ["string", "number", "boolean", "null"]}
        nested = [{"type": "array", "items": plain}, {"type": "object", "additionalProperties": plain}]
        return str(either([self.value(one, "#", ()) for one in (plain, *nested)]))

    def _literal(self, value: Any) -> str:
        notation, space = self.notation, self.notation.space
        if isinstance(value, str):
            return f"{notation.quote}{notation.escape(value)}{notation.quote}"
        if value is None:
            return notation.null
        if isinstance(value, list):
            return rf"\[{space}{f',{space}'.join(map(self._literal, value))}{space}\]"
        if isinstance(value, Mapping):
            pairs = [f"{notation.key(name)}:{space}{self._literal(item)}" for name, item in value.items()]
            return rf"\{{{space}{f',{space}'.join(pairs)}{space}\}}"
        return re.escape(json.dumps(value))


def _is_property(piece: str) -> bool:
    return piece.startswith((r"\p{", r"\P{"))


def _code_of(piece: str, refuse: Callable[[str], NoReturn]) -> int:
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


def _types_of(schema: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The types that a schema names, or that its keywords belong to; None if unknown."""
    named = schema.get("type")
    if named is None:
        found = [kind for kind, keywords in _KEYWORDS.items() if keywords & schema.keys() and kind != "integer"]
        return tuple(found) or None
    types = tuple(named) if isinstance(named, list | tuple) else (named,)
    return types if all(kind in _KEYWORDS for kind in types) else None


def _values_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that a schema lists."""
    return schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None


def _all_kinds(schema: Mapping[str, Any]) -> set[str]:
    values = _values_of(schema)
    if values is not None:
        return set().union(*map(_kind_of, values))
    kinds = set(_types_of(schema) or _KEYWORDS) if "type" in schema else set(_KEYWORDS)
    return kinds | ({"integer"} if "number" in kinds else set()) | ({"number"} if "integer" in kinds else set())


def _kind_of(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    kinds = {float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
    return {kinds[type(value)]} | ({"integer"} if isinstance(value, float) and value.is_integer() else set())


def either(patterns: Sequence[str | None]) -> str | None:
    """Return a pattern of the texts that any of the patterns matches; None if there are none.

    Example: `either(["a", None, "b", "a"])` is "(?:a|b)".
    """
    kept = list(dict.fromkeys(pattern for pattern in patterns if pattern is not None))
    return None if not kept else kept[0] if len(kept) == 1 else f"(?:{'|'.join(kept)})"


def _in_order(pieces: list[tuple[str, bool]], comma: str) -> str:
    """All required pieces and any optional ones, in order, with commas between them."""
    needed = next((at for at, (_, required) in enumerate(pieces) if required), None)
    if needed is not None:
        before = "".join(f"(?:{piece}{comma})?" for piece, _ in pieces[:needed])
        after = "".join(
            f"{comma}{piece}" if required else f"(?:{comma}{piece})?" for piece, required in pieces[needed + 1 :]
        )
        return before + pieces[needed][0] + after
    tails = [
        piece + "".join(f"(?:{comma}{later})?" for later, _ in pieces[at + 1 :]) for at, (piece, _) in enumerate(pieces)
    ]
    return f"(?:{'|'.join(tails)})?" if tails else ""


def _refuse(rule: str, value: Any, where: str, fix: str = "") -> NoReturn:
    raise ValueError(f"JsonSchema.schema must {rule}, got {show(value)} at {where}.{f' {fix}' if fix else ''}")


def _bounds(schema: Mapping[str, Any], where: str, *, whole: bool) -> tuple[int | None, int | None]:
    """The bounds of a number. Exclusive bounds of an integer are converted to inclusive ones."""
    bounds: list[int | None] = []
    for name, exclusive, shift in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
        found = [(schema[key], key == exclusive) for key in (name, exclusive) if key in schema]
        are_whole = all(not isinstance(bound, bool) and bound == bound // 1 for bound, _ in found)
        if not are_whole or (len(found) > 1 and not whole):
            rule = "have whole numbers as bounds, and at most one lower and one upper bound if its type is 'number'"
            _refuse(rule, found[0][0], where)
        moved = [int(bound) + (shift if beyond and whole else 0) for bound, beyond in found]
        bounds.append(None if not moved else max(moved) if shift > 0 else min(moved))
    return bounds[0], bounds[1]


def _integers(low: int | None, high: int | None) -> str | None:
    """The integers in low .. high."""
    parts = []
    if low is None or low < 0:
        most = None if low is None else -low
        least = 1 if high is None or high >= 0 else -high
        parts.append(_negative(_naturals(least, most)))
    if high is None or high >= 0:
        parts.append(_naturals(max(low or 0, 0), high))
    return either(parts)


def _numbers(low: int | None, high: int | None, above: bool, below: bool) -> str | None:
    """The decimal numbers between low and high; `above` excludes low, `below` excludes high."""
    parts = []
    if low is None or low < 0:
        least, most = max(-(high or 0), 0), None if low is None else -low
        parts.append(_negative(_decimals(least, most, below and (high or 0) <= 0, above)))
    if high is None or high >= 0:
        parts.append(_decimals(max(low or 0, 0), high, above and (low or 0) >= 0, below))
    return either(parts)


def _decimals(low: int, high: int | None, above: bool, below: bool) -> str | None:
    """The decimal numbers in low .. high, both at least 0."""
    if high is not None and high < low:
        return None
    inside = _naturals(low + above, None if high is None else high - 1)
    decimals = min(_MOST_DECIMALS, _MOST_DIGITS - len(str(high or low)))
    fraction = rf"(?:\.[0-9]{{1,{decimals}}})?" if decimals > 0 else ""
    parts = [None if inside is None else f"(?:{inside}){fraction}"]
    if above and (high is None or high > low) and decimals > 0:
        parts.append(rf"{low}\.[0-9]{{0,{decimals - 1}}}[1-9]")
    if high is not None and not below and not (above and high == low):
        parts.append(rf"{high}(?:\.0)?")
    return either(parts)


def _negative(pattern: str | None) -> str | None:
    return None if pattern is None else f"-(?:{pattern})"


def _naturals(low: int, high: int | None) -> str | None:
    """The integers in low .. high, both at least 0, without leading zeros."""
    if high is not None and high < low:
        return None
    if high is None:
        digits = len(str(low))
        longer = f"[1-9][0-9]{{{digits},}}" if low > 0 else "[1-9][0-9]*"
        return either([_naturals(low, 10**digits - 1) if low > 0 else "0", longer])
    parts = []
    while low <= high:
        # Each iteration adds one part: fixed digits, a range of one digit, n arbitrary digits, as in 4[2-7][0-9]{2}.
        # `size` is 10^n. If low is 0, it is 1. Otherwise it is the largest power of 10 that divides low and for
        # which low + size - 1 <= high.
        size = 1
        while low > 0 and low % (size * 10) == 0 and low + size * 10 - 1 <= high:
            size *= 10
        lead = low // size
        last = lead - lead % 10 + 9
        while (last + 1) * size - 1 > high:
            last -= 1
        zeros = len(str(size)) - 1
        head = str(lead)[:-1]
        digit = str(lead)[-1] if last == lead else f"[{lead % 10}-{last % 10}]"
        parts.append(head + digit + (f"[0-9]{{{zeros}}}" if zeros else ""))
        low = (last + 1) * size
    return either(parts)
