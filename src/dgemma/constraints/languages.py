"""Languages that a text can be constrained to: regular expressions, JSON schemas, choices, grammars and tool calls.

Each is translated into a regular expression. outlines-core turns it into an automaton over bytes, and
`token_automaton` turns that into one over tokens. Any tokenization of an accepted text is accepted.
"""

import dataclasses
import importlib.util
import itertools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from dgemma.checks import require, show
from dgemma.constraints.build import build_automaton
from dgemma.constraints.builder import BadPattern, NoText
from dgemma.constraints.grammar import grammar_pattern
from dgemma.constraints.notation import Notation
from dgemma.constraints.patterns import refuse_deep
from dgemma.constraints.schema import schema_pattern
from dgemma.constraints.token_automaton import TokenAutomaton, marker, plain_bytes
from dgemma.constraints.token_text import marker_id, token_texts
from dgemma.printing import install_command

# Escapes, sets, beginnings of named groups, and single characters. A set that is not closed is one part too; else a
# search would start at each "[".
_PATTERN_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\\?\Z)|\(\?P?<\w+>|.", re.DOTALL)
_ANCHORS = frozenset({"^", "$", r"\A", r"\z", r"\b", r"\B", r"\<", r"\>"})


@dataclass(frozen=True, eq=False)
class Regex:
    """Texts that match a regular expression from beginning to end.

    The syntax is that of Rust's regex crate: no look-around and no back-references; `.` excludes newlines. The
    tokenizer comes from dgemma, from transformers (a fast one), or from the tokenizers library. Building a constraint
    can take seconds, so build it once and use it in many runs. Pass it as `constraint=` to `generate`, `stream`,
    `infill` or `edit`.

    Example: `dgemma.generate(model, prompt, constraint=dgemma.Regex(r"[0-9]{4}-[0-9]{2}", tokenizer))`.
    """

    pattern: str
    tokenizer: Any = field(repr=False)

    def __post_init__(self) -> None:
        require(isinstance(self.pattern, str), "Regex.pattern", "be a text", self.pattern)

    def within(self, *, before: str = r"(?s:.*)", after: str = r"(?s:.*)") -> "Regex":
        """Constrain only a part of the text: `before` and `after` are patterns of what surrounds it.

        Example: `JsonSchema(schema, tokenizer).within(before="Here it is: ", after="[.]")`.
        """
        return Regex(f"(?:{before})(?:{self.pattern})(?:{after})", self.tokenizer)

    @property
    def automaton(self) -> TokenAutomaton:
        """The automaton over tokens, built once."""
        if "automaton" not in self.__dict__:  # Python 3.11's `cached_property` builds one at a time, of all constraints
            self.__dict__["automaton"] = self._build()
        built: TokenAutomaton = self.__dict__["automaton"]
        return built

    def _build(self) -> TokenAutomaton:
        name = type(self).__name__
        if importlib.util.find_spec("outlines_core") is None:
            raise ImportError(f"Constraints need outlines-core. Install it with: {install_command('constraints')}")
        parts = _PATTERN_PARTS.findall(self.pattern)
        fix = "A pattern always covers the whole text."
        require(_ANCHORS.isdisjoint(parts), f"{name}.pattern", "have no anchors such as ^ and \\b", self.pattern, fix)
        depths = itertools.accumulate((part[0] == "(") - (part == ")") for part in parts)
        require(min(depths, default=0) >= 0, f"{name}.pattern", "open each bracket that it closes", self.pattern)
        # Names of groups have no meaning here, and the pattern of a schema or a grammar can repeat one.
        pattern = "".join("(" if part.startswith("(") else part for part in parts)
        texts = [None if text is None else plain_bytes(text) for text in token_texts(self.tokenizer)]
        for token in {ord(char) - ord(marker(0)) for char in self.pattern}:
            if 0 <= token < len(texts):
                texts[token] = marker(token).encode()
        try:
            return build_automaton(pattern, texts, name)
        except NoText as error:
            raise ValueError(
                f"{name} must accept a text, got {show(getattr(self, 'schema', self.pattern))}: {error}."
            ) from None
        except BadPattern as error:
            rule, reason = "be a regular expression that outlines-core can build", error.reason_for(self.pattern)
            raise ValueError(f"{name}.pattern must {rule}, got {show(self.pattern)}: {reason}.") from None


class JsonSchema(Regex):
    """Texts of JSON that are valid under a schema: a dictionary, a pydantic model or a dataclass.

    Properties appear in their declared order, and no others are added. A keyword that the automaton cannot enforce is
    refused. `whitespace` is a pattern for the space around values. A schema that refers to itself is expanded `depth`
    times.

    Example: `JsonSchema({"type": "object", "properties": {"age": {"type": "integer"}}}, tokenizer)`.
    """

    def __init__(self, schema: Any, tokenizer: Any, *, whitespace: str = "[ ]?", depth: int = 3) -> None:
        object.__setattr__(self, "schema", _read_schema(schema))
        super().__init__(schema_pattern(self.schema, Notation(space=whitespace, depth=depth)), tokenizer)

    schema: Any


class Choice(Regex):
    """One of several texts.

    Example: `Choice(["yes", "no", "not sure"], tokenizer)`.
    """

    def __init__(self, options: Sequence[str], tokenizer: Any) -> None:
        is_list = isinstance(options, Collection) and not isinstance(options, str) and len(options) > 0
        are_texts = is_list and all(isinstance(option, str) for option in options)
        require(are_texts, "Choice.options", "be texts, at least one", options)
        super().__init__("|".join(map(re.escape, dict.fromkeys(options))), tokenizer)


class Grammar(Regex):
    """Texts of a context-free grammar in Lark's notation, with a rule `start`, nested at most `depth` deep.

    Lists such as `item*` and rules that refer to themselves only at one end are not limited by `depth`. Other recursion
    is expanded `depth` times, because the automaton is finite.

    Example: `Grammar('start: NUMBER | "(" start "+" start ")"\\nNUMBER: /[0-9]+/', tokenizer, depth=4)`.
    """

    def __init__(self, grammar: str, tokenizer: Any, *, depth: int = 4) -> None:
        require(isinstance(grammar, str), "Grammar.grammar", "be a text in Lark's notation", grammar)
        super().__init__(grammar_pattern(grammar, depth), tokenizer)


class ToolCalls(Regex):
    """Calls of tools in the published model's syntax, which `tokenizer.reply` parses: between 1 and `most` calls.

    tools: functions with type hints and docstrings, or their descriptions in the form that chat templates take.

    Example: `ToolCalls([get_weather], tokenizer)`; then `tokenizer.reply(out.new_tokens[0]).tool_calls`.
    """

    def __init__(self, tools: Sequence[Any], tokenizer: Any, *, most: int = 1) -> None:
        opened, closed, quote = (_marker(tokenizer, text) for text in ("<|tool_call>", "<tool_call|>", '<|"|>'))
        markers = f"{marker(0)}-\U0010ffff"
        notation = Notation(
            quote=quote,
            special=((ord("<"), ord("<")), (ord(marker(0)), 0x10FFFF)),
            escapes=(),
            text=rf"(?:[^<{markers}]|<+[^<|{markers}])*",  # without "<|", which a parser reads as the start of a marker
            escape=re.escape,
            key=_bare_key,
            null="(?:null|None)",
            space="",
        )
        calls = []
        for tool in map(_describe_tool, tools):
            parameters = tool.get("parameters") or {"type": "object", "additionalProperties": False}
            calls.append(f"call:{_bare_key(tool['name'])}{schema_pattern(parameters, notation)}")
        require(bool(calls), "ToolCalls.tools", "hold at least one tool", tools)
        super().__init__(f"(?:{opened}(?:{'|'.join(calls)}){closed}){{1,{most}}}", tokenizer)


def _read_schema(schema: Any) -> Any:
    if hasattr(schema, "model_json_schema"):
        return schema.model_json_schema()
    if isinstance(schema, type) and dataclasses.is_dataclass(schema):
        return importlib.import_module("pydantic").TypeAdapter(schema).json_schema()
    rule = "be a dictionary, JSON text, a pydantic model or a dataclass"
    require(isinstance(schema, str | Mapping | bool), "JsonSchema.schema", rule, schema)
    with refuse_deep("JsonSchema.schema"):
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema, default=dict)  # of other mappings
            return json.loads(text, parse_constant=_refuse_constant)
        except (TypeError, ValueError) as error:
            raise ValueError(f"JsonSchema.schema must be JSON, got {show(schema)}: {error}.") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _describe_tool(tool: Any) -> Mapping[str, Any]:
    if callable(tool):
        from transformers.utils import get_json_schema  # here, because the import takes seconds

        tool = get_json_schema(tool)
    description = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    has_name = isinstance(description, Mapping) and isinstance(description.get("name"), str)
    require(has_name, "ToolCalls.tools", "be functions or descriptions with a name", tool)
    return description


def _bare_key(name: str) -> str:
    fits = re.fullmatch(r"[A-Za-z0-9_.-]+", name) is not None
    require(fits, "ToolCalls names", "consist of letters, digits, '_', '.' and '-'", name)
    return re.escape(name)


def _marker(tokenizer: Any, text: str) -> str:
    token = marker_id(tokenizer, text)
    if token is None:
        raise ValueError(f"ToolCalls.tokenizer must have the token {text}, got one without it.")
    return marker(token)
