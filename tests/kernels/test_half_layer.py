"""All kernels of a layer's second half in the order the engine runs them, against transformers' layer."""

import torch

from dgemma_kernels.ops import configs
from dgemma_kernels.ops.experts import kernel as experts
from dgemma_kernels.ops.mlp import kernel as mlp
from dgemma_kernels.ops.norms import kernel as norms
from dgemma_kernels.ops.router import kernel as router


class Given(torch.nn.Module):
    """An attention module that returns its input."""

    def __init__(self, output: torch.Tensor) -> None:
        super().__init__()
        self.output = output

    def forward(self, **_: object) -> tuple[torch.Tensor, None]:
        return self.output, None


def test_the_half_layer_equals_transformers_layer(device):
    from transformers.models.diffusion_gemma.configuration_diffusion_gemma import DiffusionGemmaTextConfig
    from transformers.models.diffusion_gemma.modeling_diffusion_gemma import DiffusionGemmaEncoderTextLayer

    config = DiffusionGemmaTextConfig(
        hidden_size=72,
        intermediate_size=88,
        num_experts=12,
        top_k_experts=3,
        moe_intermediate_size=40,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_hidden_layers=1,
        layer_types=["sliding_attention"],
    )
    config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(0)
    theirs = DiffusionGemmaEncoderTextLayer(config, 0)
    for parameter in theirs.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5 + 0.1
    theirs.layer_scalar.fill_(0.7)
    attention, residual = (torch.randn(1, 37, 72, generator=generator).to(device) for _ in range(2))
    theirs.self_attn = Given(attention)
    theirs.to(device).requires_grad_(False)
    want = theirs(residual)[0]
    following = theirs.input_layernorm(want)

    eps, mlps, routed = config.rms_norm_eps, theirs.mlp, theirs.experts
    before = theirs.pre_feedforward_layernorm, theirs.pre_feedforward_layernorm_2
    after = theirs.post_feedforward_layernorm_1, theirs.post_feedforward_layernorm_2, theirs.post_feedforward_layernorm
    weights = [norm.weight for norm in (theirs.post_attention_layernorm, *before)]
    x, dense_in, expert_in, router_in = norms.attention_residual(
        attention[0], residual[0], [*weights, theirs.router.scale], eps
    )
    weights, index, counts = router.route(router_in, theirs.router.proj.weight, theirs.router.per_expert_scale, 3)
    tiles = router.sort_by_expert(index, counts, configs.expert_config(37, device).rows)
    gate_up = torch.cat((mlps.gate_proj.weight, mlps.up_proj.weight))
    dense = mlp.geglu(dense_in @ gate_up.T) @ mlps.down_proj.weight.T
    rows = experts.multiply_experts(expert_in, routed.gate_up_proj, routed.down_proj, weights, tiles)
    tail = [norm.weight for norm in after], theirs.layer_scalar, theirs.input_layernorm.weight
    got, normed = norms.layer_tail(x, dense, rows, *tail, eps)
    # float32 throughout; only the order of sums differs.
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(normed, following, rtol=1e-5, atol=1e-5)
