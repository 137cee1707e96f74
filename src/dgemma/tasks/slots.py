"""Templates with typed choices: fixed text, slots with a few options each, and the probability of every option.

The options of a slot are compared as whole texts, left · option · right, by the chain rule:
log p(option, right | left) = log p(right | left, a gap as long as the option) + log p(option | left, right).
The first term depends only on the option's length. The second is computed token by token, with the right text visible.
Both are exact for a network that is exact under mask noise. Under uniform noise a gap holds random tokens, and the
terms are averages over a few draws of them.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dgemma.checkpoint.tokenizer import Tokenizer
from dgemma.checks import as_int, require, typed
from dgemma.diffusion import draws
from dgemma.diffusion.noise import Noise
from dgemma.diffusion.prediction import Prediction
from dgemma.model.cache import Cache
from dgemma.run.arguments import check_vocabulary
from dgemma.run.defaults import learnt_noise
from dgemma.run.step import Denoiser, check_denoiser

_UNKNOWN = -1


@dataclass(frozen=True)
class Slot:
    """A place in a template and its options: token sequences, or texts if `slots` gets a tokenizer.

    Options may differ in length; an empty one is allowed.

    Example: `Slot(["yes", "no", "not sure"], name="verdict")`.
    """

    options: Sequence[Sequence[int] | str]
    name: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.options, str) or not isinstance(self.options, Sequence):
            require(False, "Slot.options", "be a list of texts or of token sequences", self.options, 'Write ["yes"].')
        if not isinstance(self.name, str):
            require(False, "Slot.name", "be a text", self.name)
        options = [option if isinstance(option, str) else _as_ids(option) for option in self.options]
        if not options or len(set(options)) < len(options):
            raise ValueError(f"Slot.options must have at least one option and no duplicates, got {options}.")


@dataclass(frozen=True, kw_only=True)
class SlotAnswer:
    """The option chosen for a slot, and the probabilities (K,) float64 of all options given the earlier answers."""

    slot: Slot
    index: int
    probabilities: Tensor

    @property
    def option(self) -> Sequence[int] | str:
        return self.slot.options[self.index]


@dataclass(frozen=True, kw_only=True)
class FilledTemplate:
    """A filled template: tokens (N,) int64, one `SlotAnswer` per slot, and their joint log-probability."""

    tokens: Tensor
    answers: tuple[SlotAnswer, ...]

    @property
    def log_prob(self) -> float:
        return float(sum(answer.probabilities[answer.index].log() for answer in self.answers))

    def __getitem__(self, name: str) -> SlotAnswer:
        """Return the answer of the slot with this name."""
        for answer in self.answers:
            if answer.slot.name == name:
                return answer
        raise KeyError(f"No slot is named {name!r}; the names are {[answer.slot.name for answer in self.answers]}.")


@torch.no_grad()
@typed
def slots(
    model: Denoiser,
    template: Sequence[Slot | Sequence[int] | str],
    *,
    tokenizer: Tokenizer | None = None,
    noise: Noise | None = None,
    greedy: bool = True,
    seed: int = 0,
    horizon: int = 8,
    num_draws: int = 4,
    tail_token_id: int | None = None,
    max_rows: int = 8,
) -> FilledTemplate:
    """Fill the slots of a template from left to right, with the probability of each option.

    template: fixed pieces and `Slot`s in order, fixed text first. Pieces are token ids, or texts with a `tokenizer`
    (each tokenized separately, the first after bos). `greedy` takes the most probable option; otherwise one is drawn
    with `seed`. Open slots to the right appear as gaps as long as their longest option. Options of
    different lengths are compared by the next `horizon` fixed tokens, with one forward per token. Without a mask token,
    gaps are drawn `num_draws` times and the probabilities averaged. At most `max_rows` canvases are predicted at once.
    `tail_token_id` fills the canvas after the template; None leaves noise there.

    Example:
        filled = slots(model, ["Is 7 prime? ", Slot(["yes", "no"], name="prime"), "."], tokenizer=tokenizer)
        filled["prime"].probabilities
    """
    check_denoiser("slots", model)
    noise = learnt_noise(model) if noise is None else noise
    check_vocabulary(noise, model.config)
    pieces = _read_template(template, tokenizer, noise, model.config.canvas_length)
    for name, value, least in (("num_draws", num_draws, 1), ("max_rows", max_rows, 1), ("horizon", horizon, 0)):
        fits = value >= least
        require(fits, f"slots {name}", f"be an integer of at least {least}", value)
    require(-(2**63) <= seed < 2**63, "slots seed", "fit into 64 bits", seed)
    if tail_token_id is not None and (not 0 <= tail_token_id < noise.vocab_size or tail_token_id == noise.mask_token):
        raise ValueError(
            f"slots tail_token_id must be a real token below {noise.vocab_size}, got {tail_token_id}. "
            "Use None to leave noise there."
        )
    tail = [] if tail_token_id is None else [tail_token_id] * model.config.canvas_length
    reader = _Reader(model, noise, num_draws, max_rows, seed)
    tokens: list[int] = []
    answers: list[SlotAnswer] = []
    cache: Cache | None = None
    num_read = 0
    for place, piece in enumerate(pieces):
        if isinstance(piece, list):
            tokens += piece
            continue
        slot, options = piece
        new = torch.tensor([tokens[num_read:]], dtype=torch.int64, device=model.device)
        cache = model.encode(new, cache) if cache is None or new.shape[1] else cache
        num_read = len(tokens)
        scores = reader.score(cache, options, _shown(pieces[place + 1 :]) + tail, horizon, block=len(answers))
        probabilities = scores.softmax(-1)
        block = torch.tensor([len(answers)])
        u = draws.uniform(torch.tensor([seed]), block, torch.zeros_like(block), 1, "slot")[0, 0]
        drawn = int((probabilities.cumsum(-1) <= u).sum().clamp(max=len(options) - 1))
        index = int(probabilities.argmax()) if greedy else drawn
        answers.append(SlotAnswer(slot=slot, index=index, probabilities=probabilities))
        tokens += options[index]
    return FilledTemplate(tokens=torch.tensor(tokens), answers=tuple(answers))


class _Question(NamedTuple):
    """A question for the model: the probability of `token` at `position` of a canvas with gaps."""

    canvas: tuple[int, ...]
    position: int
    token: int


class _Reader:
    """Predicts canvases with gaps; equal canvases are predicted once."""

    def __init__(self, model: Denoiser, noise: Noise, num_draws: int, max_rows: int, seed: int) -> None:
        self.model, self.noise, self.max_rows, self.seed = model, noise, max_rows, seed
        self.num_draws = num_draws if noise.mask_token is None else 1  # gaps of masks are not random

    def score(self, cache: Cache, options: list[list[int]], right: list[int], horizon: int, *, block: int) -> Tensor:
        """log p(option, right | left) of every option, up to a common constant, (K,) float64."""
        terms = [self._terms(option, right, self._num_weighed(options, right, horizon)) for option in options]
        answers = self._answer(cache, list(dict.fromkeys(question for each in terms for question in each)), block)
        nothing = torch.zeros((), dtype=torch.float64)
        return torch.stack([sum((answers[question] for question in each), nothing) for each in terms])

    def _num_weighed(self, options: list[list[int]], right: list[int], horizon: int) -> int:
        """The number of tokens to the right that are scored to compare lengths; 0 if all options have one length."""
        lengths = {len(option) for option in options}
        room = self.model.config.canvas_length - max(lengths)
        return min(horizon, len(right), room) if len(lengths) > 1 else 0

    def _terms(self, option: list[int], right: list[int], num_weighed: int) -> list[_Question]:
        gap = [_UNKNOWN] * len(option)
        unseen = [_UNKNOWN] * len(right)
        weighed = [
            self._ask(gap + right[:i] + unseen[i:], len(option) + i, right[i])
            for i in range(num_weighed)
            if right[i] != _UNKNOWN
        ]
        return weighed + [self._ask(option[:i] + gap[i:] + right, i, token) for i, token in enumerate(option)]

    def _ask(self, text: list[int], position: int, token: int) -> _Question:
        canvas_len = self.model.config.canvas_length
        return _Question(tuple((text + [_UNKNOWN] * canvas_len)[:canvas_len]), position, token)

    def _answer(self, cache: Cache, questions: list[_Question], block: int) -> dict[_Question, Tensor]:
        """The log-probability for each question. Probabilities are averaged over draws of the gaps."""
        canvases = list(dict.fromkeys(question.canvas for question in questions))
        rows = [(canvas, draw) for canvas in canvases for draw in range(self.num_draws)]
        by_canvas: dict[tuple[int, ...], list[_Question]] = {canvas: [] for canvas in canvases}
        for question in questions:
            by_canvas[question.canvas].append(question)
        found: dict[_Question, list[Tensor]] = {question: [] for question in questions}
        for start in range(0, len(rows), self.max_rows):
            chunk = rows[start : start + self.max_rows]
            prediction = self._predict(cache, chunk, block)
            most = max(len(by_canvas[canvas]) for canvas, _ in chunk)
            tokens = torch.zeros(len(chunk), most, dtype=torch.int64, device=self.model.device)
            for row, (canvas, _) in enumerate(chunk):
                for i, question in enumerate(by_canvas[canvas]):
                    tokens[row, i] = question.token
            log_probs = prediction.log_prob(tokens[:, None].expand(-1, prediction.canvas_len, -1)).double().cpu()
            for row, (canvas, _) in enumerate(chunk):
                for i, question in enumerate(by_canvas[canvas]):
                    found[question].append(log_probs[row, question.position, i])
        return {
            question: torch.stack(values).logsumexp(0) - math.log(len(values)) for question, values in found.items()
        }

    def _predict(self, cache: Cache, rows: list[tuple[tuple[int, ...], int]], block: int) -> Prediction:
        """Predict each canvas, with its gaps filled by noise that depends on the draw only."""
        device = self.model.device
        canvas = torch.tensor([canvas for canvas, _ in rows], device=device)
        draw = torch.tensor([draw for _, draw in rows], device=device)
        seeds, blocks = torch.full_like(draw, self.seed), torch.full_like(draw, block)
        fill = self.noise.prior(draws.uniform(seeds, blocks, draw, canvas.shape[1], "prior"))
        gaps = canvas < 0
        canvas, prefix = torch.where(gaps, fill, canvas), cache.select(torch.zeros_like(draw))
        prediction = self.model.denoise_at(gaps.double().mean(-1), canvas, prefix)
        return prediction.shaped(allowed=self.noise.proposable(None, device))


Piece = list[int] | tuple[Slot, list[list[int]]]


def _read_template(
    template: Sequence[Slot | Sequence[int] | str], tokenizer: Tokenizer | None, noise: Noise, canvas_len: int
) -> list[Piece]:
    """Tokenize the template: fixed pieces, and slots with their options."""
    pieces: list[Piece] = []
    for place, piece in enumerate(template):
        if isinstance(piece, Slot):
            pieces.append((piece, [_read_tokens(option, tokenizer, noise, bos=False) for option in piece.options]))
        else:
            pieces.append(_read_tokens(piece, tokenizer, noise, bos=place == 0))
    choices = [piece for piece in pieces if isinstance(piece, tuple)]
    if not choices:
        raise ValueError("slots template must have a Slot in it. Use generate or infill to write freely.")
    if not pieces[0] or isinstance(pieces[0], tuple):
        raise ValueError("slots template must begin with fixed text, the prefix of the first canvas. Start with bos.")
    names = [slot.name for slot, _ in choices if slot.name]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise ValueError(f"Slot.name must be unique in a template, got {repeated[0]!r} twice. Rename one.")
    longest = max(len(option) for _, options in choices for option in options)
    if longest > canvas_len:
        raise ValueError(f"slots options must fit into a canvas of {canvas_len} tokens, got one of {longest}.")
    return pieces


def _read_tokens(piece: Any, tokenizer: Tokenizer | None, noise: Noise, *, bos: bool) -> list[int]:
    if isinstance(piece, str):
        if tokenizer is None:
            raise ValueError(f"slots needs a tokenizer to read the text {piece!r}. Pass tokenizer=, or token ids.")
        return tokenizer.encode(piece, bos=bos)
    tokens = list(_as_ids(piece))
    if not all(isinstance(t, int) and 0 <= t < noise.vocab_size and t != noise.mask_token for t in tokens):
        raise ValueError(f"slots pieces must hold real token ids in [0, {noise.vocab_size}), got {tokens}.")
    return tokens


def _as_ids(piece: Any) -> tuple[int, ...]:
    """Return a sequence of token ids as a tuple of ints."""
    listed = piece.tolist() if hasattr(piece, "tolist") else piece
    ids = [as_int(token) for token in listed] if isinstance(listed, Iterable) else [None]
    if None in ids:
        require(False, "slots pieces and options", "be texts or sequences of token ids", piece)
    return tuple(token for token in ids if token is not None)


def _shown(pieces: list[Piece]) -> list[int]:
    """The tokens to the right: fixed ones, and gaps as long as the longest option of a slot."""
    shown: list[int] = []
    for piece in pieces:
        shown += piece if isinstance(piece, list) else [_UNKNOWN] * max(len(option) for option in piece[1])
    return shown
