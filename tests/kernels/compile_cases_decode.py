"""Kernels without warpgroup products: one-token attention, q/k/v, vocabulary, acceptance."""

import torch

from dgemma_kernels.formats import Quantized
from dgemma_kernels.ops.accept.kernel import Before, accept
from dgemma_kernels.ops.attention.kernel import attention, default_tile
from dgemma_kernels.ops.product.kernel import multiply_row
from dgemma_kernels.ops.qkv.kernel import prepare_qkv
from dgemma_kernels.ops.vocabulary.kernel import Shaping, sample, soft_probabilities, vocabulary_statistics

WGMMA: set[str] = set()
HEADS, SLIDING, FULL = 16, (8, 256), (2, 512)  # query heads; key heads and head_dim of the two kinds of layer


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype)


def run_token(layer: tuple[int, int], **mode: int | bool) -> None:
    kv_heads, head_dim = layer
    cache = empty(1, kv_heads, 4096, head_dim)
    tile = default_tile(HEADS // kv_heads, head_dim, hopper=True)
    for num_splits in (1, 66):
        length = empty(1, dtype=torch.int64)
        attention(empty(1, 1, HEADS, head_dim), cache, cache, length, **mode, tile=tile, num_splits=num_splits)


def run_qkv(layer: tuple[int, int], projections: int) -> None:
    kv_heads, head_dim = layer
    cache, row = empty(1, kv_heads, 1280, head_dim), empty(1, dtype=torch.int64)
    projected = empty(256, (HEADS + projections * kv_heads) * head_dim)
    weight, inv_freq = empty(head_dim), empty(head_dim // 2, dtype=torch.float32)
    prepare_qkv(projected, weight, weight, inv_freq, row, row, cache, cache, num_heads=HEADS, eps=1e-6)


def run_vocabulary(vocab_size: int, **only: torch.Tensor) -> None:
    logits, temperature = empty(2, vocab_size), empty(1, dtype=torch.float32)
    shaping = Shaping(temperature, **only)
    statistics = vocabulary_statistics(logits, shaping)
    sample(logits, statistics, empty(2, dtype=torch.float64), shaping)
    for float8 in (False, True):
        soft_probabilities(logits, statistics, shaping, float8=float8)


def run_accept(stability: int | None) -> None:
    tokens, flags = empty(2, 256, dtype=torch.int64), empty(2, 256, dtype=torch.bool)
    row, done = empty(2, dtype=torch.int64), empty(2, dtype=torch.bool)
    entropy = empty(2, 256, dtype=torch.float32)
    recent = None if stability is None else empty(2, stability, 256, dtype=torch.int64)
    limits = {"bound": 0.1, "confidence": 0.005, "vocab_size": 262_144}
    before = (entropy, tokens, tokens, tokens, flags, flags, tokens, done, row, row, row, row, recent)
    accept(Before(*before), **limits)


def run_row(num_cols: int, width: int) -> None:
    multiply_row(empty(1, width), empty(num_cols, width))


def float8(*shape: int) -> Quantized:
    values, scale = empty(*shape, dtype=torch.float8_e4m3fn), empty(*shape[:-1], dtype=torch.float32)
    return Quantized(values=values, scale=scale, dtype=torch.bfloat16)


CALLS = {
    "one row, q, k, v": lambda: run_row(8192, 2816),
    "one row, o": lambda: run_row(2816, 4096),
    "one row, o of full layers": lambda: run_row(2816, 8192),
    "one row, q, k, v in float8": lambda: multiply_row(float8(1, 2816), float8(8192, 2816)),
    "one row, o of full layers in float8": lambda: multiply_row(empty(1, 8192), float8(2816, 8192)),
    "one token, sliding": lambda: run_token(SLIDING, causal=True, window=1024),
    "one token, full": lambda: run_token(FULL, causal=True),
    "qkv, sliding": lambda: run_qkv(SLIDING, 2),
    "qkv, full": lambda: run_qkv(FULL, 1),
    "vocabulary": lambda: run_vocabulary(262_144),
    "vocabulary, allowed": lambda: run_vocabulary(262_144, allowed=empty(1, 8192, dtype=torch.int32)),
    "vocabulary, top-k": lambda: run_vocabulary(262_144, floor=empty(2)),
    "vocabulary, ragged": lambda: run_vocabulary(1000),
    "accept": lambda: run_accept(1),
    "accept, patient": lambda: run_accept(3),
    "accept, fixed steps": lambda: run_accept(None),
}
