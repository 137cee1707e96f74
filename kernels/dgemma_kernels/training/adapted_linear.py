"""Linear layers with adapters in training: layers with the same input share their products.

Reference: `AdaptedLinear.forward`. For products, base weights of such layers lie next to each other in memory, and so
do their adapters, rounded once per pass.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dgemma.doors import plain, replace_weights
from dgemma.model import layers as reference
from dgemma.quantization.weights import Weight
from dgemma.train.lora import AdaptedLinear, adapted_modules
from dgemma_kernels.training.fused import joined

_SAME_INPUT = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")  # layers of one module


def project(x: Tensor, *layers: nn.Module) -> list[Tensor]:
    """Return the outputs of several linear layers for one input, by shared products if all are adapted."""
    adapted = [layer for layer in layers if isinstance(layer, AdaptedLinear)]
    return multiply(x, adapted) if len(adapted) == len(layers) else plain(reference.project)(x, *layers)


def forward(layer: AdaptedLinear, x: Tensor) -> Tensor:
    """Return the output of one adapted layer."""
    return multiply(x, [layer])[0]


def multiply(x: Tensor, layers: Sequence[AdaptedLinear], outs: Sequence[Tensor] | None = None) -> list[Tensor]:
    """Return the outputs of several adapted layers for one input.

    outs: the outputs, if an earlier pass computed them. Only x Aᵀ is then computed, for the backward pass.

    Example: `queries, keys = multiply(x, [attention.q_proj, attention.k_proj])`.
    """
    weights = [layer.weight for layer in layers]
    pairs = [layer.lora_a for layer in layers] + [layer.lora_b for layer in layers]
    tensors = [weight for weight in weights if isinstance(weight, Tensor)]
    scale = layers[0].lora.scale
    return list(_AdaptedProducts.apply(x, weights, scale, product_dtype(x), outs, *pairs, *tensors))


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of products of x under the current autocast."""
    autocast = torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64
    return torch.get_autocast_dtype(x.device.type) if autocast else x.dtype


def scaled_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Return scale · left @ right, rounded once."""
    return torch.addmm(left.new_empty(()), left, right, beta=0, alpha=scale)


def make_neighbours(model: nn.Module) -> None:
    """Move the base weights of adapted layers with the same input next to each other, so that one product serves all.

    Each weight stays a contiguous tensor.
    """
    for module in model.modules():
        for names in _SAME_INPUT:
            layers = [getattr(module, name, None) for name in names]
            _make_neighbours([layer for layer in layers if isinstance(layer, AdaptedLinear)])


def _make_neighbours(layers: Sequence[AdaptedLinear]) -> None:
    weights = [layer.weight for layer in layers if isinstance(layer.weight, nn.Parameter)]
    if len(weights) < 2 or len(weights) < len(layers) or len({(w.dtype, w.device) for w in weights}) > 1:
        return
    if joined(weights, 0) is None:
        whole = torch.cat([weight.detach() for weight in weights])
        for weight, part in zip(weights, whole.split([len(weight) for weight in weights]), strict=True):
            weight.data = part


@contextmanager
def rounded_once(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Round all adapters to the dtype of products within the context, for a forward and its backward pass.

    Otherwise every use rounds them. Gradients arrive in `.grad` of the original parameters. The rounded A of layers
    with the same input are neighbours in memory, so that `multiply` need not copy them.

    Example: `with rounded_once(model, torch.bfloat16): objective.reduce(objective(model, batch, seeds=s)).backward()`.
    """
    places = [
        (module, name)
        for _, module in adapted_modules(model)
        for name, weight in module.named_parameters(recurse=False)
        if "lora_" in name and weight.dtype != dtype
    ]
    places.sort(key=lambda place: place[1])  # all A of linear layers, in the order of the layers; then all B
    weights = [getattr(module, name) for module, name in places]
    before = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None  # autograd would add to each old gradient in a separate launch
    rounded = _Rounded.apply(dtype, *weights) if places else ()
    try:
        with replace_weights([(*place, weight) for place, weight in zip(places, rounded, strict=True)]):
            yield
    finally:
        _add_gradients(weights, before)


def _add_gradients(weights: list[nn.Parameter], before: list[Tensor | None]) -> None:
    """Add the gradients of the weights to those that they had before, in a few launches."""
    pairs = [(total, weight.grad) for weight, total in zip(weights, before, strict=True) if total is not None]
    added = [(total, grad) for total, grad in pairs if grad is not None]
    if added:
        torch._foreach_add_([total for total, _ in added], [grad for _, grad in added])
    for weight, total in zip(weights, before, strict=True):
        if total is not None:
            weight.grad = total


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.dtypes = [weight.dtype for weight in weights]
        ctx.set_materialize_grads(False)  # an adapter that is not used keeps no gradient
        sizes = [weight.numel() for weight in weights]
        parts = torch.empty(sum(sizes), dtype=dtype, device=weights[0].device).split(sizes)
        rounded = tuple(part.view(weight.shape) for part, weight in zip(parts, weights, strict=True))
        torch._foreach_copy_(list(rounded), list(weights))  # a few launches for all
        return rounded

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        used = {number: grad for number, grad in enumerate(grads) if grad is not None}
        wide = {number: torch.empty_like(grad, dtype=ctx.dtypes[number]) for number, grad in used.items()}
        torch._foreach_copy_(list(wide.values()), list(used.values()))
        return None, *(wide.get(number) for number in range(len(grads)))


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
            narrow = scaled_product(rows, a.T, scale)  # (M, count · rank)
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
        grad_narrow = torch.empty_like(narrow)
        for grad, each, part in zip(flat, b, grad_narrow.chunk(count, 1), strict=True):
            torch.addmm(part, grad, each, beta=0, alpha=ctx.scale, out=part)
        grad_b = [grad.T @ part for grad, part in zip(flat, narrow.chunk(count, 1), strict=True)]
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad_narrow @ a
            pairs = zip(flat, weights, strict=True)
            for grad, weight in pairs if at_once is None or together is None else ((at_once, together),):
                grad_x.addmm_(grad, _decoded(weight, rows.dtype))
            grad_x = grad_x.to(x_dtype).unflatten(0, grads[0].shape[:-1])
        grad_a = (grad_narrow.T @ rows).to(wide).chunk(count)
        of_weights = [
            (grad.T @ rows).to(weight.dtype) if weight.requires_grad else None
            for grad, weight in zip(flat, weights, strict=True)
            if isinstance(weight, Tensor)
        ]
        return grad_x, None, None, None, None, *grad_a, *(grad.to(wide) for grad in grad_b), *of_weights


def _expand(narrow: Tensor, b: Sequence[Tensor]) -> Tensor:
    """Return the products of each B (N_l, rank) with its columns of narrow (M, layers · rank), side by side: (M, N)."""
    widths = [len(each) for each in b]
    out = narrow.new_empty(narrow.shape[0], sum(widths))
    for part, each, product in zip(narrow.chunk(len(b), 1), b, out.split(widths, 1), strict=True):
        torch.mm(part, each.T, out=product)
    return out


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
