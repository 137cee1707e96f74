"""Autoregressive generation with the same weights, one token per forward: the baseline for diffusion."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from dgemma.diffusion import draws
from dgemma.diffusion.prediction import Prediction, refuse_nan
from dgemma.model.diffusion import DiffusionGemma
from dgemma.run.plan import read_plan
from dgemma.sampling.temperature import ConstantTemperature


class CausalOptions(TypedDict, total=False):
    """Options of `generate_causal` and `stream_causal`. Defaults are those of `generate`."""

    max_new_tokens: int | None
    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int | Sequence[int] | Tensor
    attention_mask: Tensor | None
    eos_token_ids: int | Iterable[int] | None


def generate_causal(model: DiffusionGemma, prompt_tokens: Tensor, **options: Unpack[CausalOptions]) -> Tensor:
    """Generate autoregressively after prompt_tokens (B, P), up to `max_new_tokens`; return the new tokens (B, N).

    A row that writes a stop token is padded after it. Arguments and defaults are those of `generate`, except that the
    temperature is one number (1). `top_k=1` is greedy. A row's draws depend on its seed, not on its batch.

    Example: `tokenizer.decode(dgemma.generate_causal(model, prompt, max_new_tokens=64, temperature=0.8)[0])`.
    """
    return torch.cat(list(stream_causal(model, prompt_tokens, **options)), dim=1)


@torch.no_grad()
def stream_causal(
    model: DiffusionGemma,
    prompt_tokens: Tensor,
    *,
    max_new_tokens: int | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | Sequence[int] | Tensor = 0,
    attention_mask: Tensor | None = None,
    eos_token_ids: int | Iterable[int] | None = None,
) -> Iterator[Tensor]:
    """Run `generate_causal` as a generator: yield the next token (B, 1) of every row after each forward.

    Example: `for token in stream_causal(model, prompt): print(tokenizer.decode(token[0]), end="")`.
    """
    if not hasattr(model, "causal_logits"):
        raise TypeError(f"generate_causal model must have a causal mode, got {type(model).__name__}. Use generate.")
    plan = read_plan(
        model,
        prompt_tokens,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        attention_mask=attention_mask,
        eos_token_ids=eos_token_ids,
    )
    if temperature is None or not isinstance(plan.knobs.temperature, ConstantTemperature):
        raise ValueError(
            f"generate_causal.temperature must be one number, got {temperature!r}. Use generate for a schedule: "
            "autoregressive generation has no steps."
        )
    number, top_k, top_p = float(plan.knobs.temperature.value), plan.knobs.top_k, plan.knobs.top_p
    num_tokens = model.generation.max_new_tokens if max_new_tokens is None else max_new_tokens
    seeds, eos = plan.seeds[0], torch.tensor(plan.eos_token_ids, device=model.device)
    cache = model.new_cache(len(seeds))
    logits = model.causal_logits(prompt_tokens, cache, attention_mask)  # (B, P, V)
    logits = logits[torch.arange(len(seeds)), _last_real(prompt_tokens, attention_mask), None]  # (B, 1, V)
    done = torch.zeros_like(seeds, dtype=torch.bool)
    for step in range(num_tokens):
        u = draws.uniform(seeds, torch.zeros_like(seeds), torch.full_like(seeds, step), 1, "token")
        prediction = Prediction(logits).shaped(temperature=number, top_k=top_k, top_p=top_p)
        token = torch.where(done[:, None], plan.pad_token_id, prediction.sample(u))  # (B, 1)
        broken, done = prediction.entropy[:, 0].isnan() & ~done, done | torch.isin(token[:, 0], eos)
        ended, broken_rows = torch.stack((done, broken)).tolist()  # the host waits for the device here
        if any(broken_rows):
            refuse_nan(f"at token {step}, row {broken_rows.index(True)}")
        yield token
        if step + 1 == num_tokens or all(ended):
            break
        logits = model.causal_logits(token, cache)


def _last_real(tokens: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The last real token of each row, (B,); padding may be on either side."""
    if attention_mask is None:
        return tokens.new_full((len(tokens),), tokens.shape[1] - 1)
    return (attention_mask * torch.arange(1, tokens.shape[1] + 1, device=tokens.device)).argmax(1)
