"""Places of checkpoints: folders, checkpoints that ship with dgemma, and ids of the Hugging Face hub."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

ASSETS = Path(__file__).parents[1] / "assets"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CHECKPOINT_FILES = ("*.safetensors", "*.json", "*.jinja")
# Shipped checkpoints that store only defaults for `generate`, each mapped to the checkpoint that has its weights. No
# file can add to this table, so that a checkpoint folder never points outside itself.
_SHARED = {"text-mask": "text"}
# A checkpoint folder has at least one of these files.
_SIGNS = ("config.json", "tokenizer.json", "tokenizer_config.json", SINGLE_FILE, INDEX_FILE)
_FIX = "Pass a checkpoint folder or owner/name."


def resolve(path_or_repo: str | Path, files: Sequence[str] = CHECKPOINT_FILES) -> Path:
    """Return the folder of a checkpoint: a local one, an asset "dgemma/NAME", or `files` downloaded from a hub id."""
    folder = Path(os.path.expanduser(path_or_repo))  # unlike Path.expanduser, it keeps the name of an unknown user
    if str(path_or_repo) and folder.is_dir():
        if not (folder / "config.json").is_file() and (folder / "final" / "config.json").is_file():
            raise FileNotFoundError(f"{folder} is the folder of a training run. Use its result, {folder / 'final'}.")
        if not any((folder / name).is_file() for name in _SIGNS):
            raise FileNotFoundError(f"{folder} holds no checkpoint: there is no config.json. {_FIX}")
        return folder
    if isinstance(path_or_repo, Path) or not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path_or_repo):
        raise FileNotFoundError(f"{str(path_or_repo)!r} is neither a folder nor a hub id. {_FIX}")
    owner, name = path_or_repo.split("/")
    if owner == "dgemma":
        if not (ASSETS / name).is_dir():
            shipped = sorted(f"dgemma/{folder.name}" for folder in ASSETS.glob("*") if folder.is_dir())
            raise FileNotFoundError(f"{path_or_repo} does not ship with dgemma. Choose from {shipped}.")
        return ASSETS / name
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path_or_repo, allow_patterns=list(files)))
    except OSError as error:
        raise FileNotFoundError(f"{path_or_repo} could not be fetched from the hub: {error}") from error


def stored_folder(folder: Path) -> Path:
    """Return the folder with the weights and the tokenizer of a checkpoint; for most it is the checkpoint's own.

    Example: `stored_folder(resolve("dgemma/text-mask"))` is the folder of dgemma/text.
    """
    return ASSETS / _SHARED.get(folder.name, folder.name) if folder.parent == ASSETS else folder
