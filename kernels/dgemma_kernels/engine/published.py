"""A step of the published sampler for capture: `dgemma.step`, its meaning, with one launch for all that follows the
sample, and what needs no prediction beside the forward.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from dgemma.diffusion.decision import Decision
from dgemma.diffusion.noise import UniformNoise
from dgemma.diffusion.prediction import Prediction
from dgemma.diffusion.state import DenoiseState
from dgemma.run.knobs import Knobs
from dgemma.run.records import StepRecord
from dgemma.run.step import Settled, clock, record_step
from dgemma.sampling.entropy_bound import EntropyBound
from dgemma.sampling.stopping import StableAndConfident
from dgemma_kernels.engine.graphs import beside
from dgemma_kernels.ops.accept.kernel import MAX_CANVAS, Accepted, accept


def is_published(state: DenoiseState, knobs: Knobs) -> bool:
    """Whether `published_step` covers it: else it is `dgemma.step` that is captured, with `fuse_sampler`'s knobs."""
    stop, memory = knobs.stop, state.stop_memory
    remembers = (state.batch_size, getattr(stop, "stability", None), state.canvas_len)
    return (
        _has_kernel(knobs.sampler, state.canvas_len)
        and type(state.noise) is UniformNoise
        and (stop is None or (type(stop) is StableAndConfident and getattr(memory, "shape", None) == remembers))
        and state.awaited is None
        and state.allowed is None
        and not state.injected
    )


def published_step(denoiser: Any, state: DenoiseState, *, cache: Any, knobs: Knobs) -> tuple[DenoiseState, StepRecord]:
    """`dgemma.step` where `is_published`, bit for bit but for sums of entropies, which are rounded once."""
    with beside(state.device) as join:
        after_clock = clock(state.noise, knobs.temperature, state.step + 1, state.num_steps)
        u, active = state.uniform("token"), ~state.done
    raw = denoiser.denoise(state.canvas, cache)
    join()
    prediction = raw.shaped(temperature=state.temperature, top_k=knobs.top_k, top_p=knobs.top_p)
    taken = _accept(prediction, prediction.sample(u), state, knobs.sampler, knobs.stop)
    after = replace(
        state,
        canvas=taken.canvas,
        open=taken.open,
        draft=taken.draft,
        done=taken.done,
        memory=None,
        stop_memory=state.stop_memory if knobs.stop is None else taken.recent,
        self_cond=prediction,
        **after_clock,
    )
    settled = Settled(after, taken.accepted, taken.renoised, active, taken.verdict)
    return after, record_step(state, prediction, settled, cache=cache, knobs=knobs)


def fuse_sampler(knobs: Knobs, canvas_len: int) -> Knobs:
    """The same knobs, with the published sampler's sort, sums and comparison in one launch."""
    sampler: Any = knobs.sampler
    if not _has_kernel(sampler, canvas_len):
        return knobs
    return replace(knobs, sampler=_FusedEntropyBound(bound=sampler.bound, commit=sampler.commit))


@dataclass(frozen=True, kw_only=True)
class _FusedEntropyBound(EntropyBound):
    def __call__(self, prediction: Prediction, state: DenoiseState) -> Decision:
        tokens = prediction.sample(state.uniform("token"))
        taken = _accept(prediction, tokens, state, self)
        return Decision(tokens=tokens, write=taken.accepted, renoise=taken.renoised)


def _has_kernel(sampler: Any, canvas_len: int) -> bool:
    published = type(sampler) is EntropyBound and sampler.order == "entropy" and not sampler.greedy
    return published and canvas_len <= MAX_CANVAS


def _accept(prediction: Prediction, tokens: Tensor, state: DenoiseState, sampler: Any, stop: Any = None) -> Accepted:
    rule = {}
    if stop is not None:
        rule = {"recent": state.stop_memory, "confidence": stop.confidence, "compare_canvas": stop.compare == "canvas"}
    return accept(
        prediction.entropy,
        tokens,
        prediction.argmax,
        state.canvas,
        state.open,
        state.frozen,
        state.draft,
        state.done,
        state.seeds,
        state.block,
        state.step,
        state.num_steps,
        bound=sampler.bound,
        vocab_size=state.noise.vocab_size,
        commit_canvas=sampler.commit == "canvas",
        **rule,
    )
