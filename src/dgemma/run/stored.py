"""Checks of a recorded run that was read from a file: every type, shape and range, before it is used."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dgemma.checks import in_range, require, require_tensor
from dgemma.diffusion.noise import Noise
from dgemma.run.arguments import MOST_STEPS, Span
from dgemma.run.knobs import Knobs
from dgemma.run.plan import Plan
from dgemma.run.records import BlockCommit, Change

_INTS = (torch.int16, torch.int32, torch.int64)
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
    require(isinstance(plan, Plan), "plan", "be a Plan", plan)
    assert isinstance(plan, Plan)
    _check_plan(plan)
    require(_is_int(top, 0, plan.noise.vocab_size), "top", f"be in [0, {plan.noise.vocab_size}]", top)
    require(isinstance(sizes, tuple), "sizes", "be a tuple", sizes)
    batch_size = plan.prompt_tokens.shape[0]
    place = (-1, -1)
    for size in sizes or ():
        fits = isinstance(size, tuple) and len(size) == 3 and all(type(number) is int for number in size)
        fits = fits and 0 <= size[0] < plan.num_blocks and 0 <= size[1] < plan.num_steps and 1 <= size[2] <= batch_size
        require(fits and size[:2] > place, "sizes", "be a block, a step and a number of rows, in order", size)
        place = size[:2]
    _check_columns(content.get("steps"), [size[2] for size in sizes or ()], plan, top or 0)
    commits, changes = content.get("commits"), content.get("changes")
    fits = isinstance(commits, tuple) and len(commits) <= plan.num_blocks
    require(fits, "commits", f"be a tuple of at most {plan.num_blocks} blocks", commits)
    for number, commit in enumerate(commits or ()):
        fits = isinstance(commit, BlockCommit) and _is_int(commit.block, number, number)
        require(fits, "commits", f"have block {number} at index {number}", commit)
        shape = (batch_size, plan.canvas_len)
        require_tensor(commit.tokens, "commits.tokens", f"be ids {shape}", shape=shape, dtypes=_INTS)
        _check_ids("commits.tokens", commit.tokens, plan.noise.vocab_size)
        _check_rows("commits.finished", commit.finished, batch_size, (torch.bool,))
        _check_rows("commits.steps", commit.steps, batch_size, _INTS)
    require(isinstance(changes, tuple), "changes", "be a tuple", changes)
    for change in changes or ():
        # A subclass of the state may have other fields. So only a replay, which knows the state, checks the names.
        fits = isinstance(change, Change) and isinstance(change.values, dict) and "state" not in change.values
        fits = fits and all(isinstance(name, str) for name in change.values)
        fits = fits and _is_int(change.block, 0, plan.num_blocks - 1) and _is_int(change.index, 0, plan.num_steps)
        require(fits, "changes", "set fields of the state or knobs before a step of the run", change)


def _check_plan(plan: Plan) -> None:
    require(isinstance(plan.noise, Noise), "plan.noise", "be a Noise", plan.noise)
    require(isinstance(plan.knobs, Knobs), "plan.knobs", "be Knobs", plan.knobs)
    vocab_size = plan.noise.vocab_size
    for name, most in (("num_blocks", 1 << 31), ("num_steps", MOST_STEPS), ("canvas_len", 1 << 31)):
        require(_is_int(getattr(plan, name), 1, most), f"plan.{name}", f"be in [1, {most}]", getattr(plan, name))
    prompt = plan.prompt_tokens
    require_tensor(prompt, "plan.prompt_tokens", "be ids (B, P)", shape=(None, None), dtypes=_INTS)
    fits = prompt.shape[0] > 0 and (prompt.shape[1] > 0 or plan.num_cached is not None)
    require(fits, "plan.prompt_tokens", "have a row and, without a cache, a token", prompt)
    _check_ids("plan.prompt_tokens", prompt, vocab_size)
    batch_size, num_positions = prompt.shape[0], plan.num_blocks * plan.canvas_len
    shape = (plan.num_blocks, batch_size)
    require_tensor(plan.seeds, "plan.seeds", f"be int64 {shape}", shape=shape, dtypes=(torch.int64,))
    for name in ("num_cached", "text_len"):
        if getattr(plan, name) is not None:
            _check_rows(f"plan.{name}", getattr(plan, name), batch_size, _INTS)
    mask = plan.attention_mask
    if mask is not None:
        rule = f"have {batch_size} rows that cover the prompt, and not have a complex dtype"
        require_tensor(mask, "plan.attention_mask", rule, shape=(batch_size, None))
        require(mask.shape[1] >= prompt.shape[1] and not mask.is_complex(), "plan.attention_mask", rule, mask)
    stops = plan.eos_token_ids
    fits = isinstance(stops, tuple) and all(_is_int(stop, -(2**63), 2**63 - 1) for stop in stops)
    require(fits, "plan.eos_token_ids", "be 64-bit integers", stops)
    require(_is_int(plan.pad_token_id, 0, vocab_size - 1), "plan.pad_token_id", "be a token", plan.pad_token_id)
    require(_is_int(plan.first_block, 0, 2**62), "plan.first_block", "be in [0, 2**62]", plan.first_block)
    level = plan.noise_level
    require(isinstance(level, float | int) and 0 < level <= 1, "plan.noise_level", "be in (0, 1]", level)
    _check_span(plan.span, batch_size, num_positions, vocab_size)


def _check_span(span: Any, batch_size: int, num_positions: int, vocab_size: int) -> None:
    require(isinstance(span, Span), "plan.span", "be a Span", span)
    rule = f"have {batch_size} rows of 1 to {num_positions} positions"
    for name, dtype in (("canvas", torch.int64), ("frozen", torch.bool), ("awaited", torch.bool)):
        value = getattr(span, name)
        if value is not None:
            require_tensor(value, f"plan.span.{name}", f"be {dtype}", shape=(batch_size, None), dtypes=(dtype,))
            require(1 <= value.shape[1] <= num_positions, f"plan.span.{name}", rule, value)
    if span.canvas is not None:
        _check_ids("plan.span.canvas", span.canvas, vocab_size, least=-1)
    if span.frozen is not None:
        fits = span.canvas is not None and span.canvas.shape == span.frozen.shape
        require(fits, "plan.span.frozen", "have the shape of plan.span.canvas", span.frozen)
    allowed = span.allowed
    if allowed is not None:
        shape = (None, None, vocab_size)
        require_tensor(allowed, "plan.span.allowed", f"be {shape} bool", shape=shape, dtypes=(torch.bool,))
        fits = allowed.shape[0] in (1, batch_size) and 1 <= allowed.shape[1] <= num_positions
        require(fits, "plan.span.allowed", f"{rule}, or one row", allowed)


def _check_columns(steps: Any, num_rows: list[int], plan: Plan, top: int) -> None:
    known = {**_OF_ROWS, **_OF_POSITIONS, **_OF_CANDIDATES}
    fits = isinstance(steps, dict) and steps.keys() == (known.keys() if num_rows else set())
    require(fits, "steps", "be the columns of the recorded steps", steps)
    if not num_rows:
        return
    shape = (sum(num_rows), plan.canvas_len, top)
    for columns, num_dims in ((_OF_ROWS, 1), (_OF_POSITIONS, 2), (_OF_CANDIDATES, 3)):
        for name, dtypes in columns.items():
            rule = f"be {dtypes[-1]} {shape[:num_dims]}"
            require_tensor(steps[name], f"steps.{name}", rule, shape=shape[:num_dims], dtypes=dtypes)
    for name in _TOKENS:
        _check_ids(f"steps.{name}", steps[name], plan.noise.vocab_size)
    for name, largest in _LARGEST.items():
        values = steps[name]
        fits = not values.numel() or (float(values.min()) >= -_ROUNDING and float(values.max()) <= largest + _ROUNDING)
        require(fits, f"steps.{name}", f"be in [0, {largest:g}]", values)  # a NaN does not fit either
    _check_ids("steps.rows", steps["rows"], plan.prompt_tokens.shape[0])
    for rows in steps["rows"].split(num_rows):
        require(bool((rows.diff() > 0).all()), "steps.rows", "ascend within a step", rows)


def _check_rows(name: str, value: Any, batch_size: int, dtypes: tuple[torch.dtype, ...]) -> None:
    require_tensor(value, name, f"be {dtypes[-1]} ({batch_size},)", shape=(batch_size,), dtypes=dtypes)


def _check_ids(name: str, ids: Tensor, end: int, *, least: int = 0) -> None:
    require(in_range(ids, end, least=least), name, f"be in [{least}, {end})", ids)


def _is_int(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most
