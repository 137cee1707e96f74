"""Texts with holes, which are written canvas by canvas.

A canvas sees the text to its left as prefix, but nothing to its right. So each canvas begins at the first open hole,
which puts most of the following text inside it. A hole close to the end of a canvas is left to the next canvas.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dgemma.checks import require
from dgemma.constraints.run_language import Constraint, HoleLanguage
from dgemma.diffusion.span import Span
from dgemma.diffusion.state import DenoiseState
from dgemma.many.batch import BatchRow
from dgemma.model.cache import Cache
from dgemma.model.config import ModelConfig
from dgemma.model.denoiser import Denoiser
from dgemma.run.knobs import Knobs
from dgemma.run.plan import Plan
from dgemma.run.records import BlockCommit
from dgemma.run.rows import Rows


class Placement(NamedTuple):
    """A canvas over a text: its start, and the position up to which its tokens are kept."""

    start: int
    keep_until: int


def place_canvas(todo: Tensor, canvas_len: int, least: int = 1) -> Placement:
    """Place the next canvas: todo (N,) bool marks the tokens to write, never the first.

    The canvas starts at the first hole, or earlier if it would reach past the end of the text, but never before
    `least`. The tokens written into a hole are kept if the canvas also covers enough text to the right of the hole: a
    quarter of a canvas, or all that remains. A hole too long for this is written in several canvases. Only the last one
    covers enough text after the hole.

    Example: with holes at 5..7 and 18..19 of 100 tokens, a canvas of 16 gives `Placement(start=5, keep_until=8)`.
    """
    text_len = len(todo)
    edges = torch.diff(F.pad(todo.int(), (1, 1))).nonzero()[:, 0].tolist()
    holes = list(zip(edges[::2], edges[1::2], strict=True))
    first, first_stop = holes[0]
    start = max(least, min(first, text_len - canvas_len))
    end = min(start + canvas_len, text_len)
    keep_until = first
    for _, stop in holes:
        if stop + min(canvas_len // 4, text_len - stop) > end:
            break
        keep_until = stop
    if keep_until == first:
        view = min(canvas_len // 4, text_len - first_stop)
        keep_until = min(end, first_stop + view - canvas_len) if view else end
    return Placement(start, keep_until)


@dataclass(frozen=True)
class Filling:
    """The checked arguments of `infill` or `edit`."""

    name: str  # of the function, for errors
    model: Denoiser
    tokens: Tensor  # (B, N) int64
    real: Tensor  # (B, N) bool: not padding
    plan: Plan  # of one canvas, which `HoleRows` completes for each canvas; `span.allowed` covers the whole text
    constraint: Constraint
    tail_token_id: int | None
    is_recorded: bool
    from_text: bool = False  # start from noised text instead of noise


@dataclass
class _HoleText:
    """A row of the batch without its padding, on the host."""

    index: int  # of the row
    columns: Tensor  # (n,) the positions of its tokens in the batch
    tokens: Tensor  # (n,) int64
    todo: Tensor  # (n,) bool: the holes that are not yet written
    log_probs: Tensor  # (n,) of the written tokens
    place: Placement  # of the present canvas
    canvas_len: int

    def under(self, values: Tensor, beyond: int) -> Tensor:
        """Return the part of values (n, ...) under the canvas, (C, ...). Positions after the values get `beyond`."""
        part = values[self.place.start : self.place.start + self.canvas_len]
        return torch.cat((part, part.new_full((self.canvas_len - len(part), *part.shape[1:]), beyond)))

    def keep(self, values: Tensor, canvas: Tensor) -> None:
        """Copy the holes that the placement keeps from a canvas (C,) into values (n,)."""
        start, keep_until = self.place
        kept = self.todo[start:keep_until].nonzero()[:, 0]
        values[start + kept] = canvas.cpu()[kept]

    def allowed(self, allowed: Tensor) -> Tensor:
        """Return its part of allowed (B or 1, N or 1, V), (n or 1, V)."""
        table = allowed[min(self.index, len(allowed) - 1)]
        return table if len(table) == 1 else table[self.columns.to(table.device)]


class HoleRows(BatchRow):
    """Texts with holes. Each canvas is a run of its own, and the text to its left is the prompt.

    So after every canvas `plan` is that of the next run, for the texts that still have holes (`open`). As a row of a
    `Batch` it has one text.
    """

    block = 0  # every plan has one canvas

    def __init__(self, filling: Filling, todo: Tensor) -> None:
        super().__init__(filling.plan)
        self._filling, self.texts, canvas_len = filling, list[_HoleText](), filling.plan.canvas_len
        for row in zip(filling.real.cpu(), filling.tokens.cpu(), todo.cpu(), strict=True):
            columns = row[0].nonzero()[:, 0]
            tokens, holes = (values[columns] for values in row[1:])
            log_probs, index = torch.zeros(len(columns)), len(self.texts)
            self.texts.append(_HoleText(index, columns, tokens, holes, log_probs, Placement(0, 0), canvas_len))
        self._first_starts = [_find_start(filling, text) for text in self.texts]
        self._language = None if filling.constraint is None else self._read_constraint(filling.constraint)
        self.open = self.texts
        self._staying: list[int] | None = None  # the places of `open` in the cache; None for all that are there
        self._place()

    def encode(self, model: Denoiser, cache: Cache | None = None) -> Cache:
        """Extend the cache by the text up to the canvases. Texts without holes leave before: they need no more."""
        if self._filling.is_recorded:  # as a replay of this canvas will do
            return Rows(self.plan).encode(model)
        if cache is not None and self._staying is not None:
            cache = cache.select(torch.tensor(self._staying, device=self.present.device))
        return super().encode(model, cache)

    def start(self, model: Denoiser, knobs: Knobs) -> DenoiseState:
        index = torch.tensor([text.index for text in self.open])
        return replace(super().start(model, knobs), rows=index.to(self.present))

    def commit(self, drafts: Tensor, steps: Tensor, forwards: Tensor) -> BlockCommit:
        """Keep the tokens of the holes that the canvases have finished, and place the next ones."""
        commit = super().commit(drafts, steps, forwards)
        for text, draft in zip(self.open, drafts, strict=True):
            text.keep(text.tokens, draft)
            text.todo[: text.place.keep_until] = False
        stay = [at for at, text in enumerate(self.open) if bool(text.todo.any())]
        self._staying = stay if len(stay) < len(self.open) else None
        self.open, self.ended = [self.open[at] for at in stay], not stay
        if stay:
            self._place()
        return commit

    @property
    def new_tokens(self) -> Tensor:
        """The text of the first row so far, (1, N)."""
        return self.texts[0].tokens[None]

    def _read_constraint(self, constraint: Constraint) -> HoleLanguage:
        """The constraint over the texts of all rows without padding."""
        holes, allowed = pad_sequence([text.todo for text in self.texts], batch_first=True), self.plan.span.allowed
        if allowed is not None:
            tables = [text.allowed(allowed) for text in self.texts]
            allowed = pad_sequence(tables, batch_first=True, padding_value=True)
        return HoleLanguage(self._filling.name, constraint, holes, allowed, self.plan.noise)

    def _place(self) -> None:
        """Place the next canvas of every open text, and plan its run."""
        num_cached, device = [text.place.start for text in self.open], self.present.device
        for text in self.open:
            text.place = place_canvas(text.todo, text.canvas_len, self._first_starts[text.index])
        self.plan = self._plan_canvases(device)
        self.present = torch.arange(len(self.open), device=device)
        new = [text.tokens[start : text.place.start] for text, start in zip(self.open, num_cached, strict=True)]
        self.uncached, self.uncached_mask = _pad_rows(new, device)

    def _plan_canvases(self, device: torch.device) -> Plan:
        filling, texts = self._filling, self.open
        template, canvas_len, allowed = filling.plan, filling.plan.canvas_len, filling.plan.span.allowed
        if allowed is not None and allowed.shape[:2] != (1, 1):
            tables = [(text, text.allowed(allowed)) for text in texts]
            allowed = torch.stack([table if len(table) == 1 else text.under(table, True) for text, table in tables])
        tokens = torch.stack([text.under(text.tokens, -1) for text in texts]).to(device)
        frozen = torch.stack([text.under(~text.todo, False) for text in texts]).to(device)
        awaited = torch.stack([text.under(text.todo[: text.place.keep_until], False) for text in texts]).to(device)
        canvas = torch.full_like(tokens, -1)
        text_len = torch.tensor([min(len(text.tokens) - text.place.start, canvas_len) for text in texts], device=device)
        prefix, is_prefix = _pad_rows([text.tokens[: text.place.start] for text in texts], device)
        plan = replace(
            template,
            prompt_tokens=prefix,
            attention_mask=is_prefix,
            seeds=template.seeds[:, [text.index for text in texts]],
            eos_token_ids=(),
            span=Span(canvas=canvas, allowed=allowed, awaited=awaited),
            first_block=len(self.commits),
            text_len=text_len if int(text_len.min()) < canvas_len else None,
            language=None if self._language is None else self._language.canvases(texts, canvas_len).to(device),
            images=None if template.images is None else tuple(template.images[text.index] for text in texts),
        )
        if filling.from_text:  # the level is that of the first step, which is rarely exactly the requested one
            canvas = _corrupt(tokens, Rows(plan).start(filling.model, plan.knobs), plan)
        canvas = torch.where(frozen, tokens, canvas)
        # Under mask noise, positions after the text are frozen masks by default. The sampler spends all its steps on
        # the holes, and the masks tell the network that the text may go on. A network that takes the level of each
        # position is an exception, because it would read level 0 at frozen masks.
        tail = filling.tail_token_id
        if tail is None and plan.noise.kind == "mask" and not filling.model.takes_position_levels:
            tail = plan.noise.mask_token
        if tail is not None:
            is_tail = torch.arange(canvas_len, device=device) >= text_len[:, None]
            canvas, frozen = torch.where(is_tail, tail, canvas), frozen | is_tail
        return replace(plan, span=replace(plan.span, canvas=canvas, frozen=frozen))


def _find_start(filling: Filling, text: _HoleText) -> int:
    """Return the first position of a text that a canvas may cover: after the first token and after the images."""
    if filling.plan.images is None:
        return 1
    assert isinstance(filling.model.config, ModelConfig)
    start = max((text.tokens == filling.model.config.image_token_id).nonzero().flatten().tolist(), default=0) + 1
    require(not bool(text.todo[:start].any()), f"{filling.name} images", "stand before the first hole", start)
    return start


def _pad_rows(parts: list[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Pad rows of different lengths into one tensor, (R, longest). Also return a mask of the real entries."""
    is_real = torch.arange(max(len(part) for part in parts)) < torch.tensor([len(part) for part in parts])[:, None]
    return pad_sequence(parts, batch_first=True).to(device), is_real.to(device)


def _corrupt(text: Tensor, state: DenoiseState, plan: Plan) -> Tensor:
    """Noise the text (R, C) to the state's level; -1 after its end, and where the result is not allowed."""
    u_event, u_token, allowed = state.uniform("corrupt event"), state.uniform("corrupt token"), plan.span.allowed
    noised = plan.noise.corrupt(text, state.noise_level, u_event, u_token, allowed=allowed)
    ends = text < 0
    if allowed is not None:
        table = allowed.expand(-1, plan.canvas_len, -1)
        forbidden = ~table.gather(-1, noised.clamp(min=0)[..., None])[..., 0]
        ends = ends | (forbidden & ~plan.noise.masked(noised))
    return torch.where(ends, -1, noised)
