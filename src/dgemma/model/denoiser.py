"""The interface between a run and a model: `Denoiser` reads a prefix and predicts canvases.

A run needs only `encode` and `denoise`. An engine also replaces whole functions of a run by faster ones.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from dgemma.diffusion import draws
from dgemma.diffusion.prediction import Prediction
from dgemma.model.cache import Cache
from dgemma.model.causal import CausalRule, CausalState
from dgemma.model.config import DenoiserConfig, GenerationDefaults
from dgemma.model.vision.images import Images

CacheT = TypeVar("CacheT", bound=Cache)


class Denoiser(Generic[CacheT]):
    """The interface that a run needs from a model. `DiffusionGemma`, its accelerated form and `Guided` implement it.

    A subclass defines `encode`, `denoise` and the attributes `config`, `generation` and `device`. If it can also write
    autoregressively, it sets `has_causal_mode` and defines `new_cache` and `causal_logits`. An engine is a faster
    denoiser, such as the result of `accelerate`. It may define `step`, and override `causal_step`, `causal_steps`,
    `uniform` and `read_ahead`, with faster functions that return the same results.

    Example: `class Flat(Denoiser): denoise = lambda self, canvas, cache, self_cond=None: Prediction(...)`.
    """

    if TYPE_CHECKING:  # a subclass may have attributes or properties

        @property
        def config(self) -> DenoiserConfig: ...
        @property
        def generation(self) -> GenerationDefaults: ...
        @property
        def device(self) -> torch.device: ...

    takes_noise_level: bool = False  # if True, `denoise` also takes `noise_level` (B,)
    takes_position_levels: bool = False  # if True, that `noise_level` may be (B, C)
    takes_images: bool = False  # if True, `encode` also takes `images`
    num_forwards: int = 1  # calls of the network in one `denoise`
    has_causal_mode: bool = False  # if True, `new_cache` and `causal_logits` are defined
    shares_prefixes: bool = False  # if True, `new_cache` is defined, and caches are `PrefixCache`s
    source: Path | None = None  # the checkpoint folder that it was loaded from
    image_tokens: int | None = None  # the budget of an image; None: the checkpoint's
    # An engine's own step(state, *, cache, knobs), with the results of `dgemma.step`. If None, a run calls the latter.
    step: Callable[..., tuple[Any, Any]] | None = None

    def encode(self, tokens: Tensor, cache: CacheT | None = None, attention_mask: Tensor | None = None) -> CacheT:
        """Encode tokens (B, P) causally and return a prefix cache. The mask is 1 for real tokens.

        A `cache` that you pass is extended in place.

        Example: `cache = model.encode(prompt_tokens)`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define encode(self, tokens, cache, attention_mask).")

    def encode_with(
        self, images: Images | None, tokens: Tensor, cache: CacheT | None = None, attention_mask: Tensor | None = None
    ) -> CacheT:
        """Call `encode`, with the images of the prompt if there are any.

        Example: `cache = model.encode_with(processor(["photo.jpg"]), prompt_tokens)`.
        """
        if images is None:
            return self.encode(tokens, cache, attention_mask)
        require_vision(self)
        return self.encode(tokens, cache, attention_mask, images=images)  # type: ignore[call-arg]

    def denoise(
        self,
        canvas: Tensor,
        cache: CacheT,
        self_cond: Prediction | Tensor | None = None,
        self_cond_mask: Tensor | None = None,
    ) -> Prediction:
        """Predict every position of canvas (B, C) at once. The cache is read, never changed.

        self_cond is the previous step's prediction, after temperature and truncation, or its logits. self_cond_mask
        (B,) is False in rows that have no previous prediction. `generate` never passes it, so a subclass may omit it.

        Example: `model.denoise(canvas, cache).entropy`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define denoise(self, canvas, cache, self_cond).")

    def denoise_at(
        self,
        noise_level: Tensor,
        canvas: Tensor,
        cache: CacheT,
        self_cond: Prediction | Tensor | None = None,
        frozen: Tensor | None = None,
    ) -> Prediction:
        """Call `denoise`, and pass the canvas's noise_level (B,) to a denoiser that takes it.

        If the denoiser takes one level per position, `frozen` positions (B, C) bool have level 0.

        Example: `model.denoise_at(torch.ones(2), canvas, cache).entropy`.
        """
        if self.takes_position_levels and frozen is not None:
            noise_level = torch.where(frozen, 0.0, noise_level[:, None])
        level = {"noise_level": noise_level} if self.takes_noise_level else {}
        return self.denoise(canvas, cache, self_cond=self_cond, **level)

    def weight_tensors(self) -> list[Tensor]:
        """Return the tensors that its keys and values depend on, so that a change of them can be noticed."""
        return [*self.parameters(), *self.buffers()] if isinstance(self, nn.Module) else []

    def warm_up(self, batch_size: int = 16, *, progress: bool = True) -> None:
        """Prepare for calls of up to `batch_size` rows, so that the first ones are as fast as later ones.

        A denoiser without captured or compiled code has nothing to prepare.

        Example: `model.warm_up(batch_size=8)`.
        """

    def new_cache(self, batch_size: int) -> CacheT:
        """Return an empty prefix cache for `batch_size` rows."""
        raise NotImplementedError(f"{type(self).__name__} must define new_cache(self, batch_size).")

    def causal_logits(
        self, tokens: Tensor, cache: CacheT | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Return next-token logits, autoregressively: tokens (B, T) → (B, T, V). A given cache is extended in place.

        Example: `model.causal_logits(tokens)[:, -1].argmax(-1)` is the greedy next token.
        """
        raise NotImplementedError(f"{type(self).__name__} must define causal_logits(self, tokens, cache).")

    def causal_step(self, state: CausalState, *, cache: CacheT, rule: CausalRule) -> CausalState:
        """Read the last token and draw the next one.

        Example: `state = model.causal_step(state, cache=cache, rule=rule)`.
        """
        prediction = Prediction(self.causal_logits(state.token, cache))
        uniform = draws.uniform(state.seeds, torch.zeros_like(state.seeds), state.number, 1, "token")
        return rule.choose(prediction, state, uniform)

    def causal_steps(
        self, state: CausalState, num_tokens: int, *, cache: CacheT, rule: CausalRule
    ) -> Iterator[tuple[CausalState, list[list[bool]]]]:
        """Draw tokens one after another. Yield each state with its `done` and `broken` as lists.

        An engine may start the next token before it reads these.

        Example: `for state, (done, broken) in model.causal_steps(state, 8, cache=cache, rule=rule): ...`.
        """
        for _ in range(num_tokens):
            state = self.causal_step(state, cache=cache, rule=rule)
            yield state, torch.stack((state.done, state.broken)).tolist()

    def uniform(self, seeds: Tensor, block: Tensor, step: Tensor, num_positions: int, purpose: str) -> Tensor:
        """Draw uniforms like `draws.uniform`: seeds, block, step (B,) → (B, num_positions) float64."""
        return draws.uniform(seeds, block, step, num_positions, purpose)

    def read_ahead(self, values: Tensor) -> list[Any]:
        """Return `values.tolist()`, while an engine prepares the next step on the device.

        A run calls this after a step if another one is likely: without a stop rule, until the last step of a row. A
        `Batch` always calls it, because other rows go on. It affects only the speed.

        Example: `steps_left, broken, stray = model.read_ahead(record.verdict)`.
        """
        return values.tolist()


def require_vision(model: Denoiser[Any]) -> None:
    """Raise for a denoiser that takes no images."""
    if not model.takes_images:
        raise ValueError(
            f"images must be None for a {type(model).__name__} without a vision tower. Load a model with one, or build "
            "one from dgemma.presets.tiny(vision=True)."
        )


def check_denoiser(owner: str, model: Any) -> None:
    """Raise for a model that only looks like a `Denoiser`: its class must derive from it."""
    if not isinstance(model, Denoiser):
        raise TypeError(
            f"{owner} model must be a Denoiser, got {type(model).__name__}. Load one with "
            "dgemma.DiffusionGemma.from_pretrained, or derive its class from dgemma.Denoiser."
        )
