"""One denoising step: the denoiser predicts, the sampler decides, and `settle` applies the decision.

`step` is a pure function, so you can write your own loop.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dgemma.checks import require, typed
from dgemma.constraints.canvas_language import Language
from dgemma.constraints.joint import condition
from dgemma.diffusion import draws
from dgemma.diffusion.decision import Decision
from dgemma.diffusion.noise import Noise
from dgemma.diffusion.prediction import Prediction
from dgemma.diffusion.state import DenoiseState
from dgemma.model.cache import Cache
from dgemma.model.denoiser import Denoiser, check_denoiser
from dgemma.run.arguments import check_valid
from dgemma.run.knobs import Knobs
from dgemma.run.records import StepRecord
from dgemma.sampling.stopping import ask
from dgemma.sampling.temperature import Temperature

# Under a constraint, this many nats are subtracted from tokens outside top-k and top-p, instead of excluding them. They
# are then written only where the constraint accepts no text without them.
_LAST_RESORT = 300.0


class Settled(NamedTuple):
    """The result of `settle`: the state after the step, and what happened to each position and row."""

    state: DenoiseState
    accepted: Tensor  # (B, C) bool: written
    renoised: Tensor  # (B, C) bool: returned to noise
    active: Tensor  # (B,) bool: rows that were not done before the step
    verdict: Tensor  # (3, B) int64, see `judge`


def step(denoiser: Denoiser, state: DenoiseState, *, cache: Cache, knobs: Knobs) -> tuple[DenoiseState, StepRecord]:
    """Take one denoising step: predict every position, decide, and settle.

    It is a pure function of `state`, without host synchronisation. Call it yourself to splice rows, replace the canvas
    or (with `apply_changes`) change a knob between two steps. It keeps gradients through all steps; wrap it in
    `torch.no_grad()` to sample.

    Example: `state, record = step(model, state, cache=cache, knobs=Knobs(sampler=EntropyBound(), temperature=...))`.
    """
    check_denoiser("step", denoiser)
    if not isinstance(state, DenoiseState) or not isinstance(knobs, Knobs):
        raise ValueError(f"step must get a DenoiseState and Knobs, got {type(state).__name__}, {type(knobs).__name__}.")
    prediction = predict(denoiser, state, cache=cache, knobs=knobs)
    decision = decide(prediction, state, knobs)
    settled = settle(state, prediction, decision, knobs)
    return settled.state, StepRecord(
        **settled._asdict(),
        prediction=prediction,
        before=replace(state, self_cond=None),  # the record does not keep the last prediction
        cache=cache,
        knobs=knobs,
        num_forwards=denoiser.num_forwards,
    )


def predict(denoiser: Denoiser, state: DenoiseState, *, cache: Cache, knobs: Knobs) -> Prediction:
    """Predict a canvas (B, C), with the state's temperature and allowed tokens, and the knobs' top-k and top-p.

    If the state has a language, the prediction is conditioned on it and on the tokens that are already decided.

    Example: `predict(model, state, cache=cache, knobs=knobs).entropy`.
    """
    level = knobs.sampler.noise_level(state)
    raw = denoiser.denoise_at(level, state.canvas, cache, self_cond=state.self_cond, frozen=state.frozen)
    whole = (*state.canvas.shape, state.noise.vocab_size)
    got = tuple(raw.shape) if isinstance(raw, Prediction) else raw
    if got != whole:
        raise ValueError(f"{type(denoiser).__name__}.denoise must return a Prediction of shape {whole}, got {got}.")
    return shape_prediction(raw, state, knobs)


def shape_prediction(prediction: Prediction, state: DenoiseState, knobs: Knobs) -> Prediction:
    """Shape a raw prediction as `predict` does."""
    shaping: dict[str, Any] = {"temperature": state.temperature, "allowed": state.allowed}
    shaping |= {"top_k": knobs.top_k, "top_p": knobs.top_p}
    if state.language is None:
        return prediction.shaped(**shaping)
    decided = state.frozen if knobs.sampler.edits else ~state.open
    return condition(prediction.shaped(**shaping, cut=_LAST_RESORT), state.language, state.canvas, decided)


def decide(prediction: Prediction, state: DenoiseState, knobs: Knobs) -> Decision:
    """Let the sampler decide about every position of the canvas, (B, C).

    Example: `decide(prediction, state, knobs).write`.
    """
    decision = knobs.sampler(prediction, state)
    got = tuple(decision.tokens.shape) if isinstance(decision, Decision) else decision
    shape = tuple(state.canvas.shape)
    require(got == shape, type(knobs.sampler).__name__, f"return a Decision about the canvas's {shape} positions", got)
    return decision


def settle(state: DenoiseState, prediction: Prediction, decision: Decision, knobs: Knobs) -> Settled:
    """Apply a decision: write tokens, return positions to noise, and apply the stop rule.

    It also advances the step, the noise level and the temperature, and updates the draft. Frozen positions and rows
    that are done keep their tokens.

    Example: `settle(state, prediction, decide(prediction, state, knobs), knobs).state.canvas`.
    """
    free = ~state.frozen & ~state.done[:, None]
    write = decision.write & free
    renoise = decision.renoise & free & ~write
    refill = state.noise.refill(state.uniform("noise"), state.next_noise_level, allowed=state.allowed)
    canvas = torch.where(write, decision.tokens, torch.where(renoise, refill, state.canvas))
    if state.noise.kind in knobs.sampler.redecides:
        still_open = ~state.frozen  # every step decides all of them again
    else:  # open stays what is not written; what returns to noise, or was drawn as a mask, opens again
        still_open = ((state.open & ~write) | renoise | state.noise.masked(canvas)) & ~state.frozen
    still_open = torch.where(state.done[:, None], state.open, still_open)
    after = replace(
        state,
        canvas=canvas,
        open=still_open,
        memory=decision.memory,
        self_cond=prediction.unconditioned,
        **fields_at_step(state.noise, knobs.temperature, state.step + 1, state.num_steps),
    )
    after = replace(after, draft=_draft(state, after, prediction, knobs))
    done, stop_memory = _stop(after, prediction, knobs)
    after = replace(after, done=done, stop_memory=stop_memory)
    return Settled(after, write, renoise, ~state.done, judge(prediction, after))


def _draft(state: DenoiseState, after: DenoiseState, prediction: Prediction, knobs: Knobs) -> Tensor:
    """The tokens to commit if the canvas ended after this step, (B, C)."""
    final = torch.where(state.frozen, state.canvas, knobs.sampler.final(prediction, after))
    if prediction.joint is not None:  # what is committed must be in the language
        # Tokens that the sampler chose stay where possible: those of closed positions and those that differ from the
        # argmax. An open position with the argmax was only filled in.
        final = prediction.joint.project(final, ~after.open | (final != prediction.argmax))
    return torch.where(state.done[:, None], state.draft, final)


def _stop(after: DenoiseState, prediction: Prediction, knobs: Knobs) -> tuple[Tensor, Any]:
    """The rows that are done after this step, (B,), and the memory of the stop rule."""
    watched, done, memory = _watched(after), after.done, after.stop_memory
    if not knobs.sampler.revises:
        done = done | ~watched.open.any(-1)
    if knobs.stop is not None:
        stopped, memory = ask(knobs.stop, prediction, watched)
        done = done | stopped
    return done, memory


def _watched(after: DenoiseState) -> DenoiseState:
    """The state that a stop rule gets: positions that need not be finished are frozen there, and not open."""
    if after.awaited is not None:
        after = replace(after, open=after.open & after.awaited, frozen=after.frozen | ~after.awaited)
    if after.language is not None:  # positions after the end of the text do not delay the stop
        ended = after.language.ended(after.draft)
        after = replace(after, open=after.open & ~ended, frozen=after.frozen | ended)
    return after


def judge(prediction: Prediction, state: DenoiseState) -> Tensor:
    """Summarise a step for the loop as (3, B) int64.

    It holds, per row, the steps left (0 once done), 1 for a NaN prediction, and 1 for ids outside the vocabulary.
    """
    steps_left = (state.num_steps - state.step).clamp(min=0).masked_fill(state.done, 0)
    broken = prediction.entropy.isnan().any(-1)
    stray = ((state.canvas < 0) | (state.canvas >= state.noise.vocab_size)).any(-1)
    return torch.stack((steps_left, broken.long(), stray.long()))


@typed
def start_state(
    knobs: Knobs,
    noise: Noise,
    *,
    seeds: Tensor,
    canvas_len: int,
    num_steps: int,
    block: int = 0,
    rows: Tensor | None = None,
    canvas: Tensor | None = None,
    frozen: Tensor | None = None,
    allowed: Tensor | None = None,
    awaited: Tensor | None = None,
    language: Language | None = None,
    noise_level: float = 1.0,
    uniform: Callable[[Tensor, Tensor, Tensor, int, str], Tensor] = draws.uniform,
) -> DenoiseState:
    """Return the state before the first step: pure noise, or your `canvas` (B, C) with noise where it is -1.

    frozen (B, C) bool marks positions that never change. allowed is boolean and broadcasts to (B, C, V). The canvas may
    end once the positions in awaited (B, C) bool are finished. The committed tokens are a text of `language`. With a
    noise_level below 1, the run starts at the nearest step, to edit a canvas that is only partly noise. `uniform` draws
    like `draws.uniform`; an engine passes a faster one, because there is no state yet that could draw.

    Example: `start_state(knobs, UniformNoise(512), seeds=torch.arange(2), canvas_len=32, num_steps=16)`.
    """
    check_valid(knobs.sampler, noise)
    batch_size, device = seeds.shape[0], seeds.device
    shape = (batch_size, canvas_len)
    for name, value in (("canvas", canvas), ("frozen", frozen), ("awaited", awaited)):
        require(value is None or value.shape == shape, f"start_state {name}", f"have the shape {shape}", value)
    usable = noise.proposable(allowed, device)  # a mask is noise, never a proposal
    fits = allowed is None or usable is None or bool(usable.any(-1).all())
    require(fits, "start_state allowed", "leave at least one token at every position", allowed)
    block_index = torch.full((batch_size,), block, device=device)
    first_step = round((1 - float(noise.schedule.time(torch.tensor(1 - noise_level, dtype=torch.float64)))) * num_steps)
    num_steps_row = torch.full((batch_size,), num_steps, device=device)
    u = uniform(seeds, block_index, torch.zeros_like(block_index), canvas_len, "prior")
    fresh = noise.prior(u, allowed=allowed)
    start = fresh if canvas is None else torch.where(canvas < 0, fresh, canvas)
    if frozen is None:
        frozen = torch.zeros(batch_size, canvas_len, dtype=torch.bool, device=device)
    state = DenoiseState(
        canvas=start,
        open=noise.masked(start) & ~frozen if noise.kind == "mask" else ~frozen,
        frozen=frozen,
        draft=start,
        done=torch.zeros(batch_size, dtype=torch.bool, device=device),
        block=block_index,
        num_steps=num_steps_row,
        seeds=seeds,
        rows=torch.arange(batch_size, device=device) if rows is None else rows,
        noise=noise,
        awaited=awaited,
        language=language,
        allowed=usable,
        **fields_at_step(
            noise, knobs.temperature, torch.full_like(block_index, min(first_step, num_steps - 1)), num_steps_row
        ),
    )
    state = replace(state, memory=knobs.sampler.start(state))
    return state if knobs.stop is None else replace(state, stop_memory=knobs.stop.start(state))


def fields_at_step(noise: Noise, temperature: Temperature, step: Tensor, num_steps: Tensor) -> dict[str, Any]:
    """The fields that the step number determines: noise levels before and after it, and temperature; (B,) each.

    The time of the schedule falls from 1 to 0 in `num_steps` equal parts.
    """
    steps = torch.stack((step, step + 1))
    levels = 1 - noise.schedule.alpha((1 - steps.double() / num_steps).clamp(min=0.0))
    # The last step ends at level 0, even if the schedule does not reach it.
    level, next_level = torch.where(steps >= num_steps, 0.0, levels)
    return {
        "step": step,
        "noise_level": level,
        "next_noise_level": next_level,
        "temperature": temperature(step, num_steps),
    }
