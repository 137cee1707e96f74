"""The Hopper kernel of `attention`: when it is chosen, everywhere; what it computes, on a Hopper GPU alone.

Triton's interpreter does not run Gluon, so that without such a GPU this kernel is only compiled (`test_compile.py`).
"""

import os
import subprocess
import sys

import pytest
import torch
import triton
from torch import Tensor

from dgemma_kernels import attention as module
from dgemma_kernels import reference
from dgemma_kernels.attention import AttentionTile, attention, uses_hopper_kernel

HEADS = 16
SLIDING, FULL = (8, 256), (2, 512)  # key heads, head_dim
# Softmax weights, parts and the output are rounded, each by 2**-9 at most in bfloat16 and 2**-12 in float16; bfloat16
# in parts was measured at 2.8e-3.
LIMITS = {torch.bfloat16: 4e-3, torch.float16: 5e-4}


def draw(
    lengths: list[int],
    num_tokens: int,
    layer: tuple[int, int],
    *,
    heads: int = HEADS,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random queries, keys, values and lengths; keys and values are part of larger buffers; free slots are NaN."""
    generator = torch.Generator(device).manual_seed(sum(lengths) + num_tokens)
    (kv_heads, head_dim), batch = layer, len(lengths)
    capacity = max(lengths) + num_tokens + 7

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    queries = (normal(batch, num_tokens, heads, head_dim) / head_dim**0.5).to(dtype)
    keys, values = (normal(batch + 1, kv_heads, capacity + 9, head_dim).to(dtype)[1:, :, :capacity] for _ in range(2))
    for row, length in enumerate(lengths):
        for cache in (keys, values):
            cache[row, :, length + num_tokens :] = torch.nan
    return queries, keys, values, torch.tensor(lengths, device=device)


def exact(queries: Tensor, keys: Tensor, values: Tensor, length: Tensor, **mode: int | bool) -> Tensor:
    return reference.attention(queries.double(), keys.double(), values.double(), length, **mode)


def error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Takes this machine for a Hopper GPU, with the Triton kernel as its own; the list is of the calls' arguments."""
    calls: list[tuple] = []

    class Stand:
        TILE = (128, 64, 256)

        @staticmethod
        def attend(*arguments: object) -> None:
            calls.append(arguments)
            module._attend(*arguments, AttentionTile(16, 16, 4, 2))

    monkeypatch.setattr(module, "attention_hopper", Stand)
    monkeypatch.setattr(module, "_is_hopper", lambda device: True)
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
    assert uses_hopper_kernel(queries, keys, keys) is chosen


def test_hopper_kernel_needs_whole_slots_between_heads(hopper):
    queries = torch.empty(1, 32, 16, 256, dtype=torch.bfloat16)
    keys = torch.empty(8 * (64 * 256 + 8), dtype=torch.bfloat16).as_strided(
        (1, 8, 64, 256), (8 * (64 * 256 + 8), 64 * 256 + 8, 256, 1)
    )
    assert not uses_hopper_kernel(queries, keys, keys)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["queries", "keys", "values"])
def test_hopper_kernel_needs_tensors_aligned_to_16_bytes(which, hopper):
    shapes = [(1, 32, 16, 256), (1, 8, 64, 256), (1, 8, 64, 256)]
    tensors = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
    assert uses_hopper_kernel(*tensors)
    shape = shapes[which]
    tensors[which] = torch.empty(tensors[which].numel() + 4, dtype=torch.bfloat16)[4:].view(shape)
    assert not uses_hopper_kernel(*tensors)


@pytest.mark.parametrize("num_splits", [None, 1, 3])
def test_chosen_kernel_gives_all_parts_of_the_result(num_splits, hopper, device):
    case = draw([0, 27], 9, (2, 256), heads=4, dtype=torch.float16, device=device)
    got = attention(*case, causal=True, window=9, canvas_len=5, keep=8, num_splits=num_splits)
    assert len(hopper) == 1
    want = exact(*case, causal=True, window=9, canvas_len=5, keep=8)
    assert error(got, want) < 2e-3


def test_a_tile_asks_for_the_triton_kernel(hopper, device):
    case = draw([5], 9, (2, 256), heads=4, dtype=torch.float16, device=device)
    attention(*case, tile=AttentionTile(16, 16, 4, 2))
    assert hopper == []


@pytest.mark.parametrize(
    ("before", "known"),
    [
        ("triton.__version__ = '3.9.0'; sys.modules['triton.experimental.gluon'] = None", False),
        pytest.param("", True, marks=pytest.mark.skipif(triton.__version__[:4] != "3.6.", reason="needs Triton 3.6")),
    ],
    ids=["another-version", "3.6"],
)
def test_hopper_kernel_is_imported_with_the_triton_it_ran_with_alone(before, known):
    script = (
        f"import sys, triton; {before}\n"
        f"from dgemma_kernels import attention; assert (attention.attention_hopper is not None) is {known}"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


def runs_here() -> bool:
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    return hopper and module.attention_hopper is not None


native = pytest.mark.skipif(not runs_here(), reason="Gluon runs on a GPU alone: needs Hopper and Triton 3.6")
LAYERS = pytest.mark.parametrize("layer", [SLIDING, FULL], ids=["sliding", "full"])


def check(case: tuple[Tensor, ...], **options: int | bool | None) -> None:
    assert uses_hopper_kernel(*case[:3])
    got = attention(*case, **options)
    options.pop("num_splits", None)
    assert error(got, exact(*case, **options)) < LIMITS[got.dtype]


@native
@LAYERS
@pytest.mark.parametrize("num_splits", [1, None, 4], ids=["whole", "default", "four-parts"])
def test_canvas_matches_float64(layer, num_splits):
    # Around a tile of 64 slots, and four times as many parts as the shortest row has tiles.
    for lengths in ([0], [1], [63], [64], [65], [1023], [1024], [1500, 0, 64, 700]):
        check(draw(lengths, 256, layer), num_splits=num_splits)
    check(draw([130, 65], 100, layer), num_splits=num_splits)  # rows that fill no tile
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
def test_tokens_and_a_canvas_behind_them_match_float64(layer):
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
        assert torch.equal(attention(queries, keys, values, length, num_splits=2), together)
    assert torch.equal(attention(queries[1:], keys[1:], values[1:], length[1:], num_splits=2), together[1:])


@native
@LAYERS
def test_a_captured_graph_follows_what_its_buffers_hold(layer):
    case, later = (draw(lengths, 256, layer) for lengths in ([64, 1000], [1000, 333]))
    attention(*case)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attention(*case)
    for target, source in zip(case, later, strict=True):
        target.copy_(source)
    graph.replay()
    assert error(got, exact(*later)) < LIMITS[torch.bfloat16]
