"""Autoregressive generation with the same weights, one token per forward: the baseline for diffusion."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from dgemma.diffusion import draws
from dgemma.diffusion.prediction import Prediction, refuse_nan
from dgemma.model.diffusion import DiffusionGemma
from dgemma.run.plan import read_plan
from dgemma.sampling.temperature import ConstantTemperature


class CausalOptions(TypedDict, total=False):
    """Options of `generate_causal` and `stream_causal`. Defaults are those of `generate`, except temperature 1."""

    max_new_tokens: int | None
    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int | Sequence[int] | Tensor
    attention_mask: Tensor | None
    eos_token_ids: int | Iterable[int] | None


def generate_causal(model: DiffusionGemma, prompt_tokens: Tensor, **options: Unpack[CausalOptions]) -> Tensor:
    """Generate autoregressively after prompt_tokens (B, P), up to `max_new_tokens`; return the new tokens (B, N).

    A row that writes a stop token is padded after it. The arguments mean the same as in `generate` and have the same
    defaults, except that the temperature is one number (1). `top_k=1` is greedy. A row's draws depend on its seed, not
    on its batch.

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
    rule = CausalRule(
        temperature=float(plan.knobs.temperature.value),
        top_k=plan.knobs.top_k,
        top_p=plan.knobs.top_p,
        eos_token_ids=tuple(plan.eos_token_ids),
        pad_token_id=plan.pad_token_id,
    )
    num_tokens = model.generation.max_new_tokens if max_new_tokens is None else max_new_tokens
    cache, last = _read_prompt(model, prompt_tokens, attention_mask)
    seeds = plan.seeds[0]
    none = torch.zeros_like(seeds, dtype=torch.bool)
    state = CausalState(token=last, number=torch.zeros_like(seeds), done=none, broken=none, seeds=seeds)
    step = getattr(model, "causal_step", partial(causal_step, model))  # an engine has a faster one
    states = itertools.accumulate(
        range(num_tokens), lambda before, _: step(before, cache=cache, rule=rule), initial=state
    )
    started = ((after.token, _start_reading(torch.stack((after.done, after.broken)))) for after in states)
    next(started)  # the state before the first token
    # On a GPU the host starts the next token before it reads this one, so that the device never waits for the host.
    ahead = 1 if model.device.type == "cuda" else 0
    for number, (token, read) in enumerate(_compute_ahead(started, ahead)):
        ended, broken = read()  # the host waits for the device here
        if any(broken):
            refuse_nan(f"at token {number}, row {broken.index(True)}")
        yield token
        if all(ended):
            break


@dataclass(frozen=True, kw_only=True)
class CausalRule:
    """The rule by which every token of a run is drawn."""

    temperature: float
    top_k: int | None
    top_p: float | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int

    def draw(self, prediction: Prediction, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Draw the next token (B, 1) of each row by uniforms (B, 1). Also return the entropies (B,)."""
        if self.top_k == 1:
            shaped = prediction.shaped(temperature=self.temperature)
            # The same token without a sort; the entropy is only tested for NaN.
            return shaped.argmax, shaped.entropy[:, 0]
        shaped = prediction.shaped(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
        return shaped.sample(uniform), shaped.entropy[:, 0]

    def choose(self, prediction: Prediction, state: "CausalState", uniform: Tensor) -> "CausalState":
        """Draw the next token from a prediction of one position, by uniforms (B, 1). Nothing waits for the device."""
        drawn, entropy = self.draw(prediction, uniform)
        token = torch.where(state.done[:, None], self.pad_token_id, drawn)
        broken, done = entropy.isnan() & ~state.done, state.done
        for stop in self.eos_token_ids:
            done = done | (token[:, 0] == stop)
        return replace(state, token=token, number=state.number + 1, done=done, broken=broken)


@dataclass(frozen=True, kw_only=True)
class CausalState:
    """The state of an autoregressive run between two tokens."""

    token: Tensor  # (B, 1) int64, the last token, which the model has not read
    number: Tensor  # (B,) int64, of the next token
    done: Tensor  # (B,) bool, rows that wrote a stop token
    broken: Tensor  # (B,) bool, rows whose last prediction was NaN
    seeds: Tensor  # (B,) int64


def causal_step(model: DiffusionGemma, state: CausalState, *, cache: Any, rule: CausalRule) -> CausalState:
    """Read the last token and draw the next one.

    Example: `state = causal_step(model, state, cache=cache, rule=rule)`.
    """
    prediction = Prediction(model.causal_logits(state.token, cache))
    uniform = draws.uniform(state.seeds, torch.zeros_like(state.seeds), state.number, 1, "token")
    return rule.choose(prediction, state, uniform)


def _read_prompt(model: DiffusionGemma, tokens: Tensor, attention_mask: Tensor | None) -> tuple[Any, Tensor]:
    """Read all but the last real token of each row, and return the cache and those last tokens (B, 1)."""
    cache = model.new_cache(len(tokens))
    if attention_mask is None:
        before, last = tokens[:, :-1], tokens[:, -1:].long()
        return (model.encode(before, cache) if before.shape[1] else cache), last
    # Padding may be on either side.
    at = (attention_mask * torch.arange(1, tokens.shape[1] + 1, device=tokens.device)).argmax(1, keepdim=True)
    before = attention_mask.scatter(1, at, 0)
    return model.encode(tokens, cache, before), tokens.gather(1, at).long()


def _compute_ahead(items: Iterator[Any], count: int) -> Iterator[Any]:
    """Yield the items in order. Before an item is yielded, the next `count` items are computed."""
    waiting = deque(itertools.islice(items, count))
    for item in items:
        waiting.append(item)
        yield waiting.popleft()
    yield from waiting


def _start_reading(values: Tensor) -> Callable[[], list]:
    """Start to copy values to the host; the returned function waits for them only."""
    if not values.is_cuda:
        return values.tolist
    on_host = values.to("cpu", non_blocking=True)
    arrived = torch.cuda.current_stream(values.device).record_event()

    def read() -> list:
        arrived.synchronize()
        return on_host.tolist()

    return read
