"""The noise and the sampler of a checkpoint, used if the caller omits them."""

import logging
from functools import cache

from dgemma.diffusion.noise import Noise
from dgemma.model.denoiser import Denoiser
from dgemma.sampling.base import Sampler
from dgemma.sampling.entropy_bound import EntropyBound
from dgemma.sampling.named import describe_noise, rebuild_noise, rebuild_sampler

logger = logging.getLogger("dgemma")


def default_sampler(model: Denoiser) -> Sampler:
    """Return the checkpoint's sampler. The default is the published sampler with the checkpoint's bound.

    Example: `default_sampler(DiffusionGemma.from_pretrained("dgemma/sudoku"))` is `EntropyBound(bound=0.1)`.
    """
    if model.generation.sampler is None:
        return EntropyBound(bound=model.generation.entropy_bound)
    try:
        return rebuild_sampler(model.generation.sampler)
    except ValueError as error:
        rule = str(error).removesuffix(".")
        raise ValueError(
            f"GenerationDefaults.sampler {rule}. Pass another as sampler=, or correct config.json."
        ) from None


def learnt_noise(model: Denoiser) -> Noise:
    """Return the noise that the checkpoint was trained under. The default is uniform noise, as published.

    Example: `learnt_noise(DiffusionGemma.from_pretrained("dgemma/sudoku"))` is a `MaskNoise`.
    """
    try:
        return rebuild_noise(model.generation.noise or {"kind": "uniform"}, model.config.vocab_size)
    except ValueError as error:
        rule = str(error).removesuffix(".")
        raise ValueError(
            f"GenerationDefaults.noise {rule}. Pass the noise of its training as noise=, or correct config.json."
        ) from None


def warn_of_noise(model: Denoiser, noise: Noise) -> None:
    """Log one line if the checkpoint is for another kind of noise; once per pair of kinds.

    Example: `warn_of_noise(DiffusionGemma.from_pretrained("dgemma/sudoku"), UniformNoise(16))`.
    """
    learnt, kind = (model.generation.noise or {}).get("kind"), describe_noise(noise)["kind"]
    if learnt not in (None, kind):
        _warn_once(learnt, kind)


@cache
def _warn_once(learnt: str, kind: str) -> None:
    logger.warning("The checkpoint is for %s noise; its predictions may be unreliable under %s noise.", learnt, kind)
