"""Infilling of holes and editing in place: canvases cover the part that changes, and all other tokens are frozen.

A canvas sees the text to its left as prefix, but nothing to its right. So each canvas begins at the first open hole,
which puts most of the following text inside it. A hole close to the end of a canvas is left to the next canvas.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Unpack, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dgemma.checks import as_int, require, require_tensor, short_repr
from dgemma.diffusion.noise import Noise
from dgemma.diffusion.state import DenoiseState
from dgemma.model.cache import Cache
from dgemma.model.config import ModelConfig
from dgemma.model.denoiser import Denoiser, check_denoiser
from dgemma.model.vision.places import join_images
from dgemma.printing import progress_bar
from dgemma.run import arguments
from dgemma.run.arguments import Span
from dgemma.run.constrain import Constraint, HoleLanguage
from dgemma.run.knobs import Knobs
from dgemma.run.loop import denoise_canvas, run_events
from dgemma.run.options import CanvasOptions, ImagesOption, WatchOptions, fill_in, select, takes_options
from dgemma.run.plan import Plan, read_plan
from dgemma.run.records import BlockCommit, OnStep, shows_progress
from dgemma.run.rows import Rows
from dgemma.run.trajectory import Trajectory

Holes = Tensor | int | Sequence[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Infilling:
    """The result of `infill` or `edit`.

    log_probs has the log-probability of each written token, and 0 for given tokens. It is predicted once, at
    temperature 1, from the canvas before its first step. With `record=True`, `trajectories` holds one `Trajectory` per
    canvas, in the order of writing. Each contains only the rows that still had holes. Each can be shown, saved,
    replayed and forked.
    """

    tokens: Tensor  # (B, N) int64
    log_probs: Tensor  # (B, N) float32
    steps: Tensor  # (B,) over all canvases
    tokens_per_forward: Tensor  # (B,): tokens written / forwards
    trajectories: tuple[Trajectory, ...] | None

    __repr__ = short_repr


class Placement(NamedTuple):
    """A canvas over a text: its start, and the position up to which its tokens are kept."""

    start: int
    keep_until: int


_UNPLACED = Placement(0, 0)


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


class InfillOptions(CanvasOptions, WatchOptions, total=False):
    """Options of `infill`, which describes them, and of `edit`."""

    attention_mask: Tensor | None
    images: ImagesOption
    tail_token_id: int | None


@takes_options(CanvasOptions)
def infill_row(model: Denoiser, tokens: Tensor, holes: Holes, **options: Unpack[CanvasOptions]) -> "HoleRow":
    """Return a text (1, N) with holes as a row of a `Batch`, which writes the tokens of `infill`.

    Example: `batch.add(infill_row(model, tokens, [(3, 6)], seed=1))`.
    """
    require(options.get("constraint") is None, "infill_row constraint", "be None", options.get("constraint"))
    tokens, real, writer = _read_options("infill", model, tokens, cast(InfillOptions, options))
    todo = _read_todo(tokens, real, holes, writer)
    (row,) = _text_rows(tokens, real, todo)
    return HoleRow(writer, row)


@takes_options(InfillOptions)
@torch.no_grad()
def infill(model: Denoiser, tokens: Tensor, holes: Holes, **options: Unpack[InfillOptions]) -> Infilling:
    """Write the holes of tokens (B, N); everything else stays unchanged.

    holes: booleans (B, N), spans [(start, stop), ...] for all rows, or a token id that marks a hole. They may be longer
    than a canvas. attention_mask (B, N) is 0 for padding, on either side. A canvas ends when all tokens that it will
    keep are decided. Images must stand before the first hole of their row.

    If a text ends inside a canvas, `tail_token_id` fills the positions after it. Pass the stop token for models that
    were tuned on canvases padded with it. By default, under mask noise, these positions stay masked, and nothing is
    written there. Under other noises, or if the network takes a level per position, they are written freely and
    dropped.

    The other options are those of `generate`; `allowed` is over the positions of the text. Under a `constraint` each
    hole becomes a text of the language, of exactly the hole's length. A recorded run encodes the whole prefix of each
    canvas again, because its replay does.

    Under mask noise an exact network draws the holes from their conditional distribution. Uniform noise is not
    visible: a network that takes one noise level per canvas, or none, treats given tokens as noisy too. With
    `ModelConfig.noise_conditioning` a network gets a level per position, 0 where the text is given. Train it with
    `Objective.holes_prob`, which freezes the text between random holes.

    If an exact network takes one level per canvas, `LeaveOneOutGibbs` with `Loop(plateau=0.99)` approximates the
    conditional distribution of the holes. On the plateau the noise level is 0.01, so the network trusts given tokens.
    This did not help an earlier version of the checkpoint `dgemma/text`, which takes no noise level.

    Example: `infill(model, tokens, [(12, 20)], noise=MaskNoise(vocab_size), sampler=Confidence(), seed=1).tokens`.
    """
    tokens, real, writer = _read_options("infill", model, tokens, options)
    return writer.write(tokens, real, _read_todo(tokens, real, holes, writer))


@takes_options(InfillOptions)
@torch.no_grad()
def edit(
    model: Denoiser,
    tokens: Tensor,
    *,
    noise_level: float = 0.5,
    frozen: Tensor | None = None,
    **options: Unpack[InfillOptions],
) -> Infilling:
    """Rewrite tokens (B, N) in place: noise them to `noise_level` (1 discards the text), then denoise from there.

    frozen (B, N) bool marks tokens that stay. A row's first token always stays, because a canvas needs a prefix. The
    other arguments are those of `infill`; under a `constraint` each run of tokens that are not frozen becomes a text of
    the language. `steps` counts all steps from pure noise (level 1), including those that this run skips. The run
    starts at the step whose time is nearest to that of `noise_level`, and the text is noised to that step's level. With
    few steps this level may differ much from `noise_level`.

    Example: `edit(model, tokens, noise_level=0.3, frozen=is_prompt)`.
    """
    tokens, real, writer = _read_options("edit", model, tokens, options)
    level = arguments.read_noise_level("edit", noise_level)
    todo = real & (real.cumsum(1) > 1)
    if frozen is not None:
        rule = f"be booleans of the tokens' shape {tuple(tokens.shape)}"
        require_tensor(frozen, "edit frozen", rule, shape=tokens.shape, dtypes=(torch.bool,))
        todo = todo & ~frozen.to(tokens.device)
    rule = "leave a token to rewrite in every row"
    require(bool(todo.any(1).all()), "edit frozen", rule, frozen, "Omit the rows that have none.")
    _check_text(tokens, real, writer)
    return replace(writer, plan=replace(writer.plan, noise_level=level), from_text=True).write(tokens, real, todo)


@dataclass
class _TextRow:
    """One row of the batch without its padding, on the host."""

    index: int
    columns: Tensor  # (n,) the positions of its tokens in the batch
    text: Tensor  # (n,) int64
    todo: Tensor  # (n,) bool
    place: Placement = _UNPLACED  # of the next canvas
    num_read: int = 0  # tokens already in the prefix
    first_start: int = 1  # the first position that a canvas may cover, after the images

    def under(self, values: Tensor, canvas_len: int, beyond: int) -> Tensor:
        """Return the part of values (n,) that the canvas covers, (C,). Positions after the text get `beyond`."""
        part = values[self.place.start : self.place.start + canvas_len]
        return F.pad(part, (0, canvas_len - len(part)), value=beyond)

    def read(self) -> Tensor:
        """Return the text left of the canvas that is not yet in the prefix."""
        start, self.num_read = self.num_read, self.place.start
        return self.text[start : self.place.start]

    def keep(self, draft: Tensor) -> tuple[Tensor, Tensor]:
        """Write the holes that the placement keeps, from a finished canvas (C,).

        Return their places (k,) on the canvas and in the row of the batch.
        """
        start, keep_until = self.place
        kept = self.todo[start:keep_until].nonzero()[:, 0]
        self.text[start + kept] = draft.cpu()[kept]
        self.todo[start + kept] = False
        return kept.to(draft.device), self.columns[start + kept].to(draft.device)


@dataclass(frozen=True)
class _Writer:
    """Writes canvas after canvas until every hole is written; each row has its own placement."""

    name: str  # of the function, for errors
    model: Denoiser
    plan: Plan  # a template of one canvas, which `plan_canvas` completes; `span.allowed` covers the whole text
    tail_token_id: int | None
    on_step: OnStep | None
    record_top: int | None  # None records nothing
    progress: bool
    from_text: bool = False  # start from noised text instead of noise
    constraint: Constraint = None

    def write(self, tokens: Tensor, real: Tensor, todo: Tensor) -> Infilling:
        """Write the positions `todo` of `tokens`, of which `real` are not padding; all (B, N)."""
        device = tokens.device
        out, log_probs = tokens.clone(), torch.zeros(tokens.shape, device=device)
        steps, forwards = torch.zeros(2, tokens.shape[0], dtype=torch.int64, device=device)
        rows = _text_rows(tokens, real, todo)
        for row in rows:
            row.first_start = self._first_start(row)
        language = None if self.constraint is None else self._language(rows)
        cache: Cache | None = None
        knobs, trajectories = self.plan.knobs, []
        show = self.progress and not shows_progress(self.on_step)
        with progress_bar(desc="denoising", unit="step", show=show) as bar:
            for number in itertools.count():
                for row in rows:
                    row.place = place_canvas(row.todo, self.plan.canvas_len, row.first_start)
                plan = self.plan_canvas(rows, number, knobs, language, device)
                trajectory = None if self.record_top is None else Trajectory(plan, top=self.record_top)
                cache = self._read_prefix(cache, rows, plan)
                index = torch.tensor([row.index for row in rows], device=device)
                state = replace(Rows(plan).start(self.model, knobs), rows=index)
                events = denoise_canvas(self.model, state, cache, knobs)
                drafts, num_steps, num_forwards, knobs = run_events(
                    events, bar, on_step=self.on_step, recording=trajectory, rows=state.rows
                )
                scores = self._score(state, cache, drafts)
                if trajectory is not None:
                    trajectory.add_commit(Rows(plan).write(drafts, num_steps, num_forwards))
                    trajectories.append(trajectory)
                steps[index] += num_steps
                forwards[index] += num_forwards
                for row, draft, score in zip(rows, drafts, scores, strict=True):
                    kept, columns = row.keep(draft)
                    out[row.index, columns] = draft[kept]
                    log_probs[row.index, columns] = score[kept]
                unfinished = [i for i, row in enumerate(rows) if bool(row.todo.any())]
                if not unfinished:
                    break
                rows, cache = [rows[i] for i in unfinished], cache.select(torch.tensor(unfinished, device=device))
        return Infilling(
            tokens=out,
            log_probs=log_probs,
            steps=steps,
            tokens_per_forward=todo.sum(1) / forwards,
            trajectories=None if self.record_top is None else tuple(trajectories),
        )

    def _first_start(self, row: _TextRow) -> int:
        """Return the first position of a row that a canvas may cover: after the first token and after the images."""
        if self.plan.images is None:
            return 1
        assert isinstance(self.model.config, ModelConfig)
        start = max((row.text == self.model.config.image_token_id).nonzero().flatten().tolist(), default=0) + 1
        require(not bool(row.todo[:start].any()), f"{self.name} images", "stand before the first hole", start)
        return start

    def _language(self, rows: list[_TextRow]) -> HoleLanguage:
        """The constraint over the texts of all rows without padding."""
        holes, allowed = pad_sequence([row.todo for row in rows], batch_first=True), self.plan.span.allowed
        if allowed is not None and allowed.shape[1] > 1:
            tables = [allowed[row.index if len(allowed) > 1 else 0, row.columns.to(allowed.device)] for row in rows]
            allowed = pad_sequence(tables, batch_first=True, padding_value=True)
        return HoleLanguage(self.name, self.constraint, holes, allowed, self.plan.noise)

    def plan_canvas(
        self, rows: list[_TextRow], number: int, knobs: Knobs, language: HoleLanguage | None, device: torch.device
    ) -> Plan:
        """Plan the next canvas of every row as a separate run, whose prompt is the text left of the canvas."""
        canvas_len = self.plan.canvas_len
        text = torch.stack([row.under(row.text, canvas_len, -1) for row in rows]).to(device)
        frozen = torch.stack([row.under(~row.todo, canvas_len, False) for row in rows]).to(device)
        kept = torch.tensor([row.place.keep_until - row.place.start for row in rows], device=device)
        awaited = ~frozen & (torch.arange(canvas_len, device=device) < kept[:, None])
        text_len = [min(len(row.text) - row.place.start, canvas_len) for row in rows]
        canvas, allowed = torch.full_like(text, -1), _allowed_under(self.plan.span.allowed, rows, canvas_len)
        prefix, is_prefix = _pad_rows([row.text[: row.place.start] for row in rows], device)
        plan = replace(
            self.plan,
            prompt_tokens=prefix,
            attention_mask=is_prefix,
            knobs=knobs,
            seeds=self.plan.seeds[:, [row.index for row in rows]],
            eos_token_ids=(),
            span=Span(canvas=canvas, allowed=allowed, awaited=awaited),
            first_block=number,
            text_len=torch.tensor(text_len, device=device) if min(text_len) < canvas_len else None,
            language=None if language is None else language.canvases(rows, canvas_len).to(device),
            images=None if self.plan.images is None else tuple(self.plan.images[row.index] for row in rows),
        )
        if self.from_text:
            # The level is that of the first step, which is rarely exactly the requested one.
            canvas = _corrupt(text, allowed, Rows(plan).start(self.model, knobs), plan)
        canvas = torch.where(frozen, text, canvas)
        # Under mask noise, positions after the text are frozen masks by default. The sampler spends all its steps on
        # the holes, and the masks tell the network that the text may go on. A network that takes the level of each
        # position is an exception, because it would read level 0 at frozen masks.
        tail = self.tail_token_id
        if tail is None and plan.noise.kind == "mask" and not self.model.takes_position_levels:
            tail = plan.noise.mask_token
        if tail is not None and plan.text_len is not None:
            is_tail = torch.arange(canvas_len, device=device) >= plan.text_len[:, None]
            canvas, frozen = torch.where(is_tail, tail, canvas), frozen | is_tail
        return replace(plan, span=replace(plan.span, canvas=canvas, frozen=frozen))

    def _read_prefix(self, cache: Cache | None, rows: list[_TextRow], plan: Plan) -> Cache:
        """Encode the text left of each row's canvas: its new part, or all of it for a recorded run."""
        unread = [row.read() for row in rows]
        if self.record_top is not None or cache is None:
            return self.model.encode_with(join_images(plan.images), plan.prompt_tokens, None, plan.attention_mask)
        tokens, is_new = _pad_rows(unread, plan.prompt_tokens.device)
        return self.model.encode(tokens, cache, is_new) if tokens.shape[1] else cache

    def _score(self, state: DenoiseState, cache: Cache, drafts: Tensor) -> Tensor:
        """The log-probability of every draft given the canvas before its first step, (R, C)."""
        prediction = self.model.denoise_at(state.noise_level, state.canvas, cache, frozen=state.frozen)
        return prediction.shaped(allowed=state.noise.proposable(None, state.device)).log_prob(drafts).float()


class HoleRow(Rows):
    """One text with holes. Each of its blocks is a canvas over the first hole that is left."""

    def __init__(self, writer: _Writer, row: _TextRow) -> None:
        self._writer, self._row = writer, row
        super().__init__(self._next_plan(0))
        self.unread = row.read()[None].to(writer.model.device)

    def _next_plan(self, number: int) -> Plan:
        writer, self._row.place = self._writer, place_canvas(self._row.todo, self._writer.plan.canvas_len)
        return writer.plan_canvas([self._row], number, writer.plan.knobs, None, writer.model.device)

    def start(self, model: Denoiser, knobs: Knobs) -> DenoiseState:
        return Rows(self.plan).start(model, knobs)  # the plan is for one canvas

    def write(self, drafts: Tensor, steps: Tensor, forwards: Tensor) -> BlockCommit:
        """Keep the tokens of the holes that the canvas has finished."""
        commit = super().write(drafts, steps, forwards)
        self._row.keep(drafts[0])
        self.ended = not bool(self._row.todo.any())
        if not self.ended:
            self.plan = self._next_plan(len(self.blocks))
            self.unread = self._row.read()[None].to(drafts.device)
        return commit

    @property
    def new_tokens(self) -> Tensor:
        """The text so far, (1, N)."""
        return self._row.text[None]


def _text_rows(tokens: Tensor, real: Tensor, todo: Tensor) -> list[_TextRow]:
    """Return the rows of a batch without padding: tokens, real tokens and those to write, all (B, N)."""
    return [
        _TextRow(index, kept.nonzero()[:, 0], text[kept], holes[kept])
        for index, (text, kept, holes) in enumerate(zip(tokens.cpu(), real.cpu(), todo.cpu(), strict=True))
    ]


def _pad_rows(parts: list[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Pad rows of different lengths into one tensor, (R, longest). Also return a mask of the real entries."""
    is_real = torch.arange(max(len(part) for part in parts)) < torch.tensor([len(part) for part in parts])[:, None]
    return pad_sequence(parts, batch_first=True).to(device), is_real.to(device)


def _allowed_under(allowed: Tensor | None, rows: list[_TextRow], canvas_len: int) -> Tensor | None:
    """The part of allowed (B or 1, N or 1, V) under each row's canvas, (R, C or 1, V); all True after its end."""
    if allowed is None:
        return None
    if allowed.shape[1] == 1:
        return allowed if allowed.shape[0] == 1 else allowed[[row.index for row in rows]]
    anything = F.pad(allowed, (0, 0, 0, 1), value=True)  # (B or 1, N + 1, V)
    end = allowed.shape[1]
    return torch.stack(
        [
            anything[row.index if len(allowed) > 1 else 0, row.under(row.columns.clamp(max=end), canvas_len, end)]
            for row in rows
        ]
    )


def _corrupt(text: Tensor, allowed: Tensor | None, state: DenoiseState, plan: Plan) -> Tensor:
    """Noise the text (R, C) to the state's level; -1 after its end, and where the result is not allowed."""
    u_event, u_token = state.uniform("corrupt event"), state.uniform("corrupt token")
    noised = plan.noise.corrupt(text, state.noise_level, u_event, u_token, allowed=allowed)
    ends = text < 0
    if allowed is not None:
        table = allowed.expand(-1, plan.canvas_len, -1)
        forbidden = ~table.gather(-1, noised.clamp(min=0)[..., None])[..., 0]
        ends = ends | (forbidden & ~plan.noise.masked(noised))
    return torch.where(ends, -1, noised)


def _read_options(name: str, model: Denoiser, tokens: Any, options: InfillOptions) -> tuple[Tensor, Tensor, _Writer]:
    """Check tokens and options like `generate`; return the tokens in int64, those that are real, and the writer."""
    check_denoiser(name, model)
    longest = model.config.max_position_embeddings
    rule = f"be integer ids of shape (batch, 1 to {longest} positions)"
    require_tensor(tokens, f"{name} tokens", rule, shape=(None, None), dtypes=(torch.int64, torch.int32))
    require(0 not in tokens.shape and tokens.shape[1] <= longest, f"{name} tokens", rule, tokens)
    settings, of_canvas = fill_in(options, InfillOptions), select(options, CanvasOptions)
    allowed, constraint = of_canvas.pop("allowed", None), of_canvas.pop("constraint", None)
    # The plan is for one canvas after a prefix of one token, the shortest possible prefix. Longer prefixes always fit,
    # because a canvas after a longer prefix ends within the text, and the length of the text was checked above.
    canvas_len = model.config.canvas_length
    # `read_plan` accepts a schedule that starts below level 1 only if it gets a canvas. `edit` may use such a schedule,
    # and `infill` may not, because its holes start as pure noise.
    canvas = tokens.new_zeros(len(tokens), canvas_len, dtype=torch.int64) if name == "edit" else None
    plan = read_plan(model, tokens[:, :1], max_new_tokens=canvas_len, canvas=canvas, **of_canvas)
    if allowed is not None:
        shape = (tokens.shape[0], tokens.shape[1])
        allowed = arguments.read_allowed(f"{name} allowed", allowed, plan.noise, shape, tokens.device)
    real, mask = torch.ones_like(tokens, dtype=torch.bool), settings["attention_mask"]
    if mask is not None:
        rule = f"be 1 for real tokens and 0 for padding, of the tokens' shape {tuple(tokens.shape)}"
        require_tensor(mask, f"{name} attention_mask", rule, shape=tokens.shape)
        require(bool(((mask == 0) | (mask == 1)).all()), f"{name} attention_mask", rule, mask)
        real = mask.to(tokens.device, torch.bool)
    writer = _Writer(
        name=name,
        model=model,
        plan=replace(plan, span=Span(allowed=allowed), images=arguments.read_images(model, tokens, settings["images"])),
        tail_token_id=settings["tail_token_id"],
        on_step=settings["on_step"],
        record_top=settings["record_top"] if settings["record"] else None,
        progress=settings["progress"],
        constraint=constraint,
    )
    return tokens.long(), real, writer


def _read_holes(holes: Holes, tokens: Tensor) -> Tensor:
    """Return any form of `holes` as booleans (B, N)."""
    if isinstance(holes, Tensor):
        rule = f"be booleans of the tokens' shape {tuple(tokens.shape)}"
        require_tensor(holes, "infill holes", rule, shape=tokens.shape, dtypes=(torch.bool,))
        return holes.to(tokens.device)
    hole = as_int(holes)
    if hole is not None:
        return torch.eq(tokens, hole)
    marked, length = torch.zeros_like(tokens, dtype=torch.bool), tokens.shape[1]
    for start, stop in cast(Sequence[tuple[int, int]], holes):
        rule = f"be spans [(start, stop), ...] with 0 <= start < stop <= {length}"
        require(0 <= start < stop <= length, "infill holes", rule, holes)
        marked[:, start:stop] = True
    return marked


def _read_todo(tokens: Tensor, real: Tensor, holes: Holes, writer: _Writer) -> Tensor:
    """Check the holes and the text around them; return the tokens to write, (B, N) bool."""
    todo = _read_holes(holes, tokens) & real
    fits = bool(todo.any(1).all()) and not bool((todo & (real.cumsum(1) == 1)).any())
    rule = "mark a token in every row, but never the first, which is the prefix of a canvas"
    require(fits, "infill holes", rule, holes, "Put the bos token first, and omit rows without a hole.")
    _check_text(tokens, real & ~todo, writer)
    return todo


def _check_text(tokens: Tensor, kept: Tensor, writer: _Writer) -> None:
    """Check that the tokens outside the holes are in the vocabulary and are not noise."""
    noise = writer.plan.noise
    strange = tokens[kept & ((tokens < 0) | (tokens >= noise.vocab_size) | noise.masked(tokens))].tolist()
    rule = f"hold ids in [0, {noise.vocab_size}) and no mask token outside the holes"
    require(not strange, f"{writer.name} tokens", rule, strange, "Mark them as holes.")
    check_tail(writer.name, writer.tail_token_id, noise)


def check_tail(name: str, token: int | None, noise: Noise) -> None:
    """Check the token that fills a canvas after the end of a text."""
    fits = token is None or (0 <= token < noise.vocab_size and token != noise.mask_token)
    require(fits, f"{name} tail_token_id", f"be a real token below {noise.vocab_size}, or None", token)
