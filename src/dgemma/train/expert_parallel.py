"""Experts spread over processes: each owns some, and tokens travel there and back (GShard, arXiv:2006.16668).

The reference is `model.experts.Experts`, whose result this gives; adapters on the experts are spread with them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dgemma.model.experts import Experts, Routing, _Combine, _Dispatch
from dgemma.model.layers import wide_dtype


def spread_experts(experts: Experts, mesh: DeviceMesh) -> None:
    """Keep this process's part of the experts, in place; `mesh` holds the processes that share them, in one dimension.

    The weights become DTensors of the whole shape under their old names, so a checkpoint knows nothing of the spread.

    Example: `spread_experts(layer.experts, init_device_mesh("cuda", (8,)))`.
    """
    num_experts = experts.gate_up_proj.shape[0]
    if num_experts % mesh.size():
        raise ValueError(
            f"FullySharded.expert_parallel must divide the model's {num_experts} experts, got {mesh.size()}."
        )
    for name, weight in list(experts.named_parameters()):
        part = weight.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
        spread = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
        setattr(experts, name, nn.Parameter(spread, requires_grad=weight.requires_grad))
    # Whatever its class computes, an adapter's too, with the exchange around it.
    experts.__class__ = type(f"Spread{type(experts).__name__}", (_SpreadExperts, type(experts)), {"mesh": mesh})


class _SpreadExperts(Experts):
    mesh: DeviceMesh

    @torch.compiler.disable  # how many rows travel is known only while running
    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """Σ_a weight · expert_a(x), each expert wherever it lives. x: (M, D) → (M, D)."""
        num_chosen = routing.experts.shape[1]
        num_own = self.gate_up_proj.shape[0] // self.mesh.size()
        sorted_experts, order = routing.experts.flatten().sort(stable=True)
        back = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0], device=x.device))
        rows = _Dispatch.apply(x, order, back, num_chosen)
        if torch.is_autocast_enabled(x.device.type):  # the products will round to this anyway: half the bytes travel
            rows = rows.to(torch.get_autocast_dtype(x.device.type))

        group = self.mesh.get_group()
        counts = (sorted_experts // num_own).bincount(minlength=self.mesh.size())
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=group)
        send, receive = counts.tolist(), received.tolist()
        own_rows = _Exchange.apply(rows, send, receive, group)  # (R, D)
        own_experts = _Exchange.apply(sorted_experts, send, receive, group) - self.mesh.get_local_rank() * num_own

        # Each arrival is a token with one choice and weight 1, so the reference computes it.
        one = torch.ones(own_experts.shape[0], 1, device=x.device, dtype=wide_dtype(x))
        with _own_weights(self):
            out = super().forward(own_rows, Routing(one, one, own_experts[:, None]))
        out = _Exchange.apply(out, receive, send, group)  # (M · A, D), sorted by expert again
        out = out.to(wide_dtype(out)) * _Dispatch.apply(routing.weights.view(-1, 1), order, back, 1)
        return _Combine.apply(out, order, back, num_chosen).to(x.dtype)


@contextmanager
def _own_weights(module: nn.Module) -> Iterator[None]:
    """While inside, the module's weights are this process's part of them."""
    whole = dict(module._parameters)
    # Straight into the dictionary: a part is no Parameter but the head of a graph that leads to one.
    module._parameters.update({name: cast(DTensor, weight).to_local() for name, weight in whole.items()})  # type: ignore[misc]
    try:
        yield
    finally:
        module._parameters.update(whole)


class _Exchange(torch.autograd.Function):
    """Rows (M, …), `send[i]` of them to process i of the group → (R, …), `receive[i]` from each. Gradients go back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        out = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchange.apply(grad, ctx.receive, ctx.send, ctx.group), None, None, None
