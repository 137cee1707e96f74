"""Linear layers with adapters. Layers with the same input share their products."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dgemma.model.config import GenerationDefaults
from dgemma.model.fused import joined
from dgemma.model.layers import product_dtype
from dgemma.model.quantized import QuantizedLinear, Weight, linear_layer
from dgemma.train.lora.settings import LoRA


class AdaptedLinear(nn.Module):
    """A linear layer whose output gains scale · B A x."""

    weight: Weight
    base_generation: GenerationDefaults  # of the base model; training adapters may change the model's noise

    def __init__(self, base: nn.Linear | QuantizedLinear, lora: LoRA) -> None:
        super().__init__()
        self.weight, self.lora = base.weight, lora
        self.lora_a, self.lora_b = new_pair(base.weight, lora.rank)

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


def new_pair(weight: Weight, rank: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Return A (…, rank, in) and B (…, out, rank) of zeros, in float32 or wider because updates are small."""
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
    """Move the base weights of layers with the same input next to each other in memory, so that they have one product.

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
        a, b = torch.cat(pairs[:count]).to(dtype), [pair.to(dtype) for pair in pairs[count : 2 * count]]
        ctx.scale, ctx.dtypes = scale, (x.dtype, pairs[0].dtype)
        ctx.quantized = [None if isinstance(weight, Tensor) else weight for weight in weights]
        with torch.autocast(x.device.type, enabled=False):
            narrow = scaled_product(rows, a.T, scale)  # (M, count · rank)
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
