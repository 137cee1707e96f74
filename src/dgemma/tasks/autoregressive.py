"""Autoregressive generation with the same weights, one token per forward: the baseline for diffusion."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, TypedDict, Unpack

import torch
from torch import Tensor

from dgemma.diffusion.prediction import refuse_nan
from dgemma.model.causal import CausalRule, CausalState
from dgemma.model.denoiser import Denoiser
from dgemma.model.vision.images import Images
from dgemma.model.vision.places import join_images
from dgemma.run.options import Default, ImagesOption, fill_in, takes_options
from dgemma.run.plan import read_plan
from dgemma.sampling.temperature import ConstantTemperature, Temperature


class CausalOptions(TypedDict, total=False):
    """Options of `generate_causal`. Defaults are those of `generate`, except temperature 1."""

    max_new_tokens: int | None
    temperature: Annotated[Temperature | float, Default(1.0)]
    top_k: int | None
    top_p: float | None
    seed: Annotated[int | Sequence[int] | Tensor, Default(0)]
    attention_mask: Tensor | None
    images: ImagesOption
    eos_token_ids: int | Iterable[int] | None


@takes_options(CausalOptions)
@torch.no_grad()
def generate_causal(model: Denoiser, prompt_tokens: Tensor, **options: Unpack[CausalOptions]) -> Tensor:
    """Generate autoregressively after prompt_tokens (B, P), up to `max_new_tokens`; return the new tokens (B, N).

    A row that writes a stop token is padded after it. The arguments mean the same as in `generate` and have the same
    defaults, except that the temperature is one number (1). `top_k=1` is greedy. A row's draws depend on its seed, not
    on its batch.

    Example: `tokenizer.decode(dgemma.generate_causal(model, prompt, max_new_tokens=64, temperature=0.8)[0])`.
    """
    if not isinstance(model, Denoiser) or not model.has_causal_mode:
        raise TypeError(f"generate_causal model must have a causal mode, got {type(model).__name__}. Use generate.")
    settings = fill_in(options, CausalOptions)
    temperature, num_tokens = settings["temperature"], settings["max_new_tokens"] or model.generation.max_new_tokens
    plan = read_plan(model, prompt_tokens, **settings)
    if not isinstance(plan.knobs.temperature, ConstantTemperature):
        raise ValueError(f"generate_causal.temperature must be one number, got {temperature!r}.")
    rule = CausalRule(
        temperature=float(plan.knobs.temperature.value),
        top_k=plan.knobs.top_k,
        top_p=plan.knobs.top_p,
        eos_token_ids=tuple(plan.eos_token_ids),
        pad_token_id=plan.pad_token_id,
    )
    cache, last = _encode_prompt(model, prompt_tokens, settings["attention_mask"], join_images(plan.images))
    seeds = plan.seeds[0]
    none = torch.zeros_like(seeds, dtype=torch.bool)
    state = CausalState(token=last, number=torch.zeros_like(seeds), done=none, broken=none, seeds=seeds)
    tokens = []
    drawn = model.causal_steps(state, num_tokens, cache=cache, rule=rule)
    for number, (after, (ended, broken)) in enumerate(drawn):
        if any(broken):
            refuse_nan(f"at token {number}, row {broken.index(True)}")
        tokens.append(after.token)
        if all(ended):
            break
    return torch.cat(tokens, dim=1)


def _encode_prompt(
    model: Denoiser, tokens: Tensor, attention_mask: Tensor | None, images: Images | None
) -> tuple[Any, Tensor]:
    """Read all but the last real token of each row, and return the cache and those last tokens (B, 1)."""
    cache = model.new_cache(len(tokens))
    if attention_mask is None:
        before, last = tokens[:, :-1], tokens[:, -1:].long()
        return (model.encode_with(images, before, cache) if before.shape[1] else cache), last
    # Padding may be on either side.
    at = (attention_mask * torch.arange(1, tokens.shape[1] + 1, device=tokens.device)).argmax(1, keepdim=True)
    before = attention_mask.scatter(1, at, 0)
    return model.encode_with(images, tokens, cache, before), tokens.gather(1, at).long()
