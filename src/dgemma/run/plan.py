"""The plan of a run: the arguments of `generate`, checked and with every default filled in."""

import math
from dataclasses import dataclass, replace
from typing import Any, Self, Unpack

import torch
from torch import Tensor

from dgemma.diffusion.noise import Noise
from dgemma.model.cache import Cache
from dgemma.model.denoiser import Denoiser, check_denoiser
from dgemma.run import arguments
from dgemma.run.arguments import Span
from dgemma.run.constrain import RunLanguage, read_constraint
from dgemma.run.defaults import default_sampler, learnt_noise, warn_of_noise
from dgemma.run.knobs import Knobs
from dgemma.run.options import RunOptions, fill_in, takes_options
from dgemma.sampling.stopping import StableAndConfident
from dgemma.sampling.temperature import LinearTemperature, check_temperature, read_temperature


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The checked arguments of `generate`, with every default filled in. A `Trajectory` stores its plan."""

    prompt_tokens: Tensor  # (B, P)
    attention_mask: Tensor | None
    num_cached: Tensor | None  # (B,) tokens in the cache that the run continues
    noise: Noise
    knobs: Knobs
    num_blocks: int
    num_steps: int
    canvas_len: int
    seeds: Tensor  # (blocks, B)
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    span: Span
    noise_level: float  # noise level of the blocks that `span.canvas` covers
    language: RunLanguage | None = None  # None without a constraint
    first_block: int = 0  # the block number that the first block uses in random draws
    # (B,) in a plan of one canvas: the length of each text that ends inside it; the rest of the canvas is dropped.
    text_len: Tensor | None = None

    @property
    def batch_size(self) -> int:
        return self.prompt_tokens.shape[0]

    def block(self, block: int, rows: Tensor, states: Tensor | None = None) -> dict[str, Any]:
        """Arguments of `start_state` for one block and some rows: its part of the span, its noise level, its language.

        states (R,) are those of the language before the block; None means the start of the language.
        """
        part = self.span.block(block, self.canvas_len, rows)
        if self.language is not None:
            states = self.language.start[rows] if states is None else states
            part["language"] = self.language.block(block, states, rows, self.canvas_len)
        return {**part, "noise_level": 1.0 if part["canvas"] is None else self.noise_level}

    def cut_text(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Pad a canvas (B, C) after the end of its text. Also return a mask of the text, None if all is text."""
        if self.text_len is None:
            return tokens, None
        is_text = torch.arange(self.canvas_len, device=tokens.device) < self.text_len[:, None]  # (B, C)
        return torch.where(is_text, tokens, self.pad_token_id), is_text

    def end_rows(self, tokens: Tensor, block: int, rows: Tensor) -> tuple[Tensor, Tensor | None, list[bool]]:
        """Pad a finished canvas (R, C) of some rows after their stop tokens, and return which rows end in it.

        The second result marks the real tokens (R, C); it is None if all are real.

        Example: `tokens, real, ended = plan.end_rows(drafts, 0, torch.arange(2))`.
        """
        if not self.eos_token_ids:  # no row ends, so the host need not wait
            return *self.cut_text(tokens), [False] * len(tokens)
        eos = torch.tensor(self.eos_token_ids, dtype=torch.int64, device=tokens.device)
        ends_row = torch.isin(tokens, eos)
        if self.span.frozen is not None:
            ends_row = ends_row & self.span.past_frozen(block, self.canvas_len, rows).to(tokens.device)
        ended = ends_row.any(-1).tolist()  # the host waits for the device here
        tokens, real = self.cut_text(tokens)
        if any(ended):
            real = ends_row.cumsum(1) - ends_row.long() == 0  # no stop token before it
            tokens = torch.where(real, tokens, self.pad_token_id)
        return tokens, real, ended

    def to(self, device: torch.device) -> Self:
        """The same plan with its tensors on `device`."""
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        language = None if self.language is None else self.language.to(device)
        return replace(self, span=self.span.to(device), language=language, **moved)


@takes_options(RunOptions)
def read_plan(
    model: Denoiser, prompt_tokens: Tensor, *, cache: Cache | None = None, **options: Unpack[RunOptions]
) -> Plan:
    """Check the arguments of `generate` and fill in the defaults.

    Example: `read_plan(model, prompt_tokens, steps=16).knobs.sampler`.
    """
    check_denoiser("generate", model)
    defaults, config, settings = model.generation, model.config, fill_in(options, RunOptions)
    noise = learnt_noise(model) if settings["noise"] is None else settings["noise"]
    arguments.check_vocabulary(noise, config)
    warn_of_noise(model, noise)
    knobs = _read_knobs(model, settings)
    arguments.check_valid(knobs.sampler, noise)
    max_new_tokens = settings["max_new_tokens"]
    max_new_tokens = arguments.read_count(
        "max_new_tokens", defaults.max_new_tokens if max_new_tokens is None else max_new_tokens
    )
    steps = settings["steps"]
    num_steps = arguments.read_count("steps", defaults.max_denoising_steps if steps is None else steps)
    check_temperature(knobs.temperature, num_steps, model.device)
    arguments.check_memory("generate", len(prompt_tokens), config, model.device)
    mask = settings["attention_mask"]
    arguments.check_prompt(prompt_tokens, mask, cache, config, max_new_tokens, model.device)
    span = arguments.read_span(
        settings["canvas"], settings["frozen"], settings["allowed"], prompt_tokens, noise, max_new_tokens
    )
    num_blocks = math.ceil(max_new_tokens / config.canvas_length)
    noise_level = arguments.read_noise_level("generate", settings["noise_level"])
    arguments.check_start(noise, span.canvas, noise_level, num_blocks * config.canvas_length)
    eos_token_ids = defaults.eos_token_id if settings["eos_token_ids"] is None else settings["eos_token_ids"]
    stop_tokens = arguments.read_token_ids("generate eos_token_ids", eos_token_ids)
    language = read_constraint(
        settings["constraint"],
        span,
        noise,
        batch_size=prompt_tokens.shape[0],
        num_blocks=num_blocks,
        canvas_len=config.canvas_length,
        stop_tokens=stop_tokens,
        device=prompt_tokens.device,
    )
    return Plan(
        prompt_tokens=prompt_tokens,
        attention_mask=mask,
        num_cached=None if cache is None else cache.lengths,
        noise=noise,
        knobs=knobs,
        num_blocks=num_blocks,
        num_steps=num_steps,
        canvas_len=config.canvas_length,
        seeds=arguments.read_seeds(settings["seed"], prompt_tokens).repeat(num_blocks, 1),
        eos_token_ids=stop_tokens,
        pad_token_id=defaults.pad_token_id,
        span=span,
        noise_level=noise_level,
        language=language,
    )


def _read_knobs(model: Denoiser, settings: RunOptions) -> Knobs:
    """The knobs of a run; those that the caller omits are the checkpoint's."""
    defaults, temperature, stop = model.generation, settings["temperature"], settings["stop"]
    sampler = default_sampler(model) if settings["sampler"] is None else settings["sampler"]
    if temperature is None:
        temperature = LinearTemperature(start=defaults.t_max, end=defaults.t_min)
    if isinstance(stop, str):  # "checkpoint"
        stability, confidence = defaults.stability_threshold, defaults.confidence_threshold
        runs_on = confidence == 0 or not sampler.stops_when_certain
        stop = None if runs_on else StableAndConfident(stability=stability, confidence=confidence)
    return Knobs(
        sampler=sampler,
        temperature=read_temperature(temperature),
        stop=stop,
        top_k=settings["top_k"],
        top_p=settings["top_p"],
    )
