"""For adapters: the causal pass over a text and the denoising passes over its canvases, joined layer by layer.

Reference: `dgemma.train.one_pass.run_text_and_canvases`.

A step reads the clean text, denoises the canvases without gradients for self-conditioning, and denoises them again. In
a layer, a canvas needs only this layer's keys and values of the text. So the text and the first denoising share one
forward pass. The second denoising has its own forward pass. Then the text and the second denoising share one
recomputation and one backward pass. Weights are read four times instead of seven times, and products have more rows.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dgemma.doors import plain
from dgemma.model.attention import Attention, Mask, attend
from dgemma.model.backbone import KeysValues, Layer
from dgemma.model.config import LayerShape
from dgemma.model.diffusion import DiffusionGemma
from dgemma.model.layers import RMSNorm
from dgemma.model.rotary import rotary_table
from dgemma.train import one_pass
from dgemma.train.canvases import Canvases, NoisyCanvases
from dgemma.train.lora import AdaptedLinear, is_adapted
from dgemma.train.one_pass import LastHidden
from dgemma_kernels.ops.heads import kernel as heads
from dgemma_kernels.ops.residual import kernel as residual
from dgemma_kernels.training.adapted_experts import Kept, keeps_output, trained_weights
from dgemma_kernels.training.adapted_linear import multiply, product_dtype
from dgemma_kernels.training.attention import in_words, words
from dgemma_kernels.training.fused import joined, runs_kernels
from dgemma_kernels.training.layer import feed_forward


def run_text_and_canvases(
    model: DiffusionGemma,
    canvases: Canvases,
    noisy: NoisyCanvases | None,
    *,
    self_cond_off: Literal["zero_signal", "zero_logits"] = "zero_signal",
) -> LastHidden:
    """Run text and canvases together if the step allows it; otherwise one after the other."""
    if noisy is None or noisy.self_cond is None or not canvases.prefix_len or not can_run_together(model):
        return plain(one_pass.run_text_and_canvases)(model, canvases, noisy, self_cond_off=self_cond_off)
    tokens, documents = one_pass.text_read(canvases, noisy)
    text, image_index = model.embed_prompt(tokens, canvases.images)
    text_masks = one_pass.text_masks(model, tokens, documents=documents, image_index=image_index)
    of_text = Tokens(one_pass.text_positions(tokens), text_masks)
    masks = [_canvases_first(mask, canvases.prefix_len) for mask in one_pass.masks_of(model, canvases)]
    of_canvases = Tokens(one_pass.canvas_positions(canvases.starts, canvases.x.shape[-1]), masks)
    run = TogetherPass(model, of_text, of_canvases, canvases.prefix_len)
    level = one_pass.position_levels(model, canvases, noisy)

    def predict(signal: Tensor | None) -> Tensor:
        first = run.read_and_denoise(text, one_pass.embed_canvases(model, noisy.z, signal, level))
        return first.view(*noisy.z.shape, -1)

    signal = one_pass.self_cond_signal(model, noisy, self_cond_off, predict)
    text_hidden, hidden = run.denoise_again(text, one_pass.embed_canvases(model, noisy.z, signal, level))
    return LastHidden(text_hidden, hidden.view(*noisy.z.shape, -1))


def _canvases_first(mask: Mask | None, num_seen: int) -> Mask | None:
    """Return the mask (…, S) of canvases with their own keys before those of the text."""
    return torch.cat((mask[..., num_seen:], mask[..., :num_seen]), -1) if isinstance(mask, Tensor) else mask


class Tokens(NamedTuple):
    """The positions (B, T) of a text or of canvases, and each layer's attention mask."""

    positions: Tensor
    masks: Sequence[Mask | None]


class _FromText(NamedTuple):
    """A layer's results of the pass with the text.

    When canvases are denoised again, only their part of these results is replaced.
    """

    keys: Tensor  # (B, K, S, H): the canvases, then the text that they see
    values: Tensor
    kept: Kept
    out: Tensor  # (B·L, D)


def can_run_together(model: DiffusionGemma) -> bool:
    """Return True if a step may run text and canvases together: adapters, recomputed activations, one process.

    Without adapters, layers are compiled as a whole instead. With several processes, weights are only there during the
    forward, and the backward needs them too.

    Example: `model.recompute_activations = True; add_lora(model); can_run_together(model)`.
    """
    several = dist.is_available() and dist.is_initialized()
    return model.recompute_activations and torch.is_grad_enabled() and is_adapted(model) and not several


class TogetherPass:
    """The layers over a text and its canvases. Call `read_and_denoise` once, then `denoise_again` once.

    num_seen: the number of text tokens that canvases see. A row has L = C + T tokens: canvases, then text. So the keys
    that canvases see, and those of the text, are both slices. The masks of canvases have their keys in this order.

    Example: `run = TogetherPass(model, text, canvases, 64); first = run.read_and_denoise(x, noisy)`.
    """

    def __init__(self, model: DiffusionGemma, text: Tokens, canvases: Tokens, num_seen: int) -> None:
        self.model, self.text, self.canvases, self.num_seen = model, text, canvases, num_seen
        self.layers: list[Layer] = list(model.layers)  # type: ignore[arg-type]
        self.batch_size, self.num_noisy = canvases.positions.shape
        shapes = [model.config.layer_shape(number) for number in range(len(self.layers))]
        positions = torch.cat((canvases.positions, text.positions), 1)
        self.ropes, self.noisy_ropes = (
            _rotary_tables(shapes, each.view(1, -1), model.dtype) for each in (positions, canvases.positions)
        )
        self.scalars, self.noisy_scalars = self._layer_scalars()
        self.results: list[_FromText] = []

    @torch.no_grad()
    def read_and_denoise(self, text: Tensor, canvases: Tensor) -> Tensor:
        """Run embedded text (B, T, D) and canvases (B, C, D) without gradients; return the canvases' last states.

        Example: `run.read_and_denoise(model.embed(tokens), model.embed_canvas(noisy))`.
        """
        x = torch.cat((canvases, text), 1).flatten(0, 1)
        for number in range(len(self.layers)):
            kept = Kept()
            x, keys, values = self.run_layer(number, x, kept)
            self.results.append(_FromText(keys, values, kept, x))
        return self.model.norm(self.of_canvases(x))

    def denoise_again(self, text: Tensor, canvases: Tensor) -> tuple[Tensor, Tensor]:
        """Denoise other canvases (B, C, D) after the same text; return the last hidden states of both, with gradients.

        Example: `text_hidden, hidden = run.denoise_again(model.embed(tokens), model.embed_canvas(noisy, signal))`.
        """
        x = torch.cat((canvases, text), 1).flatten(0, 1)
        for number, layer in enumerate(self.layers):
            x = _TogetherLayer.apply(self, number, x, *trained_weights(layer))
        hidden = self.model.norm(x).unflatten(0, (self.batch_size, -1))
        noisy, clean = hidden.split((self.num_noisy, self.text.positions.shape[1]), 1)
        return clean, noisy

    def run_layer(self, number: int, x: Tensor, kept: Kept) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output (B·L, D) of a layer for x (B·L, D), and the keys and values that canvases see."""
        layer, num_noisy = self.layers[number], self.num_noisy
        ends = num_noisy, num_noisy + self.num_seen, num_noisy + self.num_seen  # of queries, keys, values
        if _uses_head_kernel(layer, x):
            normed, x = _NormOf.apply(x, layer.input_layernorm)
            raws = layer.self_attn.raw_heads(normed)
            both = _Heads.apply(layer.self_attn, self.ropes[number], self.batch_size, num_noisy, ends, *raws)
        else:
            whole = _project(layer, x, self.ropes[number], self.batch_size)
            both = [
                part for each, end in zip(whole, ends, strict=True) for part in (each[:, :end], each[:, num_noisy:])
            ]
        noisy_queries, queries = both[:2]
        noisy_keys, keys, noisy_values, values = (part.transpose(1, 2) for part in both[2:])
        noisy = attend(noisy_queries, noisy_keys, noisy_values, self.canvases.masks[number])
        text = attend(queries, keys, values, self.text.masks[number])
        attended = _project_out(layer, _JoinTokens.apply(noisy, text), kept)
        return feed_forward(layer, x, attended, self.scalars[number], kept), noisy_keys, noisy_values

    def run_canvases(self, number: int, x: Tensor, result: _FromText, kept: Kept) -> Tensor:
        """Return the output of a layer for canvases x (B·C, D), and replace their keys and values in `result`."""
        layer, rope = self.layers[number], self.noisy_ropes[number]
        if _uses_head_kernel(layer, x):
            raws = layer.self_attn.raw_heads(layer.input_layernorm(x))
            normed = _norm_heads(layer.self_attn, rope, raws)
            queries, keys, values = (each.unflatten(0, (self.batch_size, -1)) for each in normed)
        else:
            queries, keys, values = _project(layer, x, rope, self.batch_size)
        for old, new in ((result.keys, keys), (result.values, values)):
            _replace(old[:, :, : self.num_noisy], new.transpose(1, 2))
        attended = attend(queries, result.keys, result.values, self.canvases.masks[number])
        return feed_forward(layer, x, _project_out(layer, attended, kept), self.noisy_scalars[number], kept)

    def _layer_scalars(self) -> tuple[Tensor, Tensor]:
        """Return each layer's scalar for all tokens (layers, B·L, 1), and for canvas tokens alone (layers, B·C, 1)."""
        noisy = torch.stack([layer.layer_scalar for layer in self.layers]).expand(-1, self.num_noisy)
        clean = torch.stack([layer.causal_layer_scalar for layer in self.layers])
        both = torch.cat((noisy, clean.expand(-1, self.text.positions.shape[1])), 1)
        return both.repeat(1, self.batch_size)[..., None], noisy.repeat(1, self.batch_size)[..., None]

    def of_canvases(self, x: Tensor) -> Tensor:
        """Return the part (B, C, …) of x (B·L, …)."""
        return x.unflatten(0, (self.batch_size, -1))[:, : self.num_noisy]


def _rotary_tables(shapes: Sequence[LayerShape], positions: Tensor, dtype: torch.dtype) -> list[KeysValues]:
    """Return each layer's cosines and sines, (1, M, 1, H) each, at positions (1, M)."""
    tables = {s.kind: rotary_table(s, positions, dtype) for s in {s.kind: s for s in shapes}.values()}
    return [tables[shape.kind] for shape in shapes]


def _project(layer: Layer, x: Tensor, rope: KeysValues, batch_size: int) -> list[Tensor]:
    """Return queries, keys and values (B, T, heads, H) of x (B·T, D)."""
    queries, keys, values = layer.self_attn.project(layer.input_layernorm(x)[None], rope)
    flat = queries, keys.transpose(1, 2), values.transpose(1, 2)
    return [each.flatten(0, 1).unflatten(0, (batch_size, -1)) for each in flat]


def _project_out(layer: Layer, attended_heads: Tensor, kept: Kept) -> Tensor:
    """Return the output (B·T, D) of attention from its heads (B, T, N, H)."""
    project, flat = layer.self_attn.o_proj, attended_heads.flatten(2).flatten(0, 1)
    if not isinstance(project, AdaptedLinear) or not keeps_output(layer.experts):
        return project(flat)
    attended = multiply(flat, [project], None if kept.attended is None else [kept.attended])[0]
    kept.attended = attended.detach()
    return attended


class _NormOf(torch.autograd.Function):
    """norm(x) and x. The kernel of the gradient adds both gradients of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        ctx.norm = norm
        ctx.save_for_backward(x)
        return norm(x), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, added: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return residual.rms_norm_gradient(grad, x, ctx.norm.weight, ctx.norm.eps, added)[0], None


def _uses_head_kernel(layer: Layer, x: Tensor) -> bool:
    """Return True if our kernels normalise and rotate heads: on a GPU, for frozen norms.

    The forward kernel rounds each product of a rotation. In a float32 model under autocast, these products are float32
    and are not rounded. So such a model does not use the kernels.
    """
    attention = layer.self_attn
    return (
        runs_kernels(x)
        and residual.fits(x)
        and x.dtype == product_dtype(x) != torch.float32
        and attention.head_dim & (attention.head_dim - 1) == 0
        and not any(norm.weight.requires_grad for norm in (layer.input_layernorm, attention.q_norm, attention.k_norm))
    )


def _norm_heads(attention: Attention, rope: KeysValues, raws: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries (M, N, H), keys and values (M, K, H) of their projections (M, heads · H)."""
    num_heads, kv_heads = (part.shape[-1] // attention.head_dim for part in raws[:2])
    inputs = _inputs_of_heads(attention, rope, raws)
    return heads.norm_heads(inputs, num_heads=num_heads, kv_heads=kv_heads, eps=attention.eps)


def _inputs_of_heads(attention: Attention, rope: KeysValues, raws: Sequence[Tensor]) -> heads.HeadInputs:
    raw = joined(raws, 1)
    raw = torch.cat(list(raws), 1) if raw is None else raw
    cos, sin = (table.flatten(0, 2).contiguous() for table in rope)
    return heads.HeadInputs(raw, attention.q_norm.weight, attention.k_norm.weight, cos, sin)


class _Heads(torch.autograd.Function):
    """Compute queries, keys and values, (B, T, heads, H) each, of the first and of the last tokens of each row.

    Kernels normalise and rotate the heads. The kernel of the gradient adds both parts, so they are not joined first.
    """

    @staticmethod
    def forward(
        ctx: Any,
        attention: Attention,
        rope: KeysValues,
        batch_size: int,
        start: int,
        ends: tuple[int, int, int],
        *raws: Tensor,
    ) -> tuple[Tensor, ...]:
        """start: where the last tokens begin. ends: where the first tokens end, for queries, keys and values."""
        ctx.attention, ctx.rope = attention, rope
        ctx.save_for_backward(*raws)
        normed = (each.unflatten(0, (batch_size, -1)) for each in _norm_heads(attention, rope, raws))
        return tuple(part for each, end in zip(normed, ends, strict=True) for part in (each[:, :end], each[:, start:]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raws = ctx.saved_tensors
        inputs = _inputs_of_heads(ctx.attention, ctx.rope, raws)
        parts = [grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads]
        of_raw = heads.norm_heads_gradient(inputs, parts[::2], parts[1::2], eps=ctx.attention.eps)
        return None, None, None, None, None, *of_raw.split([part.shape[1] for part in raws], 1)


class _JoinTokens(torch.autograd.Function):
    """Join the tokens of two tensors.

    Defines its own gradient: autograd would return slices, and attention would copy them more slowly than `in_words`.
    """

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        ctx.size = first.shape[1]
        return in_words(_join, first, second)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        first, second = grad[:, : ctx.size], grad[:, ctx.size :]
        return in_words(torch.Tensor.contiguous, first), in_words(torch.Tensor.contiguous, second)


def _join(*parts: Tensor) -> Tensor:
    return torch.cat(parts, 1)


def _replace(old: Tensor, new: Tensor) -> None:
    target, source = words(old, new)
    target.copy_(source)


class _TogetherLayer(torch.autograd.Function):
    """A layer whose forward runs only canvases, because the text's results are known. The backward runs both again."""

    @staticmethod
    def forward(ctx: Any, run: TogetherPass, number: int, x: Tensor, *trained: Tensor) -> Tensor:
        result, kept = run.results.pop(0), Kept()
        out = run.run_canvases(number, run.of_canvases(x).flatten(0, 1), result, kept)
        stored, news = ((each.experts, each.mixed, each.narrow, each.attended) for each in (result.kept, kept))
        for old, new in zip((*stored, result.out), (*news, out), strict=True):
            if old is not None and new is not None:
                _replace(run.of_canvases(old), new.unflatten(0, (run.batch_size, -1)))
        ctx.run, ctx.number, ctx.autocast = run, number, _same_autocast(x.device)
        ctx.save_for_backward(x, *stored)
        return result.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *stored = ctx.saved_tensors
        layer, kept = ctx.run.layers[ctx.number], Kept(*stored)
        x = x.detach().requires_grad_()
        with torch.enable_grad(), ctx.autocast():
            out, _, _ = ctx.run.run_layer(ctx.number, x, kept)
        return None, None, *torch.autograd.grad(out, [x, *trained_weights(layer)], grad, allow_unused=True)


def _same_autocast(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Return a function that makes a context with the current autocast, for a backward pass that computes again."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext
    return partial(torch.autocast, device.type, torch.get_autocast_dtype(device.type), cache_enabled=False)
