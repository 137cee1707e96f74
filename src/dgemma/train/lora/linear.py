"""The settings of adapters, and linear layers with adapters. Layers with the same input share their products."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dgemma.checks import check_count, check_finite, require_field
from dgemma.model.config import GenerationDefaults
from dgemma.model.fused import compiles_on, joined
from dgemma.model.layers import product_dtype
from dgemma.model.quantized import QuantizedLinear, Weight, linear_layer

_TARGETS = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "dense": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    "experts": ("experts",),
    "router": ("router.proj",),
    "self_conditioning": ("self_conditioning.gate_proj", "self_conditioning.up_proj", "self_conditioning.down_proj"),
}


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


def is_target(name: str, targets: Iterable[str]) -> bool:
    return any(name == end or name.endswith("." + end) for target in targets for end in _TARGETS[target])


class AdaptedLinear(nn.Module):
    """A linear layer whose output gains scale · B A x."""

    weight: Weight
    base_generation: GenerationDefaults  # of the base model; training adapters may change the model's noise

    def __init__(self, base: nn.Linear | QuantizedLinear, lora: LoRA) -> None:
        super().__init__()
        self.weight, self.lora = base.weight, lora
        self.lora_a, self.lora_b = new_pair(base.weight, lora.rank)

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """out: the output, if an earlier pass computed it. Only x Aᵀ is then computed, for the backward pass."""
        return self.together(x, [self], None if out is None else [out])[0]

    @staticmethod
    def together(x: Tensor, layers: Sequence["AdaptedLinear"], outs: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Return the outputs of several adapted layers for one input. outs: as `out` of `forward`.

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


def new_pair(weight: Weight, rank: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Return A (…, rank, in) and B (…, out, rank), both zeros; `add_lora` then draws A.

    Both are in float32 or wider, because updates are small.
    """
    *experts, num_out, num_in = weight.shape
    dtype = torch.promote_types(weight.dtype, torch.float32) if isinstance(weight, Tensor) else torch.float32
    a, b = (
        torch.zeros(*experts, *shape, dtype=dtype, device=weight.device) for shape in ((rank, num_in), (num_out, rank))
    )
    return nn.Parameter(a), nn.Parameter(b)


def scaled_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Return scale · left @ right, rounded once."""
    return torch.addmm(left.new_empty(()), left, right, beta=0, alpha=scale)


def make_neighbours(layers: Sequence[AdaptedLinear]) -> None:
    """Move the base weights of layers with the same input next to each other in memory, so that one product serves all.

    Each weight stays a contiguous tensor.
    """
    weights = [layer.weight for layer in layers if isinstance(layer.weight, nn.Parameter)]
    if len(weights) < 2 or len(weights) < len(layers) or len({(w.dtype, w.device) for w in weights}) > 1:
        return
    whole = torch.cat([weight.detach() for weight in weights])
    for weight, part in zip(weights, whole.split([len(weight) for weight in weights]), strict=True):
        weight.data = part


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
        a, b = _stack(pairs[:count]).to(dtype), [pair.to(dtype) for pair in pairs[count : 2 * count]]
        ctx.scale, ctx.dtypes = scale, (x.dtype, pairs[0].dtype)
        ctx.quantized = [None if isinstance(weight, Tensor) else weight for weight in weights]
        with torch.autocast(x.device.type, enabled=False):
            narrow = _contract(rows, a, scale, count)  # (M, count · rank)
            ctx.save_for_backward(rows, a, narrow, *b, *pairs[2 * count :])
            if known is not None:
                return tuple(out.detach() for out in known)
            out = _expand(narrow, b)
            outs = out.split([weight.shape[0] for weight in weights], 1)
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
        at_once, together = joined(flat, 1), _join(weights)
        grad_narrow, grad_b = _grad_of_expand(flat, at_once, narrow, b, ctx.scale)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad_narrow @ a
            pairs = zip(flat, weights, strict=True)
            for grad, weight in pairs if at_once is None or together is None else ((at_once, together),):
                grad_x.addmm_(grad, _decoded(weight, rows.dtype))
            grad_x = grad_x.to(x_dtype).unflatten(0, grads[0].shape[:-1])
        grad_a = _grad_of_a(grad_narrow, rows, count).to(wide).chunk(count)
        of_weights = [
            (grad.T @ rows).to(weight.dtype) if weight.requires_grad else None
            for grad, weight in zip(flat, weights, strict=True)
            if isinstance(weight, Tensor)
        ]
        return grad_x, None, None, None, None, *grad_a, *(grad.to(wide) for grad in grad_b), *of_weights


def _contract(rows: Tensor, a: Tensor, scale: float, count: int) -> Tensor:
    """Return scale · rows Aᵀ for A of all layers: rows (M, K), a (layers · rank, K) → (M, layers · rank)."""
    if _uses_kernels(rows, count, a.shape[0] // count):
        from dgemma_kernels.ops.adapters import contract

        return contract(rows.contiguous(), a, scale)
    return scaled_product(rows, a.T, scale)


def _grad_of_a(grad: Tensor, rows: Tensor, count: int) -> Tensor:
    """Return gradᵀ rows, (layers · rank, K), for the gradient (M, layers · rank) of `_contract`."""
    if _uses_kernels(rows, count, grad.shape[1] // count):
        from dgemma_kernels.ops.adapters import contract_gradient

        return contract_gradient(grad, rows.contiguous())
    return grad.T @ rows


def _expand(narrow: Tensor, b: Sequence[Tensor]) -> Tensor:
    """Return the products of each B (N_l, rank) with its columns of narrow (M, layers · rank), side by side: (M, N)."""
    widths = [len(each) for each in b]
    if _uses_kernels(narrow, len(b), b[0].shape[1]):
        from dgemma_kernels.ops.adapters import expand

        return expand(narrow, _stack(b), widths)
    out = narrow.new_empty(narrow.shape[0], sum(widths))
    for part, each, product in zip(narrow.chunk(len(b), 1), b, out.split(widths, 1), strict=True):
        torch.mm(part, each.T, out=product)
    return out


def _grad_of_expand(
    grads: Sequence[Tensor], at_once: Tensor | None, narrow: Tensor, b: Sequence[Tensor], scale: float
) -> tuple[Tensor, Sequence[Tensor]]:
    """Return scale · the gradient of `narrow`, and the unscaled gradient of each B.

    grads: the gradients of each layer's output, (M, N_l). at_once: all these gradients as one tensor (M, N), if they
    are neighbours in memory; otherwise None.
    """
    if at_once is not None and at_once.stride(1) == 1 and _uses_kernels(narrow, len(b), b[0].shape[1]):
        from dgemma_kernels.ops.adapters import expand_gradient

        widths = [len(each) for each in b]
        of_narrow, of_b = expand_gradient(at_once, narrow, _stack(b), widths, scale=scale)
        return of_narrow, of_b.split(widths)
    of_narrow = torch.empty_like(narrow)
    for grad, each, part in zip(grads, b, of_narrow.chunk(len(b), 1), strict=True):
        torch.addmm(part, grad, each, beta=0, alpha=scale, out=part)
    return of_narrow, [grad.T @ part for grad, part in zip(grads, narrow.chunk(len(b), 1), strict=True)]


def _uses_kernels(x: Tensor, num_layers: int, rank: int) -> bool:
    """Return True if our kernels multiply by A and B: in compiled steps on a GPU."""
    if not x.is_cuda or not compiles_on(x.device) or x.dtype not in (torch.bfloat16, torch.float16) or not len(x):
        return False
    from dgemma_kernels.ops.adapters import fits

    return fits(num_layers, rank)


def _stack(matrices: Sequence[Tensor]) -> Tensor:
    """Return the rows of all matrices, without a copy if they are neighbours in memory."""
    whole = joined(matrices, 0)
    return torch.cat(list(matrices)) if whole is None else whole


def _join(weights: Sequence[Weight]) -> Tensor | None:
    """Return the tensor whose rows are those of all weights, if they are neighbours in memory."""
    tensors = [weight for weight in weights if isinstance(weight, Tensor)]
    return joined(tensors, 0) if len(tensors) == len(weights) else None


def _decoded(weight: Weight, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype) if isinstance(weight, Tensor) else weight.decode(dtype)
