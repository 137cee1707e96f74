"""Attention of a canvas, of a prompt and of patches at the published sizes, with the keys whole and in parts."""

import torch
import triton
from compile_inputs import FULL, HEADS, SLIDING, empty, empty_float8

from dgemma_kernels.ops.attention import kernel as module
from dgemma_kernels.ops.attention.float8 import attention_float8
from dgemma_kernels.ops.attention.kernel import attention
from dgemma_kernels.ops.vision.kernel import attend_patches

WGMMA = {
    "_attention_kernel",
    "_attention_hopper_kernel",
    "_attention_hopper_shared_kernel",
    "_attention_hopper_float8_kernel",
    "_attend_patches_kernel",
}
SHARED = {"rotary_pairs": 64}  # keys equal values in the other columns

module.is_hopper = lambda device: True


def run(num_tokens: int, layer: tuple[int, int], num_splits: int | None, *, kernel: str, **mode: int | bool) -> None:
    kv_heads, head_dim = layer
    queries = empty(1, num_tokens, HEADS, head_dim)
    keys, values = (empty(1, kv_heads, num_tokens + 1024, head_dim) for _ in range(2))
    length = torch.empty(1, dtype=torch.int64)
    spans = torch.empty(1, num_tokens, 2, dtype=torch.int32) if mode.pop("images", False) else None
    attention(queries, keys, values, length, **mode, kernel=kernel, num_splits=num_splits, spans=spans)


# For each kind of layer, every mask and every way to store the result is compiled once, but not all pairs of them. A
# commit alone (the causal pass over a finished canvas) has no case, because its masks are those of a prompt.
SHAPES = {
    "canvas, sliding, parts": (256, SLIDING, 2, {}),
    "canvas, full, parts": (256, FULL, 2, {}),
    "commit and canvas, sliding": (512, SLIDING, 2, {"causal": True, "window": 1024, "canvas_len": 256, "keep": 1023}),
    "commit and canvas, full": (512, FULL, 1, {"causal": True, "canvas_len": 256}),
    "canvas, sliding, fixed parts": (
        256,
        SLIDING,
        None,
        {"causal": True, "window": 1024, "canvas_len": 256, "keep": 1023, "part": 448},
    ),
    "canvas, full, fixed parts": (256, FULL, None, {"causal": True, "canvas_len": 256, "part": 640}),
    "prompt, sliding": (4096, SLIDING, 1, {"causal": True, "window": 1024}),
    "prompt, full": (4096, FULL, 1, {"causal": True}),
    "prompt, sliding, float8": (4096, SLIDING, 1, {"causal": True, "window": 1024, "float8": True}),
    "canvas, full, float8": (4096, FULL, 1, {"float8": True}),
    "prompt with images, sliding": (512, SLIDING, 2, {"causal": True, "window": 1024, "images": True}),
    "prompt with images, shared": (512, FULL, 2, {"causal": True, "images": True} | SHARED),
    "canvas, shared, parts": (256, FULL, 2, SHARED),
    "commit and canvas, shared": (512, FULL, 1, {"causal": True, "canvas_len": 256} | SHARED),
    "prompt, shared": (4096, FULL, 1, {"causal": True} | SHARED),
    "prompt, shared, float8": (4096, FULL, 1, {"causal": True, "float8": True} | SHARED),
}
# With Triton 3.6 attention runs the Hopper kernel, and with other versions the kernel in plain Triton. The kernel that
# does not run is compiled for one shape.
ONE = "commit and canvas, full"
MAIN = "hopper" if triton.__version__.startswith("3.6.") else "triton"
CALLS = {
    f"{name}, {kernel}": lambda shape=shape, kernel=kernel: run(*shape[:3], kernel=kernel, **shape[3])
    for name, shape in SHAPES.items()
    for kernel in ("triton", "hopper")
    if kernel == MAIN or name == ONE
}


def run_patches() -> None:
    spans = torch.empty(2520, 2, dtype=torch.int32)
    attend_patches(empty(3, HEADS, 2520, 80), spans, 72)


CALLS["patches"] = run_patches


def run_float8(*, float8: bool) -> None:
    cache = empty(1, 2, 16_384, 512)
    attention_float8(empty_float8(1, 8192, HEADS, 512), cache, cache, torch.empty(1, dtype=torch.int64), float8=float8)


if MAIN == "hopper":
    CALLS["prompt, products in float8"] = lambda: run_float8(float8=False)
    CALLS["prompt, all in float8"] = lambda: run_float8(float8=True)
