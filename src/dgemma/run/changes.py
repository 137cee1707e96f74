"""Changes that a caller makes between two steps, to state or knobs. Callbacks, forks and replays use this form."""

from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from dgemma.checks import has_values, show
from dgemma.diffusion.noise import Noise
from dgemma.diffusion.prediction import Prediction
from dgemma.diffusion.state import DenoiseState, split_fields
from dgemma.run.arguments import check_valid, read_allowed
from dgemma.run.knobs import Knobs
from dgemma.sampling.temperature import check_temperature, read_temperature

Changes = DenoiseState | Mapping[str, Any] | None


def list_changes(changes: Changes, state: DenoiseState, knobs: Knobs) -> dict[str, Any]:
    """Return the fields and knobs that change, by name. Changes are applied, recorded and replayed in this form.

    If `canvas` or `frozen` changes and `open` does not, `open` is computed from them. Under mask noise, if `canvas`
    changes, its mask positions are open. In all other cases, positions that are no longer frozen are added to `open`.
    Frozen positions are never open.

    Example: `list_changes({"top_k": 5}, state, knobs)` is `{"top_k": 5}`.
    """
    if changes is None:
        return {}
    if isinstance(changes, DenoiseState):
        changes = {"state": changes}
    if not isinstance(changes, Mapping):
        raise ValueError(
            f"Changes between two steps must be None, a state or a dictionary, got {type(changes).__name__}. "
            "Return one of them from on_step."
        )
    for name, value, kind in (("state", state, DenoiseState), ("knobs", knobs, Knobs)):
        if not isinstance(value, kind):
            raise ValueError(f"apply_changes {name} must be a {kind.__name__}, got {show(value)}.")
    listed = dict(changes)
    new_state = listed.pop("state", state)
    if not isinstance(new_state, DenoiseState) or not all(isinstance(name, str) for name in listed):
        raise ValueError(f"Changes between two steps must be a state or fields by name, got {show(changes)}.")
    of_state, of_knobs = set(split_fields(state, "constant")[0]), {f.name for f in fields(knobs)}
    known = of_state | of_knobs
    unknown = sorted(listed.keys() - known)
    if unknown:
        raise ValueError(
            f"Changes between two steps must be among state, {', '.join(sorted(known))}; got {', '.join(unknown)}."
        )
    for name in of_state & of_knobs - {"temperature"}:
        raise ValueError(f"{type(state).__name__}.{name} must not have the name of a knob. Rename the field.")
    _check_constant(new_state, state)
    for name in sorted(of_state - listed.keys()):
        if not _same(getattr(new_state, name), getattr(state, name)):
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
    if listed.keys() & {"canvas", "frozen"} and "open" not in listed:
        canvas, frozen = listed.get("canvas", state.canvas), listed.get("frozen", state.frozen)
        masked = state.noise.kind == "mask" and "canvas" in listed
        still_open = state.noise.masked(canvas) if masked else state.open | (state.frozen & ~frozen)
        listed["open"] = still_open & ~frozen
    return listed


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
    if "sampler" in of_knobs:
        check_valid(knobs.sampler, state.noise)
        if "memory" not in of_state and knobs.sampler != old.sampler:
            fresh = knobs.sampler.start(state)
            keeps = type(knobs.sampler) is type(old.sampler) and _alike(fresh, state.memory)
            state = state if keeps else replace(state, memory=fresh)
    if "stop" in of_knobs and "stop_memory" not in of_state and knobs.stop != old.stop:
        fresh = None if knobs.stop is None else knobs.stop.start(state)
        keeps = type(knobs.stop) is type(old.stop) and _alike(fresh, state.stop_memory)
        state = state if keeps else replace(state, stop_memory=fresh)
    return state, knobs


def merge_changes(earlier: dict[str, Any], later: dict[str, Any], knobs: Knobs) -> dict[str, Any]:
    """Combine two sets of changes; later changes replace earlier ones.

    Example: `merge_changes({"top_k": 5}, {"top_k": None}, knobs)` is {"top_k": None}.
    """
    if "state" in later:  # the new state already includes the earlier changes of the state
        earlier = knob_changes(earlier, knobs)
    if later.keys() & {"canvas", "frozen"}:  # canvas and frozen determine `open`
        earlier = {name: value for name, value in earlier.items() if name != "open"}
    return {**earlier, **later}


def snapshot(state: DenoiseState) -> DenoiseState:
    """Copy a state, to detect later writes into its tensors. Predictions are shared, not copied.

    Example: `before = snapshot(record.state)`, then `list_writes(before, record.state)`.
    """
    names, _ = split_fields(state, "constant")
    return replace(state, **{name: tree_map(_copied, getattr(state, name)) for name in names})


def list_writes(before: DenoiseState, after: DenoiseState) -> dict[str, Any]:
    """Return the fields that were written in place, in the form of `list_changes`.

    If `canvas` or `frozen` was written, `open` is listed too, even if it is unchanged. Otherwise `list_changes` would
    compute a new `open` from them.

    Example: `list_writes(before, record.state)` is `{}` if a callback wrote nothing.
    """
    changeable, _ = split_fields(after, "constant")
    names = {name for name in changeable if not _same(getattr(before, name), getattr(after, name))}
    names |= {"open"} if names & {"canvas", "frozen"} else set()
    return {name: getattr(after, name) for name in sorted(names)}


def knob_changes(listed: Mapping[str, Any], knobs: Knobs) -> dict[str, Any]:
    """Return the listed changes that set a knob. A temperature sets a knob, unless it is a tensor."""
    names = {f.name for f in fields(knobs)}
    of_state = {"temperature"} if isinstance(listed.get("temperature"), Tensor) else set()
    return {name: value for name, value in listed.items() if name in names - of_state}


def _check_constant(new: DenoiseState, old: DenoiseState) -> None:
    """Refuse a new state that differs from the old one in more than its fields that may change."""
    if type(new) is not type(old):
        raise ValueError(
            f"A changed state must stay a {type(old).__name__}, got a {type(new).__name__}. "
            "Change fields of `record.state` with dataclasses.replace."
        )
    for name in split_fields(old, "constant")[1]:
        if not _same(getattr(new, name), getattr(old, name)):
            raise ValueError(
                f"{type(old).__name__}.{name} must stay the same within a run. Begin a new run to change it."
            )


def _check(name: str, value: Any, state: DenoiseState, *, is_knob: bool) -> None:
    if not all(has_values(part) or state.canvas.is_meta for part in tree_leaves(value) if isinstance(part, Tensor)):
        raise ValueError(f"{name} must be dense and on {state.device}, got a sparse tensor or one on meta.")
    if name == "self_cond" and not isinstance(value, Prediction | Tensor | None):
        raise ValueError(
            f"DenoiseState.self_cond must be a Prediction, logits or None, got {type(value).__name__}. "
            "None disables self-conditioning in the next step."
        )
    required = {f.name for f in fields(state) if f.default is MISSING and f.default_factory is MISSING}
    now = getattr(state, name) if name in required and not is_knob else None
    if not isinstance(now, Tensor):
        return
    if not isinstance(value, Tensor) or value.shape != now.shape or value.dtype != now.dtype:
        got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{type(state).__name__}.{name} must stay {now.dtype} {tuple(now.shape)}, got {got}.")
    if name == "canvas" and bool(((value < 0) | (value >= state.noise.vocab_size)).any()):
        raise ValueError(
            f"DenoiseState.canvas must hold ids in [0, {state.noise.vocab_size}), "
            f"got {int(value.min())}..{int(value.max())}."
        )


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _same(left: Any, right: Any) -> bool:
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


def _alike(left: Any, right: Any) -> bool:
    """Compare the parts and shapes of two memories."""
    (left_leaves, left_form), (right_leaves, right_form) = tree_flatten(left), tree_flatten(right)
    return left_form == right_form and all(
        getattr(a, "shape", None) == getattr(b, "shape", None) for a, b in zip(left_leaves, right_leaves, strict=True)
    )
