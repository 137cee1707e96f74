"""Documents of .txt files, whole or split at a separator, and of .jsonl files and datasets: texts, prompts or chats."""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dgemma.checkpoint.images import take_images
from dgemma.checkpoint.tokenizer import explained
from dgemma.checks import Words, require, typed
from dgemma.files import open_file, read_json_lines
from dgemma.printing import install_command

_CHUNK = 1 << 20  # characters per read
_SYNONYMS = {"question": "prompt", "completion": "answer", "response": "answer"}  # columns of datasets
_OWN_ROLES = ("assistant", "model")  # the model's turns
_ROLES = (*_OWN_ROLES, "user", "system", "developer", "tool")


class Chat(NamedTuple):
    """A conversation that ends with the model's turn; `place` names its file and line in errors.

    Pictures are parts {"type": "image"} of its messages.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Any, ...] | None
    place: str


class Document(NamedTuple):
    """A document: the model writes `text` after reading `prompt`, or the last turn of `chat` after the others.

    The prompt or the chat has a place for each of the `images`.
    """

    text: str
    prompt: str = ""
    chat: Chat | None = None
    images: tuple[str, ...] = ()  # files or data URLs


@typed
def read_documents(paths: str | Path | Sequence[str | Path], *, separator: str | None = None) -> Iterator[Document]:
    """Yield the documents of .txt and .jsonl files; a folder means all such files in it, sorted.

    A .txt file is one document, or several with `separator` between them. A line of a .jsonl file is an object with
    "text", with "prompt" and "answer", or with "messages": a list of turns, each with "role" and "content". A chat
    gives one document per turn of the model; its prompt is all turns before. It may have "tools", for the chat
    template. A prompt may have "images", a list of files: it begins with them, unless it has a `<|image|>` for each.
    In a chat, they are parts of the other turns' "content": {"type": "image", "image": "photo.jpg"}.

    Example: `read_documents("stories.txt", separator="<|endoftext|>")`.
    """
    for path in list_files([paths] if isinstance(paths, str | Path) else paths):
        has_text = False
        try:
            for document in _read_jsonl(path) if path.suffix == ".jsonl" else _read_text(path, separator):
                has_text = True
                _check_unicode(path, document)
                yield document
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} must be UTF-8, got {error.reason}. Convert it.") from None
        require(has_text, str(path), "hold text", Words("only white space"), "Remove it.")


@typed
def read_dataset(name: str, config: str | None = None, *, split: str = "train") -> Iterator[Document]:
    """Yield the documents of a dataset of the `datasets` library: a name of the hub, or a folder of its files.

    A row is like a line of a .jsonl file; columns without a value do not count. Prompts may also be called "question",
    and answers "completion" or "response".

    Example: `TokenFile.write(read_dataset("openai/gsm8k", "main", split="train[:100]"), tokenizer, "tokens")`.
    """
    try:
        from datasets import load_dataset
    except ImportError:
        raise ImportError(f"read_dataset needs datasets. Install it with: {install_command('data')}") from None
    fix = "Name a dataset of the hub, such as openai/gsm8k:main:train, or a folder of .jsonl or .parquet files."
    with explained(f"the dataset {name} cannot be read", fix):
        rows = load_dataset(name, config, split=split)
    for number, row in enumerate(rows, start=1):
        filled = {_SYNONYMS.get(key, key): value for key, value in row.items() if value is not None}
        yield from _read_item(filled, f"{name} row {number}")


def _check_unicode(path: Path, document: Document) -> None:
    turns = () if document.chat is None else document.chat.messages
    try:
        "".join((document.prompt, document.text, *(str(turn.get("content")) for turn in turns))).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{path} must hold whole characters, got half of a surrogate pair ({error.reason}).") from None


def list_files(paths: Iterable[str | Path]) -> list[Path]:
    """Return the files of paths and folders, in reading order."""
    files: list[Path] = []
    for path in map(Path, paths):
        inside = sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".jsonl")) if path.is_dir() else [path]
        if not inside or not all(p.is_file() for p in inside):
            raise FileNotFoundError(f"{path} must be a file, or a folder of .txt or .jsonl files. Check the path.")
        files += inside
    return files


def _read_text(path: Path, separator: str | None) -> Iterator[Document]:
    require(separator != "", "read_documents separator", "be a non-empty string or None", separator)
    pieces: list[str] = []  # parts of the current document, without separators
    tail = ""  # end of the text read so far, which may be part of a separator
    with io.TextIOWrapper(open_file(path), encoding="utf-8-sig", newline="") as file:  # drops a byte-order mark
        while chunk := file.read(_CHUNK):
            chunk = tail + chunk
            *whole, rest = [chunk] if separator is None else chunk.split(separator)
            for text in whole:
                yield from _document([*pieces, text])
                pieces = []
            cut = max(0, len(rest) - len(separator or "x") + 1)
            pieces.append(rest[:cut])
            tail = rest[cut:]
    yield from _document([*pieces, tail])


def _document(pieces: list[str]) -> Iterator[Document]:
    text = "".join(pieces)
    if text.strip():
        yield Document(text)


def _read_jsonl(path: Path) -> Iterator[Document]:
    for place, item in read_json_lines(path):
        yield from _read_item(item, place)


def _read_item(item: Any, place: str) -> Iterator[Document]:
    fields = item if isinstance(item, dict) else {}
    if "messages" in fields:
        yield from _read_chat(item, place)
        return
    keys = ("text",) if "text" in fields else ("prompt", "answer")
    rule = 'be an object with "text", with "prompt" and "answer", or with "messages"'
    require(all(isinstance(fields.get(key), str) for key in keys), place, rule, item)
    images = item.get("images", [])
    are_files = isinstance(images, list) and all(isinstance(image, str) for image in images)
    rule = 'be a list of files, with a "prompt"'
    require(are_files and ("prompt" in keys or not images), f'{place} "images"', rule, images)
    yield Document(item[keys[-1]], item.get("prompt", ""), images=tuple(images))


def _read_chat(item: Mapping[str, Any], place: str) -> Iterator[Document]:
    """Yield a document for each turn of the model."""
    turns, tools = item["messages"], item.get("tools")
    are_turns = isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns)
    require(are_turns, f'{place} "messages"', "be a list of objects", turns)
    for number, turn in enumerate(turns, start=1):
        owner, role, content = f"{place} turn {number}", turn.get("role"), turn.get("content")
        require(role in _ROLES, owner, f"have a role of {', '.join(_ROLES)}", turn)
        is_call = role in _OWN_ROLES and content is None and bool(turn.get("tool_calls"))
        has_parts = role not in _OWN_ROLES and isinstance(content, list)
        require(isinstance(content, str) or is_call or has_parts, owner, 'have a text as "content"', content)
    require(isinstance(tools, list | None), f'{place} "tools"', "be a list", tools)
    own = [number for number, turn in enumerate(turns) if turn["role"] in _OWN_ROLES]
    is_reply = bool(own) and own[0] > 0
    require(is_reply, place, "have a turn of the assistant after another turn", turns, "Remove the line.")
    for number in own:
        try:
            messages, images = take_images(turns[: number + 1])
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        chat = Chat(tuple(messages), None if tools is None else tuple(tools), place)
        yield Document(turns[number].get("content") or "", chat=chat, images=tuple(images))
