"""Fill holes in a text, or edit one in place: canvases laid over what is to change, everything else frozen.

A canvas sees the text to its left as prefix, but nothing to its right. So each canvas begins at the first hole that is
left, where it has most of what follows inside it; a hole too close to its end waits for a canvas of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dgemma import arguments
from dgemma.changes import Changes, apply_changes
from dgemma.generate import Denoised, Denoiser, OnStep, denoise_canvas, start_state
from dgemma.model.cache import PrefixCache
from dgemma.plan import Knobs, Plan, read_plan
from dgemma.state import DenoiseState

_OPTIONS = frozenset({"steps", "noise", "sampler", "temperature", "stop", "top_k", "top_p", "seed", "allowed"})

Holes = Tensor | int | Sequence[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Infilling:
    """A text made whole. log_probs are those of the written tokens at their last step, 0 where the text was given."""

    tokens: Tensor  # (B, N) int64
    log_probs: Tensor  # (B, N) float32
    steps: Tensor  # (B,) forwards, over all canvases
    tokens_per_forward: Tensor  # (B,): tokens written / forwards


class Placement(NamedTuple):
    """A canvas over a text: where it starts, and the position up to which what it writes is kept."""

    start: int
    keep_until: int


def place_canvas(todo: Tensor, canvas_len: int) -> Placement:
    """Where the next canvas goes: todo (N,) bool marks what is still to be written, not the first token.

    It starts at the first hole, or earlier where the text ends before it does. A hole is kept if a quarter of a canvas
    lies to its right, or all the text there is; of one too long for that, as much as leaves the last canvas that view.

    Example: with holes at 5..7 and 18..19 of 100 tokens, a canvas of 16 gives `Placement(start=5, keep_until=8)`.
    """
    text_len = len(todo)
    edges = torch.diff(F.pad(todo.int(), (1, 1))).nonzero()[:, 0].tolist()
    holes = list(zip(edges[::2], edges[1::2], strict=True))
    first, first_stop = holes[0]
    start = max(1, min(first, text_len - canvas_len))
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


@torch.no_grad()
def infill(
    model: Denoiser,
    tokens: Tensor,
    holes: Holes,
    *,
    attention_mask: Tensor | None = None,
    tail_token_id: int | None = None,
    on_step: OnStep | None = None,
    **options: Any,
) -> Infilling:
    """Write the holes of tokens (B, N); everything else stays as it is.

    holes: booleans (B, N), spans [(start, stop), ...] for all rows, or a token id that stands for a hole. They may be
    longer than a canvas. attention_mask (B, N) is 0 for padding, on whichever side. A text that ends inside a canvas is
    followed by positions that are written freely and dropped, or by `tail_token_id` (models tuned on canvases that are
    filled up with a stop token expect that one). The options of `generate` hold: steps, noise, sampler, temperature,
    stop, top_k, top_p, seed, and `allowed` over the positions of the text.

    Example: `infill(model, tokens, [(12, 20)], noise=MaskNoise(vocab_size), sampler=Confidence(), seed=1).tokens`.
    """
    tokens, plan = _read_options("infill", model, tokens, options)
    real = _read_mask("infill", attention_mask, tokens)
    todo = _read_holes(holes, tokens) & real
    if not bool(todo.any(1).all()):
        raise ValueError("infill holes must mark a token in every row. Leave out the rows that have none.")
    if bool((todo & (real.cumsum(1) == 1)).any()):
        raise ValueError("infill holes must spare the first token of a row, the canvas's prefix. Begin it with bos.")
    _check_text("infill", tokens, real & ~todo, tail_token_id, plan)
    return _write(model, tokens, real, todo, plan, tail_token_id, on_step)


@torch.no_grad()
def edit(
    model: Denoiser,
    tokens: Tensor,
    *,
    noise_level: float = 0.5,
    frozen: Tensor | None = None,
    attention_mask: Tensor | None = None,
    tail_token_id: int | None = None,
    on_step: OnStep | None = None,
    **options: Any,
) -> Infilling:
    """Rewrite tokens (B, N) in place: noise them to `noise_level` (1 forgets the text), then denoise from there.

    frozen (B, N) bool marks what stays; a row's first token always does, since a canvas needs a prefix. Arguments
    otherwise as for `infill`; `steps` is what a whole denoising would take, of which those above the level are skipped.
    The text gets the noise of the step it begins with, the nearest to the level: of few steps, that may be far.

    Example: `edit(model, tokens, noise_level=0.3, frozen=is_prompt)`.
    """
    tokens, plan = _read_options("edit", model, tokens, options)
    plan = replace(plan, noise_level=arguments.read_noise_level(noise_level, tokens))
    real = _read_mask("edit", attention_mask, tokens)
    todo = real & (real.cumsum(1) > 1)
    if frozen is not None:
        _require("edit frozen", frozen, tokens, torch.bool)
        todo = todo & ~frozen.to(tokens.device)
    if not bool(todo.any(1).all()):
        raise ValueError("edit frozen must leave a token to rewrite in every row. Leave out the rows that have none.")
    _check_text("edit", tokens, real, tail_token_id, plan)
    return _write(model, tokens, real, todo, plan, tail_token_id, on_step, from_text=True)


@dataclass
class _Row:
    """One row of the batch without its padding, on the host."""

    index: int
    columns: Tensor  # (n,) where its tokens are in the batch
    text: Tensor  # (n,) int64
    todo: Tensor  # (n,) bool
    num_read: int  # tokens already in the prefix
    place: Placement

    def under(self, values: Tensor, canvas_len: int, beyond: int) -> Tensor:
        """The part of values (n,) under the canvas, `beyond` where the text has ended, (C,)."""
        part = values[self.place.start : self.place.start + canvas_len]
        return F.pad(part, (0, canvas_len - len(part)), value=beyond)


def _write(
    model: Denoiser,
    tokens: Tensor,
    real: Tensor,
    todo: Tensor,
    plan: Plan,
    tail_token_id: int | None,
    on_step: OnStep | None,
    *,
    from_text: bool = False,
) -> Infilling:
    """Canvas after canvas until nothing is left to do, each row at its own places; from noise, or from noised text."""
    device, canvas_len = tokens.device, plan.canvas_len
    out, log_probs = tokens.clone(), torch.zeros(tokens.shape, device=device)
    forwards = torch.zeros(tokens.shape[0], dtype=torch.int64, device=device)
    rows = [
        _Row(index, kept.nonzero()[:, 0], text[kept], holes[kept], 0, Placement(0, 0))
        for index, (text, kept, holes) in enumerate(zip(tokens.cpu(), real.cpu(), todo.cpu(), strict=True))
    ]
    cache: PrefixCache | None = None
    knobs, canvas_index = plan.knobs, 0
    while rows:
        for row in rows:
            row.place = place_canvas(row.todo, canvas_len)
        cache = _read_prefix(model, cache, rows, device)
        index = torch.tensor([row.index for row in rows], device=device)
        text = torch.stack([row.under(row.text, canvas_len, -1) for row in rows]).to(device)
        fixed = torch.stack([row.under(~row.todo, canvas_len, False) for row in rows]).to(device)
        allowed = _allowed_under(plan.span.allowed, rows, canvas_len)
        begin = partial(
            start_state,
            knobs,
            plan.noise,
            seeds=plan.seeds[0, index],
            canvas_len=canvas_len,
            num_steps=plan.num_steps,
            block=canvas_index,
            rows=index,
            allowed=allowed,
            noise_level=plan.noise_level,
        )
        # The level is that of the step the canvas begins with, which is rarely the one asked for.
        canvas = _corrupt(text, allowed, begin(), plan) if from_text else torch.full_like(text, -1)
        canvas = torch.where(fixed, text, canvas)
        if tail_token_id is not None:
            canvas, fixed = torch.where(text < 0, tail_token_id, canvas), fixed | (text < 0)
        state = begin(canvas=canvas, frozen=fixed)
        (drafts, num_forwards, knobs), draft_log_probs = _denoise(model, state, cache, knobs, on_step)
        forwards[index] += num_forwards
        for i, row in enumerate(rows):
            start, keep_until = row.place
            kept = row.todo[start:keep_until].nonzero()[:, 0]  # places on the canvas
            row.text[start + kept] = drafts[i].cpu()[kept]
            row.todo[start + kept] = False
            columns = row.columns[start + kept].to(device)
            out[row.index, columns] = drafts[i, kept]
            log_probs[row.index, columns] = draft_log_probs[i, kept]
        unfinished = [i for i, row in enumerate(rows) if bool(row.todo.any())]
        rows, cache = [rows[i] for i in unfinished], cache.select(torch.tensor(unfinished, device=device).long())
        canvas_index += 1
    written = todo.sum(1)
    return Infilling(tokens=out, log_probs=log_probs, steps=forwards, tokens_per_forward=written / forwards)


def _denoise(
    model: Denoiser, state: DenoiseState, cache: PrefixCache, knobs: Knobs, on_step: OnStep | None
) -> tuple[Denoised, Tensor]:
    """The canvas at its end, and the log-probability of every token of it at its row's last step, (R, C)."""
    log_probs = torch.zeros(state.canvas.shape, device=state.device)
    events = denoise_canvas(model, state, cache, knobs)
    changes: Changes = None
    while True:
        try:
            record = events.send(changes)
        except StopIteration as finished:
            return finished.value, log_probs
        changes = on_step(record) if on_step is not None else None
        after, _ = apply_changes(changes, record.state, record.knobs)
        ended = after.done | (after.step >= after.num_steps)
        if bool(ended.any()):
            here = torch.searchsorted(state.rows, record.rows[ended])  # rows ascend
            log_probs[here] = record.prediction.log_prob(after.draft)[ended].float()


def _read_prefix(model: Denoiser, cache: PrefixCache | None, rows: list[_Row], device: torch.device) -> PrefixCache:
    """Encode what lies between the prefix so far and each row's canvas."""
    new = [row.text[row.num_read : row.place.start] for row in rows]
    for row in rows:
        row.num_read = row.place.start
    tokens = pad_sequence(new, batch_first=True)  # (R, longest)
    if tokens.shape[1] == 0 and cache is not None:
        return cache
    is_new = torch.arange(tokens.shape[1]) < torch.tensor([len(part) for part in new])[:, None]
    return model.encode(tokens.to(device), cache, is_new.to(device))


def _allowed_under(allowed: Tensor | None, rows: list[_Row], canvas_len: int) -> Tensor | None:
    """The part of allowed (B or 1, N or 1, V) under each row's canvas, (R, C or 1, V); past its end, anything."""
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
    """The text (R, C), -1 beyond its end, at the state's level; -1 too where it shows a token that is not allowed."""
    u_event, u_token = state.uniform("corrupt event"), state.uniform("corrupt token")
    noised = plan.noise.corrupt(text, state.noise_level, u_event, u_token, allowed=allowed)
    ends = text < 0
    if allowed is not None:
        table = allowed.expand(-1, plan.canvas_len, -1)
        forbidden = ~table.gather(-1, noised.clamp(min=0)[..., None])[..., 0]
        ends = ends | (forbidden & ~plan.noise.masked(noised))
    return torch.where(ends, -1, noised)


def _read_options(name: str, model: Denoiser, tokens: Any, options: dict[str, Any]) -> tuple[Tensor, Plan]:
    """The tokens in int64, and the options of `generate` that make sense here, checked as there."""
    unknown = sorted(options.keys() - _OPTIONS)
    if unknown:
        raise TypeError(
            f"{name} has no argument {', '.join(unknown)}. Of generate's it takes {', '.join(sorted(_OPTIONS))}."
        )
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.is_floating_point() or 0 in tokens.shape:
        got = f"{tokens.dtype} {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(f"{name} tokens must be integer ids of shape (batch, length), got {got}.")
    longest = model.config.max_position_embeddings
    if tokens.shape[1] > longest:
        raise ValueError(
            f"{name} tokens must number at most {longest} (max_position_embeddings), got {tokens.shape[1]}. "
            "Shorten the text."
        )
    allowed = options.pop("allowed", None)
    # One canvas after one token is the least that is ever read; a canvas moves over the text, and never beyond it.
    plan = read_plan(model, tokens[:, :1], max_new_tokens=model.config.canvas_length, **options)
    if allowed is not None:
        shape = (tokens.shape[0], tokens.shape[1])
        allowed = arguments.read_allowed(f"{name} allowed", allowed, plan.noise, shape, tokens.device)
    return tokens.long(), replace(plan, span=arguments.Span(allowed=allowed))


def _read_mask(name: str, attention_mask: Tensor | None, tokens: Tensor) -> Tensor:
    """Which tokens are real, (B, N) bool."""
    if attention_mask is None:
        return torch.ones_like(tokens, dtype=torch.bool)
    _require(f"{name} attention_mask", attention_mask, tokens, None)
    return attention_mask.to(tokens.device, torch.bool)


def _read_holes(holes: Holes, tokens: Tensor) -> Tensor:
    """Any form of `holes` as booleans (B, N)."""
    if isinstance(holes, int):
        return tokens == holes
    if isinstance(holes, Tensor):
        _require("infill holes", holes, tokens, torch.bool)
        return holes.to(tokens.device)
    marked = torch.zeros_like(tokens, dtype=torch.bool)
    for span in holes:
        pair = isinstance(span, Sequence) and len(span) == 2 and all(isinstance(end, int) for end in span)
        if not pair or not 0 <= span[0] < span[1] <= tokens.shape[1]:
            raise ValueError(
                f"infill holes must be spans [(start, stop), ...] with 0 <= start < stop <= {tokens.shape[1]}, "
                f"booleans of the tokens' shape, or a token id, got {holes!r}."
            )
        marked[:, span[0] : span[1]] = True
    return marked


def _check_text(name: str, tokens: Tensor, kept: Tensor, tail_token_id: int | None, plan: Plan) -> None:
    """What is given must be real tokens: neither outside the vocabulary nor noise."""
    vocab_size = plan.noise.vocab_size
    if bool((kept & ((tokens < 0) | (tokens >= vocab_size))).any()):
        raise ValueError(
            f"{name} tokens must hold ids in [0, {vocab_size}) where they are given. Mark others as holes."
        )
    if bool((kept & plan.noise.masked(tokens)).any()):
        raise ValueError(f"{name} tokens must hold no mask token where they are given. Mark it as a hole.")
    if tail_token_id is not None and (not 0 <= tail_token_id < vocab_size or tail_token_id == plan.noise.mask_token):
        raise ValueError(f"{name} tail_token_id must be a real token below {vocab_size}, got {tail_token_id}.")


def _require(name: str, value: Any, tokens: Tensor, dtype: torch.dtype | None) -> None:
    if not isinstance(value, Tensor) or value.shape != tokens.shape or (dtype is not None and value.dtype != dtype):
        got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        kind = "a tensor" if dtype is None else str(dtype)
        raise ValueError(f"{name} must be {kind} of the tokens' shape {tuple(tokens.shape)}, got {got}.")
