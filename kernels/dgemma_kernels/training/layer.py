"""The parts of a layer around its products in training: norms, heads and the residual stream.

Reference: `Attention.project` and `Layer.feed_forward`.
"""

import torch
from torch import Tensor

from dgemma.doors import plain
from dgemma.model import layers
from dgemma.model.attention import Attention
from dgemma.model.backbone import KeysValues, Layer
from dgemma.model.layers import rms_norm
from dgemma.model.rotary import rotate
from dgemma.train.lora import AdaptedExperts
from dgemma_kernels.ops.residual import reference
from dgemma_kernels.training import adapted_experts
from dgemma_kernels.training.adapted_experts import Kept
from dgemma_kernels.training.experts import known
from dgemma_kernels.training.fused import Kernels, fused

_rms_norm = fused(plain(layers.rms_norm), kernels=Kernels("rms_norm", (0,)))
_gated_gelu = fused(plain(layers.gated_gelu), num_joined=2)
_after_attention = fused(reference.after_attention, kernels=Kernels("after_attention", (0, 1)))
_after_experts = fused(reference.after_experts, kernels=Kernels("after_experts", (0, 1, 2)))


def fast_rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Norm all rows of x (..., D) by one kernel. A compiled function contains the plain norm."""
    if torch.compiler.is_compiling():
        return plain(layers.rms_norm)(x, weight, eps)
    return _rms_norm(x.flatten(0, -2), weight, eps).view_as(x)


def gated_gelu(gate: Tensor, up: Tensor) -> Tensor:
    """Return the gated values (..., F) by one kernel."""
    if torch.compiler.is_compiling():
        return plain(layers.gated_gelu)(gate, up)
    return _gated_gelu(gate.flatten(0, -2), up.flatten(0, -2)).view_as(gate)


def project_heads(attention: Attention, x: Tensor, rope: KeysValues) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values; one function norms and rotates all heads."""
    tokens, heads = x.shape[:2], (-1, attention.head_dim)
    raw_queries, raw_keys, *others = (out.unflatten(-1, heads).flatten(0, 1) for out in attention.raw_heads(x))
    raw_values = others[0] if others else None
    norms = attention.q_norm.weight, attention.k_norm.weight
    cos, sin = (table.expand(*tokens, -1, -1).flatten(0, 1) for table in rope)
    normed = _norm_heads(raw_queries, raw_keys, raw_values, *norms, cos, sin, attention.eps)
    queries, keys, values = (each.unflatten(0, tokens) for each in normed)
    return queries, keys.transpose(1, 2), values.transpose(1, 2)


def _norm_heads_plainly(
    queries: Tensor,
    keys: Tensor,
    values: Tensor | None,
    query_norm: Tensor,
    key_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm each head of queries (M, N, H), keys and values (M, K, H); rotate queries and keys.

    values: None if they are the keys.
    """
    queries = rotate(rms_norm(queries, query_norm, eps), cos, sin)
    rotated = rotate(rms_norm(keys, key_norm, eps), cos, sin)
    return queries, rotated, rms_norm(keys if values is None else values, None, eps)


_norm_heads = fused(_norm_heads_plainly, num_joined=3)


def feed_forward(layer: Layer, x: Tensor, attended: Tensor, scalar: Tensor, kept: Kept | None = None) -> Tensor:
    """Return the output (M, D) of a layer; `kept` has results of an earlier pass, or gets those of this one."""
    if torch.compiler.is_compiling():
        return plain(Layer.feed_forward)(layer, x, attended, scalar)
    kept, eps = kept or Kept(), layer.input_layernorm.eps
    residual, dense, inputs, routed = _after_attention(
        x,
        attended,
        layer.post_attention_layernorm.weight,
        layer.pre_feedforward_layernorm.weight,
        layer.pre_feedforward_layernorm_2.weight,
        layer.router.scale,
        eps,
    )
    with known(routed, kept.experts):
        routing = layer.router(residual)
    kept.experts = routing.experts
    if isinstance(layer.experts, AdaptedExperts):
        mixed = adapted_experts.forward(layer.experts, inputs, routing, kept)
    else:
        mixed = layer.experts(inputs, routing)
    return _after_experts(
        residual,
        layer.mlp(dense),
        mixed,
        layer.post_feedforward_layernorm_1.weight,
        layer.post_feedforward_layernorm_2.weight,
        layer.post_feedforward_layernorm.weight,
        scalar,
        eps,
    )
