"""Loading of a model from a checkpoint: headers first, then a plan, then the weights, one by one.

The reference is transformers' DiffusionGemmaForBlockDiffusion. Nothing is unpickled, and no code from a checkpoint is
run.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from dgemma.checkpoint.formats.entry import FLOATS, Contents
from dgemma.checkpoint.formats.gguf import open_gguf
from dgemma.checkpoint.names import VISION
from dgemma.checkpoint.plan import LoadPlan, first, make_plan
from dgemma.checkpoint.reading import Checkpoint, read_checkpoint
from dgemma.checks import read_device, read_dtype, require
from dgemma.files import open_tensors
from dgemma.location import ASSETS
from dgemma.model.config import Conventions, GenerationDefaults, ModelConfig
from dgemma.model.diffusion import DiffusionGemma
from dgemma.model.experts import Experts
from dgemma.model.published import GEMMA4_TYPES
from dgemma.printing import progress_bar
from dgemma.quantization.rounding import Quantization
from dgemma.quantization.weights import QuantizedWeight, Weight, set_weight

Model = TypeVar("Model", bound=DiffusionGemma)

logger = logging.getLogger("dgemma")


def load_pretrained(
    cls: type[Model],
    path_or_repo: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    conventions: Conventions | None = None,
    quantization: Quantization | None = None,
    vision: bool = True,
) -> Model:
    """Build `cls` from a checkpoint folder or hub id. One error lists everything that does not fit.

    All headers are checked before the first weight is read. Each weight is read directly to `device` and `dtype`, so
    there is never a second copy of the model. dtype None means the dtype of the embedding. Checkpoints that ship with
    dgemma are stored in bfloat16 to be small. Most CPUs are slow in bfloat16, so for these checkpoints None means
    float32. Quantised weights keep their format. With `quantization`, other weights are quantised one by one as they
    are read. Without `vision`, the vision tower is not read.
    """
    device, dtype = read_device("from_pretrained", device), read_dtype("from_pretrained", dtype)
    checkpoint = read_checkpoint(path_or_repo)
    entries = checkpoint.contents.entries
    fits = quantization is None or not any(entry.decode for entry in entries.values())
    rule, fix = "be None for a quantised checkpoint", "Load an unquantised one."
    require(fits, "from_pretrained quantization", rule, quantization, fix)
    model = _build_empty(cls, checkpoint, conventions, vision)
    is_gemma4 = checkpoint.published.get("model_type") in GEMMA4_TYPES
    plan = make_plan(model.state_dict(), checkpoint.contents, plain_gemma4=is_gemma4)
    if dtype is None:
        stored_dtype = FLOATS.get(entries[plan.whole["embed_tokens.weight"]].format, torch.bfloat16)
        dtype = torch.float32 if checkpoint.folder.parent == ASSETS else stored_dtype
    with _open(checkpoint, device) as read:
        weights = _read_weights(plan, checkpoint, read, dtype, quantization)
        _require_equal_copies(plan, read, dtype)
    fresh = _start_self_conditioning(model, plan.fresh, dtype, device)
    state = _set_weights(model, weights | fresh)
    plain = (name for name, weight in weights.items() if isinstance(weight, Tensor))
    model.dequantized = {name: plan.source(name).format for name in plain if plan.source(name).decode is not None}
    _give_notices(plan, checkpoint.contents, state, model.config)
    return model


def _build_empty(cls: type[Model], checkpoint: Checkpoint, conventions: Conventions | None, vision: bool) -> Model:
    """Return the model that the configs describe, on the "meta" device."""
    folder, published, stored = checkpoint.folder, checkpoint.published, checkpoint.contents.stored
    for part in (published.get("text_config", published), published.get("vision_config")):
        layers = part.get("num_hidden_layers") if isinstance(part, Mapping) else None
        fits = not isinstance(layers, int) or layers <= len(stored)  # a huge number would fill the memory
        require(fits, "ModelConfig.num_hidden_layers", f"fit the {len(stored)} tensors stored", layers)
    config = ModelConfig.from_hf(published)
    if not (vision and any(VISION.match(name) for name in stored)):
        config = config.replace(vision_config=None)
    try:
        model = cls(config, device="meta", conventions=conventions)
    except RuntimeError as error:
        raise ValueError(f"{folder / 'config.json'} describes tensors that cannot exist: {error}.") from None
    try:
        model.generation = GenerationDefaults.from_hf(checkpoint.generation)
    except ValueError as error:
        raise ValueError(f"{error} Correct generation_config.json or config.json in {folder}.") from None
    pad, rule = model.generation.pad_token_id, f"be below the vocabulary's {config.vocab_size}"
    fits, fix = pad < config.vocab_size, "Correct generation_config.json."
    require(fits, "GenerationDefaults.pad_token_id", rule, pad, fix)
    model.source = folder
    return model


@contextmanager
def _open(checkpoint: Checkpoint, device: torch.device) -> Iterator[Callable[[str], Tensor]]:
    """Open the files of a checkpoint; yield a function that reads a stored tensor to `device`."""
    stored = checkpoint.contents.stored
    with ExitStack() as stack:
        readers: dict[Path, Callable[[str], Tensor]] = {}
        for file in sorted({entry.file for entry in stored.values()}):
            if file.suffix == ".gguf":
                readers[file] = stack.enter_context(open_gguf(file, str(device)))
            else:
                readers[file] = stack.enter_context(open_tensors(file, device=str(device))).get_tensor
        yield lambda name: readers[stored[name].file](name)


def _read_weights(
    plan: LoadPlan,
    checkpoint: Checkpoint,
    read: Callable[[str], Tensor],
    dtype: torch.dtype,
    quantization: Quantization | None,
) -> dict[str, Weight]:
    """Return weights by our names. They are read one by one, so that at most one at a time is in memory twice."""
    weights: dict[str, Weight] = {}
    taken: set[str] = set()

    def file_of(ours: str) -> Path:
        return checkpoint.contents.stored[next(iter(plan.source(ours).tensors.values()))].file

    order = sorted((*plan.whole, *plan.parts), key=lambda ours: (file_of(ours), ours))
    with progress_bar(desc="loading", unit="weight", show=True, total=len(order)) as bar:
        for ours in order:
            weight = plan.read_weight(ours, read)
            # Tokens are looked up in the embedding by row, which needs unquantised values.
            if ours == "embed_tokens.weight" and isinstance(weight, QuantizedWeight):
                weight = weight.decode(dtype)
            if isinstance(weight, Tensor):
                # Plain Gemma 4 stores one scalar per layer. Our model has two, which must not share memory.
                is_shared = plan.whole.get(ours) in taken
                weight = weight.to(dtype).clone() if is_shared else weight.to(dtype)
                weight = weight if quantization is None else quantization.apply(ours, weight)
            taken.update(plan.sources(ours))
            weights[ours] = weight
            bar.update()
    return weights


def _require_equal_copies(plan: LoadPlan, read: Callable[[str], Tensor], dtype: torch.dtype) -> None:
    """Raise if a weight that is stored several times has several values."""

    def values(name: str) -> Tensor:
        weight = plan.read_entry(name, read)
        return weight.decode(dtype) if isinstance(weight, QuantizedWeight) else weight.to(dtype)

    unequal = [copy for copy, original in plan.copies if not torch.equal(values(copy), values(original))]
    if unequal:
        names = ", ".join(first(unequal))
        raise ValueError(f"The checkpoint holds copies that differ from the tensor they are tied to: {names}.")


def _set_weights(model: DiffusionGemma, weights: Mapping[str, Weight]) -> dict[str, Tensor]:
    """Give the empty model its weights; return its new state."""
    state: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if isinstance(weight, QuantizedWeight):
            set_weight(model, name, weight)
            state |= {f"{name}.{role}": tensor for role, tensor in weight.tensors().items()}
        else:
            state[name] = weight
    model.load_state_dict(state, assign=True)
    return state


def _start_self_conditioning(
    model: DiffusionGemma, names: Sequence[str], dtype: torch.dtype, device: torch.device
) -> dict[str, Weight]:
    """Initialise self-conditioning. `down_proj` is zero, so that the new block changes nothing at first."""
    generator = torch.Generator().manual_seed(0)

    def start(name: str) -> Tensor:
        shape = model.state_dict()[name].shape
        if name.endswith(("norm.weight", "down_proj.weight")):
            return torch.full(shape, 1.0 if name.endswith("norm.weight") else 0.0)
        return torch.randn(shape, generator=generator) * model.config.initializer_range

    return {name: start(name).to(device, dtype) for name in names}


def _give_notices(plan: LoadPlan, contents: Contents, state: Mapping[str, Tensor], config: ModelConfig) -> None:
    for note in contents.notes:
        logger.warning(note)
    if plan.skipped:
        logger.warning("Skipped %d tensors of towers that the model does not have.", len(plan.skipped))
    if plan.fresh:
        logger.warning("The checkpoint is a plain Gemma 4; newly initialised: %s.", ", ".join(plan.fresh))
    pairs = {f"layers.{i}.layer_scalar": f"layers.{i}.causal_layer_scalar" for i in range(config.num_hidden_layers)}
    unequal = [name for name, causal in pairs.items() if not torch.equal(state[name], state[causal])]
    if unequal:
        logger.warning(
            "The scalars of these layers differ between encoder and decoder, unlike in the published model: %s.",
            ", ".join(first(unequal)),
        )


@torch.no_grad()
def lay_out_by_column(model: nn.Module) -> None:
    """Make the columns of every matrix contiguous, in place. Values and shapes do not change. For inference only.

    A layer multiplies by Wᵀ, and OpenBLAS copies W into that order at every call. On an ARM core this copy takes a
    fifth of a small model's step. The embedding is not changed, because tokens are looked up by row.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | Experts):
            for weight in module.parameters(recurse=False):
                weight.data = weight.mT.contiguous().mT
