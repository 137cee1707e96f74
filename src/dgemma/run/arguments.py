"""Checks of the arguments of `generate` that their types do not say, before any work is done. Each names the fix."""

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dgemma.checks import Words, as_int, as_lists, has_values, require, require_tensor
from dgemma.diffusion.noise import Noise
from dgemma.diffusion.schedule import LEAST_NOISE
from dgemma.diffusion.span import Span
from dgemma.model.cache import Cache
from dgemma.model.config import DenoiserConfig, ModelConfig
from dgemma.model.denoiser import Denoiser, require_vision
from dgemma.model.vision.images import Images
from dgemma.model.vision.places import split_images
from dgemma.sampling.base import Sampler

MOST_STEPS = 1_000_000  # per canvas; a larger number is certainly a mistake
Allowed = Tensor | np.ndarray | Iterable[Any] | None
_INTS = (torch.int64, torch.int32)


def read_seeds(seed: int | Sequence[int] | Tensor, prompt_tokens: Tensor) -> Tensor:
    """Return one seed per row, (B,) int64: an int s gives row i the seed s + i."""
    batch_size, first = prompt_tokens.shape[0], as_int(seed)
    seeds = as_lists(seed) if first is None else [first + row for row in range(batch_size)]
    fits = isinstance(seeds, list) and len(seeds) == batch_size and all(as_int(s) is not None for s in seeds)
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
        ids = f"[0, {noise.vocab_size}) or -1 for noise"
        rule = f"be int64 tokens in {ids}, of shape ({batch_size}, 1 to {max_new_tokens})"
        require_tensor(canvas, "generate canvas", rule, shape=(batch_size, None), dtypes=_INTS)
        fits = 1 <= canvas.shape[1] <= max_new_tokens
        fits = fits and int(canvas.min()) >= -1 and int(canvas.max()) < noise.vocab_size
        require(fits, "generate canvas", rule, canvas, f"max_new_tokens is {max_new_tokens}.")
        canvas = canvas.to(device, torch.int64)
    if frozen is not None:
        require(canvas is not None, "generate frozen", "be the frozen part of a canvas", frozen, "Pass canvas too.")
        assert canvas is not None
        shape = tuple(canvas.shape)
        rule = f"be booleans that mark real tokens of canvas, of its shape {shape}"
        require_tensor(frozen, "generate frozen", rule, shape=shape, dtypes=(torch.bool,))
        frozen = frozen.to(device)
        is_noise = frozen & ((canvas < 0) | noise.masked(canvas))
        require(not is_noise.any(), "generate frozen", rule, Words("a position of noise"), "Unfreeze it.")
    if allowed is not None:
        allowed = read_allowed("generate allowed", allowed, noise, (batch_size, max_new_tokens), device)
    return Span(canvas=canvas, frozen=frozen, allowed=allowed)


def check_vocabulary(noise: Noise, config: DenoiserConfig) -> None:
    """Check that the noise is over the model's vocabulary."""
    fits = noise.vocab_size == config.vocab_size
    require(fits, f"{type(noise).__name__}.vocab_size", f"be the model's {config.vocab_size}", noise.vocab_size)


def check_valid(sampler: Sampler, noise: Noise) -> None:
    """Check that the sampler is valid for the noise process."""
    rule, fix = f"run under {' or '.join(sorted(sampler.valid_for))} noise", "Pass another noise or another sampler."
    require(noise.kind in sampler.valid_for, type(sampler).__name__, rule, noise.kind, fix)


def read_count(name: str, value: int, most: int) -> int:
    """Return a number from 1 to `most`."""
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
    rule, got = f"fit into the {total / 2**30:.3g} GiB of {device}", Words(f"{needed / 2**30:.3g} GiB of logits")
    require(needed <= total, f"{owner} canvas", rule, got, "Use fewer rows or a smaller canvas.")


def read_noise_level(owner: str, noise_level: float) -> float:
    """Return the noise level of a canvas."""
    require(0 < noise_level <= 1, f"{owner} noise_level", "be in (0, 1]", noise_level, "1 starts from pure noise.")
    return float(noise_level)


def check_start(noise: Noise, canvas: Tensor | None, noise_level: float, num_positions: int) -> None:
    """Refuse a start that does not fit the canvas.

    A level below 1 needs a canvas. Pure noise needs a schedule that reaches level 1 at t = 1, unless the canvas shows
    its level, as under mask noise.
    """
    fix = "Pass the canvas that has this level."
    require(noise_level == 1 or canvas is not None, "generate noise_level", "be 1 without canvas", noise_level, fix)
    level = 1 - noise.schedule.alpha(torch.ones((), dtype=torch.float64)).item()
    is_complete = canvas is not None and canvas.shape[1] >= num_positions and not bool((canvas < 0).any())
    fits, fix = noise.kind == "mask" or level >= LEAST_NOISE or is_complete, "Use Linear(), or pass a whole canvas."
    require(fits, "generate noise", "have a schedule that starts from pure noise", noise.schedule, fix)


def check_prompt(
    tokens: Tensor, attention_mask: Tensor | None, cache: Cache | None, config: DenoiserConfig, num_positions: int
) -> None:
    """Check the prompt's type and length, its mask, and the cache that it continues."""
    rule = "be integer ids of shape (batch, length)"
    require_tensor(tokens, "generate prompt_tokens", rule, shape=(None, None), dtypes=_INTS)
    (num_rows, width), num_cached, has_tokens = tokens.shape, 0, True
    if cache is not None:
        require(cache.batch_size == num_rows, "generate cache", f"have the prompt's {num_rows} rows", cache.batch_size)
        num_cached = cache.num_slots
    if attention_mask is not None:
        rule = f"be a tensor of shape ({num_rows}, {width}), 1 for real tokens and 0 for padding"
        require_tensor(attention_mask, "generate attention_mask", rule, shape=(num_rows, None))
        fits = attention_mask.shape[1] >= width  # it may cover the cache too
        fits = fits and bool(((attention_mask == 0) | (attention_mask == 1)).all())
        require(fits, "generate attention_mask", rule, attention_mask)
        has_tokens = bool(attention_mask.bool().any(1).all())
    fits = num_rows > 0 and (num_cached > 0 or (width > 0 and has_tokens))
    require(fits, "generate prompt_tokens", "hold at least one token per row", tokens, "Start with the bos token.")
    total, most = num_cached + width + num_positions, config.max_position_embeddings
    fix = f"The run writes {num_positions} tokens. Shorten the prompt or lower max_new_tokens."
    require(total <= most, "generate", f"stay within max_position_embeddings {most}", total, fix)


def read_images(model: Denoiser, tokens: Tensor, images: Any) -> tuple[Images | None, ...] | None:
    """Return the images of each row, from one value for all rows or a list with one per row."""
    if images is not None:
        require_vision(model)
    if not model.takes_images:
        return None
    assert isinstance(model.config, ModelConfig)  # which names the image token
    image_token = model.config.image_token_id
    for part in [images] if isinstance(images, Images) else images or ():
        if part is not None and model.config.vision is not None:
            part.check(model.config.vision)
    if isinstance(images, Images):
        return split_images(images, tokens, image_token)
    listed = [None] * len(tokens) if images is None else images
    require(len(listed) == len(tokens), "generate images", f"have one entry per row, {len(tokens)}", len(listed))
    without = torch.tensor([row is None for row in listed], device=tokens.device)
    is_missing = bool((without & (tokens == image_token).any(1)).any())
    require(not is_missing, "generate images", "be given for a prompt with image tokens", None)
    if images is None:
        return None
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
    usable: Any = noise.proposable(table, device)
    rule, fix = "leave at least one token at every position", "Allow a token there."
    require(bool(usable.any(-1).all()), name, rule, allowed, fix)
    return table


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
    fits = fits and all(0 <= token < vocab_size for ids in sets for token in ids)
    fits = fits and all(len(set(ids)) == len(ids) for ids in sets)  # a mask of 0 and 1 would be read as ids
    rule = f"be booleans, or distinct token ids in [0, {vocab_size}), for all positions or one list per position"
    require(fits, name, rule, allowed, "Do not mix these forms. Convert a mask of 0 and 1 to booleans.")
    table = torch.zeros(len(sets), vocab_size, dtype=torch.bool)
    for position, ids in enumerate(sets):
        table[position, ids] = True
    return table
