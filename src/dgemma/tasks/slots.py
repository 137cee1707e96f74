"""Typed decisions: templates of fixed text and slots, and the probability of every option of a slot.

`slots` fills one template, `decide_many` any number of them, and `calibrate` corrects their probabilities.
Probabilities are those of whole texts, so options may have several tokens and different lengths; see `option_scores`.
Under mask noise they are exact if the network is exact. Under uniform noise, open positions hold random tokens, and
probabilities are averages over a few draws of these tokens. They are then exact for an exact network that takes a noise
level per position.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from dgemma.checkpoint.tokenizer import IMAGE_MARKER, Tokenizer
from dgemma.checks import Words, as_int, as_lists, check_types, require, short_repr, show, typed
from dgemma.diffusion import draws
from dgemma.diffusion.noise import Noise
from dgemma.many.prefixes import SharedPrefixes
from dgemma.model.cache import Cache
from dgemma.model.denoiser import Denoiser, check_denoiser
from dgemma.model.vision.images import Images
from dgemma.model.vision.places import join_images
from dgemma.printing import progress_bar
from dgemma.run.arguments import check_vocabulary
from dgemma.run.options import Default, fill_in, learnt_noise, takes_options
from dgemma.tasks.infill import check_tail
from dgemma.tasks.option_scores import Blank, Layout, Piece, Scorer, layouts_of

_MOST_COMBINATIONS = 4096


@dataclass(frozen=True)
class Slot:
    """A place in a template and its options: token sequences, or texts if `slots` gets a tokenizer.

    Options may differ in length; an empty one is allowed.

    Example: `Slot(["yes", "no", "not sure"], name="verdict")`.
    """

    options: Sequence[Sequence[int] | str]
    name: str = ""

    def __post_init__(self) -> None:
        check_types(self)
        options = [option if isinstance(option, str) else _as_ids(option) for option in self.options]
        fits = len(options) > 0 and len(set(options)) == len(options) and not isinstance(self.options, str)
        require(fits, "Slot.options", "be a list of different texts or token sequences", self.options, 'Write ["yes"].')


Template = Sequence[Slot | Sequence[int] | str | Images]


@dataclass(frozen=True, kw_only=True)
class SlotAnswer:
    """The option chosen for a slot, and the probabilities (K,) float64 of all options.

    Probabilities are conditional on the template, and under `mode="sequential"` also on the earlier answers.
    """

    slot: Slot
    index: int
    probabilities: Tensor
    abstains: bool = False  # the chosen option is less probable than the threshold

    __repr__ = short_repr

    @property
    def option(self) -> Sequence[int] | str | None:
        """The chosen option, None if the answer abstains."""
        return None if self.abstains else self.slot.options[self.index]


@dataclass(frozen=True, kw_only=True)
class FilledTemplate:
    """A filled template: tokens (N,) int64 with the chosen options, and one `SlotAnswer` per slot.

    `joint` has the probability of every combination of options, (K_1, ..., K_n) float64, under `mode="joint"`.
    """

    tokens: Tensor
    answers: tuple[SlotAnswer, ...]
    joint: Tensor | None = None

    __repr__ = short_repr

    @property
    def log_prob(self) -> float:
        """The log-probability of all chosen options together."""
        if self.joint is not None:
            return float(self.joint[tuple(answer.index for answer in self.answers)].log())
        return float(sum(answer.probabilities[answer.index].log() for answer in self.answers))

    def __getitem__(self, name: str) -> SlotAnswer:
        """Return the answer of the slot with this name."""
        for answer in self.answers:
            if answer.slot.name == name:
                return answer
        raise KeyError(f"No slot is named {name!r}; the names are {[answer.slot.name for answer in self.answers]}.")


class SlotOptions(TypedDict, total=False):
    """Options of `slots` and `decide_many`, which describes them."""

    tokenizer: Tokenizer | None
    mode: Annotated[Literal["sequential", "independent", "joint"], Default("sequential")]
    temperature: Annotated[float, Default(1.0)]
    bias: Mapping[str, Sequence[float]] | None
    threshold: Annotated[float, Default(0.0)]
    noise: Noise | None
    greedy: Annotated[bool, Default(True)]
    seed: Annotated[int, Default(0)]
    horizon: Annotated[int, Default(8)]
    num_draws: Annotated[int, Default(4)]
    tail_token_id: int | None
    batch_size: Annotated[int, Default(8)]


@takes_options(SlotOptions)
def slots(
    model: Denoiser, template: Template, *, prefixes: SharedPrefixes | None = None, **options: Unpack[SlotOptions]
) -> FilledTemplate:
    """Fill the slots of one template; `decide_many` describes the options.

    Example:
        filled = slots(model, ["Is 7 prime? ", Slot(["yes", "no"], name="prime"), "."], tokenizer=tokenizer)
        filled["prime"].probabilities
    """
    filler = _Filler("slots", model, options, prefixes)
    return filler.fill([filler.tokenize("slots template", template, 0)])[0]


@takes_options(SlotOptions)
def decide_many(
    model: Denoiser,
    templates: Iterable[Template],
    *,
    prefixes: SharedPrefixes | None = None,
    progress: bool = True,
    **options: Unpack[SlotOptions],
) -> Iterator[FilledTemplate]:
    """Fill the slots of any number of templates, and yield a `FilledTemplate` for each, in order.

    templates: any iterable, read `batch_size` at a time. A template has fixed pieces and `Slot`s in order, fixed text
    first. Pieces are token ids, or texts with a `tokenizer` (each tokenized separately, the first after bos). Before
    the first slot a piece may also be images, from an `ImageProcessor`.

    - `mode`: "sequential" fills slots from left to right, each given the answers before it. "independent" gives the
      distribution of each slot while the others are open. "joint" gives the distribution over all combinations of
      options, at most 4,096. By the chain rule it includes the options that "sequential" did not choose, so it is not
      the product of the distributions that "sequential" reports. With "independent" and "joint", all slots must fit
      into one canvas.
    - `temperature` divides the log-probabilities of options, or of combinations; see `calibrate`.
    - `bias`: by the name of a slot, numbers that are first added to the log-probabilities of its options.
    - `threshold`: an answer abstains if the probability of its option is lower.
    - `greedy` takes the most probable option or combination; otherwise one is drawn. Template i has seed + i.
    - `horizon`: for options of different lengths, up to this many fixed tokens after them are scored too. Each such
      token takes one forward. Later fixed tokens are hidden.
    - `num_draws`: without a mask token, open positions are drawn this many times, and probabilities are averaged.
    - `tail_token_id` fills the canvas after the template; None leaves it open.
    - `batch_size` canvases are predicted at once.
    - `prefixes`: texts before the first slot that begin with the same tokens are read once. Pass a `SharedPrefixes` to
      share them with other calls, or to bound their memory.

    Example: `for filled in decide_many(model, templates, threshold=0.9): print(filled["mood"].option)`.
    """
    filler = _Filler("decide_many", model, options, prefixes)
    num_templates = len(templates) if isinstance(templates, Sized) else None
    return _decide(filler, templates, progress_bar(desc="deciding", unit="row", show=progress, total=num_templates))


@overload
def calibrate(results: Iterable[FilledTemplate], truths: Iterable[Sequence[Any]]) -> float: ...


@overload
def calibrate(results: Iterable[FilledTemplate], truths: None = None) -> dict[str, list[float]]: ...


@typed
def calibrate(
    results: Iterable[FilledTemplate], truths: Iterable[Sequence[Any]] | None = None
) -> float | dict[str, list[float]]:
    """Return the temperature at which the true options are most likely, for `slots` and `decide_many`.

    results: from `decide_many` with temperature 1. truths: the true option of every slot, for each result. The
    temperature is between 0.01, for a model that is always right, and 100. Under `mode="joint"` combinations are
    scored.

    Without truths, return a `bias` per option, by the name of the slot (contextual calibration, arXiv:2102.09690). The
    results are then of templates without content, such as "N/A". With this bias their options are equally probable, so
    a preference that the model has without reading anything no longer counts.

    Example: `calibrate(decide_many(model, templates, tokenizer=tokenizer), [["yes"], ["no"]])`.
    """
    if truths is None:
        laws_by_name: dict[str, list[Tensor]] = {}
        for filled in results:
            for answer in filled.answers:
                require(bool(answer.slot.name), "calibrate slots", "have names, which the bias is by", answer.slot)
                laws_by_name.setdefault(answer.slot.name, []).append(answer.probabilities)
        return {name: (-torch.stack(laws).mean(0).log()).tolist() for name, laws in laws_by_name.items()}
    laws, rights = [], []
    for number, (filled, truth) in enumerate(zip(results, truths, strict=True)):
        choices = [answer.slot.options for answer in filled.answers]
        fits = len(truth) == len(choices) and all(option in each for option, each in zip(truth, choices, strict=True))
        require(fits, f"calibrate truths[{number}]", f"have an option of each of the slots {show(choices)}", truth)
        indices = tuple(each.index(option) for option, each in zip(truth, choices, strict=True))
        if filled.joint is not None:
            laws.append(filled.joint.flatten())
            rights.append(filled.joint[indices])
        else:
            laws += [answer.probabilities for answer in filled.answers]
            rights += [answer.probabilities[index] for answer, index in zip(filled.answers, indices, strict=True)]
    require(bool(laws), "calibrate results", "have at least one answered slot", Words(f"{len(laws)} slots"))
    scores = torch.nn.utils.rnn.pad_sequence(laws, batch_first=True).log()  # padding has probability 0
    right = torch.stack(rights).log().clamp(min=-700.0)  # a true option of probability 0 counts as e^-700
    # Bounds of log(1 / temperature). The log-likelihood is concave in 1 / temperature, so bisection finds its maximum.
    low, high = math.log(0.01), math.log(100.0)
    for _ in range(60):
        middle = (low + high) / 2
        law = (scores * math.exp(middle)).softmax(-1)
        mean = torch.where(law > 0, law * scores, 0.0).sum(-1)
        low, high = (middle, high) if float((right - mean).mean()) >= 0 else (low, middle)
    return math.exp(-(low + high) / 2)


def _decide(filler: "_Filler", templates: Iterable[Template], bar: Any) -> Iterator[FilledTemplate]:
    numbered = enumerate(templates)
    with bar:
        while batch := list(itertools.islice(numbered, filler.settings["batch_size"])):
            rows = [filler.tokenize(f"decide_many templates[{number}]", template, number) for number, template in batch]
            for filled in filler.fill(rows):
                bar.update()
                yield filled


@dataclass
class _TemplateRow:
    """A template as tokens, while it is filled. A place is an index into `pieces`."""

    slots: dict[int, Slot]  # by place
    pieces: list[Piece]
    # Rounds are decided in order. Before each one, the text to the left of its slots is read. A round has groups of
    # places, and the slots of a group are decided jointly.
    rounds: list[list[list[int]]]
    seed: int
    images: Images | None  # before the first slot
    chosen: dict[int, int] = field(default_factory=dict)  # the index of the option, by place
    laws: list[Tensor] = field(default_factory=list)  # of each group
    num_cached: int = 0  # tokens in the cache

    def text(self, end: int | None = None) -> list[int]:
        """The tokens of the pieces before `end`, with the chosen options."""
        pieces = enumerate(self.pieces[:end])
        filled = [piece.options[self.chosen[place]] if isinstance(piece, Blank) else piece for place, piece in pieces]
        return list(itertools.chain(*filled))

    def take_text(self, end: int) -> list[int]:
        """The tokens before `end` that are not in the cache yet."""
        text = self.text(end)
        start, self.num_cached = self.num_cached, len(text)
        return text[start:]


class _Filler:
    """Fills batches of templates; `decide_many` describes its options."""

    def __init__(
        self, owner: str, model: Denoiser, options: SlotOptions, prefixes: SharedPrefixes | None = None
    ) -> None:
        check_denoiser(owner, model)
        settings: Any = fill_in(options, SlotOptions)
        noise = learnt_noise(model) if settings["noise"] is None else settings["noise"]
        check_vocabulary(noise, model.config)
        for name, fits, rule in (
            ("num_draws", settings["num_draws"] >= 1, "be an integer of at least 1"),
            ("batch_size", settings["batch_size"] >= 1, "be an integer of at least 1"),
            ("horizon", settings["horizon"] >= 0, "be an integer of at least 0"),
            ("temperature", 0 < settings["temperature"] < math.inf, "be above 0"),
            ("threshold", 0 <= settings["threshold"] <= 1, "be a probability"),
        ):
            require(fits, f"{owner} {name}", rule, settings[name])
        tail = settings["tail_token_id"]
        check_tail(owner, tail, noise)
        self.model, self.noise, self.settings = model, noise, settings
        self.tokenizer, self.mode, self.bias = settings["tokenizer"], settings["mode"], settings["bias"] or {}
        self.tail = [] if tail is None else [tail] * model.config.canvas_length
        self.scorer = Scorer(model, noise, settings["num_draws"], settings["batch_size"], prefixes)

    def tokenize(self, owner: str, template: Template, number: int) -> _TemplateRow:
        """Tokenize a template and check it."""
        pieces: list[Piece] = []
        images: list[Images] = []
        for place, piece in enumerate(template):
            if isinstance(piece, Slot):
                pieces.append(Blank([self._tokens(owner, option, bos=False) for option in piece.options]))
            elif isinstance(piece, Images):
                is_first = not any(isinstance(before, Blank) for before in pieces)
                require(is_first, f"{owner} images", "stand before the first slot", place)
                marks = self._tokens(owner, IMAGE_MARKER * len(piece), bos=place == 0)
                pieces.append(self.tokenizer.place_images(marks, piece))
                images.append(piece)
            else:
                pieces.append(self._tokens(owner, piece, bos=place == 0))
        found = {place: piece for place, piece in enumerate(template) if isinstance(piece, Slot)}
        rule = "begin with fixed text, the prefix of the first canvas, and have a Slot in it"
        require(bool(found) and 0 not in found and bool(pieces[0]), owner, rule, template, "Start with bos.")
        for slot in found.values():
            num_options, numbers = len(slot.options), self.bias.get(slot.name)
            fits = numbers is None or (len(numbers) == num_options and all(map(math.isfinite, numbers)))
            require(fits, f"bias of slot {slot.name!r}", f"be {num_options} finite numbers, one per option", numbers)
        names = [slot.name for slot in found.values() if slot.name]
        require(len(set(names)) == len(names), "Slot.name", "be unique in a template", names, "Rename one.")
        places = list(found)
        if self.mode == "sequential":
            rounds = [[[place]] for place in places]
        else:
            rounds = [[places]] if self.mode == "joint" else [[[place] for place in places]]
        seed = self.settings["seed"] + number
        require(as_int(seed) is not None, f"{owner} seed", "be below 2**63; template i has seed + i", seed)
        row = _TemplateRow(found, pieces, rounds, seed, join_images(images))
        self._check_sizes(owner, row)
        return row

    def _check_sizes(self, owner: str, row: _TemplateRow) -> None:
        """Check that the slots of each round fit into a canvas, and that there are not too many combinations."""
        canvas_len, fix = self.model.config.canvas_length, 'Use mode="sequential" or fewer slots.'
        if self.mode == "sequential":
            fix = "Shorten the options."
        longest = [max(map(len, piece.options)) if isinstance(piece, Blank) else len(piece) for piece in row.pieces]
        most = max(sum(longest[groups[0][0] : groups[-1][-1] + 1]) for groups in row.rounds)
        require(most <= canvas_len, f"{owner} slots", f"fit into a canvas of {canvas_len} tokens", most, fix)
        num_combinations = math.prod(len(slot.options) for slot in row.slots.values()) if self.mode == "joint" else 1
        rule = f"have at most {_MOST_COMBINATIONS} combinations of options"
        require(num_combinations <= _MOST_COMBINATIONS, owner, rule, num_combinations, fix)

    @torch.no_grad()
    def fill(self, rows: list[_TemplateRow]) -> list[FilledTemplate]:
        """Fill a batch of templates, round by round."""
        cache: Cache | None = None
        active = rows
        for number in range(max(len(row.rounds) for row in rows)):
            kept = [at for at, row in enumerate(active) if number < len(row.rounds)]
            if cache is not None and len(kept) < len(active):
                cache = cache.select(torch.tensor(kept, device=self.model.device))
            active = [active[at] for at in kept]
            texts = [row.take_text(row.rounds[number][0][0]) for row in active]
            cache = self.scorer.encode(texts, cache, [row.images for row in active])
            layouts = [self._layouts(row, row.rounds[number]) for row in active]
            joined = [list(itertools.chain(*groups)) for groups in layouts]
            scores = self.scorer.score(cache, joined, [row.seed for row in active], block=number)
            for row, groups, score in zip(active, layouts, scores, strict=True):
                parts = score.split([len(group) for group in groups])
                for places, part in zip(row.rounds[number], parts, strict=True):
                    self._choose(row, places, part)
        return [self._result(row) for row in rows]

    def _layouts(self, row: _TemplateRow, groups: list[list[int]]) -> list[list[Layout]]:
        """A layout per option or combination, for each group of a round."""
        first = groups[0][0]
        pieces = [*row.pieces[first:], self.tail]
        places = [[place - first for place in group] for group in groups]
        canvas_len, horizon = self.model.config.canvas_length, self.settings["horizon"]
        return [layouts_of(pieces, group, canvas_len, horizon) for group in places]

    def _choose(self, row: _TemplateRow, places: list[int], scores: Tensor) -> None:
        """Choose an option for each place, given the scores of all combinations."""
        sizes = [len(row.slots[place].options) for place in places]
        for dim, slot in enumerate(row.slots[place] for place in places):
            if slot.name in self.bias:
                bias = torch.tensor(self.bias[slot.name], dtype=scores.dtype)
                scores = (scores.view(sizes).movedim(dim, -1) + bias).movedim(-1, dim).flatten()
        law = (scores / self.settings["temperature"]).softmax(-1)
        block = torch.tensor([list(row.slots).index(places[0])])
        u = draws.uniform(torch.tensor([row.seed]), block, torch.zeros_like(block), 1, "slot")[0, 0]
        drawn = (law.cumsum(-1) <= u).sum().clamp(max=len(law) - 1)
        row.laws.append(law.view(sizes))
        indices = torch.unravel_index(law.argmax() if self.settings["greedy"] else drawn, sizes)
        row.chosen |= zip(places, map(int, indices), strict=True)

    def _result(self, row: _TemplateRow) -> FilledTemplate:
        joint, laws, least = None, row.laws, self.settings["threshold"]
        if self.mode == "joint":
            (joint,) = row.laws
            laws = [joint[..., None].transpose(0, dim).flatten(1).sum(1) for dim in range(joint.dim())]  # marginals
        answers = [
            SlotAnswer(slot=slot, index=index, probabilities=law, abstains=bool(law[index] < least))
            for slot, index, law in zip(row.slots.values(), row.chosen.values(), laws, strict=True)
        ]
        return FilledTemplate(tokens=torch.tensor(row.text()), answers=tuple(answers), joint=joint)

    def _tokens(self, owner: str, piece: Any, *, bos: bool) -> list[int]:
        if isinstance(piece, str):
            require(self.tokenizer is not None, owner, "come with a tokenizer for its texts", piece, "Pass tokenizer=.")
            return list(self.tokenizer.encode(piece, bos=bos))
        tokens = list(_as_ids(piece))
        noise = self.noise
        fits = all(0 <= token < noise.vocab_size and token != noise.mask_token for token in tokens)
        require(fits, owner, f"hold real token ids in [0, {noise.vocab_size})", tokens)
        return tokens


def _as_ids(piece: Any) -> tuple[int, ...]:
    """Return a sequence of token ids as a tuple of ints."""
    listed = as_lists(piece)
    ids = [as_int(token) for token in listed] if isinstance(listed, list) else [None]
    require(None not in ids, "slots pieces and options", "be texts or sequences of token ids", piece)
    return tuple(token for token in ids if token is not None)
