"""The Hopper kernel for heads of 512 whose keys equal their values where they do not rotate.

As in `test_attention_hopper`, its source runs in `gluon_interpreter` on every machine, and natively on a Hopper GPU.
"""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import attention_cases
from attention_cases import (
    FULL,
    HANGS,
    LIMITS,
    TAKEN,
    UNSEEN,
    assert_detected,
    exact,
    interpret,
    native,
    pretend_hopper,
)
from dgemma_kernels.ops.attention import kernel as module
from dgemma_kernels.ops.attention.kernel import attention
from gluon_interpreter import load
from kernel_inputs import error

SMALL = (1, 512)  # key heads, head_dim; four query heads share the key head, so a program's 64 rows are 16 tokens
PAIRS = 64
check = functools.partial(attention_cases.check, rotary_pairs=PAIRS)
check_float8 = functools.partial(attention_cases.check_float8, rotary_pairs=PAIRS)


def draw(lengths: list[int], num_tokens: int, layer: tuple[int, int] = SMALL, **options: Any) -> tuple[Tensor, ...]:
    """Draw queries, keys, values and lengths. Keys equal values except in the rotated columns. Free slots are NaN."""
    if layer == SMALL:
        options = {"heads": 4, "device": "cpu"} | options
    queries, keys, values, length = attention_cases.draw(lengths, num_tokens, layer, **options)
    halves = (cache.unflatten(-1, (2, 256))[..., PAIRS:] for cache in (keys, values))
    next(halves).copy_(next(halves))
    return queries, keys, values, length


@functools.cache
def interpreted(seed: int = 0, edits: tuple[tuple[str, str], ...] = ()) -> Any:
    return load("dgemma_kernels.ops.attention.hopper_shared", seed=seed, edits=dict(edits))


def check_interpreted(case: tuple[Tensor, ...], num_splits: int = 1, **mode: int | bool) -> None:
    assert (
        error(interpret(interpreted(), case, num_splits=num_splits, **mode), exact(*case, **mode))
        < LIMITS[case[0].dtype]
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("num_splits", [1, 3], ids=["whole", "three-parts"])
def test_interpreted_canvas_matches_float64(dtype, num_splits):
    # One to eight tiles of 64 slots, so that the last pair of tiles is full, or has a partial or an empty tile.
    for lengths in ([0], [54], [55], [56], [100], [119], [120], [400]):
        check_interpreted(draw(lengths, 9, dtype=dtype), num_splits)
    check_interpreted(draw([65, 0], 35, dtype=dtype), num_splits)  # a partial tile of rows


@pytest.mark.parametrize("num_splits", [1, 2], ids=["whole", "two-parts"])
def test_interpreted_causal_tokens_match_float64(num_splits):
    check_interpreted(draw([150], 40), num_splits, causal=True)
    check_interpreted(draw([0, 70], 9), num_splits, causal=True)
    check_interpreted(draw([3, 120], 40), num_splits, causal=True, canvas_len=12)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (64, 1)], ids=["alone", "sixty-four"])
def test_interpreted_groups_of_heads_match_float64(heads, kv_heads):
    check_interpreted(draw([0, 70], 3, (kv_heads, 512), heads=heads, device="cpu"), 2)


def test_a_growing_maximum_rescales_the_sums_of_both_warpgroups():
    """Scores grow from tile to tile by more than a weight can shrink, so every tile has a new maximum."""
    queries, keys, values, length = draw([500], 9)
    for cache in (keys, values):
        cache *= torch.linspace(0, 40, cache.shape[2])[:, None].to(cache.dtype)
    check_interpreted((queries, keys, values, length))


@pytest.mark.slow
def test_bits_do_not_depend_on_the_order_of_copies_and_warps():
    case = draw([380], 9)
    first, *others = (interpret(interpreted(seed), case) for seed in range(6))
    assert all(torch.equal(other, first) for other in others)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pretend that this is a Hopper GPU, with interpreted kernels. Return the names of those that ran."""
    names: list[str] = []
    for name in ("hopper", "hopper_shared"):
        kernel = load(f"dgemma_kernels.ops.attention.{name}")

        def attend(*arguments: Any, run: Any = kernel.attend, name: str = name) -> None:
            names.append(name)
            run(*arguments)

        kernel.attend = attend
        monkeypatch.setattr(module, f"_{name}", lambda kernel=kernel: kernel)
    pretend_hopper(monkeypatch)
    return names


def test_attention_computes_scores_once_where_keys_equal_values(calls):
    case = draw([70], 9)
    one = {"num_splits": 1}  # one part works on the CPU; several are added by a Triton kernel, which may need a GPU
    assert error(attention(*case, **one, rotary_pairs=PAIRS), exact(*case)) < LIMITS[torch.bfloat16]
    assert calls == ["hopper_shared"]
    calls.clear()
    for options in (one, {**one, "rotary_pairs": 65}, {"rotary_pairs": PAIRS, "part": 640}):
        assert error(attention(*case, **options, causal=True), exact(*case, causal=True)) < LIMITS[torch.bfloat16]
    assert calls == ["hopper"] * 3


def test_interpreted_float8_is_the_plain_result_rounded(calls):
    check_float8(draw([5, 64], 35))
    assert set(calls) == {"hopper_shared"}


# A passage of the kernel, its replacement, and the error that this must raise, or None if the result must be wrong.
MISTAKES = {
    "values-not-awaited": ("    mbarrier.wait(v_full.index(4 * WG + 2 * HALF + 1), i & 1)\n", "", UNSEEN),
    "keys-not-awaited": ("    mbarrier.wait(k_full.index(WG), i & 1)\n", "", UNSEEN),
    "weights-not-awaited": ("    mbarrier.wait(ready.index(OTHER), i & 1)\n", "", f"{UNSEEN}|{TAKEN}|never written"),
    "totals-not-awaited": ("    mbarrier.wait(joined.index(0), 0)\n", "", f"{UNSEEN}|{TAKEN}|never written"),
    "phase-not-flipped": ("(i & 1) ^ 1", "i & 1", f"{HANGS}|{TAKEN}"),
    "no-fence": ("    fence_async_shared()\n    mbarrier", "    mbarrier", "without fence_async_shared"),
    "half-freed-twice": ("free.index(3 * WG)", "free.index(0)", f"{TAKEN}|{HANGS}|no more arrivals"),
    "scores-in-flight": (
        "(free.index(2 - WG))\n        s = warpgroup_mma_wait(0,",
        "(free.index(2 - WG))\n        s = warpgroup_mma_wait(1,",
        "that it has not waited for",
    ),
    "half-freed-in-flight": ("mma_wait(4, deps=(acc,))", "mma_wait(5, deps=(acc,))", f"{TAKEN}|not waited"),
    "copy-too-many": ("(num_pairs):\n        for w", "(num_pairs + 1):\n        for w", f"{HANGS}|all its copies"),
    "values-not-cleaned": ("if begin + (j + 1) * KEYS > end:", "if begin < 0:", None),
    "sums-not-rescaled": ("gl.exp2(top - gl.where", "gl.exp2(0.0 * gl.where", None),
    "columns-swapped": ("query_pairs.index(4 * half + zero)", "query_pairs.index(4 - 4 * half + zero)", None),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new", "found"), MISTAKES.values(), ids=MISTAKES)
def test_every_mistake_in_the_kernel_is_detected_in_every_order(old, new, found):
    queries, *rest = draw([500], 9, dtype=torch.float16)
    case = (queries * 4, *rest)
    for seed in range(2):
        run = functools.partial(interpret, interpreted(seed, ((old, new),)), case, num_splits=2)
        assert_detected(run, found, exact(*case), 10 * LIMITS[torch.float16])


@native
@pytest.mark.parametrize("num_splits", [1, None, 4], ids=["whole", "default", "four-parts"])
def test_canvas_matches_float64(num_splits):
    for lengths in ([0], [63], [64], [65], [1023], [1024], [1500, 0, 64, 700]):
        check(draw(lengths, 256, FULL), num_splits=num_splits)
    check(draw([130, 65], 100, FULL), num_splits=num_splits)  # rows do not fill a tile
    queries, *rest = draw([1024, 65], 256, FULL)
    check((queries * 30, *rest), num_splits=num_splits)  # nearly a hard maximum


@native
@pytest.mark.parametrize("num_splits", [1, 5], ids=["whole", "five-parts"])
def test_causal_matches_float64(num_splits):
    for lengths, num_tokens in (([0, 500], 256), ([65, 3], 77), ([0], 700)):
        check(draw(lengths, num_tokens, FULL), causal=True, num_splits=num_splits)
    check(draw([200, 1023], 300, FULL), causal=True, canvas_len=100, num_splits=num_splits)
    check(draw([70, 0], 40, (4, 512), dtype=torch.float16), causal=True, num_splits=num_splits)


@native
def test_float8_is_the_plain_result_rounded():
    check_float8(draw([1500, 0, 64, 700], 256, FULL))
    check_float8(draw([130, 65], 100, FULL), causal=True)


@native
def test_same_inputs_give_the_same_bits():
    case = draw([1023, 300], 256, FULL)
    first = attention(*case, rotary_pairs=PAIRS)
    for _ in range(20):
        assert torch.equal(attention(*case, rotary_pairs=PAIRS), first)
