"""One layer of the stack: the same weights in both modes, causal and bidirectional."""

import torch
from torch import Tensor, nn

from dgemma.doors import replaceable
from dgemma.model.attention import Attention, Mask
from dgemma.model.config import LayerShape, ModelConfig
from dgemma.model.experts import Experts, Router
from dgemma.model.layers import GatedMLP, RMSNorm

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
        # Published names: _1 belongs to the dense MLP, _2 to the experts, and the one without a number to their sum.
        self.post_feedforward_layernorm_1 = RMSNorm(*norm)
        self.post_feedforward_layernorm_2 = RMSNorm(*norm)
        self.pre_feedforward_layernorm_2 = RMSNorm(*norm)
        self.register_buffer("layer_scalar", torch.ones(1))
        self.register_buffer("causal_layer_scalar", torch.ones(1))

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], past: KeysValues | None, mask: Mask | None, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output (B, T, D) for x (B, T, D), and this layer's new keys and values (B, K, T, H)."""
        attended, keys, values = self.self_attn(self.input_layernorm(x), rope, past, mask)
        scalar = self.causal_layer_scalar if causal else self.layer_scalar
        out = self.feed_forward(x.flatten(0, 1), attended.flatten(0, 1), scalar)
        return out.view_as(x), keys, values

    @replaceable
    def feed_forward(self, x: Tensor, attended: Tensor, scalar: Tensor) -> Tensor:
        """Return the output (M, D) for the input and the output of attention, (M, D) each. scalar: (1,) or (M, 1)."""
        residual = x + self.post_attention_layernorm(attended)
        dense = self.mlp(self.pre_feedforward_layernorm(residual))
        mixed = self.experts(self.pre_feedforward_layernorm_2(residual), self.router(residual))
        both = self.post_feedforward_layernorm_1(dense) + self.post_feedforward_layernorm_2(mixed)
        out: Tensor = (residual + self.post_feedforward_layernorm(both)) * scalar
        return out
