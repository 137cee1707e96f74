"""Checks of the arguments of `generate` that their types do not say, before any work is done. Each names the fix."""

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dgemma.checks import as_int, as_lists, has_values, require, require_tensor
from dgemma.diffusion.noise import Noise
from dgemma.diffusion.schedule import LEAST_NOISE
from dgemma.model.cache import Cache, require_cache
from dgemma.model.config import DenoiserConfig, ModelConfig
from dgemma.model.denoiser import Denoiser
from dgemma.model.vision.images import Images
from dgemma.model.vision.places import split_images
from dgemma.sampling.base import Sampler

MOST_STEPS = 1_000_000  # per canvas; a larger number is certainly a mistake
Allowed = Tensor | np.ndarray | Iterable[Any] | None
_INTS = (torch.int64, torch.int32)


@dataclass(frozen=True, kw_only=True)
class Span:
    """Constraints over all blocks: canvas (B, N) with -1 for noise, frozen (B, N), allowed (B or 1, N or 1, V).

    A canvas may end once its positions in awaited (B, N) are finished; None means all positions.
    """

    canvas: Tensor | None = None
    frozen: Tensor | None = None
    allowed: Tensor | None = None
    awaited: Tensor | None = None

    def past_frozen(self, block: int, canvas_len: int, rows: Tensor) -> Tensor:
        """The positions where a stop token ends a row: its last frozen position and those after it, (R, C) bool."""
        if self.frozen is None:
            return torch.ones(len(rows), canvas_len, dtype=torch.bool, device=rows.device)
        position = block * canvas_len + torch.arange(canvas_len, device=rows.device)
        column = torch.arange(self.frozen.shape[1], device=rows.device)
        last = torch.where(self.frozen[rows], column, -1).amax(-1, keepdim=True)  # (R, 1)
        return position >= last

    def to(self, device: torch.device) -> "Span":
        """The same constraints on `device`."""
        return Span(**{name: None if value is None else value.to(device) for name, value in vars(self).items()})

    def block(self, block: int, canvas_len: int, rows: Tensor) -> dict[str, Any]:
        """The part of the span over one block, for some rows. Positions after the end of the span are free."""
        part = slice(block * canvas_len, (block + 1) * canvas_len)
        found: dict[str, Tensor | None] = {"allowed": self.allowed}
        for name, free in (("canvas", -1), ("frozen", False), ("awaited", False)):
            table = getattr(self, name)
            cut = None if table is None else table[rows, part]
            found[name] = None if cut is None else F.pad(cut, (0, canvas_len - cut.shape[1]), value=free)
        if self.canvas is not None and part.start >= self.canvas.shape[1]:
            found["canvas"] = None  # so that the block starts at level 1
        if self.allowed is not None:
            allowed = self.allowed if self.allowed.shape[0] == 1 else self.allowed[rows]
            if allowed.shape[1] > 1:
                allowed = allowed[:, part]
                allowed = F.pad(allowed, (0, 0, 0, canvas_len - allowed.shape[1]), value=True)
            found["allowed"] = allowed
        return found


def read_seeds(seed: int | Sequence[int] | Tensor, prompt_tokens: Tensor) -> Tensor:
    """Return one seed per row, (B,) int64: an int s gives row i the seed s + i."""
    batch_size, first = prompt_tokens.shape[0], as_int(seed)
    seeds = as_lists(seed) if first is None else [first + row for row in range(batch_size)]
    fits = isinstance(seeds, list) and len(seeds) == batch_size
    fits = fits and all(type(s) is int and -(2**63) <= s < 2**63 for s in seeds)
    rule = f"be an integer below 2**63 - {batch_size} (row i has seed + i), or a list of {batch_size}, one per row"
    require(fits, "generate seed", rule, seed)
    return torch.tensor(seeds, dtype=torch.int64, device=prompt_tokens.device)


def read_token_ids(name: str, ids: int | Iterable[int], vocab_size: int | None = None) -> tuple[int, ...]:
    """Return one token id or several as a sorted tuple. With `vocab_size`, all must be below it."""
    one = as_int(ids)
    listed = as_lists(ids) if one is None else [one]
    fits = isinstance(listed, list) and all(type(token) is int for token in listed)
    fits = fits and (vocab_size is None or all(0 <= token < vocab_size for token in listed))
    require(fits, name, f"be a token id or several{f' in [0, {vocab_size})' if vocab_size else ''}", ids)
    return tuple(sorted(listed))


def read_span(
    canvas: Tensor | None,
    frozen: Tensor | None,
    allowed: Allowed,
    prompt_tokens: Tensor,
    noise: Noise,
    max_new_tokens: int,
) -> Span:
    """Check canvas, frozen and allowed against each other and the vocabulary, and return them as a `Span`."""
    batch_size, device = prompt_tokens.shape[0], prompt_tokens.device
    if canvas is not None:
        rule = f"be int64 tokens, -1 for noise, of shape ({batch_size}, 1 to {max_new_tokens})"
        require_tensor(canvas, "generate canvas", rule, shape=(batch_size, None), dtypes=_INTS)
        fits = 1 <= canvas.shape[1] <= max_new_tokens
        require(fits, "generate canvas", rule, canvas, f"Raise max_new_tokens to {canvas.shape[1]}.")
        least, most = int(canvas.min()), int(canvas.max())
        rule = f"hold ids in [0, {noise.vocab_size}) or -1 for noise"
        require(least >= -1 and most < noise.vocab_size, "generate canvas", rule, f"{least}..{most}")
        canvas = canvas.to(device, torch.int64)
    if frozen is not None:
        if canvas is None:
            raise ValueError("generate frozen must come with canvas, the tokens to keep. Pass canvas.")
        rule = f"be booleans of the canvas's shape {tuple(canvas.shape)}"
        require_tensor(frozen, "generate frozen", rule, shape=canvas.shape, dtypes=(torch.bool,))
        frozen = frozen.to(device)
        is_noise = frozen & ((canvas < 0) | noise.masked(canvas))
        require(not is_noise.any(), "generate frozen", "mark real tokens", "a position of noise", "Unfreeze it.")
    if allowed is not None:
        allowed = read_allowed("generate allowed", allowed, noise, (batch_size, max_new_tokens), device)
        if canvas is not None and noise.kind == "mask":
            _check_kept(canvas, frozen, allowed, noise)
    return Span(canvas=canvas, frozen=frozen, allowed=allowed)


def _check_kept(canvas: Tensor, frozen: Tensor | None, allowed: Tensor, noise: Noise) -> None:
    """Check that the canvas's own tokens, which mask noise does not change, are allowed or frozen."""
    is_kept = (canvas >= 0) & ~noise.masked(canvas)
    if frozen is not None:
        is_kept = is_kept & ~frozen
    length = canvas.shape[1] if allowed.shape[1] == 1 else min(canvas.shape[1], allowed.shape[1])
    table = allowed[:, :length].expand(canvas.shape[0], length, -1)
    fits = table.gather(2, canvas[:, :length].clamp(min=0)[..., None])[..., 0]
    if bool((is_kept[:, :length] & ~fits).any()):
        raise ValueError(
            "generate canvas must hold allowed tokens where it is not frozen, because mask noise keeps them. "
            "Freeze other tokens, allow them, or write -1."
        )


def check_vocabulary(noise: Noise, config: DenoiserConfig) -> None:
    """Check that the noise is over the model's vocabulary."""
    fits = noise.vocab_size == config.vocab_size
    require(fits, f"{type(noise).__name__}.vocab_size", f"be the model's {config.vocab_size}", noise.vocab_size)


def check_valid(sampler: Sampler, noise: Noise) -> None:
    """Check that the sampler is valid for the noise process."""
    if noise.kind not in sampler.valid_for:
        raise ValueError(
            f"{type(sampler).__name__} must run under {' or '.join(sorted(sampler.valid_for))} noise, "
            f"got {noise.kind}. Pass noise= of that kind or another sampler."
        )


def read_count(name: str, value: int | None, default: int, most: int) -> int:
    """Return the value, or the checkpoint's default if it is None; it must be from 1 to `most`."""
    value = default if value is None else value
    require(1 <= value <= most, f"generate {name}", f"be an integer of at least 1 and at most {most}", value)
    return int(value)


def check_memory(owner: str, batch_size: int, config: DenoiserConfig, device: torch.device) -> None:
    """Refuse a canvas whose logits alone are larger than the memory of the device, before anything is allocated."""
    needed = 2 * batch_size * config.canvas_length * config.vocab_size  # in 16 bits
    total = needed
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    elif device.type == "cpu" and hasattr(os, "sysconf"):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    rule, got = f"fit into the {total / 2**30:.3g} GiB of {device}", f"{needed / 2**30:.3g} GiB of logits"
    require(needed <= total, f"{owner} canvas", rule, got, "Use fewer rows or a smaller canvas.")


def read_noise_level(owner: str, noise_level: float) -> float:
    """Return the noise level of a canvas."""
    fits = 0 < noise_level <= 1
    require(fits, f"{owner} noise_level", "be in (0, 1]", noise_level, "1 starts from pure noise.")
    return float(noise_level)


def check_start(noise: Noise, canvas: Tensor | None, noise_level: float, num_positions: int) -> None:
    """Refuse a start that does not fit the canvas.

    A level below 1 needs a canvas. Pure noise needs a schedule that reaches level 1 at t = 1, unless the canvas shows
    its level, as under mask noise.
    """
    fits, fix = noise_level == 1 or canvas is not None, "Pass the canvas that has this level."
    require(fits, "generate noise_level", "be 1 without canvas", noise_level, fix)
    level = 1 - noise.schedule.alpha(torch.ones((), dtype=torch.float64)).item()
    is_complete = canvas is not None and canvas.shape[1] >= num_positions and not bool((canvas < 0).any())
    fits, fix = noise.kind == "mask" or level >= LEAST_NOISE or is_complete, "Use Linear(), or pass a whole canvas."
    require(fits, "generate noise", "have a schedule that starts from pure noise", noise.schedule, fix)


def check_prompt(
    tokens: Tensor,
    attention_mask: Tensor | None,
    cache: Cache | None,
    config: DenoiserConfig,
    num_positions: int,
    device: torch.device,
) -> None:
    """Check the prompt's type, device and length, its mask, and the cache that it continues."""
    rule, fix = "be integer ids of shape (batch, length)", "Pass prompt_tokens.to(model.device)."
    require_tensor(tokens, "generate prompt_tokens", rule, shape=(None, None), dtypes=_INTS)
    fits, rule = tokens.device == device, f"be on the model's device {device}"
    require(fits, "generate prompt_tokens", rule, str(tokens.device), fix)
    (num_rows, width), num_cached = tokens.shape, 0
    if cache is not None:
        require_cache("generate", cache)
        require(cache.batch_size == num_rows, "generate cache", f"have the prompt's {num_rows} rows", cache.batch_size)
        num_cached = cache.num_slots
    has_tokens = num_rows > 0 and width + num_cached > 0
    if attention_mask is not None:
        rule = f"be a tensor of shape ({num_rows}, {width}) on {device}, 1 for real tokens and 0 for padding"
        require_tensor(attention_mask, "generate attention_mask", rule, shape=(num_rows, None))
        fits = attention_mask.shape[1] >= width and attention_mask.device == device  # it may cover the cache too
        fits = fits and bool(((attention_mask == 0) | (attention_mask == 1)).all())
        require(fits, "generate attention_mask", rule, attention_mask)
        has_tokens = has_tokens and (num_cached > 0 or bool(attention_mask.bool().any(1).all()))
    if not has_tokens:
        raise ValueError("generate prompt_tokens must hold at least one token per row. Start with the bos token.")
    total, most = num_cached + width + num_positions, config.max_position_embeddings
    if total > most:
        num_blocks = num_positions // config.canvas_length
        raise ValueError(
            f"generate must stay within max_position_embeddings {most}, got {total} tokens with the prompt and "
            f"{num_blocks} canvas{'es' if num_blocks > 1 else ''}. Shorten the prompt or lower max_new_tokens."
        )


def read_images(model: Denoiser, tokens: Tensor, images: Any) -> tuple[Images | None, ...] | None:
    """Return the images of each row, from one value for all rows or a list with one per row."""
    if not isinstance(model.config, ModelConfig) or not model.takes_images:
        fix = "Load a model with a vision tower."
        require(images is None, "generate images", f"be None for this {type(model).__name__}", images, fix)
        return None
    image_token = model.config.image_token_id
    if images is None:
        has_places = bool((tokens == image_token).any())
        require(not has_places, "generate images", "be given for a prompt with image tokens", None)
        return None
    if isinstance(images, Images):
        return split_images(images, tokens, image_token)
    require(len(images) == len(tokens), "generate images", f"have one entry per row, {len(tokens)}", len(images))
    rows = zip(images, tokens.split(1), strict=True)
    return tuple(None if row is None else split_images(row, text, image_token)[0] for row, text in rows)


def read_allowed(
    name: str, allowed: Any, noise: Noise, shape: tuple[int, int], device: torch.device, *, exact: bool = False
) -> Tensor:
    """Return any form of `allowed` as booleans (B or 1, N or 1, V). `shape` is (B, maximum of N).

    `allowed` is booleans that broadcast, ids for all positions, or one collection of ids per position. With `exact`, N
    must be 1 or this maximum.
    """
    table = _allowed_table(name, allowed, noise.vocab_size).to(device)
    table = table.reshape(*[1] * (3 - table.dim()), *table.shape)
    batch_size, num_positions = shape
    fits = table.dim() == 3 and table.shape[0] in (1, batch_size) and table.shape[2] == noise.vocab_size
    fits = fits and (table.shape[1] in (1, num_positions) if exact else table.shape[1] <= num_positions)
    whole = f"({batch_size}, {'' if exact else 'up to '}{num_positions}, {noise.vocab_size})"
    require(fits, name, f"broadcast to (batch, positions, vocab) = {whole}", tuple(table.shape))
    check_usable(name, noise.proposable(table, device))
    return table


def check_usable(name: str, usable: Tensor | None) -> None:
    """Check that a token may be written at every position; usable is `Noise.proposable` of the allowed ones."""
    if usable is not None and not bool(usable.any(-1).all()):
        raise ValueError(f"{name} must leave at least one token at every position. Allow a token there.")


def _allowed_table(name: str, allowed: Any, vocab_size: int) -> Tensor:
    """Return booleans (..., V), made from ids where necessary."""
    is_readable = isinstance(allowed, np.ndarray) or (isinstance(allowed, Tensor) and has_values(allowed))
    if is_readable and allowed.dtype in (torch.bool, np.bool_):
        return torch.as_tensor(allowed)
    listed = as_lists(allowed)
    if {type(leaf) for leaf in tree_leaves(listed)} == {bool}:
        with suppress(ValueError):  # rows of different lengths
            return torch.tensor(listed)
    nested = isinstance(listed, list) and any(isinstance(item, list) for item in listed)
    sets = listed if nested else [listed]
    fits = all(isinstance(ids, list) and all(type(token) is int for token in ids) for ids in sets)
    rule, fix = "be booleans, token ids, or one list of ids per position", "Do not mix these forms."
    require(fits, name, rule, allowed, fix)
    fits = all(0 <= token < vocab_size for ids in sets for token in ids)
    require(fits, name, f"hold ids in [0, {vocab_size})", allowed)
    fits = all(len(set(ids)) == len(ids) for ids in sets)  # a mask of 0 and 1 would be read as the ids 0 and 1
    require(fits, name, "not repeat an id", allowed, "Convert a mask of 0 and 1 to booleans.")
    table = torch.zeros(len(sets), vocab_size, dtype=torch.bool)
    for position, ids in enumerate(sets):
        table[position, ids] = True
    return table
