"""Checks of a recorded run from a file: the shapes and ranges that the types of its parts do not say."""

from collections.abc import Mapping
from typing import Any

import torch

from dgemma.checks import check_types, require, require_tensor, show
from dgemma.run.arguments import MOST_STEPS
from dgemma.run.plan import Plan
from dgemma.run.records import BlockCommit, Change

_INTS = (torch.int16, torch.int32, torch.int64)
_LONG, _BOOL, _ROUNDING = (torch.int64,), (torch.bool,), 1e-3
# The tensors of a file by name: a letter per dimension, dtypes, least and greatest value. "B" is the batch, "R" the
# rows of all steps together, "L" blocks, "C" positions of a canvas, "K" candidates, "V" the vocabulary, and "." any
# size. A greatest value of "B" or "V" is the largest row number or token.
_COLUMNS: dict[str, tuple[str, tuple[torch.dtype, ...], float | None, Any]] = {
    "rows": ("R", _INTS, 0, "B"),
    "step": ("R", _LONG, None, None),
    "seeds": ("R", _LONG, None, None),
    "temperature": ("R", (torch.float32,), 0, 1e9),
    "noise_level": ("R", (torch.float64,), 0, 1),
    "done": ("R", _BOOL, None, None),
    **dict.fromkeys(("canvas", "next_canvas", "draft", "argmax"), ("RC", _INTS, 0, "V")),
    **dict.fromkeys(("accepted", "renoised", "open"), ("RC", _BOOL, None, None)),
    "entropy": ("RC", (torch.float32,), 0, 1e9),
    "confidence": ("RC", (torch.float32,), 0, 1),
    "top_tokens": ("RCK", _INTS, 0, "V"),
    "top_probabilities": ("RCK", (torch.float16,), 0, 1),
}
_PLAN = {
    "prompt_tokens": ("B.", _INTS, 0, "V"),
    "attention_mask": ("B.", None, None, None),
    "num_cached": ("B", _INTS, None, None),
    "text_len": ("B", _INTS, None, None),
    "seeds": ("LB", _LONG, None, None),
    "span.canvas": ("B.", _LONG, -1, "V"),
    "span.frozen": ("B.", _BOOL, None, None),
    "span.awaited": ("B.", _BOOL, None, None),
    "span.allowed": ("..V", _BOOL, None, None),
}
_COMMIT = {
    "tokens": ("BC", _INTS, 0, "V"),
    "finished": ("B", _BOOL, None, None),
    "steps": ("B", _INTS, None, None),
    "forwards": ("B", _INTS, None, None),
}


def check_content(content: Mapping[str, Any]) -> None:
    """Raise ValueError unless `content` is what `Trajectory.save` writes. The message names the invalid part.

    Example: `check_content(archive.load("run.safetensors", kind="trajectory"))`.
    """
    plan, sizes = content.get("plan"), content.get("sizes")
    top: Any = content.get("top")
    if not isinstance(plan, Plan) or not isinstance(sizes, tuple) or type(top) is not int:
        raise ValueError(f"plan, sizes and top must be a Plan, a tuple and a number, got {show((plan, sizes, top))}.")
    # `rebuild_value` checks no types where a class is unknown, such as a user's sampler.
    check_types(plan)
    check_types(plan.span)
    vocab_size, batch_size, num_blocks = plan.noise.vocab_size, len(plan.prompt_tokens), plan.num_blocks
    for name, value, least, most in (
        ("top", top, 0, vocab_size),
        ("plan.num_blocks", num_blocks, 1, 1 << 31),
        ("plan.num_steps", plan.num_steps, 1, MOST_STEPS),
        ("plan.canvas_len", plan.canvas_len, 1, 1 << 31),
        ("plan.pad_token_id", plan.pad_token_id, 0, vocab_size - 1),
        ("plan.first_block", plan.first_block, 0, 2**62),
        ("plan.noise_level", plan.noise_level, 1e-300, 1),
    ):
        require(least <= value <= most, name, f"be in [{least}, {most}]", value)
    numbers = {"B": batch_size, "L": num_blocks, "C": plan.canvas_len, "V": vocab_size, "K": top}
    _check_tensors("plan", plan, _PLAN, numbers)
    _check_span(plan)
    place = (-1, -1)
    for size in sizes:
        fits = isinstance(size, tuple) and len(size) == 3 and all(type(number) is int for number in size)
        fits = fits and place < size[:2] and 0 <= size[0] < num_blocks and 0 <= size[1] < plan.num_steps
        require(fits and 1 <= size[2] <= batch_size, "sizes", "be a block, a step and a number of rows, in order", size)
        place = size[:2]
    num_rows = [size[2] for size in sizes]
    steps = content.get("steps")
    fits = isinstance(steps, dict) and steps.keys() == (_COLUMNS.keys() if sizes else set())
    require(fits, "steps", "be the columns of the recorded steps", steps)
    if steps:
        _check_tensors("steps", steps, _COLUMNS, {**numbers, "R": sum(num_rows)})
        in_order = all(bool((rows.diff() > 0).all()) for rows in steps["rows"].split(num_rows))
        require(in_order, "steps.rows", "ascend within a step", steps["rows"])
    commits, changes = content.get("commits"), content.get("changes")
    fits = isinstance(commits, tuple) and all(isinstance(commit, BlockCommit) for commit in commits)
    fits = fits and [commit.block for commit in commits or ()] == list(range(min(len(commits or ()), num_blocks)))
    require(fits, "commits", f"be at most {num_blocks} blocks in order", commits)
    for commit in commits or ():
        check_types(commit)
        _check_tensors("commits", commit, _COMMIT, numbers)
    # A subclass of the state may have other fields. So only a replay, which knows the state, checks the names.
    fits = isinstance(changes, tuple) and all(
        isinstance(change, Change)
        and isinstance(change.values, dict)
        and "state" not in change.values
        and 0 <= change.block < num_blocks
        and 0 <= change.index <= plan.num_steps
        for change in changes
    )
    require(fits, "changes", "set fields of the state or knobs before a step of the run", changes)


def _check_span(plan: Plan) -> None:
    """Check what the parts of a plan say about each other."""
    num_positions, prompt, span, mask = (
        plan.num_blocks * plan.canvas_len,
        plan.prompt_tokens,
        plan.span,
        plan.attention_mask,
    )
    fits = prompt.shape[0] > 0 and (prompt.shape[1] > 0 or plan.num_cached is not None)
    require(fits, "plan.prompt_tokens", "have a row and, without a cache, a token", prompt)
    fits = mask is None or (mask.shape[1] >= prompt.shape[1] and not mask.is_complex())
    require(fits, "plan.attention_mask", "cover the prompt", mask)
    stops = all(type(stop) is int and -(2**63) <= stop < 2**63 for stop in plan.eos_token_ids)
    require(stops, "plan.eos_token_ids", "be 64-bit integers", plan.eos_token_ids)
    tables = [table for table in vars(span).values() if table is not None]
    fits = all(1 <= table.shape[1] <= num_positions for table in tables)
    fits = fits and (span.allowed is None or span.allowed.shape[0] in (1, prompt.shape[0]))
    fits = fits and (span.frozen is None or (span.canvas is not None and span.canvas.shape == span.frozen.shape))
    require(fits, "plan.span", f"have rows of 1 to {num_positions} positions, and a canvas under frozen", span)


def _check_tensors(owner: str, values: Any, table: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Check the tensors of a dictionary or a dataclass against a table; None is absent."""
    for name, (dims, dtypes, least, most) in table.items():
        value = values
        for part in name.split("."):
            value = value[part] if isinstance(value, Mapping) else getattr(value, part)
        if value is None:
            continue
        shape = tuple(sizes.get(letter) for letter in dims)
        rule = f"be {'a tensor' if dtypes is None else dtypes[-1]} {shape}"
        require_tensor(value, f"{owner}.{name}", rule, shape=shape, dtypes=dtypes)
        if least is not None and value.numel():
            highest = sizes[most] - 1 if isinstance(most, str) else most
            slack = _ROUNDING if value.is_floating_point() else 0
            fits = float(value.min()) >= least - slack and float(value.max()) <= highest + slack  # NaN does not fit
            require(fits, f"{owner}.{name}", f"be in [{least:g}, {highest:g}]", value)
