"""Checks of a recorded run that was read from a file: every type, shape and range, before it is used."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from dgemma.checks import show
from dgemma.diffusion.noise import Noise
from dgemma.diffusion.state import DenoiseState
from dgemma.run.arguments import MOST_STEPS, Span
from dgemma.run.knobs import Knobs
from dgemma.run.plan import Plan
from dgemma.run.records import BlockCommit

_INTS = (torch.int16, torch.int32, torch.int64)
_CHANGED = {f.name for f in fields(DenoiseState)} | {f.name for f in fields(Knobs)}
# The columns of a step by their shape: rows, rows × positions, rows × positions × candidates.
_OF_ROWS = {
    "rows": _INTS,
    "step": (torch.int64,),
    "seeds": (torch.int64,),
    "temperature": (torch.float32,),
    "noise_level": (torch.float64,),
    "done": (torch.bool,),
}
_OF_POSITIONS = {
    **dict.fromkeys(("canvas", "next_canvas", "draft", "argmax"), _INTS),
    **dict.fromkeys(("accepted", "renoised", "open"), (torch.bool,)),
    **dict.fromkeys(("entropy", "confidence"), (torch.float32,)),
}
_OF_CANDIDATES = {"top_tokens": _INTS, "top_probabilities": (torch.float16,)}
_LARGEST = {"temperature": 1e9, "noise_level": 1.0, "entropy": 1e9, "confidence": 1.0, "top_probabilities": 1.0}
_ROUNDING = 1e-3
_TOKENS = ("canvas", "next_canvas", "draft", "argmax", "top_tokens")


def check_content(content: Mapping[str, Any]) -> None:
    """Raise ValueError unless `content` is what `Trajectory.save` writes. The message names the invalid part.

    Example: `check_content(archive.load("run.safetensors", kind="trajectory"))`.
    """
    plan, top, sizes = content.get("plan"), content.get("top"), content.get("sizes")
    _require(isinstance(plan, Plan), "plan", plan)
    assert isinstance(plan, Plan)
    _check_plan(plan)
    _require(_is_int(top, 0, plan.noise.vocab_size), "top", top)
    _require(isinstance(sizes, tuple), "sizes", sizes)
    batch_size = plan.prompt_tokens.shape[0]
    place = (-1, -1)
    for size in sizes or ():
        fits = isinstance(size, tuple) and len(size) == 3 and all(type(number) is int for number in size)
        fits = fits and 0 <= size[0] < plan.num_blocks and 0 <= size[1] < plan.num_steps and 1 <= size[2] <= batch_size
        _require(fits and size[:2] > place, "sizes", size)
        place = size[:2]
    _check_columns(content.get("steps"), [size[2] for size in sizes or ()], plan, top or 0)
    commits, changes = content.get("commits"), content.get("changes")
    _require(isinstance(commits, tuple) and len(commits) <= plan.num_blocks, "commits", commits)
    for number, commit in enumerate(commits or ()):
        _require(isinstance(commit, BlockCommit) and _is_int(commit.block, number, number), "commits", commit)
        _require_tensor("commits.tokens", commit.tokens, (batch_size, plan.canvas_len), _INTS)
        _require_ids("commits.tokens", commit.tokens, 0, plan.noise.vocab_size)
        _require_tensor("commits.finished", commit.finished, (batch_size,), (torch.bool,))
        _require_tensor("commits.steps", commit.steps, (batch_size,), _INTS)
    _require(isinstance(changes, tuple), "changes", changes)
    for change in changes or ():
        place_fits = _is_int(getattr(change, "block", None), 0, plan.num_blocks - 1)
        place_fits = place_fits and _is_int(getattr(change, "index", None), 0, plan.num_steps)
        values = getattr(change, "values", None)
        _require(place_fits and isinstance(values, dict) and values.keys() <= _CHANGED, "changes", change)


def _check_plan(plan: Plan) -> None:
    _require(isinstance(plan.noise, Noise), "plan.noise", plan.noise)
    _require(isinstance(plan.knobs, Knobs), "plan.knobs", plan.knobs)
    vocab_size = plan.noise.vocab_size
    for name, most in (("num_blocks", 1 << 31), ("num_steps", MOST_STEPS), ("canvas_len", 1 << 31)):
        _require(_is_int(getattr(plan, name), 1, most), f"plan.{name}", getattr(plan, name))
    prompt = plan.prompt_tokens
    is_prompt = isinstance(prompt, Tensor) and prompt.dim() == 2 and prompt.dtype in _INTS and prompt.shape[0] > 0
    _require(is_prompt and (prompt.shape[1] > 0 or plan.num_cached is not None), "plan.prompt_tokens", prompt)
    _require_ids("plan.prompt_tokens", prompt, 0, vocab_size)
    batch_size, num_positions = prompt.shape[0], plan.num_blocks * plan.canvas_len
    _require_tensor("plan.seeds", plan.seeds, (plan.num_blocks, batch_size), (torch.int64,))
    for name in ("num_cached", "text_len"):
        if getattr(plan, name) is not None:
            _require_tensor(f"plan.{name}", getattr(plan, name), (batch_size,), _INTS)
    mask = plan.attention_mask
    if mask is not None:
        fits = isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[0] == batch_size
        _require(fits and mask.shape[1] >= prompt.shape[1] and not mask.is_complex(), "plan.attention_mask", mask)
    stops = plan.eos_token_ids
    _require(isinstance(stops, tuple) and all(_is_int(s, -(2**63), 2**63 - 1) for s in stops), "eos_token_ids", stops)
    _require(_is_int(plan.pad_token_id, 0, vocab_size - 1), "plan.pad_token_id", plan.pad_token_id)
    _require(_is_int(plan.first_block, 0, 2**62), "plan.first_block", plan.first_block)
    level = plan.noise_level
    _require(isinstance(level, float | int) and 0 < level <= 1, "plan.noise_level", level)
    _check_span(plan.span, batch_size, num_positions, vocab_size)


def _check_span(span: Any, batch_size: int, num_positions: int, vocab_size: int) -> None:
    _require(isinstance(span, Span), "plan.span", span)
    for name, dtypes in (("canvas", (torch.int64,)), ("frozen", (torch.bool,)), ("awaited", (torch.bool,))):
        value = getattr(span, name)
        if value is not None:
            fits = isinstance(value, Tensor) and value.dim() == 2 and 1 <= value.shape[1] <= num_positions
            _require(fits and len(value) == batch_size and value.dtype in dtypes, f"plan.span.{name}", value)
    if span.canvas is not None:
        _require_ids("plan.span.canvas", span.canvas, -1, vocab_size)
    if span.frozen is not None:
        _require(span.canvas is not None and span.canvas.shape == span.frozen.shape, "plan.span.frozen", span.frozen)
    allowed = span.allowed
    if allowed is not None:
        fits = isinstance(allowed, Tensor) and allowed.dim() == 3 and allowed.dtype == torch.bool
        fits = fits and allowed.shape[0] in (1, batch_size) and 1 <= allowed.shape[1] <= num_positions
        _require(fits and allowed.shape[2] == vocab_size, "plan.span.allowed", allowed)


def _check_columns(steps: Any, num_rows: list[int], plan: Plan, top: int) -> None:
    known = {**_OF_ROWS, **_OF_POSITIONS, **_OF_CANDIDATES}
    _require(isinstance(steps, dict) and steps.keys() == (known.keys() if num_rows else set()), "steps", steps)
    if not num_rows:
        return
    shape = (sum(num_rows), plan.canvas_len, top)
    for columns, num_dims in ((_OF_ROWS, 1), (_OF_POSITIONS, 2), (_OF_CANDIDATES, 3)):
        for name, dtypes in columns.items():
            _require_tensor(f"steps.{name}", steps[name], shape[:num_dims], dtypes)
    for name in _TOKENS:
        _require_ids(f"steps.{name}", steps[name], 0, plan.noise.vocab_size)
    for name, largest in _LARGEST.items():
        values = steps[name]
        fits = not values.numel() or (float(values.min()) >= -_ROUNDING and float(values.max()) <= largest + _ROUNDING)
        _require(fits, f"steps.{name}", values)  # a NaN does not fit either
    _require_ids("steps.rows", steps["rows"], 0, plan.prompt_tokens.shape[0])
    for rows in steps["rows"].split(num_rows):
        _require(bool((rows.diff() > 0).all()), "steps.rows", rows)


def _require(condition: bool, name: str, value: Any) -> None:
    if not condition:
        raise ValueError(f"{name} cannot be {show(value)}.")


def _require_tensor(name: str, value: Any, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    _require(isinstance(value, Tensor) and tuple(value.shape) == shape and value.dtype in dtypes, name, value)


def _require_ids(name: str, ids: Tensor, least: int, end: int) -> None:
    if ids.numel():
        _require(least <= int(ids.min()) and int(ids.max()) < end, name, (int(ids.min()), int(ids.max())))


def _is_int(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most
