"""Kernels that condition a prediction on a language: sums per token class, passes over positions, best or drawn paths.

The passes are sequential over the C positions of a canvas. So each pass of a row has one program. It loops over
positions, with the values of all states in registers. The three passes of a row run at the same time. All else is
parallel over positions. Reference: `reference.py`.
"""

from itertools import product
from operator import le
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma.constraints import paths as library
from dgemma.constraints.automaton import Automaton
from dgemma.constraints.canvas_language import Language
from dgemma.constraints.paths import Passes
from dgemma_kernels.ops.automaton.tables import Fan, IndexGroups, with_tables
from dgemma_kernels.ops.vocabulary.kernel import LogitShaping, processed

_WARPS = 16
# Sizes for which passes are compiled, because a kernel per size would be compiled at many first uses: states; rows of
# `Fan.some`, and rows and width of `Fan.join`. Larger tables are padded to powers of two.
_STATES = (64, 128, 256, 512, 1024, 2048)
_TABLES = ((0, 0, 0), (64, 32, 16), (256, 128, 16))
_MOST_SLOTS = 1 << 14  # of a `Fan` (the arcs by state): this many values fit into the registers of one program
_LOG2E = tl.constexpr(1.4426950408889634)
_LEAST = tl.constexpr(-(1 << 30))  # the exponent of a packed 0
_ZERO = tl.constexpr(-(1 << 62))  # a packed 0
_NO_PATH = tl.constexpr(-4503599627370496)  # the bits of a float64 -inf
_UNUSED: Any = None  # a field of a kernel's operand that is None costs nothing
_LOW = tl.constexpr(-1e30)  # below all values; unlike -inf, it can be subtracted


class _Endings(NamedTuple):
    """The arcs that end the text (E,) bool, and the positions where it may end (B, C) bool, None for all."""

    ends_text: Any
    may_end: Any


def class_sums(prediction: Any, automaton: Automaton) -> tuple[Tensor, Tensor]:
    """Return the log-sum and the maximum of the shaped logits over each class, both (B, C, K) float64.

    prediction: a `FusedPrediction`.

    Example: `sums, maxima = class_sums(prediction, language.automaton)`.
    """
    known = prediction.shaped_rows()
    if known is None:  # after top-k or top-p
        return library.class_sums(prediction, automaton)
    rows, shaping = known
    shape = (prediction.batch_size, prediction.canvas_len, automaton.num_classes)
    out = torch.empty((2, *shape), dtype=torch.float64, device=rows.device)
    tables = with_tables(automaton)
    num_wide = len(tables.wide_classes)
    for begin, end, tile, lanes in ((0, num_wide, 1, 2048), (num_wide, automaton.num_classes, 16, 64)):
        if begin < end:
            _class_sums_kernel[(triton.cdiv(end - begin, tile), rows.shape[0])](
                rows,
                shaping._replace(RAGGED=tl.constexpr(True)),  # a tile may end with places without a token
                tables.class_tokens,
                *out,
                rows.shape[1],
                begin,
                end,
                automaton.num_classes,
                TILE=tile,
                LANES=lanes,
                num_warps=8 if tile == 1 else 4,
            )
    return out[0], out[1]


def arc_weights(language: Language, classes: Tensor, *, total: bool) -> Tensor:
    """Combine the weights (B, C, K) of each arc's classes into one weight per arc, (B, C, E).

    With `total` it is the log-sum of their weights, otherwise the maximum.

    Example: `weights = arc_weights(language, sums, total=True)`.
    """
    automaton = with_tables(language.automaton)
    num_arcs, (batch_size, canvas_len, num_classes) = len(automaton.arc_source), classes.shape
    out = torch.empty((batch_size, canvas_len, num_arcs), dtype=torch.float64, device=classes.device)
    tile = 32
    _arc_weights_kernel[(triton.cdiv(num_arcs, tile), batch_size * canvas_len)](
        classes.contiguous(),
        automaton.arc_links._replace(member=_UNUSED),
        automaton.link_class,
        _endings(language),
        out,
        num_arcs,
        num_classes,
        TOTAL=total,
        TILE=tile,
        LANES=16,  # most arcs have few links
        num_warps=4,
    )
    return out


def passes(language: Language, weights: Tensor, best_weights: Tensor) -> Passes:
    """Sum over paths by `weights`, forward and backward, and maximise over paths by `best_weights`; both (B, C, E).

    Example: `passes(language, weights, best_weights).backward`.
    """
    fan = with_tables(language.automaton).fan
    if fan.arc.shape[1] > _MOST_SLOTS:
        return library.passes(language, weights, best_weights)
    return Passes(*_walk(language, fan, weights, best_weights))


def best_pass(language: Language, weights: Tensor) -> Tensor:
    """Return the weight of the heaviest path from each state to the end, (B, C + 1, Q) (Viterbi).

    Example: `best = best_pass(language, weights)`.
    """
    fan = with_tables(language.automaton).fan
    if fan.arc.shape[1] > _MOST_SLOTS:
        return library.best_pass(language, weights)
    return _walk(language, fan, None, weights)[0]


def _walk(language: Language, fan: Fan, weights: Tensor | None, best_weights: Tensor) -> Tensor:
    """Run the best pass; with `weights` the forward, the backward and the best pass: (passes, B, C + 1, Q)."""
    num_states, (batch_size, canvas_len, _) = fan.few.shape[2], best_weights.shape
    num_passes, num_slots, device = 1 if weights is None else 3, fan.arc.shape[1], fan.arc.device
    slots = torch.empty((num_passes, batch_size, canvas_len, num_slots), dtype=torch.int64, device=device)
    block = 1024
    _slots_kernel[(triton.cdiv(num_slots, block), batch_size * canvas_len, num_passes)](
        best_weights if weights is None else weights,
        best_weights,
        fan.arc,
        slots,
        best_weights.shape[2],
        num_slots,
        BLOCK=block,
        num_warps=4,
    )
    out = torch.empty((num_passes, batch_size, canvas_len + 1, num_states), dtype=torch.float64, device=device)
    num_some, num_joined, width = fan.some.shape[1], *fan.join.shape[1:]
    tables = (num_some if num_joined else 0, num_joined, width)
    padded = (*_TABLES, tuple(map(triton.next_power_of_2, tables)))
    some, *join = next(sizes for sizes in padded if all(map(le, tables, sizes)))
    _passes_kernel[(batch_size, num_passes)](
        slots,
        language.start,
        language.end.contiguous(),
        fan._replace(arc=_UNUSED),
        out,
        canvas_len,
        num_slots,
        num_states,
        num_some,
        num_joined,
        width,
        FEW=(fan.few.shape[1], max(_STATES[0], triton.next_power_of_2(num_states))),
        SOME=(some, fan.some.shape[2]),
        JOIN=tuple(join),
        num_warps=_WARPS,
    )
    return out


def launch_passes(language: Language, canvas_len: int) -> None:
    """Launch the passes of all sizes of `_STATES` and `_TABLES`, for `only_compiling`: their results mean nothing."""
    row = with_tables(language.automaton).fan.few.shape[1]
    weights = torch.zeros(1, canvas_len, 1, dtype=torch.float64, device=language.end.device)
    for states, (some, joined, width) in product(_STATES, _TABLES):
        shapes = (row, states), (max(some, 1), row), (joined, width), (states,), (row * (states + some),)
        fan = Fan(*(language.start.new_zeros(2, *shape) for shape in shapes))
        _walk(language, fan, weights, weights)


def best_path(language: Language, weights: Tensor, best: Tensor) -> Tensor:
    """Return the states (B, C + 1) of the heaviest path through weights (B, C, E), given its `best_pass`.

    Example: `path = best_path(language, weights, best_pass(language, weights))`.
    """
    path, _ = _trace(language, weights, best, None)
    return path


def sample_path(language: Language, weights: Tensor, backward: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a path, (B, C + 1), with one uniform per position, u (B, C).

    Also return each uniform's place within the interval of the chosen arc, in [0, 1): (B, C).

    Example: `path, rest = sample_path(language, weights, passed.backward, u)`.
    """
    path, rest = _trace(language, weights, backward, u.double().contiguous())
    assert rest is not None
    return path, rest


def _trace(language: Language, weights: Tensor, values: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Choose the next state for every state and position, then follow the choices from the start.

    With `u`, the second result is each uniform's place in the interval of its arc.
    """
    automaton = with_tables(language.automaton)
    (batch_size, canvas_len, _), num_states, device = weights.shape, automaton.num_states, weights.device
    chosen = torch.empty((batch_size, canvas_len, num_states), dtype=torch.int32, device=device)
    rests, rest = None, None
    if u is not None:
        rests = torch.empty(chosen.shape, dtype=torch.float64, device=device)
        rest = torch.empty(chosen.shape[:2], dtype=torch.float64, device=device)
    tile = 32
    _choose_kernel[(triton.cdiv(num_states, tile), batch_size * canvas_len)](
        weights,
        values.contiguous(),
        u,
        automaton.arcs_out._replace(member=_UNUSED),
        automaton.arc_target,
        chosen,
        rests,
        canvas_len,
        len(automaton.arc_source),
        num_states,
        TILE=tile,
        LANES=16,
        num_warps=4,
    )
    path = torch.empty((batch_size, canvas_len + 1), dtype=torch.int64, device=device)
    _follow_kernel[(batch_size,)](chosen, rests, language.start, path, rest, canvas_len, num_states, num_warps=1)
    return path, rest


def class_bias(language: Language, passes: Passes) -> Tensor:
    """Return `Joint.bias`: for each position and class, the log-sum over the paths that have this class there.

    The weight of the position itself is not included.

    Example: `bias = class_bias(language, passed)`.
    """
    automaton = with_tables(language.automaton)
    batch_size, slots, num_states = passes.forward.shape
    num_classes, canvas_len = automaton.num_classes, slots - 1
    out = torch.empty((batch_size, canvas_len, num_classes), dtype=torch.float64, device=passes.forward.device)
    tile = 16
    _class_bias_kernel[(triton.cdiv(num_classes, tile), batch_size * canvas_len)](
        passes.forward.contiguous(),
        passes.backward.contiguous(),
        automaton.class_links,
        automaton.link_arc,
        automaton.arc_source,
        automaton.arc_target,
        _endings(language),
        out,
        canvas_len,
        num_states,
        num_classes,
        TILE=tile,
        LANES=32,
        num_warps=4,
    )
    return out - out.amax(-1, keepdim=True)


def _endings(language: Language) -> _Endings:
    may_end = None if language.may_end is None else language.may_end.contiguous()
    return _Endings(language.automaton.ends_text, may_end)


@triton.jit
def _exp(x: tl.tensor) -> tl.tensor:
    """e^x of a difference, computed in float32: the result needs no more digits than the logits have."""
    return tl.exp2(x.to(tl.float32) * _LOG2E)


@triton.jit
def _add(top: tl.tensor, total: tl.tensor, x: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Add e^x to the sum total · e^top. `top` is at least _LOW; x may be -inf."""
    higher = tl.maximum(top, x)
    return higher, total * _exp(top - higher) + _exp(x - higher)


@triton.jit
def _log_sum(top: tl.tensor, total: tl.tensor) -> tl.tensor:
    """Return the logarithm of Σ total · e^top over the last axis in float64, -inf for an empty sum."""
    best = tl.max(top, 1)
    return best.to(tl.float64) + tl.log(tl.sum(total * _exp(top - best[:, None]), 1)).to(tl.float64)


@triton.jit
def _maximum(top: tl.tensor) -> tl.tensor:
    """Return the maximum over the last axis in float64, -inf if there is no value above _LOW."""
    best = tl.max(top, 1).to(tl.float64)
    return tl.where(best > _LOW, best, float("-inf"))


@triton.jit
def _load_groups(
    groups: IndexGroups, begin: tl.tensor, end: tl.tensor, TILE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Load groups at places `begin` to `end`: group, begin and end of its members, and validity, (TILE,) each."""
    at = begin + tl.program_id(0) * TILE + tl.arange(0, TILE)
    valid = at < end
    group = tl.load(groups.order + at, mask=valid, other=0)
    first = tl.load(groups.first + group, mask=valid, other=0)
    return group, first, tl.load(groups.first + group + 1, mask=valid, other=0), valid


@triton.jit(do_not_specialize=["begin", "end", "num_classes"])
def _class_sums_kernel(
    logits_ptr: tl.tensor,
    shaping: LogitShaping,
    tokens: IndexGroups,
    sum_ptr: tl.tensor,
    best_ptr: tl.tensor,
    vocab_size: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    num_classes: tl.tensor,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    row = tl.program_id(1).to(tl.int64)
    group, first, last, valid = _load_groups(tokens, begin, end, TILE)
    top = tl.full((TILE, LANES), _LOW, tl.float32)
    total = tl.zeros((TILE, LANES), tl.float32)
    for start in range(0, tl.max(last - first, 0), LANES):
        at = first[:, None] + start + tl.arange(0, LANES)[None, :]
        token = tl.load(tokens.member + at, mask=at < last[:, None], other=vocab_size)
        x = processed(logits_ptr, row, token, vocab_size, shaping)
        top, total = _add(top, total, x)
    at = row * num_classes + group
    tl.store(sum_ptr + at, _log_sum(top, total), mask=valid)
    tl.store(best_ptr + at, _maximum(top), mask=valid)


@triton.jit(do_not_specialize=["num_arcs", "num_classes"])
def _arc_weights_kernel(
    class_ptr: tl.tensor,
    links: IndexGroups,
    link_class_ptr: tl.tensor,
    endings: _Endings,
    out_ptr: tl.tensor,
    num_arcs: tl.tensor,
    num_classes: tl.tensor,
    TOTAL: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    row = tl.program_id(1).to(tl.int64)
    arc, first, last, valid = _load_groups(links, 0, num_arcs, TILE)
    top = tl.full((TILE, LANES), _LOW, tl.float64)
    total = tl.zeros((TILE, LANES), tl.float32)
    for start in range(0, tl.max(last - first, 0), LANES):
        at = first[:, None] + start + tl.arange(0, LANES)[None, :]
        inside = at < last[:, None]
        group = tl.load(link_class_ptr + at, mask=inside, other=0)  # links are sorted by arc
        x = tl.load(class_ptr + row * num_classes + group, mask=inside, other=float("-inf"))
        if TOTAL:
            top, total = _add(top, total, x)
        else:
            top = tl.maximum(top, x)
    if TOTAL:
        weight = _log_sum(top, total)
    else:
        weight = _maximum(top)
    if endings.may_end is not None:
        ends = tl.load(endings.ends_text + arc, mask=valid, other=0).to(tl.int32)
        weight = tl.where(ends > tl.load(endings.may_end + row).to(tl.int32), float("-inf"), weight)
    tl.store(out_ptr + row * num_arcs + arc, weight, mask=valid)


@triton.jit
def _split(number: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Split a packed number m · 2^k, m in [1, 2), into k int32 and m float32. 0 has k = _LEAST.

    The sums over a whole canvas exceed the range of a float32, and a sum of logarithms takes more instructions.
    """
    return (number >> 32).to(tl.int32), number.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _pack(k: tl.tensor, m: tl.tensor) -> tl.tensor:
    return (k.to(tl.int64) << 32) | m.to(tl.int32, bitcast=True).to(tl.int64)


@triton.jit(do_not_specialize=["num_arcs", "num_slots"])
def _slots_kernel(
    weight_ptr: tl.tensor,
    best_weight_ptr: tl.tensor,
    arc_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_arcs: tl.tensor,
    num_slots: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Put the weights in the order in which a pass reads them: packed numbers for sums, float64 for the best pass."""
    row = tl.program_id(1).to(tl.int64)
    kind = tl.num_programs(2) - 1 - tl.program_id(2)  # 2 forward, 1 backward, 0 best
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < num_slots
    arc = tl.load(arc_ptr + tl.where(kind == 2, num_slots, 0) + slot, mask=inside, other=num_arcs)
    at, is_arc = row * num_arcs + arc, arc < num_arcs
    out = out_ptr + (tl.program_id(2) * tl.num_programs(1) + row) * num_slots + slot
    if kind == 0:
        weight = tl.load(best_weight_ptr + at, mask=is_arc, other=float("-inf"))
        tl.store(out, weight.to(tl.int64, bitcast=True), mask=inside)
    else:
        weight = tl.load(weight_ptr + at, mask=is_arc, other=float("-inf")) * _LOG2E
        k = tl.floor(tl.maximum(weight, _LEAST))
        tl.store(out, _pack(k.to(tl.int32), tl.exp2((weight - k).to(tl.float32))), mask=inside)


@triton.jit
def _load_table(
    table_ptr: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    padding: tl.tensor,
    SHAPE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Load a table (num_rows, width), padded to SHAPE and flat. Also return where each element is, and a mask.

    The order of a flat tensor is that of its threads, so the reshapes of a pass move no data.
    """
    at = tl.arange(0, SHAPE[0] * SHAPE[1])
    row, column = at // SHAPE[1], at % SHAPE[1]
    inside = (row < num_rows) & (column < width)
    at = row * width + column
    return tl.load(table_ptr + at, mask=inside, other=padding).to(tl.int32), at, inside


@triton.jit
def _sum(k: tl.tensor, m: tl.tensor, AXIS: tl.constexpr) -> tl.tensor:
    """Return the sum of the numbers m · 2^k over an axis, packed."""
    best = tl.max(k, AXIS)
    scale = tl.maximum(k - tl.expand_dims(best, AXIS) + 127, 0) << 23  # the bits of 2^(k - best)
    total = tl.sum(m * scale.to(tl.float32, bitcast=True), AXIS).to(tl.int32, bitcast=True)
    k = tl.where(total == 0, _LEAST, best + (total >> 23) - 127)
    m = tl.where(total == 0, 0, (total & 0x7FFFFF) | 0x3F800000)
    return _pack(k, m.to(tl.float32, bitcast=True))


@triton.jit
def _combine(weight: tl.tensor, value: tl.tensor, AXIS: tl.constexpr, MAXIMUM: tl.constexpr) -> tl.tensor:
    """Sum packed products weight · value over an axis, or maximise float64 sums weight + value."""
    if MAXIMUM:
        return tl.max(weight.to(tl.float64, bitcast=True) + value.to(tl.float64, bitcast=True), AXIS).to(
            tl.int64, bitcast=True
        )
    weight_k, weight_m = _split(weight)
    value_k, value_m = _split(value)
    return _sum(tl.maximum(weight_k + value_k, _LEAST), weight_m * value_m, AXIS)


@triton.jit
def _store_values(out: tl.tensor, values: tl.tensor, num_states: tl.tensor, MAXIMUM: tl.constexpr) -> None:
    """Store values (STATES,) as float64 logarithms."""
    if MAXIMUM:
        logarithm = values.to(tl.float64, bitcast=True)
    else:
        k, m = _split(values)
        logarithm = k.to(tl.float64) * 0.6931471805599453 + tl.log(m).to(tl.float64)
    state = tl.arange(0, values.shape[0])
    tl.store(out + state, logarithm, mask=state < num_states)


@triton.jit
def _run_pass(
    begin: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    step: tl.tensor,
    fan: Fan,
    sizes: tl.tuple,
    MAXIMUM: tl.constexpr,
    FEW: tl.constexpr,
    SOME: tl.constexpr,
    JOIN: tl.constexpr,
) -> None:
    """Run one pass over all positions, from the states `begin` (STATES,) bool."""
    canvas_len, num_slots, num_states, num_some, num_joined, width = sizes
    ZERO: tl.constexpr = _NO_PATH if MAXIMUM else _ZERO
    ONE: tl.constexpr = 0 if MAXIMUM else 0x3F800000
    values = tl.where(begin, ONE, ZERO).to(tl.int64)
    few_other, few_at, few_inside = _load_table(fan.few, FEW[0], num_states, 0, FEW)
    few_weight = tl.load(weight + few_at, mask=few_inside, other=ZERO)
    if SOME[0] > 0:
        some_other, some_at, some_inside = _load_table(fan.some, num_some, SOME[1], 0, SOME)
        some_at += FEW[0] * num_states
        some_weight = tl.load(weight + some_at, mask=some_inside, other=ZERO)
        joined_row, _, _ = _load_table(fan.join, num_joined, width, num_some - 1, JOIN)
        state = tl.arange(0, FEW[1])
        place = tl.load(fan.place + state, mask=state < num_states, other=0).to(tl.int32) - num_states
        is_joined = place >= 0
        place = tl.maximum(place, 0)
    _store_values(out, values, num_states, MAXIMUM)
    for position in range(canvas_len):
        few = tl.reshape(tl.gather(values, few_other, 0), FEW)
        if SOME[0] > 0:
            some = tl.reshape(tl.gather(values, some_other, 0), SOME)
        values = _combine(tl.reshape(few_weight, FEW), few, 0, MAXIMUM)
        if SOME[0] > 0:
            rows = _combine(tl.reshape(some_weight, SOME), some, 1, MAXIMUM)
        if position + 1 < canvas_len:  # the next weights are loaded early, to hide the latency
            weight += step * num_slots
        few_weight = tl.load(weight + few_at, mask=few_inside, other=ZERO)
        if SOME[0] > 0:
            some_weight = tl.load(weight + some_at, mask=some_inside, other=ZERO)
            rows = tl.reshape(tl.gather(rows, joined_row, 0), JOIN)
            if MAXIMUM:
                joined = tl.max(rows.to(tl.float64, bitcast=True), 1).to(tl.int64, bitcast=True)
            else:
                k, m = _split(rows)
                joined = _sum(k, m, 1)
            values = tl.where(is_joined, tl.gather(joined, place, 0), values)
        out += step * num_states
        _store_values(out, values, num_states, MAXIMUM)


@triton.jit(do_not_specialize=["num_slots", "num_states", "num_some", "num_joined", "width"])
def _passes_kernel(
    weight_ptr: tl.tensor,
    start_ptr: tl.tensor,
    end_ptr: tl.tensor,
    fan: Fan,
    out_ptr: tl.tensor,
    canvas_len: tl.tensor,
    num_slots: tl.tensor,
    num_states: tl.tensor,
    num_some: tl.tensor,
    num_joined: tl.tensor,
    width: tl.tensor,
    FEW: tl.constexpr,
    SOME: tl.constexpr,
    JOIN: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    kind = tl.num_programs(1) - 1 - tl.program_id(1)  # 2 forward, 1 backward, 0 best
    is_forward = kind == 2
    index = tl.where(is_forward, 1, 0)  # of the fan
    fan = Fan(
        fan.few + index * FEW[0] * num_states,
        fan.some + index * num_some * SOME[1],
        fan.join + index * num_joined * width,
        fan.place + index * num_states,
        fan.arc,
    )
    sizes = (canvas_len, num_slots, num_states, num_some, num_joined, width)  # as an argument it would be specialised
    state = tl.arange(0, FEW[1])
    at_end = tl.load(end_ptr + row * num_states + state, mask=state < num_states, other=0) != 0
    begin = tl.where(is_forward, state == tl.load(start_ptr + row), at_end)
    step = tl.where(is_forward, 1, -1)
    sequence = tl.program_id(1) * tl.num_programs(0) + row
    weight = weight_ptr + (sequence * canvas_len + tl.where(is_forward, 0, canvas_len - 1)) * num_slots
    out = out_ptr + (sequence * (canvas_len + 1) + tl.where(is_forward, 0, canvas_len)) * num_states
    if kind == 0:
        _run_pass(begin, weight, out, step, fan, sizes, True, FEW, SOME, JOIN)
    else:
        _run_pass(begin, weight, out, step, fan, sizes, False, FEW, SOME, JOIN)


@triton.jit(do_not_specialize=["num_arcs", "num_states"], do_not_specialize_on_alignment=["value_ptr"])
def _choose_kernel(
    weight_ptr: tl.tensor,
    value_ptr: tl.tensor,
    u_ptr: tl.tensor | None,
    arcs_out: IndexGroups,
    target_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    rest_ptr: tl.tensor,
    canvas_len: tl.tensor,
    num_arcs: tl.tensor,
    num_states: tl.tensor,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    row = tl.program_id(1).to(tl.int64)
    state, first, last, valid = _load_groups(arcs_out, 0, num_states, TILE)
    weights = weight_ptr + row * num_arcs
    values = value_ptr + (row // canvas_len * (canvas_len + 1) + row % canvas_len + 1) * num_states
    top = tl.full((TILE, LANES), _LOW, tl.float64)
    total = tl.zeros((TILE, LANES), tl.float32)
    for start in range(0, tl.max(last - first, 0), LANES):
        at = first[:, None] + start + tl.arange(0, LANES)[None, :]
        top, total = _add(top, total, _load_through(weights, values, target_ptr, at, at < last[:, None]))
    best = tl.max(top, 1)
    aim = tl.zeros((TILE,), tl.float64)
    if u_ptr is not None:
        aim = tl.load(u_ptr + row) * tl.sum(total * _exp(top - best[:, None]), 1).to(tl.float64)
    end = tl.zeros((TILE,), tl.float64)  # the sum of e^x so far
    below = tl.zeros((TILE,), tl.float64)  # the last sum that is not above the aim
    chosen = last
    last_possible = first
    for start in range(0, tl.max(last - first, 0), LANES):
        at = first[:, None] + start + tl.arange(0, LANES)[None, :]
        x = _load_through(weights, values, target_ptr, at, at < last[:, None])
        if u_ptr is not None:
            width = _exp(x - best[:, None]).to(tl.float64)
            ends = end[:, None] + tl.cumsum(width, 1)
            is_above = ends > aim[:, None]
            below = tl.maximum(below, tl.max(tl.where(is_above, 0.0, ends), 1))
            end += tl.sum(width, 1)
            last_possible = tl.maximum(last_possible, tl.max(tl.where(width > 0.0, at, 0), 1))
        else:
            is_above = x == best[:, None]
        chosen = tl.minimum(chosen, tl.min(tl.where(is_above, at, last[:, None]), 1))
    if u_ptr is not None:
        # If rounding leaves no arc above the aim, the last one that is possible is taken.
        own = _load_through(weights, values, target_ptr, tl.minimum(chosen, last_possible), valid)
        rest = (aim - below) / _exp(own - best).to(tl.float64)
        rest = tl.where((chosen <= last_possible) & (rest < 1.0), rest, 1.0 - 1.1102230246251565e-16)
        tl.store(rest_ptr + row * num_states + state, tl.maximum(rest, 0.0), mask=valid)
        chosen = tl.minimum(chosen, last_possible)
    else:
        chosen = tl.minimum(chosen, tl.maximum(last - 1, 0))
    target = tl.load(target_ptr + chosen, mask=valid, other=0)
    tl.store(chosen_ptr + row * num_states + state, target.to(tl.int32), mask=valid)


@triton.jit
def _load_through(
    weights: tl.tensor, values: tl.tensor, target_ptr: tl.tensor, arc: tl.tensor, mask: tl.tensor
) -> tl.tensor:
    """Load the weight of each arc plus the value of its target, -inf where the mask is False."""
    target = tl.load(target_ptr + arc, mask=mask, other=0)
    weight = tl.load(weights + arc, mask=mask, other=float("-inf"))
    return weight + tl.load(values + target, mask=mask, other=float("-inf"))


@triton.jit(do_not_specialize=["num_states"])
def _follow_kernel(
    chosen_ptr: tl.tensor,
    rests_ptr: tl.tensor,
    start_ptr: tl.tensor,
    path_ptr: tl.tensor,
    rest_ptr: tl.tensor,
    canvas_len: tl.tensor,
    num_states: tl.tensor,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    state = tl.load(start_ptr + row)
    path = path_ptr + row * (canvas_len + 1)
    tl.store(path, state)
    for position in range(canvas_len):
        at = (row * canvas_len + position) * num_states + state
        if rests_ptr is not None:
            tl.store(rest_ptr + row * canvas_len + position, tl.load(rests_ptr + at))
        state = tl.load(chosen_ptr + at).to(tl.int64)
        tl.store(path + position + 1, state)


@triton.jit(do_not_specialize=["num_states", "num_classes"], do_not_specialize_on_alignment=["backward_ptr"])
def _class_bias_kernel(
    forward_ptr: tl.tensor,
    backward_ptr: tl.tensor,
    links: IndexGroups,
    link_arc_ptr: tl.tensor,
    source_ptr: tl.tensor,
    target_ptr: tl.tensor,
    endings: _Endings,
    out_ptr: tl.tensor,
    canvas_len: tl.tensor,
    num_states: tl.tensor,
    num_classes: tl.tensor,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    row = tl.program_id(1).to(tl.int64)
    slot = row // canvas_len * (canvas_len + 1) + row % canvas_len
    group, first, last, valid = _load_groups(links, 0, num_classes, TILE)
    top = tl.full((TILE, LANES), _LOW, tl.float64)
    total = tl.zeros((TILE, LANES), tl.float32)
    for start in range(0, tl.max(last - first, 0), LANES):
        at = first[:, None] + start + tl.arange(0, LANES)[None, :]
        inside = at < last[:, None]
        link = tl.load(links.member + at, mask=inside, other=0)
        arc = tl.load(link_arc_ptr + link, mask=inside, other=0)
        source = tl.load(source_ptr + arc, mask=inside, other=0)
        target = tl.load(target_ptr + arc, mask=inside, other=0)
        if endings.may_end is not None:
            ends = tl.load(endings.ends_text + arc, mask=inside, other=0).to(tl.int32)
            inside = inside & (ends <= tl.load(endings.may_end + row).to(tl.int32))
        x = tl.load(forward_ptr + slot * num_states + source, mask=inside, other=float("-inf"))
        x += tl.load(backward_ptr + (slot + 1) * num_states + target, mask=inside, other=float("-inf"))
        top, total = _add(top, total, x)
    tl.store(out_ptr + row * num_classes + group, _log_sum(top, total), mask=valid)
