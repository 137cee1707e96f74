"""Quantisation of a checkpoint on disk: weights are read and quantised one by one, into compressed-tensors files.

With calibration text, layers are quantised in order, so that a layer's inputs already have the errors of the layers
before it.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from dgemma.checks import require
from dgemma.diffusion.noise import Noise
from dgemma.location import resolve
from dgemma.model.diffusion import DiffusionGemma
from dgemma.model.experts import Experts
from dgemma.model.published import read_published
from dgemma.printing import progress_bar
from dgemma.quantization.memory import MemoryReport
from dgemma.quantization.rounding import Quantization
from dgemma.quantization.weights import set_weight


def quantize_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    quantization: Quantization,
    *,
    device: torch.device | str = "cpu",
    run: Callable[[DiffusionGemma], object] | None = None,
) -> MemoryReport:
    """Write a quantised copy of a checkpoint, with its tokenizer, to a folder; return a report of its formats.

    The copy has the layout of the files published for vLLM. `from_pretrained` reads it. The memory of `device` holds
    the quantised weights and one unquantised weight. With `run`, which runs the model on calibration text, it holds
    the unquantised model first (see `quantize_with_calibration`).

    Example: `quantize_checkpoint("google/diffusiongemma-26B-A4B-it", "26b-int4", Quantization(), device="cuda")`.
    """
    folder, target = resolve(checkpoint), Path(out).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"quantize_checkpoint out must be a new or an empty folder, got {target}. Choose another one.")
    dtype = read_published(folder, "config.json").get("dtype")
    if run is None:
        model = DiffusionGemma.from_pretrained(folder, dtype=dtype, device=device, quantization=quantization)
    else:
        # Most CPUs compute bfloat16 slowly.
        is_cpu = torch.device(device).type == "cpu"
        model = DiffusionGemma.from_pretrained(folder, dtype=torch.float32 if is_cpu else dtype, device=device)
        quantize_with_calibration(model, quantization, run)
        model.to(getattr(torch, dtype) if isinstance(dtype, str) else model.dtype)
    model.save_pretrained(target)
    return model.memory_report()


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
                if formats[name] is not None:
                    set_weight(model, full, quantization.apply(full, weight.detach(), second_moments.pop(name, None)))
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
