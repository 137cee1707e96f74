"""The options of `generate`, `stream`, `generate_many`, `infill` and `edit`: names, types and defaults in one place."""

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, TypeVar, get_type_hints

from torch import Tensor

from dgemma.checks import typed
from dgemma.constraints.languages import Regex
from dgemma.diffusion.noise import Noise
from dgemma.model.denoiser import Denoiser
from dgemma.model.vision.images import Images
from dgemma.run.arguments import Allowed
from dgemma.run.records import OnStep
from dgemma.sampling.base import Sampler
from dgemma.sampling.entropy_bound import EntropyBound
from dgemma.sampling.named import describe_noise, rebuild_noise, rebuild_sampler
from dgemma.sampling.stopping import StableAndConfident, StopRule
from dgemma.sampling.temperature import LinearTemperature, Temperature

Function = TypeVar("Function", bound=Callable[..., Any])
Options = TypeVar("Options")
Built = TypeVar("Built")
ImagesOption = Images | Sequence[Images | None] | None
logger = logging.getLogger("dgemma")


class Default(NamedTuple):
    """The default of an option, in its annotation. An option without a `Default` has the default None."""

    value: Any


class CanvasOptions(TypedDict, total=False):
    """Options of every canvas; `generate` describes them. `fill_from_checkpoint` replaces None and "checkpoint"."""

    steps: int | None
    noise: Noise | None
    sampler: Sampler | None
    temperature: Temperature | float | None
    stop: Annotated[StopRule | Literal["checkpoint"] | None, Default("checkpoint")]
    top_k: int | None
    top_p: float | None
    seed: Annotated[int | Sequence[int] | Tensor, Default(0)]
    allowed: Allowed
    constraint: Regex | Sequence[Regex | None] | None


class TextOptions(CanvasOptions, total=False):
    """Options of a text of one or several canvases; `generate` describes them."""

    max_new_tokens: int | None
    eos_token_ids: int | Iterable[int] | None


class RunOptions(TextOptions, total=False):
    """Options of a whole run; `generate` describes them."""

    canvas: Tensor | None
    frozen: Tensor | None
    attention_mask: Tensor | None
    images: ImagesOption
    noise_level: Annotated[float, Default(1.0)]


class WatchOptions(TypedDict, total=False):
    """Options to watch a run and to record it; `generate` describes them."""

    on_step: OnStep | None
    record: Annotated[bool, Default(False)]
    record_top: int | None
    progress: Annotated[bool, Default(True)]


class GenerateOptions(RunOptions, WatchOptions, total=False):
    """Options of `generate`, which describes them."""


def fill_from_checkpoint(options: Mapping[str, Any], model: Denoiser) -> dict[str, Any]:
    """Return the options with the checkpoint's values, `model.generation`, for those that the caller left out."""
    stored = model.generation
    values: dict[str, Callable[[], Any]] = {  # a comment has the value of the published model
        "steps": lambda: stored.max_denoising_steps,  # 48
        "max_new_tokens": lambda: stored.max_new_tokens,  # 256
        "eos_token_ids": lambda: stored.eos_token_id,  # 1, 106, 50
        "noise": lambda: learnt_noise(model),  # UniformNoise
        "sampler": lambda: default_sampler(model),  # EntropyBound(bound=0.1)
        "temperature": lambda: LinearTemperature(start=stored.t_max, end=stored.t_min),  # 0.8 → 0.4
    }
    filled = dict(options)
    for name, value in values.items():
        filled[name] = value() if filled[name] is None else filled[name]
    if filled["stop"] == "checkpoint":  # stability 1, confidence 0.005
        stability, confidence = stored.stability_threshold, stored.confidence_threshold
        runs_on = confidence == 0 or not filled["sampler"].stops_when_certain
        filled["stop"] = None if runs_on else StableAndConfident(stability=stability, confidence=confidence)
    return filled


def default_sampler(model: Denoiser) -> Sampler:
    """Return the checkpoint's sampler. The default is the published sampler with the checkpoint's bound.

    Example: `default_sampler(DiffusionGemma.from_pretrained("dgemma/sudoku"))` is `EntropyBound(bound=0.1)`.
    """
    stored = model.generation.sampler
    if stored is None:
        return EntropyBound(bound=model.generation.entropy_bound)
    return _rebuild("sampler", lambda: rebuild_sampler(stored))


def learnt_noise(model: Denoiser) -> Noise:
    """Return the noise that the checkpoint was trained under. The default is uniform noise, as published.

    Example: `learnt_noise(DiffusionGemma.from_pretrained("dgemma/sudoku"))` is a `MaskNoise`.
    """
    stored = model.generation.noise or {"kind": "uniform"}
    return _rebuild("noise", lambda: rebuild_noise(stored, model.config.vocab_size))


def _rebuild(name: str, build: Callable[[], Built]) -> Built:
    try:
        return build()
    except ValueError as error:
        rule = str(error).removesuffix(".")
        raise ValueError(
            f"GenerationDefaults.{name} {rule}. Pass another as {name}=, or correct config.json."
        ) from None


def warn_of_noise(model: Denoiser, noise: Noise) -> None:
    """Log one line if the checkpoint is for another kind of noise; once per pair of kinds."""
    learnt, kind = (model.generation.noise or {}).get("kind"), describe_noise(noise)["kind"]
    if learnt not in (None, kind):
        _warn_once(learnt, kind)


@cache
def _warn_once(learnt: str, kind: str) -> None:
    logger.warning("The checkpoint is for %s noise; its predictions may be unreliable under %s noise.", learnt, kind)


def defaults_of(options: type) -> dict[str, Any]:
    """Every option by name, with its default."""
    hints = get_type_hints(options, include_extras=True)
    notes = {name: getattr(hint, "__metadata__", (Default(None),)) for name, hint in hints.items()}
    return {name: note[0].value for name, note in notes.items()}


def takes_options(options: type) -> Callable[[Function], Function]:
    """Show a function's `**options` in its signature, refuse unknown ones, and check the types of all arguments."""
    hints, keyword = get_type_hints(options), inspect.Parameter.KEYWORD_ONLY
    listed = [
        inspect.Parameter(name, keyword, default=default, annotation=hints[name])
        for name, default in defaults_of(options).items()
    ]

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        function.__signature__ = signature.replace(parameters=[*own, *listed])  # type: ignore[attr-defined]
        return typed(function)

    return decorate


def fill_in(options: Mapping[str, Any], kind: type[Options]) -> Options:
    """Return all options that `kind` declares: the given ones, and the defaults of the others."""
    return kind(**{name: options.get(name, default) for name, default in defaults_of(kind).items()})


def select(options: Mapping[str, Any], kind: type[Options]) -> Options:
    """Return the given options that `kind` declares."""
    return kind(**{name: options[name] for name in defaults_of(kind) if name in options})
