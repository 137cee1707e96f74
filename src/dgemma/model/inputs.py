"""Checks of what `encode` and `denoise` get: tokens, their mask, a cache and self-conditioning."""

from typing import Any

import torch
from torch import Tensor

from dgemma.checks import Words, in_range, require, require_tensor
from dgemma.diffusion.prediction import Prediction
from dgemma.model.cache import Cache, PrefixCache
from dgemma.model.config import ModelConfig
from dgemma.model.denoiser import Denoiser


def check_ids(tokens: Tensor, name: str) -> None:
    rule = "be integer ids of shape (batch, length)"
    require_tensor(tokens, f"DiffusionGemma {name}", rule, shape=(None, None), dtypes=(torch.int64, torch.int32))


def check_tokens(model: Denoiser[Any], tokens: Tensor, cache: Cache, name: str, *, real: Tensor | None = None) -> None:
    """Check tokens (B, T), the prefix's or a canvas's, against the cache they are read with.

    real: (B, T), False for padding, which has no position; None: all real.
    """
    check_ids(tokens, name)
    owner, config, (batch_size, num_new) = f"DiffusionGemma {name}", model.config, tokens.shape
    require(tokens.device == model.device, owner, f"be on the model's device {model.device}", tokens.device, "Move it.")
    require(batch_size > 0 and (name != "canvas" or num_new > 0), owner, "not be empty", tokens)
    fix = "Encode the prefix for each row, or cache.select(rows)."
    require(batch_size == cache.batch_size, owner, f"have the cache's batch size {cache.batch_size}", batch_size, fix)
    most = config.max_position_embeddings
    end = cache.num_slots + num_new if real is None else int((cache.lengths + real.sum(1)).max())
    require(end <= most, owner, f"end within max_position_embeddings {most}", end, "Shorten the prompt.")
    # On a GPU, a wrong id raises a device-side assertion.
    if not in_range(tokens, config.vocab_size):
        rule, ids = f"hold ids in [0, {config.vocab_size})", Words(f"{int(tokens.min())}..{int(tokens.max())}")
        require(False, owner, rule, ids, "Use the checkpoint's own tokenizer.")


def check_prefix(model: Denoiser[Any], tokens: Tensor, cache: Cache, attention_mask: Tensor | None) -> Tensor | None:
    """Check the arguments of `encode`; return which of tokens (B, T) are real, None if all are."""
    real = None if attention_mask is None else _read_mask(model, tokens, cache, attention_mask)
    check_tokens(model, tokens, cache, "tokens", real=None if torch.compiler.is_compiling() else real)
    return real


def _read_mask(model: Denoiser[Any], tokens: Tensor, cache: Cache, attention_mask: Tensor) -> Tensor | None:
    owner, (batch_size, num_new) = "DiffusionGemma.encode attention_mask", tokens.shape
    whole, new = (batch_size, cache.num_seen + num_new), (batch_size, num_new)
    rule = f"be a tensor (batch, cached + new) = {whole} or (batch, new) = {new}, 1 for real tokens and 0 for padding"
    fits = isinstance(attention_mask, Tensor) and attention_mask.layout is torch.strided
    require(fits and tuple(attention_mask.shape) in (whole, new), owner, rule, attention_mask)
    require(attention_mask.is_meta == tokens.is_meta, owner, f"be on {tokens.device}", attention_mask)
    seen, real = attention_mask.to(model.device, torch.bool).tensor_split([-num_new], dim=1)
    if torch.compiler.is_compiling():
        return real
    if seen.shape[1] and not torch.equal(seen.sum(1), cache.lengths):
        rule = f"keep the mask of the cached tokens: {cache.lengths.tolist()} real tokens per row"
        require(False, owner, rule, seen.sum(1).tolist())
    return None if bool(real.all()) else real


def check_cache(config: ModelConfig, cache: Any) -> PrefixCache:
    """Return the cache; raise unless a model with these layers made it."""
    # A subclass is an engine's cache, whose keys may have another form.
    fits = type(cache) is PrefixCache and len(cache.layers) == config.num_hidden_layers
    for number, layer in enumerate(cache.layers if fits else ()):
        shape, keys = config.layer_shape(number), layer.keys.shape
        fits = fits and (layer.window, keys[1], keys[3]) == (shape.window, shape.num_key_value_heads, shape.head_dim)
    require(fits, "DiffusionGemma cache", "come from encode of this model", cache)
    return cache


def check_condition(config: ModelConfig, canvas: Tensor, self_cond: Any, self_cond_mask: Any) -> None:
    """Check a prediction or logits (B, C, V), and one flag per row."""
    shape = (*canvas.shape, config.vocab_size)
    is_dense = isinstance(self_cond, Tensor) and self_cond.layout is torch.strided
    fits = isinstance(self_cond, Prediction) or (is_dense and self_cond.is_floating_point())
    if self_cond is not None and (not fits or tuple(self_cond.shape) != shape):
        require(False, "DiffusionGemma self_cond", f"be a Prediction or logits of shape {shape}", self_cond)
    if self_cond_mask is not None:
        rule = f"be one flag per row, ({len(canvas)},)"
        require_tensor(self_cond_mask, "DiffusionGemma self_cond_mask", rule, shape=(len(canvas),))
