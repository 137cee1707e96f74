"""Files of adapters: safetensors, with the settings and the noise of the training as metadata."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from torch import nn

from dgemma.checks import show, typed
from dgemma.files import open_tensors, parse_json, write_tensors
from dgemma.model.diffusion import DiffusionGemma
from dgemma.model.experts import Experts
from dgemma.train.lora.adapters import adapter_weights, adapters_of, add_lora, refuse_adapters, require_adapters
from dgemma.train.lora.settings import LoRA, is_target
from dgemma.values import describe_settings

_EXPERT_WEIGHTS = {"gate_up_": "gate_up_proj", "down_": "down_proj"}  # by the prefix of their adapters
_DTYPES = ("F64", "F32", "F16", "BF16")


def save_lora(model: DiffusionGemma, path: str | Path) -> None:
    """Write only the adapters, to a safetensors file with their settings and the noise of the training.

    Example: `save_lora(model, "sudoku-lora.safetensors")`.
    """
    require_adapters(model, "save_lora")
    lora = adapters_of(model)
    assert lora is not None
    noise = {} if model.generation.noise is None else {"noise": json.dumps(dict(model.generation.noise))}
    write_tensors(path, dict(adapter_weights(model)), metadata={"lora": json.dumps(describe_settings(lora)), **noise})


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
        # Before anything is allocated: a few bytes can name a huge rank.
        if _adapter_shapes(model, lora) != {name: tuple(entry.get_shape()) for name, entry in slices.items()}:
            raise ValueError(
                f"{path} must fit the model, but its adapters have other names or shapes. Load the model it was made "
                "for."
            )
        if any(entry.get_dtype() not in _DTYPES for entry in slices.values()):
            raise ValueError(f"{path} must hold adapters as floats ({', '.join(_DTYPES)}), got another dtype.")
        add_lora(model, lora)
        for name, weight in adapter_weights(model):
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
        if is_target(name, lora.targets):
            of_experts = isinstance(module, Experts)
            for prefix, attribute in _EXPERT_WEIGHTS.items() if of_experts else (("", "weight"),):
                *experts, num_out, num_in = getattr(module, attribute).shape
                shapes[f"{name}.{prefix}lora_a"] = (*experts, lora.rank, num_in)
                shapes[f"{name}.{prefix}lora_b"] = (*experts, num_out, lora.rank)
    return shapes
