"""Loading and saving of weights: one table of tensor names, and safetensors files, single or sharded.

The reference is transformers' DiffusionGemmaForBlockDiffusion. Nothing is unpickled, and no code from a checkpoint is
run.
"""

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from dgemma.checkpoint.formats import compressed_tensors, read_contents
from dgemma.checkpoint.formats.entry import FLOATS, Contents, Entry, Stored
from dgemma.checkpoint.formats.gguf import find_gguf, open_gguf, read_gguf
from dgemma.checkpoint.names import VISION, published_name
from dgemma.checkpoint.plan import LoadPlan, first, make_plan, read_weight
from dgemma.checks import as_int, read_device, read_dtype
from dgemma.files import clear_temporaries, fill_json, fill_tensors, new_files, open_tensors, writing
from dgemma.model.config import Conventions, GenerationDefaults, ModelConfig, read_published
from dgemma.model.gemma4 import GEMMA4_TYPES
from dgemma.model.quantize import Quantization
from dgemma.model.quantized import QuantizedWeight, Weight, quantized_weights, set_weight
from dgemma.printing import progress_bar

if TYPE_CHECKING:
    from dgemma.model.diffusion import DiffusionGemma

    Model = TypeVar("Model", bound=DiffusionGemma)

logger = logging.getLogger("dgemma")

_ASSETS = Path(__file__).parents[1] / "assets"
# Shipped checkpoints that store only defaults for `generate`, each mapped to the checkpoint that has its weights. No
# file can add to this table, so that a checkpoint folder never points outside itself.
_SHARED = {"text-mask": "text"}
_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_OWN_DEFAULTS = ("noise", "sampler")  # fields of GenerationDefaults that are stored in config.json
_SIGNS = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    _SINGLE_FILE,
    _INDEX_FILE,
)  # a checkpoint folder has at least one of them
_CHECKPOINT_FILES = ("*.safetensors", "*.json", "*.jinja")


def resolve(path_or_repo: str | Path, files: Sequence[str] = _CHECKPOINT_FILES) -> Path:
    """Return the folder of a checkpoint: a local one, an asset "dgemma/NAME", or `files` downloaded from a hub id.

    Example: `resolve("google/diffusiongemma-26B-A4B-it", files=["config.json"])`.
    """
    folder = Path(path_or_repo).expanduser()
    if str(path_or_repo) and folder.is_dir():
        if not (folder / "config.json").is_file() and (folder / "final" / "config.json").is_file():
            raise FileNotFoundError(f"{folder} is the folder of a training run. Use its result, {folder / 'final'}.")
        if not any((folder / name).is_file() for name in _SIGNS):
            raise FileNotFoundError(
                f"{folder} holds no checkpoint: there is no config.json. Pass a checkpoint folder or owner/name."
            )
        return folder
    if isinstance(path_or_repo, Path) or not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path_or_repo):
        raise FileNotFoundError(
            f"{str(path_or_repo)!r} is neither a folder nor a hub id. Pass a checkpoint folder or owner/name."
        )
    owner, name = path_or_repo.split("/")
    if owner == "dgemma":
        if not (_ASSETS / name).is_dir():
            shipped = sorted(f"dgemma/{folder.name}" for folder in _ASSETS.glob("*") if folder.is_dir())
            raise FileNotFoundError(f"{path_or_repo} does not ship with dgemma. Choose from {shipped}.")
        return _ASSETS / name
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path_or_repo, allow_patterns=list(files)))
    except OSError as error:
        raise FileNotFoundError(f"{path_or_repo} could not be fetched from the hub: {error}") from error


def stored_folder(folder: Path) -> Path:
    """Return the folder with the weights and the tokenizer of a checkpoint; for most it is the checkpoint's own.

    Example: `stored_folder(resolve("dgemma/text-mask"))` is the folder of dgemma/text.
    """
    return _ASSETS / _SHARED.get(folder.name, folder.name) if folder.parent == _ASSETS else folder


def load_pretrained(
    cls: "type[Model]",
    path_or_repo: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    conventions: Conventions | None = None,
    quantization: Quantization | None = None,
) -> "Model":
    """Build `cls` from a checkpoint folder or hub id. One error lists everything that does not fit.

    All headers are checked before the first weight is read. Each weight is read directly to `device` and `dtype`, so
    there is never a second copy of the model. dtype None means the dtype of the embedding. Checkpoints that ship with
    dgemma are stored in bfloat16 to be small. Most CPUs are slow in bfloat16, so for these checkpoints None means
    float32. Quantised weights keep their format. With `quantization`, other weights are quantised one by one as they
    are read.

    Example: `load_pretrained(DiffusionGemma, "path/to/checkpoint", dtype=torch.bfloat16, device="cuda")`.
    """
    device = read_device("from_pretrained", device)
    dtype = read_dtype("from_pretrained", dtype)
    folder, published, stored, contents = read_checkpoint(path_or_repo)
    if dtype is None and folder.parent == _ASSETS:
        dtype = torch.float32
    text = published.get("text_config", published)
    layers = text.get("num_hidden_layers") if isinstance(text, Mapping) else None
    if isinstance(layers, int) and layers > len(stored):  # a huge number would fill the memory
        raise ValueError(f"ModelConfig.num_hidden_layers must fit the {len(stored)} tensors stored, got {layers}.")
    config = ModelConfig.from_hf(published)
    try:
        model = cls(config, device="meta", conventions=conventions)
    except RuntimeError as error:
        raise ValueError(f"{folder / 'config.json'} describes tensors that cannot exist: {error}.") from None
    model.source = folder
    if (folder / "generation_config.json").is_file():
        model.generation = GenerationDefaults.from_hf(folder)
        if model.generation.pad_token_id >= config.vocab_size:
            raise ValueError(
                f"GenerationDefaults.pad_token_id must be below the vocabulary's {config.vocab_size}, "
                f"got {model.generation.pad_token_id}. Correct generation_config.json."
            )
    entries = {name: published[name] for name in _OWN_DEFAULTS if published.get(name) is not None}
    try:
        model.generation = replace(model.generation, **entries)
    except ValueError as error:
        raise ValueError(f"{error} Correct {folder / 'config.json'}.") from None
    is_gemma4 = published.get("model_type") in GEMMA4_TYPES
    plan = make_plan(config, model.state_dict(), contents, plain_gemma4=is_gemma4)
    dtype = dtype or FLOATS.get(contents.entries[plan.whole["embed_tokens.weight"]].format, torch.bfloat16)
    if quantization is not None and any(entry.decode for entry in contents.entries.values()):
        raise ValueError(
            "from_pretrained quantization must be None for a quantised checkpoint. Load an unquantised one."
        )
    weights, model.dequantized = _read_weights(
        plan,
        contents,
        stored,
        model,
        dtype,
        device,
        quantization or Quantization(experts=None, dense=None),
    )
    state = {name: weight for name, weight in weights.items() if isinstance(weight, Tensor)}
    state |= _start_self_conditioning(model, plan.fresh, dtype, device)
    for name, weight in weights.items():
        if isinstance(weight, QuantizedWeight):
            set_weight(model, name, weight)
            state |= {f"{name}.{role}": tensor for role, tensor in weight.tensors().items()}
    model.load_state_dict(state, assign=True)
    model.vision_source = folder if plan.vision else None
    _give_notices(plan, contents, state, config)
    return model


class Checkpoint(NamedTuple):
    """A checkpoint before its weights are read."""

    folder: Path
    published: dict[str, Any]  # its config.json
    stored: dict[str, Stored]  # its tensors
    contents: Contents  # its weights


def read_checkpoint(path_or_repo: str | Path, files: Sequence[str] = _CHECKPOINT_FILES) -> Checkpoint:
    """Read the config and the headers of a checkpoint folder, a hub id or a GGUF file. No weight is read.

    If only the config was downloaded, there are no tensors.

    Example: `read_checkpoint("dgemma/text").contents.entries`.
    """
    file = find_gguf(path_or_repo)
    if file is not None:
        return Checkpoint(file.parent, *read_gguf(file))
    folder = resolve(path_or_repo, files)
    published = read_published(folder, "config.json")
    if files != _CHECKPOINT_FILES and not any(stored_folder(folder).glob("*.safetensors")):
        return Checkpoint(folder, published, {}, Contents(entries={}))
    stored = read_headers(folder)
    return Checkpoint(folder, published, stored, read_contents(folder, published, stored))


def read_headers(folder: Path) -> dict[str, Stored]:
    """Return the header of every tensor of a checkpoint folder, by its published name. No weight is read.

    Example: `read_headers(Path("checkpoint"))["model.decoder.norm.weight"].shape`.
    """
    folder = stored_folder(folder)
    weight_map = _read_index(folder)
    stored: dict[str, Stored] = {}
    for name in sorted(set(weight_map.values())) or [_SINGLE_FILE]:
        file = folder / name
        with open_tensors(file) as tensors:
            for tensor in sorted(tensors.keys()):
                if tensor in stored:
                    raise ValueError(f"{file} repeats {tensor}, which {stored[tensor].file.name} holds too.")
                entry = tensors.get_slice(tensor)
                shape, dtype = tuple(entry.get_shape()), entry.get_dtype()
                bits = re.search(r"\d+", dtype)  # of F32, BF16, U8, F8_E4M3, ...; BOOL has none
                stored[tensor] = Stored(file, shape, dtype, math.prod(shape) * (int(bits[0]) if bits else 8) // 8)
    misplaced = [f"{t} in {f}" for t, f in weight_map.items() if t not in stored or stored[t].file.name != f]
    if misplaced:
        raise ValueError(f"{folder / _INDEX_FILE} names tensors that are not there: {', '.join(first(misplaced))}.")
    return stored


def _read_index(folder: Path) -> dict[str, str]:
    """Return the shard of each tensor; empty for a single file, which takes precedence, as in transformers."""
    if (folder / _SINGLE_FILE).is_file():
        return {}
    if not (folder / _INDEX_FILE).is_file():
        raise FileNotFoundError(
            f"{folder} holds neither {_SINGLE_FILE} nor {_INDEX_FILE}. Only safetensors are read, never pickles."
        )
    weight_map = read_published(folder / _INDEX_FILE, _INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{folder / _INDEX_FILE} must map tensors to files under 'weight_map'. Download it again.")
    files = set(map(str, weight_map.values()))
    outside = sorted(file for file in files if not re.fullmatch(r"[\w-][\w.-]*\.safetensors", file))
    if outside:
        raise ValueError(f"{folder / _INDEX_FILE} must name safetensors files of its own folder, got {outside}.")
    absent = sorted(file for file in files if not (folder / file).is_file())
    if absent:
        raise FileNotFoundError(f"{folder} lacks the shards {', '.join(first(absent))}. Download them again.")
    return weight_map


def _read_weights(
    plan: LoadPlan,
    contents: Contents,
    stored: Mapping[str, Stored],
    model: "DiffusionGemma",
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization,
) -> tuple[dict[str, Weight], dict[str, str]]:
    """Return weights on `device` by our names, and the formats of those that had to be dequantised.

    Weights are read one by one, so that at most one at a time is in memory twice. Tied copies are compared and dropped.
    """
    expected, state = model.state_dict(), {}
    dequantized: dict[str, str] = {}
    order = sorted((*plan.whole, *plan.parts), key=lambda ours: (_file_of(plan, contents, stored, ours), ours))
    with ExitStack() as stack, progress_bar(desc="loading", unit="weight", show=True, total=len(order)) as bar:
        readers: dict[Path, Callable[[str], Tensor]] = {}
        for file in sorted({entry.file for entry in stored.values()}):
            if file.suffix == ".gguf":
                readers[file] = stack.enter_context(open_gguf(file, str(device)))
            else:
                readers[file] = stack.enter_context(open_tensors(file, device=str(device))).get_tensor

        def read(name: str) -> Tensor:
            return readers[stored[name].file](name)

        taken: set[str] = set()
        for ours in order:
            weight = read_weight(plan, contents.entries, ours, expected[ours].shape, read)
            # Tokens are looked up in the embedding by row, which needs unquantised values.
            if ours == "embed_tokens.weight" and isinstance(weight, QuantizedWeight):
                weight = weight.decode(dtype)
            entry = contents.entries[plan.sources(ours)[0]]
            if isinstance(weight, Tensor) and entry.decode is not None:
                dequantized[ours] = entry.format
            if isinstance(weight, Tensor):
                # Plain Gemma 4 stores one scalar per layer. Our model has two, which must not share memory.
                copies = plan.whole.get(ours) in taken
                weight = quantization.apply(ours, weight.to(dtype).clone() if copies else weight.to(dtype))
            taken.update(plan.sources(ours))
            state[ours] = weight
            bar.update()
        untied = [name for name, ours in plan.ties if not _is_copy(contents.entries[name], read, state[ours])]
    if untied:
        raise ValueError(
            f"The checkpoint holds copies that differ from the tensor they are tied to: {', '.join(first(untied))}."
        )
    return state, dequantized


def _file_of(plan: LoadPlan, contents: Contents, stored: Mapping[str, Stored], ours: str) -> Path:
    return stored[next(iter(contents.entries[plan.sources(ours)[0]].tensors.values()))].file


def _is_copy(entry: Entry, read: Callable[[str], Tensor], weight: Weight) -> bool:
    tensors = {role: read(name) for role, name in entry.tensors.items()}
    copy = tensors["weight"] if entry.decode is None else entry.decode(tensors)
    if isinstance(weight, Tensor):
        dtype = weight.dtype
        return torch.equal(copy.to(dtype) if isinstance(copy, Tensor) else copy.decode(dtype), weight)
    return isinstance(copy, QuantizedWeight) and torch.equal(copy.decode(torch.float32), weight.decode(torch.float32))


def _start_self_conditioning(
    model: "DiffusionGemma", names: Sequence[str], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Initialise self-conditioning. `down_proj` is zero, so that the new block changes nothing at first."""
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name in names:
        shape = model.state_dict()[name].shape
        if name.endswith("norm.weight"):
            weight = torch.ones(shape)
        elif name.endswith("down_proj.weight"):
            weight = torch.zeros(shape)
        else:
            weight = torch.randn(shape, generator=generator) * model.config.initializer_range
        state[name] = weight.to(device, dtype)
    return state


def _give_notices(plan: LoadPlan, contents: Contents, state: Mapping[str, Tensor], config: ModelConfig) -> None:
    for note in contents.notes:
        logger.warning(note)
    if plan.vision:
        logger.warning(
            "Skipped %d vision tensors, because dgemma reads only text. save_pretrained copies them.", len(plan.vision)
        )
    if plan.fresh:
        logger.warning("The checkpoint is a plain Gemma 4; newly initialised: %s.", ", ".join(plan.fresh))
    pairs = {f"layers.{i}.layer_scalar": f"layers.{i}.causal_layer_scalar" for i in range(config.num_hidden_layers)}
    unequal = [name for name, causal in pairs.items() if not torch.equal(state[name], state[causal])]
    if unequal:
        logger.warning(
            "The scalars of these layers differ between encoder and decoder, unlike in the published model: %s.",
            ", ".join(first(unequal)),
        )


def save_pretrained(model: "DiffusionGemma", path: str | Path, *, max_shard_size: int | str = "5GB") -> None:
    """Write a folder that transformers' DiffusionGemmaForBlockDiffusion.from_pretrained loads.

    Quantised weights are stored in the compressed-tensors format, one expert at a time, as in the files published for
    vLLM. transformers 5.22 does not read such experts, because its own are fused.

    Vision tensors of the model's checkpoint are copied unchanged: transformers would fill missing ones with random
    weights, and images would silently stop working. Other files in the folder stay.

    New files are written next to the old ones and replace them at the end. If the disk is full, the old checkpoint
    stays. If the process is killed, the folder holds the old weights or the new ones, never a mixture. The config is
    replaced separately, so a kill in between can leave new weights with the old config, or the reverse.

    Example: `save_pretrained(model, "checkpoint", max_shard_size="2GB")`.
    """
    shards = _pack(_tensors_to_save(model), _num_bytes(max_shard_size))
    folder = Path(path).expanduser()
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        clear_temporaries(folder)
    names = _shard_names(folder, len(shards))
    index = [] if names == [_SINGLE_FILE] else [_INDEX_FILE]
    with new_files([folder / name for name in (*names, *index, "generation_config.json", "config.json")]) as new:
        for path, shard in zip(new, shards, strict=False):
            fill_tensors(path, shard, metadata={"format": "pt"})
        if index:
            weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
            total = sum(weight.nbytes for shard in shards for weight in shard.values())
            fill_json(new[-3], {"metadata": {"total_size": total}, "weight_map": weight_map})
        fill_json(new[-2], model.generation.to_hf())
        fill_json(new[-1], _published_config(model))
    # If both exist the single file takes precedence, so its removal activates the index.
    for old in (folder / _SINGLE_FILE, folder / _INDEX_FILE, *folder.glob("model*-of-*.safetensors*")):
        if old.name not in (*names, *index):
            old.unlink(missing_ok=True)


def _published_config(model: "DiffusionGemma") -> dict[str, Any]:
    config = model.config.to_hf()
    config["dtype"] = config["text_config"]["dtype"] = str(model.dtype).removeprefix("torch.")
    for name in _OWN_DEFAULTS:
        if getattr(model.generation, name) is not None:
            config[name] = dict(getattr(model.generation, name))
    quantized = dict(quantized_weights(model))
    if quantized:
        config["quantization_config"] = compressed_tensors.describe_weights(quantized)
    return config


def _tensors_to_save(model: "DiffusionGemma") -> dict[str, Tensor]:
    quantized = dict(quantized_weights(model))
    buffers = {f"{name}.{role}" for name, weight in quantized.items() for role in weight.tensors()}
    state = {name: weight for name, weight in model.state_dict().items() if name not in buffers}
    needed = type(model)(model.config, device="meta").state_dict().keys()
    if state.keys() | quantized.keys() != needed:
        raise ValueError(
            "DiffusionGemma.save_pretrained must find exactly the published tensors, got "
            f"{first(sorted(state.keys() - needed))} extra and {first(sorted(needed - state.keys()))} missing. "
            "Merge adapters first."
        )
    tensors = {published_name(name): weight for name, weight in state.items()}
    for name, weight in quantized.items():
        tensors |= compressed_tensors.published_tensors(published_name(name), weight)
    if model.vision_source is None:
        return tensors
    try:
        stored = read_headers(model.vision_source)
    except (OSError, ValueError) as error:  # a training run must not fail to save because of this
        logger.warning("Saved without vision tensors, so transformers will initialise them at random: %s", error)
        return tensors
    for name, entry in stored.items():
        kind = VISION.match(name)
        if kind and "audio" not in kind[1]:  # DiffusionGemma has no audio tower
            with open_tensors(entry.file) as file:
                tensors[f"model.encoder.{name[kind.start(1) :]}"] = file.get_tensor(name)  # memory-mapped, not copied
    return tensors


def _pack(tensors: Mapping[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    """Divide tensors, in order, into files of at most `limit` bytes; a larger tensor gets its own file."""
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        if shards[-1] and used + tensor.nbytes > limit:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += tensor.nbytes
    return shards


def _num_bytes(size: int | str) -> int:
    number, unit = (size[:-2], size[-2:].upper()) if isinstance(size, str) else (str(as_int(size)), "")
    factor = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}.get(unit)
    if factor is None or not number.strip().isdigit() or int(number) == 0:
        raise ValueError(
            f"save_pretrained max_shard_size must be a number of bytes, or a text such as '5GB', got {size!r}."
        )
    return int(number) * factor


def _shard_names(folder: Path, num_shards: int) -> list[str]:
    """Return file names for the shards.

    A single shard is named model.safetensors, even if that file exists. Several shards get names that no file in the
    folder has: the usual names if possible.
    """
    if num_shards == 1:
        return [_SINGLE_FILE]
    save = 0
    while True:
        stem = "model" if save == 0 else f"model.{save}"
        names = [f"{stem}-{i + 1:05d}-of-{num_shards:05d}.safetensors" for i in range(num_shards)]
        if not any((folder / name).exists() for name in names):
            return names
        save += 1
