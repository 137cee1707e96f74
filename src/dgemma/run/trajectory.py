"""A recorded run that can be replayed exactly, and forked. `recording.py` records it.

A draw is a function of (seed, block, step, position, purpose). So the plan, the model and the changes made by
callbacks determine a run. A trajectory keeps the plan and the changes; with the model, any step can be repeated.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dgemma.checks import require, typed
from dgemma.diffusion.decision import Decision
from dgemma.diffusion.law import Law
from dgemma.diffusion.prediction import Prediction
from dgemma.diffusion.state import DenoiseState
from dgemma.model.cache import Cache
from dgemma.model.denoiser import Denoiser, check_denoiser
from dgemma.run import arguments
from dgemma.run.changes import Changes, apply_changes, merge_changes
from dgemma.run.knobs import Knobs
from dgemma.run.loop import drain, run_plan
from dgemma.run.recording import Recording, StepPlace
from dgemma.run.records import Moment, OnStep, Output, RecordedStep, StepRecord
from dgemma.run.rows import Rows
from dgemma.run.step import predict, settle
from dgemma.values import find_unknown

Script = Callable[[StepPlace, Moment, StepRecord | None], Changes]


class Trajectory(Recording):
    """A recorded run; `generate(..., record=True).trajectory` is one.

    `len` counts the steps of all blocks. `trajectory[i]` is a `RecordedStep`, and `array(name)` has one of its fields
    over all steps and rows. `plan` holds the settings of the run, `changes` the changes made by callbacks, and
    `commits` the finished blocks.

    Example: `generate(model, prompt, record=True).trajectory.array("entropy").mean(-1)` is (steps, B).
    """

    @typed
    def replay(self, model: Denoiser, *, cache: Cache | None = None, strict: bool = True) -> "Trajectory":
        """Repeat the run and return its trajectory. With `strict`, raise if it differs from this one.

        The recorded changes of an `on_step` callback are applied again. A run that continued a cache needs that cache
        as it was before the run; the cache is copied, not extended.

        Example: `trajectory.replay(model)`.
        """
        again = Trajectory(self.plan, top=self.top)

        def script(place: StepPlace, moment: Moment, record: StepRecord | None) -> Changes:
            if strict and len(again) > len(self):
                raise _Reached(moment)  # the difference below says so
            return self._changes_before(place, moment)

        with suppress(_Reached):
            self._rerun(model, cache, again, script)
        difference = self.difference(again) if strict else None
        if difference:
            fix = "Use the same weights, dtype, device and versions."
            raise RuntimeError(f"The replay differs from the run at {difference}. {fix}")
        return again

    @typed
    def log_prob(
        self, model: Denoiser, *, cache: Cache | None = None, strict: bool = True, through_self_cond: bool = True
    ) -> Tensor:
        """Return the log-probability of each row's run under `model`, (B,) float64, with gradients.

        It includes every decision: which positions were written and with which tokens, which returned to noise, and
        when the run stopped. Noise tokens are left out, because they do not depend on the weights. So for the weights
        of the run, exp is its frequency, given its noise.

        `model` predicts the recorded canvases again, so it may have other weights. The difference of two results is the
        log of the importance ratio. Some rules are not random: a threshold, a greedy token, a stop rule, the argmax
        that is committed at the end. If these weights would have decided otherwise there, the run is impossible under
        them and the result is -inf. With `strict=False` such rules count as given, and the result is the
        log-probability of what was drawn. Where both are finite, they and their gradients are equal.

        Each step sees the prediction of the step before it, if the model uses self-conditioning. Gradients flow through
        this prediction too, unless `through_self_cond` is False; that takes less memory, but the gradient is biased. A
        run that continued a cache needs that cache as it was before the run.

        Example: `(advantage * generate(model, prompt, record=True).trajectory.log_prob(model)).sum().backward()`.
        """
        return self.step_log_probs(model, cache=cache, strict=strict, through_self_cond=through_self_cond).sum(0)

    @typed
    def step_log_probs(
        self,
        model: Denoiser,
        *,
        cache: Cache | None = None,
        strict: bool = True,
        through_self_cond: bool = True,
        with_grad: Sequence[bool] | None = None,
    ) -> Tensor:
        """Return the parts of `log_prob` that come from each step, (steps, B); 0 where a row took no part.

        with_grad: a flag per step. Steps without it are computed without gradients, and take less memory.

        Example: `trajectory.step_log_probs(model)[:4].sum(0)` is the log-probability of the first four steps.
        """
        zeros = torch.zeros(self.batch_size, dtype=torch.float64, device=model.device)
        of_steps = [
            zeros.index_add(0, taken.rows.to(model.device, torch.int64), law.log_prob if strict else law.drawn)
            for taken, _, law in self._predict_again(model, cache, through_self_cond, with_grad)
        ]
        return torch.stack(of_steps) if of_steps else zeros[None][:0]

    @typed
    def token_log_probs(self, model: Denoiser, *, cache: Cache | None = None, through_self_cond: bool = True) -> Tensor:
        """Return the log-probability of every token when it was written, (steps, B, C) float64, with gradients.

        It is that of the shaped prediction: after temperature, allowed tokens, top-k and top-p. It is NaN where a step
        wrote no token.

        Example: `trajectory.token_log_probs(model).nansum(-1)` is (steps, B).
        """
        size = self.batch_size, self.plan.canvas_len
        nothing = torch.full(size, torch.nan, dtype=torch.float64, device=model.device)
        of_steps = []
        for taken, prediction, _ in self._predict_again(model, cache, through_self_cond, None):
            tokens, written = taken.next_canvas.long().to(model.device), taken.accepted.to(model.device)
            log_probs = prediction.log_prob(tokens).double().masked_fill(~written, torch.nan)  # (R, C)
            of_steps.append(nothing.index_copy(0, taken.rows.to(model.device, torch.int64), log_probs))
        return torch.stack(of_steps) if of_steps else nothing[None][:0]

    def _predict_again(
        self, model: Denoiser, cache: Cache | None, through_self_cond: bool, with_grad: Sequence[bool] | None
    ) -> Iterator[tuple[RecordedStep, Prediction, Law]]:
        """Yield every recorded step, with the prediction of `model` for its canvas and the law of its decision."""
        self._check_model(model, cache)
        plan, device = self.plan.to(model.device), model.device
        rows = Rows(plan)
        cache = rows.encode(model, None if cache is None else cache.clone())
        number = 0
        for block in range(self.steps[-1].block + 1 if self.steps else 0):
            if block > 0:
                rows.repeat(self.commits[block - 1])
                cache = rows.encode(model, cache)
            knobs = self._knobs_at(block)
            state, here = rows.start(model, knobs), cache
            steps = [step for step in self.steps if step.block == block]
            for taken, following in zip(steps, [*steps[1:], None], strict=True):
                changes = self._changes_before((block, taken.index), Moment(state, here, knobs))
                state, knobs = apply_changes(changes, state, knobs)
                left = torch.isin(state.rows, taken.rows.to(device)).nonzero()[:, 0]
                if len(left) < len(state.rows):
                    state, here = state.select(left), here.select(left)
                ends = ~torch.isin(state.rows, (taken.rows[:0] if following is None else following.rows).to(device))
                has_grad = torch.is_grad_enabled() and (with_grad is None or with_grad[number])
                with torch.set_grad_enabled(has_grad):
                    prediction = predict(model, state, cache=here, knobs=knobs)
                    law, state = _repeat_step(taken, prediction, state, knobs, ends)
                yield taken, prediction, law
                number += 1
                if not through_self_cond:
                    state = replace(state, self_cond=Prediction(prediction.logits.detach()))

    @typed
    def moment(self, model: Denoiser, *, block: int = 0, step: int = 0, cache: Cache | None = None) -> Moment:
        """Rebuild the state before step `step` of a block, by running from the block's start.

        It includes rows that finished in the step before. Rows that finished earlier have left the batch. To continue
        from a changed state, use `fork(..., state=...)`.

        Example: `a.moment(model, step=3).state.splice(rows, b.moment(model, step=3).state.select(rows))`.
        """
        self.at(block=block, step=step)  # raises if there is no such step

        def script(place: StepPlace, moment: Moment, record: StepRecord | None) -> Changes:
            changes = self._changes_before(place, moment)
            if place == (block, step):
                state, knobs = apply_changes(changes, moment.state, moment.knobs)
                raise _Reached(Moment(state, moment.cache, knobs))
            return changes

        try:
            self._rerun(model, cache, self._until(block), script)
        except _Reached as reached:
            return reached.moment
        raise RuntimeError(f"The run ended before block {block}, step {step}. Use the model it was recorded with.")

    @typed
    def fork(
        self,
        model: Denoiser,
        *,
        block: int = 0,
        step: int = 0,
        cache: Cache | None = None,
        seed: int | Sequence[int] | Tensor | None = None,
        on_step: OnStep | None = None,
        **changes: Any,
    ) -> "Generation":
        """Continue from step `step` of a block with changes; without changes, the result equals the run.

        changes: fields of the state (with one entry per row of `moment(...).state`), a whole `state`, or fields of
        `Knobs`. `seed` applies from that step on. Changes that a callback made up to that step are applied again. Later
        ones belong to the old canvas, so they are repeated only if the fork changes nothing. Pass `on_step` again to
        keep the callback. The new trajectory begins with the shared steps, and can be saved, replayed and forked too.

        Example: `trajectory.fork(model, block=1, step=4, sampler=EntropyBound(bound=0.5))`.
        """
        self.at(block=block, step=step)  # raises if there is no such step
        forked = self._until(block)
        if seed is not None:
            row_seeds = arguments.read_seeds(seed, self.plan.prompt_tokens)
            seeds = self.plan.seeds.clone()
            seeds[block if step == 0 else block + 1 :] = row_seeds
            forked.plan = replace(self.plan, seeds=seeds)

        unchanged = not changes and seed is None and on_step is None

        def script(place: StepPlace, moment: Moment, record: StepRecord | None) -> Changes:
            if place > (block, step) and not unchanged:
                return on_step(record) if on_step is not None and record is not None else None
            earlier = self._changes_before(place, moment)
            if place != (block, step):
                return earlier
            new = dict(changes)
            if seed is not None and step > 0:
                new.setdefault("seeds", row_seeds.to(moment.state.device)[moment.state.rows])
            return merge_changes(earlier, new, moment.knobs)

        return self._rerun(model, cache, forked, script)

    def _rerun(self, model: Denoiser, cache: Cache | None, again: "Trajectory", script: Script) -> "Generation":
        """Run the rest of the plan of `again` and append it there. `script` returns the changes before each step."""
        self._check_model(model, cache)
        plan = replace(again.plan, knobs=self._knobs_at(len(again.commits))).to(model.device)

        def on_start(moment: Moment) -> Changes:
            place = (len(again.commits), 0)
            changes = script(place, moment, None)
            again._add_change(place, changes, moment)
            return changes

        def on_step(record: StepRecord) -> Changes:
            block, index = again.place()
            return script((block, index + 1), Moment(record.state, record.cache, record.knobs), record)

        past = list(again.commits)
        events = run_plan(model, plan, None if cache is None else cache.clone(), past=past, on_start=on_start)
        return Generation(**vars(drain(events, on_step=on_step, recording=again)), recorded=again)

    def _check_model(self, model: Denoiser, cache: Cache | None) -> None:
        """Raise unless the run can be repeated with this model and cache."""
        check_denoiser("Trajectory", model)
        plan, sizes = self.plan, (model.config.canvas_length, model.config.vocab_size)
        missing = find_unknown((plan, self.changes))
        if missing is not None:
            is_named = missing.fields is None
            fix = "Only its name was saved. Record the run with a frozen dataclass." if is_named else "Pass it to load."
            raise ValueError(f"This trajectory was made with {missing.name}, which this process does not know. {fix}")
        needed = (plan.canvas_len, plan.noise.vocab_size)
        require(
            sizes == needed, "Trajectory model", f"have the canvas_length and vocab_size {needed} of the run", sizes
        )
        had = None if plan.num_cached is None else plan.num_cached.tolist()
        got = None if cache is None else cache.lengths.tolist()
        require(had == got, "Trajectory cache", f"have the tokens per row {had} with which the run began", got)


@dataclass(frozen=True, kw_only=True, repr=False)
class Generation(Output):
    """The result of `generate`. tokens (B, P + N) and new_tokens (B, N); steps (B, blocks)."""

    recorded: Trajectory | None

    @property
    def trajectory(self) -> Trajectory:
        """The recorded run."""
        if self.recorded is None:
            raise AttributeError("Generation.trajectory needs a recorded run. Pass record=True to generate.")
        return self.recorded


class _Reached(Exception):
    """Ends a rerun at a moment."""

    def __init__(self, moment: Moment) -> None:
        self.moment = moment


def _repeat_step(
    taken: RecordedStep, prediction: Prediction, state: DenoiseState, knobs: Knobs, ends: Tensor
) -> tuple[Law, DenoiseState]:
    """Return the law of a recorded step, and the state after it. ends (R,) bool: rows whose canvas ends with it."""
    canvas, is_open, write, renoise, done, draft = (
        tensor.to(state.device)
        for tensor in (taken.next_canvas, taken.open, taken.accepted, taken.renoised, taken.done, taken.draft)
    )
    decision = Decision(tokens=canvas.long(), write=write, renoise=renoise)
    law = knobs.sampler.law(prediction, state, decision)
    after = settle(state, prediction, replace(decision, memory=law.memory), knobs).state
    same_end = (after.done == done) & ((after.draft == draft).all(-1) | ~ends)
    after = replace(after, canvas=decision.tokens, open=is_open, done=done)
    return law._replace(agrees=law.agrees & same_end), after
