"""Shared prefixes: prompts that begin with the same system prompt, tools, examples or document encode it once.

A prefix is kept where two prompts part, at least a canvas of tokens after the start or after a shorter kept prefix.
Prompts that begin with it copy its keys and values into their own cache, and encode only the rest. So a kept prefix may
leave at any time. Its sliding layers have the window before the place where it ends, which is all that later tokens
see. An image is compared by its pixels.
"""

import hashlib
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dgemma.checks import at_least, typed
from dgemma.model.cache import Cache, PrefixCache
from dgemma.model.denoiser import Denoiser, require_vision
from dgemma.model.vision.images import Images
from dgemma.model.vision.places import find_blocks, join_images

PREFIX_BYTES = 2 << 30
_MOST_KEPT = 256  # prefixes, because every prompt is compared with all of them
_MOST_RECENT = 64  # prompts that the next one is compared with


class _Prompt(NamedTuple):
    """A prompt, or a part of it that cuts no image."""

    tokens: Tensor  # (N,)
    names: np.ndarray  # (N,) int64 on the host: token ids, or a digest below 0 of the image that a token belongs to
    images: Images | None

    def part(self, start: int, stop: int | None = None) -> "_Prompt":
        """Return the tokens from start to stop, with their images."""
        images = self.images
        if images is not None:
            is_image = np.append(self.names < 0, False)
            ends = np.flatnonzero(is_image[:-1] & ~is_image[1:])  # the last token of each image
            inside = np.flatnonzero((start <= ends) & (ends < (len(self.names) if stop is None else stop)))
            images = images.select(inside.tolist()) if len(inside) else None
        return _Prompt(self.tokens[start:stop], self.names[start:stop], images)


class _KeptPrefix(NamedTuple):
    """A prefix with its keys and values, in a cache of one row."""

    model: weakref.ref[Denoiser]
    names: np.ndarray
    cache: PrefixCache


class SharedPrefixes:
    """Encodes prompts, and keeps at most `num_bytes` of keys and values of prefixes that they share.

    The least recently used prefix leaves first. A prefix belongs to one model, and leaves when its weights change. Pass
    the same value to several calls of `generate_many`, `decide_many` or `slots` to share prefixes between them.
    num_bytes=0 shares nothing.

    Example: `prefixes = SharedPrefixes(); slots(model, template, prefixes=prefixes); prefixes.num_reused`.
    """

    @typed
    def __init__(self, num_bytes: Annotated[int, at_least(0)] = PREFIX_BYTES) -> None:
        self._most_bytes = num_bytes
        self.num_tokens = 0  # of all prompts
        self.num_read = 0  # tokens that the model encoded for them
        self.num_evicted = 0  # prefixes that left to make room
        self._kept: list[_KeptPrefix] = []  # the least recently used first
        self._recent = deque[np.ndarray](maxlen=_MOST_RECENT)
        # The weights and their versions. They are held, so that no other tensor gets the id of one of them.
        self._weights = weakref.WeakKeyDictionary[Denoiser, tuple[list[Tensor], list[tuple[int, int, int]]]]()
        self._lock = threading.Lock()

    @property
    def num_kept(self) -> int:
        """The number of kept prefixes."""
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        """Memory of the kept keys and values, in bytes."""
        return sum(kept.cache.num_bytes for kept in self._kept)

    @property
    def num_reused(self) -> int:
        """Tokens of prompts that were copied instead of encoded."""
        return self.num_tokens - self.num_read

    @torch.no_grad()
    def encode(self, model: Denoiser, texts: Sequence[Tensor], images: Sequence[Images | None]) -> Cache:
        """Encode texts (N,) of any lengths with the images in them, and return the cache of these rows.

        Example: `cache = prefixes.encode(model, [torch.tensor([2, 7, 9]), torch.tensor([2, 7])], [None, None])`.
        """
        with self._lock:
            self.num_tokens += sum(map(len, texts))
            if not (self._most_bytes and model.shares_prefixes):
                return self._extend(model, None, texts, images)
            self._drop_stale(model)
            prompts = [self._name(model, *pair) for pair in zip(texts, images, strict=True)]
            ends = self._find_ends(model, [prompt.names for prompt in prompts])
            cache = self._copy_prefixes(model, prompts, ends) if any(map(any, ends)) else None
            rests = [prompt.part(each[-1]) for prompt, each in zip(prompts, ends, strict=True)]
            return self._extend(model, cache, [rest.tokens for rest in rests], [rest.images for rest in rests])

    def _name(self, model: Denoiser, tokens: Tensor, images: Images | None) -> _Prompt:
        names = tokens.cpu().numpy().astype(np.int64)
        if images is not None:
            require_vision(model)
            config: Any = model.config
            blocks = find_blocks(tokens[None], images, config.image_token_id)[0].cpu().numpy()
            digests = np.array([_digest(images.select([number])) for number in range(len(images))])
            names = np.where(blocks >= 0, digests[blocks], names)
        return _Prompt(tokens, names, images)

    def _find_ends(self, model: Denoiser, prompts: list[np.ndarray]) -> list[list[int]]:
        """Return the ends of shared prefixes of each prompt: of the longest kept one, or 0; and of those to keep."""
        found = []
        for row, names in enumerate(prompts):
            kept = self._find(model, names)
            ends = [0 if kept is None else len(kept.names)]
            others = (*self._recent, *prompts[:row], *prompts[row + 1 :])
            for parting in sorted(_common_len(names, other) for other in others):
                if parting >= ends[-1] + model.config.canvas_length:
                    ends.append(parting)
            found.append(ends)
        self._recent.extend(prompts)
        return found

    def _copy_prefixes(self, model: Denoiser, prompts: list[_Prompt], ends: list[list[int]]) -> Cache:
        """Return the cache of the prompts' rows after their prefixes. Prefixes that are new are encoded and kept."""
        groups = dict[bytes, list[int]]()
        for row, (prompt, (*_, end)) in enumerate(zip(prompts, ends, strict=True)):
            if end:
                groups.setdefault(prompt.names[:end].tobytes(), []).append(row)
        cache: Any = model.new_cache(len(prompts))
        for rows in groups.values():
            # A longer prefix continues a shorter one.
            *_, kept = (self._keep(model, prompts[rows[0]].part(0, end)) for end in ends[rows[0]] if end)
            cache.splice(torch.tensor(rows, device=model.device), kept.cache)
        return cache

    def _keep(self, model: Denoiser, prefix: _Prompt) -> _KeptPrefix:
        """Return a prefix with its keys and values, which are computed unless they are kept."""
        kept = self._find(model, prefix.names)
        if kept is not None and len(kept.names) == len(prefix.names):
            return kept
        cache: Any = None if kept is None else kept.cache.clone()
        rest = prefix.part(0 if kept is None else len(kept.names))
        cache = self._extend(model, cache, [rest.tokens], [rest.images])
        kept = _KeptPrefix(weakref.ref(model), prefix.names, cache)
        if cache.num_bytes <= self._most_bytes:
            self._kept.append(kept)
            while self.num_bytes > self._most_bytes or self.num_kept > _MOST_KEPT:
                self._kept.pop(0)
                self.num_evicted += 1
        return kept

    def _find(self, model: Denoiser, names: np.ndarray) -> _KeptPrefix | None:
        """Return the longest kept prefix of a text, which is now the last one to leave."""
        own = (kept for kept in self._kept if kept.model() is model)
        found = [kept for kept in own if _common_len(kept.names, names) == len(kept.names)]
        if not found:
            return None
        longest = max(found, key=lambda kept: len(kept.names))
        self._kept = [*(kept for kept in self._kept if kept is not longest), longest]
        return longest

    def _extend(
        self, model: Denoiser, cache: Cache | None, texts: Sequence[Tensor], images: Sequence[Images | None]
    ) -> Cache:
        self.num_read += sum(map(len, texts))
        return encode_texts(model, cache, texts, images)

    def _drop_stale(self, model: Denoiser) -> None:
        """Forget the prefixes of earlier weights, and of models that are gone."""
        tensors = model.weight_tensors()
        versions = [(id(t), t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors]
        _, known = self._weights.get(model, ([], []))
        self._weights[model] = tensors, versions
        self._kept = [kept for kept in self._kept if kept.model() not in (None, None if versions == known else model)]


def encode_texts(
    model: Denoiser, cache: Cache | None, texts: Sequence[Tensor], images: Sequence[Images | None] = ()
) -> Cache:
    """Extend the cache of B rows by texts (N,) of any lengths and by the images in them; None makes a new cache."""
    tokens, mask = pad_left(texts)
    if cache is not None and tokens.shape[1] == 0:
        return cache
    mask = None if mask is None else mask.to(model.device)
    return model.encode_with(join_images(images), tokens.to(model.device), cache, mask)


def pad_left(texts: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Texts of different lengths as tokens (B, P), and a mask of the real ones, None if all lengths are equal."""
    tokens = pad_sequence([*texts], batch_first=True, padding_side="left")
    padding = tokens.shape[1] - torch.tensor([len(text) for text in texts])
    if not padding.any():
        return tokens, None
    return tokens, (torch.arange(tokens.shape[1]) >= padding[:, None]).to(tokens.device)


def _common_len(first: np.ndarray, second: np.ndarray) -> int:
    """Return the number of tokens after which two texts part."""
    size = min(len(first), len(second))
    differs = first[:size] != second[:size]
    return int(differs.argmax()) if differs.any() else size


def _digest(image: Images) -> int:
    """Return a number below 0 that differs for other pixels."""
    digest = hashlib.blake2b(repr((image.grids, image.pooling)).encode(), digest_size=8)
    digest.update(image.patches.cpu().numpy().tobytes())
    return -1 - (int.from_bytes(digest.digest()) >> 1)
