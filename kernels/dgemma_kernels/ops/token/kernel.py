"""Kernels for a single token. Each replaces several launches of the path for many tokens. Reference: `reference.py`.

In a forward of one token nearly every launch waits for the previous one, so fewer launches are faster. Work on one row
is cheap: every program that scores an expert computes the residual stream and its norm again, instead of waiting for a
launch that computes them once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma_kernels.blocks import blocks_of, inside, load_row, store_block, store_rounded, wait_for_launches_before
from dgemma_kernels.formats.float8 import Quantized
from dgemma_kernels.ops.configs import dependent_launch
from dgemma_kernels.ops.norms.kernel import (
    ResidualNorms,
    add_attention,
    as_rows,
    empty_rows,
    inverse_rms,
    router_input,
)
from dgemma_kernels.ops.router.kernel import ExpertTiles, choose_experts


def score_token(
    attention: Tensor,
    residual: Tensor,
    norms: ResidualNorms,
    proj: Tensor,
    eps: float,
    *,
    float8: bool = False,
) -> tuple[Tensor, Tensor, Tensor | Quantized, Tensor]:
    """Return the residual stream after attention, the inputs of dense MLP and experts, and the experts' scores.

    The results are those of `norms.attention_residual` for one row, with the product of `router.route` instead of the
    router's input. attention, residual: (1, D), proj: (E, D) → (1, D) three times, (E,). With `float8` the experts'
    input is rounded to float8.

    Example: `x, dense_in, expert_in, scores = score_token(attended, x, layer.residual_norms, layer.router, 1e-6)`.
    """
    num_experts, width = proj.shape
    assert attention.shape == residual.shape == (1, width)
    assert proj.is_contiguous()
    x, dense = torch.empty_like(residual), torch.empty_like(residual)
    expert = empty_rows(residual, float8)
    scores = torch.empty(num_experts, dtype=proj.dtype, device=proj.device)
    _score_token_kernel[(1 + num_experts,)](
        attention,
        residual,
        ResidualNorms(*norms),
        proj,
        x,
        dense,
        expert,
        scores,
        eps,
        width**-0.5,
        **blocks_of(width, per_thread=4),
        **dependent_launch(proj.device),
    )
    return x, dense, as_rows(expert, x), scores


def choose_token(
    scores: Tensor, per_expert_scale: Tensor, num_active: int, rows_per_tile: int
) -> tuple[Tensor, ExpertTiles]:
    """Choose a token's experts as `router.route` does, in tiles of one row: weights (1, A) float32, and the tiles.

    scores, per_expert_scale: (E,). Unlike those of `router.sort_by_expert`, the tiles are in the order of the choice,
    largest score first.

    Example: `weights, tiles = choose_token(scores, layer.per_expert_scale, 8, expert_config(1, device).rows)`.
    """
    num_experts, device = scores.shape[0], scores.device
    weights = torch.empty(1, num_active, dtype=torch.float32, device=device)
    pairs, finished = (torch.empty(num_active, dtype=torch.int32, device=device) for _ in range(2))
    tiles = torch.empty(num_active, 3, dtype=torch.int32, device=device)
    queue = torch.empty(2, dtype=torch.int32, device=device)
    _choose_token_kernel[(1,)](
        scores,
        per_expert_scale,
        weights,
        pairs,
        tiles,
        finished,
        queue,
        NUM_EXPERTS=num_experts,
        NUM_ACTIVE=num_active,
        EXPERTS=max(triton.next_power_of_2(num_experts), 16),
        ACTIVE=triton.next_power_of_2(num_active),
        num_warps=1,
        **dependent_launch(device),
    )
    return weights, ExpertTiles(pairs, tiles, finished, queue, num_experts, num_active, rows_per_tile)


@triton.jit
def _score_token_kernel(
    attention: tl.tensor,
    residual: tl.tensor,
    norms: ResidualNorms,
    proj: tl.tensor,
    x: tl.tensor,
    dense: tl.tensor,
    expert: tl.tuple,  # as in `store_rounded`
    scores: tl.tensor,
    eps: tl.tensor,
    root: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Compute residual stream and inputs in program 0, and the score of one expert in every other program."""
    dtype = x.dtype.element_ty
    post = load_row(norms.post, WIDTH, BLOCK)
    if tl.program_id(0) == 0:
        dense_w = load_row(norms.dense, WIDTH, BLOCK)
        expert_w = load_row(norms.expert, WIDTH, BLOCK)
        wait_for_launches_before(DEPENDENT)
        update = load_row(attention, WIDTH, BLOCK)
        before = load_row(residual, WIDTH, BLOCK)
        after = add_attention(update, inverse_rms(update, WIDTH, eps), before, post, dtype)
        scale = inverse_rms(after, WIDTH, eps)
        expert_in = ()
        for i in tl.static_range(len(after)):
            store_block(x, after[i], i, WIDTH)
            store_block(dense, after[i] * scale * dense_w[i], i, WIDTH)
            expert_in += (after[i] * scale * expert_w[i],)  # type: ignore[assignment]
        store_rounded(expert, expert_in, WIDTH)
    else:
        number = tl.program_id(0) - 1
        router_w = load_row(norms.router, WIDTH, BLOCK)
        row = load_row(proj + number * WIDTH, WIDTH, BLOCK)
        wait_for_launches_before(DEPENDENT)
        update = load_row(attention, WIDTH, BLOCK)
        before = load_row(residual, WIDTH, BLOCK)
        after = add_attention(update, inverse_rms(update, WIDTH, eps), before, post, dtype)
        scale = inverse_rms(after, WIDTH, eps)
        sums = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(len(after)):
            sums += router_input(after[i] * scale, router_w[i], root, dtype).to(tl.float32) * row[i]
        tl.store(scores + number, tl.sum(sums, 0).to(scores.dtype.element_ty))


@triton.jit
def _choose_token_kernel(
    scores: tl.tensor,
    per_expert_scale: tl.tensor,
    weights: tl.tensor,
    pairs: tl.tensor,
    tiles: tl.tensor,
    finished: tl.tensor,
    queue: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    EXPERTS: tl.constexpr,
    ACTIVE: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    experts = tl.arange(0, EXPERTS)
    expert_inside = inside(experts, NUM_EXPERTS, NUM_EXPERTS == EXPERTS)
    scales = tl.load(per_expert_scale + experts, mask=expert_inside, other=0.0).to(tl.float32)
    slots = tl.arange(0, ACTIVE)
    active = slots < NUM_ACTIVE
    wait_for_launches_before(DEPENDENT)
    score = tl.load(scores + experts, mask=expert_inside, other=0.0).to(tl.float32)
    top, chosen = choose_experts(score, scales, expert_inside, NUM_ACTIVE, ACTIVE)
    tl.store(weights + slots, top, mask=active)
    tl.store(pairs + slots, slots, mask=active)
    tl.store(finished + slots, 0, mask=active)
    tl.store(tiles + slots * 3, chosen, mask=active)
    tl.store(tiles + slots * 3 + 1, slots, mask=active)
    tl.store(tiles + slots * 3 + 2, 1, mask=active)
    tl.store(queue, 0)
    tl.store(queue + 1, NUM_ACTIVE)
