"""Quantisation with calibration text (GPTQ, arXiv:2210.17323): each column's rounding error is moved to later columns.

The error to minimise is that of a layer's products on its real inputs. Layers are quantised in order, so that a layer's
inputs already have the errors of the layers before it.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dgemma.checks import require
from dgemma.diffusion.noise import Noise
from dgemma.model.diffusion import DiffusionGemma
from dgemma.model.experts import Experts
from dgemma.model.quantize import Quantization, check_weight, choose_scale
from dgemma.model.quantized import IntWeight, pack_nibbles, set_weight
from dgemma.printing import progress_bar

_EXPERTS_AT_ONCE = 16  # one copy of the (K, K) matrices of 128 experts takes 4 GB, and several are needed
_DAMPING = 0.01  # share of the diagonal's mean that is added to it: with few inputs, some directions have no data


@torch.no_grad()
def quantize_with_calibration(
    model: DiffusionGemma, quantization: Quantization, run: Callable[[DiffusionGemma], object]
) -> None:
    """Quantise a model in place. `run(model)` runs it on calibration text, and is called once per layer.

    int4 weights are calibrated. The other formats are rounded to nearest.

    Example: `quantize_with_calibration(model, Quantization(), lambda model: model.causal_logits(tokens))`.
    """
    layers: list[nn.Module] = list(model.layers)
    with progress_bar(desc="quantising", unit="layer", show=True, total=len(layers)) as bar:
        for number, layer in enumerate(layers):
            formats = {name: quantization.format_of(f"layers.{number}.{name}") for name, _ in layer.named_parameters()}
            with _observed(layer, {name for name, to in formats.items() if to == "int4"}) as second_moments:
                run(model)
            for name, weight in list(layer.named_parameters()):
                full = f"layers.{number}.{name}"
                if name in second_moments:
                    size, symmetric = quantization.group_size, quantization.symmetric
                    moments = second_moments.pop(name)
                    set_weight(model, full, gptq(weight, moments, group_size=size, symmetric=symmetric))
                elif formats[name] is not None:
                    set_weight(model, full, quantization.apply(full, weight.detach()))
            bar.update()


def calibration(
    tokens: Tensor, noise: Noise, *, canvas_len: int, batch_size: int = 8, seed: int = 0
) -> Callable[[DiffusionGemma], None]:
    """Return a function that runs a model on tokens (B, T): a prefix, then the last `canvas_len` tokens with noise.

    Noise levels are spread evenly over the rows. Each canvas is denoised twice, the second time with
    self-conditioning.

    Example: `quantize_with_calibration(model, Quantization(), calibration(tokens, noise, canvas_len=64))`.
    """
    fits, rule = tokens.dim() == 2 and tokens.shape[1] > canvas_len, f"be rows of more than {canvas_len} tokens"
    require(fits and len(tokens) > 0, "calibration tokens", rule, tokens, "Use more text, or a smaller canvas_len.")
    generator = torch.Generator().manual_seed(seed)
    levels = (torch.randperm(len(tokens), generator=generator) + 0.5) / len(tokens)
    prefix, text = tokens.cpu().split([tokens.shape[1] - canvas_len, canvas_len], dim=1)
    uniforms = torch.rand(2, *text.shape, generator=generator)
    canvas = noise.corrupt(text, levels, uniforms[0], uniforms[1])

    def run(model: DiffusionGemma) -> None:
        for rows in torch.arange(len(tokens)).split(batch_size):
            level = levels[rows].to(model.device) if model.takes_noise_level else None
            cache, noisy = model.encode(prefix[rows].to(model.device)), canvas[rows].to(model.device)
            first = model.denoise(noisy, cache, noise_level=level)
            model.denoise(noisy, cache, self_cond=first, noise_level=level)

    return run


@torch.no_grad()
def gptq(
    weight: Tensor,
    second_moments: Tensor,
    *,
    group_size: int = 64,
    symmetric: bool = True,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> IntWeight:
    """Round a weight (..., N, K) to int4, given the sum of x xᵀ (..., K, K) over the inputs x of its products.

    Example: `gptq(linear.weight, inputs.T @ inputs)`.
    """
    shape, width = weight.shape, weight.shape[-1]
    check_weight(weight, group_size, "gptq")
    if weight.dim() == 3 and len(weight) > _EXPERTS_AT_ONCE:
        pairs = zip(weight.split(_EXPERTS_AT_ONCE), second_moments.split(_EXPERTS_AT_ONCE), strict=True)
        parts = [
            gptq(some, moments, group_size=group_size, symmetric=symmetric, scale_dtype=scale_dtype)
            for some, moments in pairs
        ]
        return parts[0].with_tensors({r: torch.cat([p.tensors()[r] for p in parts]) for r in parts[0].tensors()})
    rest = weight.detach().float().reshape(-1, *shape[-2:]).clone()  # (E, N, K)
    factor = _inverse_factor(second_moments.float().reshape(-1, width, width))
    codes = torch.empty(rest.shape, dtype=torch.uint8, device=weight.device)
    scales, zeros = [], []
    for start in range(0, width, group_size):
        group = slice(start, start + group_size)
        block, errors = rest[..., group], torch.empty_like(rest[..., group])
        scale, zero = choose_scale(block, bits=4, symmetric=symmetric, scale_dtype=scale_dtype)
        for column in range(group_size):
            at = start + column
            exact = block[..., column]
            code = (exact / scale + zero).round().clamp(0, 15)
            codes[..., at] = code.to(torch.uint8)
            error = (exact - (code - zero) * scale) / factor[:, at, at, None]
            block[..., column + 1 :] -= error[..., None] * factor[:, None, at, at + 1 : group.stop]
            errors[..., column] = error
        rest[..., group.stop :] -= errors @ factor[:, group, group.stop :]
        scales.append(scale.to(scale_dtype))
        zeros.append(zero.to(torch.uint8))
    joined = (pack_nibbles(codes), torch.stack(scales, dim=-1), torch.stack(zeros, dim=-1))
    codes, scale, zero = (tensor.view(*shape[:-1], -1) for tensor in joined)
    return IntWeight(codes=codes, scale=scale, zero_point=None if symmetric else zero)


def _inverse_factor(moments: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse of (E, K, K), damped."""
    diagonal = moments.diagonal(dim1=-2, dim2=-1)
    mean = diagonal.mean(-1, keepdim=True)
    # An expert that no token chose has no inputs. With the identity, its weights are rounded to nearest.
    damped = diagonal + torch.where(mean > 0, _DAMPING * mean, 1.0)
    moments = moments.clone()
    moments.diagonal(dim1=-2, dim2=-1).copy_(damped)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moments))
    return torch.linalg.cholesky(inverse, upper=True)


@contextmanager
def _observed(layer: nn.Module, names: Collection[str]) -> Iterator[dict[str, Tensor]]:
    """Collect the sums of x xᵀ over the inputs x of a layer's products, for the weights with these names."""
    sums: dict[str, Tensor] = {}
    undo: list[Callable[[], object]] = []

    def add(name: str, groups: Sequence[Tensor]) -> None:
        """Add x xᵀ of the rows x of every group: one group per expert, or a single group for a linear layer."""
        width = groups[0].shape[-1]
        if name not in sums:
            sums[name] = torch.zeros(len(groups), width, width, device=groups[0].device)
        for total, rows in zip(sums[name], groups, strict=True):
            total.addmm_(rows.detach().float().T, rows.detach().float())

    def watch_linear(name: str, module: nn.Linear) -> None:
        hook = module.register_forward_pre_hook(lambda _, inputs: add(name, [inputs[0].flatten(0, -2)]))
        undo.append(hook.remove)

    def watch_product(name: str, experts: Experts, method: str) -> None:
        product = getattr(experts, method)

        def observed(rows: Tensor, ends: Tensor) -> Tensor:
            add(name, rows.split(torch.diff(ends, prepend=ends.new_zeros(1)).tolist()))
            return product(rows, ends)

        setattr(experts, method, observed)
        undo.append(lambda: delattr(experts, method))

    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear) and f"{name}.weight" in names:
            watch_linear(f"{name}.weight", module)
        elif isinstance(module, Experts):
            for method in ("gate_up", "down"):
                if f"{name}.{method}_proj" in names:
                    watch_product(f"{name}.{method}_proj", module, method)
    try:
        yield sums
    finally:
        for call in undo:
            call()
