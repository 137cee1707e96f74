"""Infilling of holes and editing in place: canvases cover the part that changes, and all other tokens are frozen.

A canvas sees the text to its left as prefix, but nothing to its right. So each canvas begins at the first open hole,
which puts most of the following text inside it. A hole close to the end of a canvas is left to the next canvas.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Unpack, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dgemma.checks import as_int, require, require_tensor, short_repr
from dgemma.constraints.run_language import Constraint, HoleLanguage
from dgemma.diffusion.noise import Noise
from dgemma.diffusion.span import Span
from dgemma.diffusion.state import DenoiseState
from dgemma.many.batch import BatchRow
from dgemma.model.cache import Cache
from dgemma.model.config import ModelConfig
from dgemma.model.denoiser import Denoiser, check_denoiser
from dgemma.printing import progress_bar
from dgemma.run import arguments
from dgemma.run.knobs import Knobs
from dgemma.run.loop import denoise_canvas, drain
from dgemma.run.options import CanvasOptions, ImagesOption, WatchOptions, fill_in, select, takes_options
from dgemma.run.plan import Plan, read_plan
from dgemma.run.recorded.trajectory import Trajectory
from dgemma.run.records import BlockCommit, OnStep, shows_progress
from dgemma.run.rows import Rows

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


_NOWHERE = Placement(0, 0)  # no text is left of it


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
def infill_row(model: Denoiser, tokens: Tensor, holes: Holes, **options: Unpack[CanvasOptions]) -> "HoleRows":
    """Return a text (1, N) with holes as a row of a `Batch`, which writes the tokens of `infill`."""
    require(options.get("constraint") is None, "infill_row constraint", "be None", options.get("constraint"))
    filler = _read_options("infill", model, tokens, cast(InfillOptions, options))
    return HoleRows(filler, _read_todo(filler, holes))


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
    filler = _read_options("infill", model, tokens, options)
    return filler.fill(_read_todo(filler, holes))


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
    filler = _read_options("edit", model, tokens, options)
    level = arguments.read_noise_level("edit", noise_level)
    todo = filler.real & (filler.real.cumsum(1) > 1)
    if frozen is not None:
        rule = f"be booleans of the tokens' shape {tuple(tokens.shape)}"
        require_tensor(frozen, "edit frozen", rule, shape=tokens.shape, dtypes=(torch.bool,))
        todo = todo & ~frozen.to(tokens.device)
    rule = "leave a token to rewrite in every row"
    require(bool(todo.any(1).all()), "edit frozen", rule, frozen, "Omit the rows that have none.")
    _check_text(filler, filler.real)
    return replace(filler, plan=replace(filler.plan, noise_level=level), from_text=True).fill(todo)


@dataclass
class _HoleText:
    """A row of the batch without its padding, on the host."""

    index: int  # of the row
    columns: Tensor  # (n,) the positions of its tokens in the batch
    tokens: Tensor  # (n,) int64
    todo: Tensor  # (n,) bool: the holes that are not yet written
    log_probs: Tensor  # (n,) of the written tokens
    canvas_len: int
    place: Placement = _NOWHERE  # of the present canvas

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


@dataclass(frozen=True)
class _Infiller:
    """The checked arguments of `infill` or `edit`."""

    name: str  # of the function, for errors
    model: Denoiser
    tokens: Tensor  # (B, N) int64
    real: Tensor  # (B, N) bool: not padding
    plan: Plan  # of one canvas, which `HoleRows` completes for each canvas; `span.allowed` covers the whole text
    tail_token_id: int | None
    on_step: OnStep | None
    record_top: int | None  # None records nothing
    progress: bool
    from_text: bool = False  # start from noised text instead of noise
    constraint: Constraint = None

    def fill(self, todo: Tensor) -> Infilling:
        """Write the positions `todo` (B, N)."""
        rows, knobs, recorded = HoleRows(self, todo), self.plan.knobs, list[Trajectory]()
        steps, forwards = torch.zeros(2, len(todo), dtype=torch.int64, device=todo.device)
        cache: Cache | None = None
        show = self.progress and not shows_progress(self.on_step)
        with progress_bar(desc="denoising", unit="step", show=show) as bar:
            while not rows.ended:
                cache = rows.encode(self.model, cache)
                state = rows.start(self.model, knobs)
                events = denoise_canvas(self.model, state, cache, knobs)
                if self.record_top is not None:
                    recorded.append(Trajectory(replace(rows.plan, knobs=knobs), top=self.record_top))
                    events = recorded[-1].record(events, may_change=self.on_step is not None, rows=state.rows)
                drafts, num_steps, num_forwards, knobs = drain(events, on_step=self.on_step, bar=bar)
                for text, score in zip(rows.open, self._score(state, cache, drafts), strict=True):
                    text.keep(text.log_probs, score)
                commit = rows.commit(drafts, num_steps, num_forwards)
                if self.record_top is not None:
                    recorded[-1].add_commit(commit)
                steps[state.rows] += num_steps
                forwards[state.rows] += num_forwards
        tokens, log_probs = self.tokens.clone(), torch.zeros(todo.shape, device=todo.device)
        for text in rows.texts:
            tokens[text.index, text.columns] = text.tokens.to(tokens)
            log_probs[text.index, text.columns] = text.log_probs.to(log_probs)
        return Infilling(
            tokens=tokens,
            log_probs=log_probs,
            steps=steps,
            tokens_per_forward=todo.sum(1) / forwards,
            trajectories=None if self.record_top is None else tuple(recorded),
        )

    def _score(self, state: DenoiseState, cache: Cache, drafts: Tensor) -> Tensor:
        """The log-probability of every draft given the canvas before its first step, (R, C)."""
        prediction = self.model.denoise_at(state.noise_level, state.canvas, cache, frozen=state.frozen)
        return prediction.shaped(allowed=state.noise.proposable(None, state.device)).log_prob(drafts).float()


class HoleRows(BatchRow):
    """Texts with holes. Each canvas is a run of its own, whose prompt is the text to its left.

    So after every canvas `plan` is that of the next run, for the texts that still have holes (`open`). As a row of a
    `Batch` it has one text.
    """

    block = 0  # every plan has one canvas

    def __init__(self, filler: _Infiller, todo: Tensor) -> None:
        super().__init__(filler.plan)
        self._filler, self.texts, canvas_len = filler, list[_HoleText](), filler.plan.canvas_len
        for row in zip(filler.real.cpu(), filler.tokens.cpu(), todo.cpu(), strict=True):
            columns = row[0].nonzero()[:, 0]
            tokens, holes = (values[columns] for values in row[1:])
            log_probs, index = torch.zeros(len(columns)), len(self.texts)
            self.texts.append(_HoleText(index, columns, tokens, holes, log_probs, canvas_len))
        self._first_starts = [_find_start(filler, text) for text in self.texts]
        self._language = None if filler.constraint is None else self._read_constraint(filler.constraint)
        self.open = self.texts
        self._staying: list[int] | None = None  # the places of `open` in the cache; None for all that are there
        self._place()

    def encode(self, model: Denoiser, cache: Cache | None = None) -> Cache:
        """Extend the cache by the text up to the canvases. Texts without holes leave before: they need no more."""
        if self._filler.record_top is not None:  # as a replay of this canvas will do
            return Rows(self.plan).encode(model)
        if cache is not None and self._staying is not None:
            cache = cache.select(torch.tensor(self._staying, device=self.present.device))
        return super().encode(model, cache)

    def start(self, model: Denoiser, knobs: Knobs) -> DenoiseState:
        index = torch.tensor([text.index for text in self.open], device=self.present.device)
        return replace(super().start(model, knobs), rows=index)

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
        return HoleLanguage(self._filler.name, constraint, holes, allowed, self.plan.noise)

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
        filler, texts = self._filler, self.open
        template, canvas_len, allowed = filler.plan, filler.plan.canvas_len, filler.plan.span.allowed
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
        if filler.from_text:  # the level is that of the first step, which is rarely exactly the requested one
            canvas = _corrupt(tokens, Rows(plan).start(filler.model, plan.knobs), plan)
        canvas = torch.where(frozen, tokens, canvas)
        # Under mask noise, positions after the text are frozen masks by default. The sampler spends all its steps on
        # the holes, and the masks tell the network that the text may go on. A network that takes the level of each
        # position is an exception, because it would read level 0 at frozen masks.
        tail = filler.tail_token_id
        if tail is None and plan.noise.kind == "mask" and not filler.model.takes_position_levels:
            tail = plan.noise.mask_token
        if tail is not None:
            is_tail = torch.arange(canvas_len, device=device) >= text_len[:, None]
            canvas, frozen = torch.where(is_tail, tail, canvas), frozen | is_tail
        return replace(plan, span=replace(plan.span, canvas=canvas, frozen=frozen))


def _find_start(filler: _Infiller, text: _HoleText) -> int:
    """Return the first position of a text that a canvas may cover: after the first token and after the images."""
    if filler.plan.images is None:
        return 1
    assert isinstance(filler.model.config, ModelConfig)
    start = max((text.tokens == filler.model.config.image_token_id).nonzero().flatten().tolist(), default=0) + 1
    require(not bool(text.todo[:start].any()), f"{filler.name} images", "stand before the first hole", start)
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


def _read_options(name: str, model: Denoiser, tokens: Any, options: InfillOptions) -> _Infiller:
    """Check tokens and options like `generate`."""
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
        if allowed.shape[1] > 1:
            allowed = F.pad(allowed, (0, 0, 0, tokens.shape[1] - allowed.shape[1]), value=True)
    real, mask = torch.ones_like(tokens, dtype=torch.bool), settings["attention_mask"]
    if mask is not None:
        rule = f"be 1 for real tokens and 0 for padding, of the tokens' shape {tuple(tokens.shape)}"
        require_tensor(mask, f"{name} attention_mask", rule, shape=tokens.shape)
        require(bool(((mask == 0) | (mask == 1)).all()), f"{name} attention_mask", rule, mask)
        real = mask.to(tokens.device, torch.bool)
    return _Infiller(
        name=name,
        model=model,
        tokens=tokens.long(),
        real=real,
        plan=replace(plan, span=Span(allowed=allowed), images=arguments.read_images(model, tokens, settings["images"])),
        tail_token_id=settings["tail_token_id"],
        on_step=settings["on_step"],
        record_top=min(settings["record_top"], plan.noise.vocab_size) if settings["record"] else None,
        progress=settings["progress"],
        constraint=constraint,
    )


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


def _read_todo(filler: _Infiller, holes: Holes) -> Tensor:
    """Check the holes and the text around them; return the tokens to write, (B, N) bool."""
    real, todo = filler.real, _read_holes(holes, filler.tokens) & filler.real
    fits = bool(todo.any(1).all()) and not bool((todo & (real.cumsum(1) == 1)).any())
    rule = "mark a token in every row, but never the first, which is the prefix of a canvas"
    require(fits, "infill holes", rule, holes, "Put the bos token first, and omit rows without a hole.")
    _check_text(filler, real & ~todo)
    return todo


def _check_text(filler: _Infiller, kept: Tensor) -> None:
    """Check that the tokens outside the holes are in the vocabulary and are not noise."""
    tokens, noise = filler.tokens, filler.plan.noise
    strange = tokens[kept & ((tokens < 0) | (tokens >= noise.vocab_size) | noise.masked(tokens))].tolist()
    rule = f"hold ids in [0, {noise.vocab_size}) and no mask token outside the holes"
    require(not strange, f"{filler.name} tokens", rule, strange, "Mark them as holes.")
    check_tail(filler.name, filler.tail_token_id, noise)


def check_tail(name: str, token: int | None, noise: Noise) -> None:
    """Check the token that fills a canvas after the end of a text."""
    fits = token is None or (0 <= token < noise.vocab_size and token != noise.mask_token)
    require(fits, f"{name} tail_token_id", f"be a real token below {noise.vocab_size}, or None", token)
