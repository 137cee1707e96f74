"""Kernels that condition a prediction on a language: sums over classes of tokens, passes over positions, and paths.

The passes are sequential over the C positions of a canvas. So one program per row and pass loops over positions, and
the forward, the backward and the best pass run at the same time. The values of a position go through global memory,
because the states of the next one read them in another order. Reference: `reference.py`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma.diffusion.language import WIDE, Automaton, Fan, Language, Passes
from dgemma_kernels.ops.vocabulary.kernel import processed

_TILE = 16  # groups per program
_LANES = 64  # members of a group per iteration
_BLOCK = 2048  # tokens of a wide class per iteration
_LOG2E = tl.constexpr(1.4426950408889634)


def class_sums(prediction: Any, automaton: Automaton) -> tuple[Tensor, Tensor]:
    """Return the log-sum and the maximum of the shaped logits over each class, both (B, C, K) float64.

    prediction: a `FusedPrediction`, shaped by a cap, a temperature and allowed tokens only.

    Example: `sums, maxima = class_sums(prediction, language.automaton)`.
    """
    rows, arguments, shaping = prediction.vocabulary_arguments()
    shape = (prediction.batch_size, prediction.canvas_len, automaton.num_classes)
    out = torch.empty((2, *shape), dtype=torch.float64, device=rows.device)
    tokens, shaping = automaton.class_tokens, {**shaping, "RAGGED": True}
    common = (rows, *arguments, tokens.member, tokens.first)
    grid = (triton.cdiv(automaton.num_classes, _TILE), rows.shape[0])
    _narrow_classes_kernel[grid](
        *common, *out, rows.shape[1], automaton.num_classes, WIDE=WIDE, TILE=_TILE, LANES=_LANES, num_warps=4, **shaping
    )
    if len(automaton.wide_classes):
        _wide_classes_kernel[(len(automaton.wide_classes), rows.shape[0])](
            *common,
            automaton.wide_classes,
            *out,
            rows.shape[1],
            automaton.num_classes,
            BLOCK=_BLOCK,
            num_warps=8,
            **shaping,
        )
    return out[0], out[1]


def arc_weights(language: Language, classes: Tensor, *, total: bool) -> Tensor:
    """Combine the classes (B, C, K) of each arc, as a log-sum (`total`) or a maximum, (B, C, E).

    Example: `weights = arc_weights(language, sums, total=True)`.
    """
    automaton = language.automaton
    num_arcs, (batch_size, canvas_len, num_classes) = len(automaton.arc_source), classes.shape
    out = torch.empty((batch_size, canvas_len, num_arcs), dtype=torch.float64, device=classes.device)
    _arc_weights_kernel[(triton.cdiv(num_arcs, 4 * _TILE), batch_size * canvas_len)](
        classes.contiguous(),
        automaton.arc_links.first,
        automaton.link_class,
        automaton.ends_text,
        automaton.ends_text if language.may_end is None else language.may_end.contiguous(),
        out,
        num_arcs,
        num_classes,
        HAS_MAY_END=language.may_end is not None,
        TOTAL=total,
        TILE=4 * _TILE,
        LANES=_LANES // 8,  # most arcs have few links
        num_warps=4,
    )
    return out


def passes(language: Language, weights: Tensor, best_weights: Tensor) -> Passes:
    """Sum over paths by `weights`, forward and backward, and maximise over paths by `best_weights`; both (B, C, E).

    Example: `passes(language, weights, best_weights).backward`.
    """
    batch_size, canvas_len, _ = weights.shape
    shape = (3, batch_size, canvas_len + 1, language.automaton.num_states)
    out = torch.empty(shape, dtype=torch.float64, device=weights.device)
    _launch_passes(language, weights, best_weights, out, first=0, num_passes=3)
    return Passes(*out)


def best_pass(language: Language, weights: Tensor) -> Tensor:
    """Return the weight of the heaviest path from each state to the end, (B, C + 1, Q) (Viterbi).

    Example: `best = best_pass(language, weights)`.
    """
    batch_size, canvas_len, _ = weights.shape
    shape = (3, batch_size, canvas_len + 1, language.automaton.num_states)
    out = torch.empty(shape, dtype=torch.float64, device=weights.device)
    _launch_passes(language, weights, weights, out, first=2, num_passes=1)
    return out[2]


def _launch_passes(
    language: Language, weights: Tensor, best_weights: Tensor, out: Tensor, *, first: int, num_passes: int
) -> None:
    automaton = language.automaton
    tiers = list(zip(automaton.ahead, automaton.behind, strict=True))
    rows = [triton.next_power_of_2(max(1, *(len(tier.state) for tier in both))) for both in tiers]
    widths = [triton.next_power_of_2(max(tier.arc.shape[1] for tier in both)) for both in tiers]
    _passes_kernel[(weights.shape[0], num_passes)](
        weights,
        best_weights,
        language.start,
        language.end.contiguous(),
        *_fan_arguments(automaton.ahead),
        *_fan_arguments(automaton.behind),
        out,
        first,
        weights.shape[1],
        weights.shape[2],
        automaton.num_states,
        out.stride(0),
        STATES=triton.next_power_of_2(automaton.num_states),
        FEW=rows[0],
        FEW_WIDTH=widths[0],
        SOME=rows[1],
        SOME_WIDTH=widths[1],
        MANY=rows[2],
        MANY_WIDTH=widths[2],
        num_warps=16,
    )


def _fan_arguments(fan: Fan) -> list[Any]:
    return [part for tier in fan for part in (*tier, len(tier.state))] + [fan.many.arc.shape[1]]


def best_path(language: Language, weights: Tensor, best: Tensor) -> Tensor:
    """Return the states (B, C + 1) of the heaviest path through weights (B, C, E), given its `best_pass`.

    Example: `path = best_path(language, weights, best_pass(language, weights))`.
    """
    return _trace(language, weights, best, None)[0]


def sample_path(language: Language, weights: Tensor, backward: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a path, (B, C + 1), with one uniform per position, u (B, C). Also return each uniform's remainder, (B, C).

    Example: `path, rest = sample_path(language, weights, passed.backward, u)`.
    """
    return _trace(language, weights, backward, u.double().contiguous())


def _trace(language: Language, weights: Tensor, values: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor]:
    automaton, (batch_size, canvas_len, num_arcs) = language.automaton, weights.shape
    path = torch.empty((batch_size, canvas_len + 1), dtype=torch.int64, device=weights.device)
    rest = torch.empty((batch_size, canvas_len), dtype=torch.float64, device=weights.device)
    _trace_kernel[(batch_size,)](
        weights,
        values.contiguous(),
        rest if u is None else u,
        language.start,
        automaton.first_arc,
        automaton.arc_target,
        path,
        rest,
        canvas_len,
        num_arcs,
        automaton.num_states,
        SAMPLE=u is not None,
        WIDTH=triton.next_power_of_2(automaton.ahead.many.arc.shape[1]),
        num_warps=1,
    )
    return path, rest


def class_bias(language: Language, passes: Passes) -> Tensor:
    """Return `Joint.bias`: the log-sum over paths with each class at each position, without that position's weight.

    Example: `bias = class_bias(language, passed)`.
    """
    automaton = language.automaton
    batch_size, slots, num_states = passes.forward.shape
    num_classes, canvas_len = automaton.num_classes, slots - 1
    out = torch.empty((batch_size, canvas_len, num_classes), dtype=torch.float64, device=passes.forward.device)
    _class_bias_kernel[(triton.cdiv(num_classes, _TILE), batch_size * canvas_len)](
        passes.forward.contiguous(),
        passes.backward.contiguous(),
        automaton.class_links.member,
        automaton.class_links.first,
        automaton.link_arc,
        automaton.arc_source,
        automaton.arc_target,
        automaton.ends_text,
        automaton.ends_text if language.may_end is None else language.may_end.contiguous(),
        out,
        canvas_len,
        num_states,
        num_classes,
        HAS_MAY_END=language.may_end is not None,
        TILE=_TILE,
        LANES=_LANES,
        num_warps=4,
    )
    return out - out.amax(-1, keepdim=True)


@triton.jit
def _finite(x: tl.tensor) -> tl.tensor:
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def _exp(x: tl.tensor) -> tl.tensor:
    """e^x of a float64 difference, computed in float32: the result needs no more digits than the logits have."""
    return tl.exp2(x.to(tl.float32) * _LOG2E)


@triton.jit
def _log_sum(top: tl.tensor, total: tl.tensor) -> tl.tensor:
    """Return top + log(total) in float64, -inf for an empty sum."""
    return tl.where(total > 0.0, _finite(top) + tl.log(tl.where(total > 0.0, total, 1.0)).to(tl.float64), float("-inf"))


@triton.jit
def _narrow_classes_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    allowed_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    bias_class_ptr: tl.tensor,
    member_ptr: tl.tensor,
    first_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    best_ptr: tl.tensor,
    vocab_size: tl.tensor,
    num_classes: tl.tensor,
    softcap: tl.tensor,
    rows_per_temperature: tl.tensor,
    rows_per_mask: tl.tensor,
    num_bias: tl.tensor,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RAGGED: tl.constexpr,
) -> None:
    row = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * TILE + tl.arange(0, TILE)
    valid = group < num_classes
    first = tl.load(first_ptr + group, mask=valid, other=0)
    last = tl.load(first_ptr + group + 1, mask=valid, other=0)
    narrow = valid & (last - first <= WIDE)
    last = tl.where(narrow, last, first)
    top = tl.full((TILE, LANES), float("-inf"), tl.float32)
    total = tl.zeros((TILE, LANES), tl.float32)
    for start in range(0, tl.max(last - first, 0), LANES):
        at = first[:, None] + start + tl.arange(0, LANES)[None, :]
        token = tl.load(member_ptr + at, mask=at < last[:, None], other=vocab_size)
        x = processed(
            logits_ptr,
            temperature_ptr,
            allowed_ptr,
            bias_ptr,
            bias_class_ptr,
            row,
            token,
            vocab_size,
            softcap,
            rows_per_temperature,
            rows_per_mask,
            num_bias,
            HAS_CAP,
            HAS_MASK,
            HAS_BIAS,
            RAGGED,
        )
        higher = tl.maximum(top, x)
        base = _finite(higher)
        total = total * tl.exp(_finite(top) - base) * tl.where(top == float("-inf"), 0.0, 1.0) + tl.exp(x - base)
        top = higher
    best = tl.max(top, 1)
    scaled = total * tl.where(top == float("-inf"), 0.0, tl.exp(_finite(top) - _finite(best)[:, None]))
    at = row * num_classes + group
    tl.store(sum_ptr + at, _log_sum(best.to(tl.float64), tl.sum(scaled, 1)), mask=narrow)
    tl.store(best_ptr + at, best.to(tl.float64), mask=narrow)


@triton.jit
def _wide_classes_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    allowed_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    bias_class_ptr: tl.tensor,
    member_ptr: tl.tensor,
    first_ptr: tl.tensor,
    wide_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    best_ptr: tl.tensor,
    vocab_size: tl.tensor,
    num_classes: tl.tensor,
    softcap: tl.tensor,
    rows_per_temperature: tl.tensor,
    rows_per_mask: tl.tensor,
    num_bias: tl.tensor,
    BLOCK: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RAGGED: tl.constexpr,
) -> None:
    row = tl.program_id(1).to(tl.int64)
    group = tl.load(wide_ptr + tl.program_id(0))
    first, last = tl.load(first_ptr + group), tl.load(first_ptr + group + 1)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(first, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        token = tl.load(member_ptr + at, mask=at < last, other=vocab_size)
        x = processed(
            logits_ptr,
            temperature_ptr,
            allowed_ptr,
            bias_ptr,
            bias_class_ptr,
            row,
            token,
            vocab_size,
            softcap,
            rows_per_temperature,
            rows_per_mask,
            num_bias,
            HAS_CAP,
            HAS_MASK,
            HAS_BIAS,
            RAGGED,
        )
        higher = tl.maximum(top, x)
        base = _finite(higher)
        total = total * tl.exp(_finite(top) - base) * tl.where(top == float("-inf"), 0.0, 1.0) + tl.exp(x - base)
        top = higher
    best = tl.max(top, 0)
    scaled = total * tl.where(top == float("-inf"), 0.0, tl.exp(_finite(top) - _finite(best)))
    at = row * num_classes + group
    tl.store(sum_ptr + at, _log_sum(best.to(tl.float64), tl.sum(scaled, 0)))
    tl.store(best_ptr + at, best.to(tl.float64))


@triton.jit
def _arc_weights_kernel(
    class_ptr: tl.tensor,
    first_ptr: tl.tensor,
    link_class_ptr: tl.tensor,
    ends_text_ptr: tl.tensor,
    may_end_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_arcs: tl.tensor,
    num_classes: tl.tensor,
    HAS_MAY_END: tl.constexpr,
    TOTAL: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    row = tl.program_id(1).to(tl.int64)
    arc = tl.program_id(0) * TILE + tl.arange(0, TILE)
    valid = arc < num_arcs
    first = tl.load(first_ptr + arc, mask=valid, other=0)
    last = tl.load(first_ptr + arc + 1, mask=valid, other=0)
    top = tl.full((TILE, LANES), float("-inf"), tl.float64)
    total = tl.zeros((TILE, LANES), tl.float32)
    for start in range(0, tl.max(last - first, 0), LANES):
        at = first[:, None] + start + tl.arange(0, LANES)[None, :]
        inside = at < last[:, None]
        group = tl.load(link_class_ptr + at, mask=inside, other=0)  # links are sorted by arc
        x = tl.load(class_ptr + row * num_classes + group, mask=inside, other=float("-inf"))
        higher = tl.maximum(top, x)
        if TOTAL:
            base = _finite(higher)
            old = tl.where(top == float("-inf"), 0.0, total * _exp(_finite(top) - base))
            total = old + tl.where(x == float("-inf"), 0.0, _exp(_finite(x) - base))
        top = higher
    best = tl.max(top, 1)
    if TOTAL:
        scaled = tl.where(top == float("-inf"), 0.0, total * _exp(_finite(top) - _finite(best)[:, None]))
        best = _log_sum(best, tl.sum(scaled, 1))
    if HAS_MAY_END:
        ends = tl.load(ends_text_ptr + arc, mask=valid, other=0).to(tl.int32)
        best = tl.where(ends > tl.load(may_end_ptr + row).to(tl.int32), float("-inf"), best)
    tl.store(out_ptr + row * num_arcs + arc, best, mask=valid)


@triton.jit
def _load_tier(
    arc_ptr: tl.tensor,
    other_ptr: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    num_arcs: tl.tensor,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Load the arcs of a `dgemma.diffusion.language.Tier` and the states at their other ends, (ROWS, WIDTH) each."""
    index, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = (index < num_rows)[:, None] & (column < width)[None, :]
    at = index[:, None] * width + column[None, :]
    arc = tl.load(arc_ptr + at, mask=inside, other=num_arcs).to(tl.int32)
    return arc, tl.load(other_ptr + at, mask=inside, other=0).to(tl.int32)


@triton.jit
def _load_weight(weight_ptr: tl.tensor, arc: tl.tensor, num_arcs: tl.tensor) -> tl.tensor:
    return tl.load(weight_ptr + arc, mask=arc < num_arcs, other=float("-inf"))


@triton.jit
def _pull(
    now_ptr: tl.tensor,
    out_ptr: tl.tensor,
    weight: tl.tensor,
    state: tl.tensor,
    other: tl.tensor,
    num_rows: tl.tensor,
    MAXIMUM: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Store, for each state of a tier, the log-sum or maximum over its arcs of weight + value at the other end."""
    x = weight + tl.load(now_ptr + other, mask=weight != float("-inf"), other=float("-inf"))
    result = tl.max(x, 1)
    if not MAXIMUM:
        base = _finite(result)
        # -inf becomes a large negative number, whose exponential is 0.
        total = tl.sum(_exp(tl.maximum(x - base[:, None], -1e30)), 1)
        result = tl.where(result == float("-inf"), result, base + tl.log(total).to(tl.float64))
    tl.store(out_ptr + state, result, mask=tl.arange(0, ROWS) < num_rows)


@triton.jit
def _run_pass(
    values: tl.tensor,
    weights: tl.tensor,
    begin: tl.tensor,
    few_state_ptr: tl.tensor,
    few_arc_ptr: tl.tensor,
    few_other_ptr: tl.tensor,
    num_few: tl.tensor,
    some_state_ptr: tl.tensor,
    some_arc_ptr: tl.tensor,
    some_other_ptr: tl.tensor,
    num_some: tl.tensor,
    many_state_ptr: tl.tensor,
    many_arc_ptr: tl.tensor,
    many_other_ptr: tl.tensor,
    num_many: tl.tensor,
    width: tl.tensor,
    canvas_len: tl.tensor,
    num_arcs: tl.tensor,
    num_states: tl.tensor,
    FORWARD: tl.constexpr,
    MAXIMUM: tl.constexpr,
    STATES: tl.constexpr,
    FEW: tl.constexpr,
    FEW_WIDTH: tl.constexpr,
    SOME: tl.constexpr,
    SOME_WIDTH: tl.constexpr,
    MANY: tl.constexpr,
    MANY_WIDTH: tl.constexpr,
) -> None:
    """Run one pass over all positions: values (C + 1, Q) from `begin` (STATES,), weights (C, E)."""
    every = tl.arange(0, STATES)
    # The arcs stay in registers. Only the weights are loaded at each position, one position ahead.
    few_arc, few_other = _load_tier(few_arc_ptr, few_other_ptr, num_few, FEW_WIDTH, num_arcs, FEW, FEW_WIDTH)
    some_arc, some_other = _load_tier(some_arc_ptr, some_other_ptr, num_some, SOME_WIDTH, num_arcs, SOME, SOME_WIDTH)
    many_arc, many_other = _load_tier(many_arc_ptr, many_other_ptr, num_many, width, num_arcs, MANY, MANY_WIDTH)
    few_state = tl.load(few_state_ptr + tl.arange(0, FEW), mask=tl.arange(0, FEW) < num_few, other=0)
    some_state = tl.load(some_state_ptr + tl.arange(0, SOME), mask=tl.arange(0, SOME) < num_some, other=0)
    many_state = tl.load(many_state_ptr + tl.arange(0, MANY), mask=tl.arange(0, MANY) < num_many, other=0)
    if FORWARD:
        now, weight_ptr, stride, weight_stride = values, weights, num_states, num_arcs
    else:
        now, weight_ptr = values + canvas_len * num_states, weights + (canvas_len - 1) * num_arcs
        stride, weight_stride = -num_states, -num_arcs
    tl.store(now + every, begin, mask=every < num_states)
    few_weight = _load_weight(weight_ptr, few_arc, num_arcs)
    some_weight = _load_weight(weight_ptr, some_arc, num_arcs)
    many_weight = _load_weight(weight_ptr, many_arc, num_arcs)
    for step in range(canvas_len):
        if step + 1 < canvas_len:
            weight_ptr += weight_stride
        next_few = _load_weight(weight_ptr, few_arc, num_arcs)
        next_some = _load_weight(weight_ptr, some_arc, num_arcs)
        next_many = _load_weight(weight_ptr, many_arc, num_arcs)
        tl.debug_barrier()  # the values of the last position are visible to all threads
        after = now + stride
        _pull(now, after, few_weight, few_state, few_other, num_few, MAXIMUM, FEW)
        if num_some > 0:
            _pull(now, after, some_weight, some_state, some_other, num_some, MAXIMUM, SOME)
        if num_many > 0:
            _pull(now, after, many_weight, many_state, many_other, num_many, MAXIMUM, MANY)
        now = after
        few_weight, some_weight, many_weight = next_few, next_some, next_many


@triton.jit
def _passes_kernel(
    weight_ptr: tl.tensor,
    best_weight_ptr: tl.tensor,
    start_ptr: tl.tensor,
    end_ptr: tl.tensor,
    ahead_few_state_ptr: tl.tensor,
    ahead_few_arc_ptr: tl.tensor,
    ahead_few_other_ptr: tl.tensor,
    ahead_num_few: tl.tensor,
    ahead_some_state_ptr: tl.tensor,
    ahead_some_arc_ptr: tl.tensor,
    ahead_some_other_ptr: tl.tensor,
    ahead_num_some: tl.tensor,
    ahead_many_state_ptr: tl.tensor,
    ahead_many_arc_ptr: tl.tensor,
    ahead_many_other_ptr: tl.tensor,
    ahead_num_many: tl.tensor,
    ahead_width: tl.tensor,
    behind_few_state_ptr: tl.tensor,
    behind_few_arc_ptr: tl.tensor,
    behind_few_other_ptr: tl.tensor,
    behind_num_few: tl.tensor,
    behind_some_state_ptr: tl.tensor,
    behind_some_arc_ptr: tl.tensor,
    behind_some_other_ptr: tl.tensor,
    behind_num_some: tl.tensor,
    behind_many_state_ptr: tl.tensor,
    behind_many_arc_ptr: tl.tensor,
    behind_many_other_ptr: tl.tensor,
    behind_num_many: tl.tensor,
    behind_width: tl.tensor,
    out_ptr: tl.tensor,
    first_pass: tl.tensor,
    canvas_len: tl.tensor,
    num_arcs: tl.tensor,
    num_states: tl.tensor,
    pass_stride: tl.tensor,
    STATES: tl.constexpr,
    FEW: tl.constexpr,
    FEW_WIDTH: tl.constexpr,
    SOME: tl.constexpr,
    SOME_WIDTH: tl.constexpr,
    MANY: tl.constexpr,
    MANY_WIDTH: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    kind = tl.program_id(1) + first_pass  # 0 forward, 1 backward, 2 best
    values = out_ptr + kind * pass_stride + row * (canvas_len + 1) * num_states
    state = tl.arange(0, STATES)
    inside = state < num_states
    if kind == 0:
        begin = tl.where(state == tl.load(start_ptr + row), 0.0, float("-inf")).to(tl.float64)
        _run_pass(
            values,
            weight_ptr + row * canvas_len * num_arcs,
            begin,
            behind_few_state_ptr,
            behind_few_arc_ptr,
            behind_few_other_ptr,
            behind_num_few,
            behind_some_state_ptr,
            behind_some_arc_ptr,
            behind_some_other_ptr,
            behind_num_some,
            behind_many_state_ptr,
            behind_many_arc_ptr,
            behind_many_other_ptr,
            behind_num_many,
            behind_width,
            canvas_len,
            num_arcs,
            num_states,
            True,
            False,
            STATES,
            FEW,
            FEW_WIDTH,
            SOME,
            SOME_WIDTH,
            MANY,
            MANY_WIDTH,
        )
    else:
        at_end = tl.load(end_ptr + row * num_states + state, mask=inside, other=0) != 0
        begin = tl.where(at_end, 0.0, float("-inf")).to(tl.float64)
        if kind == 1:
            _run_pass(
                values,
                weight_ptr + row * canvas_len * num_arcs,
                begin,
                ahead_few_state_ptr,
                ahead_few_arc_ptr,
                ahead_few_other_ptr,
                ahead_num_few,
                ahead_some_state_ptr,
                ahead_some_arc_ptr,
                ahead_some_other_ptr,
                ahead_num_some,
                ahead_many_state_ptr,
                ahead_many_arc_ptr,
                ahead_many_other_ptr,
                ahead_num_many,
                ahead_width,
                canvas_len,
                num_arcs,
                num_states,
                False,
                False,
                STATES,
                FEW,
                FEW_WIDTH,
                SOME,
                SOME_WIDTH,
                MANY,
                MANY_WIDTH,
            )
        else:
            _run_pass(
                values,
                best_weight_ptr + row * canvas_len * num_arcs,
                begin,
                ahead_few_state_ptr,
                ahead_few_arc_ptr,
                ahead_few_other_ptr,
                ahead_num_few,
                ahead_some_state_ptr,
                ahead_some_arc_ptr,
                ahead_some_other_ptr,
                ahead_num_some,
                ahead_many_state_ptr,
                ahead_many_arc_ptr,
                ahead_many_other_ptr,
                ahead_num_many,
                ahead_width,
                canvas_len,
                num_arcs,
                num_states,
                False,
                True,
                STATES,
                FEW,
                FEW_WIDTH,
                SOME,
                SOME_WIDTH,
                MANY,
                MANY_WIDTH,
            )


@triton.jit
def _trace_kernel(
    weight_ptr: tl.tensor,
    value_ptr: tl.tensor,
    u_ptr: tl.tensor,
    start_ptr: tl.tensor,
    first_arc_ptr: tl.tensor,
    target_ptr: tl.tensor,
    path_ptr: tl.tensor,
    rest_ptr: tl.tensor,
    canvas_len: tl.tensor,
    num_arcs: tl.tensor,
    num_states: tl.tensor,
    SAMPLE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    state = tl.load(start_ptr + row)
    path = path_ptr + row * (canvas_len + 1)
    tl.store(path, state)
    index = tl.arange(0, WIDTH)
    for position in range(canvas_len):
        first, last = tl.load(first_arc_ptr + state), tl.load(first_arc_ptr + state + 1)
        inside = first + index < last
        target = tl.load(target_ptr + first + index, mask=inside, other=0)
        weight = tl.load(
            weight_ptr + (row * canvas_len + position) * num_arcs + first + index, mask=inside, other=float("-inf")
        )
        values = value_ptr + (row * (canvas_len + 1) + position + 1) * num_states
        x = weight + tl.load(values + target, mask=inside, other=float("-inf"))
        top = tl.max(x, 0)
        if SAMPLE:
            width = tl.where(x == float("-inf"), 0.0, _exp(_finite(x) - _finite(top))).to(tl.float64)
            ends = tl.cumsum(width, 0)
            aim = tl.load(u_ptr + row * canvas_len + position) * tl.sum(width, 0)
            above = tl.min(tl.where(ends > aim, index, WIDTH), 0)
            chosen = tl.minimum(above, tl.max(tl.where(width > 0.0, index, 0), 0))
            own = tl.sum(tl.where(index == chosen, width, 0.0), 0)
            before = tl.sum(tl.where(index < chosen, width, 0.0), 0)
            rest = tl.where(own > 0.0, (aim - before) / tl.where(own > 0.0, own, 1.0), 0.0)
            rest = tl.minimum(tl.maximum(rest, 0.0), 1.0 - 1.1102230246251565e-16)
            tl.store(rest_ptr + row * canvas_len + position, rest)
        else:
            chosen = tl.min(tl.where((x == top) & inside, index, WIDTH - 1), 0)
        state = tl.sum(tl.where(index == chosen, target, 0), 0)
        tl.store(path + position + 1, state)


@triton.jit
def _class_bias_kernel(
    forward_ptr: tl.tensor,
    backward_ptr: tl.tensor,
    member_ptr: tl.tensor,
    first_ptr: tl.tensor,
    link_arc_ptr: tl.tensor,
    source_ptr: tl.tensor,
    target_ptr: tl.tensor,
    ends_text_ptr: tl.tensor,
    may_end_ptr: tl.tensor,
    out_ptr: tl.tensor,
    canvas_len: tl.tensor,
    num_states: tl.tensor,
    num_classes: tl.tensor,
    HAS_MAY_END: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    row = tl.program_id(1).to(tl.int64)
    slot = row // canvas_len * (canvas_len + 1) + row % canvas_len
    group = tl.program_id(0) * TILE + tl.arange(0, TILE)
    valid = group < num_classes
    first = tl.load(first_ptr + group, mask=valid, other=0)
    last = tl.load(first_ptr + group + 1, mask=valid, other=0)
    top = tl.full((TILE, LANES), float("-inf"), tl.float64)
    total = tl.zeros((TILE, LANES), tl.float32)
    for start in range(0, tl.max(last - first, 0), LANES):
        at = first[:, None] + start + tl.arange(0, LANES)[None, :]
        inside = at < last[:, None]
        link = tl.load(member_ptr + at, mask=inside, other=0)
        arc = tl.load(link_arc_ptr + link, mask=inside, other=0)
        source = tl.load(source_ptr + arc, mask=inside, other=0)
        target = tl.load(target_ptr + arc, mask=inside, other=0)
        if HAS_MAY_END:
            ends = tl.load(ends_text_ptr + arc, mask=inside, other=0).to(tl.int32)
            inside = inside & (ends <= tl.load(may_end_ptr + row).to(tl.int32))
        x = tl.load(forward_ptr + slot * num_states + source, mask=inside, other=float("-inf"))
        x += tl.load(backward_ptr + (slot + 1) * num_states + target, mask=inside, other=float("-inf"))
        higher = tl.maximum(top, x)
        base = _finite(higher)
        old = tl.where(top == float("-inf"), 0.0, total * _exp(_finite(top) - base))
        total = old + tl.where(x == float("-inf"), 0.0, _exp(_finite(x) - base))
        top = higher
    best = tl.max(top, 1)
    scaled = tl.where(top == float("-inf"), 0.0, total * _exp(_finite(top) - _finite(best)[:, None]))
    tl.store(out_ptr + row * num_classes + group, _log_sum(best, tl.sum(scaled, 1)), mask=valid)
