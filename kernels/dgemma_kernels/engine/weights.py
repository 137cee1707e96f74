"""A model's weights for the kernels: its tensors, with q, k and v joined into one matrix, and gate and up into another.

Plain weights are not stored twice: the model's parameters become views of the fused tensors and keep working. Weights
in another format are new tensors.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from dgemma.model.backbone import Layer
from dgemma.model.config import LayerShape
from dgemma.model.diffusion import DiffusionGemma
from dgemma.model.released import ReleasedExperts, require_experts
from dgemma.quantization.weights import Float8Weight, QuantizedLinear, QuantizedWeight, Weight
from dgemma_kernels.engine.precision import refuse
from dgemma_kernels.formats import ENCODERS, ExpertWeights, FourBit, Quantized
from dgemma_kernels.formats.float8 import quantize
from dgemma_kernels.ops.experts.kernel import float8_obstacle
from dgemma_kernels.ops.norms.kernel import ResidualNorms, TailNorms


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One layer; matrices (out, in)."""

    shape: LayerShape
    qkv: Tensor | Quantized  # without v in full layers
    o: Tensor | Quantized
    query_norm: Tensor
    key_norm: Tensor
    inv_freq: Tensor  # (H / 2,) float32
    input_norm: Tensor
    residual_norms: ResidualNorms
    router: Tensor
    per_expert_scale: Tensor
    gate_up: Tensor | Quantized  # of the dense MLP
    down: Tensor | Quantized
    expert_gate_up: ExpertWeights
    expert_down: ExpertWeights
    tail_norms: TailNorms
    scalar: Tensor
    causal_scalar: Tensor


@dataclass(frozen=True, kw_only=True)
class ModelWeights:
    """The whole model."""

    embedding: Tensor  # (V, D)
    head: Tensor | Quantized  # the embedding, or its rows in float8
    soft_table: Quantized | None  # the embedding's columns in float8, (D, V), for a soft embedding in float8
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    signal_norm: Tensor  # of self-conditioning
    signal_gate_up: Tensor
    signal_down: Tensor


_MODULES = {"attention": "self_attn", "dense": "mlp"}  # modules of a layer, by names in `precision.PARTS`


def stored_format(model: DiffusionGemma) -> str:
    """Return the format of the model's experts; for plain experts "bf16", whatever their dtype.

    Example: `stored_format(model)` is "int4" for a checkpoint with int4 experts.
    """
    experts: Any = model.layers[0].experts
    weight = getattr(experts, "gate_up_proj", None)  # None if released
    return weight.format if isinstance(weight, QuantizedWeight) else "bf16"


def take_weights(
    model: DiffusionGemma, format: str = "bf16", *, float8: Collection[str] = (), release: bool = False
) -> ModelWeights:
    """Fuse the model's projections in place, a layer at a time, and return its tensors.

    Experts are encoded by `formats.ENCODERS[format]`. `float8` has names of `precision.PARTS`, which are rounded
    to float8. With `release`, the original weights of a layer leave the model once they are converted.

    Example: `take_weights(model).layers[0].qkv.shape` is `((16 + 2 * 8) * 256, 2816)`.
    """
    config = model.config
    require_experts(model, "accelerate")
    mixer, embedding = model.self_conditioning, model.embed_tokens.weight.detach()
    head = _for_library(quantize(embedding), "head") if "head" in float8 else embedding
    soft_table = _for_library(quantize(embedding.T), "soft_embedding") if "soft_embedding" in float8 else None
    layers = []
    for index, layer in enumerate(model.layers):
        try:
            layers.append(_take_layer(layer, config.layer_shape(index), format, float8, model.dtype))  # type: ignore[arg-type]
        except ValueError as error:
            if release and layers:
                raise ValueError(
                    f"{error} Load the model again: release has removed the experts of its first layers."
                ) from None
            raise
        if release:
            for name in ("experts", *(_MODULES[part] for part in float8 if part in _MODULES)):
                setattr(layer, name, ReleasedExperts())
    return ModelWeights(
        embedding=embedding,
        head=head,
        soft_table=soft_table,
        layers=tuple(layers),
        norm=model.norm.weight.detach(),
        signal_norm=mixer.pre_norm.weight.detach(),
        signal_gate_up=fuse([mixer.gate_proj, mixer.up_proj], model.dtype),
        signal_down=_plain(mixer.down_proj, model.dtype),
    )


def _take_layer(
    layer: Layer, shape: LayerShape, format: str, float8: Collection[str], dtype: torch.dtype
) -> LayerWeights:
    join_attention = partial(_fuse_float8, part="attention") if "attention" in float8 else fuse
    join_dense = partial(_fuse_float8, part="dense") if "dense" in float8 else fuse
    attention, device = layer.self_attn, layer.layer_scalar.device
    projections = [attention.q_proj, attention.k_proj]
    if attention.v_proj is not None:
        projections.append(attention.v_proj)
    pair = torch.arange(shape.head_dim // 2, device=device, dtype=torch.float32)
    frequencies = shape.rope_theta ** (-2.0 * pair / shape.head_dim)
    gate_up = ENCODERS[format](_detached(layer.experts.gate_up_proj), dtype, gated=True)
    down = ENCODERS[format](_detached(layer.experts.down_proj), dtype, gated=False)
    if "experts" in float8:
        if obstacle := float8_obstacle(gate_up, down):
            raise refuse("experts", obstacle)
        assert isinstance(gate_up, FourBit)
        gate_up = replace(gate_up, float8_rows=True)  # for `multiply_experts`
    return LayerWeights(
        shape=shape,
        qkv=join_attention(projections, dtype),
        o=join_attention([attention.o_proj], dtype),
        query_norm=attention.q_norm.weight.detach(),
        key_norm=attention.k_norm.weight.detach(),
        inv_freq=torch.where(pair < shape.rotary_pairs, frequencies, 0.0),
        input_norm=layer.input_layernorm.weight.detach(),
        residual_norms=ResidualNorms(
            layer.post_attention_layernorm.weight.detach(),
            layer.pre_feedforward_layernorm.weight.detach(),
            layer.pre_feedforward_layernorm_2.weight.detach(),
            layer.router.scale.detach(),
        ),
        router=_plain(layer.router.proj, dtype),
        per_expert_scale=layer.router.per_expert_scale.detach(),
        gate_up=join_dense([layer.mlp.gate_proj, layer.mlp.up_proj], dtype),
        down=join_dense([layer.mlp.down_proj], dtype),
        expert_gate_up=gate_up,
        expert_down=down,
        tail_norms=TailNorms(
            layer.post_feedforward_layernorm_1.weight.detach(),
            layer.post_feedforward_layernorm_2.weight.detach(),
            layer.post_feedforward_layernorm.weight.detach(),
        ),
        scalar=layer.layer_scalar,
        causal_scalar=layer.causal_layer_scalar,
    )


def _detached(weight: Weight) -> Weight:
    return weight.detach() if isinstance(weight, Tensor) else weight


def _plain(linear: nn.Linear | QuantizedLinear, dtype: torch.dtype) -> Tensor:
    """Return the weight of a linear layer, decoded if it is quantised."""
    weight: Weight = linear.weight
    return weight.detach() if isinstance(weight, Tensor) else weight.decode(dtype)


def fuse(linears: Sequence[nn.Linear | QuantizedLinear], dtype: torch.dtype) -> Tensor:
    """Fuse the weights of several linears into one matrix. Plain weights become views of it.

    If an earlier call has fused them, its matrix is returned, so that a second call of `accelerate` takes no more
    memory.

    Example: `fuse([mlp.gate_proj, mlp.up_proj], torch.bfloat16)`.
    """
    weights = [_plain(linear, dtype) for linear in linears]
    if len(weights) == 1:
        return weights[0]
    sizes = [len(weight) for weight in weights]
    if _are_adjacent(weights):
        return weights[0].as_strided((sum(sizes), weights[0].shape[1]), weights[0].stride())
    fused = torch.cat(weights)
    for linear, part in zip(linears, fused.split(sizes), strict=True):
        if isinstance(linear.weight, Tensor):
            linear.weight.data = part
    return fused


def _are_adjacent(weights: Sequence[Tensor]) -> bool:
    """Return True if contiguous matrices follow each other in one storage."""
    one_storage = len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    follow = all(left.data_ptr() + left.nbytes == right.data_ptr() for left, right in pairwise(weights))
    return one_storage and follow and all(weight.is_contiguous() for weight in weights)


def _fuse_float8(linears: Sequence[nn.Linear | QuantizedLinear], dtype: torch.dtype, part: str) -> Quantized:
    """Fuse the weights of several linears in float8. Those of float8 linears keep their values and scales."""
    pieces: list[Float8Weight | Quantized] = []
    for linear in linears:
        weight: Weight = linear.weight
        pieces.append(weight if isinstance(weight, Float8Weight) else quantize(_plain(linear, dtype)))
    values, scale = torch.cat([piece.values for piece in pieces]), torch.cat([piece.scale for piece in pieces])
    return _for_library(Quantized(values=values, scale=scale, dtype=dtype), part)


def _for_library(weight: Quantized, part: str) -> Quantized:
    """Return the weight if the library's float8 product accepts its shape, (N, K)."""
    if any(size % 16 for size in weight.shape):
        raise refuse(part, f"weights with rows and columns in multiples of 16, got {tuple(weight.shape)}")
    return weight
