"""The mixture-of-experts half of a layer at the published sizes, from one token to sixteen canvases."""

from unittest.mock import patch

import torch
from compile_inputs import DENSE, A, D, E, F, empty

from dgemma_kernels.ops import configs, grouped
from dgemma_kernels.ops.experts import kernel as experts
from dgemma_kernels.ops.mlp import kernel as mlp
from dgemma_kernels.ops.norms import kernel as norms
from dgemma_kernels.ops.router import kernel as router

WGMMA = {
    *("_partial_scores_kernel", "_expert_gate_up_kernel", "_expert_down_kernel", "_dense_mlp_kernel"),
    *("_multiply_tokens_hopper_kernel", "_experts_many_kernel"),
}


@patch.object(experts, "is_hopper", lambda device: True)
def run_routed_experts(tokens: int, config: configs.ExpertConfig | None = None) -> None:
    _, index, counts = router.route(empty(tokens, D), empty(E, D), empty(E), A)
    config = config or configs.expert_config(tokens, None)
    tiles, weights = router.sort_by_expert(index, counts, config.rows), empty(tokens, A, dtype=torch.float32)
    experts.multiply_experts(empty(tokens, D), empty(E, 2 * F, D), empty(E, D, F), weights, tiles, config=config)
    if tokens == 256:  # the engine always overlaps
        experts.expert_down(empty(tokens * A, F), empty(E, D, F), weights, tiles, config=config)


def run_dense(tokens: int) -> None:
    mlp.dense_mlp(empty(tokens, D), empty(2 * DENSE, D), empty(D, DENSE), empty(2, dtype=torch.int32))


def run_training(num_tokens: int) -> None:
    x, order = empty(num_tokens, D), torch.empty(num_tokens * A, dtype=torch.int64)
    narrow, tiles = empty(num_tokens * A, 8), torch.empty(1, 3, dtype=torch.int32)
    gate_up, down, wide, low = empty(E, 2 * F, D), empty(E, D, F), empty(E, 2 * F, 8), empty(E, 8, F)
    for gated in (False, True):
        grouped.multiply(x, gate_up, narrow, wide, tiles, order, gated=gated)
    grouped.multiply(x, down.mT, narrow, low.mT, tiles, order)
    grouped.multiply(empty(num_tokens * A, F), down, narrow, empty(E, D, 8), tiles)
    grouped.multiply(empty(num_tokens * A, 2 * F), gate_up.mT, narrow, empty(E, 8, D).mT, tiles)


def run_norms() -> None:
    row, vector = empty(256, D), empty(D)
    norms.rms_norm(row, vector, 1e-6)
    norms.rms_norm(row, None, 1e-6)
    norms.scale_rows(row, empty(256, dtype=torch.float32), factor=53.0)
    for rows in (row, empty(1024, D)):
        norms.attention_residual(rows, rows, [vector] * 4, 1e-6)
        norms.layer_tail(rows, rows, empty(len(rows), A, D), [vector] * 3, empty(1), vector, 1e-6)
    mlp.geglu(empty(256, 2 * DENSE))


CALLS = {
    **{
        f"router and experts, {tokens} tokens": lambda tokens=tokens: run_routed_experts(tokens)
        for tokens in (1, 16, 256, 512, 1024, 1536, 2048, 4096)
    },
    "experts, 4096 tokens, without Gluon": lambda: run_routed_experts(4096, configs.EXPERTS["bf16"]["NVIDIA H200"][-1]),
    "dense MLP, whole blocks of tokens": lambda: run_dense(256),
    "dense MLP, ragged": lambda: run_dense(500),
    "norms": run_norms,
}
if configs.gluon_obstacle() is None:
    CALLS["tokens with adapters, tall"] = lambda: run_training(256)
    CALLS["tokens with adapters, wide"] = lambda: run_training(4096)
