"""Low-rank adapters (LoRA, arXiv:2106.09685), which can be merged into the weights.

A weight W (out, in) acts as W + scale · B A. A (rank, in) is random and B (out, rank) is zero, so training starts from
the unchanged model. Experts are 3-D weights, with an A and a B for each. The adapted modules keep their names and their
base weights. Adapters are additional parameters of those modules, saved separately. The base weights may be quantised
(QLoRA, arXiv:2305.14314).
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dgemma.checks import check_count, check_finite, require_field, show, typed
from dgemma.files import open_tensors, parse_json, write_tensors
from dgemma.model.config import GenerationDefaults
from dgemma.model.diffusion import DiffusionGemma
from dgemma.model.experts import (
    Experts,
    Groups,
    Kept,
    Routing,
    dispatch,
    outer_by_group,
    product_by_group,
    require_experts,
    sum_choices,
)
from dgemma.model.fused import compiles_on, fusible, joined
from dgemma.model.layers import gated_gelu, product_dtype, wide_dtype
from dgemma.model.quantize import requantize
from dgemma.model.quantized import (
    QuantizedLinear,
    QuantizedWeight,
    Weight,
    linear_layer,
    quantized_weights,
    set_weight,
)

_TARGETS = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "dense": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    "experts": ("experts",),
    "router": ("router.proj",),
    "self_conditioning": ("self_conditioning.gate_proj", "self_conditioning.up_proj", "self_conditioning.down_proj"),
}
_EXPERT_WEIGHTS = {"gate_up_": "gate_up_proj", "down_": "down_proj"}  # by the prefix of their adapters
_EXPERT_ADAPTERS = ("gate_up_lora_a", "gate_up_lora_b", "down_lora_a", "down_lora_b")
_SAME_INPUT = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")  # layers of one module
_FEW_OUTPUTS = 16  # of a product that has its own kernel
_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """The settings of adapters: their rank, their strength and their targets. The update is alpha / rank · B A.

    Targets are groups of weights: attention, dense, experts, router, self_conditioning.

    Example: `LoRA(rank=16, alpha=32, targets=("attention", "dense"))` is the choice of several public recipes.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("attention", "dense", "experts", "router", "self_conditioning")

    def __post_init__(self) -> None:
        targets = self.targets
        named = isinstance(targets, list | tuple) and all(isinstance(target, str) for target in targets)
        require_field(named, self, "targets", "be a tuple of names", f"Choose from {', '.join(_TARGETS)}.")
        object.__setattr__(self, "targets", tuple(targets))
        check_count(self, "rank", fix="Use 8.")
        check_finite(self, "alpha", above=0, fix="Use twice the rank.")
        unknown = [target for target in self.targets if target not in _TARGETS]
        if unknown or not self.targets:
            raise ValueError(f"LoRA.targets must be among {', '.join(_TARGETS)}, got {self.targets}. Use one or more.")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class AdaptedLinear(nn.Module):
    """A linear layer whose output gains scale · B A x."""

    weight: Weight
    base_generation: GenerationDefaults  # of the base model; training adapters may change the model's noise

    def __init__(self, base: nn.Linear | QuantizedLinear, lora: LoRA) -> None:
        super().__init__()
        self.weight, self.lora = base.weight, lora
        self.lora_a, self.lora_b = _new_pair(base.weight, lora.rank)

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """out: the output, if it is known; then only the backward pass computes."""
        return self.together(x, [self], None if out is None else [out])[0]

    @staticmethod
    def together(x: Tensor, layers: Sequence["AdaptedLinear"], outs: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Return the outputs of several adapted layers for one input. outs: the outputs, if they are known.

        Example: `queries, keys = AdaptedLinear.together(x, [attention.q_proj, attention.k_proj])`.
        """
        weights = [layer.weight for layer in layers]
        pairs = [layer.lora_a for layer in layers] + [layer.lora_b for layer in layers]
        tensors = [weight for weight in weights if isinstance(weight, Tensor)]
        scale = layers[0].lora.scale
        return list(_AdaptedProducts.apply(x, weights, scale, product_dtype(x), outs, *pairs, *tensors))

    def updates(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of the base weight in this module, and the update of its adapter."""
        yield "weight", self.lora_b @ self.lora_a * self.lora.scale

    def base(self) -> nn.Linear | QuantizedLinear:
        """Return the layer without its adapter."""
        return linear_layer(self.weight)


class AdaptedExperts(Experts):
    """Experts whose every product gains scale · B_e A_e x."""

    base_generation: GenerationDefaults

    def __init__(self, base: Experts, lora: LoRA) -> None:
        nn.Module.__init__(self)
        self.gate_up_proj, self.down_proj, self.lora = base.gate_up_proj, base.down_proj, lora
        self.gate_up_lora_a, self.gate_up_lora_b = _new_pair(base.gate_up_proj, lora.rank)
        self.down_lora_a, self.down_lora_b = _new_pair(base.down_proj, lora.rank)

    @property
    def keeps_output(self) -> bool:  # type: ignore[override]
        # Quantised weights are chosen to save memory, so nothing more is kept next to them.
        # Weights spread over processes are there only during the forward.
        return type(self.gate_up_proj) is type(self.down_proj) is nn.Parameter

    def forward(self, x: Tensor, routing: Routing, kept: Kept | None = None) -> Tensor:
        if kept is None or not self.keeps_output:
            return super().forward(x, routing, kept)
        mixed: Tensor = _KeptOutput.apply(self, kept, x, routing.weights, routing.experts, *trained_weights(self))
        return mixed

    def hidden(self, x: Tensor, groups: Groups) -> Tensor:
        return self.hidden_after(self.narrow(x, groups), x, groups)

    def narrow(self, x: Tensor, groups: Groups) -> Tensor:
        """Return scale · A x for A of each chosen expert's gate_up: x (M, D) → (M, A, rank)."""
        # For small ranks, one product of all tokens with all experts' A is faster than thin products by expert.
        a = self.gate_up_lora_a.to(x.dtype).flatten(0, 1)
        of_all = (
            F.linear(x, a) * self.lora.scale if torch.is_grad_enabled() else _scaled_product(x, a.T, self.lora.scale)
        )
        taken: Tensor = _Take.apply(of_all, groups)
        return taken

    def hidden_after(self, narrow: Tensor, x: Tensor, groups: Groups) -> Tensor:
        """Return `hidden` of x (M, D), from `narrow` of x."""
        b = self.gate_up_lora_b.to(x.dtype)
        return _product_of_tokens(x, self.gate_up_proj, narrow.flatten(0, 1), b, groups, gated=True)

    def mix(self, hidden: Tensor, weights: Tensor, groups: Groups, dtype: torch.dtype) -> Tensor:
        down_a = self.down_lora_a.to(hidden.dtype)
        if _uses_kernel(self.down_proj, hidden):
            from dgemma_kernels.ops.grouped import multiply_rows

            narrow = _thin_product(hidden, down_a, groups.ends, self.lora.scale)
            adapter = narrow, self.down_lora_b.to(hidden.dtype)
            rows = multiply_rows(hidden, self.down_proj, groups.ends, *adapter, by_row=weights.flatten()[groups.order])
            return sum_choices(rows, groups.back).to(dtype)
        mixed = super().mix(hidden, weights, groups, dtype)
        narrow = product_by_group(hidden, down_a, groups.ends)
        narrow = (narrow * (_by_row(weights, groups)[:, None] * self.lora.scale)).to(hidden.dtype)
        # Zeros for the other experts make the sum over a token's experts one product with all experts' B.
        spread = _Put.apply(narrow, groups)  # (M, E · rank)
        b = self.down_lora_b.to(hidden.dtype).transpose(1, 2).flatten(0, 1)
        return mixed.addmm_(spread, b) if mixed.dtype == spread.dtype else mixed + spread @ b

    def gradients(
        self, grad: Tensor, x: Tensor, narrow: Tensor, weights: Tensor, groups: Groups, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the gradients of x (M, D), of the routing weights (M, A) and of the parameters that require one.

        grad: that of the experts' output (M, D). Hidden values are recomputed. The output is not: the gradient of the
        routing weights comes from `grad` times the transposed down weights. narrow: as from `self.narrow`. dtype: that
        of products.
        """
        assert isinstance(self.gate_up_proj, Tensor)
        assert isinstance(self.down_proj, Tensor)
        scale, ends = self.lora.scale, groups.ends
        x, grad, gate_up, down = x.to(dtype), grad.to(dtype), self.gate_up_proj.to(dtype), self.down_proj.to(dtype)
        up_a, up_b, down_a, down_b = (getattr(self, name).to(dtype) for name in _EXPERT_ADAPTERS)
        narrow = narrow.flatten(0, 1).to(dtype)
        wide = _product_of_tokens(x, gate_up, narrow, up_b, groups)  # (R, 2F)
        along = _take(_scaled_product(grad, down_b.transpose(1, 2).flatten(0, 1).T, scale), groups).flatten(0, 1)
        pulled = _product_of_tokens(grad, down.transpose(1, 2), along, down_a.transpose(1, 2), groups)  # (R, F)
        hidden, of_wide, of_rows = _grad_of_gates(wide, pulled, weights, groups.order)
        by_row, narrow, along = _narrow_by_row(weights, narrow, along, groups.order)
        down_narrow = _thin_product(hidden, down_a, ends, scale, by_row)
        of_narrow = _thin_product(of_wide, up_b.mT.contiguous(), ends, scale)
        of_all = _put(of_narrow, groups)  # (M, E · rank)
        found = {
            "gate_up_lora_a": (of_all.T @ x).view_as(up_a),
            "gate_up_lora_b": outer_by_group(of_wide, narrow, ends),
            "down_lora_a": outer_by_group(along, hidden, ends),
            "down_lora_b": (_put(down_narrow, groups).T @ grad).view_as(down_b.mT).mT,
        }
        if _uses_kernel(gate_up, of_wide):
            from dgemma_kernels.ops.grouped import multiply_rows

            of_rows_of_x = multiply_rows(of_wide, gate_up.transpose(1, 2), ends, of_narrow, up_a.transpose(1, 2))
            of_x = sum_choices(of_rows_of_x, groups.back)
        else:
            of_x = sum_choices(product_by_group(of_wide, gate_up.transpose(1, 2), ends), groups.back)
            of_x.addmm_(of_all, up_a.flatten(0, 1))
        if self.gate_up_proj.requires_grad:
            found["gate_up_proj"] = outer_by_group(of_wide, dispatch(x, groups), ends)
        if self.down_proj.requires_grad:
            weighted = dispatch(grad, groups) * by_row[:, None]
            found["down_proj"] = outer_by_group(weighted.to(dtype), hidden, ends)
        return of_x, of_rows[groups.back], found

    def updates(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of each base weight in this module, and the update of its adapter."""
        yield "gate_up_proj", self.gate_up_lora_b @ self.gate_up_lora_a * self.lora.scale
        yield "down_proj", self.down_lora_b @ self.down_lora_a * self.lora.scale

    def base(self) -> Experts:
        """Return the experts without their adapters."""
        experts = Experts.__new__(Experts)
        nn.Module.__init__(experts)
        experts.gate_up_proj, experts.down_proj = self.gate_up_proj, self.down_proj
        return experts


class _AdaptedProducts(torch.autograd.Function):
    """x Wᵀ + scale · x Aᵀ Bᵀ for several W, A and B.

    All A are multiplied in one product. The products with W come last and accumulate onto the adapters' outputs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: list[Weight],
        scale: float,
        dtype: torch.dtype,
        known: Sequence[Tensor] | None,
        *pairs: Tensor,
    ) -> Any:
        """pairs: all A, all B, then the weights that are plain tensors, so that autograd sees them."""
        count, rows = len(weights), x.flatten(0, -2).to(dtype)
        a, b = torch.cat(pairs[:count]).to(dtype), [pair.to(dtype) for pair in pairs[count : 2 * count]]
        ctx.scale, ctx.dtypes = scale, (x.dtype, pairs[0].dtype)
        ctx.quantized = [None if isinstance(weight, Tensor) else weight for weight in weights]
        with torch.autocast(x.device.type, enabled=False):
            narrow = _scaled_product(rows, a.T, scale)  # (M, count · rank)
            ctx.save_for_backward(rows, a, narrow, *b, *pairs[2 * count :])
            if known is not None:
                return tuple(out.detach() for out in known)
            out = rows.new_empty(rows.shape[0], sum(weight.shape[0] for weight in weights))
            outs = out.split([weight.shape[0] for weight in weights], 1)
            for part, of_pair, low in zip(narrow.chunk(count, 1), b, outs, strict=True):
                torch.mm(part, of_pair.T, out=low)
            together = _join(weights)
            for part, weight in zip(outs, weights, strict=True) if together is None else ((out, together),):
                part.addmm_(rows, _decoded(weight, dtype).T)
        return tuple(part.unflatten(0, x.shape[:-1]) for part in outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        rows, a, narrow, *others = ctx.saved_tensors
        count, (x_dtype, wide) = len(grads), ctx.dtypes
        b, tensors = others[:count], iter(others[count:])
        weights = [next(tensors) if weight is None else weight for weight in ctx.quantized]
        flat = [grad.flatten(0, -2) for grad in grads]
        grad_narrow = torch.empty_like(narrow)
        for grad, of_pair, part in zip(flat, b, grad_narrow.chunk(count, 1), strict=True):
            torch.addmm(part, grad, of_pair, beta=0, alpha=ctx.scale, out=part)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad_narrow @ a
            at_once, together = joined(flat, 1), _join(weights)
            pairs = zip(flat, weights, strict=True)
            for grad, weight in pairs if at_once is None or together is None else ((at_once, together),):
                grad_x.addmm_(grad, _decoded(weight, rows.dtype))
            grad_x = grad_x.to(x_dtype).unflatten(0, grads[0].shape[:-1])
        grad_a = (grad_narrow.T @ rows).to(wide).chunk(count)
        parts = zip(flat, narrow.chunk(count, 1), strict=True)
        grad_b = [(grad.T @ part).to(wide) for grad, part in parts]
        of_weights = [
            (grad.T @ rows).to(weight.dtype) if weight.requires_grad else None
            for grad, weight in zip(flat, weights, strict=True)
            if isinstance(weight, Tensor)
        ]
        return grad_x, None, None, None, None, *grad_a, *grad_b, *of_weights


def _join(weights: Sequence[Weight]) -> Tensor | None:
    """Return the tensor whose rows are those of all weights, if they are neighbours in memory."""
    tensors = [weight for weight in weights if isinstance(weight, Tensor)]
    return joined(tensors, 0) if len(tensors) == len(weights) else None


def _decoded(weight: Weight, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype) if isinstance(weight, Tensor) else weight.decode(dtype)


@contextmanager
def rounded_once(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Round all adapters to the dtype of products within the context, for a forward and its backward pass.

    Otherwise every use rounds them. Gradients reach the adapters themselves.

    Example: `with rounded_once(model, torch.bfloat16): objective.reduce(objective(model, batch, seeds=s)).backward()`.
    """
    places = [
        (module, name)
        for _, module in _adapted_modules(model)
        for name, weight in module.named_parameters(recurse=False)
        if "lora_" in name and weight.dtype != dtype
    ]
    weights = [getattr(module, name) for module, name in places]
    for (module, name), rounded in zip(places, _Rounded.apply(dtype, *weights) if places else (), strict=True):
        module._parameters[name] = rounded
    try:
        yield
    finally:
        for (module, name), weight in zip(places, weights, strict=True):
            module._parameters[name] = weight


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.dtypes = [weight.dtype for weight in weights]
        ctx.set_materialize_grads(False)  # an adapter that is not used keeps no gradient
        return tuple(_cast(weights, [dtype] * len(weights)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        used = [number for number, grad in enumerate(grads) if grad is not None]
        found = _cast([grads[number] for number in used], [ctx.dtypes[number] for number in used])
        of = dict(zip(used, found, strict=True))
        return None, *(of.get(number) for number in range(len(grads)))


def _cast(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    out = [torch.empty_like(tensor, dtype=dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]
    torch._foreach_copy_(out, list(tensors))  # a few launches for all
    return out


class _Take(torch.autograd.Function):
    """`_take`, whose gradient is a copy without additions, because it reads no position twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: Groups) -> Tensor:
        ctx.groups = groups
        return _take(x, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _put(grad.flatten(0, 1)[ctx.groups.order], ctx.groups), None


class _Put(torch.autograd.Function):
    """`_put`, the transpose of `_take`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, groups: Groups) -> Tensor:
        ctx.groups = groups
        return _put(rows, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _take(grad, ctx.groups).flatten(0, 1)[ctx.groups.order], None


def _take(x: Tensor, groups: Groups) -> Tensor:
    """Return the values (M, A, rank) of each choice's expert from those of all experts, (M, E · rank)."""
    return _take_choices(x.unflatten(1, (groups.ends.shape[0], -1)), groups.experts)


def _put(rows: Tensor, groups: Groups) -> Tensor:
    """Return (M, E · rank) with rows (R, rank) at the places of `_take`, and zeros elsewhere."""
    return _put_rows(rows, groups.experts, groups.order, groups.ends.shape[0]).flatten(1)


@fusible
def _take_choices(x: Tensor, experts: Tensor) -> Tensor:
    return x[torch.arange(x.shape[0], device=x.device)[:, None], experts]


@fusible
def _put_rows(rows: Tensor, experts: Tensor, order: Tensor, num_experts: int) -> Tensor:
    zeros = rows.new_zeros(experts.shape[0], num_experts, rows.shape[1])
    return zeros.index_put((order // experts.shape[1], experts.flatten()[order]), rows)


class _ByRow(torch.autograd.Function):
    """x[order], whose gradient is a copy too, because `back` inverts `order`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[ctx.saved_tensors[0]], None, None


def _by_row(weights: Tensor, groups: Groups) -> Tensor:
    """Return the weights (M, A) of the choices in the order of the rows, (R,)."""
    out: Tensor = _ByRow.apply(weights.flatten(), groups.order, groups.back.flatten())
    return out


class _KeptOutput(torch.autograd.Function):
    """The experts' output, whose gradient computes the hidden values again. The output itself is computed once."""

    @staticmethod
    def forward(
        ctx: Any, module: AdaptedExperts, kept: Kept, x: Tensor, weights: Tensor, experts: Tensor, *_: Tensor
    ) -> Tensor:
        groups = kept.group(experts, module.gate_up_proj.shape[0])
        if kept.mixed is None or kept.narrow is None:
            kept.narrow = module.narrow(x, groups)
            kept.mixed = module.mix(module.hidden_after(kept.narrow, x, groups), weights, groups, x.dtype)
        ctx.module, ctx.dtype = module, product_dtype(x)
        ctx.save_for_backward(x, kept.narrow, weights, *groups)
        return kept.mixed.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, narrow, weights, *groups = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            of_x, of_weights, found = ctx.module.gradients(grad, x, narrow, weights, Groups(*groups), ctx.dtype)
        trained = [(name, weight) for name, weight in ctx.module.named_parameters() if weight.requires_grad]
        of_trained = [found[name].to(weight.dtype) for name, weight in trained]
        return None, None, of_x.to(x.dtype), of_weights, None, *of_trained


def _scaled_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Return scale · left @ right, rounded once."""
    return torch.addmm(left.new_empty(()), left, right, beta=0, alpha=scale)


def _product_of_tokens(
    x: Tensor, weights: Weight, narrow: Tensor, b: Tensor, groups: Groups, *, gated: bool = False
) -> Tensor:
    """Return x W_eᵀ + narrow_e B_eᵀ of each choice: x (M, I), weights (E, O, I), narrow (R, rank), b (E, O, rank).

    The result is (R, O), or (R, O / 2) if gated, by `gated_gelu`. On a Hopper GPU, compiled training steps use one
    kernel, which does not copy the tokens.
    """
    if _uses_kernel(weights, x):
        from dgemma_kernels.ops.grouped import multiply_tokens

        return multiply_tokens(x.contiguous(), weights, narrow, b, groups.order, groups.ends, gated=gated)
    low = product_by_group(_ByRow.apply(narrow, groups.order, groups.back.flatten()), b, groups.ends)
    out = product_by_group(dispatch(x, groups), weights, groups.ends) + low
    return gated_gelu(*out.chunk(2, dim=-1)) if gated else out


def _thin_product(rows: Tensor, weights: Tensor, ends: Tensor, scale: float, by_row: Tensor | None = None) -> Tensor:
    """Return scale · by_row · `product_by_group` for weights with few outputs, for which torch's grouped product is
    slow."""
    if weights.shape[1] <= _FEW_OUTPUTS and _uses_kernel(weights, rows):
        from dgemma_kernels.ops.grouped import multiply_rows

        return multiply_rows(rows, weights, ends, scale=scale, by_row=by_row)
    factor = scale if by_row is None else scale * by_row[:, None]
    return (product_by_group(rows, weights, ends) * factor).to(rows.dtype)


def _uses_kernel(weights: Weight, x: Tensor) -> TypeGuard[Tensor]:
    """Return True in compiled steps without gradients, if our kernels are for this GPU, dtype and these widths."""
    return (
        compiles_on(x.device)
        and not torch.is_grad_enabled()
        and x.is_cuda
        and torch.cuda.get_device_capability(x.device)[0] == 9  # Hopper has the shared memory for its tiles
        and isinstance(weights, Tensor)
        and x.dtype == weights.dtype in (torch.bfloat16, torch.float16)
        and x.shape[1] % 64 == weights.shape[1] % 8 == 0
    )


def same_autocast(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Return a function that makes a context with the current autocast, for a backward pass that computes again.

    Example: `ctx.autocast = same_autocast(x.device)`, later `with ctx.autocast(): ...`.
    """
    if not torch.is_autocast_enabled(device.type):
        return nullcontext
    return partial(torch.autocast, device.type, torch.get_autocast_dtype(device.type), cache_enabled=False)


def trained_weights(module: nn.Module) -> list[nn.Parameter]:
    """Return the module's parameters that require gradients.

    Example: `trained_weights(model.layers[0])`.
    """
    return [weight for weight in module.parameters() if weight.requires_grad]


def _grad_of_gates(wide: Tensor, pulled: Tensor, weights: Tensor, order: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden values (R, F), gradients of gate and up (R, 2F), and those of the routing weights by row, (R,).

    pulled: the gradient of the hidden values (R, F), before it is multiplied by the routing weights (M, A).
    """
    if compiles_on(wide.device) and wide.is_cuda and wide.dtype != torch.float64:  # the kernel computes in float32
        from dgemma_kernels.ops.grouped import gated_gradient

        return gated_gradient(wide, pulled, weights.contiguous(), order)
    return _gated_and_grad(wide, pulled, weights, order)


@fusible
def _gated_and_grad(wide: Tensor, pulled: Tensor, weights: Tensor, order: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `_grad_of_gates` by automatic differentiation."""
    hidden, pull_back = torch.func.vjp(gated_gelu, *wide.chunk(2, dim=-1))  # type: ignore[misc]
    by_row, exact = weights.flatten()[order][:, None], pulled.to(wide_dtype(pulled))
    return hidden, torch.cat(pull_back((by_row * exact).to(hidden.dtype)), -1), (hidden * exact).sum(-1)


@fusible
def _narrow_by_row(weights: Tensor, narrow: Tensor, along: Tensor, order: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the routing weights (R,), narrow, and weights · along, (R, rank) each, in the order of the rows. The
    inputs are in the order of the choices."""
    by_row = weights.flatten()[order]
    return by_row, narrow[order], (along[order] * by_row[:, None]).to(along.dtype)


@typed
def add_lora(model: DiffusionGemma, lora: LoRA | None = None, *, seed: int = 0) -> list[nn.Parameter]:
    """Freeze the model, add adapters to its targets, and return the adapters' weights for an optimizer.

    Example: `add_lora(model, LoRA(rank=8)); train(model, objective, source, config, out="run")`.
    """
    lora = lora or LoRA()
    _refuse_adapters(model, "add_lora")
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if not _is_target(name, lora.targets):
            continue
        adapted = AdaptedExperts(module, lora) if isinstance(module, Experts) else AdaptedLinear(module, lora)
        adapted.base_generation = model.generation
        _set_module(model, name, adapted)
    for module in model.modules():
        for names in _SAME_INPUT:
            layers = (getattr(module, name, None) for name in names)
            _make_neighbours([layer for layer in layers if isinstance(layer, AdaptedLinear)])
    generator = torch.Generator().manual_seed(seed)
    for name, weight in _adapter_weights(model):
        if name.endswith("lora_a"):  # drawn on the CPU, so that the adapter does not depend on the device
            values = torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5
            weight.data.copy_(values)
    return [weight for _, weight in _adapter_weights(model)]


def _make_neighbours(layers: Sequence[AdaptedLinear]) -> None:
    """Move the base weights of layers with the same input next to each other in memory, so that they have one product.

    Each weight stays a contiguous tensor.
    """
    weights = [layer.weight for layer in layers if isinstance(layer.weight, nn.Parameter)]
    if len(weights) < 2 or len(weights) < len(layers) or len({(w.dtype, w.device) for w in weights}) > 1:
        return
    whole = torch.cat([weight.detach() for weight in weights])
    for weight, part in zip(weights, whole.split([len(weight) for weight in weights]), strict=True):
        weight.data = part


@torch.no_grad()
def merge_lora(model: DiffusionGemma, *, quantized: str | None = None) -> dict[str, float]:
    """Add the adapters to the weights and remove them. The model can then be saved and accelerated.

    Plain weights are rounded to their dtype, and the logits change only by that rounding. Quantised weights need a
    choice: "dequantize" gives weights of the model's dtype; "requantize" rounds to the same format again, which changes
    the logits. Return the relative rounding error |rounded - exact| / |exact| of each weight that was quantised.

    Example: `merge_lora(model); model.save_pretrained("merged")`.
    """
    _require_adapters(model, "merge_lora")
    if quantized not in (None, "dequantize", "requantize"):
        raise ValueError(f"merge_lora quantized must be None, 'dequantize' or 'requantize', got {quantized!r}.")
    adapted = list(_adapted_modules(model))
    if quantized is None and any(list(quantized_weights(module)) for _, module in adapted):
        raise ValueError(
            "merge_lora quantized must be 'dequantize' or 'requantize' for a quantised model, got None. The sum of a "
            "quantised weight and its adapter fits the format only after rounding."
        )
    errors = {}
    for name, module in adapted:
        merged = {}
        for attribute, update in module.updates():
            weight = getattr(module, attribute)
            if isinstance(weight, QuantizedWeight):
                exact = weight.decode(update.dtype) + update
                rounded = requantize(exact, weight) if quantized == "requantize" else exact.to(model.dtype)
                merged[attribute] = rounded
                values = rounded if isinstance(rounded, Tensor) else rounded.decode(exact.dtype)
                errors[f"{name}.{attribute}"] = float((values - exact).norm() / exact.norm())
            else:
                # Added in the wider dtype of the two, and rounded once.
                wide = torch.promote_types(weight.dtype, update.dtype)
                weight.copy_((weight.to(wide) + update).to(weight.dtype))
        _set_module(model, name, module.base())
        for attribute, weight in merged.items():
            set_weight(model, f"{name}.{attribute}", weight)
    model.requires_grad_(True)
    return errors


def drop_lora(model: DiffusionGemma) -> None:
    """Remove the adapters. The base model is trainable again and samples under its own noise.

    Example: `load_lora(model, "sudoku-lora.safetensors"); ...; drop_lora(model)`.
    """
    _require_adapters(model, "drop_lora")
    # A model that an earlier version pickled has no base_generation, and keeps its noise.
    base = next(getattr(module, "base_generation", model.generation) for _, module in _adapted_modules(model))
    model.generation = replace(
        model.generation, noise=base.noise, entropy_bound=base.entropy_bound, sampler=base.sampler
    )
    _take_off(model)


def save_lora(model: DiffusionGemma, path: str | Path) -> None:
    """Write only the adapters, to a safetensors file with their settings and the noise of the training.

    Example: `save_lora(model, "sudoku-lora.safetensors")`.
    """
    _require_adapters(model, "save_lora")
    lora = adapters_of(model)
    assert lora is not None
    noise = {} if model.generation.noise is None else {"noise": json.dumps(dict(model.generation.noise))}
    write_tensors(path, dict(_adapter_weights(model)), metadata={"lora": json.dumps(asdict(lora)), **noise})


@typed
def load_lora(model: DiffusionGemma, path: str | Path) -> LoRA:
    """Add saved adapters to a model, which then samples under their noise; return their settings.

    Example: `load_lora(model, "sudoku-lora.safetensors"); merge_lora(model)`.
    """
    _refuse_adapters(model, "load_lora")
    with open_tensors(path) as stored:
        metadata = stored.metadata() or {}
        slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118 (no mapping)
        lora, generation = _read_settings(metadata, path), model.generation
        if "noise" in metadata:  # otherwise the model keeps its own
            generation = generation.after_learning(parse_json(metadata["noise"], f"the noise in {path}"))
        # Before anything is allocated: a few bytes can name a huge rank.
        if _adapter_shapes(model, lora) != {name: tuple(entry.get_shape()) for name, entry in slices.items()}:
            raise ValueError(
                f"{path} must fit the model, but its adapters have other names or shapes. Load the model it was made "
                "for."
            )
        if any(entry.get_dtype() not in _DTYPES for entry in slices.values()):
            raise ValueError(f"{path} must hold adapters as floats ({', '.join(_DTYPES)}), got another dtype.")
        add_lora(model, lora)
        for name, weight in _adapter_weights(model):
            weight.data.copy_(stored.get_tensor(name))
    model.generation = generation
    return lora


def _read_settings(metadata: Mapping[str, str], path: str | Path) -> LoRA:
    if "lora" not in metadata:
        raise ValueError(f"{path} must be a file of adapters, but it has none. Point at a file written by save_lora.")
    settings = parse_json(metadata["lora"], f"the settings of the adapters in {path}")
    if settings.keys() != {field.name for field in fields(LoRA)}:
        raise ValueError(f"{path} must have the settings of a LoRA, got {show(settings)}. Save the adapters again.")
    return LoRA(**settings)


def _adapter_shapes(model: nn.Module, lora: LoRA) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all adapters that `add_lora` would make."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        if _is_target(name, lora.targets):
            of_experts = isinstance(module, Experts)
            for prefix, attribute in _EXPERT_WEIGHTS.items() if of_experts else (("", "weight"),):
                *experts, num_out, num_in = getattr(module, attribute).shape
                shapes[f"{name}.{prefix}lora_a"] = (*experts, lora.rank, num_in)
                shapes[f"{name}.{prefix}lora_b"] = (*experts, num_out, lora.rank)
    return shapes


def is_adapted(model: nn.Module) -> bool:
    """Return True if the model has adapters."""
    return adapters_of(model) is not None


def adapters_of(model: nn.Module) -> LoRA | None:
    """Return the settings of a model's adapters, or None.

    Example: `add_lora(model, LoRA(rank=4)); adapters_of(model).rank` is 4.
    """
    return next((module.lora for _, module in _adapted_modules(model)), None)


def _take_off(model: DiffusionGemma) -> None:
    for name, module in _adapted_modules(model):
        _set_module(model, name, module.base())
    model.requires_grad_(True)


def _adapted_modules(model: nn.Module) -> Iterator[tuple[str, AdaptedLinear | AdaptedExperts]]:
    return ((name, m) for name, m in list(model.named_modules()) if isinstance(m, AdaptedLinear | AdaptedExperts))


def _adapter_weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, weight) for name, weight in model.named_parameters() if name.endswith(("lora_a", "lora_b")))


def _is_target(name: str, targets: Iterable[str]) -> bool:
    return any(name == end or name.endswith("." + end) for target in targets for end in _TARGETS[target])


def _new_pair(weight: Weight, rank: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Return A (…, rank, in) and B (…, out, rank) of zeros, in float32 or wider because updates are small."""
    *experts, num_out, num_in = weight.shape
    dtype = torch.promote_types(weight.dtype, torch.float32) if isinstance(weight, Tensor) else torch.float32
    a, b = (
        torch.zeros(*experts, *shape, dtype=dtype, device=weight.device) for shape in ((rank, num_in), (num_out, rank))
    )
    return nn.Parameter(a), nn.Parameter(b)


def _set_module(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _refuse_adapters(model: nn.Module, owner: str) -> None:
    require_experts(model, owner)
    if is_adapted(model):
        raise ValueError(
            f"{owner} model must have no adapters, but it has some. Call merge_lora(model) or drop_lora(model) first."
        )


def _require_adapters(model: nn.Module, owner: str) -> None:
    if not is_adapted(model):
        raise ValueError(
            f"{owner} model must have adapters, but it has none. Call add_lora(model) or load_lora(model, path) first."
        )
