"""The network as kernel launches over a cache's buffers: embedding, layers, head, soft embedding.

Nothing here reads the device, so all of it can be captured. The reference is `dgemma.DiffusionGemma`.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn.functional import embedding

from dgemma.model.config import ModelConfig
from dgemma_kernels.engine.cache import CacheBuffers
from dgemma_kernels.engine.graphs import side_stream
from dgemma_kernels.engine.precision import refuse
from dgemma_kernels.engine.products import in_slices
from dgemma_kernels.engine.weights import LayerWeights, ModelWeights
from dgemma_kernels.formats import FourBit, Quantized, format_of
from dgemma_kernels.formats.float8 import multiply, multiply_unscaled
from dgemma_kernels.formats.fourbit import OrderedRows
from dgemma_kernels.ops.attention.float8 import attention_float8, float8_factor, float8_obstacle
from dgemma_kernels.ops.attention.images import image_spans
from dgemma_kernels.ops.attention.kernel import KernelChoice, KernelName, attention, choose_kernel
from dgemma_kernels.ops.configs import dense_config, expert_config, gluon_obstacle, tensor_descriptors
from dgemma_kernels.ops.experts.kernel import fits_many, multiply_experts
from dgemma_kernels.ops.mlp.kernel import dense_mlp, geglu, geglu_float8
from dgemma_kernels.ops.norms.kernel import attention_residual, layer_tail, rms_norm, round_rows, scale_rows
from dgemma_kernels.ops.product.kernel import multiply_beside, multiply_row
from dgemma_kernels.ops.qkv.kernel import prepare_qkv
from dgemma_kernels.ops.router.kernel import route, sort_by_expert
from dgemma_kernels.ops.token.kernel import choose_token, score_token

logger = logging.getLogger("dgemma")

_Scales = tuple[Tensor, Tensor] | None  # of rows and columns

_BESIDE = range(129, 257)  # rows of the dense product next to the router; for more, library products fill the GPU
_MANY = 1024  # tokens of a forward, which fill the GPU with programs of `attention_float8`
_TILE = 64  # keys; a multiple of the number of keys in any tile of attention
_FULL_PART = 10 * _TILE  # keys; a canvas of 256 after a prefix of 1,024 tokens sees two equal parts


def choose_kernels(
    config: ModelConfig, like: Tensor, attention_kernel: KernelName, *, prompt_attention: bool
) -> set[KernelChoice]:
    """Return the choices of all layers, for weights with the dtype and device of `like`. Raises if a kernel cannot run.

    Example: `choose_kernels(config, model.embed_tokens.weight, "auto", prompt_attention=False)`.
    """
    choices = set()
    for shape in map(config.layer_shape, range(config.num_hidden_layers)):
        queries = like.new_empty(1, 1, config.num_attention_heads, shape.head_dim)
        keys = like.new_empty(1, shape.num_key_value_heads, 1, shape.head_dim)
        choices.add(choose_kernel(queries, keys, keys, attention_kernel, few_rows=False))
        obstacle = float8_obstacle(queries, keys, keys) if prompt_attention and not shape.is_sliding else None
        if obstacle is not None:
            raise refuse("prompt_attention", obstacle)
    return choices


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """A layer, with the choices that are the same in every forward."""

    weights: LayerWeights
    index: int
    is_end: bool  # the last layer
    next_norm: Tensor
    rounds_output: bool  # to float8, for the next layer's product
    rounds_attended: bool  # to float8, for the o product
    in_float8: bool  # attention of prompts
    key_factor: float  # of keys in float8
    # A full layer has no v_proj. So in the columns that are not rotated, keys would differ from values only by the
    # weight of the keys' norm. If the queries are multiplied by this weight instead, keys and values share these
    # columns, and this is the number of rotated pairs. None with `batch_invariant`, because the kernel for such keys
    # has no fixed parts.
    rotary_pairs: int | None
    part: int  # keys per fixed part of attention; 0 without fixed parts

    @property
    def kind(self) -> tuple[Any, ...]:
        """Layers of one kind launch the same kernels."""
        own = ("weights", "index", "next_norm")
        return self.weights.shape, *(getattr(self, f.name) for f in fields(self) if f.name not in own)

    def slot(self, buffers: CacheBuffers) -> Tensor:
        """Return the place of the first new token in the layer's buffer, (B,)."""
        return buffers.lengths if self.weights.shape.window is None else buffers.window_lengths


class _Tokens(NamedTuple):
    """The tokens of a forward, and how they see each other."""

    per_row: int
    canvas_len: int  # of a canvas after other tokens
    causal: bool
    # A forward of only a canvas needs no mask, unless tiles have fixed positions. A tile may then begin before the
    # first key that the canvas sees.
    masked: bool
    float8: bool  # full layers compute attention in float8
    is_row: bool  # there is one, which `multiply_row` multiplies
    spans: Tensor | None = None  # of images, for `attention`


class Forward:
    """The kernels in the order of the model's layers.

    With `batch_invariant`, the order of sums over a row does not depend on the other rows or on their number: library
    products have a fixed number of rows, parts of attention have fixed bounds, and tiles of other products add in one
    order. With `prompt_attention`, full layers compute the attention of prompts in float8, in forwards of many tokens.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        attention_kernel: KernelName = "auto",
        *,
        batch_invariant: bool = False,
        prompt_attention: bool = False,
    ) -> None:
        self.config, self.weights, self.attention_kernel = config, weights, attention_kernel
        self.batch_invariant, self.prompt_attention = batch_invariant, prompt_attention
        self._multiply = in_slices(multiply) if batch_invariant else multiply
        self._multiply_unscaled = in_slices(multiply_unscaled) if batch_invariant else multiply_unscaled
        table = weights.embedding
        choices = choose_kernels(config, table, attention_kernel, prompt_attention=prompt_attention)
        self._layers = [self._plan_layer(index) for index in range(len(weights.layers))]
        _log_choices(choices, weights, attention_kernel)
        # sqrt(hidden), rounded to the weights' dtype as in the published model
        self.embed_scale = float(torch.tensor(config.hidden_size**0.5, dtype=table.dtype))
        # The dense MLP runs next to the router and the experts, which wait for memory. Torch gives out 32 streams in
        # turn, so a new stream may be the current one. So two are made, and the MLP runs on one that is not current.
        self.sides = [torch.cuda.Stream(table.device) for _ in range(2)] if table.device.type == "cuda" else []
        self._dense_progress = torch.zeros(2, dtype=torch.int32, device=table.device)
        self._one = torch.ones((), device=table.device)  # passed instead of float8 scales that a kernel applies later

    def canvas(self, tokens: Tensor, signal: Tensor, buffers: CacheBuffers) -> Tensor:
        """Run the canvas (B, C), which sees prefix and canvas → (B·C, D). A signal (B, C, D) of zeros means none."""
        return self._stack(*self._embed_canvas(tokens, signal), buffers, causal=False)

    def read_and_canvas(self, tokens: Tensor, canvas: Tensor, signal: Tensor, buffers: CacheBuffers) -> Tensor:
        """Read tokens (B, T) and run canvas (B, C) after them, in one pass over the weights → the canvas's (B·C, D)."""
        parts = zip(self._embed(tokens), self._embed_canvas(canvas, signal), strict=True)
        shapes = [(*part.shape, self.config.hidden_size) for part in (tokens, canvas)]
        x, normed = (torch.cat((a.view(shapes[0]), b.view(shapes[1])), dim=1).flatten(0, 1) for a, b in parts)
        hidden = self._stack(x, normed, buffers, causal=True, canvas_len=canvas.shape[1])
        return hidden.view(canvas.shape[0], -1, hidden.shape[1])[:, tokens.shape[1] :].flatten(0, 1)

    def read(self, tokens: Tensor, buffers: CacheBuffers, *, last: bool, embedded: Tensor | None = None) -> Tensor:
        """Run tokens (B, T) causally into the tail of the buffers → the last hidden state (B·T, D) if `last`.

        With `embedded` (B, T, D), the embeddings of a prompt with images, `tokens` are the numbers of the images that
        tokens belong to, 0 for text.
        """
        if embedded is None:
            return self._stack(*self._embed(tokens), buffers, causal=True, last=last)
        x = embedded.flatten(0, 1).contiguous()
        normed = rms_norm(x, self.weights.layers[0].input_norm, self.config.rms_norm_eps)
        return self._stack(x, normed, buffers, causal=True, last=last, spans=image_spans(tokens))

    def embed_prompt(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of tokens (B, T), scaled: (B, T, D)."""
        return self._embed(tokens)[0].view(*tokens.shape, -1)

    def head(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits before the soft-cap: (R, D) → (R, V)."""
        head = self.weights.head
        if out is None and self._is_row(hidden):
            return multiply_row(hidden, head)
        return self._multiply(_as(head, hidden), head, out=out)

    def soft_embedding(self, weights: Tensor, scale: Tensor) -> Tensor:
        """Return the mean embedding under the probabilities weights * scale: (R, V), (R,) → (R, D)."""
        table = self.weights.soft_table
        if table is None and weights.dtype == torch.float16:  # a sum of unscaled weights could exceed its range
            return self._multiply(scale_rows(weights, scale), self.weights.embedding.T).mul_(self.embed_scale)
        if table is None:
            sums = self._multiply(weights, self.weights.embedding.T)
            return scale_rows(sums, scale, factor=self.embed_scale)
        probabilities = Quantized(values=weights, scale=scale, dtype=self.weights.embedding.dtype)
        # For 256 rows, the library's product of this depth is much faster with float32 sums and without scales.
        sums = torch.empty(probabilities.shape[0], table.shape[0], device=table.scale.device)
        self._multiply_unscaled(probabilities, table, self._one, out=sums)
        return scale_rows(sums, scale, table.scale, factor=self.embed_scale, dtype=probabilities.dtype)

    def _embed_canvas(self, canvas: Tensor, signal: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.weights
        normed = rms_norm(signal.flatten(0, 1), weights.signal_norm, self.config.rms_norm_eps)
        update = self._multiply(geglu(self._multiply(normed, weights.signal_gate_up)), weights.signal_down)
        return self._embed(canvas, update)

    def _embed(self, tokens: Tensor, update: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the scaled embeddings, plus an update and then normed if there is one, and their first norm."""
        x, eps = embedding(tokens.flatten(), self.weights.embedding) * self.embed_scale, self.config.rms_norm_eps
        if update is not None:
            x = rms_norm(x + update, None, eps)
        return x, rms_norm(x, self.weights.layers[0].input_norm, eps)

    def _stack(
        self,
        x: Tensor,
        normed: Tensor,
        buffers: CacheBuffers,
        *,
        causal: bool,
        canvas_len: int = 0,
        last: bool = True,
        spans: Tensor | None = None,
    ) -> Tensor:
        is_float8 = self.prompt_attention and causal and not canvas_len and x.shape[0] >= _MANY
        tokens = _Tokens(
            per_row=x.shape[0] // buffers.lengths.shape[0],
            canvas_len=canvas_len,
            causal=causal,
            masked=causal or self.batch_invariant,
            float8=is_float8 and spans is None,
            is_row=self._is_row(x),
            spans=spans,
        )
        inputs: Tensor | Quantized = _as(self.weights.layers[0].qkv, normed)
        scalars = self._scalars(tokens, x)
        for layer in self._layers:
            with buffers.layer(layer.index, tokens.per_row) as pair:
                queries = self._prepare_qkv(layer, inputs, tokens, buffers, pair)
                if layer.is_end and not last:  # the caller needs only this layer's keys and values
                    return x
                seen = self._attend(layer, queries, tokens, buffers, pair)
            attended, scales = self._unscaled(
                seen.view(x.shape[0], -1) if isinstance(seen, Tensor) else seen, layer.weights.o
            )
            x, inputs = self._feed_forward(layer, attended, scales, x, scalars[layer.index])
        assert isinstance(inputs, Tensor)  # the last layer does not round its output to float8
        return inputs

    def rehearsal(self, run: Callable[[], Any]) -> Callable[[], None]:
        """Return a function that calls `run` with only one layer of each kind, which launch the same kernels."""

        def rehearse() -> None:
            layers, kinds = self._layers, {layer.kind: layer for layer in reversed(self._layers)}
            self._layers = [layer for layer in layers if kinds[layer.kind] is layer]
            try:
                run()
            finally:
                self._layers = layers

        return rehearse

    def _plan_layer(self, index: int) -> "_Layer":
        """Make the choices that depend only on the layer."""
        layers = self.weights.layers
        weights, is_end = layers[index], index == len(layers) - 1
        shape, full, part = weights.shape, not weights.shape.is_sliding, 0
        if self.batch_invariant:  # in a sliding layer, the window and the canvas together are about three parts
            in_sight = None if shape.window is None else shape.window + self.config.canvas_length
            part = _FULL_PART if in_sight is None else triton.cdiv(in_sight, 3 * _TILE) * _TILE
        return _Layer(
            weights=weights,
            index=index,
            is_end=is_end,
            next_norm=self.weights.norm if is_end else layers[index + 1].input_norm,
            rounds_output=not is_end and isinstance(layers[index + 1].qkv, Quantized),
            rounds_attended=isinstance(weights.o, Quantized),
            in_float8=self.prompt_attention and full,
            key_factor=float8_factor(weights.key_norm) if self.prompt_attention and full else 1.0,
            rotary_pairs=shape.rotary_pairs if full and not self.batch_invariant else None,
            part=part,
        )

    def _scalars(self, tokens: "_Tokens", x: Tensor) -> list[Tensor]:
        """Return the scalar of each layer, or with a canvas after other tokens the scalars (M,) of its tokens."""
        layers = self.weights.layers
        scalars = [layer.causal_scalar if tokens.causal else layer.scalar for layer in layers]
        if not tokens.canvas_len:
            return scalars
        # In a few launches for all layers, (layers, M).
        at = torch.arange(x.shape[0], device=x.device) % tokens.per_row
        of_canvas = at >= tokens.per_row - tokens.canvas_len
        return [*torch.where(of_canvas, torch.stack([layer.scalar for layer in layers]), torch.stack(scalars))]

    def _prepare_qkv(
        self, layer: _Layer, inputs: Tensor | Quantized, tokens: _Tokens, buffers: CacheBuffers, pair: Tensor
    ) -> Tensor | Quantized:
        """Write keys and values of the tokens into the tail of the pair, and return the queries (B, T, N, H)."""
        weights = layer.weights
        projected, scales = self._unscaled(inputs, weights.qkv)
        return prepare_qkv(
            projected,
            weights.query_norm,
            weights.key_norm,
            weights.inv_freq,
            buffers.lengths,
            layer.slot(buffers),
            *pair,
            num_heads=self.config.num_attention_heads,
            eps=self.config.rms_norm_eps,
            scales=scales,
            rotary_pairs=layer.rotary_pairs,
            float8=layer.in_float8 and tokens.float8,
        )

    def _attend(
        self, layer: _Layer, queries: Tensor | Quantized, tokens: _Tokens, buffers: CacheBuffers, pair: Tensor
    ) -> Tensor | Quantized:
        """Return the mean values that the queries see, (B, T, N, H), in float8 if the next product is."""
        (keys, values), slot, float8 = pair, layer.slot(buffers), layer.rounds_attended and not tokens.is_row
        if isinstance(queries, Quantized):
            return attention_float8(queries, keys, values, slot, float8=float8, key_factor=layer.key_factor)
        return attention(
            queries,
            keys,
            values,
            slot,
            causal=tokens.masked,
            window=layer.weights.shape.window if tokens.masked else None,
            canvas_len=tokens.per_row if tokens.masked and not tokens.causal else tokens.canvas_len,
            keep=buffers.keep,
            kernel=self.attention_kernel,
            part=layer.part,
            position=buffers.lengths,
            float8=float8,
            rotary_pairs=layer.rotary_pairs,
            spans=tokens.spans,
        )

    def _product(self, x: Tensor | Quantized, weight: Tensor | Quantized) -> Tensor:
        """Return x @ weight.T."""
        return multiply_row(x, weight) if self._is_row(x) else self._multiply(x, weight)

    def _unscaled(self, x: Tensor | Quantized, weight: Tensor | Quantized) -> tuple[Tensor, _Scales]:
        """Return x @ weight.T, and the scales that it still lacks if it is float8."""
        if isinstance(x, Tensor) or isinstance(weight, Tensor) or self._is_row(x):
            return self._product(x, weight), None
        return self._multiply_unscaled(x, weight, self._one), (x.scale, weight.scale)

    def _is_row(self, x: Tensor | Quantized) -> bool:
        """Tell if `multiply_row` multiplies x; `batch_invariant` requires the library's order of sums."""
        return x.shape[0] == 1 and not self.batch_invariant

    def _feed_forward(
        self, plan: "_Layer", attended: Tensor, scales: _Scales, x: Tensor, scalar: Tensor
    ) -> tuple[Tensor, Tensor | Quantized]:
        """Return the residual stream and the next layer's input."""
        config, eps, layer = self.config, self.config.rms_norm_eps, plan.weights
        gate_up, down = layer.expert_gate_up, layer.expert_down
        tile = expert_config(x.shape[0], x.device, format_of(gate_up), one_order=self.batch_invariant)
        one_launch = tile.one_launch if isinstance(gate_up, FourBit) and gate_up.float8_rows else 0
        is_row = self._is_row(x)
        dense_in: Tensor | Quantized
        expert_in: Tensor | Quantized | OrderedRows
        if is_row:
            x, dense_in, expert_in, scores = score_token(
                attended, x, layer.residual_norms, layer.router, eps, float8=isinstance(gate_up, Quantized)
            )
            weights, tiles = choose_token(scores, layer.per_expert_scale, config.top_k_experts, tile.rows)
        else:
            x, dense_in, expert_in, router_in = attention_residual(
                attended,
                x,
                layer.residual_norms,
                eps,
                scales=scales,
                float8=isinstance(gate_up, Quantized),
                float8_dense=isinstance(layer.gate_up, Quantized),
                ordered=one_launch > 0,
            )
        with side_stream(x.device, self.sides) as join:
            dense_out, dense_scales = self._dense(layer, dense_in)
        if not is_row:
            weights, chosen, counts = route(
                router_in, layer.router, layer.per_expert_scale, config.top_k_experts, one_order=self.batch_invariant
            )
            tiles = sort_by_expert(chosen, counts, one_launch or tile.rows)
        rows = multiply_experts(expert_in, gate_up, down, weights, tiles, config=tile)
        join()
        return layer_tail(
            x,
            dense_out,
            rows,
            layer.tail_norms,
            scalar,
            plan.next_norm,
            eps,
            scales=dense_scales,
            float8=plan.rounds_output,
            alone=is_row,
        )

    def _dense(self, layer: LayerWeights, dense_in: Tensor | Quantized) -> tuple[Tensor, _Scales]:
        """Return the dense MLP, and the scales that it still lacks if it is float8."""
        if isinstance(dense_in, Tensor):
            if self._is_row(dense_in):
                # `early=False`, so that the router's few programs find a free multiprocessor first.
                hidden_row = geglu(multiply_row(dense_in, layer.gate_up, early=False))
                return multiply_row(hidden_row, layer.down, early=False), None
            assert isinstance(layer.gate_up, Tensor)
            assert isinstance(layer.down, Tensor)
            tiles = dense_config(
                dense_in.shape[0], dense_in.device, format_of(dense_in), one_order=self.batch_invariant
            )
            if tiles is None:
                return self._multiply(geglu(self._multiply(dense_in, layer.gate_up)), layer.down), None
            return dense_mlp(dense_in, layer.gate_up, layer.down, self._dense_progress, config=tiles), None
        assert isinstance(layer.gate_up, Quantized)
        assert isinstance(layer.down, Quantized)
        # `batch_invariant` requires one order of sums for any number of rows.
        if dense_in.shape[0] in _BESIDE and tensor_descriptors(dense_in.scale.device) and not self.batch_invariant:
            gate_up = multiply_beside(dense_in, layer.gate_up)
        else:
            gate_up = self._multiply_unscaled(dense_in, layer.gate_up, self._one)
        hidden = geglu_float8(gate_up, dense_in.scale, layer.gate_up.scale)
        return self._multiply_unscaled(hidden, layer.down, self._one), (hidden.scale, layer.down.scale)


def _as(weight: Tensor | Quantized, rows: Tensor) -> Tensor | Quantized:
    """Return the rows in the form that multiplies this weight."""
    return round_rows(rows) if isinstance(weight, Quantized) else rows


def _log_choices(choices: set[KernelChoice], weights: ModelWeights, attention_kernel: KernelName) -> None:
    """Warn if another version of Triton would be faster. Log other reasons why attention runs no Hopper kernel."""
    untested = gluon_obstacle()
    by_version = {choice for choice in choices if untested is not None and untested in choice.reason}
    if untested is not None:
        # An explicit "hopper" runs, but without the kernel that computes the scores of full layers only once.
        slower = ["attention"] if by_version or attention_kernel == "hopper" else []
        layer = weights.layers[0]
        if all(fits_many(proj, *layer.expert_down.shape[1:]) for proj in (layer.expert_gate_up, layer.expert_down)):
            slower.append("experts for long prompts")
        if slower:
            parts = " and ".join(slower)
            logger.warning("accelerate runs slower kernels of %s. The faster ones need %s.", parts, untested)
    if attention_kernel == "auto":
        for choice in sorted(choices - by_version):
            if choice.kernel == "triton":
                logger.info("accelerate runs the Triton kernel of attention: %s.", choice.reason)
