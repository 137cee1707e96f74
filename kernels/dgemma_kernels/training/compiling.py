"""Kernels of a step that trains adapters, compiled by other processes while its first forward pass runs.

Otherwise the first step would compile one kernel after the other. A kernel that is missing here, or not ready in time,
is compiled at its first launch.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dgemma.model.backbone import Layer
from dgemma.train.lora import AdaptedExperts, AdaptedLinear
from dgemma_kernels.ops import ahead, grouped
from dgemma_kernels.ops.adapters import kernel as adapters
from dgemma_kernels.ops.heads import kernel as heads
from dgemma_kernels.ops.residual import kernel as residual
from dgemma_kernels.training.adapted_experts import FEW_OUTPUTS, keeps_output

_Operands = tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor | None, bool]  # operands, order, whether gated


class _StepSizes(NamedTuple):
    """Sizes of a step: two forward passes and a backward pass over B rows of canvases and text."""

    batch_size: int
    row_len: int
    num_noisy: int  # tokens of canvases in a row; the second forward pass has only these
    num_seen: int  # tokens of text in a row that canvases see
    experts: tuple[int, int, int]  # (E, D, F)
    top_k: int
    rank: int
    heads: frozenset[tuple[int, int, int]]  # of each kind of layer: columns of queries, columns of keys, size of a head
    linear: frozenset[tuple[int, ...]]  # output sizes of adapted layers that share an input


def start_kernels(layers: Sequence[Layer], x: Tensor, batch_size: int, num_noisy: int, num_seen: int) -> None:
    """Start to compile the kernels of a step, if it uses them. A second call with the same sizes does nothing.

    x: (B · L, D), rows of L tokens, of which the first `num_noisy` are canvases. They see the next `num_seen`.

    Example: `start_kernels(model.layers, x, 8, 256, 703)`.
    """
    experts = layers[0].experts
    if not isinstance(experts, AdaptedExperts) or not keeps_output(experts) or x.dtype != experts.gate_up_proj.dtype:
        return
    num_experts, width, inner = experts.down_proj.shape
    sizes = _StepSizes(
        batch_size,
        x.shape[0] // batch_size,
        num_noisy,
        num_seen,
        (num_experts, width, inner),
        layers[0].router.top_k,
        experts.lora.rank,
        frozenset(
            (attention.q_proj.weight.shape[0], attention.k_proj.weight.shape[0], attention.head_dim)
            for attention in (layer.self_attn for layer in layers)
        ),
        frozenset(group for layer in layers for group in _adapted(layer)),
    )
    _start(sizes, x.dtype, x.device)


def _adapted(layer: Layer) -> Iterator[tuple[int, ...]]:
    """Yield the output sizes of each group of adapted layers that share an input."""
    attention, mlp = layer.self_attn, layer.mlp
    inputs = [attention.q_proj, attention.k_proj, *([] if attention.v_proj is None else [attention.v_proj])]
    for group in (inputs, [attention.o_proj], [mlp.gate_proj, mlp.up_proj], [mlp.down_proj], [layer.router.proj]):
        if all(isinstance(each, AdaptedLinear) for each in group):
            yield tuple(each.weight.shape[0] for each in group)


@lru_cache(maxsize=64)
def _start(sizes: _StepSizes, dtype: torch.dtype, device: torch.device) -> None:
    products = _products(sizes, dtype)
    fits = all(grouped.fits_product(*operands, device) for operands, _, _ in products)
    if not fits or not grouped.fits_groups(sizes.experts[0]):
        return
    tiles = _empty(1, 3, dtype=torch.int32)
    calls = (partial(grouped.multiply, *operands, tiles, order, gated=gated) for operands, order, gated in products)
    ahead.start([*calls, *_other_calls(sizes, dtype)])


def _products(sizes: _StepSizes, dtype: torch.dtype) -> list[_Operands]:
    """Return operands, order and GeGLU of the experts' products: of both forward passes, then of the backward pass."""
    (num_experts, width, inner), rank = sizes.experts, sizes.rank
    empty = partial(_empty, dtype=dtype)
    gate_up, up_a, up_b = (
        empty(num_experts, *shape) for shape in ((2 * inner, width), (rank, width), (2 * inner, rank))
    )
    down, down_a, down_b = (empty(num_experts, *shape) for shape in ((width, inner), (rank, inner), (width, rank)))
    products: list[_Operands] = []
    for row_len in (sizes.num_noisy, sizes.row_len):
        num_tokens = sizes.batch_size * row_len
        x, num_rows = empty(num_tokens, width), num_tokens * sizes.top_k
        narrow, order = empty(num_rows, rank), _empty(num_rows, dtype=torch.int64)
        products.append(((x, gate_up, narrow, up_b), order, True))
        products.append(((empty(num_rows, inner), down, narrow, down_b), None, False))
    products.append(((x, gate_up, narrow, up_b), order, False))
    products.append(((x, down.mT, narrow, down_a.mT), order, False))
    products.append(((empty(num_rows, 2 * inner), gate_up.mT, narrow, up_a.mT), None, False))
    return products


def _other_calls(sizes: _StepSizes, dtype: torch.dtype) -> Iterator[partial[Any]]:
    """Yield calls of the other kernels. Arguments that are not sizes are arbitrary."""
    (num_experts, width, inner), rank = sizes.experts, sizes.rank
    num_tokens = sizes.batch_size * sizes.row_len
    num_rows = num_tokens * sizes.top_k
    empty = partial(_empty, dtype=dtype)
    yield from _calls_of_heads(sizes, empty)
    for outputs in sizes.linear:
        yield partial(adapters.expand, empty(num_tokens, len(outputs) * rank), empty(sum(outputs), rank), outputs)
    x, vector, scalar = empty(num_tokens, width), empty(width), empty(num_tokens, 1)
    vectors = vector, vector, vector
    yield partial(residual.after_experts, x, x, x, *vectors, scalar, 1e-6)
    yield partial(residual.after_experts_gradient, x, x, x, x, *vectors, scalar, 1e-6)
    yield partial(residual.after_attention_gradient, x, x, x, x, x, x, *vectors, vector, 1e-6)
    for weight, added in ((None, None), (vector, None), (vector, x)):
        yield partial(residual.rms_norm_gradient, x, x, weight, 1e-6, added)
    yield partial(grouped.group_choices, _empty(num_tokens, sizes.top_k, dtype=torch.int64), num_experts)
    gate_and_up, hidden, narrow = (empty(num_rows, columns) for columns in (2 * inner, inner, rank))
    ends, by_row = _empty(num_experts, dtype=torch.int32), _empty(num_rows, dtype=torch.float32)
    up_b, down_a = empty(num_experts, 2 * inner, rank), empty(num_experts, rank, inner)
    if rank <= FEW_OUTPUTS:
        yield partial(grouped.contract_and_outer, gate_and_up, narrow, up_b, ends, scale=2.0)
        yield partial(grouped.contract_and_outer, hidden, narrow, down_a.mT, ends, scale=2.0, by_row=by_row)


def _calls_of_heads(sizes: _StepSizes, empty: Callable[..., Tensor]) -> Iterator[partial[Any]]:
    batch_size, num_tokens = sizes.batch_size, sizes.batch_size * sizes.row_len
    for columns, kv_columns, head_dim in sizes.heads:
        num_heads, kv_heads = columns // head_dim, kv_columns // head_dim
        first_keys, num_text = sizes.num_noisy + sizes.num_seen, sizes.row_len - sizes.num_noisy
        firsts, seconds = (
            [empty(batch_size, *part, head_dim) for part in ((of_queries, num_heads), *[(of_keys, kv_heads)] * 2)]
            for of_queries, of_keys in ((sizes.num_noisy, first_keys), (num_text, num_text))  # tokens
        )
        weight, table = empty(head_dim), empty(num_tokens, head_dim)
        for outputs in sizes.linear:
            if outputs[:2] == (columns, kv_columns):
                inputs = heads.HeadInputs(empty(num_tokens, sum(outputs)), weight, weight, table, table)
                yield partial(heads.norm_heads, inputs, num_heads=num_heads, kv_heads=kv_heads, eps=1e-6)
                yield partial(heads.norm_heads_gradient, inputs, firsts, seconds, eps=1e-6)


def _empty(*sizes: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")
