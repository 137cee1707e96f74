"""Low-rank adapters (LoRA, arXiv:2106.09685), which can be merged into the weights.

A weight W (out, in) acts as W + scale · B A. A (rank, in) is random and B (out, rank) is zero, so training starts from
the unchanged model. Experts are 3-D weights, with an A and a B for each. The adapted modules keep their names and their
base weights. Adapters are additional parameters of those modules, saved separately. The base weights may be quantised
(QLoRA, arXiv:2305.14314).
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dgemma.checks import check_count, check_finite, require_field, show, typed
from dgemma.files import open_tensors, parse_json, write_tensors
from dgemma.model.config import GenerationDefaults
from dgemma.model.diffusion import DiffusionGemma
from dgemma.model.experts import Experts, Groups, dispatch, product_by_group, require_experts
from dgemma.model.fused import fusible
from dgemma.model.layers import gated_gelu, product_dtype
from dgemma.model.quantize import requantize
from dgemma.model.quantized import (
    QuantizedLinear,
    QuantizedWeight,
    Weight,
    linear,
    linear_layer,
    quantized_weights,
    set_weight,
)

_TARGETS = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "dense": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    "experts": ("experts",),
    "router": ("router.proj",),
    "self_conditioning": ("self_conditioning.gate_proj", "self_conditioning.up_proj", "self_conditioning.down_proj"),
}
_EXPERT_WEIGHTS = {"gate_up_": "gate_up_proj", "down_": "down_proj"}  # by the prefix of their adapters
_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """The settings of adapters: their rank, their strength and their targets. The update is alpha / rank · B A.

    Targets are groups of weights: attention, dense, experts, router, self_conditioning.

    Example: `LoRA(rank=16, alpha=32, targets=("attention", "dense"))` is the choice of several public recipes.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("attention", "dense", "experts", "router", "self_conditioning")

    def __post_init__(self) -> None:
        targets = self.targets
        named = isinstance(targets, list | tuple) and all(isinstance(target, str) for target in targets)
        require_field(named, self, "targets", "be a tuple of names", f"Choose from {', '.join(_TARGETS)}.")
        object.__setattr__(self, "targets", tuple(targets))
        check_count(self, "rank", fix="Use 8.")
        check_finite(self, "alpha", above=0, fix="Use twice the rank.")
        unknown = [target for target in self.targets if target not in _TARGETS]
        if unknown or not self.targets:
            raise ValueError(f"LoRA.targets must be among {', '.join(_TARGETS)}, got {self.targets}. Use one or more.")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class AdaptedLinear(nn.Module):
    """A linear layer whose output gains scale · B A x."""

    weight: Weight
    base_generation: GenerationDefaults  # of the base model; training adapters may change the model's noise

    def __init__(self, base: nn.Linear | QuantizedLinear, lora: LoRA) -> None:
        super().__init__()
        self.weight, self.lora = base.weight, lora
        self.lora_a, self.lora_b = _new_pair(base.weight, lora.rank)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _AdaptedProduct.apply(x, self.weight, self.lora_a, self.lora_b, self.lora.scale, product_dtype(x))
        return out

    def updates(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of the base weight in this module, and the update of its adapter."""
        yield "weight", self.lora_b @ self.lora_a * self.lora.scale

    def base(self) -> nn.Linear | QuantizedLinear:
        """Return the layer without its adapter."""
        return linear_layer(self.weight)


class AdaptedExperts(Experts):
    """Experts whose every product gains scale · B_e A_e x."""

    base_generation: GenerationDefaults

    def __init__(self, base: Experts, lora: LoRA) -> None:
        nn.Module.__init__(self)
        self.gate_up_proj, self.down_proj, self.lora = base.gate_up_proj, base.down_proj, lora
        self.gate_up_lora_a, self.gate_up_lora_b = _new_pair(base.gate_up_proj, lora.rank)
        self.down_lora_a, self.down_lora_b = _new_pair(base.down_proj, lora.rank)

    def hidden(self, x: Tensor, groups: Groups) -> Tensor:
        wide = self.gate_up(dispatch(x, groups), groups.ends)
        # For small ranks, one product of all tokens with all experts' A is faster than thin products by expert.
        narrow = F.linear(x, self.gate_up_lora_a.to(x.dtype).flatten(0, 1)).unflatten(-1, (-1, self.lora.rank))
        narrow = narrow.gather(1, self._chosen(groups)).flatten(0, 1)  # (R, rank), by token
        narrow = _Permute.apply(narrow, groups.order, groups.back.flatten())
        low = product_by_group(narrow, self.gate_up_lora_b.to(x.dtype), groups.ends)
        return _gated_sum(wide, low, self.lora.scale)

    def mix(self, hidden: Tensor, weights: Tensor, groups: Groups, dtype: torch.dtype) -> Tensor:
        mixed = super().mix(hidden, weights, groups, dtype)
        narrow = product_by_group(hidden, self.down_lora_a.to(hidden.dtype), groups.ends)
        narrow = _Permute.apply(narrow, groups.back.flatten(), groups.order).view(*weights.shape, -1)  # (M, A, rank)
        narrow = (narrow * (weights[..., None] * self.lora.scale)).to(hidden.dtype)
        # Zeros for the other experts make the sum over a token's experts one product with all experts' B.
        spread = narrow.new_zeros(weights.shape[0], self.down_lora_b.shape[0], self.lora.rank)
        spread = spread.scatter(1, self._chosen(groups), narrow).flatten(1)  # (M, E · rank)
        return mixed + spread @ self.down_lora_b.to(hidden.dtype).transpose(1, 2).flatten(0, 1)

    def _chosen(self, groups: Groups) -> Tensor:
        return groups.experts[..., None].expand(-1, -1, self.lora.rank)  # (M, A, rank)

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


class _AdaptedProduct(torch.autograd.Function):
    """x Wᵀ + scale · x Aᵀ Bᵀ, where both products add to one output, and both gradients of x to one gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight, a: Tensor, b: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        ctx.weight, ctx.scale, ctx.dtypes = weight, scale, (x.dtype, a.dtype)
        rows, a, b = (tensor.to(dtype) for tensor in (x.flatten(0, -2), a, b))
        with torch.autocast(x.device.type, enabled=False):
            narrow = rows @ a.T  # (M, rank)
            out = linear(rows, weight.to(dtype) if isinstance(weight, Tensor) else weight)
            out.addmm_(narrow, b.T, alpha=scale)
        if isinstance(weight, Tensor):
            ctx.weight = None
            ctx.save_for_backward(rows, a, b, narrow, weight)
        else:
            ctx.save_for_backward(rows, a, b, narrow)
        return out.unflatten(0, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, a, b, narrow, *weights = ctx.saved_tensors
        weight = weights[0].to(rows.dtype) if weights else ctx.weight.decode(rows.dtype)
        (x_dtype, wide), grads = ctx.dtypes, grad.flatten(0, -2)
        grad_narrow = (grads @ b).mul_(ctx.scale)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = (grads @ weight).addmm_(grad_narrow, a).to(x_dtype).unflatten(0, grad.shape[:-1])
        if ctx.needs_input_grad[1]:
            grad_weight = (grads.T @ rows).to(weights[0].dtype)
        grad_a, grad_b = grad_narrow.T @ rows, (grads.T @ narrow).mul_(ctx.scale)
        return grad_x, grad_weight, grad_a.to(wide), grad_b.to(wide), None, None


class _Permute(torch.autograd.Function):
    """x[order], whose gradient is a copy too, because `back` inverts `order`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[ctx.saved_tensors[0]], None, None


@fusible
def _gated_sum(wide: Tensor, low: Tensor, scale: float) -> Tensor:
    return gated_gelu(*(wide + low * scale).chunk(2, dim=-1))


@typed
def add_lora(model: DiffusionGemma, lora: LoRA | None = None, *, seed: int = 0) -> list[nn.Parameter]:
    """Freeze the model, add adapters to its targets, and return the adapters' weights for an optimizer.

    Example: `add_lora(model, LoRA(rank=8)); train(model, objective, source, config, out="run")`.
    """
    lora = lora or LoRA()
    _refuse_adapters(model, "add_lora")
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if not _is_target(name, lora.targets):
            continue
        adapted = AdaptedExperts(module, lora) if isinstance(module, Experts) else AdaptedLinear(module, lora)
        adapted.base_generation = model.generation
        _put(model, name, adapted)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in _adapter_weights(model):
        if name.endswith("lora_a"):  # drawn on the CPU, so that the adapter does not depend on the device
            values = torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5
            weight.data.copy_(values)
    return [weight for _, weight in _adapter_weights(model)]


@torch.no_grad()
def merge_lora(model: DiffusionGemma, *, quantized: str | None = None) -> dict[str, float]:
    """Add the adapters to the weights and remove them. The model can then be saved and accelerated.

    Plain weights are rounded to their dtype, and the logits change only by that rounding. Quantised weights need a
    choice: "dequantize" gives weights of the model's dtype; "requantize" rounds to the same format again, which changes
    the logits. Return the relative rounding error |rounded - exact| / |exact| of each weight that was quantised.

    Example: `merge_lora(model); model.save_pretrained("merged")`.
    """
    _require_adapters(model, "merge_lora")
    if quantized not in (None, "dequantize", "requantize"):
        raise ValueError(f"merge_lora quantized must be None, 'dequantize' or 'requantize', got {quantized!r}.")
    adapted = list(_adapted_modules(model))
    if quantized is None and any(list(quantized_weights(module)) for _, module in adapted):
        raise ValueError(
            "merge_lora quantized must be 'dequantize' or 'requantize' for a quantised model, got None. The sum of a "
            "quantised weight and its adapter fits the format only after rounding."
        )
    errors = {}
    for name, module in adapted:
        merged = {}
        for attribute, update in module.updates():
            weight = getattr(module, attribute)
            if isinstance(weight, QuantizedWeight):
                exact = weight.decode(update.dtype) + update
                rounded = requantize(exact, weight) if quantized == "requantize" else exact.to(model.dtype)
                merged[attribute] = rounded
                values = rounded if isinstance(rounded, Tensor) else rounded.decode(exact.dtype)
                errors[f"{name}.{attribute}"] = float((values - exact).norm() / exact.norm())
            else:
                # Added in the wider dtype of the two, and rounded once.
                wide = torch.promote_types(weight.dtype, update.dtype)
                weight.copy_((weight.to(wide) + update).to(weight.dtype))
        _put(model, name, module.base())
        for attribute, weight in merged.items():
            set_weight(model, f"{name}.{attribute}", weight)
    model.requires_grad_(True)
    return errors


def drop_lora(model: DiffusionGemma) -> None:
    """Remove the adapters. The base model is trainable again and samples under its own noise.

    Example: `load_lora(model, "sudoku-lora.safetensors"); ...; drop_lora(model)`.
    """
    _require_adapters(model, "drop_lora")
    # A model that an earlier version pickled has no base_generation, and keeps its noise.
    base = next(getattr(module, "base_generation", model.generation) for _, module in _adapted_modules(model))
    model.generation = replace(
        model.generation, noise=base.noise, entropy_bound=base.entropy_bound, sampler=base.sampler
    )
    _take_off(model)


def save_lora(model: DiffusionGemma, path: str | Path) -> None:
    """Write only the adapters, to a safetensors file with their settings and the noise of the training.

    Example: `save_lora(model, "sudoku-lora.safetensors")`.
    """
    _require_adapters(model, "save_lora")
    lora = adapters_of(model)
    assert lora is not None
    noise = {} if model.generation.noise is None else {"noise": json.dumps(dict(model.generation.noise))}
    write_tensors(path, dict(_adapter_weights(model)), metadata={"lora": json.dumps(asdict(lora)), **noise})


@typed
def load_lora(model: DiffusionGemma, path: str | Path) -> LoRA:
    """Add saved adapters to a model, which then samples under their noise; return their settings.

    Example: `load_lora(model, "sudoku-lora.safetensors"); merge_lora(model)`.
    """
    _refuse_adapters(model, "load_lora")
    with open_tensors(path) as stored:
        metadata = stored.metadata() or {}
        slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118 (no mapping)
        lora, generation = _read_settings(metadata, path), model.generation
        if "noise" in metadata:  # otherwise the model keeps its own
            generation = generation.after_learning(parse_json(metadata["noise"], f"the noise in {path}"))
        # Before anything is allocated: a few bytes can name a huge rank.
        if _adapter_shapes(model, lora) != {name: tuple(entry.get_shape()) for name, entry in slices.items()}:
            raise ValueError(
                f"{path} must fit the model, but its adapters have other names or shapes. Load the model it was made "
                "for."
            )
        if any(entry.get_dtype() not in _DTYPES for entry in slices.values()):
            raise ValueError(f"{path} must hold adapters as floats ({', '.join(_DTYPES)}), got another dtype.")
        add_lora(model, lora)
        for name, weight in _adapter_weights(model):
            weight.data.copy_(stored.get_tensor(name))
    model.generation = generation
    return lora


def _read_settings(metadata: Mapping[str, str], path: str | Path) -> LoRA:
    if "lora" not in metadata:
        raise ValueError(f"{path} must be a file of adapters, but it has none. Point at a file written by save_lora.")
    settings = parse_json(metadata["lora"], f"the settings of the adapters in {path}")
    if settings.keys() != {field.name for field in fields(LoRA)}:
        raise ValueError(f"{path} must have the settings of a LoRA, got {show(settings)}. Save the adapters again.")
    return LoRA(**settings)


def _adapter_shapes(model: nn.Module, lora: LoRA) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all adapters that `add_lora` would make."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        if _is_target(name, lora.targets):
            of_experts = isinstance(module, Experts)
            for prefix, attribute in _EXPERT_WEIGHTS.items() if of_experts else (("", "weight"),):
                *experts, num_out, num_in = getattr(module, attribute).shape
                shapes[f"{name}.{prefix}lora_a"] = (*experts, lora.rank, num_in)
                shapes[f"{name}.{prefix}lora_b"] = (*experts, num_out, lora.rank)
    return shapes


def is_adapted(model: nn.Module) -> bool:
    """Return True if the model has adapters."""
    return adapters_of(model) is not None


def adapters_of(model: nn.Module) -> LoRA | None:
    """Return the settings of a model's adapters, or None.

    Example: `add_lora(model, LoRA(rank=4)); adapters_of(model).rank` is 4.
    """
    return next((module.lora for _, module in _adapted_modules(model)), None)


def _take_off(model: DiffusionGemma) -> None:
    for name, module in _adapted_modules(model):
        _put(model, name, module.base())
    model.requires_grad_(True)


def _adapted_modules(model: nn.Module) -> Iterator[tuple[str, AdaptedLinear | AdaptedExperts]]:
    return ((name, m) for name, m in list(model.named_modules()) if isinstance(m, AdaptedLinear | AdaptedExperts))


def _adapter_weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, weight) for name, weight in model.named_parameters() if name.endswith(("lora_a", "lora_b")))


def _is_target(name: str, targets: Iterable[str]) -> bool:
    return any(name == end or name.endswith("." + end) for target in targets for end in _TARGETS[target])


def _new_pair(weight: Weight, rank: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Return A (…, rank, in) and B (…, out, rank) of zeros, in float32 or wider because updates are small."""
    *experts, num_out, num_in = weight.shape
    dtype = torch.promote_types(weight.dtype, torch.float32) if isinstance(weight, Tensor) else torch.float32
    a, b = (
        torch.zeros(*experts, *shape, dtype=dtype, device=weight.device) for shape in ((rank, num_in), (num_out, rank))
    )
    return nn.Parameter(a), nn.Parameter(b)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _refuse_adapters(model: nn.Module, owner: str) -> None:
    require_experts(model, owner)
    if is_adapted(model):
        raise ValueError(
            f"{owner} model must have no adapters, but it has some. Call merge_lora(model) or drop_lora(model) first."
        )


def _require_adapters(model: nn.Module, owner: str) -> None:
    if not is_adapted(model):
        raise ValueError(
            f"{owner} model must have adapters, but it has none. Call add_lora(model) or load_lora(model, path) first."
        )
