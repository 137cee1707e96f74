"""Records from inside the model: residual stream, attention weights and router choices per step and layer.

`observe` adds forward hooks to the reference model, and removes them when the `with` block ends. Attention weights are
recomputed from the layer's queries and keys, because fused attention does not return them.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from dgemma.checks import read_device, require, short_repr, typed
from dgemma.model.attention import Attention, Mask
from dgemma.model.backbone import Layer
from dgemma.model.diffusion import DiffusionGemma
from dgemma.model.experts import Routing

Layers = bool | Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass of T new tokens through the stack, by layer. S counts the prefix's slots and the T tokens.

    `causal` is False for a canvas and True for a prefix. A long prefix has one pass per 1024 tokens.
    """

    causal: bool
    embedded: Tensor  # (B, T, D): input of the first layer, with self-conditioning
    residuals: dict[int, Tensor] = field(default_factory=dict)  # (B, T, D) after the layer
    attention: dict[int, Tensor] = field(default_factory=dict)  # (B, N, T, S) float32, rows sum to 1
    router: dict[int, Routing] = field(default_factory=dict)  # (B, T, E) probabilities, (B, T, A) weights and experts

    __repr__ = short_repr


class Observation:
    """The recorded passes in order. `steps` has only those of canvases: `steps[i]` belongs to the i-th `StepRecord`."""

    def __init__(self, *, prefix: bool, device: torch.device | str | None) -> None:
        self.passes: list[Pass] = []
        self._prefix, self._device = prefix, device
        self._current: Pass | None = None  # the current pass, if it is recorded
        self._thread = threading.get_ident()  # passes of other threads are not recorded

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.passes)} passes, {len(self.steps)} of canvases)"

    @property
    def steps(self) -> list[Pass]:
        return [one for one in self.passes if not one.causal]

    def _begin(self, layer: Layer, args: tuple[Any, ...]) -> None:
        if threading.get_ident() != self._thread:
            return
        x, causal = args[0], args[4]
        self._current = None
        if self._prefix or not causal:
            self._current = Pass(causal=causal, embedded=self._keep(x))
            self.passes.append(self._current)

    def _see(self, name: str, index: int, module: nn.Module, args: Any, output: Any) -> None:
        if self._current is None or threading.get_ident() != self._thread:
            return
        batch_size = len(self._current.embedded)
        value = {
            "residuals": lambda: self._keep(output[0]),
            "attention": lambda: self._keep(attention_weights(module, *args)),  # type: ignore[arg-type]
            "router": lambda: Routing(*(self._keep(part.unflatten(0, (batch_size, -1))) for part in output)),
        }[name]()
        getattr(self._current, name)[index] = value

    def _keep(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        return tensor if self._device is None else tensor.to(self._device)


@typed
@contextmanager
def observe(
    model: DiffusionGemma,
    *,
    residuals: Layers = False,
    attention: Layers = False,
    router: Layers = False,
    prefix: bool = False,
    device: torch.device | str | None = None,
) -> Iterator[Observation]:
    """Record residuals, attention and router of `model` inside a `with` block.

    For each of the three, pass True for all layers, or a list of layers. `prefix` also records the causal passes.
    Only passes of the thread that opened the block are recorded.
    Tensors are detached, and moved to `device` if it is set. Use "cpu" to save GPU memory: the attention of one layer
    is B · N · T · S numbers per step.

    Example:
        with observe(model, residuals=[0, -1], router=True) as observation:
            generate(model, prompt)
        observation.steps[3].router[0].experts  # (B, C, A), step 3, layer 0
    """
    has_layers = isinstance(getattr(model, "layers", None), torch.nn.ModuleList)
    fix = "Pass the reference model, not the accelerated one."
    require(has_layers, "observe model", "be a DiffusionGemma, whose layers can be hooked", type(model), fix)
    num_layers = len(model.layers)
    requests = {"residuals": residuals, "attention": attention, "router": router}
    wanted = {name: _read_layers(name, layers, num_layers) for name, layers in requests.items()}
    require(any(wanted.values()), "observe", "record residuals, attention or router", requests, "Pass one as True.")
    where = None if device is None else read_device("observe", device)
    observation = Observation(prefix=prefix, device=where)
    handles = [model.layers[0].register_forward_pre_hook(observation._begin)]
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        places: dict[str, nn.Module] = {"residuals": layer, "attention": layer.self_attn, "router": layer.router}
        for name, module in places.items():
            if index in wanted[name]:
                handles.append(module.register_forward_hook(partial(observation._see, name, index)))
    try:
        yield observation
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def attention_weights(
    module: Attention, x: Tensor, rope: tuple[Tensor, Tensor], past: tuple[Tensor, Tensor] | None, mask: Mask | None
) -> Tensor:
    """Return the attention weights softmax(q·k) of `module(x, rope, past, mask)`: (B, N, T, S) float32."""
    queries, keys, _ = module.project(x, rope)
    keys = keys if past is None else torch.cat((past[0], keys), dim=2)
    grouped = rearrange(queries, "b t (k g) h -> b k g t h", k=keys.shape[1])
    scores = torch.einsum("bkgth,bksh->bkgts", grouped.float(), keys.float()).flatten(1, 2)
    if mask is None:
        return scores.softmax(-1)
    visible = mask if isinstance(mask, Tensor) else torch.ones_like(scores, dtype=torch.bool).tril()  # "causal"
    return scores.masked_fill(~visible, -torch.inf).softmax(-1)


def _read_layers(name: str, layers: Layers, num_layers: int) -> frozenset[int]:
    if isinstance(layers, bool):
        return frozenset(range(num_layers)) if layers else frozenset()
    fits = all(-num_layers <= layer < num_layers for layer in layers)
    require(fits, f"observe {name}", f"be True, False or layers from {-num_layers} to {num_layers - 1}", layers)
    return frozenset(layer % num_layers for layer in layers)
