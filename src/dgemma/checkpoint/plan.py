"""The plan of loading a checkpoint: a source for every weight of the model, checked before the first one is read."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dgemma.checkpoint.formats.entry import FLOATS, Contents, Entry
from dgemma.checkpoint.names import VISION, our_names, published_name
from dgemma.checkpoint.stored_sizes import contradictions
from dgemma.model.config import ModelConfig
from dgemma.model.quantized import IntWeight, QuantizedWeight, Weight

_MOST_NAMED = 5  # the most tensors or files that an error names
_EXPERT = re.compile(r"(layers\.\d+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True, kw_only=True)
class ExpertPart:
    """A part of one of our weights that the checkpoint stores separately: one projection of one expert."""

    name: str  # published name of the entry
    expert: int
    rows: slice


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """Sources of the model's weights, by our names."""

    whole: dict[str, str]  # our name → the published weight it is read from
    parts: dict[str, list[ExpertPart]]  # our name → the parts it is assembled from
    ties: list[tuple[str, str]]  # (published copy, our name) that must agree with the weight that is read
    fresh: list[str]  # our names without a published tensor, to be initialised
    vision: list[str]

    def sources(self, ours: str) -> list[str]:
        """Return the published names that one of our weights is read from."""
        return [self.whole[ours]] if ours in self.whole else [part.name for part in self.parts[ours]]


def make_plan(
    config: ModelConfig, expected: Mapping[str, Tensor], contents: Contents, *, plain_gemma4: bool
) -> LoadPlan:
    """Match the model's tensors with those in the files. One error lists all mismatches, wrong config fields first.

    Example: `make_plan(config, model.state_dict(), read_contents(folder, published, stored), plain_gemma4=False)`.
    """
    entries = contents.entries
    plan = LoadPlan(whole={}, parts={}, ties=[], fresh=[], vision=[name for name in entries if VISION.match(name)])
    found: dict[str, tuple[int, ...]] = {}
    problems = list(contents.problems)
    # The decoder's tensor is used; encoder copies and a stored head must be equal to it.
    for name in sorted(entries, key=lambda n: (n.startswith(("model.encoder.", "encoder.", "lm_head.")), n)):
        if VISION.match(name):
            continue
        entry = entries[name]
        if entry.decode is None and entry.format not in FLOATS:
            problems.append(f"unreadable {name}: stored as {entry.format}, not as a float")
        for ours in our_names(name):
            part = _EXPERT.fullmatch(ours)
            if part:
                problems += _add_part(plan, expected, found, name, entry, part)
                continue
            found.setdefault(ours, entry.shape)
            if ours not in expected:
                problems.append(f"unexpected {name}")
            elif entry.shape != tuple(expected[ours].shape):
                problems.append(f"misshapen {name}: {entry.shape}, not {tuple(expected[ours].shape)}")
            elif ours in plan.whole:
                plan.ties.append((name, ours))
            else:
                plan.whole[ours] = name
    for ours in plan.parts:
        problems += _part_problems(plan, expected, entries, ours)
    absent = [name for name in expected if name not in found]
    plan.fresh.extend(name for name in absent if plain_gemma4 and name.startswith("self_conditioning."))
    problems += [f"missing {published_name(name)}" for name in absent if name not in plan.fresh]
    if problems:
        lines = [*contradictions(config, found), *first(list(dict.fromkeys(problems)))]
        raise ValueError("\n  ".join(["The checkpoint does not fit its config.json:", *lines]))
    return plan


def _add_part(
    plan: LoadPlan,
    expected: Mapping[str, Tensor],
    found: dict[str, tuple[int, ...]],
    name: str,
    entry: Entry,
    match: re.Match[str],
) -> list[str]:
    """Add one projection of one expert to the plan; return what is wrong with it."""
    experts, number, projection = match[1], int(match[2]), match[3]
    ours = f"{experts}.down_proj" if projection == "down" else f"{experts}.gate_up_proj"
    if ours not in expected or number >= expected[ours].shape[0]:
        return [f"unexpected {name}"]
    num_experts, num_rows, width = expected[ours].shape
    half = num_rows // 2
    rows = {"gate": slice(0, half), "up": slice(half, num_rows), "down": slice(0, num_rows)}[projection]
    shape = (rows.stop - rows.start, width)
    found[ours] = (num_experts, num_rows if entry.shape == shape else 0, entry.shape[-1] if entry.shape else 0)
    if entry.shape != shape:
        return [f"misshapen {name}: {entry.shape}, not {shape}"]
    plan.parts.setdefault(ours, []).append(ExpertPart(name=name, expert=number, rows=rows))
    return []


def _part_problems(
    plan: LoadPlan, expected: Mapping[str, Tensor], entries: Mapping[str, Entry], ours: str
) -> Iterator[str]:
    """Yield the parts that are missing, that are stored twice, or whose format differs from the others'."""
    parts = plan.parts[ours]
    if ours in plan.whole:
        yield f"unexpected {parts[0].name}: {plan.whole[ours]} holds all experts"
    names = {(part.expert, part.rows.start) for part in parts}
    layer = published_name(ours).rpartition(".")[0]
    half = expected[ours].shape[1] // 2
    projections = {0: "down"} if ours.endswith("down_proj") else {0: "gate", half: "up"}
    for expert in range(expected[ours].shape[0]):
        for start, projection in projections.items():
            if (expert, start) not in names:
                yield f"missing {layer}.{expert}.{projection}_proj.weight"
    if len(names) < len(parts):
        yield f"unexpected {parts[-1].name}: some experts of {ours} are stored twice"
    formats = {entries[part.name].format for part in parts}
    if len(formats) > 1:
        yield f"unreadable {ours}: its experts are stored in {' and '.join(sorted(formats))}"


def read_weight(
    plan: LoadPlan, entries: Mapping[str, Entry], ours: str, shape: Sequence[int], read: Callable[[str], Tensor]
) -> Weight:
    """Read one of our weights, quantised or plain. `read` returns a stored tensor by its name in the files.

    Example: `read_weight(plan, contents.entries, "layers.0.experts.down_proj", (128, 2816, 704), read)`.
    """
    if ours in plan.whole:
        weight = _read_entry(plan.whole[ours], entries, read)
    else:
        weight = _assemble(plan.parts[ours], shape, lambda name: _read_entry(name, entries, read))
    if isinstance(weight, QuantizedWeight):
        _require_valid(weight, plan.sources(ours)[0])
        weight = _without_trivial_index(weight)
    return weight


def _read_entry(name: str, entries: Mapping[str, Entry], read: Callable[[str], Tensor]) -> Weight:
    entry = entries[name]
    tensors = {role: read(stored) for role, stored in entry.tensors.items()}
    if entry.decode is None:
        return tensors["weight"]
    try:
        return entry.decode(tensors)
    except ValueError as error:
        raise ValueError(f"{name} cannot be read: {error}") from None


def _assemble(parts: Sequence[ExpertPart], shape: Sequence[int], read: Callable[[str], Weight]) -> Weight:
    """Join the parts (rows, K) of all experts into one weight (E, N, K), with only one part in memory at a time."""
    joined: dict[str, Tensor] = {}
    like: Weight | None = None
    for part in parts:
        like = read(part.name)
        tensors = {"": like} if isinstance(like, Tensor) else like.tensors()
        if not joined:
            for name, tensor in tensors.items():
                rows = tensor.shape if name == "group_index" else (shape[1], *tensor.shape[1:])
                joined[name] = tensor.new_empty(shape[0], *rows)
        slots = {
            name: t[part.expert] if name == "group_index" else t[part.expert, part.rows] for name, t in joined.items()
        }
        if {n: (t.dtype, t.shape) for n, t in tensors.items()} != {n: (t.dtype, t.shape) for n, t in slots.items()}:
            raise ValueError(f"{part.name} must be stored as the other experts are, with the same tensors and dtypes.")
        for name, tensor in tensors.items():
            if name == "group_index" and part.rows.start and not torch.equal(slots[name], tensor):
                raise ValueError(
                    f"{part.name} must group its columns as the gate of its expert does, got another order."
                )
            slots[name].copy_(tensor)
    assert like is not None
    return joined[""] if isinstance(like, Tensor) else like.with_tensors(joined)


def _require_valid(weight: QuantizedWeight, name: str) -> None:
    if isinstance(weight, IntWeight) and weight.group_index is not None:
        low, high = int(weight.group_index.min()), int(weight.group_index.max())
        if low < 0 or high >= weight.scale.shape[-1]:
            raise ValueError(f"{name} must have group indices below {weight.scale.shape[-1]}, got {low} to {high}.")
    for role, tensor in weight.tensors().items():
        if role in ("scale", "bias", "row_scale") and not bool(tensor.float().isfinite().all()):
            raise ValueError(f"{name} must have finite scales, got NaN or infinity in {role}. Download the file again.")


def _without_trivial_index(weight: QuantizedWeight) -> QuantizedWeight:
    """Drop a group index that only repeats the order of the columns."""
    if not isinstance(weight, IntWeight) or weight.group_index is None:
        return weight
    columns = torch.arange(weight.shape[-1], device=weight.device)
    if not torch.equal(weight.group_index.long(), (columns // weight.group_size).expand_as(weight.group_index)):
        return weight
    return weight.with_tensors({name: t for name, t in weight.tensors().items() if name != "group_index"})


def first(items: list[str]) -> list[str]:
    """Shorten a list of names for an error message.

    Example: `first(["a", "b"])` is ["a", "b"].
    """
    return items if len(items) <= _MOST_NAMED else [*items[:_MOST_NAMED], f"and {len(items) - _MOST_NAMED} more"]
