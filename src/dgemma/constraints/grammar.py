"""Context-free grammars as regular expressions, with recursion expanded to a fixed depth.

lark parses the grammar. A rule that refers to itself only at its beginning needs no limit: `A: A x | y` is
`y x*` (Arden's lemma). The same holds for a rule that refers to itself only at its end. Lark writes lists this way.
"""

import importlib
from typing import Any

from dgemma.checks import require
from dgemma.constraints.schema import Size, either, refuse_deep
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
    if parser.ignore_tokens:
        raise ValueError("Grammar.grammar must not use %ignore. Write white space into the rules.")
    terminals = {terminal.name: _terminal(terminal) for terminal in parser.terminals}
    rules: dict[str, list[list[Any]]] = {}
    for rule in parser.rules:
        rules.setdefault(rule.origin.name, []).append(list(rule.expansion))
    endless = _endless_rule(rules)
    fix = "It leads back to itself in every alternative. Add one without it."
    require(endless is None, "Grammar.grammar", "have rules whose texts can end", str(endless), fix)
    pattern = _expand("start", rules, terminals, depth, (), Size("Grammar.grammar"))
    if pattern is None:
        raise ValueError(f"Grammar.depth must be enough for the shallowest text of the grammar, got {depth}. Raise it.")
    return pattern


def _endless_rule(rules: dict[str, list[list[Any]]]) -> str | None:
    """A rule that derives no finite text because it needs itself, None if every rule ends."""
    ending: set[str] = set()
    while True:
        found = {
            name
            for name, expansions in rules.items()
            if any(all(symbol.is_term or symbol.name in ending for symbol in symbols) for symbols in expansions)
        }
        if found == ending:
            break
        ending = found
    needs = {name: _references(expansions) - ending for name, expansions in rules.items() if name not in ending}
    for name in needs:
        reached: set[str] = set()
        newest = {name}
        while newest:
            newest = set().union(*(needs[other] for other in newest)) - reached
            reached |= newest
        if name in reached:
            return name
    return None


def _references(expansions: list[list[Any]]) -> set[str]:
    return {symbol.name for symbols in expansions for symbol in symbols if not symbol.is_term}


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


def _terminal(terminal: Any) -> str:
    flags = "".join(sorted(set(terminal.pattern.flags) & set("imsx")))
    written = terminal.pattern.to_regexp() if not flags else f"(?{flags}:{terminal.pattern.value})"
    return f"(?:{written})"
