"""Files of adapters, in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors.

transformers has two copies of the tied layers, an encoder and a decoder, and PEFT adapts each. Our model has one, so
the file holds every adapter of a layer twice. PEFT stacks the adapters of all experts of a weight in one A and one B.
"""

import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from dgemma.checkpoint.identity import fingerprint
from dgemma.checkpoint.names import our_names, published_name
from dgemma.checks import Words, require, typed
from dgemma.files import open_tensors, parse_json, read_json, write_json, write_tensors, writing
from dgemma.model.diffusion import DiffusionGemma
from dgemma.model.experts import Experts
from dgemma.train.lora import (
    TARGETS,
    LoRA,
    adaptable_modules,
    adapter_weights,
    adapters_of,
    add_lora,
    pair_shapes,
    refuse_adapters,
    require_adapters,
)

logger = logging.getLogger("dgemma")

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_DTYPES = ("F64", "F32", "F16", "BF16")
_DECODER, _ENCODER = "model.decoder.layers.", "model.encoder.language_model.layers."
_KEY = re.compile(r"base_model\.model\.(?P<module>.+?)(?P<inner>\.base_layer)?\.lora_(?P<letter>[AB])\.weight")
# Settings of PEFT that would change the result.
_REFUSED = ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out", "layer_replication")


def save_lora(model: DiffusionGemma, folder: str | Path) -> None:
    """Write only the adapters, to a folder that PEFT reads. It also has the noise of the training.

    Example: `save_lora(model, "sudoku-lora")`; elsewhere `PeftModel.from_pretrained(hf_model, "sudoku-lora")`.
    """
    require_adapters(model, "save_lora")
    lora, folder = adapters_of(model), Path(folder).expanduser()
    assert lora is not None
    tensors = {
        key: _stack(name, weight.detach().clone()) for name, weight in adapter_weights(model) for key in _keys(name)
    }
    modules = {_read_key(key)["module"] for key in tensors}
    experts = {name for name in modules if name.endswith(".experts")}
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": None if model.source is None else str(model.source),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(modules - experts),
        "target_parameters": sorted(f"{name}.{weight}" for name in experts for weight in ("gate_up_proj", "down_proj")),
        "bias": "none",
        "inference_mode": True,
    }
    metadata = {"format": "pt", "base": _identify_base(model)}
    if model.generation.noise is not None:
        metadata["noise"] = json.dumps(dict(model.generation.noise))
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / _WEIGHTS, tensors, metadata=metadata)
    write_json(folder / _CONFIG, config)


@typed
def load_lora(model: DiffusionGemma, folder: str | Path) -> LoRA:
    """Add saved adapters to a model, which then generates with their noise process; return their settings.

    The folder is from `save_lora` or from PEFT. PEFT's adapters of a DiffusionGemma must be equal in its encoder and
    its decoder, because dgemma has one stack for both.

    Example: `load_lora(model, "sudoku-lora"); merge_lora(model)`.
    """
    refuse_adapters(model, "load_lora")
    folder = Path(folder).expanduser()
    config = _read_config(folder)
    with open_tensors(folder / _WEIGHTS) as stored:
        metadata, generation = stored.metadata() or {}, model.generation
        if "noise" in metadata:  # otherwise the model keeps its own
            generation = generation.after_learning(parse_json(metadata["noise"], f"the noise in {folder}"))
        slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118 (no mapping)
        dtypes = {entry.get_dtype() for entry in slices.values()}
        require(dtypes <= {*_DTYPES}, str(folder), f"hold adapters as {', '.join(_DTYPES)}", dtypes)
        sources = _find_sources(slices, config, folder)
        alpha = config["lora_alpha"] * (config["r"] ** 0.5 if config.get("use_rslora") else 1.0)
        lora = LoRA(rank=config["r"], alpha=alpha, targets=_name_targets(model, sources))
        # Checked before anything is allocated, because a few bytes can name a huge rank.
        shapes = _adapter_shapes(model, lora)
        fits = sources.keys() <= shapes.keys() and all(
            slices[key].get_shape() == [*_stack(name, torch.empty(shapes[name], device="meta")).shape]
            for name, keys in sources.items()
            for key in keys
        )
        require(fits, str(folder), "fit the names and shapes of the model", lora, "Load the model it was made for.")
        if metadata.get("base", _identify_base(model)) != _identify_base(model):
            logger.warning("The adapters in %s were trained for other weights than this model's.", folder)
        values = {name: _read_equal([stored.get_tensor(key) for key in keys], name) for name, keys in sources.items()}
    add_lora(model, lora)
    for name, weight in adapter_weights(model):
        # PEFT can adapt one of the two weights of experts. The other pair is zero.
        weight.data.copy_(_unstack(name, values[name], weight.shape) if name in values else torch.zeros_like(weight))
    model.generation = generation
    return lora


def _read_key(key: str) -> re.Match[str]:
    """Parse a name in PEFT's file: the module in transformers, A or B, and whether another adapter encloses it."""
    match = _KEY.fullmatch(key)
    require(match is not None, "a name of an adapter", "be base_model.model.MODULE.lora_A.weight or lora_B", key)
    assert match is not None
    return match


def _keys(name: str) -> Iterator[str]:
    """Yield PEFT's names for one of our adapters. The adapter of `down_proj` encloses that of `gate_up_proj`."""
    module, _, attribute = name.rpartition(".")
    inner = ".base_layer" if attribute.startswith("gate_up_") else ""
    published = published_name(f"{module}.weight").removesuffix(".weight")
    for copy in dict.fromkeys((published, published.replace(_DECODER, _ENCODER))):
        yield f"base_model.model.{copy}{inner}.lora_{attribute[-1].upper()}.weight"


def _find_sources(names: Mapping[str, Any], config: Mapping[str, Any], folder: Path) -> dict[str, list[str]]:
    """Return our names of adapters, each with the stored names of its copies."""
    sources: dict[str, list[str]] = {}
    parameters = config.get("target_parameters") or []
    fits = isinstance(parameters, list) and all(isinstance(name, str) for name in parameters)
    require(fits, str(folder), "list names as target_parameters", parameters)
    wrapped = [kind for kind in ("gate_up", "down") if any(name.endswith(f"{kind}_proj") for name in parameters)]
    for key in names:
        module, inner, letter = _read_key(key).group("module", "inner", "letter")
        ours = our_names(f"{module}.weight")[0].removesuffix(".weight")
        prefix = ""
        if ours.endswith(".experts") and wrapped:
            prefix = f"{wrapped[0 if inner else -1]}_"
        sources.setdefault(f"{ours}.{prefix}lora_{letter.lower()}", []).append(key)
        twin = key.replace(_DECODER, _ENCODER) if _DECODER in key else key.replace(_ENCODER, _DECODER)
        fix = "dgemma has one stack for both. Train the adapters tied."
        require(twin in names, str(folder), "adapt the encoder and the decoder alike", Words(f"only {key}"), fix)
    return sources


def _read_equal(copies: list[Tensor], name: str) -> Tensor:
    fits, fix = all(torch.equal(copies[0], copy) for copy in copies), "dgemma has one stack for both. Train them tied."
    require(fits, f"the adapters of {name}", "be equal in the encoder and the decoder", Words("others"), fix)
    return copies[0]


def _name_targets(model: nn.Module, names: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the targets that these adapters have: whole groups, and names of single modules."""
    modules, groups = {name.rpartition(".")[0] for name in names}, []
    for group in TARGETS:
        members = adaptable_modules(model, (group,)).keys()
        if members and members <= modules:
            groups.append(group)
            modules -= members
    return (*groups, *sorted(modules))


def _read_config(folder: Path) -> dict[str, Any]:
    config, owner = read_json(folder / _CONFIG), str(folder / _CONFIG)
    require(config.get("peft_type") == "LORA", owner, "be of LoRA", config.get("peft_type"))
    settings = [name for name in _REFUSED if config.get(name)] + ["bias"] * (config.get("bias", "none") != "none")
    require(not settings, owner, "have no setting that dgemma lacks", settings)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    are_numbers = type(rank) is int and rank > 0 and isinstance(alpha, int | float)
    require(are_numbers, owner, "have the numbers r and lora_alpha", (rank, alpha))
    return config


def _stack(name: str, weight: Tensor) -> Tensor:
    """Return an adapter as PEFT stores it: that of experts, A (E, R, I) or B (E, O, R), as one matrix."""
    if weight.dim() == 2:
        return weight
    return rearrange(weight, "e r i -> (e r) i" if name.endswith("lora_a") else "e o r -> o (r e)").contiguous()


def _unstack(name: str, stacked: Tensor, shape: torch.Size) -> Tensor:
    """Return a stored adapter in our shape; the reverse of `_stack`."""
    if len(shape) == 2:
        return stacked
    return rearrange(stacked, "(e r) i -> e r i" if name.endswith("lora_a") else "o (r e) -> e o r", e=shape[0])


def _identify_base(model: nn.Module) -> str:
    """Return the identity of a model's weights without adapters. It does not depend on the dtype that they have."""
    adapters = {name for name, _ in adapter_weights(model)}
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in adapters}
    return fingerprint(tensors, dtype=torch.bfloat16)


def _adapter_shapes(model: nn.Module, lora: LoRA) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all adapters that `add_lora` would make."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, module in adaptable_modules(model, lora.targets).items():
        for prefix in ("gate_up_", "down_") if isinstance(module, Experts) else ("",):
            weight = getattr(module, f"{prefix}proj" if prefix else "weight")
            of_a, of_b = pair_shapes(weight, lora.rank)
            shapes |= {f"{name}.{prefix}lora_a": of_a, f"{name}.{prefix}lora_b": of_b}
    return shapes
