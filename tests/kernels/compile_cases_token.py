"""Kernels of a single token at the published sizes."""

import torch

from dgemma_kernels.formats.float8 import Quantized
from dgemma_kernels.ops.experts.kernel import expert_down, expert_gate_up
from dgemma_kernels.ops.norms.kernel import layer_tail
from dgemma_kernels.ops.product.kernel import multiply_row
from dgemma_kernels.ops.token.kernel import choose_token, score_token

WIDTH, HIDDEN, EXPERTS, ACTIVE, VOCABULARY = 2816, 704, 128, 8, 262_144
WGMMA: set[str] = set()


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def empty_float8(*shape: int) -> Quantized:
    values, scale = empty(*shape, dtype=torch.float8_e4m3fn), empty(*shape[:-1], dtype=torch.float32)
    return Quantized(values=values, scale=scale, dtype=torch.bfloat16)


def run_half_layer(dtype: torch.dtype, float8: bool) -> None:
    row, norm = empty(1, WIDTH, dtype=dtype), empty(WIDTH, dtype=dtype)
    router = empty(EXPERTS, WIDTH, dtype=dtype)
    x, dense, expert_in, scores = score_token(row, row, [norm] * 4, router, 1e-6, float8=float8)
    weights, tiles = choose_token(scores, empty(EXPERTS, dtype=dtype), ACTIVE, 16)
    shapes = (EXPERTS, 2 * HIDDEN, WIDTH), (EXPERTS, WIDTH, HIDDEN)
    gate_up, down = (empty_float8(*shape) if float8 else empty(*shape, dtype=dtype) for shape in shapes)
    rows = expert_down(expert_gate_up(expert_in, gate_up, tiles), down, weights, tiles, overlap=True)
    scalar = empty(1, dtype=dtype)
    layer_tail(x, dense, rows, [norm] * 3, scalar, norm, 1e-6, float8=float8, alone=True)


CALLS = {
    "half a layer": lambda: run_half_layer(torch.bfloat16, False),
    "half a layer, float8": lambda: run_half_layer(torch.bfloat16, True),
    "half a layer, float32": lambda: run_half_layer(torch.float32, False),
    "float8 head": lambda: multiply_row(empty(1, WIDTH), empty_float8(VOCABULARY, WIDTH)),
}
