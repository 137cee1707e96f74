"""How a run is set up: the knobs of a step, and the plan that the arguments of `generate` come to."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dgemma.checks import as_int, as_number, check_count, check_probability
from dgemma.diffusion.noise import Noise
from dgemma.model.cache import PrefixCache
from dgemma.run import arguments
from dgemma.run.arguments import Span
from dgemma.run.defaults import default_sampler, learnt_noise, warn_of_noise
from dgemma.sampling.base import Sampler
from dgemma.sampling.entropy_bound import EntropyBound
from dgemma.sampling.stopping import StableAndConfident, StopRule
from dgemma.sampling.temperature import LinearTemperature, Temperature, read_temperature

if TYPE_CHECKING:
    from dgemma.run.denoiser import Denoiser


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """How a canvas is denoised; any of it may change between two steps."""

    sampler: Sampler
    temperature: Temperature
    stop: StopRule | None = None
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        for name, base, example in (("sampler", Sampler, EntropyBound), ("stop", StopRule, StableAndConfident)):
            value = getattr(self, name)
            if not isinstance(value, base) and not (name == "stop" and value is None):
                raise ValueError(
                    f"Knobs.{name} must be a value such as {example.__name__}(), got {value!r}. "
                    "Write a class with its parentheses."
                )
            # It keys a CUDA graph: what could change behind its back would replay the old graph.
            if value is not None and not _is_frozen(value):
                raise ValueError(
                    f"Knobs.{name} must be a frozen dataclass whose settings are its fields, got {type(value).__name__}"
                    ". Write @dataclass(frozen=True, kw_only=True) above the class."
                )
        if not callable(self.temperature) or isinstance(self.temperature, type):
            raise ValueError(
                f"Knobs.temperature must be a schedule such as LinearTemperature(), got {self.temperature!r}. "
                "Use ConstantTemperature(value) for a number."
            )
        if self.top_k is not None:
            check_count(self, "top_k", fix="Use None to keep every token.")
            object.__setattr__(self, "top_k", as_int(self.top_k))
        if self.top_p is not None:
            check_probability(self, "top_p", fix="Use None to keep every token.")
            object.__setattr__(self, "top_p", as_number(self.top_p))
            if self.top_p == 0:
                raise ValueError("Knobs.top_p must be > 0, got 0. Use a sampler's greedy=True for the argmax.")


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
    noise_level: float  # of the blocks that the span's canvas reaches into
    first_block: int = 0  # the number its draws begin to count blocks from
    # (B,) tokens up to the text's end, of a single canvas that is longer; what lies behind is dropped. None: no such.
    text_len: Tensor | None = None

    def block(self, block: int, rows: Tensor) -> dict[str, Any]:
        """What `start_state` is to know of one block, for some rows: its part of the span, and its noise level."""
        part = self.span.block(block, self.canvas_len, rows)
        return {**part, "noise_level": 1.0 if part["canvas"] is None else self.noise_level}

    def cut_text(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """A canvas (B, C) padded behind its text's end, and which of it is text; None: all."""
        if self.text_len is None:
            return tokens, None
        is_text = torch.arange(self.canvas_len, device=tokens.device) < self.text_len[:, None]  # (B, C)
        return torch.where(is_text, tokens, self.pad_token_id), is_text

    def to(self, device: torch.device) -> Self:
        """The same plan with its tensors on `device`."""
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, span=self.span.to(device), **moved)


def _is_frozen(value: Any) -> bool:
    """Whether it is a frozen dataclass with no attribute but its fields, and so are the samplers and rules in it."""
    made = getattr(type(value), "__dataclass_params__", None)
    if made is None or not made.frozen:
        return False
    # What a cached_property keeps follows from the fields.
    kept = {n: v for n, v in vars(value).items() if not isinstance(getattr(type(value), n, None), cached_property)}
    held = (part for part in tree_leaves(list(kept.values())) if isinstance(part, Sampler | StopRule))
    return kept.keys() <= {f.name for f in fields(value)} and all(_is_frozen(part) for part in held)


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
    eos_token_ids: int | Iterable[int] | None = None,
    noise_level: float = 1.0,
) -> Plan:
    """Check the arguments of `generate`, which has their description, and fill in what was left out.

    Example: `read_plan(model, prompt_tokens, steps=16).knobs.sampler`.
    """
    defaults, config = model.generation, model.config
    if temperature is None:
        temperature = LinearTemperature(start=defaults.t_max, end=defaults.t_min)
    sampler = default_sampler(model) if sampler is None else sampler
    if isinstance(stop, str) and stop == "checkpoint":
        rule = StableAndConfident(stability=defaults.stability_threshold, confidence=defaults.confidence_threshold)
        stop = rule if getattr(sampler, "stops_when_certain", True) else None
    knobs = Knobs(
        sampler=sampler,
        temperature=read_temperature(temperature),
        stop=stop,
        top_k=top_k,
        top_p=top_p,
    )
    noise = learnt_noise(model) if noise is None else noise
    max_new_tokens = defaults.max_new_tokens if max_new_tokens is None else max_new_tokens
    max_new_tokens = arguments.read_count("max_new_tokens", max_new_tokens)
    num_steps = arguments.read_count("steps", defaults.max_denoising_steps if steps is None else steps)
    arguments.check_sampler(knobs.sampler, noise, config)
    warn_of_noise(model, noise)
    arguments.check_prompt(prompt_tokens, cache, config, max_new_tokens, model.device)
    arguments.check_mask(attention_mask, prompt_tokens, num_cached=0 if cache is None else cache.num_slots)
    noise_level = arguments.read_noise_level(noise_level, canvas)
    eos_token_ids = defaults.eos_token_id if eos_token_ids is None else eos_token_ids
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
        eos_token_ids=arguments.read_token_ids("eos_token_ids", eos_token_ids),
        pad_token_id=defaults.pad_token_id,
        span=span,
        noise_level=noise_level,
    )
