"""Canvases for training: how answers are cut into canvases, which tokens are scored, and the noise put on them.

Canvases start where the prompt ends, one canvas length apart. The last, partial canvas is filled with end-of-text. A
row without an answer gets one canvas, of which nothing is scored. Every draw is a function of the row's seed and the
canvas index, so a canvas gets the same noise alone and among others.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.checks import require
from dgemma.diffusion import draws
from dgemma.diffusion.noise import MaskNoise, Noise
from dgemma.doors import replaceable
from dgemma.model.vision.images import Images
from dgemma.model.vision.places import join_images
from dgemma.train.batch import TrainBatch

_CANVAS, _TIME, _EVENT, _TOKEN, _SELF_COND, _MASKED, _HOLES, EARLIER_EVENT, EARLIER_TOKEN = (
    draws.purpose_word(f"training {name}")
    for name in ("canvas", "time", "event", "token", "self_cond", "masked", "holes", "earlier event", "earlier token")
)

_MOST_CANVASES = 1 << 20  # of a row


@dataclass(frozen=True, kw_only=True)
class Canvases:
    """K canvases of C tokens for each of B rows, and the text they are cut from.

    Canvases see at most `prefix_len` clean tokens, a Python integer. The causal term of the loss may score the
    successors of the first N tokens. `aligned`: every row has one canvas, which starts at `prefix_len`.
    """

    tokens: Tensor  # (B, T) with the fill
    index: Tensor  # (B, K) of the canvas in its answer, plus `_MOST_CANVASES` for each earlier draw of its noise
    starts: Tensor  # (B, K) positions
    x: Tensor  # (B, K, C) clean tokens
    frozen: Tensor  # (B, K, C) bool
    scored: Tensor  # (B, K, C) bool
    fill: Tensor  # (B, K, C) bool: after the end of a text
    causal_scored: Tensor  # (B, N) bool: whether each token's successor is scored
    documents: tuple[Tensor, Tensor] | None  # of the text (B, T) and of the canvases (B, K, C)
    images: Images | None  # of all rows
    prefix_len: int
    aligned: bool

    def check_positions(self, max_positions: int) -> None:
        """Raise ValueError if rows are longer than the model's positions."""
        rule, num_tokens = f"fit into max_position_embeddings {max_positions} with the fill", self.tokens.shape[1]
        require(num_tokens <= max_positions, "TrainBatch.tokens", rule, num_tokens, "Cut the rows.")


class CanvasSizes(NamedTuple):
    """The sizes of a batch's canvases, which the host knows. Batches of equal sizes run the same kernels."""

    num_tokens: int  # with the fill
    num_canvases: int  # of the row with most
    num_open: int  # canvases that are not frozen as a whole, of the row with most
    prefix_len: int
    aligned: bool
    longest: int  # tokens of the longest row, without the fill


def sizes_of(batch: TrainBatch, canvas_len: int) -> CanvasSizes:
    """Return the sizes without waiting for the device."""
    prompt_len, length = np.array(batch.spans).T
    count = _count_canvases(prompt_len, length, canvas_len)
    num_canvases, num_tokens = (max(1, int(x.max())) for x in (count, prompt_len + count * canvas_len))
    num_open = num_canvases
    if batch.host_frozen is not None and num_canvases > 1:
        frozen = _fit(torch.from_numpy(batch.host_frozen), num_tokens, False)
        spans = torch.from_numpy(prompt_len), torch.from_numpy(length)
        num_open = max(1, int(_find_open(frozen, *spans, num_canvases, canvas_len).sum(1).max()))
    return CanvasSizes(
        num_tokens=num_tokens,
        num_canvases=num_canvases,
        num_open=num_open,
        prefix_len=int(np.where(count > 0, prompt_len + (count - 1) * canvas_len, 0).max()),
        aligned=bool((count == 1).all() and (prompt_len == prompt_len[0]).all()),
        longest=int(length.max()),
    )


def cut_canvases(
    batch: TrainBatch,
    *,
    canvas_len: int,
    fill_token: int,
    choose: Tensor | None = None,
    num_draws: int = 1,
    truncated: Literal["scored", "unscored", "rejected"] = "unscored",
    causal_scope: Literal["sequence", "answer"] | None = "answer",
    causal_fill: bool = True,
) -> Canvases:
    """Cut the answers of a batch into canvases.

    choose: (B,) in [0, 1), picks one canvas per row; None takes all that are not frozen as a whole. num_draws: how
    often each canvas is taken, to get other noise each time. truncated: the fill after a truncated answer is "scored"
    or "unscored", or the whole row is "rejected". causal_scope: the causal term scores the "sequence", only the
    "answer", or nothing (None). causal_fill: whether it also scores the fill.
    """
    sizes, device = sizes_of(batch, canvas_len), batch.tokens.device
    text = _fill_rows(batch, sizes.num_tokens, fill_token)
    num_canvases = _count_canvases(batch.prompt_len, batch.length, canvas_len)
    num_scored, scored_end = num_canvases, batch.prompt_len + num_canvases * canvas_len
    if batch.truncated is not None and truncated == "rejected":
        num_scored, scored_end = (torch.where(batch.truncated, 0, values) for values in (num_scored, scored_end))
    elif batch.truncated is not None and truncated == "unscored":
        scored_end = torch.where(batch.truncated, batch.length, scored_end)

    index = torch.arange(sizes.num_open, device=device).expand(batch.batch_size, -1)
    if choose is not None:
        index = torch.minimum((choose * num_canvases).long(), (num_canvases - 1).clamp(min=0))[:, None]
    elif sizes.num_open < sizes.num_canvases:
        opened = _find_open(text.frozen, batch.prompt_len, batch.length, sizes.num_canvases, canvas_len)
        # A row with fewer open canvases gets canvases after its last one, of which nothing is scored.
        index = (opened.cumsum(1)[:, None] <= index[..., None]).sum(-1)
    draw = torch.arange(num_draws, device=device).repeat_interleave(index.shape[1])
    index = index.repeat(1, num_draws)
    starts = batch.prompt_len[:, None] + index * canvas_len
    position = starts[..., None] + torch.arange(canvas_len, device=device)  # (B, K, C)
    inside = position.clamp(max=sizes.num_tokens - 1)
    exists = (index < num_scored[:, None])[..., None]  # (B, K, 1)

    def of_canvases(values: Tensor) -> Tensor:
        return values.gather(1, inside.flatten(1)).view_as(inside)

    frozen = of_canvases(text.frozen) & exists
    num_causal = sizes.num_tokens if causal_fill else sizes.longest
    causal_start = batch.prompt_len if causal_scope == "answer" else None
    return Canvases(
        tokens=text.tokens,
        index=index + draw * _MOST_CANVASES,
        starts=starts,
        x=of_canvases(text.tokens),
        frozen=frozen,
        scored=exists & (position < scored_end[:, None, None]) & ~frozen,
        fill=of_canvases(text.fill),
        causal_scored=_score_successors(
            text, 0 if causal_scope is None else num_causal, causal_start, scored_end, causal_fill=causal_fill
        ),
        documents=None if text.documents is None else (text.documents, of_canvases(text.documents)),
        images=join_images(batch.images),
        prefix_len=sizes.prefix_len,
        aligned=sizes.aligned and num_draws == 1,
    )


def _count_canvases(prompt_len: Any, length: Any, canvas_len: int) -> Any:
    """Return the number of canvases that cover each row's answer, (B,), as a tensor or an array."""
    return (length - prompt_len + canvas_len - 1) // canvas_len


def _find_open(frozen: Tensor, prompt_len: Tensor, length: Tensor, num_canvases: int, canvas_len: int) -> Tensor:
    """Return which canvases of each row have a token that is not frozen, (B, num_canvases) bool."""
    edges = prompt_len[:, None] + torch.arange(num_canvases + 1, device=frozen.device) * canvas_len
    before = F.pad((~frozen).cumsum(1), (1, 0)).gather(1, edges.clamp(max=frozen.shape[1]))
    return (before.diff(dim=1) > 0) & (edges[:, :-1] < length[:, None])


class _Text(NamedTuple):
    """Rows with their fill, (B, T) each."""

    tokens: Tensor
    frozen: Tensor  # bool
    fill: Tensor  # bool: after the end of a text
    documents: Tensor | None


def _fill_rows(batch: TrainBatch, num_tokens: int, fill_token: int) -> _Text:
    position = torch.arange(num_tokens, device=batch.tokens.device)
    fill = position >= batch.length[:, None]
    tokens = torch.where(fill, fill_token, _fit(batch.tokens, num_tokens, fill_token))
    frozen = torch.zeros_like(fill) if batch.frozen is None else _fit(batch.frozen, num_tokens, False)
    if batch.fill is not None:
        fill = fill | _fit(batch.fill, num_tokens, True)
    documents = None
    if batch.documents is not None:  # the fill belongs to the document before it
        last_token = position.clamp(max=(batch.tokens.shape[1] - 1)).expand_as(tokens)
        documents = batch.documents.gather(1, torch.minimum(last_token, (batch.length - 1).clamp(min=0)[:, None]))
    return _Text(tokens, frozen, fill, documents)


def _score_successors(
    text: _Text, num_tokens: int, starts: Tensor | None, ends: Tensor, *, causal_fill: bool
) -> Tensor:
    """Return a mask (B, num_tokens - 1): True where the causal term scores the successor of a token.

    Scored successors lie in [starts, ends), (B,) each, and in the token's document.
    """
    successor = slice(1, max(num_tokens, 1))
    position = torch.arange(text.tokens.shape[1], device=text.tokens.device)[successor]
    scored = (position < ends[:, None]) & ~text.frozen[:, successor]
    if starts is not None:
        scored &= position >= starts[:, None]
    if not causal_fill:
        scored &= ~text.fill[:, successor]
    if text.documents is not None:
        scored &= text.documents[:, successor] == text.documents[:, : scored.shape[1]]
    return scored


class NoisyCanvases(NamedTuple):
    """Canvases with noise on them, and the noise."""

    z: Tensor  # (B, K, C) tokens
    scored: Tensor  # (B, K, C) bool: the positions whose losses count
    level: Tensor  # (B, K)
    self_cond: Tensor | None  # (B, K) bool: canvases that see the prediction of a first pass; None for no first pass
    noise: Noise
    allowed: Tensor | None  # (V,) bool: the tokens that uniform noise draws from; None for all
    seeds: Tensor  # (B,)

    @property
    def position_level(self) -> Tensor:
        """The noise level of each position, (B, K, C)."""
        return self.level[..., None].expand(self.z.shape)


def draw_choice(seeds: Tensor) -> Tensor:
    """Return a uniform number for each row, (B,), from its seed. It chooses one of the row's canvases."""
    # Two positions, of which one is used: torch.compile would compile a size of 1 separately.
    (u,) = draw(seeds, torch.zeros_like(seeds)[:, None], {_CANVAS: 2})
    return u[:, 0, 0]


def cut_holes(canvases: Canvases, seeds: Tensor, prob: float) -> Canvases:
    """Choose a share `prob` of the canvases, cut holes into them, and freeze the text between the holes.

    Holes and frozen stretches take turns; either may come first. Their lengths are log-uniform. Holes have from 1 token
    to half a canvas, frozen stretches from 1 token to a canvas. Frozen tokens get no noise and are not scored.
    """
    canvas_len = canvases.x.shape[-1]
    (u,) = draw(seeds, canvases.index, {_HOLES: canvas_len + 2})  # (B, K, C + 2)
    is_cut, begins_frozen, u_length = u[..., :1] < prob, u[..., 1:2] < 0.5, u[..., 2:]
    is_frozen = begins_frozen ^ (torch.arange(canvas_len, device=u.device) % 2 == 1)  # of each stretch
    longest = torch.where(is_frozen, canvas_len, max(1, canvas_len // 2))
    ends = (longest + 1.0).pow(u_length).long().cumsum(-1)  # log-uniform, rounded down
    position = torch.arange(canvas_len, device=u.device).expand_as(ends).contiguous()
    stretch = torch.searchsorted(ends, position, right=True)
    frozen = is_cut & is_frozen.gather(-1, stretch) & canvases.scored
    return replace(canvases, frozen=canvases.frozen | frozen, scored=canvases.scored & ~frozen)


def noise_canvases(
    noise: Noise,
    canvases: Canvases,
    seeds: Tensor,
    *,
    t_range: tuple[float, float],
    self_cond_prob: float,
    masks: MaskNoise | None = None,
    masks_prob: float = 0.5,
    allowed: Tensor | None = None,
    scored: Literal["all", "noised"] = "all",
) -> NoisyCanvases:
    """Put noise on canvases, each at its own time, uniform on `t_range`; frozen tokens stay.

    seeds: (B,). masks: replaces `noise` on a canvas, with probability `masks_prob`. allowed: (V,) bool, the
    tokens that uniform noise draws from; None for all. scored: "noised" scores only positions that noise replaced. With
    "all", canvases of `masks` are still scored only there.
    """
    canvas_len, (low, high) = canvases.x.shape[-1], t_range
    sizes = {_TIME: 1, _EVENT: canvas_len, _TOKEN: canvas_len, _SELF_COND: 1, _MASKED: 1}
    u_time, u_event, u_token, u_self_cond, u_masked = draw(seeds, canvases.index, sizes)
    time = low + (high - low) * u_time  # (B, K, 1) float64

    def put(noise: Noise, scored: str) -> tuple[Tensor, Tensor, Tensor]:
        level = 1 - noise.schedule.alpha(time)
        replaced = u_event >= noise.clean_share(level)
        z = torch.where(replaced, noise.refill(u_token, level, allowed=allowed), canvases.x)
        return z, canvases.scored & replaced if scored == "noised" else canvases.scored, level

    z, counted, level = put(noise, scored)
    if masks is not None:
        pairs = zip(put(masks, "noised"), (z, counted, level), strict=True)
        z, counted, level = (torch.where(u_masked < masks_prob, ours, other) for ours, other in pairs)
    return NoisyCanvases(
        z=torch.where(canvases.frozen, canvases.x, z),
        scored=counted,
        level=level[..., 0],
        self_cond=(u_self_cond < self_cond_prob)[..., 0] if self_cond_prob else None,
        noise=noise,
        allowed=allowed,
        seeds=seeds,
    )


def draw(seeds: Tensor, index: Tensor, sizes: Mapping[int, int]) -> tuple[Tensor, ...]:
    """Return the uniforms (B, K, size) of canvases `index` (B, K) for each purpose's word and size, drawn at once."""
    rows, canvas = seeds[:, None].expand_as(index).flatten(), index.flatten()
    position = torch.cat([torch.arange(size, device=seeds.device) for size in sizes.values()])
    word = torch.cat([torch.full((size,), word, device=seeds.device) for word, size in sizes.items()])
    u = uniform_at(rows, canvas, position, word)
    return u.unflatten(0, index.shape).split(list(sizes.values()), dim=-1)


@replaceable
def uniform_at(seeds: Tensor, block: Tensor, position: Tensor, word: Tensor) -> Tensor:
    """Return uniforms for rows' seeds and blocks (B·K,) at positions (C,), with the word of each position's purpose."""
    return draws.uniform_at(seeds, block, torch.zeros_like(block), position, word)


def _fit(values: Tensor, num_tokens: int, fill: int | bool) -> Tensor:
    """Return values (B, T) cut or padded to (B, num_tokens)."""
    return F.pad(values[:, :num_tokens], (0, max(0, num_tokens - values.shape[1])), value=fill)
