"""The exact likelihood of a text under a sampler (DUEL, arXiv:2603.01367).

Under mask noise, a sampler with a fixed order writes each text in one run only. So the probability of the text is that
of the run: the sampler chooses the positions, the text supplies their tokens.
"""

from dataclasses import replace

import torch
from torch import Tensor

from dgemma.diffusion.noise import Noise
from dgemma.model.denoiser import Denoiser
from dgemma.run.knobs import Knobs
from dgemma.run.step import predict, settle, start_state
from dgemma.sampling.base import Sampler
from dgemma.sampling.temperature import ConstantTemperature
from dgemma.train.canvases import Canvases
from dgemma.train.predictors import ByCanvas


def nats_of_texts(model: Denoiser, canvases: Canvases, noise: Noise, sampler: Sampler, num_steps: int) -> Tensor:
    """Return -log of the probability that the sampler writes the scored tokens of each row, (B,) float64.

    Every canvas takes at most `num_steps` steps, at temperature 1 and without a stop rule.
    """
    knobs, nats_of_canvases = Knobs(sampler=sampler, temperature=ConstantTemperature(value=1.0)), []
    for number, prefix in enumerate(ByCanvas(model, canvases, None).prefixes):
        x, frozen, scored = (values[:, number] for values in (canvases.x, canvases.frozen, canvases.scored))
        state = start_state(
            knobs,
            noise,
            seeds=torch.zeros(len(x), dtype=torch.int64, device=x.device),
            canvas_len=x.shape[1],
            num_steps=num_steps,
            canvas=torch.where(frozen, x, -1),
            frozen=~scored,  # a mask that is not scored stays, as in the bound
        )
        nats = torch.zeros(len(x), dtype=torch.float64, device=x.device)
        for _ in range(num_steps):
            if bool((state.done | ~state.open.any(-1)).all()):
                break
            prediction = predict(model, state, cache=prefix, knobs=knobs)
            decision = replace(sampler(prediction, state), tokens=x)
            law = sampler.law(prediction, state, decision)
            nats = nats - torch.where(state.done, 0.0, law.log_prob)
            state = settle(state, prediction, replace(decision, memory=law.memory), knobs).state
        # The argmax is committed where nothing was written. A text with another token there has probability 0.
        nats_of_canvases.append(torch.where(((state.draft == x) | ~scored).all(-1), nats, torch.inf))
    return torch.stack(nats_of_canvases).sum(0)
