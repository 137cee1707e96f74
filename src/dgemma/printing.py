"""Safe printing of text from outside (files, models, arguments): control characters become visible. A progress bar.

Use `printable` for text on a terminal, `one_line` for an error message, and `to_json` for JSON.
"""

import difflib
import json
import math
import re
import sys
from collections.abc import Collection
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

_LONGEST = 1000  # characters of an error message
_BIDI = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_UNSAFE = re.compile(f"[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u2028\\u2029\\ud800-\\udfff{_BIDI}]")
_UNSAFE_IN_JSON = re.compile(f"[\\x7f-\\x9f\\u2028\\u2029\\ud800-\\udfff{_BIDI}]")  # JSON escapes the others itself


def printable(text: str) -> str:
    """Return a text that is safe to print: control and direction characters are replaced, except \\n and \\t.

    Example: `printable("\\x1b[2J")` is "␛[2J".
    """
    return _UNSAFE.sub(lambda match: _visible(match[0]), text)


def one_line(text: str) -> str:
    """Return a message as one printable line of at most 1000 characters."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 2]} …"


def to_json(content: Any, *, ascii_only: bool = False) -> str:
    """Return JSON on one line in which every control and direction character is escaped.

    Example: `to_json({"text": "\\x9b2J"})` is `{"text": "\\\\u009b2J"}`.
    """
    text = json.dumps(content, ensure_ascii=ascii_only)
    return _UNSAFE_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def without_nan(value: Any) -> Any:
    """Replace NaN and infinities in nested lists and dictionaries by None, because JSON has none of them."""
    if isinstance(value, dict):
        return {name: without_nan(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def nearest(name: str, known: Collection[str]) -> str | None:
    """Return the known name that begins with another or is most like it; None if none is like it.

    Example: `nearest("eos_token_id", ["seed", "eos_token_ids"])` is "eos_token_ids".
    """
    begun = [each for each in known if name and each.startswith(name)]
    return next(iter(begun or difflib.get_close_matches(name, list(known), n=1)), None)


def install_command(extra: str) -> str:
    """Return the command that installs an extra from a clone: no package index has dgemma."""
    return f'pip install -e ".[{extra}]"'


def progress_bar(*, desc: str, unit: str, show: bool, total: int | None = None) -> "tqdm":
    """Return a bar to `update` as work is done, shown in terminals and notebooks after two seconds, never in a pipe.

    `show=False` hides it.
    """
    from tqdm.auto import tqdm

    # Without standard error, as in a service, sys.stderr is None.
    is_visible = "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())
    return tqdm(desc=desc, unit=unit, total=total, delay=2.0, leave=False, disable=not (show and is_visible))


@lru_cache(maxsize=4096)
def _visible(character: str) -> str:
    code = ord(character)
    if code < 0x20 or code == 0x7F:
        return chr(0x2400 + min(code, 0x21))  # Unicode's pictures of the controls
    return f"⟨{code:04X}⟩"
