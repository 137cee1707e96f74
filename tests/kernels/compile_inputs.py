"""Sizes of the published model, and uninitialised tensors, for the `compile_cases_*.py` next to this file."""

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch
import triton

from dgemma_kernels.formats import ExpertWeights, Quantized
from dgemma_kernels.ops import configs
from dgemma_kernels.ops.experts import kernel as experts
from dgemma_kernels.ops.router import kernel as router
from dgemma_kernels.ops.router import reference

E, A, D, F, DENSE, VOCABULARY = 128, 8, 2816, 704, 2112, 262_144
HEADS, SLIDING, FULL = 16, (8, 256), (2, 512)  # query heads; key heads and head_dim of the two kinds of layer


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def empty_float8(*shape: int) -> Quantized:
    values, scale = empty(*shape, dtype=torch.float8_e4m3fn), empty(*shape[:-1], dtype=torch.float32)
    return Quantized(values=values, scale=scale, dtype=torch.bfloat16)


def calls_by_tokens(
    run: Callable[[str, int], None], h200: tuple[int, ...], default: tuple[int, ...]
) -> dict[str, Callable[[], None]]:
    """Return a call of `run` for each GPU and number of tokens.

    Tiles were measured with Triton 3.6, so only this version compiles all of them. Other versions compile the tiles for
    one canvas and for the most tokens.
    """
    if not triton.__version__.startswith("3.6."):
        h200, default = (256, 4096), (1024,)
    sizes = [("NVIDIA H200", tokens) for tokens in h200] + [("default", tokens) for tokens in default]
    return {f"{gpu}, {tokens} tokens": partial(run, gpu, tokens) for gpu, tokens in sizes}


def run_experts(
    gpu: str,
    format: str,
    x: torch.Tensor | Quantized,
    *weights: ExpertWeights,
    config: configs.ExpertConfig | None = None,
) -> None:
    """Call both products of the experts, with the tiles of this GPU for this format and number of tokens."""
    (gate_up, down), tokens = weights, x.shape[0]
    with patch.object(configs, "gpu_name", lambda device: gpu), patch.object(experts, "is_hopper", lambda device: True):
        index = torch.zeros(tokens, A, dtype=torch.int32)
        config = config or configs.expert_config(tokens, index.device, format)
        tiles = router.sort_by_expert(index, reference.count_pairs(index, E), config.rows)
        hidden = experts.expert_gate_up(x, gate_up, tiles, config=config)
        experts.expert_down(hidden, down, torch.empty(tokens, A), tiles, overlap=True, config=config)
