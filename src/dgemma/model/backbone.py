"""One layer of the stack, and the whole stack: the same weights in both modes, causal and bidirectional."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dgemma.model.attention import Attention, Mask
from dgemma.model.config import LayerShape, ModelConfig
from dgemma.model.experts import Experts, Kept, Router, router_input
from dgemma.model.fused import Kernels, fusible_with
from dgemma.model.layers import GatedMLP, RMSNorm, rms_norm

KeysValues = tuple[Tensor, Tensor]  # each (B, K, S, H)


class Layer(nn.Module):
    """Attention, then the sum of a dense MLP and routed experts. Each of the three has a norm before and after it.

    The output is multiplied by a scalar, which differs between causal and bidirectional mode.
    """

    layer_scalar: Tensor
    causal_layer_scalar: Tensor

    def __init__(self, config: ModelConfig, shape: LayerShape) -> None:
        super().__init__()
        norm = (config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, shape)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        self.router = Router(config)
        self.experts = Experts(config)
        self.input_layernorm = RMSNorm(*norm)
        self.post_attention_layernorm = RMSNorm(*norm)
        self.pre_feedforward_layernorm = RMSNorm(*norm)
        self.post_feedforward_layernorm = RMSNorm(*norm)
        self.post_feedforward_layernorm_1 = RMSNorm(*norm)
        self.post_feedforward_layernorm_2 = RMSNorm(*norm)
        self.pre_feedforward_layernorm_2 = RMSNorm(*norm)
        self.register_buffer("layer_scalar", torch.ones(1))
        self.register_buffer("causal_layer_scalar", torch.ones(1))

    def forward(
        self,
        x: Tensor,
        rope: KeysValues,
        past: KeysValues | None,
        mask: Mask | None,
        causal: bool,
        kept: Kept | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output (B, T, D) for x (B, T, D), and this layer's new keys and values (B, K, T, H)."""
        attended, keys, values = self.self_attn(self.input_layernorm(x), rope, past, mask)
        scalar = self.causal_layer_scalar if causal else self.layer_scalar
        out = self.feed_forward(x.flatten(0, 1), attended.flatten(0, 1), scalar, kept)
        return out.view_as(x), keys, values

    def feed_forward(self, x: Tensor, attended: Tensor, scalar: Tensor, kept: Kept | None = None) -> Tensor:
        """Return the output (M, D) for the input and the output of attention, (M, D) each. scalar: (1,) or (M, 1)."""
        residual, dense, experts, routed = after_attention(
            x,
            attended,
            self.post_attention_layernorm.weight,
            self.pre_feedforward_layernorm.weight,
            self.pre_feedforward_layernorm_2.weight,
            self.router.scale,
            self.input_layernorm.eps,
        )
        chosen = () if kept is None or kept.groups is None else (kept.groups.experts,)
        routing = self.router(residual, *chosen, x=routed)
        return after_experts(
            residual,
            self.mlp(dense),
            self.experts(experts, routing) if kept is None else self.experts(experts, routing, kept),
            self.post_feedforward_layernorm_1.weight,
            self.post_feedforward_layernorm_2.weight,
            self.post_feedforward_layernorm.weight,
            scalar,
            self.input_layernorm.eps,
        )


@fusible_with(kernels=Kernels("after_attention", (0, 1)))
def after_attention(
    x: Tensor,
    attended: Tensor,
    post_norm: Tensor,
    dense_norm: Tensor,
    experts_norm: Tensor,
    router_scale: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the residual and the inputs of the dense MLP, of the experts and of the router, (M, D) each."""
    residual = x + rms_norm(attended, post_norm, eps)
    dense, experts = (rms_norm(residual, norm, eps) for norm in (dense_norm, experts_norm))
    return residual, dense, experts, router_input(residual, router_scale, eps)


@fusible_with(kernels=Kernels("after_experts", (0, 1, 2)))
def after_experts(
    residual: Tensor,
    dense: Tensor,
    mixed: Tensor,
    dense_norm: Tensor,
    experts_norm: Tensor,
    post_norm: Tensor,
    scalar: Tensor,
    eps: float,
) -> Tensor:
    """Return the layer's output (M, D) from the residual and the outputs of the dense MLP and of the experts."""
    both = rms_norm(dense, dense_norm, eps) + rms_norm(mixed, experts_norm, eps)
    return (residual + rms_norm(both, post_norm, eps)) * scalar


def run_layers(
    layers: Sequence[Layer],
    x: Tensor,
    ropes: Sequence[KeysValues],
    pasts: Sequence[KeysValues | None],
    masks: Sequence[Mask | None],
    *,
    causal: bool,
    recompute: bool,
) -> tuple[Tensor, list[KeysValues]]:
    """Run x (B, T, D) through the stack; also return new keys and values. recompute: activation checkpointing."""
    new: list[KeysValues] = []
    if recompute and torch.is_grad_enabled() and not x.requires_grad:
        x = x.detach().requires_grad_()  # so that the gradients of all layers are compiled as the same functions
    for layer, rope, past, mask in zip(layers, ropes, pasts, masks, strict=True):
        if recompute and torch.is_grad_enabled():
            kept = Kept() if layer.experts.keeps_output else None
            x, keys, values = checkpoint(
                layer, x, rope, past, mask, causal, kept, use_reentrant=False, preserve_rng_state=False
            )  # layers draw no random numbers, so there is no RNG state to preserve
        else:
            x, keys, values = layer(x, rope, past, mask, causal)
        new.append((keys, values))
    return x, new
