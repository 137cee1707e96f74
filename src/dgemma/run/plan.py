"""The plan of a run: the arguments of `generate`, checked and with every default filled in."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Self, Unpack

import torch
from torch import Tensor

from dgemma.constraints.run_language import RunLanguage, read_constraint
from dgemma.diffusion.noise import Noise
from dgemma.diffusion.span import Span
from dgemma.model.cache import Cache
from dgemma.model.denoiser import Denoiser, check_denoiser
from dgemma.model.vision.images import Images
from dgemma.run import arguments
from dgemma.run.arguments import MOST_STEPS
from dgemma.run.knobs import Knobs
from dgemma.run.options import RunOptions, fill_from_checkpoint, fill_in, takes_options, warn_of_noise
from dgemma.sampling.temperature import check_temperature


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
    seeds: Tensor  # (blocks, B); the blocks have equal seeds, except after a fork with another seed
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    span: Span
    noise_level: float  # noise level of the blocks that `span.canvas` covers
    language: RunLanguage | None = None  # None without a constraint
    first_block: int = 0  # the block number that the first block uses in random draws
    # (B,) in a plan of one canvas: the length of each text that ends inside it; the rest of the canvas is dropped. Only
    # infilling sets it.
    text_len: Tensor | None = None
    images: tuple[Images | None, ...] | None = None  # of the prompt, for each row

    @property
    def batch_size(self) -> int:
        return self.prompt_tokens.shape[0]

    def part(self, block: int, rows: Tensor, states: Tensor | None = None) -> dict[str, Any]:
        """Arguments of `start_state` for one block and some rows: its part of the span, its noise level, its language.

        states (R,) are those of the language before the block; None means the start of the language.
        """
        part = self.span.part(block, self.canvas_len, rows)
        if self.language is not None:
            states = self.language.start[rows] if states is None else states
            part["language"] = self.language.part(block, states, rows, self.canvas_len)
        return {**part, "noise_level": 1.0 if part["canvas"] is None else self.noise_level}

    def find_text(self, tokens: Tensor, block: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Flags of the tokens of some rows up to the end of their text, (R, C), and the rows that end in this block.

        A text ends with a stop token, or where `text_len` says. tokens (R, C): of a block, or of all from block 0 on.
        """
        is_text = torch.ones_like(tokens, dtype=torch.bool)
        if self.text_len is not None:
            is_text = torch.arange(tokens.shape[1], device=tokens.device) < self.text_len.to(tokens.device)[:, None]
        stops = torch.isin(tokens, torch.tensor(self.eos_token_ids, dtype=torch.int64, device=tokens.device)) & is_text
        if self.span.frozen is not None:
            stops = stops & self.span.may_end(block, tokens.shape[1], rows).to(tokens.device)
        return is_text & (stops.cumsum(1) <= stops), stops.any(1)

    def count_tokens(self, tokens: Tensor) -> Tensor:
        """The number of tokens in each row without the padding after its end, (B,); tokens (B, N) are all blocks."""
        return self.find_text(tokens, 0, torch.arange(self.batch_size, device=self.seeds.device))[0].sum(1)

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
    config, settings = model.config, fill_from_checkpoint(fill_in(options, RunOptions), model)
    noise = settings["noise"]
    arguments.check_vocabulary(noise, config)
    warn_of_noise(model, noise)
    knobs = Knobs(**{field.name: settings[field.name] for field in fields(Knobs)})
    arguments.check_valid(knobs.sampler, noise)
    num_steps = arguments.read_count("steps", settings["steps"], MOST_STEPS)
    check_temperature(knobs.temperature, num_steps, model.device)
    most = config.max_position_embeddings
    max_new_tokens = arguments.read_count("max_new_tokens", settings["max_new_tokens"], most)
    num_blocks = math.ceil(max_new_tokens / config.canvas_length)
    num_positions = num_blocks * config.canvas_length
    mask = settings["attention_mask"]
    arguments.check_prompt(prompt_tokens, mask, cache, config, num_positions)
    arguments.check_memory("generate", len(prompt_tokens), config, model.device)
    images = arguments.read_images(model, prompt_tokens, settings["images"])
    span = arguments.read_span(
        settings["canvas"], settings["frozen"], settings["allowed"], prompt_tokens, noise, max_new_tokens
    )
    noise_level = arguments.read_noise_level("generate", settings["noise_level"])
    arguments.check_start(noise, span.canvas, noise_level, num_positions)
    below = None if options.get("eos_token_ids") is None else config.vocab_size  # a checkpoint may have larger ids
    stop_tokens = arguments.read_token_ids("generate eos_token_ids", settings["eos_token_ids"], below)
    language = read_constraint(
        settings["constraint"],
        span,
        noise,
        batch_size=prompt_tokens.shape[0],
        max_new_tokens=max_new_tokens,
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
        pad_token_id=model.generation.pad_token_id,
        span=span,
        noise_level=noise_level,
        language=language,
        images=images,
    )
