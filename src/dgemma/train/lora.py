"""Low-rank adapters (LoRA, arXiv:2106.09685), which can be merged into the weights.

A weight W (out, in) acts as W + scale · B A. A (rank, in) is random and B (out, rank) is zero, so training starts from
the unchanged model. Experts are 3-D weights, with an A and a B for each. The adapted modules keep their names and their
base weights. Adapters are additional parameters of those modules, saved separately. The base weights may be quantised
(QLoRA, arXiv:2305.14314).

`adapter_files.py` reads and writes adapters in PEFT's format.
"""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgemma.checks import FINITE, Count, above, check_types, require, require_field, typed
from dgemma.doors import replaceable
from dgemma.model.config import GenerationDefaults
from dgemma.model.diffusion import DiffusionGemma
from dgemma.model.experts import Experts, Routing, product_by_group
from dgemma.model.released import require_experts
from dgemma.quantization.rounding import requantize
from dgemma.quantization.weights import (
    QuantizedLinear,
    QuantizedWeight,
    Weight,
    linear,
    linear_layer,
    quantized_weights,
    set_weight,
)

TARGETS = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "dense": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    "experts": ("experts",),
    "router": ("router.proj",),
    "self_conditioning": ("self_conditioning.gate_proj", "self_conditioning.up_proj", "self_conditioning.down_proj"),
    "vision_projection": ("vision.embedding_projection",),
}


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """The settings of adapters: their rank, their strength and their targets. The update is alpha / rank · B A.

    Targets are groups of weights: attention, dense, experts, router, self_conditioning, and vision_projection; or names
    of single modules, such as "layers.0.self_attn.q_proj". The vision tower itself is never adapted.

    Example: `LoRA(rank=16, alpha=32, targets=("attention", "dense"))` is the choice of several public recipes.
    """

    rank: Count = 8
    alpha: Annotated[float, above(0), FINITE] = 16.0
    targets: tuple[str, ...] = ("attention", "dense", "experts", "router", "self_conditioning")

    def __post_init__(self) -> None:
        check_types(self)
        are_known = bool(self.targets) and all(target in TARGETS or "." in target for target in self.targets)
        rule = f"be among {', '.join(TARGETS)}, or names of modules"
        require_field(are_known, self, "targets", rule, "Use one or more.")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def adaptable_modules(model: nn.Module, targets: Iterable[str]) -> dict[str, nn.Linear | QuantizedLinear | Experts]:
    """Return the linear layers and experts that are targets, by name; none in the vision tower."""
    ends = [end for target in targets for end in TARGETS.get(target, (target,))]
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | QuantizedLinear | Experts)
        and not name.startswith("vision.layers.")
        and any(name == end or name.endswith("." + end) for end in ends)
    }


class AdaptedLinear(nn.Module):
    """A linear layer whose output gains scale · B A x."""

    weight: Weight
    base_generation: GenerationDefaults  # of the base model; training adapters may change the model's noise

    def __init__(self, base: nn.Linear | QuantizedLinear, lora: LoRA) -> None:
        super().__init__()
        self.weight, self.lora = base.weight, lora
        self.lora_a, self.lora_b = new_pair(base.weight, lora.rank)

    @replaceable
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight) + F.linear(
            self.lora.scale * F.linear(x, self.lora_a.to(x.dtype)), self.lora_b.to(x.dtype)
        )

    def updates(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of the base weight in this module, and the update of its adapter."""
        yield "weight", self.lora_b @ self.lora_a * self.lora.scale

    def base(self) -> nn.Linear | QuantizedLinear:
        """Return the layer without its adapter."""
        return linear_layer(self.weight)


def pair_shapes(weight: Weight, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of A (…, rank, in) and B (…, out, rank)."""
    *experts, num_out, num_in = weight.shape
    return (*experts, rank, num_in), (*experts, num_out, rank)


def new_pair(weight: Weight, rank: int) -> Iterator[nn.Parameter]:
    """Yield A and B, both zeros; `add_lora` then draws A. They are float32 or wider, because updates are small."""
    dtype = torch.promote_types(weight.dtype, torch.float32) if isinstance(weight, Tensor) else torch.float32
    for shape in pair_shapes(weight, rank):
        yield nn.Parameter(torch.zeros(shape, dtype=dtype, device=weight.device))


class AdaptedExperts(Experts):
    """Experts whose every product gains scale · B_e A_e x."""

    base_generation: GenerationDefaults

    def __init__(self, base: Experts, lora: LoRA) -> None:
        nn.Module.__init__(self)
        self.gate_up_proj, self.down_proj, self.lora = base.gate_up_proj, base.down_proj, lora
        self.gate_up_lora_a, self.gate_up_lora_b = new_pair(base.gate_up_proj, lora.rank)
        self.down_lora_a, self.down_lora_b = new_pair(base.down_proj, lora.rank)

    @replaceable
    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        return super().forward(x, routing)

    def gate_up(self, rows: Tensor, ends: Tensor) -> Tensor:
        return super().gate_up(rows, ends) + self._adapter(rows, self.gate_up_lora_a, self.gate_up_lora_b, ends)

    def down(self, rows: Tensor, ends: Tensor) -> Tensor:
        return super().down(rows, ends) + self._adapter(rows, self.down_lora_a, self.down_lora_b, ends)

    def _adapter(self, rows: Tensor, a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
        """Return scale · B_e A_e row for rows (R, I) grouped by expert: (R, O)."""
        narrow = product_by_group(rows, a.to(rows.dtype), ends)  # (R, rank)
        return product_by_group(self.lora.scale * narrow, b.to(narrow.dtype), ends)

    def updates(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of each base weight in this module, and the update of its adapter."""
        yield "gate_up_proj", self.gate_up_lora_b @ self.gate_up_lora_a * self.lora.scale
        yield "down_proj", self.down_lora_b @ self.down_lora_a * self.lora.scale

    def base(self) -> Experts:
        """Return the experts without their adapters."""
        experts = Experts.__new__(Experts)
        nn.Module.__init__(experts)
        experts.gate_up_proj, experts.down_proj = self.gate_up_proj, self.down_proj
        return experts


@typed
def add_lora(model: DiffusionGemma, lora: LoRA | None = None, *, seed: int = 0) -> list[nn.Parameter]:
    """Freeze the model, add adapters to its targets, and return the adapters' weights for an optimizer.

    Example: `add_lora(model, LoRA(rank=8)); train(model, objective, source, config, out="run")`.
    """
    lora = lora or LoRA()
    refuse_adapters(model, "add_lora")
    most = model.config.hidden_size
    require(lora.rank <= most, "LoRA.rank", f"be at most the model's hidden size {most}", lora.rank, "Use 8.")
    targets = adaptable_modules(model, lora.targets)
    unknown = {*lora.targets} - {*TARGETS} - targets.keys()
    require(not unknown, "LoRA.targets", "name linear layers or experts of the model", unknown)
    model.requires_grad_(False)
    for name, module in targets.items():
        adapted = AdaptedExperts(module, lora) if isinstance(module, Experts) else AdaptedLinear(module, lora)
        adapted.base_generation = model.generation
        _set_module(model, name, adapted)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in adapter_weights(model):
        if name.endswith("lora_a"):  # drawn on the CPU, so that the adapter does not depend on the device
            values = torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5
            weight.data.copy_(values)
    return [weight for _, weight in adapter_weights(model)]


@torch.no_grad()
@typed
def merge_lora(
    model: DiffusionGemma, *, quantized: Literal["dequantize", "requantize"] | None = None
) -> dict[str, float]:
    """Add the adapters to the weights and remove them. The model can then be saved and accelerated.

    Plain weights are rounded to their dtype, and the logits change only by that rounding. Quantised weights need a
    choice: "dequantize" gives weights of the model's dtype; "requantize" rounds to the same format again, which changes
    the logits. Return the relative rounding error |rounded - exact| / |exact| of each weight that was quantised.

    Example: `merge_lora(model); model.save_pretrained("merged")`.
    """
    require_adapters(model, "merge_lora")
    is_plain = not any(any(quantized_weights(module)) for _, module in adapted_modules(model))
    fix = "The sum of a quantised weight and its adapter fits the format only after rounding."
    rule = "be 'dequantize' or 'requantize' for a quantised model"
    require(is_plain or quantized is not None, "merge_lora quantized", rule, quantized, fix)
    errors = {}
    for name in [name for name, _ in adapted_modules(model)]:  # not a list of modules, so that old weights are freed
        module: Any = model.get_submodule(name)
        merged = {}
        for attribute, update in module.updates():
            weight = getattr(module, attribute)
            if isinstance(weight, QuantizedWeight):
                exact = weight.decode(update.dtype) + update
                rounded = requantize(exact, weight) if quantized == "requantize" else exact.to(model.dtype)
                values = rounded if isinstance(rounded, Tensor) else rounded.decode(exact.dtype)
                errors[f"{name}.{attribute}"] = float((values - exact).norm() / exact.norm())
            else:
                # Added in the wider dtype of the two, and rounded once. Not in place: see `share_weights`.
                wide = torch.promote_types(weight.dtype, update.dtype)
                rounded = (weight.to(wide) + update).to(weight.dtype)
            merged[attribute] = rounded
        _set_module(model, name, module.base())
        for attribute, weight in merged.items():
            set_weight(model, f"{name}.{attribute}", weight)
    model.requires_grad_(True)
    return errors


def drop_lora(model: DiffusionGemma) -> None:
    """Remove the adapters. The base model is trainable again and generates with its own noise process.

    Example: `load_lora(model, "sudoku-lora"); ...; drop_lora(model)`.
    """
    require_adapters(model, "drop_lora")
    base = next(module.base_generation for _, module in adapted_modules(model))
    model.generation = replace(
        model.generation, noise=base.noise, entropy_bound=base.entropy_bound, sampler=base.sampler
    )
    for name, module in adapted_modules(model):
        _set_module(model, name, module.base())
    model.requires_grad_(True)


def share_weights(model: DiffusionGemma) -> DiffusionGemma:
    """Return a model that uses the same memory for its weights, so that it can have adapters of its own.

    Example: `german = share_weights(model); load_lora(german, "german-lora")` leaves `model` as it was.
    """
    shared: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    shared |= {id(p): nn.Parameter(p.data, requires_grad=p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, shared)


@contextmanager
def start_weights(model: DiffusionGemma, start: DiffusionGemma | None, name: str) -> Iterator[DiffusionGemma]:
    """Yield the model as it was before training: `start`, or if it is None, the model without its adapters."""
    if start is not None:
        yield start
        return
    rule, fix = "be a model if this one has no adapters", "Pass copy.deepcopy(model), made before training."
    require(is_adapted(model), name, rule, None, fix)
    adapted = list(adapted_modules(model))
    try:
        for place, module in adapted:
            _set_module(model, place, module.base())
        yield model
    finally:
        for place, module in adapted:
            _set_module(model, place, module)


def is_adapted(model: nn.Module) -> bool:
    """Return True if the model has adapters."""
    return adapters_of(model) is not None


def adapters_of(model: nn.Module) -> LoRA | None:
    """Return the settings of a model's adapters, or None."""
    return next((module.lora for _, module in adapted_modules(model)), None)


def adapted_modules(model: nn.Module) -> Iterator[tuple[str, AdaptedLinear | AdaptedExperts]]:
    return ((name, m) for name, m in list(model.named_modules()) if isinstance(m, AdaptedLinear | AdaptedExperts))


def adapter_weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, weight) for name, weight in model.named_parameters() if name.endswith(("lora_a", "lora_b")))


def refuse_adapters(model: nn.Module, owner: str) -> None:
    require_experts(model, owner)
    fix = "Call merge_lora(model) or drop_lora(model) first."
    require(not is_adapted(model), f"{owner} model", "have no adapters", adapters_of(model), fix)


def require_adapters(model: nn.Module, owner: str) -> None:
    fix = "Call add_lora(model) or load_lora(model, path) first."
    require(is_adapted(model), f"{owner} model", "have adapters", None, fix)


def _set_module(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
