"""Adapters of a model: added to its modules, merged into its weights, removed, and stored in safetensors files.

The metadata of a file has the settings of the adapters and the noise of the training.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from dgemma.checks import require, show, typed
from dgemma.files import open_tensors, parse_json, write_tensors
from dgemma.model.diffusion import DiffusionGemma, require_experts
from dgemma.model.experts import Experts
from dgemma.model.identity import fingerprint
from dgemma.model.quantize import requantize
from dgemma.model.quantized import QuantizedWeight, quantized_weights, set_weight
from dgemma.train.lora.experts import AdaptedExperts
from dgemma.train.lora.linear import AdaptedLinear, LoRA, is_target
from dgemma.values import describe_settings

logger = logging.getLogger("dgemma")

_EXPERT_WEIGHTS = {"gate_up_": "gate_up_proj", "down_": "down_proj"}  # by the prefix of their adapters
_DTYPES = ("F64", "F32", "F16", "BF16")


@typed
def add_lora(model: DiffusionGemma, lora: LoRA | None = None, *, seed: int = 0) -> list[nn.Parameter]:
    """Freeze the model, add adapters to its targets, and return the adapters' weights for an optimizer.

    Example: `add_lora(model, LoRA(rank=8)); train(model, objective, source, config, out="run")`.
    """
    lora = lora or LoRA()
    refuse_adapters(model, "add_lora")
    most = model.config.hidden_size
    require(lora.rank <= most, "LoRA.rank", f"be at most the model's hidden size {most}", lora.rank, "Use 8.")
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if not is_target(name, lora.targets):
            continue
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
    adapted = list(adapted_modules(model))
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
        _set_module(model, name, module.base())
        for attribute, weight in merged.items():
            set_weight(model, f"{name}.{attribute}", weight)
    model.requires_grad_(True)
    return errors


def drop_lora(model: DiffusionGemma) -> None:
    """Remove the adapters. The base model is trainable again and generates with its own noise process.

    Example: `load_lora(model, "sudoku-lora.safetensors"); ...; drop_lora(model)`.
    """
    require_adapters(model, "drop_lora")
    base = next(module.base_generation for _, module in adapted_modules(model))
    model.generation = replace(
        model.generation, noise=base.noise, entropy_bound=base.entropy_bound, sampler=base.sampler
    )
    for name, module in adapted_modules(model):
        _set_module(model, name, module.base())
    model.requires_grad_(True)


@contextmanager
def without_adapters(model: DiffusionGemma) -> Iterator[None]:
    """Use the base weights alone within the context.

    Example: `with without_adapters(model), torch.no_grad(): start = trajectory.log_prob(model)`.
    """
    adapted = list(adapted_modules(model))
    try:
        for name, module in adapted:
            _set_module(model, name, module.base())
        yield
    finally:
        for name, module in adapted:
            _set_module(model, name, module)


def is_adapted(model: nn.Module) -> bool:
    """Return True if the model has adapters."""
    return adapters_of(model) is not None


def adapters_of(model: nn.Module) -> LoRA | None:
    """Return the settings of a model's adapters, or None.

    Example: `add_lora(model, LoRA(rank=4)); adapters_of(model).rank` is 4.
    """
    return next((module.lora for _, module in adapted_modules(model)), None)


def adapted_modules(model: nn.Module) -> Iterator[tuple[str, AdaptedLinear | AdaptedExperts]]:
    return ((name, m) for name, m in list(model.named_modules()) if isinstance(m, AdaptedLinear | AdaptedExperts))


def adapter_weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, weight) for name, weight in model.named_parameters() if name.endswith(("lora_a", "lora_b")))


def refuse_adapters(model: nn.Module, owner: str) -> None:
    require_experts(model, owner)
    if is_adapted(model):
        raise ValueError(
            f"{owner} model must have no adapters, but it has some. Call merge_lora(model) or drop_lora(model) first."
        )


def require_adapters(model: nn.Module, owner: str) -> None:
    if not is_adapted(model):
        raise ValueError(
            f"{owner} model must have adapters, but it has none. Call add_lora(model) or load_lora(model, path) first."
        )


def _set_module(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def save_lora(model: DiffusionGemma, path: str | Path) -> None:
    """Write only the adapters, to a safetensors file with their settings and the noise of the training.

    Example: `save_lora(model, "sudoku-lora.safetensors")`.
    """
    require_adapters(model, "save_lora")
    lora = adapters_of(model)
    assert lora is not None
    metadata = {"lora": json.dumps(describe_settings(lora)), "base": _identify_base(model)}
    if model.generation.noise is not None:
        metadata["noise"] = json.dumps(dict(model.generation.noise))
    write_tensors(path, dict(adapter_weights(model)), metadata=metadata)


@typed
def load_lora(model: DiffusionGemma, path: str | Path) -> LoRA:
    """Add saved adapters to a model, which then generates with their noise process; return their settings.

    Example: `load_lora(model, "sudoku-lora.safetensors"); merge_lora(model)`.
    """
    refuse_adapters(model, "load_lora")
    with open_tensors(path) as stored:
        metadata = stored.metadata() or {}
        slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118 (no mapping)
        lora, generation = _read_settings(metadata, path), model.generation
        if "noise" in metadata:  # otherwise the model keeps its own
            generation = generation.after_learning(parse_json(metadata["noise"], f"the noise in {path}"))
        # Checked before anything is allocated, because a few bytes can name a huge rank.
        if _adapter_shapes(model, lora) != {name: tuple(entry.get_shape()) for name, entry in slices.items()}:
            raise ValueError(
                f"{path} must fit the model, but its adapters have other names or shapes. Load the model it was made "
                "for."
            )
        if any(entry.get_dtype() not in _DTYPES for entry in slices.values()):
            raise ValueError(f"{path} must hold adapters as floats ({', '.join(_DTYPES)}), got another dtype.")
        if metadata.get("base", _identify_base(model)) != _identify_base(model):
            logger.warning("The adapters in %s were trained for other weights than this model's.", path)
        add_lora(model, lora)
        for name, weight in adapter_weights(model):
            weight.data.copy_(stored.get_tensor(name))
    model.generation = generation
    return lora


def _identify_base(model: nn.Module) -> str:
    """Return the identity of a model's weights without adapters. It does not depend on the dtype that they have."""
    adapters = {name for name, _ in adapter_weights(model)}
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in adapters}
    return fingerprint(tensors, dtype=torch.bfloat16)


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
        if is_target(name, lora.targets):
            of_experts = isinstance(module, Experts)
            for prefix, attribute in _EXPERT_WEIGHTS.items() if of_experts else (("", "weight"),):
                *experts, num_out, num_in = getattr(module, attribute).shape
                shapes[f"{name}.{prefix}lora_a"] = (*experts, lora.rank, num_in)
                shapes[f"{name}.{prefix}lora_b"] = (*experts, num_out, lora.rank)
    return shapes
