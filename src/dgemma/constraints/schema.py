"""JSON schemas as regular expressions, in the syntax of JSON or of another notation such as tool calls.

Every text that matches is valid under the schema. Keywords that a regular expression cannot express are refused, never
ignored. Not every valid value matches: properties come in their declared order, and no others are added.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from dgemma.checks import show
from dgemma.constraints.notation import Notation
from dgemma.constraints.patterns import Size, either, integers, numbers, refuse_deep

Schema = Any  # a dictionary, True or False

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
_COMBINERS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_DAY = "(?:0[1-9]|1[0-9]|2[0-8])"
_DATE = rf"[12][0-9]{{3}}-(?:(?:0[1-9]|1[0-2])-{_DAY}|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "email": r"[a-z0-9_+-]+(?:\.[a-z0-9_+-]+)*@[a-z0-9-]+(?:\.[a-z0-9-]+)+",
}
_INTEGER = "-?(?:0|[1-9][0-9]*)"


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
        if schema is False:
            return None
        if schema is not True and not isinstance(schema, Mapping):
            _refuse("hold schemas", schema, where)
        if schema is True or schema.keys() <= _ANNOTATIONS:
            return self._anything()
        for name in ("enum", "required"):
            if isinstance(schema.get(name), str):  # it would be read as a list of characters
                _refuse(f"have a list as {name}", schema[name], where)
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
        if target is None:
            _refuse("refer only to parts of itself (#/...)", {"$ref": name}, where)
        if refs.count(name) >= self.notation.depth:
            return None
        return self.value(target, name, (*refs, name))

    def _enum(self, schema: Mapping[str, Any], where: str, refs: tuple[str, ...]) -> str | None:
        types = _types_of(schema) if "type" in schema else tuple(_KEYWORDS)
        fitting = [value for value in _values_of(schema) or () if types is None or _kind_of(value) & set(types)]
        return either([self._literal(value) for value in fitting])

    _const = _enum

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
        first, *parts = str(name).split("/")
        target = self.root if first == "#" else None
        for part in parts:
            part = part.replace("~1", "/").replace("~0", "~")
            target = target.get(part) if isinstance(target, Mapping) else None
        return target

    def _string(self, schema: Mapping[str, Any], where: str, refs: tuple[str, ...]) -> str | None:
        quote, char = self.notation.quote, self.notation.char
        least, most = _count(schema, "minLength", where) or 0, _count(schema, "maxLength", where)
        if "pattern" in schema:
            self._refuse_others(schema, where, {"type", "pattern"})
            pattern = schema["pattern"]
            text = self.notation.search(pattern, lambda part: _refuse(f"have a pattern without {part}", pattern, where))
            return f"{quote}{text}{quote}"
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

    def _integer(self, schema: Mapping[str, Any], where: str, refs: tuple[str, ...]) -> str | None:
        return integers(*_bounds(schema, where, whole=True))

    def _number(self, schema: Mapping[str, Any], where: str, refs: tuple[str, ...]) -> str | None:
        if not schema.keys() & _KEYWORDS["number"]:
            return rf"{_INTEGER}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{{1,2}})?"
        low, high = _bounds(schema, where, whole=False)
        return numbers(low, high, "exclusiveMinimum" in schema, "exclusiveMaximum" in schema)

    def _boolean(self, schema: Mapping[str, Any], where: str, refs: tuple[str, ...]) -> str:
        return "(?:true|false)"

    def _null(self, schema: Mapping[str, Any], where: str, refs: tuple[str, ...]) -> str:
        return self.notation.null

    def _array(self, schema: Mapping[str, Any], where: str, refs: tuple[str, ...]) -> str | None:
        if schema.get("uniqueItems"):
            _refuse("not require uniqueItems", True, where, "Check it afterwards.")
        space = self.notation.space
        least, most = _count(schema, "minItems", where) or 0, _count(schema, "maxItems", where)
        prefix = schema.get("prefixItems", ())[:most]
        first = [self.value(one, f"{where}/prefixItems/{i}", refs) for i, one in enumerate(prefix)]
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


def _count(schema: Mapping[str, Any], keyword: str, where: str) -> int | None:
    """Return a length or number of items. JSON schemas may write 2 as 2.0."""
    value = schema.get(keyword)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and value >= 0 and value == value // 1):
        _refuse(f"have a whole number of at least 0 as {keyword}", value, where)
    return None if value is None else int(value)


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
