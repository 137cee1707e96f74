"""The plan of loading a checkpoint: a source for every weight of the model, checked before the first one is read."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dgemma.checkpoint.formats.entry import FLOATS, Contents, Entry
from dgemma.checkpoint.names import AUDIO, VISION, our_names, published_name
from dgemma.checks import require
from dgemma.quantization.weights import IntWeight, QuantizedWeight, Weight

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

    entries: Mapping[str, Entry]  # the checkpoint's weights, by published name
    shapes: Mapping[str, Sequence[int]]  # of our weights
    skipped: frozenset[str]  # published names of towers that the model does not have
    whole: dict[str, str] = field(default_factory=dict)  # our name → the published weight it is read from
    parts: dict[str, dict[tuple[int, int], ExpertPart]] = field(default_factory=dict)  # by expert and first row
    copies: list[tuple[str, str]] = field(default_factory=list)  # (published copy, published weight that it equals)
    fresh: list[str] = field(default_factory=list)  # our names without a published tensor, to be initialised

    def sources(self, ours: str) -> list[str]:
        """Return the published names that one of our weights is read from."""
        return [self.whole[ours]] if ours in self.whole else [part.name for part in self.parts[ours].values()]

    def source(self, ours: str) -> Entry:
        """Return the description of one of our weights in the files; of experts, that of the first part."""
        return self.entries[self.sources(ours)[0]]

    def read_weight(self, ours: str, read: Callable[[str], Tensor]) -> Weight:
        """Read one of our weights, quantised or plain. `read` returns a stored tensor by its name in the files."""
        if ours in self.whole:
            weight = self.read_entry(self.whole[ours], read)
        else:
            parts = self.parts[ours].values()
            weight = _assemble(parts, self.shapes[ours], lambda name: self.read_entry(name, read))
        return _without_trivial_index(weight) if isinstance(weight, IntWeight) else weight

    def read_entry(self, name: str, read: Callable[[str], Tensor]) -> Weight:
        """Read a weight by its published name."""
        entry = self.entries[name]
        tensors = {role: read(stored) for role, stored in entry.tensors.items()}
        if entry.decode is None:
            return tensors["weight"]
        try:
            weight = entry.decode(tensors)
            if isinstance(weight, QuantizedWeight):
                _require_valid(weight)
        except ValueError as error:
            raise ValueError(f"{name} cannot be read: {error}") from None
        return weight


def make_plan(expected: Mapping[str, Tensor], contents: Contents, *, plain_gemma4: bool) -> LoadPlan:
    """Match the model's tensors with those in the files. One error lists all mismatches."""
    entries = contents.entries
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    has_vision = any(name.startswith("vision.") for name in shapes)
    skipped = frozenset(name for name in entries if AUDIO.match(name) or (not has_vision and VISION.match(name)))
    plan = LoadPlan(entries=entries, shapes=shapes, skipped=skipped)
    found: set[str] = set()
    problems = list(contents.problems)
    # The decoder's tensor is used; encoder copies and a stored head must be equal to it.
    for name in sorted(entries, key=lambda n: (n.startswith(("model.encoder.", "encoder.", "lm_head.")), n)):
        if name in skipped:
            continue
        entry = entries[name]
        if entry.decode is None and entry.format not in FLOATS:
            problems.append(f"unreadable {name}: stored as {entry.format}, not as a float")
        for ours in our_names(name):
            part = _EXPERT.fullmatch(ours)
            if part:
                problems += _add_part(plan, found, name, part)
                continue
            found.add(ours)
            if ours not in shapes:
                problems.append(f"unexpected {name}")
            elif entry.shape != shapes[ours]:
                problems.append(f"misshapen {name}: {entry.shape}, not {shapes[ours]}")
            elif ours in plan.whole:
                plan.copies.append((name, plan.whole[ours]))
            else:
                plan.whole[ours] = name
    for ours in plan.parts:
        problems += _part_problems(plan, ours)
    absent = [name for name in shapes if name not in found]
    plan.fresh.extend(name for name in absent if plain_gemma4 and name.startswith("self_conditioning."))
    problems += [f"missing {published_name(name)}" for name in absent if name not in plan.fresh]
    if problems:
        lines = first(list(dict.fromkeys(problems)))
        raise ValueError("\n  ".join(["The checkpoint does not fit its config.json:", *lines]))
    return plan


def _add_part(plan: LoadPlan, found: set[str], name: str, match: re.Match[str]) -> list[str]:
    """Add one projection of one expert to the plan; return what is wrong with it."""
    experts, number, projection = match[1], int(match[2]), match[3]
    ours = f"{experts}.down_proj" if projection == "down" else f"{experts}.gate_up_proj"
    if ours not in plan.shapes or number >= plan.shapes[ours][0]:
        return [f"unexpected {name}"]
    _, num_rows, width = plan.shapes[ours]
    half = num_rows // 2
    rows = {"gate": slice(0, half), "up": slice(half, num_rows), "down": slice(0, num_rows)}[projection]
    shape, stored = (rows.stop - rows.start, width), plan.entries[name].shape
    found.add(ours)
    if stored != shape:
        return [f"misshapen {name}: {stored}, not {shape}"]
    part = ExpertPart(name=name, expert=number, rows=rows)
    part = plan.parts.setdefault(ours, {}).setdefault((number, rows.start), part)
    if part.name != name:
        plan.copies.append((name, part.name))
    return []


def _part_problems(plan: LoadPlan, ours: str) -> Iterator[str]:
    """Yield the parts that are missing, that are stored twice, or whose format differs from the others'."""
    parts = plan.parts[ours]
    if ours in plan.whole:
        yield f"unexpected {next(iter(parts.values())).name}: {plan.whole[ours]} holds all experts"
    layer = published_name(ours).rpartition(".")[0]
    num_experts, num_rows, _ = plan.shapes[ours]
    projections = {0: "down"} if ours.endswith("down_proj") else {0: "gate", num_rows // 2: "up"}
    for expert in range(num_experts):
        for start, projection in projections.items():
            if (expert, start) not in parts:
                yield f"missing {layer}.{expert}.{projection}_proj.weight"
    formats = {plan.entries[part.name].format for part in parts.values()}
    if len(formats) > 1:
        yield f"unreadable {ours}: its experts are stored in {' and '.join(sorted(formats))}"


def _assemble(parts: Iterable[ExpertPart], shape: Sequence[int], read: Callable[[str], Weight]) -> Weight:
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
                raise ValueError(f"{part.name} must group its columns as the gate of its expert does.")
            slots[name].copy_(tensor)
    assert like is not None
    return joined[""] if isinstance(like, Tensor) else like.with_tensors(joined)


def _require_valid(weight: QuantizedWeight) -> None:
    if isinstance(weight, IntWeight) and weight.group_index is not None:
        ordered = weight.group_index.long().view(-1, weight.shape[-1]).sort(-1).values
        fits = torch.equal(ordered, _neighbours(weight).expand_as(ordered))
        rule = f"be below {weight.scale.shape[-1]}, with {weight.group_size} columns in each group"
        require(fits, "group indices", rule, weight.group_index, "Download the file again.")
    for role, tensor in weight.tensors().items():
        if role in ("scale", "bias", "row_scale") and not bool(tensor.float().isfinite().all()):
            raise ValueError(f"scales must be finite, got NaN or infinity in {role}. Download the file again.")


def _without_trivial_index(weight: IntWeight) -> IntWeight:
    """Drop a group index that only repeats the order of the columns."""
    index = weight.group_index
    if index is None or not torch.equal(index.long(), _neighbours(weight).expand_as(index)):
        return weight
    return weight.with_tensors({name: t for name, t in weight.tensors().items() if name != "group_index"})


def _neighbours(weight: IntWeight) -> Tensor:
    """Return the group of each column (K,) if groups are neighbouring columns."""
    return torch.arange(weight.shape[-1], device=weight.device) // weight.group_size


def first(items: list[str]) -> list[str]:
    """Shorten a list of names for an error message."""
    return items if len(items) <= _MOST_NAMED else [*items[:_MOST_NAMED], f"and {len(items) - _MOST_NAMED} more"]
