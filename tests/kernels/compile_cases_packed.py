"""Packed experts at the published sizes, on Hopper and on GPUs without measured tiles."""

import torch
from compile_inputs import D, E, F, calls_by_tokens, empty, run_experts

from dgemma_kernels.formats.packed import Packed

WGMMA = {"_expert_gate_up_kernel", "_expert_down_kernel"}


def empty_packed(num_rows: int, width: int, dtype: torch.dtype, *, gated: bool) -> Packed:
    blocks, halves = -(-num_rows // 128), -(-width // 64)
    planes = torch.empty(E * blocks, halves + -(-halves // 2), 128, 64, dtype=torch.uint8)
    scale, starts = torch.empty(E, blocks * 128), torch.empty(E * blocks * 128 + 1, dtype=torch.int32)
    places, outliers = torch.empty(1000, dtype=torch.int32), torch.empty(1000, dtype=torch.bfloat16)
    lists = {"starts": starts, "places": places, "outliers": outliers}
    shape = torch.Size((E, num_rows, width))
    return Packed(planes=planes, scale=scale, **lists, shape=shape, dtype=dtype, gated=gated)


def run_packed(gpu: str, tokens: int, dtype: torch.dtype = torch.bfloat16) -> None:
    weights = empty_packed(2 * F, D, dtype, gated=True), empty_packed(D, F, dtype, gated=False)
    run_experts(gpu, "packed", empty(tokens, D, dtype=dtype), *weights)


CALLS = calls_by_tokens(run_packed, h200=(1, 256, 512, 4096), default=(256, 1024))
