"""Entropy-bound acceptance in plain PyTorch, from the library's sampler and `settle`: the reference of `kernel`."""

from types import SimpleNamespace
from typing import Any

import torch

from dgemma.diffusion.noise import UniformNoise
from dgemma.diffusion.state import DenoiseState
from dgemma.run.knobs import Knobs
from dgemma.run.step import fields_at_step, settle
from dgemma.sampling.entropy_bound import EntropyBound
from dgemma.sampling.stopping import StableAndConfident
from dgemma.sampling.temperature import ConstantTemperature
from dgemma_kernels.ops.accept.kernel import Accepted, Before


def accept(
    before: Before,
    *,
    bound: float,
    vocab_size: int,
    commit_canvas: bool = False,
    confidence: float = 0.0,
    compare_canvas: bool = False,
) -> Accepted:
    """Apply entropy-bound acceptance on uniform noise and the stop rule."""
    recent, ended, canvas, open, done = before.recent, before.ended, before.canvas, before.open, before.done
    sampler, stop = EntropyBound(bound=bound, commit="canvas" if commit_canvas else "argmax"), None
    if recent is not None:
        stop = StableAndConfident(
            stability=recent.shape[1], confidence=confidence, compare="canvas" if compare_canvas else "argmax"
        )
    knobs = Knobs(sampler=sampler, temperature=ConstantTemperature(1.0), stop=stop)
    # The parts of a prediction and of a language that the sampler, the stop rule and `settle` read.
    prediction: Any = SimpleNamespace(
        entropy=before.entropy, argmax=before.argmax, sample=lambda u: before.tokens, joint=None, unconditioned=None
    )
    language: Any = None if ended is None else SimpleNamespace(ended=lambda draft: ended)
    noise = UniformNoise(vocab_size)
    same = {name: getattr(before, name) for name in ("frozen", "draft", "block", "num_steps", "seeds")}
    state = DenoiseState(
        canvas=canvas,
        open=open,
        done=done,
        **same,
        rows=torch.arange(len(before.seeds), device=before.seeds.device),
        noise=noise,
        language=language,
        stop_memory=recent,
        **fields_at_step(noise, knobs.temperature, before.step, before.num_steps),
    )
    settled = settle(state, prediction, sampler(prediction, state), knobs)
    after, verdict = settled.state, settled.verdict.clone()
    shown = torch.where(
        open & ~before.frozen & ~done[:, None], before.tokens, canvas
    )  # also proposals that were not accepted
    verdict[2] = ((shown < 0) | (shown >= vocab_size)).any(-1)
    return Accepted(
        canvas=after.canvas,
        open=after.open,
        draft=after.draft,
        done=after.done,
        recent=after.stop_memory,
        accepted=settled.accepted,
        renoised=settled.renoised,
        verdict=verdict,
    )
