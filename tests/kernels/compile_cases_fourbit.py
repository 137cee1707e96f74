"""The experts of four bits at the published sizes, on Hopper and on GPUs without measured tiles."""

import torch
from compile_inputs import D, E, F, empty, run_experts

from dgemma_kernels.formats.fourbit import FourBit

WGMMA = {"_expert_gate_up_kernel", "_expert_down_kernel"}


def empty_fourbit(kind: str, num_rows: int, width: int, *, gated: bool) -> FourBit:
    blocks, planes = E * -(-num_rows // 128), -(-width // 64)
    group, of_scale = (16, torch.int16) if kind == "nvfp4" else (64, torch.int32)
    scale = torch.empty(blocks, planes, 64, 64 // group, dtype=of_scale)
    return FourBit(
        kind=kind.partition(" ")[0],
        codes=torch.empty(blocks, planes, 64, 16, dtype=torch.int32),
        scale=scale,
        zero=scale if kind == "int4 zero" else None,
        bias=scale if kind == "int4 bias" else None,
        row_scale=torch.empty(blocks, 128) if kind == "nvfp4" else None,
        group=group,
        shape=torch.Size((E, num_rows, width)),
        dtype=torch.bfloat16,
        gated=gated,
    )


def run_fourbit(gpu: str, tokens: int, kind: str) -> None:
    weights = empty_fourbit(kind, 2 * F, D, gated=True), empty_fourbit(kind, D, F, gated=False)
    run_experts(gpu, kind.partition(" ")[0], empty(tokens, D), *weights)


CASES = [("NVIDIA H200", tokens, "int4") for tokens in (1, 256, 512, 4096)]
CASES += [("NVIDIA H200", 256, "int4 zero"), ("NVIDIA H200", 256, "nvfp4")]
CASES += [("default", 256, "int4"), ("default", 1024, "nvfp4")]
CALLS = {f"{case[0]}, {case[1]} tokens, {case[2]}": lambda case=case: run_fourbit(*case) for case in CASES}
