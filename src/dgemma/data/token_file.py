"""Tokenised documents on disk, written once and memory-mapped."""

import io
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np

from dgemma.checkpoint.images import ImageProcessor, encode_text, is_data_url
from dgemma.checkpoint.tokenizer import IMAGE_MARKER, Tokenizer
from dgemma.checks import Checked, Words, require, typed
from dgemma.data.documents import Document, list_files
from dgemma.files import crc32_of, map_array, new_file, open_file, read_array, read_json, write_json, writing
from dgemma.model.vision.images import Images
from dgemma.printing import one_line

_FORMAT = 1
_DTYPES = ("uint16", "uint32")
_BATCH = 4096  # documents encoded together, on all cores
_SAMPLE = 10_000  # characters whose tokens identify a tokenizer


@dataclass(frozen=True, kw_only=True)
class ImageFiles(Checked):
    """The pictures of documents. They are read when they are needed."""

    paths: list[list[str]]  # of each document
    processor: ImageProcessor
    image_token_id: int

    @classmethod
    def from_dict(cls, stored: Any, num_documents: int, place: str) -> "ImageFiles":
        """Rebuild what `asdict` returned."""
        try:
            found = cls(**stored | {"processor": ImageProcessor(**stored["processor"])})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{place} must name the pictures of its documents, got {one_line(str(error))}") from None
        require(len(found.paths) == num_documents, place, f"have {num_documents} lists of pictures", len(found.paths))
        return found

    def read(self, number: int) -> Images | None:
        """Return the pictures of one document, as the model reads them."""
        return self.processor(self.paths[number]) if self.paths[number] else None


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenFile:
    """D tokenised documents on disk, each begin-of-text, prompt, text, end-of-text. Memory-mapped.

    In a chat, the prompt is the conversation before the model's turn, rendered by the chat template.

    Example: `TokenFile.open("corpus/train").num_tokens`.
    """

    tokens: np.ndarray  # (N,) uint16 or uint32, memory-mapped
    starts: np.ndarray  # (D + 1,) int64
    prompt_len: np.ndarray  # (D,) int64, begin-of-text included
    num_bytes: int  # of all text, without prompts
    vocab_size: int
    eos_token_id: int
    crc32: int | None = None  # of the content, if `write` computed it
    made_from: Mapping[str, Any] | None = None  # the argument of `write`
    images: ImageFiles | None = None  # None if no document has a picture

    @classmethod
    def write(
        cls,
        documents: Iterable[Document],
        tokenizer: Tokenizer,
        folder: str | Path,
        *,
        images: ImageProcessor | None = None,
        made_from: Mapping[str, Any] | None = None,
    ) -> "TokenFile":
        """Tokenise documents into a folder and open it. `made_from` describes their origin.

        images: the processor of the model, for documents with pictures. The folder keeps the paths of the pictures, not
        their pixels.

        Example: `TokenFile.write(read_documents("stories.txt"), tokenizer, "corpus/train")`.
        """
        folder = Path(folder)
        dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
        lengths, prompt_len, paths, num_bytes = [], [], list[list[str]](), 0
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "about.json").unlink(missing_ok=True)  # written last, so that it marks a complete folder
        with new_file(folder / "tokens.bin") as new, new.open("wb") as file:
            for number, (document, prompt, text) in enumerate(_encode(documents, tokenizer, images)):
                _refuse_markers(number, [*prompt[1:], *text], tokenizer)
                row = np.array([*prompt, *text, tokenizer.eos_token_id], dtype=dtype)
                file.write(row.data)
                lengths.append(len(row))
                prompt_len.append(len(prompt))
                paths.append([i if is_data_url(i) else str(Path(i).absolute()) for i in document.images])
                num_bytes += len(document.text.encode())
            require(bool(lengths), "TokenFile.write documents", "hold at least one", None)
        sizes = np.array([lengths, prompt_len], dtype=np.int64)
        with new_file(folder / "lengths.npy") as new, new.open("wb") as file:
            np.save(file, sizes)
        of_images = None
        if images is not None and any(paths):
            image_token_id = cast(int, tokenizer.token_id(IMAGE_MARKER))  # `_encode` needed it
            of_images = asdict(ImageFiles(paths=paths, processor=images, image_token_id=image_token_id))
        tokens = map_array(folder / "tokens.bin", dtype=np.dtype(dtype).name, count=int(sizes[0].sum()))
        about = {
            "format": _FORMAT,
            "dtype": np.dtype(dtype).name,
            "num_bytes": num_bytes,
            "vocab_size": tokenizer.vocab_size,
            "eos_token_id": tokenizer.eos_token_id,
            "crc32": _crc32(tokens, sizes, of_images),
            "images": of_images,
            "made_from": made_from,
        }
        write_json(folder / "about.json", about)
        return cls.open(folder)

    @classmethod
    @typed
    def open(cls, folder: str | Path) -> "TokenFile":
        """Open a folder that `write` wrote. All its bytes are read once, to compare their checksum.

        Example: `TokenFile.open("corpus/train").num_documents`.
        """
        folder = Path(folder)
        if not (folder / "about.json").exists():
            raise FileNotFoundError(f"{folder / 'about.json'} does not exist. Make the folder with TokenFile.write.")
        about = read_json(folder / "about.json")
        numbers: dict[str, Any] = {name: about.get(name) for name in ("num_bytes", "vocab_size", "eos_token_id")}
        is_whole = all(type(value) is int and 0 <= value < 1 << 63 for value in numbers.values())
        made_from, dtype, fix = about.get("made_from"), about.get("dtype"), "Write it again."
        is_known = about.get("format") == _FORMAT and dtype in _DTYPES and isinstance(made_from, dict | None)
        require(is_known and is_whole, str(folder / "about.json"), f"describe tokens of format {_FORMAT}", about, fix)
        sizes = read_array(folder / "lengths.npy", dtypes=("int64",))
        fits = sizes.ndim == 2 and len(sizes) == 2 and sizes.shape[1] > 0 and (sizes[0] > sizes[1]).all()
        fits = fits and sizes[1].min() >= 1 and sizes[0].max() <= np.iinfo(np.int64).max // sizes.shape[1]
        rule = "hold documents that are longer than their prompts"
        require(bool(fits), str(folder / "lengths.npy"), rule, Words("others"), fix)
        lengths, prompt_len = sizes
        starts = np.concatenate(([0], lengths.cumsum()))
        tokens = map_array(folder / "tokens.bin", dtype=str(dtype), count=int(starts[-1]))
        vocab_size = numbers["vocab_size"]
        of_images = about.get("images")
        is_written = about.get("crc32") == _crc32(tokens, sizes, of_images)
        require(is_written, str(folder), "hold what was written", Words("other tokens"), fix)
        are_ids = 0 <= numbers["eos_token_id"] < vocab_size and int(tokens.max()) < vocab_size
        require(are_ids, str(folder), f"hold ids below its vocab_size {vocab_size}", int(tokens.max()), fix)
        return cls(
            tokens=tokens,
            starts=starts,
            prompt_len=prompt_len,
            crc32=about["crc32"],
            made_from=made_from,
            images=None if of_images is None else ImageFiles.from_dict(of_images, len(prompt_len), str(folder)),
            **numbers,
        )

    @property
    def num_documents(self) -> int:
        return len(self.prompt_len)

    @property
    def num_tokens(self) -> int:
        return int(self.starts[-1])

    @property
    def fingerprint(self) -> str:
        """A line that identifies documents and tokenizer, for the description of a run."""
        crc32 = self.crc32
        if crc32 is None:
            crc32 = _crc32(
                self.tokens, np.stack((np.diff(self.starts), self.prompt_len)), self.images and asdict(self.images)
            )
        return f"TokenFile({self.num_documents} documents, {self.num_tokens} tokens, crc32 {crc32:08x})"

    def document(self, number: int) -> np.ndarray:
        """Return the tokens of one document."""
        return self.tokens[self.starts[number] : self.starts[number + 1]]


def describe_files(
    paths: Sequence[str | Path], tokenizer: Tokenizer, *, separator: str | None = None
) -> dict[str, Any]:
    """Describe what the tokens of text files depend on: the files' bytes, the separator and the tokenizer."""
    files = list_files(paths)
    made_from: dict[str, Any] = {"separator": separator}
    for number, path in enumerate(files, start=1):
        made_from[f"file {number}, {path.name}"] = crc32_of(path)
    with io.TextIOWrapper(open_file(files[0]), encoding="utf-8", errors="replace") as text:
        sample = text.read(_SAMPLE)
    cut = (tokenizer.vocab_size, tokenizer.encode(sample))
    made_from["tokenizer"] = zlib.crc32(repr(cut).encode())
    if files[0].suffix == ".jsonl" and '"messages"' in sample and tokenizer.has_chat_template:
        made_from["chat template"] = zlib.crc32(repr(tokenizer.chat("any text")).encode())
    return made_from


def _crc32(tokens: np.ndarray, sizes: np.ndarray, images: Any) -> int:
    crc32 = zlib.crc32(np.ascontiguousarray(sizes).data, zlib.crc32(tokens.data))
    return crc32 if images is None else zlib.crc32(json.dumps(images).encode(), crc32)


def _encode(
    documents: Iterable[Document], tokenizer: Tokenizer, processor: ImageProcessor | None
) -> Iterator[tuple[Document, list[int], list[int]]]:
    """Yield each document with the tokens of its prompt and of its text, in order."""

    def is_plain(document: Document) -> bool:
        fix = "Pass read_documents(paths), or Document(text) for each text."
        require(isinstance(document, Document), "TokenFile.write documents", "be Documents", document, fix)
        return document.chat is None and not document.images

    def encode(document: Document) -> tuple[list[int], list[int]]:
        fix = "Pass ImageProcessor.from_pretrained(path) of a model with a vision tower."
        fits = processor is not None or not document.images
        require(fits, "TokenFile.write images", "be a processor for documents with pictures", processor, fix)
        images = processor(document.images) if processor is not None and document.images else None
        if document.chat is None:
            prompt = encode_text(tokenizer, document.prompt, images)
            return prompt, tokenizer.encode(document.text, bos=False)
        try:
            prompt, text = tokenizer.chat_turn(document.chat.messages, tools=document.chat.tools)
            return prompt if images is None else tokenizer.place_images(prompt, images), text
        except ValueError as error:
            raise ValueError(f"{document.chat.place}: {error}") from None

    rest = iter(documents)
    while chunk := list(islice(rest, _BATCH)):
        plain = [document for document in chunk if is_plain(document)]
        prompts = iter(tokenizer.encode_many([document.prompt for document in plain]))
        texts = iter(tokenizer.encode_many([document.text for document in plain], bos=False))
        for document in chunk:
            yield document, *((next(prompts), next(texts)) if is_plain(document) else encode(document))


def _refuse_markers(number: int, ids: Sequence[int], tokenizer: Tokenizer) -> None:
    """Raise ValueError for a text that contains a marker: the model would read it as an end or as noise."""
    special = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id)
    markers = {marker for marker in special if marker is not None}
    if found := markers.intersection(ids):
        marker = tokenizer.decode([min(found)], skip_special=False)
        rule = f"not contain the special token {marker}, but document {number} does"
        require(False, "TokenFile.write documents", rule, marker, "Remove it, or write it another way.")
