"""The experts in float8 at the published sizes, on Hopper and on GPUs without measured tiles."""

import torch
import triton
from compile_inputs import DENSE, HEADS, A, D, E, F, calls_by_tokens, empty, empty_float8, run_experts

from dgemma_kernels.ops import configs
from dgemma_kernels.ops.attention.parts import combine_parts
from dgemma_kernels.ops.mlp import kernel as mlp
from dgemma_kernels.ops.norms import kernel as norms
from dgemma_kernels.ops.product.kernel import multiply_beside
from dgemma_kernels.ops.qkv.kernel import prepare_qkv

WGMMA = {"_expert_gate_up_kernel", "_expert_down_kernel", "_experts_many_kernel", "_multiply_tiles_kernel"}


def run_float8(gpu: str, tokens: int, config: configs.ExpertConfig | None = None) -> None:
    weights = empty_float8(E, 2 * F, D), empty_float8(E, D, F)
    run_experts(gpu, "fp8", empty_float8(tokens, D), *weights, config=config)


def run_norms() -> None:
    vector = empty(D)
    for num_rows in (256, 1024):
        row, scales = empty(num_rows, D), (torch.empty(num_rows), torch.empty(D))
        norms.attention_residual(row, row, [vector] * 4, 1e-6, float8=True)
        norms.attention_residual(row, row, [vector] * 4, 1e-6, scales=scales, float8=True, float8_dense=True)
        expert_rows = empty(num_rows, A, D)
        last = ([vector] * 3, vector[:1], vector, 1e-6)
        norms.layer_tail(row, row, expert_rows, *last, scales=scales, float8=True)
        norms.round_rows(row)
        norms.round_rows(empty(num_rows, F))
        mlp.geglu_float8(empty(num_rows, 2 * DENSE), scales[0], torch.empty(2 * DENSE))
        norms.scale_rows(row.float(), *scales, factor=53.0, dtype=torch.bfloat16)


def run_attention(kv_heads: int, head_dim: int, projections: int) -> None:
    cache, row = empty(1, kv_heads, 1280, head_dim), torch.empty(1, dtype=torch.int64)
    projected = empty(256, (HEADS + projections * kv_heads) * head_dim)
    weight, inv_freq = empty(head_dim), torch.empty(head_dim // 2)
    options = {"eps": 1e-6, "scales": tuple(torch.empty(size) for size in projected.shape)}
    for float8 in (False, True):
        prepare_qkv(
            projected, weight, weight, inv_freq, row, row, cache, cache, num_heads=HEADS, **options, float8=float8
        )
    partial = empty(4, 1, 256, HEADS, head_dim)
    out, scale = torch.empty_like(partial[0], dtype=torch.float8_e4m3fn), torch.empty(256)
    combine_parts(partial, torch.empty(partial.shape[:4]), out, scale)
    combine_parts(partial, torch.empty(partial.shape[:4]), out, scale, in_order=True)


CALLS = calls_by_tokens(run_float8, h200=(1, 256, 512, 1024, 1536, 2048, 4096), default=(256, 1024))
CALLS["4096 tokens, without Gluon"] = lambda: run_float8("NVIDIA H200", 4096, configs.EXPERTS["fp8"]["NVIDIA H200"][-1])
CALLS["dense product"] = lambda: multiply_beside(empty_float8(256, D), empty_float8(2 * DENSE, D))
if not triton.__version__.startswith("3.6."):  # kernels without measured tiles
    CALLS["norms"] = run_norms
    CALLS["attention, sliding"] = lambda: run_attention(8, 256, 2)
    CALLS["attention, full"] = lambda: run_attention(2, 512, 1)
