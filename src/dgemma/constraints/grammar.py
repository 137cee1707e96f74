"""Context-free grammars as regular expressions, with recursion expanded to a fixed depth.

lark parses the grammar. A rule that refers to itself only at its beginning needs no limit: `A: A x | y` is
`y x*` (Arden's lemma). The same holds for a rule that refers to itself only at its end. Lark writes lists this way.
"""

import importlib
from typing import Any

from dgemma.checks import require
from dgemma.constraints.patterns import Size, either, refuse_deep
from dgemma.printing import install_command

_MOST_CHARS = 100_000  # lark takes longer than linear time


def grammar_pattern(grammar: str, depth: int) -> str:
    """Return a regular expression of a grammar's texts that nest at most `depth` deep.

    Example: `grammar_pattern('start: "a" start "b" | "c"', depth=2)` matches c, acb and aacbb.
    """
    try:
        lark = importlib.import_module("lark")
    except ImportError:
        raise ImportError(f"Grammar needs lark. Install it with: {install_command('constraints')}") from None
    require(isinstance(depth, int) and depth >= 0, "Grammar.depth", "be an integer of at least 0", depth)
    require(len(grammar) <= _MOST_CHARS, "Grammar.grammar", f"have at most {_MOST_CHARS} characters", len(grammar))
    with refuse_deep("Grammar.grammar"):
        return _pattern(grammar, depth, lark)


def _pattern(grammar: str, depth: int, lark: Any) -> str:
    try:
        parser = lark.Lark(grammar, parser="earley", keep_all_tokens=True, maybe_placeholders=False)
    except RecursionError:
        raise
    except Exception as error:  # lark raises many types
        reason = " ".join(str(error).split())
        raise ValueError(f"Grammar.grammar must be in Lark's notation, got an error: {reason}") from None
    ignored, fix = parser.ignore_tokens, "Write white space into the rules."
    require(not ignored, "Grammar.grammar", "not use %ignore", ignored, fix)
    terminals = {terminal.name: f"(?:{terminal.pattern.to_regexp()})" for terminal in parser.terminals}
    rules: dict[str, list[list[Any]]] = {}
    for rule in parser.rules:
        rules.setdefault(rule.origin.name, []).append(list(rule.expansion))
        absent = [symbol.name for symbol in rule.expansion if symbol.is_term and symbol.name not in terminals]
        require(not absent, "Grammar.grammar", "define the terminals that it declares", absent)
    endless, fix = _endless_rules(rules), "Give each an alternative that does not lead back to it."
    require(not endless, "Grammar.grammar", "have rules whose texts can end", endless, fix)
    pattern = _expand("start", rules, terminals, depth, (), Size("Grammar.grammar"))
    rule = "be enough for the shallowest text of the grammar"
    require(pattern is not None, "Grammar.depth", rule, depth, "Raise it.")
    return str(pattern)


def _endless_rules(rules: dict[str, list[list[Any]]]) -> list[str]:
    """The rules that derive no finite text."""
    ending: set[str] = set()
    while True:
        found = {
            name
            for name, expansions in rules.items()
            if any(all(symbol.is_term or symbol.name in ending for symbol in symbols) for symbols in expansions)
        }
        if found == ending:
            return sorted(map(str, rules.keys() - ending))
        ending = found


def _expand(
    name: str,
    rules: dict[str, list[list[Any]]],
    terminals: dict[str, str],
    depth: int,
    inside: tuple[str, ...],
    size: Size,
) -> str | None:
    """The texts of a rule; None if each nests deeper than `depth`. `inside` are the rules being expanded."""
    if inside.count(name) > depth:
        return None

    def sequence(symbols: list[Any]) -> str | None:
        parts = []
        for symbol in symbols:
            part = (
                terminals[symbol.name]
                if symbol.is_term
                else _expand(symbol.name, rules, terminals, depth, (*inside, name), size)
            )
            if part is None:
                return None
            parts.append(part)
            size.add(100 + len(part))
        return "".join(parts)

    def refers(symbol: Any) -> bool:
        return not symbol.is_term and symbol.name == name

    expansions = rules[name]
    for at, rest in ((0, slice(1, None)), (-1, slice(None, -1))):  # recursion at the beginning only, at the end only
        repeated = [symbols[rest] for symbols in expansions if symbols and refers(symbols[at])]
        plain = [symbols for symbols in expansions if not symbols or not refers(symbols[at])]
        if repeated and not any(refers(symbol) for symbols in (*repeated, *plain) for symbol in symbols):
            base, more = either([sequence(s) for s in plain]), either([sequence(s) for s in repeated])
            if base is None or more is None:
                return base
            return f"(?:{base}(?:{more})*)" if at == 0 else f"(?:(?:{more})*{base})"
    return either([sequence(symbols) for symbols in expansions])
