"""Training on several GPUs or machines with PyTorch's torchrun, FSDP2 and DTensor.

Weights are sharded over the processes, and each layer is gathered while it is used (ZeRO-3, arXiv:1910.02054). With
expert parallelism, experts stay on their processes and tokens are sent to them (GShard, arXiv:2006.16668). Up to
rounding, losses and weights equal those of one process.
"""

import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from dgemma.checks import Words, require
from dgemma.doors import replace_weights
from dgemma.model.experts import Experts, Routing, combine, dispatch, group_by_expert
from dgemma.model.layers import wide_dtype
from dgemma.quantization.weights import quantized_weights
from dgemma.train.parallel import Model, Parallel, Result

_TORCHRUN = "torchrun --nproc-per-node 2 train.py"


class FullySharded(Parallel):
    """Many processes, each with its part of the weights, gradients and optimizer state, and its rows of the batch.

    expert_parallel: number of processes that share one set of experts; they exchange tokens instead of weights.
    replicas: number of copies of the model, each spread over its own processes, so that weights need not cross slow
    links between machines. device: by default "cuda" if available, else "cpu".

    All processes start with the weights of the main process. On the others the model may be on the meta device.

    Example, started with `torchrun --nproc-per-node 8 train.py`:

        with FullySharded(expert_parallel=4) as parallel:
            train(model, objective, source, config, out="run", parallel=parallel)
    """

    def __init__(self, *, expert_parallel: int = 1, replicas: int = 1, device: str | None = None) -> None:
        self.rank, self.world_size, local_rank = _launched()
        fits = min(expert_parallel, replicas) >= 1 and self.world_size % (expert_parallel * replicas) == 0
        rule = f"have a product that divides the {self.world_size} processes"
        require(fits, "FullySharded.expert_parallel and replicas", rule, (expert_parallel, replicas))
        kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.device = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
        if kind == "cuda":
            torch.cuda.set_device(self.device)
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(minutes=30))  # to write a large checkpoint
        self.expert_parallel = expert_parallel
        share = self.world_size // replicas  # processes that one copy of the model is spread over
        whole = init_device_mesh(kind, (replicas, share), mesh_dim_names=("replica", "shard"))
        split = init_device_mesh(
            kind, (replicas, share // expert_parallel, expert_parallel), mesh_dim_names=("replica", "data", "expert")
        )
        self._mesh: DeviceMesh = whole if replicas > 1 else whole["shard"]
        self._expert_mesh: DeviceMesh = split["expert"]
        self._data_mesh: DeviceMesh = split["replica", "data"] if replicas > 1 else split["data"]
        self._root: _Root | None = None
        self._vision: nn.Module | None = None
        self._running = self._has_images = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Leave the process group. Raise a RuntimeError if another process was lost."""
        if error is None:
            dist.destroy_process_group()
        elif isinstance(error, dist.DistError) or (
            # Errors of gloo are plain RuntimeErrors.
            isinstance(error, RuntimeError) and ("Connection closed by peer" in str(error) or "gloo" in str(error))
        ):
            raise RuntimeError(
                f"Process {self.rank} of {self.world_size} lost another process, which died or hangs. The message of "
                "that process is above, or on its machine. Start the same command again to continue from the last "
                "checkpoint."
            ) from error

    def prepare(self, model: Model, *, mixed: bool) -> Model:
        """Shard the model in place by layers, so that a GPU holds its part and at most one whole layer or embedding.

        mixed: layers are gathered in bfloat16; everything else stays in float32 for the loop's autocast.
        """
        is_plain, fix = not any(quantized_weights(model)), "Train it in one process."
        require(is_plain, "FullySharded model", "have unquantised weights", type(model).__name__, fix)
        narrow = mixed or next(model.parameters()).dtype.itemsize < 4
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if mixed else None,
            reduce_dtype=torch.float32 if narrow else None,
            cast_forward_inputs=False,  # the residual stream keeps the dtype it has on one process
        )
        # Layers return keys and values as views. That is safe, because a cache under autograd only copies them.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        layers: list[nn.Module] = list(model.layers)  # type: ignore[arg-type]
        for layer in layers:
            self._place(layer)
            if self.expert_parallel > 1:
                for experts in (m for m in layer.modules() if isinstance(m, Experts)):
                    spread_experts(experts, self._expert_mesh)
                    fully_shard(experts, mesh=self._data_mesh, mp_policy=policy)
            fully_shard(layer, mesh=self._mesh, mp_policy=policy)
        for child in model.children():
            if child is not model.layers:
                self._place(child)
        root = MixedPrecisionPolicy(reduce_dtype=policy.reduce_dtype, cast_forward_inputs=False)
        self._root = _Root(model)
        fully_shard(self._root, mesh=self._mesh, mp_policy=root)
        self._vision = getattr(model, "vision", None)
        if self._vision is not None:
            self._vision.register_forward_hook(lambda *_: setattr(self, "_has_images", True))
        # If one process ran the layers less often than the others, the others would wait forever.
        layers[0].register_forward_pre_hook(lambda *_: self._meet(into_layers=True), prepend=True)
        for module in self._root.modules():
            if isinstance(module, FSDPModule):  # a loss is a part of the global loss, so gradients are summed
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        return model

    def _place(self, module: nn.Module) -> None:
        """Move a module to the device, with the weights of the main process."""
        tensors = [*module.parameters(), *module.buffers()]
        if any(tensor.is_meta for tensor in tensors):
            require(not self.is_main, "FullySharded model", "have weights on the main process", Words("meta tensors"))
            module.to_empty(device=self.device)
        else:
            module.to(self.device)
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)

    def forward(self, model: nn.Module, run: Callable[[], Result]) -> Result:
        assert self._root is not None, "call prepare first"
        self._running, self._has_images = True, False
        result: Result = self._root(run)
        self._meet(into_layers=False)
        self._running = False
        if not torch.is_grad_enabled():  # otherwise the backward reshards
            cast(FSDPModule, self._root).reshard()
        elif self._vision is not None and self.any(self._has_images) and not self._has_images:
            # FSDP sums the gradients that a process has. All must have the same ones, also those with text alone.
            for weight in self._vision.parameters():
                weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
        return result

    @torch.compiler.disable
    def _meet(self, *, into_layers: bool) -> None:
        """Raise RuntimeError if some processes run the layers again while others have finished."""
        if self._running and self._num_raised(into_layers) not in (0, self.world_size):
            raise RuntimeError(
                "FullySharded processes must run the layers equally often, but some finished while others "
                "continued. Give every process the same kind of rows: all with text before their canvases, or none."
            )

    def sum(self, tensor: Tensor) -> Tensor:
        total = tensor.detach().clone()
        dist.all_reduce(total)
        return total

    def any(self, flag: bool) -> bool:
        return self._num_raised(flag) > 0

    def barrier(self) -> None:
        self._num_raised(False)

    def _num_raised(self, flag: bool) -> int:
        """Return how many processes raise their flag. The sum is on the CPU, so that none waits for a GPU."""
        return int(self.sum(torch.tensor(int(flag))))

    @torch.no_grad()
    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        grads = [p.grad for p in parameters if p.grad is not None]
        parts = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
        # If n processes hold the same shard, each counts 1/n of it, so that every square is summed once.
        norms = torch._foreach_norm(parts, dtype=wide_dtype(parts[0]))
        torch._foreach_div_(norms, [math.sqrt(self._num_copies(grad)) for grad in grads])
        norm = self.sum(torch.stack(norms).square().sum()).sqrt()
        torch._foreach_mul_(parts, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def _num_copies(self, tensor: Tensor) -> int:
        if not isinstance(tensor, DTensor):
            return self.world_size
        sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
        return math.prod(size for size, placement in sizes if placement.is_replicate())

    def collect(self, named: Mapping[str, Result]) -> dict[str, Result]:
        entries: list[dict[str, Result]] = [{}] * self.world_size
        dist.all_gather_object(entries, dict(named))
        return {name: value for of_process in entries for name, value in of_process.items()}

    def save_pretrained(self, model: nn.Module, folder: Path) -> None:
        """Gather the weights on the main process, one tensor at a time, and write them there."""
        gathered = []
        for module in model.modules():
            for name, part in module.named_parameters(recurse=False):
                whole = (part.full_tensor() if isinstance(part, DTensor) else part).detach().cpu()
                if self.is_main:
                    gathered.append((module, name, nn.Parameter(whole, requires_grad=part.requires_grad)))
        if self.is_main:
            with replace_weights(gathered):
                super().save_pretrained(model, folder)
        self.barrier()


class _Root(nn.Module):
    """Wrapper of the model for FSDP: its forward runs any function, and the model keeps its class and names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], Result]) -> Result:
        return run()


def _launched() -> tuple[int, int, int]:
    """Return the rank, the number of processes and the rank on this machine, from torchrun's environment."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
    if any(name not in os.environ for name in names):
        raise RuntimeError(
            f"FullySharded must be started by torchrun, which sets {', '.join(names)}. Run `{_TORCHRUN}`, or omit "
            "`parallel` for one process."
        )
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])


def spread_experts(experts: Experts, mesh: DeviceMesh) -> None:
    """Keep only this process's part of the experts, in place. The processes of a one-dimensional `mesh` share them.

    The weights become DTensors of the whole shape under their old names, so a checkpoint does not depend on the mesh.
    Adapters on the experts are spread with them.
    """
    num_experts = experts.gate_up_proj.shape[0]
    divides = num_experts % mesh.size() == 0
    require(divides, "FullySharded.expert_parallel", f"divide the model's {num_experts} experts", mesh.size())
    for name, weight in list(experts.named_parameters()):
        part = weight.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
        spread = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
        setattr(experts, name, nn.Parameter(spread, requires_grad=weight.requires_grad))
    # The current class, perhaps one with adapters, gets a subclass. Its `super().forward` runs between two exchanges.
    experts.__class__ = type(f"Spread{type(experts).__name__}", (_SpreadExperts, type(experts)), {"mesh": mesh})


class _SpreadExperts(Experts):
    mesh: DeviceMesh

    @torch.compiler.disable  # the number of rows sent is known only at run time
    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """Return Σ_a weight · expert_a(x), each expert computed on its own process. x: (M, D) → (M, D)."""
        num_experts = self.gate_up_proj.shape[0]
        num_own = num_experts // self.mesh.size()
        groups = group_by_expert(routing.experts, num_experts)
        sorted_experts, rows = routing.experts.flatten()[groups.order], dispatch(x, groups)
        # Under autocast the products would round the rows anyway. Rounded before, they are half as many bytes to send.
        if torch.is_autocast_enabled(x.device.type):
            rows = rows.to(torch.get_autocast_dtype(x.device.type))

        group = self.mesh.get_group()
        counts = (sorted_experts // num_own).bincount(minlength=self.mesh.size())
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=group)
        send, receive = counts.tolist(), received.tolist()
        own_rows = _Exchange.apply(rows, send, receive, group)  # (R, D)
        own_experts = _Exchange.apply(sorted_experts, send, receive, group) - self.mesh.get_local_rank() * num_own

        # A received row is passed as a token that chose one expert with weight 1, so `super().forward` computes it.
        ones = torch.ones(own_experts.shape[0], 1, device=x.device, dtype=wide_dtype(x))
        # The parts are computed from Parameters, so gradients flow into these.
        own = [(self, name, cast(DTensor, weight).to_local()) for name, weight in self.named_parameters(recurse=False)]
        with replace_weights(own):
            out = super().forward(own_rows, Routing(ones, ones, own_experts[:, None]))
        out = _Exchange.apply(out, receive, send, group)  # (M · A, D), sorted by expert again
        return combine(out, routing.weights, groups, x.dtype)


class _Exchange(torch.autograd.Function):
    """Send `send[i]` of the rows (M, …) to process i; return the received rows (R, …), `receive[i]` from process i."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        out = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchange.apply(grad, ctx.receive, ctx.send, ctx.group), None, None, None
