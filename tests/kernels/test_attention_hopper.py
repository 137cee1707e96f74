"""The Hopper kernel of `attention`: when it is chosen, and its results.

The kernel is compiled only on a Hopper GPU. On every machine its source runs in `gluon_interpreter`, on small shapes
and in several orders of operations that a GPU does not order. Copies of the source with one mistake each must be
detected.
"""

import functools
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

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
    draw,
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


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Pretend that this is a Hopper GPU. Return the calls of the Hopper kernel; the Triton kernel replaces it."""
    calls: list[tuple] = []

    class Substitute:
        TILE = (128, 64, 256)

        @staticmethod
        def attend(*arguments: object) -> None:
            calls.append(arguments)
            module._attend(*arguments, AttentionTile(16, 16, 4, 2))

    monkeypatch.setattr(module, "_hopper", lambda: Substitute)
    pretend_hopper(monkeypatch)
    return calls


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
def test_hopper_kernel_is_chosen_for_canvases_of_wide_heads(num_tokens, heads, layer, dtype, chosen, hopper):
    queries = torch.empty(1, num_tokens, heads, layer[1], dtype=dtype)
    keys = torch.empty(1, layer[0], 300, layer[1], dtype=dtype)
    assert (choose_kernel(queries, keys, keys).kernel == "hopper") is chosen


def test_hopper_kernel_needs_whole_slots_between_heads(hopper):
    queries = torch.empty(1, 32, 16, 256, dtype=torch.bfloat16)
    keys = torch.empty(8 * (64 * 256 + 8), dtype=torch.bfloat16).as_strided(
        (1, 8, 64, 256), (8 * (64 * 256 + 8), 64 * 256 + 8, 256, 1)
    )
    assert "strides" in choose_kernel(queries, keys, keys).reason


@pytest.mark.parametrize("which", [0, 1, 2], ids=["queries", "keys", "values"])
def test_hopper_kernel_needs_tensors_aligned_to_16_bytes(which, hopper):
    shapes = [(1, 32, 16, 256), (1, 8, 64, 256), (1, 8, 64, 256)]
    tensors = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
    assert choose_kernel(*tensors).kernel == "hopper"
    shape = shapes[which]
    tensors[which] = torch.empty(tensors[which].numel() + 4, dtype=torch.bfloat16)[4:].view(shape)
    assert choose_kernel(*tensors) == ("triton", "the Hopper kernel needs tensors aligned to 16 bytes")


@pytest.mark.parametrize("num_splits", [None, 1, 3])
def test_the_chosen_kernel_computes_all_parts_of_the_result(num_splits, hopper, device):
    case = draw([0, 27], 9, (2, 256), heads=4, dtype=torch.float16, device=device)
    got = attention(*case, causal=True, window=9, canvas_len=5, keep=8, num_splits=num_splits)
    assert len(hopper) == 1
    want = exact(*case, causal=True, window=9, canvas_len=5, keep=8)
    assert error(got, want) < 2e-3


def test_a_tile_selects_the_triton_kernel(hopper, device):
    case = draw([5], 9, (2, 256), heads=4, dtype=torch.float16, device=device)
    attention(*case, tile=AttentionTile(16, 16, 4, 2))
    assert hopper == []


def test_auto_needs_a_tested_triton_for_the_hopper_kernel_and_names_its_version(hopper, monkeypatch):
    queries, keys = torch.empty(1, 32, 16, 256).bfloat16(), torch.empty(1, 8, 64, 256).bfloat16()
    assert choose_kernel(queries, keys, keys).kernel == "hopper"
    monkeypatch.setattr(configs, "GLUON_RAN_WITH", ("2.0.",))
    choice = choose_kernel(queries, keys, keys)
    assert choice.kernel == "triton"
    needs = f'Triton 2.0.*, got {triton.__version__} (pip install "torch==2.11.*" "triton==2.0.*")'
    assert choice.reason == f'the Hopper kernel is tested with {needs}; kernel="hopper" runs it anyway'


@pytest.mark.skipif(torch.cuda.is_available(), reason="there may be a Hopper GPU")
def test_an_explicit_hopper_kernel_raises_where_it_cannot_run(monkeypatch):
    case = draw([5], 9, (2, 256), heads=4, dtype=torch.float16, device="cpu")
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


@functools.cache
def interpreted(seed: int = 0, edits: tuple[tuple[str, str], ...] = ()) -> Any:
    return load("dgemma_kernels.ops.attention.hopper", seed=seed, edits=dict(edits))


def check_interpreted(case: tuple[Tensor, ...], num_splits: int = 1, **mode: int | bool) -> None:
    got = interpret(interpreted(), case, num_splits=num_splits, **{"part": 0} | mode)
    assert error(got, exact(*case, **mode)) < LIMITS[case[0].dtype]


# Four heads share a key head, so a program's 128 rows are 32 tokens. Shared memory holds two tiles, or one at H = 512.
SMALL = pytest.mark.parametrize(
    ("layer", "dtype"),
    [((1, 256), torch.bfloat16), ((1, 256), torch.float16), ((1, 512), torch.bfloat16)],
    ids=["sliding", "sliding-float16", "full"],
)


@SMALL
@pytest.mark.parametrize("num_splits", [1, pytest.param(3, marks=pytest.mark.slow)], ids=["whole", "three-parts"])
def test_interpreted_canvas_matches_float64(layer, dtype, num_splits):
    # Prefixes near one tile of 64 slots, without and with the canvas; parts without a tile; seven tiles, so that every
    # buffer is used three times.
    for lengths in ([0], [1], [54], [55], [56], [63], [64], [65], [400]):
        check_interpreted(draw(lengths, 9, layer, heads=4, dtype=dtype, device="cpu"), num_splits)
    check_interpreted(draw([65, 0], 35, layer, heads=4, dtype=dtype, device="cpu"), num_splits)  # a partial tile


@SMALL
@pytest.mark.parametrize("num_splits", [1, 2], ids=["whole", "two-parts"])
def test_interpreted_causal_tokens_match_float64(layer, dtype, num_splits):
    window = {"window": 50} if layer[1] == 256 else {}
    # With this window the first program's last token sees nothing of that program's first tile.
    check_interpreted(draw([150], 40, layer, heads=4, dtype=dtype, device="cpu"), num_splits, causal=True, **window)
    check_interpreted(draw([0, 70], 9, layer, heads=4, dtype=dtype, device="cpu"), num_splits, causal=True, **window)


@SMALL
def test_interpreted_tokens_followed_by_a_canvas_match_float64(layer, dtype):
    window = {"window": 50, "keep": 40} if layer[1] == 256 else {}
    case = draw([3, 120], 40, layer, heads=4, dtype=dtype, device="cpu")
    check_interpreted(case, 2, causal=True, canvas_len=12, **window)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (32, 2), (64, 1)], ids=["alone", "sixteen", "sixty-four"])
def test_interpreted_groups_of_heads_match_float64(heads, kv_heads):
    queries, keys, values, length = draw([0, 70], 3, (kv_heads, 256), heads=heads, dtype=torch.float16, device="cpu")
    used = 70 + 3  # values fill their memory to the last slot, with other strides than keys
    others = torch.empty(2, kv_heads + 1, used, 256, dtype=torch.float16)
    others[:, 1:] = values[:, :, :used]
    check_interpreted((queries, keys[:, :, :used], others[:, 1:], length), 2)


def test_attention_calls_the_interpreted_kernel(monkeypatch):
    monkeypatch.setattr(module, "_hopper", interpreted)
    pretend_hopper(monkeypatch)
    check(draw([5, 64], 9, (2, 256), heads=8, device="cpu"), num_splits=1)


@SMALL
def test_interpreted_float8_is_the_plain_result_rounded(layer, dtype, monkeypatch):
    monkeypatch.setattr(module, "_hopper", interpreted)
    pretend_hopper(monkeypatch)
    check_float8(draw([5, 64], 35, layer, heads=4, dtype=dtype, device="cpu"), kernel="hopper")


def test_interpreted_fixed_parts_match_float64_with_more_parts_than_keys():
    case = draw([70, 3], 2, (1, 256), heads=2, dtype=torch.float16, device="cpu")
    got = interpret(interpreted(), case, causal=True, part=64, num_splits=3)  # of 64, 64 and 128 positions
    assert error(got, exact(*case, causal=True)) < LIMITS[torch.float16]


def test_interpreted_fixed_parts_have_the_same_bits_from_any_first_slot():
    """A sliding layer may have forgotten its oldest tokens. Its keys then start at another slot, here after zeros."""
    case = draw([70], 6, (1, 256), heads=2, dtype=torch.float16, device="cpu")
    modes = {"causal": True, "window": 40, "canvas_len": 6, "keep": 38, "part": 64, "num_splits": 2}
    want = interpret(interpreted(), case, **modes)
    assert error(want, exact(*case, causal=True, window=40, canvas_len=6, keep=38)) < LIMITS[torch.float16]
    for dropped in (3, 32):
        queries, *caches, length = case
        zeros = caches[0].new_zeros(1, 1, 64, 256)
        moved = [torch.cat((zeros, cache[:, :, dropped:]), 2)[:, :, 64:] for cache in caches]
        assert torch.equal(
            interpret(interpreted(), (queries, *moved, length - dropped), position=length, **modes), want
        )


@pytest.mark.parametrize("head_dim", [256, pytest.param(512, marks=pytest.mark.slow)], ids=["sliding", "full"])
def test_bits_do_not_depend_on_the_order_of_copies_and_warps(head_dim):
    case = draw([380], 9, (1, head_dim), heads=4, device="cpu")
    first, *others = (interpret(interpreted(seed), case, part=0) for seed in range(6))
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


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new", "found"), MISTAKES.values(), ids=MISTAKES)
def test_every_mistake_in_the_kernel_is_detected_in_every_order(old, new, found):
    case = draw([500], 9, (1, 256), heads=4, dtype=torch.float16, device="cpu")
    for seed in range(2):
        run = functools.partial(interpret, interpreted(seed, ((old, new),)), case, num_splits=2, part=0)
        assert_detected(run, found, exact(*case), 10 * LIMITS[torch.float16])


LAYERS = pytest.mark.parametrize("layer", [SLIDING, FULL], ids=["sliding", "full"])


@native
@LAYERS
def test_float8_is_the_plain_result_rounded(layer):
    check_float8(draw([1500, 0, 64, 700], 256, layer), kernel="hopper")
    check_float8(
        draw([0, 500], 700, layer), kernel="hopper", causal=True, **({"window": 100} if layer == SLIDING else {})
    )
    check_float8(draw([130, 65], 100, layer), kernel="hopper")  # rows do not fill a tile


@native
@LAYERS
@pytest.mark.parametrize("num_splits", [1, None, 4], ids=["whole", "default", "four-parts"])
def test_canvas_matches_float64(layer, num_splits):
    # Prefixes near one tile of 64 slots, and four times as many parts as the shortest row has tiles.
    for lengths in ([0], [1], [63], [64], [65], [1023], [1024], [1500, 0, 64, 700]):
        check(draw(lengths, 256, layer), num_splits=num_splits)
    check(draw([130, 65], 100, layer), num_splits=num_splits)  # rows do not fill a tile
    queries, *rest = draw([1024, 65], 256, layer)
    check((queries * 30, *rest), num_splits=num_splits)  # nearly a hard maximum


@native
@LAYERS
@pytest.mark.parametrize("num_splits", [1, 5], ids=["whole", "five-parts"])
def test_causal_matches_float64(layer, num_splits):
    window = {"window": 100} if layer == SLIDING else {}
    check(draw([0, 500], 256, layer), causal=True, num_splits=num_splits, **window)
    check(draw([65, 3], 77, layer), causal=True, num_splits=num_splits, **window)
    check(draw([0], 700, layer), causal=True, num_splits=num_splits, **window)


@native
@LAYERS
def test_tokens_followed_by_a_canvas_match_float64(layer):
    window = {"window": 96, "keep": 95} if layer == SLIDING else {}
    check(draw([200, 64], 300, layer), causal=True, canvas_len=100, num_splits=2, **window)
    check(draw([1023, 0], 300, layer), causal=True, canvas_len=100, num_splits=2, **window)


@native
@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(16, 16), (16, 4), (16, 1), (64, 1)], ids=["alone", "fours", "sixteen", "sixty-four"]
)
def test_float16_and_other_groups_of_heads_match_float64(heads, kv_heads):
    check(draw([70, 0], 40, (kv_heads, 256), heads=heads, dtype=torch.float16), num_splits=2)


@native
@LAYERS
def test_same_inputs_give_the_same_bits_in_any_batch(layer):
    queries, keys, values, length = draw([1023, 300], 256, layer)
    together = attention(queries, keys, values, length, num_splits=2)
    for _ in range(10):
        assert torch.equal(attention(queries, keys, values, length, kernel="hopper", num_splits=2), together)
    assert torch.equal(attention(queries[1:], keys[1:], values[1:], length[1:], num_splits=2), together[1:])


@native
@LAYERS
def test_a_captured_graph_reads_the_current_contents_of_its_buffers(layer):
    case, later = (draw(lengths, 256, layer) for lengths in ([64, 1000], [1000, 333]))
    attention(*case)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attention(*case)
    for target, source in zip(case, later, strict=True):
        target.copy_(source)
    graph.replay()
    assert error(got, exact(*later)) < LIMITS[torch.bfloat16]
