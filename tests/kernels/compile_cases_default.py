"""Router and experts on GPUs without measured tiles, and in float32, which has no warpgroup instruction."""

from unittest.mock import patch

import compile_cases_packed
import torch
from compile_inputs import A, D, E, F, empty, run_experts

from dgemma_kernels.ops import configs
from dgemma_kernels.ops.router import kernel as router

WGMMA: set[str] = set()


def run_dtype(gpu: str, dtype: torch.dtype, tokens: int) -> None:
    weights = (empty(*shape, dtype=dtype) for shape in ((E, 2 * F, D), (E, D, F)))
    run_experts(gpu, "bf16" if dtype == torch.bfloat16 else "float32", empty(tokens, D, dtype=dtype), *weights)


def run_router(dtype: torch.dtype, num_experts: int) -> None:
    with patch.object(configs, "gpu_name", lambda device: "default"):
        tensors = (torch.empty(*shape, dtype=dtype) for shape in ((256, D), (num_experts, D), (num_experts,)))
        router.route(*tensors, A)


# Of the two tiles for products without tensor cores, only the larger one is compiled. Packed weights take 15 seconds.
CALLS = {
    f"{gpu}, {dtype}, {tokens} tokens": lambda case=(gpu, dtype, tokens): run_dtype(*case)
    for gpu, dtype, tokens in (
        ("default", torch.bfloat16, 256),
        ("default", torch.bfloat16, 1024),
        ("default", torch.float32, 1024),
        ("NVIDIA H200", torch.float32, 1024),
    )
}
CALLS |= {
    f"default, {dtype}, router of {num_experts} experts": lambda case=(dtype, num_experts): run_router(*case)
    for dtype, num_experts in ((torch.bfloat16, E), (torch.float32, 256))
}
CALLS["default, packed times float32, 1024 tokens"] = lambda: compile_cases_packed.run_packed(
    "default", 1024, torch.float32
)
