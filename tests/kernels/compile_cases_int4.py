"""Both products of int4 experts in one launch, in Gluon."""

import torch
from compile_cases_fourbit import A, D, E, F, empty

from dgemma_kernels.formats.fourbit import OrderedRows
from dgemma_kernels.ops.experts import hopper
from dgemma_kernels.ops.router import kernel as router
from dgemma_kernels.ops.router import reference

WGMMA = {"_experts_hopper_kernel"}


def run(tokens: int) -> None:
    index = torch.zeros(tokens, A, dtype=torch.int32)
    tiles = router.sort_by_expert(index, reference.count_pairs(index, E), 32)
    rows = torch.empty(tokens, D, dtype=torch.float8_e4m3fn)
    x = OrderedRows(
        values=rows, scale=torch.empty(tokens), sums=torch.empty(tokens, 64).bfloat16(), dtype=torch.bfloat16
    )
    proj = empty("int4", 2 * F, D, gated=True), empty("int4", D, F, gated=False)
    hopper.multiply_experts(x, *proj, torch.empty(tokens, A), tiles)


CALLS = {"a canvas": lambda: run(256)}
