"""Int4 experts with float8 rows: the kernel that rounds the rows, and the Gluon kernel of both products."""

import torch
import triton
from compile_cases_fourbit import empty_fourbit
from compile_inputs import A, D, E, F, empty

from dgemma_kernels.formats.fourbit import OrderedRows
from dgemma_kernels.ops import configs
from dgemma_kernels.ops.experts import hopper
from dgemma_kernels.ops.norms import kernel as norms
from dgemma_kernels.ops.router import kernel as router
from dgemma_kernels.ops.router import reference

WGMMA = {"_experts_hopper_kernel"}


def run_residual(tokens: int) -> None:
    row, vector = empty(tokens, D), empty(D)
    norms.attention_residual(row, row, [vector] * 4, 1e-6, ordered=True)


def run_experts(tokens: int) -> None:
    index = torch.zeros(tokens, A, dtype=torch.int32)
    tiles = router.sort_by_expert(index, reference.count_pairs(index, E), 32)
    rows, sums = torch.empty(tokens, D, dtype=torch.float8_e4m3fn), empty(tokens, 2, 64)
    x = OrderedRows(values=rows, scale=torch.empty(tokens), sums=sums, dtype=torch.bfloat16)
    proj = empty_fourbit("int4", 2 * F, D, gated=True), empty_fourbit("int4", D, F, gated=False)
    hopper.multiply_experts(x, *proj, torch.empty(tokens, A), tiles)


CALLS = {"residual": lambda: run_residual(256)}
if triton.__version__.startswith(configs.GLUON_RAN_WITH):  # no other version runs this kernel
    CALLS["experts"] = lambda: run_experts(256)
