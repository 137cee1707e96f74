"""The options of `generate`, `stream`, `generate_many`, `infill` and `edit`: names, types and defaults in one place."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, TypeVar, get_type_hints

from torch import Tensor

from dgemma.checks import typed
from dgemma.constraints.languages import Regex
from dgemma.diffusion.noise import Noise
from dgemma.model.vision.images import Images
from dgemma.run.arguments import Allowed
from dgemma.run.records import OnStep
from dgemma.sampling.base import Sampler
from dgemma.sampling.stopping import StopRule
from dgemma.sampling.temperature import Temperature

Function = TypeVar("Function", bound=Callable[..., Any])
Options = TypeVar("Options")
ImagesOption = Images | Sequence[Images | None] | None


class Default(NamedTuple):
    """The default of an option, in its annotation. An option without a `Default` has the default None."""

    value: Any


class CanvasOptions(TypedDict, total=False):
    """Options of every canvas; `generate` describes them.

    None stands for the checkpoint's own, `model.generation`, which `read_plan` fills in.
    """

    steps: int | None  # None: generation.max_denoising_steps; published 48
    noise: Noise | None  # None: what the model was trained with; published `UniformNoise`
    sampler: Sampler | None  # None: generation.sampler, or `EntropyBound` with generation.entropy_bound; published 0.1
    temperature: Temperature | float | None  # None: from generation.t_max to t_min; published 0.8 → 0.4
    stop: Annotated[StopRule | Literal["checkpoint"] | None, Default("checkpoint")]
    top_k: int | None
    top_p: float | None
    seed: Annotated[int | Sequence[int] | Tensor, Default(0)]
    allowed: Allowed
    constraint: Regex | Sequence[Regex | None] | None


class TextOptions(CanvasOptions, total=False):
    """Options of a text of one or several canvases; `generate` describes them."""

    max_new_tokens: int | None  # None: generation.max_new_tokens; published 256
    eos_token_ids: int | Iterable[int] | None  # None: generation.eos_token_id; published 1, 106, 50


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
    record_top: Annotated[int, Default(5)]
    progress: Annotated[bool, Default(True)]


class GenerateOptions(RunOptions, WatchOptions, total=False):
    """Options of `generate`, which describes them."""


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
