"""Saving of a model: a folder of safetensors files that transformers loads."""

from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor

from dgemma.checkpoint.formats import compressed_tensors
from dgemma.checkpoint.names import published_name
from dgemma.checkpoint.plan import first
from dgemma.checkpoint.tokenizer import copy_tokenizer
from dgemma.checks import as_int, require
from dgemma.files import clear_temporaries, fill_json, fill_tensors, new_files, read_bytes, write_bytes, writing
from dgemma.location import INDEX_FILE, SINGLE_FILE, stored_folder
from dgemma.model.diffusion import DiffusionGemma
from dgemma.model.published import OWN_DEFAULTS
from dgemma.quantization.weights import quantized_weights

_TOKENIZER_SIGNS = ("tokenizer.json", "tokenizer_config.json")
_IMAGE_FILES = ("preprocessor_config.json", "processor_config.json")


def save_pretrained(model: DiffusionGemma, path: str | Path, *, max_shard_size: int | str = "5GB") -> None:
    """Write a folder that transformers' DiffusionGemmaForBlockDiffusion.from_pretrained loads.

    Quantised weights are stored in the compressed-tensors format, one expert at a time, as in the files published for
    vLLM. transformers 5.22 does not read such experts, because its own are fused.

    A model from a checkpoint brings its tokenizer and the settings of its images, unless the folder has a tokenizer.
    Other files in the folder stay.

    New files are written next to the old ones and replace them at the end. If the disk is full, the old checkpoint
    stays. If the process is killed, the folder holds the old weights or the new ones, never a mixture. The config is
    replaced separately, so a kill in between can leave new weights with the old config, or the reverse.
    """
    tensors = {published_name(name): weight for name, weight in check_tensors(model).items()}
    for name, weight in quantized_weights(model):
        tensors |= compressed_tensors.published_tensors(published_name(name), weight)
    shards = _pack(tensors, _num_bytes(max_shard_size))
    folder = Path(path).expanduser()
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        clear_temporaries(folder)
    names = _shard_names(folder, len(shards))
    index = [] if names == [SINGLE_FILE] else [INDEX_FILE]
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
    for old in (folder / SINGLE_FILE, folder / INDEX_FILE, *folder.glob("model*-of-*.safetensors*")):
        if old.name not in (*names, *index):
            old.unlink(missing_ok=True)
    if model.source is not None and not any((folder / name).exists() for name in _TOKENIZER_SIGNS):
        source = stored_folder(model.source)
        copy_tokenizer(source, folder)
        for file in filter(Path.is_file, map(source.joinpath, _IMAGE_FILES)):
            write_bytes(folder / file.name, read_bytes(file))


def _published_config(model: DiffusionGemma) -> dict[str, Any]:
    config = model.config.to_hf()
    config["dtype"] = config["text_config"]["dtype"] = str(model.dtype).removeprefix("torch.")
    for name in OWN_DEFAULTS:
        if getattr(model.generation, name) is not None:
            config[name] = dict(getattr(model.generation, name))
    quantized = dict(quantized_weights(model))
    if quantized:
        config["quantization_config"] = compressed_tensors.describe_weights(quantized)
    return config


def check_tensors(model: DiffusionGemma) -> dict[str, Tensor]:
    """Return the weights that are not quantised; raise ValueError for a model that `save_pretrained` refuses."""
    quantized = dict(quantized_weights(model))
    buffers = {f"{name}.{role}" for name, weight in quantized.items() for role in weight.tensors()}
    state = {name: weight for name, weight in model.state_dict().items() if name not in buffers}
    needed = type(model)(model.config, device="meta").state_dict().keys()
    extra, missing = state.keys() - needed, needed - state.keys() - quantized.keys()
    if extra or missing:
        raise ValueError(
            "DiffusionGemma.save_pretrained must find exactly the published tensors, got "
            f"{first(sorted(extra))} extra and {first(sorted(missing))} missing. Merge adapters first."
        )
    return state


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
    factor = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}.get(unit, 0)
    limit = int(number) * factor if number.strip().isdecimal() else 0
    require(limit > 0, "save_pretrained max_shard_size", "be a number of bytes, or a text such as '5GB'", size)
    return limit


def _shard_names(folder: Path, num_shards: int) -> list[str]:
    """Return file names for the shards.

    A single shard is named model.safetensors, even if that file exists. Several shards get names that no file in the
    folder has: the usual names if possible.
    """
    if num_shards == 1:
        return [SINGLE_FILE]
    stems = ("model" if save == 0 else f"model.{save}" for save in count())
    series = ([f"{stem}-{i + 1:05d}-of-{num_shards:05d}.safetensors" for i in range(num_shards)] for stem in stems)
    return next(names for names in series if not any((folder / name).exists() for name in names))
