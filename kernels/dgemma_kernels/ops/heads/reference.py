"""Norms and rotations of heads, and their gradient, in plain PyTorch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dgemma.model.layers import rms_norm
from dgemma.model.rotary import rotate
from dgemma_kernels.ops.heads.kernel import HeadInputs


def norm_heads(inputs: HeadInputs, *, num_heads: int, kv_heads: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Split the heads, norm them and rotate queries and keys."""
    raw, query_weight, key_weight, cos, sin = inputs
    heads = raw.unflatten(1, (-1, cos.shape[-1]))
    queries, keys, *others = heads.split((num_heads, *[kv_heads] * ((heads.shape[1] - num_heads) // kv_heads)), 1)
    tables = cos[:, None], sin[:, None]
    return (
        rotate(rms_norm(queries, query_weight, eps), *tables),
        rotate(rms_norm(keys, key_weight, eps), *tables),
        rms_norm(others[0] if others else keys, None, eps),
    )


def norm_heads_gradient(
    inputs: HeadInputs, firsts: Sequence[Tensor], seconds: Sequence[Tensor], *, eps: float
) -> Tensor:
    """Pad and add the gradients of both parts, then differentiate `norm_heads`."""
    (batch, _, num_heads, _), kv_heads = firsts[0].shape, firsts[1].shape[2]
    length = inputs.raw.shape[0] // batch
    whole = []
    for first, second in zip(firsts, seconds, strict=True):
        total = first.new_zeros(batch, length, *first.shape[2:])
        total[:, : first.shape[1]] += first
        total[:, length - second.shape[1] :] += second
        whole.append(total.flatten(0, 1))

    def run(raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return norm_heads(inputs._replace(raw=raw), num_heads=num_heads, kv_heads=kv_heads, eps=eps)

    of_raw: Tensor = torch.func.vjp(run, inputs.raw)[1](tuple(whole))[0]
    return of_raw
