"""What a caller gave `generate`, checked before any work is done: every mistake is one sentence that names the fix."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.config import ModelConfig
from dgemma.model.cache import PrefixCache
from dgemma.noise import Noise
from dgemma.sampling.base import Sampler

Function = TypeVar("Function", bound=Callable[..., Any])

if TYPE_CHECKING:
    Allowed = Tensor | Sequence[int] | Sequence[Sequence[int]] | None


@dataclass(frozen=True, kw_only=True)
class Span:
    """Constraints over all blocks: canvas (B, N) with -1 for noise, frozen (B, N), allowed (B or 1, N or 1, V)."""

    canvas: Tensor | None = None
    frozen: Tensor | None = None
    allowed: Tensor | None = None

    def to(self, device: torch.device) -> "Span":
        """The same constraints on `device`."""
        return Span(**{name: None if value is None else value.to(device) for name, value in vars(self).items()})

    def block(self, block: int, canvas_len: int, rows: Tensor) -> dict[str, Tensor | None]:
        """The part that falls on one block, for some rows; past its end a constraint says nothing."""
        part = slice(block * canvas_len, (block + 1) * canvas_len)
        canvas = None if self.canvas is None else _pad(self.canvas[rows, part], canvas_len, -1)
        frozen = None if self.frozen is None else _pad(self.frozen[rows, part], canvas_len, False)
        allowed = self.allowed
        if allowed is not None:
            allowed = allowed if allowed.shape[0] == 1 else allowed[rows]
            if allowed.shape[1] > 1:
                part_len = allowed[:, part].shape[1]
                allowed = F.pad(allowed[:, part], (0, 0, 0, canvas_len - part_len), value=True)
        return {"canvas": canvas, "frozen": frozen, "allowed": allowed}


def passes_on(inner: Callable[..., Any]) -> Callable[[Function], Function]:
    """Show the keywords of `inner` in the signature of a function that passes `**options` on to it.

    For `help`, notebooks and editors: one list of arguments, written once.

    Example: `inspect.signature(dgemma.generate).parameters["steps"]`.
    """

    def decorate(outer: Function) -> Function:
        own = [p for p in inspect.signature(outer).parameters.values() if p.kind is not p.VAR_KEYWORD]
        names = {p.name for p in own}
        more = [p for p in inspect.signature(inner).parameters.values() if p.name not in names]
        outer.__signature__ = inspect.signature(outer).replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        return outer

    return decorate


def read_seeds(seed: int | Sequence[int] | Tensor, prompt_tokens: Tensor) -> Tensor:
    """One seed per row: an int s gives row i the seed s + i. → (B,) int64."""
    batch_size, device = prompt_tokens.shape[0], prompt_tokens.device
    if isinstance(seed, int):
        return seed + torch.arange(batch_size, device=device)
    seeds = torch.as_tensor(seed, device=device)
    if seeds.shape != (batch_size,) or seeds.is_floating_point() or seeds.is_complex() or seeds.dtype == torch.bool:
        raise ValueError(
            f"generate seed must be an int or one int per row ({batch_size}), "
            f"got {tuple(seeds.shape)} of {seeds.dtype}."
        )
    return seeds.long()


def read_span(
    canvas: Tensor | None,
    frozen: Tensor | None,
    allowed: "Allowed",
    prompt_tokens: Tensor,
    noise: Noise,
    max_new_tokens: int,
) -> Span:
    """Canvas, frozen and allowed in one form, each checked against the others and the vocabulary."""
    batch_size, device = prompt_tokens.shape[0], prompt_tokens.device
    if canvas is not None:
        _require_span("canvas", canvas, batch_size, (torch.int64, torch.int32), "int64 tokens, -1 for noise")
        if canvas.shape[1] > max_new_tokens:
            raise ValueError(
                f"generate canvas must fit into max_new_tokens, got {canvas.shape[1]} positions for {max_new_tokens}. "
                f"Raise max_new_tokens to {canvas.shape[1]}."
            )
        if int(canvas.min()) < -1 or int(canvas.max()) >= noise.vocab_size:
            raise ValueError(
                f"generate canvas must hold ids in [0, {noise.vocab_size}) or -1 for noise, "
                f"got {int(canvas.min())}..{int(canvas.max())}."
            )
        canvas = canvas.to(device, torch.int64)
    if frozen is not None:
        if canvas is None:
            raise ValueError("generate frozen needs canvas: the tokens to keep. Pass both, of the same shape.")
        _require_span("frozen", frozen, batch_size, (torch.bool,), "booleans")
        if frozen.shape != canvas.shape:
            raise ValueError(
                f"generate frozen must have the canvas's shape {tuple(canvas.shape)}, got {tuple(frozen.shape)}."
            )
        frozen = frozen.to(device)
        if bool((frozen & ((canvas < 0) | noise.masked(canvas))).any()):
            raise ValueError(
                "generate frozen must mark real tokens, got a position whose canvas is noise. Unfreeze it."
            )
    table = None if allowed is None else _allowed_table(allowed, batch_size, noise, max_new_tokens, device)
    return Span(canvas=canvas, frozen=frozen, allowed=table)


def check_sampler(sampler: Sampler, noise: Noise, config: ModelConfig) -> None:
    """A sampler is only ever run under a noise process it is valid for."""
    if noise.vocab_size != config.vocab_size:
        raise ValueError(
            f"{type(noise).__name__}.vocab_size must be the model's {config.vocab_size}, got {noise.vocab_size}."
        )
    if noise.kind not in sampler.valid_for:
        raise ValueError(
            f"{type(sampler).__name__} must run under {' or '.join(sorted(sampler.valid_for))} noise, "
            f"got {noise.kind}. Pass noise= of that kind or another sampler."
        )


def check_counts(*, max_new_tokens: int, steps: int, noise_level: float) -> None:
    for name, value in (("max_new_tokens", max_new_tokens), ("steps", steps)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"generate {name} must be an integer of at least 1, got {value!r}.")
    if not 0 < noise_level <= 1:
        raise ValueError(f"generate noise_level must be in (0, 1], got {noise_level}. 1 starts from pure noise.")


def check_prompt(prompt_tokens: Any, cache: PrefixCache | None, config: ModelConfig, max_new_tokens: int) -> None:
    if not isinstance(prompt_tokens, Tensor) or prompt_tokens.dim() != 2 or prompt_tokens.is_floating_point():
        got = (
            f"{prompt_tokens.dtype} of shape {tuple(prompt_tokens.shape)}"
            if isinstance(prompt_tokens, Tensor)
            else (type(prompt_tokens).__name__)
        )
        raise ValueError(f"generate prompt_tokens must be integer ids of shape (batch, length), got {got}.")
    if prompt_tokens.shape[0] == 0 or (prompt_tokens.shape[1] == 0 and (cache is None or cache.num_slots == 0)):
        raise ValueError("generate prompt_tokens must hold at least one token a row. Start with the bos token.")
    num_blocks = -(-max_new_tokens // config.canvas_length)
    total = (cache.num_slots if cache else 0) + prompt_tokens.shape[1] + num_blocks * config.canvas_length
    if total > config.max_position_embeddings:
        raise ValueError(
            f"generate must stay within max_position_embeddings {config.max_position_embeddings}, got {total} tokens "
            f"with the prompt and {num_blocks} canvases. Shorten the prompt or lower max_new_tokens."
        )


def _allowed_table(allowed: Any, batch_size: int, noise: Noise, max_new_tokens: int, device: torch.device) -> Tensor:
    """Any form of `allowed` as booleans (B or 1, N or 1, V)."""
    if isinstance(allowed, Tensor) and allowed.dtype == torch.bool:
        table = allowed.to(device)
        table = table.reshape(*[1] * (3 - table.dim()), *table.shape) if table.dim() < 3 else table
    else:
        nested = len(allowed) > 0 and not isinstance(allowed[0], int) and getattr(allowed[0], "ndim", 1) > 0
        sets = [list(map(int, ids)) for ids in (allowed if nested else [allowed])]
        flat = [token for ids in sets for token in ids]
        if any(not 0 <= token < noise.vocab_size for token in flat):
            raise ValueError(
                f"generate allowed must hold ids in [0, {noise.vocab_size}), got {min(flat)}..{max(flat)}."
            )
        table = torch.zeros(1, len(sets), noise.vocab_size, dtype=torch.bool)
        for position, ids in enumerate(sets):
            table[0, position, ids] = True
        table = table.to(device)
    shape_fits = table.dim() == 3 and table.shape[0] in (1, batch_size) and table.shape[2] == noise.vocab_size
    if not shape_fits or table.shape[1] > max_new_tokens:
        raise ValueError(
            f"generate allowed must broadcast to (batch, positions, vocab) = ({batch_size}, up to {max_new_tokens}, "
            f"{noise.vocab_size}), got {tuple(table.shape)}."
        )
    proposable = table if noise.mask_token is None else table.clone()
    if noise.mask_token is not None:
        proposable[..., noise.mask_token] = False
    if not bool(proposable.any(-1).all()):
        raise ValueError("generate allowed must leave at least one token at every position. Allow a token there.")
    return table


def _require_span(name: str, value: Any, batch_size: int, dtypes: tuple[torch.dtype, ...], what: str) -> None:
    if not isinstance(value, Tensor) or value.dim() != 2 or value.shape[0] != batch_size or value.dtype not in dtypes:
        got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"generate {name} must be {what} of shape ({batch_size}, positions), got {got}.")


def _pad(part: Tensor, canvas_len: int, value: int | bool) -> Tensor:
    return F.pad(part, (0, canvas_len - part.shape[1]), value=value)
