"""Kernels without warpgroup products: of one token, q/k/v, draws, vocabulary, acceptance."""

import torch
from compile_inputs import FULL, HEADS, SLIDING, VOCABULARY, A, D, E, F, empty, empty_float8

from dgemma_kernels.ops.accept.kernel import Before, accept
from dgemma_kernels.ops.attention.kernel import attention, default_tile
from dgemma_kernels.ops.draws.kernel import uniform
from dgemma_kernels.ops.experts.kernel import expert_down, expert_gate_up
from dgemma_kernels.ops.norms.kernel import layer_tail
from dgemma_kernels.ops.product.kernel import multiply_row
from dgemma_kernels.ops.qkv.kernel import prepare_qkv
from dgemma_kernels.ops.token.kernel import choose_token, score_token
from dgemma_kernels.ops.vocabulary.kernel import Shaping, sample, soft_probabilities, vocabulary_statistics

WGMMA: set[str] = set()


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
    limits = {"bound": 0.1, "confidence": 0.005, "vocab_size": VOCABULARY}
    before = (entropy, tokens, tokens, tokens, flags, flags, tokens, done, row, row, row, row, recent)
    accept(Before(*before), **limits)


def run_row(num_cols: int, width: int) -> None:
    multiply_row(empty(1, width), empty(num_cols, width))


def run_half_layer(dtype: torch.dtype, float8: bool) -> None:
    row, norm = empty(1, D, dtype=dtype), empty(D, dtype=dtype)
    router = empty(E, D, dtype=dtype)
    x, dense, expert_in, scores = score_token(row, row, [norm] * 4, router, 1e-6, float8=float8)
    weights, tiles = choose_token(scores, empty(E, dtype=dtype), A, 16)
    shapes = (E, 2 * F, D), (E, D, F)
    gate_up, down = (empty_float8(*shape) if float8 else empty(*shape, dtype=dtype) for shape in shapes)
    rows = expert_down(expert_gate_up(expert_in, gate_up, tiles), down, weights, tiles, overlap=True)
    scalar = empty(1, dtype=dtype)
    layer_tail(x, dense, rows, [norm] * 3, scalar, norm, 1e-6, float8=float8, alone=True)


def run_uniform() -> None:
    row = empty(2, dtype=torch.int64)
    uniform(row, row, row, 256, "token")


CALLS = {
    "one row, q, k, v": lambda: run_row(8192, D),
    "one row, o": lambda: run_row(D, 4096),
    "one row, o of full layers": lambda: run_row(D, 8192),
    "one row, q, k, v in float8": lambda: multiply_row(empty_float8(1, D), empty_float8(8192, D)),
    "one row, o of full layers in float8": lambda: multiply_row(empty(1, 8192), empty_float8(D, 8192)),
    "one token, sliding": lambda: run_token(SLIDING, causal=True, window=1024),
    "one token, full": lambda: run_token(FULL, causal=True),
    "qkv, sliding": lambda: run_qkv(SLIDING, 2),
    "qkv, full": lambda: run_qkv(FULL, 1),
    "vocabulary": lambda: run_vocabulary(VOCABULARY),
    "vocabulary, allowed": lambda: run_vocabulary(VOCABULARY, allowed=empty(1, 8192, dtype=torch.int32)),
    "vocabulary, top-k": lambda: run_vocabulary(VOCABULARY, floor=empty(2)),
    "vocabulary, ragged": lambda: run_vocabulary(1000),
    "accept": lambda: run_accept(1),
    "accept, patient": lambda: run_accept(3),
    "accept, fixed steps": lambda: run_accept(None),
    "half a layer": lambda: run_half_layer(torch.bfloat16, False),
    "half a layer, float8": lambda: run_half_layer(torch.bfloat16, True),
    "half a layer, float32": lambda: run_half_layer(torch.float32, False),
    "float8 head": lambda: multiply_row(empty(1, D), empty_float8(VOCABULARY, D)),
    "uniform": run_uniform,
}
