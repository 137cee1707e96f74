"""Causal attention within a window, on Hopper.

As in `test_attention_hopper`, its source runs in `gluon_interpreter` on every machine, and natively on a Hopper GPU.
"""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_cases import HANGS, LIMITS, SLIDING, TAKEN, UNSEEN, draw, exact, native, pretend_hopper
from dgemma_kernels.ops.attention import attention
from dgemma_kernels.ops.attention import kernel as module
from gluon_interpreter import Hazard, load
from kernel_inputs import error

PROGRAMS = 2  # for five tiles of rows, so that programs have two and three of them
UNIT = 1 / 16  # scale of float8 results: the largest code, 448, stands for 28, and attention's values are at most 16


@functools.cache
def interpreted(seed: int = 0, edits: tuple[tuple[str, str], ...] = ()) -> Any:
    kernel = load("dgemma_kernels.ops.attention.hopper_window", seed=seed, edits=dict(edits))
    kernel.num_multiprocessors = lambda device: PROGRAMS
    return kernel


def interpret(case: tuple[Tensor, ...], window: int, *, float8: bool = False, kernel: Any = None) -> Tensor:
    """Run the kernel's source on the CPU → (B, T, N, H)."""
    queries = case[0]
    out = torch.full(queries.shape, torch.nan).to(torch.float8_e4m3fn if float8 else queries.dtype)
    scale = torch.full((queries.shape[0] * queries.shape[1],), torch.nan) if float8 else None
    (kernel or interpreted()).attend(*case, out, scale, window)
    assert scale is None or scale.tolist() == [UNIT] * len(scale)
    return out


# Four heads share a key head, so a tile's 128 rows are 32 tokens.
CASES = {
    "no-prefix": ([0], 150, 50),
    "prefix": ([70], 150, 50),  # keys end inside of the last tile; the slots after them are NaN
    "rows": ([0, 131], 70, 33),  # rows of the batch end in partial tiles
    "window-of-one-tile": ([64], 130, 64),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(("lengths", "num_tokens", "window"), CASES.values(), ids=CASES)
def test_interpreted_tokens_match_float64(lengths, num_tokens, window, dtype):
    case = draw(lengths, num_tokens, (1, 256), heads=4, dtype=dtype, device="cpu")
    plain = interpret(case, window)
    assert error(plain, exact(*case, causal=True, window=window)) < LIMITS[dtype]
    want = (plain.float() / UNIT).to(torch.float8_e4m3fn)
    assert torch.equal(interpret(case, window, float8=True).float(), want.float())


def test_several_key_heads_match_float64():
    case = draw([40], 70, (2, 256), heads=4, dtype=torch.float16, device="cpu")
    assert error(interpret(case, 50), exact(*case, causal=True, window=50)) < LIMITS[torch.float16]


def test_bits_do_not_depend_on_the_order_of_copies_and_warps():
    case = draw([70], 150, (1, 256), heads=4, device="cpu")
    first, *others = (interpret(case, 50, float8=True, kernel=interpreted(seed)).float() for seed in range(4))
    assert all(torch.equal(other, first) for other in others)


def test_prompts_with_more_tiles_of_rows_than_programs_call_it(monkeypatch):
    calls: list[tuple] = []

    class Substitute:
        TILE = (128, 64, 256)

        @staticmethod
        def attend(*arguments: Any) -> None:
            calls.append(arguments)
            interpreted().attend(*arguments)

    pretend_hopper(monkeypatch)
    monkeypatch.setattr(module, "_hopper_window", lambda: Substitute)
    monkeypatch.setattr(module, "num_multiprocessors", lambda device: PROGRAMS)
    case = draw([40], 70, (1, 256), heads=4, dtype=torch.float16, device="cpu")  # three tiles
    got = attention(*case, causal=True, window=50, num_splits=1)
    assert error(got, exact(*case, causal=True, window=50)) < LIMITS[torch.float16]
    assert len(calls) == 1
    few = draw([40], 30, (1, 256), heads=4, dtype=torch.float16, device="cpu")
    for options in ({"canvas_len": 4, "keep": 49}, {"part": 64}):  # part: the order of sums must not depend on rows
        assert not module._has_many_tiles(case[0], case[1], options.get("canvas_len", 0), options.get("part", 0))
    assert not module._has_many_tiles(few[0], few[1], 0, 0)


EARLY, LATE = f"{UNSEEN}|never written", "no more arrivals"
# A passage of the kernel, its replacement, and the error that this must raise, or None if the result must be wrong.
MISTAKES = {
    "values-not-awaited": ("            mbarrier.wait(v_full.index(at + 1), phase)\n", "", EARLY),
    "keys-in-one-phase": ("(k_full.index(at), number // _BUFFERS & 1)", "(k_full.index(at), 0)", f"{TAKEN}|{HANGS}"),
    "queries-in-one-phase": ("wait(q_full.index(c), turn & 1)", "wait(q_full.index(c), 0)", f"{EARLY}|{HANGS}|{TAKEN}"),
    "queries-overwritten": ("        mbarrier.wait(q_free.index(0), (turn & 1) ^ 1)\n", "", f"{TAKEN}|{LATE}"),
    "queries-freed-early": (
        "mbarrier.wait(q_full.index(c), turn & 1)\n",
        "mbarrier.wait(q_full.index(c), turn & 1)\n        mbarrier.arrive(q_free.index(0))\n",
        f"{TAKEN}|{HANGS}|{LATE}",
    ),
    "result-overwritten": ("            tma.store_wait(0)  # of the previous tile of rows\n", "", TAKEN),
    "tiles-not-counted": ("        started += num_tiles\n", "", f"{TAKEN}|{HANGS}|{EARLY}|{LATE}"),
    "values-not-freed": ("        mbarrier.arrive(v_free.index(at + 1))\n        finished", "        finished", HANGS),
    "last-values-not-copied": (
        "    _copy_tile(value_desc, last_values, started - 1, v_full, v_free, v_smem)\n\n", "\n", HANGS
    ),
    "no-fence": ("            fence_async_shared()\n            mb", "            mb", "without fence_async_shared"),
    "other-warpgroup-not-awaited": (
        "            mbarrier.wait(v_clean.index(0), num_cleaned & 1)\n", "", f"{UNSEEN}|{TAKEN}"
    ),
    "result-in-flight": ("    tma.store_wait(0)\n\n", "\n", "ends before its products and stores"),
    "values-not-cleaned": ("if begin + num_tiles * KEYS > prefix_len + num_tokens:", "if num_tiles < 0:", None),
    "values-of-another-tile": ("value_slot + (j - 1) * KEYS", "value_slot + j * KEYS", None),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "found"), MISTAKES.values(), ids=MISTAKES)
def test_every_mistake_in_the_kernel_is_detected_in_every_order(old, new, found):
    # Each program has several tiles of rows, and rows of the batch end in the middle of a tile of keys.
    case = draw([0, 131], 70, (1, 256), heads=4, dtype=torch.float16, device="cpu")
    for seed in range(2):
        kernel = interpreted(seed, ((old, new),))
        if found:
            with pytest.raises((Hazard, ValueError), match=found):
                interpret(case, 33, float8=True, kernel=kernel)
        else:
            got = interpret(case, 33, kernel=kernel)
            assert not error(got, exact(*case, causal=True, window=33)) < 10 * LIMITS[torch.float16]


@native
def test_native_results_have_the_bits_of_the_other_kernel():
    for lengths, num_tokens in (([0], 3000), ([1023, 64], 1500), ([65], 2077)):
        case = draw(lengths, num_tokens, SLIDING)
        for float8 in (False, True):
            got = attention(*case, causal=True, window=1000, kernel="hopper", num_splits=1, float8=float8)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, "_has_many_tiles", lambda *arguments: False)
                want = attention(*case, causal=True, window=1000, kernel="hopper", num_splits=1, float8=float8)
            if float8:
                assert torch.equal(got.scale, want.scale)
                got, want = got.values.float(), want.values.float()
            assert torch.equal(got, want)
        assert error(got.view(want.shape) / 16, exact(*case, causal=True, window=1000).view(want.shape)) < 0.03
