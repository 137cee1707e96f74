"""A recorded run as one web page that needs no network: a player that shows the candidates of every position.

The page is `page.html`, `page.css` and `page.js` in this folder; this module inserts the run. Numbers are compressed
arrays per row, texts are JSON. A model can write anything, so its text must never be parsed as markup. JSON escapes
every character that could end a script. The page inserts model output only as text. The content policy allows only the
page's own script and style. Requests may go only to the server that sent the page: `dgemma.serve` uses them to fill
holes.
"""

import base64
import hashlib
import html
import json
import math
import re
import string
import zlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from dgemma.checkpoint.tokenizer import Tokenizer
from dgemma.checks import as_lists, require, typed
from dgemma.files import write_text
from dgemma.run.recorded.trajectory import Trajectory
from dgemma.values import label
from dgemma.view.board import Board
from dgemma.view.frames import Array, Frames, check_canvas, read_frames, read_prompt, read_prompt_tokens, settled
from dgemma.view.heat import DARK, LEVELS, LIGHT
from dgemma.view.pieces import Pieces

ENTROPY_SCALE = 4096  # 16 bits cover 0 to 16 nats, more than log(262144)
NOTEBOOK_BYTES = 4 << 20  # largest page that a notebook stores
_PROMPT_TOKENS = 400


class Page(str):
    """A page of HTML. A notebook shows it in a sandboxed frame."""

    def _repr_html_(self) -> str:
        if len(self) > NOTEBOOK_BYTES:
            size = f"{len(self) / 2**20:.1f} MiB"
            return f"<p>A page of {size} is too large here. Write it with <code>to_html(trajectory, path)</code>.</p>"
        return (
            f'<iframe srcdoc="{html.escape(self)}" sandbox="allow-scripts" title="Denoising, step by step" '
            'style="width:100%;height:620px;border:0;border-radius:10px" loading="lazy"></iframe>'
        )

    def __repr__(self) -> str:
        return f"Page({len(self):,} characters)"


def read_policy(page: str) -> str:
    """Return the content policy of a page of `to_html`; raise for other text."""
    found = re.search(r'<meta http-equiv="Content-Security-Policy" content="([^"\n]*)">', page[:1000])
    if found is None:
        raise ValueError("The page must come from to_html or --html, got other text.")
    return found[1]


@typed
def to_html(
    trajectory: Trajectory,
    path: str | Path | None = None,
    *,
    tokenizer: Tokenizer | Board | None = None,
    row: int | Sequence[int] | None = None,
) -> Page:
    """Return a page that plays a recorded run and shows every position's candidates; write it to `path` if given.

    tokenizer: None shows token ids, `Board()` shows a Sudoku. row: one row or several; None means all rows.

    Example: `to_html(out.trajectory, "run.html", tokenizer=tokenizer)`.
    """
    listed = as_lists(range(trajectory.batch_size) if row is None else row)
    rows = listed if isinstance(listed, list) else [listed]
    require(len(rows) > 0, "to_html row", "name at least one row", rows, "Use None for all rows.")
    frames = [read_frames(trajectory, one, owner="to_html") for one in rows]
    check_canvas(trajectory, tokenizer, owner="to_html")
    plan = trajectory.plan
    pieces = Pieces(tokenizer, mask_token=plan.noise.mask_token)
    table = _Table(pieces)
    arrays = [_arrays(one, table) for one in frames]
    content = {
        "rows": [
            {
                "name": one,
                "prompt": read_prompt(trajectory, one, pieces, num_tokens=_PROMPT_TOKENS),
                "context": read_prompt_tokens(trajectory, one)[-_PROMPT_TOKENS:],
                **_facts(its, table),
            }
            for one, its in zip(rows, frames, strict=True)
        ],
        "about": f"{label(plan.knobs.sampler)} · {plan.noise.kind} noise · canvas of {plan.canvas_len} · at most "
        f"{plan.num_steps} steps",
        "canvasLen": plan.canvas_len,
        "top": trajectory.top,
        "maxEntropy": math.log(plan.noise.vocab_size),
        "entropyScale": ENTROPY_SCALE,
        "ids": tokenizer is None,
        "board": isinstance(tokenizer, Board),
        "special": sorted({*plan.eos_token_ids, plan.pad_token_id}),
        **table.columns(),
    }
    files = resources.files("dgemma.view")
    style, script = _colours() + files.joinpath("page.css").read_text(), files.joinpath("page.js").read_text()
    packed = [_compress(its, wide=len(table) > 1 << 16) for its in arrays]
    page = Page(
        string.Template(files.joinpath("page.html").read_text()).substitute(
            policy=f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; connect-src 'self'",
            title="Sudoku" if isinstance(tokenizer, Board) else "Text from noise",
            style=style,
            script=script,
            content=_json({**content, "wide": len(table) > 1 << 16}),
            arrays="\n".join(
                f'<script type="text/plain" id="row-{i}">{data}</script>' for i, data in enumerate(packed)
            ),
            text=html.escape("\n\n".join(_text(its, pieces) for its in frames)),
        )
    )
    if path is not None:
        write_text(path, page)
    return page


class _Table:
    """A table of all (token, text) pairs. Arrays refer to them by index."""

    def __init__(self, pieces: Pieces) -> None:
        self.pieces = pieces
        self._places: dict[tuple[int, str], int] = {}

    def __len__(self) -> int:
        return len(self._places)

    def lines(self, tokens: Array) -> Array:
        """Return indices of tokens (n, C) in context: a character may span several tokens."""
        lines = tokens.tolist()
        return np.array([[self._place(*pair) for pair in zip(line, self.pieces(line), strict=True)] for line in lines])

    def candidates(self, tokens: Array) -> Array:
        """Return indices of tokens of any shape, each without context."""
        distinct, inverse = np.unique(tokens, return_inverse=True)
        places = np.array([self._place(token, self.pieces.one(token)) for token in distinct.tolist()], dtype=np.int64)
        return places[inverse].reshape(tokens.shape)

    def columns(self) -> dict[str, list[Any]]:
        return {"tokens": [token for token, _ in self._places], "texts": [text for _, text in self._places]}

    def _place(self, token: int, text: str) -> int:
        return self._places.setdefault((token, text), len(self._places))


def _facts(frames: Frames, table: _Table) -> dict[str, Any]:
    """Return a row's numbers per frame, and its text."""
    free = ~frames.frozen
    mean_entropy = np.where(free, frames.entropy, 0).sum(1) / np.maximum(free.sum(1), 1)
    return {
        "block": frames.block.tolist(),
        "step": frames.step.tolist(),
        "temperature": frames.temperature.astype(float).round(4).tolist(),
        "entropy": mean_entropy.round(4).tolist(),
        "accepted": frames.accepted.sum(1).tolist(),
        "renoised": frames.renoised.sum(1).tolist(),
        "final": table.lines(frames.final).ravel().tolist(),
        "settled": settled(frames).ravel().tolist(),
        "kept": frames.kept,
    }


def _arrays(frames: Frames, table: _Table) -> dict[str, Array]:
    """Return a row's arrays per position, in the order in which `page.js` reads them."""
    flags = frames.accepted | frames.renoised << 1 | frames.undecided << 2 | frames.frozen << 3
    return {
        "canvas": table.lines(frames.canvas),
        "draft": table.lines(frames.draft),
        "top": table.candidates(frames.top_tokens),
        "entropy": (frames.entropy * ENTROPY_SCALE).clip(0, 65535).round().astype("<u2"),
        "confidence": (frames.confidence * 65535).round().astype("<u2"),
        "probability": (frames.top_probabilities.astype(np.float32) * 65535).round().astype("<u2"),
        "flags": flags.astype("u1"),
    }


def _compress(arrays: dict[str, Array], *, wide: bool) -> str:
    places = {name: arrays[name].astype("<u4" if wide else "<u2") for name in ("canvas", "draft", "top")}
    return base64.b64encode(zlib.compress(b"".join(a.tobytes() for a in (arrays | places).values()), 9)).decode()


def _text(frames: Frames, pieces: Pieces) -> str:
    between = " " if pieces.tokenizer is None else ""
    lines = (pieces(line[:kept]) for line, kept in zip(frames.final.tolist(), frames.kept, strict=True))
    return between.join(text for line in lines for text in line)


def _colours() -> str:
    """Return CSS: a variable per level of certainty, dark and light, and a class for each."""
    dark, light = (
        "".join(f"--h{level}:{colour};" for level, colour in enumerate(colours)) for colours in (DARK, LIGHT)
    )
    classes = "".join(f".h{level}{{--c:var(--h{level})}}" for level in range(LEVELS))
    return (
        f":root{{{light}}}@media(prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}"
        f":root[data-theme=dark]{{{dark}}}{classes}\n"
    )


def _json(content: dict[str, Any]) -> str:
    """Return JSON for a script element: ASCII, without characters that begin or end markup."""
    text = json.dumps(content, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
