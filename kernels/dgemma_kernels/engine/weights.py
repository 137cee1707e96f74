"""A model's weights for the kernels: its tensors, with q, k, v and gate, up fused into one matrix each.

Nothing is stored twice: the model's parameters become views of the fused tensors and keep working. Packed and float8
experts are new tensors.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dgemma.model.backbone import Layer
from dgemma.model.config import LayerShape
from dgemma.model.diffusion import DiffusionGemma
from dgemma.model.experts import ReleasedExperts, require_experts
from dgemma.model.layers import GatedMLP
from dgemma.model.quantized import QuantizedWeight, Weight
from dgemma_kernels.formats import ENCODERS, Encoder, ExpertWeights, Quantized


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One layer; matrices (out, in)."""

    shape: LayerShape
    qkv: Tensor  # without v in full layers
    o: Tensor
    query_norm: Tensor
    key_norm: Tensor
    inv_freq: Tensor  # (H / 2,) float32
    input_norm: Tensor
    residual_norms: tuple[Tensor, Tensor, Tensor, Tensor]  # post-attention, dense, expert, router scale
    router: Tensor
    per_expert_scale: Tensor
    gate_up: Tensor  # of the dense MLP
    down: Tensor
    expert_gate_up: ExpertWeights
    expert_down: ExpertWeights
    tail_norms: tuple[Tensor, Tensor, Tensor]  # dense, expert, both
    scalar: Tensor
    causal_scalar: Tensor

    def __getstate__(self) -> dict[str, Any]:
        # Pickle cannot store float8.
        return {name: _view_float8(value, torch.uint8) for name, value in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({name: _view_float8(value, torch.float8_e4m3fn) for name, value in state.items()})


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The whole model."""

    embedding: Tensor  # (V, D)
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    signal_norm: Tensor  # of self-conditioning
    signal_gate_up: Tensor
    signal_down: Tensor


def take_weights(model: DiffusionGemma, format: str = "bf16", *, release: bool = False) -> Weights:
    """Fuse the model's projections in place, a layer at a time, and return its tensors.

    Experts are encoded by `formats.ENCODERS[format]`. With `release` each layer's experts leave the model once encoded.

    Example: `take_weights(model).layers[0].qkv.shape` is `((16 + 2 * 8) * 256, 2816)`.
    """
    config = model.config
    require_experts(model, "accelerate")
    layers = []
    for index, layer in enumerate(model.layers):
        try:
            layers.append(_take_layer(layer, config.layer_shape(index), *ENCODERS[format]))  # type: ignore[arg-type]
        except ValueError as error:
            if release and layers:
                raise ValueError(f"{error} Load the model again: release has removed its first experts.") from None
            raise
        if release:
            layer.experts = ReleasedExperts()
    mixer = model.self_conditioning
    return Weights(
        embedding=model.embed_tokens.weight.detach(),
        layers=tuple(layers),
        norm=model.norm.weight.detach(),
        signal_norm=mixer.pre_norm.weight.detach(),
        signal_gate_up=_fuse_mlp(mixer),
        signal_down=mixer.down_proj.weight.detach(),
    )


def _take_layer(layer: Layer, shape: LayerShape, encode_gate_up: Encoder, encode_down: Encoder) -> LayerWeights:
    attention, device = layer.self_attn, layer.layer_scalar.device
    projections = [attention.q_proj, attention.k_proj]
    if attention.v_proj is not None:
        projections.append(attention.v_proj)
    pair = torch.arange(shape.head_dim // 2, device=device, dtype=torch.float32)
    frequencies = shape.rope_theta ** (-2.0 * pair / shape.head_dim)
    return LayerWeights(
        shape=shape,
        qkv=_fuse(*projections),
        o=attention.o_proj.weight.detach(),
        query_norm=attention.q_norm.weight.detach(),
        key_norm=attention.k_norm.weight.detach(),
        inv_freq=torch.where(pair < shape.rotary_pairs, frequencies, 0.0),
        input_norm=layer.input_layernorm.weight.detach(),
        residual_norms=(
            layer.post_attention_layernorm.weight.detach(),
            layer.pre_feedforward_layernorm.weight.detach(),
            layer.pre_feedforward_layernorm_2.weight.detach(),
            layer.router.scale.detach(),
        ),
        router=layer.router.proj.weight.detach(),
        per_expert_scale=layer.router.per_expert_scale.detach(),
        gate_up=_fuse_mlp(layer.mlp),
        down=layer.mlp.down_proj.weight.detach(),
        expert_gate_up=encode_gate_up(_plain(layer.experts.gate_up_proj)),
        expert_down=encode_down(_plain(layer.experts.down_proj)),
        tail_norms=(
            layer.post_feedforward_layernorm_1.weight.detach(),
            layer.post_feedforward_layernorm_2.weight.detach(),
            layer.post_feedforward_layernorm.weight.detach(),
        ),
        scalar=layer.layer_scalar,
        causal_scalar=layer.causal_layer_scalar,
    )


def _plain(weight: Weight) -> Tensor:
    if isinstance(weight, QuantizedWeight):
        raise ValueError(
            f"accelerate model must have plain experts, got {weight.format}. Load an unquantised checkpoint."
        )
    return weight.detach()


def _view_float8(held: Any, dtype: torch.dtype) -> Any:
    return replace(held, values=held.values.view(dtype)) if isinstance(held, Quantized) else held


def _fuse_mlp(mlp: GatedMLP) -> Tensor:
    return _fuse(mlp.gate_proj, mlp.up_proj)


def _fuse(*linears: nn.Linear) -> Tensor:
    """Fuse the weights of several linears into one matrix; they become views of it."""
    fused = torch.cat([linear.weight.detach() for linear in linears])
    sizes = [linear.weight.shape[0] for linear in linears]
    for linear, part in zip(linears, fused.split(sizes), strict=True):
        linear.weight.data = part
    return fused
