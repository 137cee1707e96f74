"""Causal attention with both products in float8, on Hopper.

As in `test_attention_hopper`, its source runs in `gluon_interpreter` on every machine, and natively on a Hopper GPU.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import attention_cases
from attention_cases import FULL, HANGS, TAKEN, UNSEEN, assert_detected, exact, native, pretend_hopper
from dgemma_kernels import accelerate
from dgemma_kernels.engine import forward
from dgemma_kernels.formats.float8 import Quantized, quantize
from dgemma_kernels.ops.attention import float8 as module
from dgemma_kernels.ops.attention import reference
from dgemma_kernels.ops.attention.float8 import float8_factor
from gluon_interpreter import load
from kernel_inputs import error, make_model

SMALL = (1, 512)  # key heads, head_dim; four query heads share the key head, so a program's 64 rows are 16 tokens
# Norm of the error against exact attention of normal queries, keys and values. Rounding to float8 changes a number by
# 2.6 % (root mean square). Values and weights are rounded once; scores of standard deviation 1 change by 3.7 %.
COST = 0.07
# The kernel computes in float32 and the reference in float64, so they round a few operands to different neighbours.
CLOSE = 0.01


def draw(lengths: list[int], num_tokens: int, layer: tuple[int, int] = SMALL, **options: Any) -> tuple[Tensor, ...]:
    if layer == SMALL:
        options = {"heads": 4, "device": "cpu"} | options
    return attention_cases.draw(lengths, num_tokens, layer, **options)


def attention_float8(queries: Tensor, *arguments: Any, **options: Any) -> Any:
    return module.attention_float8(quantize(queries), *arguments, **options)


def attention_reference(queries: Tensor, *arguments: Any, **options: Any) -> Any:
    return reference.attention_float8(quantize(queries), *arguments, **options)


@functools.cache
def interpreted(seed: int = 0, edits: tuple[tuple[str, str], ...] = ()) -> Any:
    return load("dgemma_kernels.ops.attention.hopper_float8", seed=seed, edits=dict(edits))


def on_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a compiled Triton kernel take CPU tensors: copy them to the GPU, and its results back."""

    def run(*arguments: Any) -> Any:
        there = (argument.cuda() if isinstance(argument, Tensor) else argument for argument in arguments)
        return tuple(part.cpu() for part in function(*there))

    return run if torch.cuda.is_available() else function


@pytest.fixture(autouse=True)
def run_interpreted(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Pretend that this is a Hopper GPU, with the interpreted kernel, unless the test runs natively."""
    if "native" not in request.node.name:
        pretend_hopper(monkeypatch)
        monkeypatch.setattr(module, "_hopper_float8", interpreted)
        monkeypatch.setattr(module, "round_cache", on_gpu(module.round_cache))


def check(case: tuple[Tensor, ...]) -> None:
    assert error(attention_float8(*case), attention_reference(*case)) < CLOSE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_interpreted_tokens_match_the_reference(dtype):
    # One to four tiles of 128 slots, so that the last pair of tiles is full, or has a partial or an empty tile.
    for lengths in ([0], [119], [120], [247], [248], [400]):
        check(draw(lengths, 9, dtype=dtype))
    check(draw([65, 0], 35, dtype=dtype))  # a partial tile of rows


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (64, 1)], ids=["alone", "sixty-four"])
def test_interpreted_groups_of_heads_match_the_reference(heads, kv_heads):
    check(draw([0, 130], 3, (kv_heads, 512), heads=heads, device="cpu"))


def test_reference_is_exact_attention_up_to_rounding():
    for lengths in ([3, 200], [1000]):
        case = draw(lengths, 9)
        assert error(attention_reference(*case), exact(*case, causal=True)) < COST


def test_large_keys_fit_with_a_factor():
    """Keys of 40 times the norm exceed float8 in the usual unit. Smaller queries leave the scores as they are."""
    queries, keys, values, length = draw([300], 9)
    factor = float8_factor(torch.full((512,), 40.0))
    assert factor == 64.0  # 40 · sqrt(512) is at most 28 · 64
    assert float8_factor(torch.full((512,), 1.2)) == 1.0
    case = (queries / 40, keys * 40, values, length)
    for attend in (attention_reference, attention_float8):
        assert error(attend(*case, key_factor=factor), exact(*case, causal=True)) < COST
    clipped = attention_reference(*case)
    assert not error(clipped, exact(*case, causal=True)) < COST


@pytest.mark.slow
def test_small_weights_far_from_a_large_one_count():
    """The first of 2,048 keys has 38 % of the total weight. Float8 relative to it would round most others to 0."""
    queries, keys, values, length = draw([2039], 9)
    keys[:, :, 0] = 0.0
    keys[..., 0] = 0.0
    keys[:, :, 0, 0] = 16.0
    queries[..., 0] = torch.log(torch.tensor(2048.0)) / 16.0  # the largest of its row, which float8 represents exactly
    case = (queries, keys, values + 1.0, length)
    for got in (attention_reference(*case), attention_float8(*case)):
        assert error(got, exact(*case, causal=True)) < COST


@pytest.mark.slow
def test_weights_of_tiles_far_apart_neither_overflow_nor_vanish():
    """Scores fall by thousands of bits from tile to tile, or grow."""
    for growth in (1.0, -1.0):
        queries, keys, values, length = draw([800], 9)
        keys += (growth * torch.linspace(-8, 8, keys.shape[2])[:, None]).to(keys.dtype)
        check((queries + 4.0, keys, values, length))


@pytest.mark.slow
def test_bits_do_not_depend_on_the_order_of_copies_and_warps(monkeypatch):
    case, results = draw([380], 9), []
    for seed in range(4):
        monkeypatch.setattr(module, "_hopper_float8", functools.partial(interpreted, seed))
        results.append(attention_float8(*case))
    assert all(torch.equal(result, results[0]) for result in results)


def test_float8_is_the_plain_result_rounded():
    check_float8(draw([5, 64], 35, dtype=torch.float16))
    check_float8(draw([250], 9, dtype=torch.float16))


def check_float8(case: tuple[Tensor, ...]) -> None:
    plain, got = attention_float8(*case), attention_float8(*case, float8=True)
    unit = 1 / 16  # 448 units are 28, and values are at most 22.6
    assert got.scale.tolist() == [unit] * (plain.shape[0] * plain.shape[1])
    near = (plain.float() / unit).to(torch.float8_e4m3fn).float().view(got.shape)
    assert error(got.values.float(), near.double()) < CLOSE  # `plain` is rounded to float16 first, so a few differ


def test_rounded_cache_is_that_of_torch_and_zero_up_to_the_end_of_a_pair_of_tiles():
    _, keys, values, length = draw([100, 250], 9)
    narrow_keys, narrow_values = module.round_cache(keys, values, length, 9)
    narrow_values = narrow_values.transpose(3, 4).flatten(2, 3)
    for cache, narrow in ((keys, narrow_keys), (values, narrow_values)):
        for row, end, zeros in ((0, 109, 256), (1, 259, 512)):
            want = (cache[row, :, :end].float() * 16).to(torch.float8_e4m3fn)
            assert torch.equal(narrow[row, :, :end].float(), want.float())
            assert not narrow[row, :, end:zeros].float().any()


def test_other_arguments_are_refused():
    with pytest.raises(AssertionError, match="a head_dim of 512, got 256"):
        attention_float8(*draw([3], 2, (1, 256), device="cpu"))
    with pytest.raises(AssertionError, match="bfloat16 or float16"):
        attention_float8(*draw([3], 2, dtype=torch.float32))


@pytest.mark.skipif(torch.cuda.is_available(), reason="an engine on the CPU needs Triton's interpreter")
def test_accelerate_uses_it_for_prompts_in_full_layers(monkeypatch):
    model = make_model(torch.device("cpu"), global_head_dim=512).half()
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.fill_(0.2)  # scores near 1
    calls: list[int] = []

    def count(queries: Quantized, *arguments: Any, **options: Any) -> Any:
        calls.append(queries.shape[1])
        return module.attention_float8(queries, *arguments, **options)

    monkeypatch.setattr(forward, "attention_float8", count)
    monkeypatch.setattr(forward, "_MANY", 16)
    tokens = torch.randint(40, (1, 16), generator=torch.Generator().manual_seed(0))
    plain = copy.deepcopy(model).causal_logits(tokens)
    fast = accelerate(model, precision=["prompt_attention"], attention="triton")
    logits = fast.causal_logits(tokens)
    assert set(calls) == {16}  # without a GPU, a forward longer than two canvases runs twice
    assert 0 < error(logits, plain.double()) < COST
    fast.causal_logits(tokens[:, :7])  # few tokens
    assert set(calls) == {16}


@pytest.mark.skipif(torch.cuda.is_available(), reason="an engine on the CPU needs Triton's interpreter")
def test_accelerate_refuses_it_where_it_cannot_run(monkeypatch):
    model = make_model(torch.device("cpu")).half()
    for precision in ("fast", ["prompt_attention"]):
        with pytest.raises(ValueError, match=r'"prompt_attention" needs a head_dim of 512, got 16\. Use "exact", or'):
            accelerate(model, precision=precision)
    with pytest.raises(ValueError, match='"prompt_attention" needs batch_invariant=False'):
        accelerate(model, precision=["prompt_attention"], batch_invariant=True)
    with pytest.raises(ValueError, match='parts without "prompt_attention"'):
        accelerate(model, "packed", precision=["prompt_attention"], release=True)
    model.causal_logits(torch.ones(1, 2, dtype=torch.int64))  # it still has its experts


EARLY = f"{UNSEEN}|never written"
# A passage of the kernel, its replacement, and the error that this must raise, or None if the result must be wrong.
MISTAKES = {
    "keys-not-awaited": ("        mbarrier.wait(k_full.index(WG * _K_BUFFERS + c), i & 1)\n", "", UNSEEN),
    "values-not-awaited": ("    mbarrier.wait(v_full.index(second), (2 * j + 1) // _V_BUFFERS & 1)\n", "", EARLY),
    "weights-not-awaited": ("    mbarrier.wait(ready.index(OWNER), i & 1)\n", "", f"{EARLY}|{TAKEN}"),
    "weights-overwritten": ("    mbarrier.wait(read.index(WG), (i & 1) ^ 1)\n", "", f"{TAKEN}|no more arrivals"),
    "no-fence": ("    fence_async_shared()\n    mbarrier", "    mbarrier", "without fence_async_shared"),
    "keys-freed-twice": ("k_free.index(c - 1)", "k_free.index(0)", f"{TAKEN}|{HANGS}|no more arrivals"),
    "scores-in-flight": (
        "    s = warpgroup_mma_wait(0, deps=(s,))\n    mbarrier.arrive(k_free.index(3))",
        "    s = warpgroup_mma_wait(1, deps=(s,))\n    mbarrier.arrive(k_free.index(3))",
        f"{TAKEN}|not waited",
    ),
    "sums-not-rescaled": ("acc * decay + product", "acc + product", None),
    "mask-inverted": ("<= gl.expand_dims(last_seen, 1)", ">= gl.expand_dims(last_seen, 1)", None),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new", "found"), MISTAKES.values(), ids=MISTAKES)
def test_every_mistake_in_the_kernel_is_detected_in_every_order(old, new, found, monkeypatch):
    queries, *rest = draw([500], 9, dtype=torch.float16)
    case = (queries * 4, *rest)
    for seed in range(2):
        monkeypatch.setattr(module, "_hopper_float8", functools.partial(interpreted, seed, ((old, new),)))
        assert_detected(lambda: attention_float8(*case), found, attention_reference(*case), 5 * CLOSE)


@native
def test_native_results_match_the_reference():
    for lengths, num_tokens in (([0], 256), ([1500, 0, 64], 300), ([65], 77)):
        check(draw(lengths, num_tokens, FULL))
    queries, *rest = draw([1024, 65], 256, FULL)
    check((queries * 8, *rest))


@native
def test_native_float8_is_the_plain_result_rounded():
    check_float8(draw([1500, 0, 64, 700], 256, FULL, dtype=torch.float16))


@native
def test_native_runs_give_the_same_bits():
    case = draw([1023, 300], 256, FULL)
    first = attention_float8(*case)
    for _ in range(20):
        assert torch.equal(attention_float8(*case), first)
