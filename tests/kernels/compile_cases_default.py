"""Router and experts on GPUs without measured tiles, and in float32, which has no warpgroup instruction."""

from unittest.mock import patch

import compile_cases_packed
import torch

from dgemma_kernels.ops import configs
from dgemma_kernels.ops.experts import kernel as experts
from dgemma_kernels.ops.router import kernel as router
from dgemma_kernels.ops.router import reference

E, A, D, F = 128, 8, 2816, 704
WGMMA: set[str] = set()


def run_experts(gpu: str, dtype: torch.dtype, tokens: int) -> None:
    with patch.object(configs, "gpu_name", lambda device: gpu):
        index = torch.zeros(tokens, A, dtype=torch.int32)
        rows = configs.expert_config(tokens, index.device, "bf16" if dtype == torch.bfloat16 else "float32").rows
        tiles = router.sort_by_expert(index, reference.count_pairs(index, E), rows)
        hidden = experts.expert_gate_up(
            torch.empty(tokens, D, dtype=dtype), torch.empty(E, 2 * F, D, dtype=dtype), tiles
        )
        experts.expert_down(hidden, torch.empty(E, D, F, dtype=dtype), torch.empty(tokens, A), tiles, overlap=True)


def run_router(dtype: torch.dtype, num_experts: int) -> None:
    with patch.object(configs, "gpu_name", lambda device: "default"):
        tensors = (torch.empty(*shape, dtype=dtype) for shape in ((256, D), (num_experts, D), (num_experts,)))
        router.route(*tensors, A)


# Of the two tiles for products without tensor cores, only the larger one is compiled. Packed weights take 15 seconds.
CALLS = {
    f"{gpu}, {dtype}, {tokens} tokens": lambda case=(gpu, dtype, tokens): run_experts(*case)
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
CALLS["default, packed times float32, 1024 tokens"] = lambda: compile_cases_packed.run_experts(
    "default", 1024, torch.float32
)
