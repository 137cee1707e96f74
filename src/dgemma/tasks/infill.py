"""Infilling of holes and editing in place: canvases cover the part that changes, and all other tokens are frozen."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.checks import as_int, require, require_tensor, short_repr
from dgemma.diffusion.noise import Noise
from dgemma.diffusion.span import Span
from dgemma.model.cache import Cache
from dgemma.model.denoiser import Denoiser, check_denoiser
from dgemma.printing import progress_bar
from dgemma.run import arguments
from dgemma.run.loop import denoise_canvas, drain
from dgemma.run.options import CanvasOptions, ImagesOption, WatchOptions, fill_in, select, takes_options
from dgemma.run.plan import read_plan
from dgemma.run.recorded.trajectory import Trajectory
from dgemma.run.records import shows_progress
from dgemma.tasks.holes import Filling, HoleRows

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


class InfillOptions(CanvasOptions, WatchOptions, total=False):
    """Options of `infill`, which describes them, and of `edit`."""

    attention_mask: Tensor | None
    images: ImagesOption
    tail_token_id: int | None


@takes_options(CanvasOptions)
def infill_row(model: Denoiser, tokens: Tensor, holes: Holes, **options: Unpack[CanvasOptions]) -> HoleRows:
    """Return a text (1, N) with holes as a row of a `Batch`, which writes the tokens of `infill`."""
    require(options.get("constraint") is None, "infill_row constraint", "be None", options.get("constraint"))
    filling = _read_options("infill", model, tokens, cast(InfillOptions, options))
    return HoleRows(filling, _read_todo(filling, holes))


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
    filling = _read_options("infill", model, tokens, options)
    return _fill(filling, _read_todo(filling, holes), fill_in(options, WatchOptions))


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
    filling = _read_options("edit", model, tokens, options)
    level = arguments.read_noise_level("edit", noise_level)
    todo = filling.real & (filling.real.cumsum(1) > 1)
    if frozen is not None:
        rule = f"be booleans of the tokens' shape {tuple(tokens.shape)}"
        require_tensor(frozen, "edit frozen", rule, shape=tokens.shape, dtypes=(torch.bool,))
        todo = todo & ~frozen.to(tokens.device)
    rule = "leave a token to rewrite in every row"
    require(bool(todo.any(1).all()), "edit frozen", rule, frozen, "Omit the rows that have none.")
    _check_text(filling, filling.real)
    filling = replace(filling, plan=replace(filling.plan, noise_level=level), from_text=True)
    return _fill(filling, todo, fill_in(options, WatchOptions))


def _fill(filling: Filling, todo: Tensor, watch: WatchOptions) -> Infilling:
    """Write the positions `todo` (B, N)."""
    model, rows, knobs, recorded = filling.model, HoleRows(filling, todo), filling.plan.knobs, list[Trajectory]()
    on_step, top = watch["on_step"], watch["record_top"]
    steps, forwards = torch.zeros(2, len(todo), dtype=torch.int64, device=todo.device)
    cache: Cache | None = None
    show = watch["progress"] and not shows_progress(on_step)
    with progress_bar(desc="denoising", unit="step", show=show) as bar:
        while not rows.ended:
            cache = rows.encode(model, cache)
            state = rows.start(model, knobs)
            events = denoise_canvas(model, state, cache, knobs)
            if filling.is_recorded:
                recorded.append(Trajectory(replace(rows.plan, knobs=knobs), top=top))
                events = recorded[-1].record(events, may_change=on_step is not None, rows=state.rows)
            drafts, num_steps, num_forwards, knobs = drain(events, on_step=on_step, bar=bar)
            # The scores are of the canvas before its first step, at temperature 1.
            first = model.denoise_at(state.noise_level, state.canvas, cache, frozen=state.frozen)
            first = first.shaped(allowed=state.noise.proposable(None, state.device))
            for text, score in zip(rows.open, first.log_prob(drafts).float(), strict=True):
                text.keep(text.log_probs, score)
            commit = rows.commit(drafts, num_steps, num_forwards)
            if filling.is_recorded:
                recorded[-1].add_commit(commit)
            steps[state.rows] += num_steps
            forwards[state.rows] += num_forwards
    tokens, log_probs = filling.tokens.clone(), torch.zeros(todo.shape, device=todo.device)
    for text in rows.texts:
        tokens[text.index, text.columns] = text.tokens.to(tokens)
        log_probs[text.index, text.columns] = text.log_probs.to(log_probs)
    return Infilling(
        tokens=tokens,
        log_probs=log_probs,
        steps=steps,
        tokens_per_forward=todo.sum(1) / forwards,
        trajectories=tuple(recorded) if filling.is_recorded else None,
    )


def _read_options(name: str, model: Denoiser, tokens: Any, options: InfillOptions) -> Filling:
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
    return Filling(
        name=name,
        model=model,
        tokens=tokens.long(),
        real=real,
        plan=replace(plan, span=Span(allowed=allowed), images=arguments.read_images(model, tokens, settings["images"])),
        constraint=constraint,
        tail_token_id=settings["tail_token_id"],
        is_recorded=settings["record"],
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


def _read_todo(filling: Filling, holes: Holes) -> Tensor:
    """Check the holes and the text around them; return the tokens to write, (B, N) bool."""
    real, todo = filling.real, _read_holes(holes, filling.tokens) & filling.real
    fits = bool(todo.any(1).all()) and not bool((todo & (real.cumsum(1) == 1)).any())
    rule = "mark a token in every row, but never the first, which is the prefix of a canvas"
    require(fits, "infill holes", rule, holes, "Put the bos token first, and omit rows without a hole.")
    _check_text(filling, real & ~todo)
    return todo


def _check_text(filling: Filling, kept: Tensor) -> None:
    """Check that the tokens outside the holes are in the vocabulary and are not noise."""
    tokens, noise = filling.tokens, filling.plan.noise
    strange = tokens[kept & ((tokens < 0) | (tokens >= noise.vocab_size) | noise.masked(tokens))].tolist()
    rule = f"hold ids in [0, {noise.vocab_size}) and no mask token outside the holes"
    require(not strange, f"{filling.name} tokens", rule, strange, "Mark them as holes.")
    check_tail(filling.name, filling.tail_token_id, noise)


def check_tail(name: str, token: int | None, noise: Noise) -> None:
    """Check the token that fills a canvas after the end of a text."""
    fits = token is None or (0 <= token < noise.vocab_size and token != noise.mask_token)
    require(fits, f"{name} tail_token_id", f"be a real token below {noise.vocab_size}, or None", token)
