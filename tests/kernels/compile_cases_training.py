"""Kernels that only training uses, at the sizes of published or small models. See `compile_cases_moe.py` too."""

import torch
from compile_inputs import empty

from dgemma_kernels.ops.grouped import group_choices
from dgemma_kernels.ops.heads import kernel as heads
from dgemma_kernels.ops.masked import kernel as masked
from dgemma_kernels.ops.residual import kernel as residual

WGMMA = {"_masked_attention_kernel", "_query_gradient_kernel", "_key_gradient_kernel"}


def run_heads(num_heads: int, kv_heads: int, head_dim: int, has_value: bool) -> None:
    raw = empty(2 * 12, (num_heads + kv_heads * (2 if has_value else 1)) * head_dim)
    inputs = heads.HeadInputs(raw, empty(head_dim), empty(head_dim), empty(24, head_dim), empty(24, head_dim))
    heads.norm_heads(inputs, num_heads=num_heads, kv_heads=kv_heads, eps=1e-6)
    firsts, seconds = (
        [empty(2, size, count, head_dim) for size, count in zip(sizes, (num_heads, kv_heads, kv_heads), strict=True)]
        for sizes in ((4, 9, 9), (8, 8, 8))
    )
    heads.norm_heads_gradient(inputs, firsts, seconds, eps=1e-6)


def run_norms() -> None:
    row, vector = empty(24, 2816), empty(2816)
    for added in (None, row):
        residual.rms_norm_gradient(row, row, vector, 1e-6, added)
    residual.after_attention_gradient(*[row] * 6, *[vector] * 4, 1e-6)
    residual.after_experts_gradient(*[row] * 4, *[vector] * 3, empty(24, 1), 1e-6)


def run_masked() -> None:
    queries, keys = empty(2, 512, 6, 64), empty(2, 2, 1025, 64)
    mask, blocks = (torch.empty(2, *size, dtype=torch.bool) for size in ((512, 1025), (8, 17)))
    out, sums = masked.masked_attention(queries, keys, keys, mask, blocks)
    masked.masked_attention_gradient(out, queries, keys, keys, mask, blocks, out, sums)


CALLS = {
    "choices": lambda: group_choices(torch.empty(24, 8, dtype=torch.int64), 128),
    "masked attention": run_masked,
    "norms": run_norms,
    "heads of 256": lambda: run_heads(16, 8, 256, has_value=True),
    "heads of 512": lambda: run_heads(16, 2, 512, has_value=False),
}
