"""The published sampler in one kernel launch, for CUDA graphs: its decision and all of `settle`.

Results equal those of `dgemma.run.step.decide` and `settle` bit for bit, with two exceptions. Sums of entropies are
rounded once. The verdict also reports sampled tokens outside the vocabulary that were not accepted.
"""

from dataclasses import fields, replace
from typing import Any, NamedTuple

from torch import Tensor

from dgemma.diffusion import draws as reference_draws
from dgemma.diffusion.noise import UniformNoise
from dgemma.diffusion.prediction import Prediction
from dgemma.diffusion.state import DenoiseState
from dgemma.run.knobs import Knobs
from dgemma.run.step import Settled, fields_at_step
from dgemma.sampling.entropy_bound import EntropyBound
from dgemma.sampling.stopping import StableAndConfident
from dgemma_kernels.ops.accept.kernel import MAX_CANVAS, Before, accept
from dgemma_kernels.ops.draws import kernel as draws

# The fields that `decide_and_settle` computes with. Any other field of a state must have its default.
_READ = frozenset(
    (
        *("canvas", "open", "frozen", "draft", "done", "block", "step", "num_steps", "noise_level", "next_noise_level"),
        *("temperature", "seeds", "rows", "noise", "language", "self_cond", "memory", "stop_memory"),
    )
)


def draws_by_seed(state: DenoiseState) -> bool:
    """Return True if the state's draws are those of the library, so that a kernel may compute them from the seeds."""
    return state.draw in (draws.uniform, reference_draws.uniform)


def is_published(state: DenoiseState, knobs: Knobs) -> bool:
    """Return True if `decide_and_settle` can compute this step. If not, the functions of `dgemma.run.step` run."""
    stop, memory = knobs.stop, state.stop_memory
    rule_is_known = stop is None
    if type(stop) is StableAndConfident and isinstance(memory, Tensor):
        rule_is_known = memory.shape == (state.batch_size, stop.stability, state.canvas_len)
    sampler = knobs.sampler
    return (
        rule_is_known
        and type(sampler) is EntropyBound
        and sampler.order == "entropy"
        and not sampler.greedy
        and state.canvas_len <= MAX_CANVAS
        and type(state.noise) is UniformNoise
        and all(f.name in _READ or getattr(state, f.name) is f.default for f in fields(state) if f.init)
        # The draft (the tokens to commit) must satisfy the constraint. Every argmax does, but not every noisy canvas.
        and (state.language is None or sampler.commit == "argmax")
        and draws_by_seed(state)
        and getattr(state.uniform, "__func__", None) is DenoiseState.uniform
    )


class Early(NamedTuple):
    """The parts of a step that need no prediction, so that they can run next to the forward."""

    clock: dict[str, Any]
    u_token: Tensor  # (B, C)
    active: Tensor  # (B,) bool


def prepare(state: DenoiseState, knobs: Knobs) -> Early:
    """Compute the parts of a published step that need no prediction."""
    after_clock = fields_at_step(state.noise, knobs.temperature, state.step + 1, state.num_steps)
    return Early(after_clock, state.uniform("token"), ~state.done)


def decide_and_settle(state: DenoiseState, prediction: Prediction, early: Early, knobs: Knobs) -> Settled:
    """Decide and settle a step where `is_published`, as `dgemma.run.step.decide` and `settle` do."""
    sampler: Any = knobs.sampler
    stop: Any = knobs.stop
    kept = ("canvas", "open", "frozen", "draft", "done", "seeds", "block", "step", "num_steps")
    before = Before(
        entropy=prediction.entropy,
        tokens=prediction.sample(early.u_token),
        argmax=prediction.argmax,
        **{name: getattr(state, name) for name in kept},
        recent=None if stop is None else state.stop_memory,
        ended=None if state.language is None else state.language.ended(prediction.argmax),
    )
    rule = {} if stop is None else {"confidence": stop.confidence, "compare_canvas": stop.compare == "canvas"}
    noise: Any = state.noise
    taken = accept(
        before, bound=sampler.bound, vocab_size=noise.vocab_size, commit_canvas=sampler.commit == "canvas", **rule
    )
    after = replace(
        state,
        canvas=taken.canvas,
        open=taken.open,
        draft=taken.draft,
        done=taken.done,
        memory=None,
        stop_memory=state.stop_memory if stop is None else taken.recent,
        self_cond=prediction.unconditioned,
        **early.clock,
    )
    return Settled(after, taken.accepted, taken.renoised, early.active, taken.verdict)
