"""Log-probabilities, by the chain rule, of the options for the slots of a template (a text with holes).

A canvas shows fixed tokens, and every other position is open. Options of equal length are compared by
log p(option | fixed tokens), a sum over the tokens of the option. The length of an option moves the fixed tokens after
its slot. So for options of different lengths, log p(fixed tokens after the slot | length) is added. It is a sum over
these tokens from left to right, predicted while the slot is open.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dgemma.diffusion import draws
from dgemma.diffusion.noise import Noise
from dgemma.many.prefixes import SharedPrefixes, encode_texts
from dgemma.model.cache import Cache
from dgemma.model.denoiser import Denoiser
from dgemma.model.vision.images import Images

_OPEN = -1  # in a canvas: a position whose token is not shown


class Blank(NamedTuple):
    """The options of a slot as tokens."""

    options: list[list[int]]


Piece = list[int] | Blank  # fixed tokens, or a slot


class Factor(NamedTuple):
    """A factor of the chain rule: the log-probability of `token` at `position` of a canvas of a row."""

    row: int
    canvas: tuple[int, ...]
    position: int
    token: int


class Layout(NamedTuple):
    """The text from the start of a canvas on, with the positions whose tokens are scored."""

    tokens: list[int]  # _OPEN in slots that are not scored
    options: list[int]  # positions of options
    fixed: list[int]  # positions of fixed tokens to score

    def factors(self, row: int, canvas_len: int) -> list[Factor]:
        """Return the factors of the chain rule: the fixed tokens to score, then the tokens of the options.

        A fixed token is predicted from the fixed tokens before it. A token of an option is predicted from all fixed
        tokens and the options' tokens before it.
        """

        def factor(shown: int, hidden: Iterable[int], position: int) -> Factor:
            canvas = self.tokens[:shown] + [_OPEN] * canvas_len
            for open_position in hidden:
                canvas[open_position] = _OPEN
            return Factor(row, tuple(canvas[:canvas_len]), position, self.tokens[position])

        fixed = [factor(position, self.options, position) for position in self.fixed]
        return fixed + [factor(canvas_len, self.options[i:], position) for i, position in enumerate(self.options)]


def layouts_of(pieces: Sequence[Piece], places: Sequence[int], canvas_len: int, horizon: int) -> list[Layout]:
    """Return a layout for every combination of options of the slots at `places`.

    The order is that of `itertools.product`. Other slots stay open, with as many positions as their longest option. If
    options differ in length, at most `horizon` fixed tokens after them are scored, and later ones are hidden.
    """
    blanks = [piece.options for place, piece in enumerate(pieces) if place in places and isinstance(piece, Blank)]
    lengths = [(place, {*map(len, options)}) for place, options in zip(places, blanks, strict=True)]
    first_uneven = min((place for place, found in lengths if len(found) > 1), default=len(pieces))
    found = []
    for combination in itertools.product(*blanks):
        layout, options = Layout([], [], []), iter(combination)
        for place, piece in enumerate(pieces):
            start = len(layout.tokens)
            if not isinstance(piece, Blank):
                layout.tokens.extend(piece)
                if place > first_uneven:
                    layout.fixed.extend(range(start, len(layout.tokens)))
            elif place in places:
                layout.tokens.extend(next(options))
                layout.options.extend(range(start, len(layout.tokens)))
            else:
                layout.tokens.extend([_OPEN] * max(map(len, piece.options)))
        found.append(layout)
    # All combinations are compared by the same fixed tokens. A token that is seen but not scored would favour some.
    num_fixed = min(horizon, *(sum(position < canvas_len for position in layout.fixed) for layout in found))
    for layout in found:
        for hidden in layout.fixed[num_fixed:]:
            layout.tokens[hidden] = _OPEN
    return [layout._replace(fixed=layout.fixed[:num_fixed]) for layout in found]


class Scorer:
    """Encodes prefixes, and scores canvases with open positions. Equal canvases of a row are predicted once."""

    def __init__(
        self, model: Denoiser, noise: Noise, num_draws: int, batch_size: int, prefixes: SharedPrefixes | None = None
    ) -> None:
        self.model, self.noise, self.batch_size = model, noise, batch_size
        self._prefixes = SharedPrefixes() if prefixes is None else prefixes
        self.num_draws = num_draws if noise.mask_token is None else 1  # masks are not random

    def encode(self, texts: Sequence[Sequence[int]], cache: Cache | None, images: Sequence[Images | None]) -> Cache:
        """Extend the cache of B rows by their texts. The first ones may have images, and share prefixes."""
        tokens = [torch.tensor(text, dtype=torch.int64) for text in texts]
        if cache is None:
            return self._prefixes.encode(self.model, tokens, images)
        return encode_texts(self.model, cache, tokens)

    def score(
        self, cache: Cache, layouts: Sequence[Sequence[Layout]], seeds: Sequence[int], block: int
    ) -> list[Tensor]:
        """Return the log-probability of each layout up to a constant per row, (K,) float64, for every row."""
        canvas_len = self.model.config.canvas_length
        terms = [[layout.factors(row, canvas_len) for layout in each] for row, each in enumerate(layouts)]
        found = self._answer(cache, itertools.chain(*itertools.chain(*terms)), seeds, block)
        sums = [[math.fsum(found[factor] for factor in factors) for factors in each] for each in terms]
        return [torch.tensor(each, dtype=torch.float64) for each in sums]

    def _answer(self, cache: Cache, factors: Iterable[Factor], seeds: Sequence[int], block: int) -> dict[Factor, float]:
        """The log-probability for each factor. Probabilities are averaged over draws of the open positions."""
        by_canvas: dict[tuple[int, tuple[int, ...]], list[Factor]] = {}
        for factor in dict.fromkeys(factors):
            by_canvas.setdefault((factor.row, factor.canvas), []).append(factor)
        work = [(asked, draw) for asked in by_canvas.values() for draw in range(self.num_draws)]
        found: dict[Factor, list[float]] = {}
        for start in range(0, len(work), self.batch_size):
            chunk = work[start : start + self.batch_size]
            for factor, log_prob in self._predict(cache, chunk, seeds, block):
                found.setdefault(factor, []).append(log_prob)
        draws_of = torch.tensor([*found.values()], dtype=torch.float64).reshape(-1, self.num_draws)
        return dict(zip(found, (draws_of.logsumexp(1) - math.log(self.num_draws)).tolist(), strict=True))

    def _predict(
        self, cache: Cache, work: list[tuple[list[Factor], int]], seeds: Sequence[int], block: int
    ) -> list[tuple[Factor, float]]:
        """Predict each canvas, with its open positions filled by noise that depends on the row's seed and the draw."""
        device, asked = self.model.device, [(at, factor) for at, (each, _) in enumerate(work) for factor in each]
        canvas = torch.tensor([each[0].canvas for each, _ in work], device=device)
        rows = torch.tensor([each[0].row for each, _ in work], device=device)
        draw = torch.tensor([draw for _, draw in work], device=device)
        blocks = torch.full_like(draw, block)
        uniform = draws.uniform(torch.tensor(seeds, device=device)[rows], blocks, draw, canvas.shape[1], "prior")
        gaps = canvas == _OPEN
        canvas = torch.where(gaps, self.noise.prior(uniform), canvas)
        # Open positions are pure noise, fixed ones have none. A network that takes one level per row gets the mean.
        share = gaps.double().mean(-1)
        level = torch.ones_like(share) if self.model.takes_position_levels else share
        prediction = self.model.denoise_at(level, canvas, cache.select(rows), frozen=~gaps)
        prediction = prediction.shaped(allowed=self.noise.proposable(None, device))
        tokens = torch.zeros(len(work), max(len(each) for each, _ in work), dtype=torch.int64)
        for at, (each, _) in enumerate(work):
            tokens[at, : len(each)] = torch.tensor([factor.token for factor in each])
        log_probs = prediction.log_prob(tokens.to(device)[:, None].expand(-1, canvas.shape[1], -1)).double().cpu()
        columns = [column for each, _ in work for column in range(len(each))]
        positions = [factor.position for _, factor in asked]
        values = log_probs[[at for at, _ in asked], positions, columns].tolist()
        return [(factor, value) for (_, factor), value in zip(asked, values, strict=True)]
