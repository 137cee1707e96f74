"""Places of checkpoints: folders, checkpoints that ship with dgemma, and ids of the Hugging Face hub."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

ASSETS = Path(__file__).parent / "assets"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CHECKPOINT_FILES = ("*.safetensors", "*.json", "*.jinja")
# Shipped checkpoints that store only defaults for `generate`, each mapped to the checkpoint that has its weights. No
# file can add to this table, so that a checkpoint folder never points outside itself.
_SHARED = {"text-mask": "text"}
# A checkpoint folder has at least one of these files.
_SIGNS = ("config.json", "tokenizer.json", "tokenizer_config.json", SINGLE_FILE, INDEX_FILE)
_FIX = "Pass a checkpoint folder or owner/name."


def find_local(path_or_repo: str | Path) -> Path | None:
    """Return the folder of a local checkpoint or of an asset "dgemma/NAME", or None for the id of a hub repository."""
    folder = Path(os.path.expanduser(path_or_repo))  # unlike Path.expanduser, it keeps the name of an unknown user
    if str(path_or_repo) and folder.is_dir():
        if not (folder / "config.json").is_file() and (folder / "log.jsonl").is_file():
            has_ended = (folder / "final" / "config.json").is_file()
            fix = f"Use its result, {folder / 'final'}" if has_ended else "The call that began it continues and ends it"
            raise FileNotFoundError(f"{folder} is the folder of a training run. {fix}.")
        if not any((folder / name).is_file() for name in _SIGNS):
            raise FileNotFoundError(f"{folder} holds no checkpoint: there is no config.json. {_FIX}")
        return folder
    if isinstance(path_or_repo, Path) or not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path_or_repo):
        raise FileNotFoundError(f"{str(path_or_repo)!r} is neither a folder nor a hub id. {_FIX}")
    owner, name = path_or_repo.split("/")
    if owner != "dgemma":
        return None
    if not (ASSETS / name).is_dir():
        shipped = sorted(f"dgemma/{folder.name}" for folder in ASSETS.glob("*") if folder.is_dir())
        raise FileNotFoundError(f"{path_or_repo} does not ship with dgemma. Choose from {shipped}.")
    return ASSETS / name


def resolve(path_or_repo: str | Path, files: Sequence[str] = CHECKPOINT_FILES) -> Path:
    """Return the folder of a checkpoint: a local one, an asset "dgemma/NAME", or `files` downloaded from a hub id."""
    folder = find_local(path_or_repo)
    if folder is not None:
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(path_or_repo), allow_patterns=list(files)))
    except OSError as error:
        reason = str(error)
        if isinstance(error, LocalEntryNotFoundError):  # nor is it in the cache; the cause says why
            reason = f"{error.__cause__ or error}. Connect to the network, or pass a checkpoint folder."
        raise FileNotFoundError(f"{path_or_repo} is no folder here, and the hub did not send it: {reason}") from error


def stored_folder(folder: Path) -> Path:
    """Return the folder with the weights and the tokenizer of a checkpoint; for most it is the checkpoint's own."""
    return ASSETS / _SHARED.get(folder.name, folder.name) if folder.parent == ASSETS else folder
