"""Text to tokens and back: the checkpoint's tokenizer and chat template, or bytes for small models.

A thin layer over the tokenizers library, and over transformers for chats. The template always comes from the
checkpoint, because the published one has changed before and a copy in code would be outdated.
"""

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
import torch
from torch import Tensor

from dgemma.checkpoint.turns import IMAGE_MARKER, THOUGHT_START, Message, Reply, as_turns, check_parts, without_thought
from dgemma.checks import Words, as_int, as_lists, require, typed
from dgemma.files import new_files, open_file, read_bytes, write_bytes, write_json, writing
from dgemma.location import resolve, stored_folder
from dgemma.model.published import read_published
from dgemma.model.vision.images import Images
from dgemma.printing import one_line, printable

_TOKENIZER_FILES = ("tokenizer*", "*.jinja", "special_tokens_map.json", "added_tokens.json", "config.json")
_TEMPLATES = ("chat_template.jinja", "additional_chat_templates")  # templates outside tokenizer_config.json
_SAVED_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json"),
)
_MOST_BYTES = 1 << 28  # limit for tokenizer.json; Gemma's has 33 million bytes
_TURN_TOKENS = ("<|turn>", "<turn|>")
_GUARD = "\U00100000"  # a private character, to which Unicode assigns no text
_IMAGE_TOKENS = ("<|image>", IMAGE_MARKER, "<image|>")


class TokenBatch(NamedTuple):
    """Rows of different lengths, padded on the left, so that every row ends where its canvas begins."""

    tokens: Tensor  # (B, P) int64
    attention_mask: Tensor  # (B, P) int64, 1 = real token


class Tokenizer(ABC):
    """Encodes texts, chats and batches; decodes tokens, and a model's turn into thought, answer and tool calls.

    Example:
        tokenizer = Tokenizer.from_pretrained("google/diffusiongemma-26B-A4B-it")
        prompt = tokenizer.chat("Why is the sky blue?", thinking=True)
        reply = tokenizer.reply(new_tokens)
    """

    vocab_size: int  # ids are below it; a model's vocabulary may be larger
    pad_token_id: int
    eos_token_id: int
    bos_token_id: int
    mask_token_id: int | None

    @staticmethod
    @typed
    def from_pretrained(path_or_repo: str | Path) -> "Tokenizer":
        """Load the tokenizer of a checkpoint folder or hub id. Only tokenizer files are downloaded.

        Example: `Tokenizer.from_pretrained("path/to/checkpoint").encode("hello")`.
        """
        if Path(path_or_repo).suffix == ".gguf":
            open_file(path_or_repo).close()  # raises for a wrong path
            raise FileNotFoundError(
                f"{path_or_repo} is read without its tokenizer. Name that of the original checkpoint (--tokenizer)."
            )
        folder = stored_folder(resolve(path_or_repo, files=_TOKENIZER_FILES))
        config = folder / "tokenizer_config.json"
        if config.is_file() and b'"dgemma.ByteTokenizer"' in read_bytes(config, most=_MOST_BYTES):
            return ByteTokenizer()
        return PretrainedTokenizer(folder)

    @abstractmethod
    def encode(self, text: str, *, bos: bool = True, markers: bool = True) -> list[int]:
        """Return the token ids of a text. Markers in it (`<mask>`, `<|turn>`) become single ids.

        markers=False is for text that you do not trust: its markers become the ids of their characters.

        Example: `tokenizer.encode("Paris is <mask>", bos=False)`.
        """

    def encode_many(self, texts: Sequence[str], *, bos: bool = True) -> list[list[int]]:
        """Return the token ids of each text; of a Hugging Face tokenizer, on all cores.

        Example: `tokenizer.encode_many(["Once upon a time", "Hello"])`.
        """
        _require_several(texts)
        return [self.encode(text, bos=bos) for text in texts]

    @property
    def fingerprint(self) -> str:
        """A text that differs for another tokenizer."""
        return repr(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(vocab_size={self.vocab_size})"

    @abstractmethod
    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its text; None if the vocabulary has no such token."""

    @property
    @abstractmethod
    def has_chat_template(self) -> bool:
        """True if the checkpoint has a chat template, which `chat` needs."""

    @abstractmethod
    def save_pretrained(self, path: str | Path) -> None:
        """Write the tokenizer into a checkpoint folder, for `Tokenizer.from_pretrained`."""

    @cached_property
    def _frame(self) -> frozenset[int | None]:
        return frozenset((self.pad_token_id, self.bos_token_id, self.eos_token_id, *map(self.token_id, _TURN_TOKENS)))

    @cached_property
    def _markers(self) -> Mapping[str, int]:
        """The texts of control tokens, with their ids."""
        return {}

    @cached_property
    def _marker_pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self._markers, key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    def _guard(self, value: Any) -> Any:
        """Replace the markers in all texts of a message by pairs of private characters.

        `_encode_guarded` restores them. The first character of a pair is replaced too, by itself twice.
        """
        if isinstance(value, str) and self._markers:
            numbers = {text: number for number, text in enumerate([_GUARD, *self._markers])}
            pattern = f"{_GUARD}|{self._marker_pattern.pattern}"
            return re.sub(pattern, lambda found: _GUARD + chr(ord(_GUARD) + numbers[found[0]]), value)
        if isinstance(value, Mapping):
            return {self._guard(key): self._guard(item) for key, item in value.items()}
        return [self._guard(item) for item in value] if isinstance(value, list | tuple) else value

    def _encode_guarded(self, rendered: str) -> list[int]:
        """Return the ids of a rendered chat: its markers as single ids, and guarded ones as plain text."""
        texts, ids = [_GUARD, *self._markers], list[int]()
        pair = re.compile(f"{_GUARD}([{_GUARD}-{chr(ord(_GUARD) + len(self._markers))}])")
        for piece in self._marker_pattern.split(rendered):
            if piece in self._markers:
                ids.append(self._markers[piece])
            elif piece:
                text = pair.sub(lambda found: texts[ord(found[1]) - ord(_GUARD)], piece)
                ids += self.encode(text, bos=False, markers=False)
        return ids

    @abstractmethod
    def _decode(self, ids: list[int]) -> str:
        """Return the text of all ids, with markers."""

    @abstractmethod
    def _render(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """Return the token ids of a chat, by the template."""

    @typed
    def encode_batch(self, prompts: Sequence[str | Sequence[int]], *, bos: bool = True) -> TokenBatch:
        """Return tokens and attention mask, both (B, P), of B texts or id lists, padded on the left.

        Example: `tokens, attention_mask = tokenizer.encode_batch(["short", tokenizer.chat("longer?")])`.
        """
        owner, rule = "Tokenizer.encode_batch prompts", "be texts or rows of token ids"
        require(not isinstance(prompts, str), owner, "be a list of texts", prompts, "Write [text].")
        rows = [self.encode(p, bos=bos) if isinstance(p, str) else _read_ids(p, owner, rule) for p in prompts]
        fits = len(rows) > 0 and all(row and min(row) >= 0 for row in rows)
        require(fits, owner, "hold at least one token each, with ids of at least 0", list(prompts))
        longest = max(map(len, rows))
        tokens = [[self.pad_token_id] * (longest - len(row)) + row for row in rows]
        mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
        return TokenBatch(torch.tensor(tokens), torch.tensor(mask))

    @typed
    def decode(self, tokens: Tensor | Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of a row of tokens (N,).

        `skip_special` drops padding, bos, eos and turn markers. Channel, tool and mask markers stay, because they
        separate thought, answer and tool calls. An id without a text becomes U+FFFD: a model with a larger vocabulary
        may write ids from `vocab_size` on.

        Example: `tokenizer.decode(out.new_tokens[0])`.
        """
        owner = "Tokenizer.decode tokens"
        ids = _read_ids(tokens, owner, "be one row (N,) of ids", "Use decode_batch for several.")
        outside = next((token for token in ids if not 0 <= token < 2**32), None)  # the tokenizers library has 32 bits
        require(outside is None, owner, f"be ids of the vocabulary, from 0 to {self.vocab_size - 1}", outside)
        hidden = self._frame if skip_special else frozenset()
        return self._decode([token for token in ids if token not in hidden])

    @typed
    def decode_batch(
        self, tokens: Tensor | np.ndarray | Sequence[Sequence[int]], *, skip_special: bool = True
    ) -> list[str]:
        """Return the B texts of a batch (B, N).

        Example: `tokenizer.decode_batch(out.new_tokens)`.
        """
        rows = as_lists(tokens)
        fits = isinstance(rows, list) and all(isinstance(row, list) for row in rows)
        require(fits, "Tokenizer.decode_batch tokens", "be rows of token ids", tokens, "Use decode for one row.")
        return [self.decode(row, skip_special=skip_special) for row in rows]

    @typed
    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        thinking: bool = False,
        tools: Sequence[Any] | None = None,
        images: Images | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation, up to the model's turn. A string is one user turn.

        messages: dictionaries with "role" (system, user, assistant, tool) and "content". Thoughts of earlier model
        turns are dropped, as in training. `thinking` requests a thought channel. `images` are those of the parts
        {"type": "image"}, in order. Only the template writes markers: those in contents and tools, such as `<turn|>`,
        become the ids of their characters.

        Example: `tokenizer.chat([{"role": "user", "content": "2 + 2?"}], thinking=True)`.
        """
        turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        fits = all(isinstance(turn, Mapping) and isinstance(turn.get("role"), str) for turn in turns)
        rule = 'hold at least one turn, and only dictionaries with "role" and "content"'
        require(fits and len(turns) > 0, "Tokenizer.chat messages", rule, turns)
        history = [self._guard(without_thought(message)) for message in turns]
        options = {"tools": self._guard(tools), "add_generation_prompt": True}
        ids = self._render(history, enable_thinking=thinking, **options)
        fits = not thinking or ids != self._render(history, enable_thinking=False, **options)
        rule = "be False for this checkpoint, whose chat template has no thinking switch"
        require(fits, "Tokenizer.chat thinking", rule, thinking)
        return ids if images is None else self.place_images(ids, images)

    def place_images(self, ids: Sequence[int], images: Images) -> list[int]:
        """Return ids in which every `<|image|>` is replaced by the tokens of an image, in order.

        Example: `tokenizer.place_images(tokenizer.encode("<|image|>What is this?"), processor(["photo.jpg"]))`.
        """
        start, image, end = map(self.token_id, _IMAGE_TOKENS)
        if start is None or image is None or end is None:
            raise ValueError(f"Tokenizer.place_images needs the tokens {' '.join(_IMAGE_TOKENS)}, which are missing.")
        num_places = sum(token == image for token in ids)
        rule = f"be as many as the {IMAGE_MARKER} in the prompt, {num_places}"
        require(num_places == len(images), "Tokenizer.place_images images", rule, len(images))
        sizes = iter(images.num_tokens)
        placed = ([start, *[image] * next(sizes), end] if token == image else [token] for token in ids)
        return [token for part in placed for token in part]

    def chat_turn(
        self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None
    ) -> tuple[list[int], list[int]]:
        """Return the prompt of a conversation's last turn, as `chat` gives it, and the tokens that the model writes.

        The answer ends with the token that ends a turn. If it has a thought, the prompt asks for one. Markers in the
        answer become single ids.

        Example: `prompt, answer = tokenizer.chat_turn([{"role": "user", ...}, {"role": "assistant", ...}])`.
        """
        *before, last = messages
        check_parts(last)
        history, content = [self._guard(without_thought(message)) for message in before], last.get("content")
        thinking = isinstance(content, str) and THOUGHT_START in content
        prompt = self.chat(before, thinking=thinking, tools=tools)
        end = self.token_id(_TURN_TOKENS[1])
        if thinking:  # templates drop thoughts
            return prompt, self.encode(str(content).strip(), bos=False) + ([] if end is None else [end])
        options = {"tools": self._guard(tools), "add_generation_prompt": False, "enable_thinking": False}
        whole = self._render([*history, dict(last)], **options)
        answer = whole[len(prompt) :]
        fits, rule = whole[: len(prompt)] == prompt, "write the model's turn after its generation prompt"
        fix = "Use prompts and answers instead of chats."
        require(fits, "the chat template of Tokenizer.chat_turn", rule, Words("another one"), fix)
        if end in answer:
            answer = answer[: len(answer) - answer[::-1].index(end)]  # without the line break after the turn
        return prompt, answer

    @typed
    def reply(self, tokens: Tensor | Sequence[int] | str) -> Reply:
        """Split a model turn (tokens or text) into thought, answer and tool calls.

        Example: `tokenizer.reply("<|channel>thought\\n2+2<channel|>4").answer` is "4".
        """
        return Reply.of(tokens if isinstance(tokens, str) else self.decode(tokens))


class PretrainedTokenizer(Tokenizer):
    """The tokenizer.json of a checkpoint, with its chat template through transformers. No remote code is run."""

    mask_token_id: int | None = None

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        file = self._folder / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(
                f"{file} does not exist: this checkpoint has no tokenizer. Copy its tokenizer.json there, or use "
                "ByteTokenizer() for a model trained on bytes."
            )
        data = read_bytes(file, most=_MOST_BYTES)
        with explained(f"{file} holds no tokenizer", "Download it again."):
            self.backend_tokenizer = tokenizers.Tokenizer.from_buffer(data)
        self.backend_tokenizer.no_truncation()  # ignore truncation stored in the file
        self.backend_tokenizer.no_padding()
        config = self._read_config()
        self._names_template = config.get("chat_template") is not None
        self._add_tokens(config)
        ids = self.backend_tokenizer.get_vocab().values()
        require(bool(ids), f"the vocabulary of {file}", "have at least one token", len(ids), "Download it again.")
        self.vocab_size = max(ids) + 1
        for name in ("pad", "eos", "bos", "mask"):
            token = config.get(f"{name}_token")
            token = token.get("content") if isinstance(token, dict) else token
            with explained(f"{name}_token in {folder} is no text", "Complete its tokenizer_config.json."):
                token_id = self.backend_tokenizer.token_to_id(token) if isinstance(token, str) else None
            fits, fix = token_id is not None or name == "mask", f"Complete tokenizer_config.json in {folder}."
            require(fits, f"Tokenizer.{name}_token_id", "be set", token_id, fix)
            setattr(self, f"{name}_token_id", token_id)

    def _read_config(self) -> dict[str, Any]:
        """Return tokenizer_config.json, completed by the special_tokens_map.json of older checkpoints."""
        config = read_published(self._folder, "tokenizer_config.json")
        if not (self._folder / "special_tokens_map.json").is_file():
            return config
        older = read_published(self._folder, "special_tokens_map.json")
        return older | {name: value for name, value in config.items() if value is not None}

    def _add_tokens(self, config: Mapping[str, Any]) -> None:
        """Add tokens that are only in the config, at their ids."""
        owner, fix = f"added_tokens_decoder in {self._folder / 'tokenizer_config.json'}", "Download the file again."
        added = config.get("added_tokens_decoder") or {}
        require(isinstance(added, dict), owner, "be a dictionary", added)
        try:
            listed = dict(sorted((int(key), tokenizers.AddedToken(**token)) for key, token in added.items()))
        except (TypeError, ValueError):
            require(False, owner, "hold a token's content and flags by its id", added, fix)
        new = {id: token for id, token in listed.items() if self.backend_tokenizer.token_to_id(token.content) is None}
        self.backend_tokenizer.add_tokens(list(listed.values()))  # in one call, because each call rebuilds the matcher
        for listed_id, token in new.items():
            found = self.backend_tokenizer.token_to_id(token.content)
            rule = f"continue the ids of tokenizer.json with {token.content!r} at {found}"
            require(found == listed_id, owner, rule, listed_id, fix)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the tokenizer's files and of its chat template."""
        digest = hashlib.blake2b(self.backend_tokenizer.to_str().encode(), digest_size=16)
        for file in filter(Path.is_file, map(self._folder.joinpath, _SAVED_FILES[1:])):
            digest.update(read_bytes(file, most=_MOST_BYTES))
        return digest.hexdigest()

    def encode(self, text: str, *, bos: bool = True, markers: bool = True) -> list[int]:
        _require_text(text, bos=bos, markers=markers)
        text = text.encode(errors="replace").decode()  # a lone surrogate has no UTF-8 form and becomes "?"
        with explained(f"the tokenizer in {self._folder} cannot split this text", "Check its tokenizer.json."):
            ids: list[int] = self.backend_tokenizer.encode(text, add_special_tokens=False).ids
            if not markers and not set(self._markers.values()).isdisjoint(ids):
                ids = self._plain.encode(text, add_special_tokens=False).ids
        return [self.bos_token_id, *ids] if bos else ids

    def encode_many(self, texts: Sequence[str], *, bos: bool = True) -> list[list[int]]:
        _require_several(texts)
        plain = [text.encode(errors="replace").decode() for text in texts]  # as in `encode`
        with explained(f"the tokenizer in {self._folder} cannot split these texts", "Check its tokenizer.json."):
            encodings = self.backend_tokenizer.encode_batch(plain, add_special_tokens=False)
        return [[self.bos_token_id] * bos + encoding.ids for encoding in encodings]

    @cached_property
    def _markers(self) -> Mapping[str, int]:
        added = self.backend_tokenizer.get_added_tokens_decoder().items()
        return {token.content: number for number, token in added if token.special and token.content}

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """A copy that reads markers as plain text. The switch is not safe between threads."""
        copy = tokenizers.Tokenizer.from_str(self.backend_tokenizer.to_str())
        copy.encode_special_tokens = True
        return copy

    @typed
    def token_id(self, token: str) -> int | None:
        found: int | None = self.backend_tokenizer.token_to_id(token)
        return found

    @property
    def has_chat_template(self) -> bool:
        if not self._names_template and not any((self._folder / name).exists() for name in _TEMPLATES):
            return False  # without importing transformers, which takes seconds
        return self._hf.chat_template is not None

    def save_pretrained(self, path: str | Path) -> None:
        copy_tokenizer(self._folder, Path(path))

    def _decode(self, ids: list[int]) -> str:
        with explained(f"the tokenizer in {self._folder} cannot decode these ids", "Check its tokenizer.json."):
            # The library would leave out ids that are not in the vocabulary.
            runs = groupby(ids, key=lambda token: self.backend_tokenizer.id_to_token(token) is not None)
            decode = self.backend_tokenizer.decode
            return "".join(
                decode(list(run), skip_special_tokens=False) if is_known else "\ufffd" * len(list(run))
                for is_known, run in runs
            )

    def _render(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        if not self.has_chat_template:
            raise ValueError(
                f"Tokenizer.chat needs the checkpoint's chat template, got none in {self._folder}. "
                "Put its chat_template.jinja there, or pass plain text to encode."
            )
        with explained(f"the chat template of {self._folder} refuses these messages", "Check their roles."):
            rendered = self._hf.apply_chat_template(messages, tokenize=False, **options)
            if self._markers and _GUARD in rendered:
                return self._encode_guarded(rendered)
            return list(self._hf.encode(rendered, add_special_tokens=False))

    @cached_property
    def _hf(self) -> Any:
        from transformers import AutoTokenizer  # here, because the import takes seconds and only chats need it

        with explained(f"transformers cannot read the tokenizer in {self._folder}", "Download it again."):
            return AutoTokenizer.from_pretrained(str(self._folder), trust_remote_code=False)


class ByteTokenizer(Tokenizer):
    """Tokenizer of UTF-8 bytes, for models with a small vocabulary (384 ids).

    Ids 0–127 hold the published markers at their published ids: pad 0, eos 1, bos 2, unk 3, mask 4, tools 46–52,
    think 98, channel 100 and 101, turn 105 and 106. So the published stop tokens 1, 106 and 50 mean the same here. Only
    the markers of images, 53–55, have ids of their own. The other ids below 128 are unused. Byte b is id 128 + b.
    Unused ids and invalid UTF-8 decode to U+FFFD. Chats use the published turn format; tools are not supported.

    Example: `ByteTokenizer().encode("hi")` is `[2, 232, 233]`.
    """

    markers: Mapping[str, int] = {
        "<pad>": 0,
        "<eos>": 1,
        "<bos>": 2,
        "<unk>": 3,
        "<mask>": 4,
        "<|tool>": 46,
        "<tool|>": 47,
        "<|tool_call>": 48,
        "<tool_call|>": 49,
        "<|tool_response>": 50,
        "<tool_response|>": 51,
        '<|"|>': 52,
        "<|image>": 53,
        "<|image|>": 54,
        "<image|>": 55,
        "<|think|>": 98,
        "<|channel>": 100,
        "<channel|>": 101,
        "<|turn>": 105,
        "<turn|>": 106,
    }
    first_byte = 128
    vocab_size = 384
    pad_token_id = 0
    eos_token_id = 1
    bos_token_id = 2
    mask_token_id = 4

    @cached_property
    def _markers(self) -> Mapping[str, int]:
        return self.markers

    def encode(self, text: str, *, bos: bool = True, markers: bool = True) -> list[int]:
        _require_text(text, bos=bos, markers=markers)
        ids = [self.bos_token_id] if bos else []
        for piece in self._marker_pattern.split(text) if markers else [text]:
            if markers and piece in self.markers:
                ids.append(self.markers[piece])
            else:
                # A lone surrogate has no UTF-8 form and becomes "?".
                ids.extend(self.first_byte + byte for byte in piece.encode("utf-8", errors="replace"))
        return ids

    @typed
    def token_id(self, token: str) -> int | None:
        if token in self.markers:
            return self.markers[token]
        encoded = token.encode("utf-8", errors="replace")
        return self.first_byte + encoded[0] if len(encoded) == 1 else None

    @property
    def has_chat_template(self) -> bool:
        return True

    def save_pretrained(self, path: str | Path) -> None:
        with writing(path):
            Path(path).mkdir(parents=True, exist_ok=True)
        write_json(Path(path) / "tokenizer_config.json", {"tokenizer_class": "dgemma.ByteTokenizer"})

    def _decode(self, ids: list[int]) -> str:
        names = {token: marker for marker, token in self.markers.items()}
        raw = bytearray()
        for token in ids:
            if self.first_byte <= token < self.vocab_size:
                raw.append(token - self.first_byte)
            else:
                raw.extend(names.get(token, "\ufffd").encode())
        return raw.decode("utf-8", errors="replace")

    def _render(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        fix = "Its template has no tools. Use the tokenizer of a checkpoint."
        require(not options["tools"], "ByteTokenizer.chat tools", "be None", options["tools"], fix)
        thinking, has_prompt = options["enable_thinking"], options["add_generation_prompt"]
        text = as_turns(messages, thinking=thinking, add_generation_prompt=has_prompt)
        return [self.bos_token_id, *self._encode_guarded(text)]


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer of a checkpoint folder, if it has one, into another folder."""
    files = [file for file in map(source.joinpath, _SAVED_FILES) if file.is_file()]
    if not files:
        return
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with new_files([folder / file.name for file in files]) as new:
        for target, file in zip(new, files, strict=True):
            target.write_bytes(read_bytes(file, most=_MOST_BYTES))
    for template in sorted((source / _TEMPLATES[1]).glob("*.jinja")):
        with writing(folder):
            (folder / _TEMPLATES[1]).mkdir(exist_ok=True)
        write_bytes(folder / _TEMPLATES[1] / template.name, read_bytes(template))


@contextmanager
def explained(problem: str, fix: str) -> Iterator[None]:
    """Turn any error of another library, or of a Jinja template, into a ValueError: the problem and a fix."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except MemoryError:
        raise ValueError(f"{printable(problem)} (it asks for more memory than there is). {fix}") from None
    except BaseException as error:  # a panic of tokenizers is no Exception
        raise ValueError(f"{printable(problem)} ({one_line(str(error)).rstrip('.')}). {fix}") from None


def _read_ids(ids: Any, owner: str, rule: str, fix: str = "") -> list[int]:
    """Return a row of token ids as a list of ints."""
    listed = as_lists(ids)
    read = [as_int(token) for token in listed] if isinstance(listed, list) else [None]
    require(None not in read, owner, rule, ids, fix)
    return [token for token in read if token is not None]


def _require_text(text: Any, **flags: Any) -> None:
    for name, flag in flags.items():
        require(isinstance(flag, bool), f"Tokenizer.encode {name}", "be True or False", flag)
    require(isinstance(text, str), "Tokenizer.encode text", "be one str", text, "Use encode_batch for several.")


def _require_several(texts: Any) -> None:
    fits = not isinstance(texts, str) and all(isinstance(text, str) for text in texts)
    require(fits, "Tokenizer.encode_many texts", "be a list of texts", texts, "Write [text] for one.")
