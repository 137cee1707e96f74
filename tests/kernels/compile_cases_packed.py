"""Packed experts at the published sizes, on Hopper and on GPUs without measured tiles."""

from unittest.mock import patch

import torch
import triton

from dgemma_kernels.formats.packed import Packed
from dgemma_kernels.ops import configs
from dgemma_kernels.ops.experts import kernel as experts
from dgemma_kernels.ops.router import kernel as router
from dgemma_kernels.ops.router import reference

E, A, D, F = 128, 8, 2816, 704
WGMMA = {"_expert_gate_up_kernel", "_expert_down_kernel"}


def empty(num_rows: int, width: int, dtype: torch.dtype, *, gated: bool) -> Packed:
    blocks, halves = -(-num_rows // 128), -(-width // 64)
    planes = torch.empty(E * blocks, halves + -(-halves // 2), 128, 64, dtype=torch.uint8)
    scale, starts = torch.empty(E, blocks * 128), torch.empty(E * blocks * 128 + 1, dtype=torch.int32)
    places, outliers = torch.empty(1000, dtype=torch.int32), torch.empty(1000, dtype=torch.bfloat16)
    lists = {"starts": starts, "places": places, "outliers": outliers}
    shape = torch.Size((E, num_rows, width))
    return Packed(planes=planes, scale=scale, **lists, shape=shape, dtype=dtype, gated=gated)


def run_experts(gpu: str, tokens: int, dtype: torch.dtype = torch.bfloat16) -> None:
    with patch.object(configs, "gpu_name", lambda device: gpu):
        index = torch.zeros(tokens, A, dtype=torch.int32)
        rows = configs.expert_config(tokens, index.device, "packed").rows
        tiles = router.sort_by_expert(index, reference.count_pairs(index, E), rows)
        x = torch.empty(tokens, D, dtype=dtype)
        hidden = experts.expert_gate_up(x, empty(2 * F, D, dtype, gated=True), tiles)
        down = empty(D, F, dtype, gated=False)
        experts.expert_down(hidden, down, torch.empty(tokens, A), tiles, overlap=True)


# Tiles were measured with Triton 3.6, so only this version compiles all of them. Other versions compile the tiles for
# one canvas and for the most tokens.
SIZES = {"NVIDIA H200": (256, 4096), "default": (1024,)}
if triton.__version__.startswith("3.6."):
    SIZES = {"NVIDIA H200": (1, 256, 512, 4096), "default": (256, 1024)}
CALLS = {
    f"{gpu}, {tokens} tokens": lambda case=(gpu, tokens): run_experts(*case)
    for gpu, sizes in SIZES.items()
    for tokens in sizes
}
