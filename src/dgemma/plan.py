"""How a run is set up: the knobs of a step, and the plan that the arguments of `generate` come to."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor

from dgemma import arguments
from dgemma.arguments import Span
from dgemma.model.cache import PrefixCache
from dgemma.noise import Noise, UniformNoise
from dgemma.sampling.base import Sampler
from dgemma.sampling.entropy_bound import EntropyBound
from dgemma.sampling.stopping import StableAndConfident, StopRule
from dgemma.sampling.temperature import ConstantTemperature, LinearTemperature, Temperature

if TYPE_CHECKING:
    from dgemma.generate import Denoiser


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """How a canvas is denoised; any of it may change between two steps."""

    sampler: Sampler
    temperature: Temperature
    stop: StopRule | None = None
    top_k: int | None = None
    top_p: float | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run with nothing left to default: what the arguments of `generate` come to, and what a `Trajectory` keeps."""

    prompt_tokens: Tensor  # (B, P)
    attention_mask: Tensor | None
    num_cached: Tensor | None  # (B,) tokens in the cache the run goes on from
    noise: Noise
    knobs: Knobs
    num_blocks: int
    num_steps: int
    canvas_len: int
    seeds: Tensor  # (blocks, B)
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    span: Span
    noise_level: float

    def to(self, device: torch.device) -> Self:
        """The same plan with its tensors on `device`."""
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, span=self.span.to(device), **moved)


def read_plan(
    model: "Denoiser",
    prompt_tokens: Tensor,
    *,
    max_new_tokens: int | None = None,
    steps: int | None = None,
    noise: Noise | None = None,
    sampler: Sampler | None = None,
    temperature: Temperature | float | None = None,
    stop: StopRule | Literal["checkpoint"] | None = "checkpoint",
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | Sequence[int] | Tensor = 0,
    cache: PrefixCache | None = None,
    canvas: Tensor | None = None,
    frozen: Tensor | None = None,
    allowed: Tensor | Sequence[int] | Sequence[Sequence[int]] | None = None,
    attention_mask: Tensor | None = None,
    eos_token_ids: Iterable[int] | None = None,
    noise_level: float = 1.0,
) -> Plan:
    """Check the arguments of `generate`, which has their description, and fill in what was left out.

    Example: `read_plan(model, prompt_tokens, steps=16).knobs.sampler`.
    """
    defaults, config = model.generation, model.config
    if temperature is None:
        temperature = LinearTemperature(start=defaults.t_max, end=defaults.t_min)
    if stop == "checkpoint":
        stop = StableAndConfident(stability=defaults.stability_threshold, confidence=defaults.confidence_threshold)
    knobs = Knobs(
        sampler=EntropyBound(bound=defaults.entropy_bound) if sampler is None else sampler,
        temperature=ConstantTemperature(value=temperature) if isinstance(temperature, int | float) else temperature,
        stop=stop,
        top_k=top_k,
        top_p=top_p,
    )
    noise = UniformNoise(config.vocab_size) if noise is None else noise
    max_new_tokens = defaults.max_new_tokens if max_new_tokens is None else max_new_tokens
    num_steps = defaults.max_denoising_steps if steps is None else steps
    arguments.check_sampler(knobs.sampler, noise, config)
    arguments.check_counts(max_new_tokens=max_new_tokens, steps=num_steps, noise_level=noise_level)
    arguments.check_prompt(prompt_tokens, cache, config, max_new_tokens)
    span = arguments.read_span(canvas, frozen, allowed, prompt_tokens, noise, max_new_tokens)
    seeds = arguments.read_seeds(seed, prompt_tokens)
    num_blocks = math.ceil(max_new_tokens / config.canvas_length)
    return Plan(
        prompt_tokens=prompt_tokens,
        attention_mask=attention_mask,
        num_cached=None if cache is None else cache.lengths,
        noise=noise,
        knobs=knobs,
        num_blocks=num_blocks,
        num_steps=num_steps,
        canvas_len=config.canvas_length,
        seeds=seeds.repeat(num_blocks, 1),
        eos_token_ids=tuple(sorted(defaults.eos_token_id if eos_token_ids is None else eos_token_ids)),
        pad_token_id=defaults.pad_token_id,
        span=span,
        noise_level=noise_level,
    )
