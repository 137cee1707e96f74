"""Changes that a caller makes between two steps, to state or knobs.

Callbacks, forks and replays all use a listing: the changed fields and knobs by name. A listing that names `canvas` or
`frozen` also names `open`, which depends on them. So later changes are added to earlier ones by `|`.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from dgemma.checks import Words, has_values, require, require_tensor, typed
from dgemma.diffusion.noise import Noise
from dgemma.diffusion.prediction import Prediction
from dgemma.diffusion.state import DenoiseState, split_fields
from dgemma.run.arguments import check_valid, read_allowed
from dgemma.run.knobs import Knobs
from dgemma.sampling.temperature import check_temperature, read_temperature

Changes = DenoiseState | Mapping[str, Any] | None
_OPEN_FOLLOWS = {"canvas", "frozen"}  # the fields on which `open` depends


def list_changes(changes: Changes, state: DenoiseState, knobs: Knobs) -> dict[str, Any]:
    """Return the listing of changes. If it has `canvas` or `frozen` but no `open`, `open` is computed from them."""
    if changes is None:
        return {}
    fits = isinstance(changes, DenoiseState | Mapping)
    require(fits, "Changes between two steps", "be None, a state or a dictionary", changes)
    listed: dict[str, Any] = {"state": changes} if isinstance(changes, DenoiseState) else dict(changes)
    new_state = listed.pop("state", state)
    of_state, constant = split_fields(state, "constant")
    known = {*of_state, *(f.name for f in fields(knobs))}
    unknown = [name for name in listed if name not in known]
    require(not unknown, "Changes between two steps", f"be among state, {', '.join(sorted(known))}", unknown)
    require(type(new_state) is type(state), "A changed state", f"stay a {type(state).__name__}", new_state)
    for name in constant:
        same, owner = is_same(getattr(new_state, name), getattr(state, name)), f"{type(state).__name__}.{name}"
        require(same, owner, "stay the same within a run", getattr(new_state, name), "Begin a new run to change it.")
    for name in sorted(set(of_state) - listed.keys()):
        if not is_same(getattr(new_state, name), getattr(state, name)):
            listed[name] = getattr(new_state, name)
    if "temperature" in listed:
        listed["temperature"] = read_temperature(listed["temperature"])
    set_knobs = knob_changes(listed, knobs)
    for name, value in listed.items():
        _check(name, value, state, is_knob=name in set_knobs)
    if "allowed" in listed:
        allowed, shape = listed["allowed"], (state.batch_size, state.canvas_len)
        if allowed is not None:
            allowed = read_allowed("DenoiseState.allowed", allowed, state.noise, shape, state.device, exact=True)
        listed["allowed"] = state.noise.proposable(allowed, state.device)
    if listed.keys() & _OPEN_FOLLOWS and "open" not in listed:
        frozen = listed.get("frozen", state.frozen)
        if state.noise.kind == "mask" and "canvas" in listed:  # the masks of the new canvas are open
            now_open = state.noise.masked(listed["canvas"])
        else:  # positions that are no longer frozen open too
            now_open = state.open | (state.frozen & ~frozen)
        listed["open"] = now_open & ~frozen
    return listed


def snapshot(state: DenoiseState) -> DenoiseState:
    """Copy a state, to detect later changes of its tensors. Predictions are shared, not copied."""
    own = {name: getattr(state, name) for name in split_fields(state, "constant")[0]}
    return replace(state, **tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, own))


def list_in_place(before: DenoiseState, after: DenoiseState) -> dict[str, Any]:
    """Return the listing of the fields that were changed in place since a snapshot."""
    changeable, _ = split_fields(after, "constant")
    names = {name for name in changeable if not is_same(getattr(before, name), getattr(after, name))}
    names |= {"open"} if names & _OPEN_FOLLOWS else set()  # as it is now: nothing computes it after a change in place
    return {name: getattr(after, name) for name in sorted(names)}


@typed
def apply_changes(changes: Changes, state: DenoiseState, knobs: Knobs) -> tuple[DenoiseState, Knobs]:
    """Return the state and knobs for the next step.

    A new sampler or stop rule keeps the old memory if its class and the shapes of its memory are the same. Otherwise it
    starts with new memory.

    Example: `apply_changes({"sampler": EntropyBound(bound=0.5)}, state, knobs)`.
    """
    listed = list_changes(changes, state, knobs)
    if not listed:
        return state, knobs
    of_knobs = knob_changes(listed, knobs)
    of_state = {name: value for name, value in listed.items() if name not in of_knobs}
    state, old, knobs = replace(state, **of_state), knobs, replace(knobs, **of_knobs)
    if "temperature" in of_knobs:
        check_temperature(knobs.temperature, int(state.num_steps.max()), state.device)
        state = replace(state, temperature=knobs.temperature(state.step, state.num_steps))
    check_valid(knobs.sampler, state.noise)
    for name, memory in (("sampler", "memory"), ("stop", "stop_memory")):
        before, now = getattr(old, name), getattr(knobs, name)
        if memory not in of_state and now != before:
            fresh: dict[str, Any] = {memory: None if now is None else now.start(state)}
            keeps = type(now) is type(before) and _shapes(fresh[memory]) == _shapes(getattr(state, memory))
            state = state if keeps else replace(state, **fresh)
    return state, knobs


def knob_changes(listed: Mapping[str, Any], knobs: Knobs) -> dict[str, Any]:
    """Return the listed changes that set a knob. A temperature sets a knob, unless it is a tensor."""
    names = {f.name for f in fields(knobs)}
    of_state = {"temperature"} if isinstance(listed.get("temperature"), Tensor) else set()
    return {name: value for name, value in listed.items() if name in names - of_state}


def _check(name: str, value: Any, state: DenoiseState, *, is_knob: bool) -> None:
    """Check a new value of a field. A field that a state must have keeps its shape and dtype."""
    owner, vocab_size = f"{type(state).__name__}.{name}", state.noise.vocab_size
    dense = all(has_values(part) or state.canvas.is_meta for part in tree_leaves(value) if isinstance(part, Tensor))
    require(dense, owner, f"be dense and on {state.device}", value)
    if name == "self_cond":
        require(isinstance(value, Prediction | Tensor | None), owner, "be a Prediction, logits or None", value)
    required = {f.name for f in fields(state) if f.default is MISSING and f.default_factory is MISSING}
    now = getattr(state, name) if name in required and not is_knob else None
    if isinstance(now, Tensor):
        require_tensor(value, owner, f"stay {now.dtype} {tuple(now.shape)}", shape=now.shape, dtypes=(now.dtype,))
    if name == "canvas" and bool(((value < 0) | (value >= vocab_size)).any()):
        require(False, owner, f"hold ids in [0, {vocab_size})", Words(f"{int(value.min())}..{int(value.max())}"))


def is_same(left: Any, right: Any) -> bool:
    """Compare two values of a field. Predictions are compared by their logits, memories part by part."""
    if left is right:
        return True
    left, right = (x.logits if isinstance(x, Prediction) else x for x in (left, right))
    (left_leaves, left_form), (right_leaves, right_form) = tree_flatten(left), tree_flatten(right)
    return left_form == right_form and all(
        torch.equal(a, b)
        if isinstance(a, Tensor) and isinstance(b, Tensor)
        else a is b or (type(a) is type(b) and isinstance(a, Noise | str | int | float) and a == b)
        for a, b in zip(left_leaves, right_leaves, strict=True)
    )


def _shapes(memory: Any) -> Any:
    """The parts of a memory, with the shapes of its tensors."""
    return tree_map(lambda part: getattr(part, "shape", None), memory)
