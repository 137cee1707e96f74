"""The Hopper kernels of `attention`: when they are chosen, and their results.

The kernels are compiled only on a Hopper GPU. On every machine their source runs in `gluon_interpreter`, on small
shapes and in several orders of operations that a GPU does not order. Copies of the source with one mistake each must be
detected. `hopper_shared` is for heads of 512 whose keys equal their values where they do not rotate.
"""

import functools
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import pytest
import torch
import triton
from torch import Tensor

import attention_cases
from attention_cases import (
    FULL,
    HANGS,
    LIMITS,
    SLIDING,
    TAKEN,
    UNSEEN,
    assert_detected,
    check,
    check_float8,
    exact,
    interpret,
    native,
    pretend_hopper,
)
from dgemma_kernels.ops import configs
from dgemma_kernels.ops.attention import kernel as module
from dgemma_kernels.ops.attention.kernel import AttentionTile, attention, choose_kernel
from gluon_interpreter import load
from kernel_inputs import error


class Kernel(NamedTuple):
    """A module of `ops/attention`, and layers that it computes: their key heads and head_dim, and rotary_pairs."""

    module: str
    layer: tuple[int, int]
    dtype: torch.dtype = torch.bfloat16
    pairs: int | None = None

    @property
    def window(self) -> bool:
        return self.layer[1] == 256

    def draw(self, lengths: list[int], num_tokens: int, **options: Any) -> tuple[Tensor, ...]:
        options = {"dtype": self.dtype, "rotary_pairs": self.pairs} | options
        return attention_cases.draw(lengths, num_tokens, options.pop("layer", self.layer), **options)

    def draw_small(self, lengths: list[int], num_tokens: int, **options: Any) -> tuple[Tensor, ...]:
        """Draw one key head, which four query heads share."""
        return self.draw(lengths, num_tokens, **{"heads": 4, "device": "cpu"} | options)

    def interpret(self, case: tuple[Tensor, ...], *, seed: int = 0, edits: tuple = (), **options: Any) -> Tensor:
        part = {"part": 0} if self.module == "hopper" else {}
        return interpret(interpreted(self.module, seed, edits), case, **part | options)

    def check_interpreted(self, case: tuple[Tensor, ...], num_splits: int = 1, **mode: int | bool) -> None:
        got = self.interpret(case, num_splits=num_splits, **mode)
        assert error(got, exact(*case, **mode)) < LIMITS[case[0].dtype]

    def check(self, case: tuple[Tensor, ...], num_splits: int | None, **mode: int | bool) -> None:
        check(case, num_splits=num_splits, rotary_pairs=self.pairs, **mode)


@functools.cache
def interpreted(name: str, seed: int = 0, edits: tuple[tuple[str, str], ...] = ()) -> Any:
    return load(f"dgemma_kernels.ops.attention.{name}", seed=seed, edits=dict(edits))


# A program's 128 or, in `hopper_shared`, 64 rows are 32 or 16 tokens. Shared memory holds two tiles, or one at H = 512.
SMALL = {
    "sliding": Kernel("hopper", (1, 256)),
    "sliding-float16": Kernel("hopper", (1, 256), torch.float16),
    "full": Kernel("hopper", (1, 512)),
    "shared": Kernel("hopper_shared", (1, 512), pairs=64),
    "shared-float16": Kernel("hopper_shared", (1, 512), torch.float16, pairs=64),
}
PUBLISHED = {
    "sliding": Kernel("hopper", SLIDING),
    "full": Kernel("hopper", FULL),
    "shared": Kernel("hopper_shared", FULL, pairs=64),
}
ON_SMALL = pytest.mark.parametrize("kernel", SMALL.values(), ids=SMALL)
ON_PUBLISHED = pytest.mark.parametrize("kernel", PUBLISHED.values(), ids=PUBLISHED)


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


@pytest.mark.parametrize(
    ("num_tokens", "heads", "layer", "dtype", "chosen"),
    [
        (256, 16, SLIDING, torch.bfloat16, True),
        (256, 16, FULL, torch.bfloat16, True),
        (3, 16, FULL, torch.float16, True),
        (1, 16, FULL, torch.bfloat16, False),
        (8, 16, SLIDING, torch.bfloat16, False),
        (256, 16, SLIDING, torch.float32, False),
        (256, 16, (8, 128), torch.bfloat16, False),
        (256, 12, (4, 256), torch.bfloat16, False),
    ],
    ids=["sliding", "full", "24-rows", "one-token", "16-rows", "float32", "narrow-heads", "groups-of-three"],
)
def test_hopper_kernel_is_chosen_for_canvases_of_wide_heads(num_tokens, heads, layer, dtype, chosen, monkeypatch):
    pretend_hopper(monkeypatch)
    queries = torch.empty(1, num_tokens, heads, layer[1], dtype=dtype)
    keys = torch.empty(1, layer[0], 300, layer[1], dtype=dtype)
    assert (choose_kernel(queries, keys, keys).kernel == "hopper") is chosen


@pytest.mark.parametrize("which", [0, 1, 2], ids=["queries", "keys", "values"])
def test_hopper_kernel_needs_tensors_aligned_to_16_bytes_and_whole_slots_between_heads(which, monkeypatch):
    pretend_hopper(monkeypatch)
    shapes = [(1, 32, 16, 256), (1, 8, 64, 256), (1, 8, 64, 256)]
    tensors = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
    assert choose_kernel(*tensors).kernel == "hopper"
    longer = torch.empty(8 * (64 * 256 + 8), dtype=torch.bfloat16)
    apart = longer.as_strided((1, 8, 64, 256), (8 * (64 * 256 + 8), 64 * 256 + 8, 256, 1))
    assert "strides" in choose_kernel(tensors[0], apart, apart).reason
    tensors[which] = torch.empty(tensors[which].numel() + 4, dtype=torch.bfloat16)[4:].view(shapes[which])
    assert choose_kernel(*tensors) == ("triton", "the Hopper kernel needs tensors aligned to 16 bytes")


def test_auto_needs_a_tested_triton_for_the_hopper_kernel_and_names_its_version(monkeypatch):
    pretend_hopper(monkeypatch)
    queries, keys = torch.empty(1, 32, 16, 256).bfloat16(), torch.empty(1, 8, 64, 256).bfloat16()
    assert choose_kernel(queries, keys, keys).kernel == "hopper"
    monkeypatch.setattr(configs, "GLUON_RAN_WITH", ("2.0.",))
    choice = choose_kernel(queries, keys, keys)
    assert choice.kernel == "triton"
    needs = f'Triton 2.0.*, got {triton.__version__} (pip install "torch==2.11.*" "triton==2.0.*")'
    assert choice.reason == f'the Hopper kernel is tested with {needs}; kernel="hopper" runs it anyway'


@pytest.mark.skipif(torch.cuda.is_available(), reason="there may be a Hopper GPU")
def test_an_explicit_hopper_kernel_raises_where_it_cannot_run(monkeypatch):
    case = SMALL["sliding-float16"].draw_small([5], 9)
    with pytest.raises(ValueError, match=r'kernel="hopper" needs a Hopper GPU \(compute capability 9.0\), got .* cpu'):
        attention(*case, kernel="hopper")
    pretend_hopper(monkeypatch)
    wide = [tensor.float() if tensor.is_floating_point() else tensor for tensor in case]
    with pytest.raises(
        ValueError, match=r'kernel="hopper" needs bfloat16 or float16, got torch.float32. Use kernel="a'
    ):
        attention(*wide, kernel="hopper")
    with pytest.raises(ValueError, match=r"attention kernel must be .*, got 'gluon'"):
        attention(*case, kernel="gluon")


@pytest.mark.parametrize("num_splits", [None, 1, 3])
def test_the_chosen_kernel_computes_all_parts_of_the_result(num_splits, monkeypatch, device):
    """The Triton kernel stands in for the one for Hopper, because a Triton kernel adds the parts, maybe on a GPU."""
    hopper = MagicMock(TILE=(128, 64, 256))
    hopper.attend.side_effect = lambda *arguments: module._attend(*arguments, AttentionTile(16, 16, 4, 2))
    monkeypatch.setattr(module, "_hopper", lambda: hopper)
    pretend_hopper(monkeypatch)
    case = SMALL["sliding-float16"].draw([0, 27], 9, layer=(2, 256), heads=4, device=device)
    got = attention(*case, causal=True, window=9, canvas_len=5, keep=8, num_splits=num_splits)
    assert hopper.attend.call_count == 1
    want = exact(*case, causal=True, window=9, canvas_len=5, keep=8)
    assert error(got, want) < 2e-3
    attention(*case, tile=AttentionTile(16, 16, 4, 2))
    assert hopper.attend.call_count == 1  # a tile selects the Triton kernel


def test_attention_computes_scores_once_where_keys_equal_values(calls):
    case = SMALL["shared"].draw_small([70], 9)
    one = {"num_splits": 1}  # one part works on the CPU; several are added by a Triton kernel, which may need a GPU
    assert error(attention(*case, **one, rotary_pairs=64), exact(*case)) < LIMITS[torch.bfloat16]
    assert calls == ["hopper_shared"]
    calls.clear()
    for options in (one, {**one, "rotary_pairs": 65}, {"rotary_pairs": 64, "part": 640}):
        assert error(attention(*case, **options, causal=True), exact(*case, causal=True)) < LIMITS[torch.bfloat16]
    assert calls == ["hopper"] * 3


@ON_SMALL
@pytest.mark.parametrize("num_splits", [1, pytest.param(3, marks=pytest.mark.slow)], ids=["whole", "three-parts"])
def test_interpreted_canvas_matches_float64(kernel, num_splits):
    # Prefixes near one tile of 64 slots, without and with the canvas, and near a pair of tiles; parts without a tile;
    # seven tiles, so that every buffer is used three times.
    for lengths in ([0], [1], [54], [55], [56], [63], [64], [65], [119], [120], [400]):
        kernel.check_interpreted(kernel.draw_small(lengths, 9), num_splits)
    kernel.check_interpreted(kernel.draw_small([65, 0], 35), num_splits)  # a partial tile of rows


@ON_SMALL
@pytest.mark.parametrize("num_splits", [1, 2], ids=["whole", "two-parts"])
def test_interpreted_causal_tokens_match_float64(kernel, num_splits):
    window = {"window": 50} if kernel.window else {}
    # With this window the first program's last token sees nothing of that program's first tile.
    kernel.check_interpreted(kernel.draw_small([150], 40), num_splits, causal=True, **window)
    kernel.check_interpreted(kernel.draw_small([0, 70], 9), num_splits, causal=True, **window)


@ON_SMALL
def test_interpreted_tokens_followed_by_a_canvas_match_float64(kernel):
    window = {"window": 50, "keep": 40} if kernel.window else {}
    kernel.check_interpreted(kernel.draw_small([3, 120], 40), 2, causal=True, canvas_len=12, **window)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (32, 2), (64, 1)], ids=["alone", "sixteen", "sixty-four"])
@pytest.mark.parametrize("name", ["sliding-float16", "shared"])
def test_interpreted_groups_of_heads_match_float64(name, heads, kv_heads):
    kernel = SMALL[name]
    case = kernel.draw_small([0, 70], 3, layer=(kv_heads, kernel.layer[1]), heads=heads)
    if name != "shared":
        queries, keys, values, length = case
        used = 70 + 3  # values fill their memory to the last slot, with other strides than keys
        others = torch.empty(2, kv_heads + 1, used, 256, dtype=torch.float16)
        others[:, 1:] = values[:, :, :used]
        case = queries, keys[:, :, :used], others[:, 1:], length
    kernel.check_interpreted(case, 2)


def test_a_growing_maximum_rescales_the_sums_of_both_warpgroups():
    """Scores grow from tile to tile by more than a weight can shrink, so every tile has a new maximum."""
    queries, keys, values, length = SMALL["shared"].draw_small([500], 9)
    for cache in (keys, values):
        cache *= torch.linspace(0, 40, cache.shape[2])[:, None].to(cache.dtype)
    SMALL["shared"].check_interpreted((queries, keys, values, length))


@ON_SMALL
def test_interpreted_float8_is_the_plain_result_rounded(kernel, calls):
    check_float8(kernel.draw_small([5, 64], 35), kernel="hopper", rotary_pairs=kernel.pairs)
    assert set(calls) == {kernel.module}


def test_interpreted_fixed_parts_match_float64_with_more_parts_than_keys():
    case = SMALL["sliding-float16"].draw_small([70, 3], 2, heads=2)
    got = SMALL["sliding-float16"].interpret(case, causal=True, part=64, num_splits=3)  # of 64, 64 and 128 positions
    assert error(got, exact(*case, causal=True)) < LIMITS[torch.float16]


def test_interpreted_fixed_parts_have_the_same_bits_from_any_first_slot():
    """A sliding layer may have forgotten its oldest tokens. Its keys then start at another slot, here after zeros."""
    kernel = SMALL["sliding-float16"]
    queries, *caches, length = case = kernel.draw_small([70], 6, heads=2)
    modes = {"causal": True, "window": 40, "canvas_len": 6, "keep": 38, "part": 64, "num_splits": 2}
    want = kernel.interpret(case, **modes)
    assert error(want, exact(*case, causal=True, window=40, canvas_len=6, keep=38)) < LIMITS[torch.float16]
    for dropped in (3, 32):
        zeros = caches[0].new_zeros(1, 1, 64, 256)
        moved = [torch.cat((zeros, cache[:, :, dropped:]), 2)[:, :, 64:] for cache in caches]
        got = kernel.interpret((queries, *moved, length - dropped), position=length, **modes)
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["sliding", *(pytest.param(n, marks=pytest.mark.slow) for n in ("full", "shared"))])
def test_bits_do_not_depend_on_the_order_of_copies_and_warps(name):
    case = SMALL[name].draw_small([380], 9)
    first, *others = (SMALL[name].interpret(case, seed=seed) for seed in range(6))
    assert all(torch.equal(other, first) for other in others)


# A passage of the kernel, its replacement, and the error that this must raise, or None if the result must be wrong.
MISTAKES = {
    "values-not-awaited": ("        mbarrier.wait(v_full.index(at + 1), phase)\n", "", UNSEEN),
    "keys-awaited-in-one-phase": ("k_full.index(at), j // BUFFERS & 1", "k_full.index(at), 0", f"{TAKEN}|{HANGS}"),
    "phase-not-flipped": ("(i // BUFFERS & 1) ^ 1", "i // BUFFERS & 1", f"{HANGS}|{TAKEN}"),
    "keys-given-back-in-flight": ("mma_wait(1, deps=(s,))", "mma_wait(2, deps=(s,))", TAKEN),
    "values-given-back-by-one": ("(BUFFERS * 2, 2)", "(4, 1)", f"{TAKEN}|{HANGS}"),
    "half-the-bytes": ("expect(q_full.index(c), 2 * BYTES)", "expect(q_full.index(c), BYTES)", "does not expect"),
    "copy-too-many": ("        if j < num_tiles:\n", "        if j <= num_tiles:\n", "waited for all its copies"),
    "scores-in-flight": ("mma_wait(2, deps=(s,))", "mma_wait(3, deps=(s,))", "that it has not waited for"),
    "result-in-flight": ("    tma.store_wait(0)\n", "    tma.store_wait(1)\n", "ends before its products and stores"),
    "no-fence": ("        fence_async_shared()\n        mbarrier", "        mbarrier", "without fence_async_shared"),
    "other-warpgroup-not-awaited": ("        mbarrier.wait(v_clean.index(0), 0)\n", "", f"{UNSEEN}|{TAKEN}"),
    "layouts-mixed": ("gl.convert_layout(decay, SUM_ROW)", "decay", "must have one layout"),
    "token-too-many": ("mask=token < num_tokens", "mask=token <= num_tokens", "reaches elements"),
    "values-not-cleaned": ("if begin + num_tiles * KEYS > end:", "if num_tiles < 0:", None),
    "tile-not-masked": ("if at < clear_begin or at + KEYS > clear_end:", "if at < clear_begin:", None),
    "values-of-another-tile": ("value_slot + i * KEYS", "value_slot + j * KEYS", None),
}  # fmt: skip
MISTAKES_OF_SHARED = {
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
@pytest.mark.parametrize(
    ("name", "old", "new", "found"),
    [
        pytest.param(name, *mistake, id=f"{name}-{what}")
        for name, mistakes in {"sliding-float16": MISTAKES, "shared-float16": MISTAKES_OF_SHARED}.items()
        for what, mistake in mistakes.items()
    ],
)
def test_every_mistake_in_the_kernel_is_detected_in_every_order(name, old, new, found):
    queries, *rest = SMALL[name].draw_small([500], 9)
    case = (queries * (4 if name == "shared-float16" else 1), *rest)
    for seed in range(2):
        run = functools.partial(SMALL[name].interpret, case, seed=seed, edits=((old, new),), num_splits=2)
        assert_detected(run, found, exact(*case), 10 * LIMITS[torch.float16])


@native
@ON_PUBLISHED
def test_float8_is_the_plain_result_rounded(kernel):
    options = {"kernel": "hopper", "rotary_pairs": kernel.pairs}
    check_float8(kernel.draw([1500, 0, 64, 700], 256), **options)
    check_float8(kernel.draw([0, 500], 700), **options, causal=True, **({"window": 100} if kernel.window else {}))
    check_float8(kernel.draw([130, 65], 100), **options)  # rows do not fill a tile


@native
@ON_PUBLISHED
@pytest.mark.parametrize("num_splits", [1, None, 4], ids=["whole", "default", "four-parts"])
def test_canvas_matches_float64(kernel, num_splits):
    # Prefixes near one tile of 64 slots, and four times as many parts as the shortest row has tiles.
    for lengths in ([0], [1], [63], [64], [65], [1023], [1024], [1500, 0, 64, 700]):
        kernel.check(kernel.draw(lengths, 256), num_splits)
    kernel.check(kernel.draw([130, 65], 100), num_splits)  # rows do not fill a tile
    queries, *rest = kernel.draw([1024, 65], 256)
    kernel.check((queries * 30, *rest), num_splits)  # nearly a hard maximum


@native
@ON_PUBLISHED
@pytest.mark.parametrize("num_splits", [1, 5], ids=["whole", "five-parts"])
def test_causal_matches_float64(kernel, num_splits):
    window = {"window": 100} if kernel.window else {}
    for lengths, num_tokens in (([0, 500], 256), ([65, 3], 77), ([0], 700)):
        kernel.check(kernel.draw(lengths, num_tokens), num_splits, causal=True, **window)


@native
@ON_PUBLISHED
def test_tokens_followed_by_a_canvas_match_float64(kernel):
    window = {"window": 96, "keep": 95} if kernel.window else {}
    for lengths in ([200, 64], [1023, 0]):
        kernel.check(kernel.draw(lengths, 300), 2, causal=True, canvas_len=100, **window)


@native
@ON_PUBLISHED
@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(16, 16), (16, 4), (16, 1), (64, 1)], ids=["alone", "fours", "sixteen", "sixty-four"]
)
def test_float16_and_other_groups_of_heads_match_float64(kernel, heads, kv_heads):
    layer = (kv_heads, kernel.layer[1])
    kernel.check(kernel.draw([70, 0], 40, layer=layer, heads=heads, dtype=torch.float16), 2)


@native
@ON_PUBLISHED
def test_same_inputs_give_the_same_bits_in_any_batch(kernel):
    queries, keys, values, length = kernel.draw([1023, 300], 256)
    options = {"num_splits": 2, "rotary_pairs": kernel.pairs}
    together = attention(queries, keys, values, length, **options)
    for _ in range(20):
        assert torch.equal(attention(queries, keys, values, length, kernel="hopper", **options), together)
    assert torch.equal(attention(queries[1:], keys[1:], values[1:], length[1:], **options), together[1:])


@native
@ON_PUBLISHED
def test_a_captured_graph_reads_the_current_contents_of_its_buffers(kernel):
    case, later = (kernel.draw(lengths, 256) for lengths in ([64, 1000], [1000, 333]))
    attention(*case, rotary_pairs=kernel.pairs)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attention(*case, rotary_pairs=kernel.pairs)
    for target, source in zip(case, later, strict=True):
        target.copy_(source)
    graph.replay()
    assert error(got, exact(*later)) < LIMITS[torch.bfloat16]
