"""Attention of a canvas and of a long prompt at the published sizes, with the keys whole and cut in parts."""

import torch

from dgemma_kernels.attention import attention, default_tile

WGMMA = {"_attention_kernel"}
HEADS, SLIDING, FULL = 16, (8, 256), (2, 512)  # query heads; key heads and head_dim of the two kinds of layer


def run(num_tokens: int, layer: tuple[int, int], num_splits: int, **mode: int | bool) -> None:
    kv_heads, head_dim = layer
    queries = torch.empty(1, num_tokens, HEADS, head_dim, dtype=torch.bfloat16)
    keys, values = (torch.empty(1, kv_heads, num_tokens + 1024, head_dim, dtype=torch.bfloat16) for _ in range(2))
    tile = default_tile(num_tokens * HEADS // kv_heads, head_dim, hopper=True)
    length = torch.empty(1, dtype=torch.int64)
    attention(queries, keys, values, length, **mode, tile=tile, num_splits=num_splits)


CALLS = {
    "canvas, sliding, whole": lambda: run(256, SLIDING, 1),
    "canvas, sliding, parts": lambda: run(256, SLIDING, 2),
    "canvas, full, whole": lambda: run(256, FULL, 1),
    "canvas, full, parts": lambda: run(256, FULL, 2),
    "commit, sliding": lambda: run(256, SLIDING, 2, causal=True, window=1024),
    "commit, full": lambda: run(256, FULL, 2, causal=True),
    "commit and canvas, sliding": lambda: run(512, SLIDING, 2, causal=True, window=1024, canvas_len=256, keep=1023),
    "commit and canvas, full": lambda: run(512, FULL, 1, causal=True, canvas_len=256),
    "prompt, sliding": lambda: run(4096, SLIDING, 1, causal=True, window=1024),
    "prompt, full": lambda: run(4096, FULL, 1, causal=True),
}
