"""Text and canvases through each layer in one pass. Reference: `read_clean`, then `predict_canvases` twice.

A step reads the clean text, denoises the canvases without gradients for self-conditioning, and denoises them again. In
a layer, a canvas needs only this layer's keys and values of the text. So the first denoising shares a pass with the
text, and the second shares the recomputation and the backward pass with it. Weights are then read four times instead of
seven times, and products have more rows.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dgemma.model.attention import Mask, attend, join
from dgemma.model.backbone import KeysValues, Layer
from dgemma.model.diffusion import DiffusionGemma
from dgemma.model.experts import Kept, group_by_expert
from dgemma.model.rotary import rotary_table
from dgemma.train.lora import AdaptedLinear, is_adapted, same_autocast, trained_weights


class Tokens(NamedTuple):
    """The positions (B, T) of a text or of canvases, and each layer's attention mask."""

    positions: Tensor
    masks: Sequence[Mask | None]


class _FromText(NamedTuple):
    """A layer's results of the pass with the text. The canvas's part of each is replaced when it is denoised again."""

    keys: Tensor  # (B, K, S, H): the text that canvases see, then the canvases
    values: Tensor
    kept: Kept
    out: Tensor  # (M, D): the text, then the canvases


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

    num_seen: the number of text tokens that canvases see.

    Example: `run = TogetherPass(model, text, canvases, 64); first = run.read_and_denoise(x, noisy)`.
    """

    def __init__(self, model: DiffusionGemma, text: Tokens, canvases: Tokens, num_seen: int) -> None:
        self.model, self.text, self.canvases, self.num_seen = model, text, canvases, num_seen
        self.layers: list[Layer] = list(model.layers)  # type: ignore[arg-type]
        self.batch_size = text.positions.shape[0]
        self.sizes = [text.positions.numel(), canvases.positions.numel()]
        shapes = [model.config.layer_shape(number) for number in range(len(self.layers))]
        positions = torch.cat((text.positions.flatten(), canvases.positions.flatten()))[None]
        tables = {s.kind: rotary_table(s, positions, model.dtype) for s in {s.kind: s for s in shapes}.values()}
        self.ropes: list[KeysValues] = [tables[shape.kind] for shape in shapes]  # (1, M, 1, H) each
        self.results: list[_FromText] = []

    @torch.no_grad()
    def read_and_denoise(self, text: Tensor, canvases: Tensor) -> Tensor:
        """Run embedded text (B, T, D) and canvases (B, C, D) without gradients; return the canvases' last states.

        Example: `run.read_and_denoise(model.embed(tokens), model.embed_canvas(noisy))`.
        """
        x = self._join(text, canvases)
        for number in range(len(self.layers)):
            kept = Kept()
            x, keys, values = self.run_layer(number, x, kept)
            self.results.append(_FromText(keys, values, kept, x))
        return self.model.norm(self._part(x, 1))

    def denoise_again(self, text: Tensor, canvases: Tensor) -> tuple[Tensor, Tensor]:
        """Denoise other canvases (B, C, D) after the same text; return the last hidden states of both, with gradients.

        Example: `text_hidden, hidden = run.denoise_again(model.embed(tokens), model.embed_canvas(noisy, signal))`.
        """
        x = self._join(text, canvases)
        for number, layer in enumerate(self.layers):
            x = _TogetherLayer.apply(self, number, x, *trained_weights(layer))
        hidden = self.model.norm(x)
        return self._part(hidden, 0), self._part(hidden, 1)

    def run_layer(self, number: int, x: Tensor, kept: Kept) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output (M, D) of a layer for x (M, D), and the keys and values (B, K, S, H) that canvases see."""
        layer = self.layers[number]
        queries, keys, values = _project(layer, x, self.ropes[number])
        text_keys, keys = _TextAndSeen.apply(keys, self.batch_size, self.sizes, self.num_seen)
        text_values, values = _TextAndSeen.apply(values, self.batch_size, self.sizes, self.num_seen)
        text_queries, canvas_queries = self._parts(queries)
        text = attend(text_queries, text_keys, text_values, self.text.masks[number])
        canvases = attend(canvas_queries, keys, values, self.canvases.masks[number])
        attended = _project_out(layer, torch.cat((text.flatten(0, 1), canvases.flatten(0, 1))), kept)
        scalars = (layer.causal_layer_scalar.expand(self.sizes[0]), layer.layer_scalar.expand(self.sizes[1]))
        return layer.feed_forward(x, attended, torch.cat(scalars)[:, None], kept), keys, values

    def run_canvases(self, number: int, x: Tensor, result: _FromText, kept: Kept) -> Tensor:
        """Return the output of a layer for canvases x (B·C, D), and replace the keys and values of the earlier ones."""
        layer = self.layers[number]
        cos, sin = (table[:, self.sizes[0] :] for table in self.ropes[number])
        queries, keys, values = (x.unflatten(0, (self.batch_size, -1)) for x in _project(layer, x, (cos, sin)))
        result.keys[:, :, self.num_seen :] = keys.transpose(1, 2)
        result.values[:, :, self.num_seen :] = values.transpose(1, 2)
        attended = attend(queries, result.keys, result.values, self.canvases.masks[number])
        scalar = layer.layer_scalar.repeat(x.shape[0])[:, None]
        return layer.feed_forward(x, _project_out(layer, attended.flatten(0, 1), kept), scalar, kept)

    def _join(self, text: Tensor, canvases: Tensor) -> Tensor:
        return torch.cat((text.flatten(0, 1), canvases.flatten(0, 1)))

    def _parts(self, x: Tensor) -> list[Tensor]:
        """Return the part (B, T, …) of the text and the part (B, C, …) of the canvases."""
        return [part.unflatten(0, (self.batch_size, -1)) for part in x.split(self.sizes)]

    def _part(self, x: Tensor, number: int) -> Tensor:
        return self._parts(x)[number]


def _project(layer: Layer, x: Tensor, rope: KeysValues) -> list[Tensor]:
    """Return queries, keys and values (M, heads, H) of x (M, D)."""
    queries, keys, values = layer.self_attn.project(layer.input_layernorm(x)[None], rope)
    return [heads.flatten(0, 1) for heads in (queries, keys.transpose(1, 2), values.transpose(1, 2))]


def _project_out(layer: Layer, heads: Tensor, kept: Kept) -> Tensor:
    """Return the output (M, D) of attention from its heads (M, N, H)."""
    project = layer.self_attn.o_proj
    if not isinstance(project, AdaptedLinear) or not layer.experts.keeps_output:
        return project(heads.flatten(1))
    attended: Tensor = project(heads.flatten(1), kept.attended)
    kept.attended = attended.detach()
    return attended


class _TextAndSeen(torch.autograd.Function):
    """Keys or values x (M, K, H) as those of the text (B, K, T, H), and those that canvases see (B, K, S, H).

    Defines its own gradient, because for each slice autograd would fill a whole tensor with zeros and add it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, batch_size: int, sizes: list[int], num_seen: int) -> tuple[Tensor, Tensor]:
        ctx.sizes, ctx.num_seen = sizes, num_seen
        text, canvases = (part.unflatten(0, (batch_size, -1)).transpose(1, 2) for part in x.split(sizes))
        return text, join(text[:, :, :num_seen], canvases)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_text: Tensor, of_seen: Tensor) -> tuple[Tensor, None, None, None]:
        batch_size, heads, _, dim = of_text.shape
        grad = of_text.new_empty(sum(ctx.sizes), heads, dim)
        text, canvases = (part.unflatten(0, (batch_size, -1)).transpose(1, 2) for part in grad.split(ctx.sizes))
        text.copy_(of_text)
        text[:, :, : ctx.num_seen] += of_seen[:, :, : ctx.num_seen]
        canvases.copy_(of_seen[:, :, ctx.num_seen :])
        return grad, None, None, None


class _TogetherLayer(torch.autograd.Function):
    """A layer whose forward runs canvases only, because that of the text is known. The backward runs both again."""

    @staticmethod
    def forward(ctx: Any, run: TogetherPass, number: int, x: Tensor, *trained: Tensor) -> Tensor:
        num_text, result, kept = run.sizes[0], run.results.pop(0), Kept()
        result.out[num_text:] = run.run_canvases(number, x[num_text:], result, kept)
        assert kept.groups is not None
        assert result.kept.groups is not None
        stored = result.kept.groups.experts, result.kept.mixed, result.kept.attended
        for old, new in zip(stored, (kept.groups.experts, kept.mixed, kept.attended), strict=True):
            if old is not None and new is not None:
                old[num_text:] = new
        ctx.run, ctx.number, ctx.autocast = run, number, same_autocast(x.device)
        ctx.save_for_backward(x, *stored)
        return result.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, experts, *outputs = ctx.saved_tensors
        layer = ctx.run.layers[ctx.number]
        x = x.detach().requires_grad_()
        kept = Kept(group_by_expert(experts, layer.experts.gate_up_proj.shape[0]), *outputs)
        with torch.enable_grad(), ctx.autocast():
            out, _, _ = ctx.run.run_layer(ctx.number, x, kept)
        return None, None, *torch.autograd.grad(out, [x, *trained_weights(layer)], grad, allow_unused=True)
