"""From a regular expression to an automaton over tokens, in a separate process with limits on time and memory.

Some short patterns have billions of states, as `.*a.{30}` does: each further count after a repetition can double them.
So `build` starts this module in another process. It imports NumPy and outlines-core, and no torch.
"""

import os
import pickle
import re
import sys
import warnings

import numpy as np

from dgemma.constraints.token_automaton import NO_STATE, ByteAutomaton, TokenAutomaton, TooLarge, spell_tokens

MOST_STATES = 20_000  # after equivalent ones are merged
_MOST_BYTE_STATES = 100_000  # before


def opening_of(pattern: str) -> str:
    """Return the opening of a pattern: fixed characters that come before the pattern when outlines-core builds it.

    outlines-core also builds an automaton that may start anywhere in a text. For "x[^y]{0,30}y", where [^y] also
    matches x, that automaton has billions of states. With an opening, a match can start only after the opening. The
    opening has every ASCII character of the pattern, also those in negated sets. It contains y, which [^y]
    does not match. So the opening cannot occur inside [^y]{0,30}, and no second match starts there.

    Example: `opening_of("[^b]")` contains b, and begins with a zero byte, as every opening does.
    """
    named = sorted({char for char in pattern if char.isascii()} - {"\0", "\n"})
    return "".join(f"\\x{ord(char):02x}" for char in ["\0", "\n", *named, " ", "0", "a"])


class NoText(Exception):
    """Raised for a pattern that matches no text, or none that the tokens can spell."""


class BadPattern(Exception):
    """Raised for a pattern that outlines-core cannot read."""

    def reason_for(self, pattern: str) -> str:
        """Return the reason in Python's words if it has one, because they name the place."""
        try:
            with warnings.catch_warnings(action="ignore"):
                re.compile(pattern)
        except re.error as clearer:
            return str(clearer)
        except RecursionError:
            pass
        return str(self)


def build_tokens(pattern: str, texts: list[bytes | None]) -> TokenAutomaton:
    """Return the automaton over tokens of a pattern; raise `NoText`, `BadPattern` or `TooLarge` if there is none."""
    read = read_pattern(pattern)
    if len(read.is_final) > MOST_STATES:
        raise TooLarge(f"{len(read.is_final)} states")
    automaton = spell_tokens(read, texts)
    if automaton.shortest()[0] < 0:
        raise NoText("the tokenizer cannot spell any of its texts" if read.is_final.any() else "it matches no text")
    return automaton


def read_pattern(pattern: str) -> ByteAutomaton:
    """Return the smallest automaton over bytes of a pattern."""
    import outlines_core

    opening = opening_of(pattern)
    vocabulary = outlines_core.Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})
    try:
        # If a state already matches, outlines-core drops transitions that go on from it, such as "," after "a" in
        # `a(,a)*`. With a last byte that no text has, nothing matches before the end.
        index = outlines_core.Index(f"{opening}(?:{pattern})\\x00", vocabulary)
    except Exception as error:  # outlines-core raises several types
        reason = " ".join(str(error).split())
        if "no transitions" in reason:
            raise NoText("it matches no text") from None
        raise BadPattern(reason) from None
    transitions, start, finals = index.get_transitions(), index.get_initial_state(), index.get_final_states()
    for code in opening.split("\\x")[1:]:
        start = transitions.pop(start)[int(code, 16)]
    reached = {target for moves in transitions.values() for target in moves.values()}
    states = [start, *sorted({*transitions, *finals, *reached} - {start})]
    if len(states) > _MOST_BYTE_STATES:
        raise TooLarge(f"{len(states)} states over bytes")
    number = {state: at for at, state in enumerate(states)}
    table = np.full((len(states), 257), NO_STATE, np.int32)  # the last column is outlines-core's token for the end
    for state, moves in transitions.items():
        table[number[state], list(moves)] = [number[target] for target in moves.values()]
    table = table[:, :256]
    is_final = (table[:, 0] != NO_STATE) & np.array([state in finals for state in states])[table[:, 0]]
    table[:, 0] = NO_STATE
    return ByteAutomaton(table, is_final).minimised()


def main(seconds: int, gibibytes: int) -> None:
    """Read a pickled pattern and texts from stdin, and write their automaton, or why there is none, to stdout."""
    try:
        import resource
    except ImportError:
        pass  # Windows cannot limit a process, so only the timeout of `build` applies
    else:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_AS, (gibibytes << 30, gibibytes << 30))
        os.nice(10)  # with less priority, a busy machine would never finish it
    result: TokenAutomaton | Exception
    try:
        result = build_tokens(*pickle.load(sys.stdin.buffer))
    except MemoryError:
        result = TooLarge("more memory")
    except (NoText, BadPattern, TooLarge) as error:
        result = error
    pickle.dump(result, sys.stdout.buffer)
