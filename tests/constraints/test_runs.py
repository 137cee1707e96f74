"""Texts that `generate` returns under a constraint have the probabilities that enumeration gives.

A run takes two steps of the exact reverse kernel. The expected probability of a text is a sum over first canvases,
drawn texts, noise and second drafts, from the definitions alone. The test checks that `generate` agrees with each
branch of that sum. A branch has a box: one interval for every uniform that the run draws. `generate` gets the corners
and the middle of each box as its uniforms. It must return the text of the branch.
"""

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

import dgemma
from constrained_fuzz import Prefix
from dgemma.constraints.token_automaton import TokenAutomaton
from dgemma.diffusion.schedule import Linear
from toy import inject

NUM_TOKENS, MASK, KEPT = 3, 3, 0.5  # KEPT: the share of the text that survives after the first of two steps


class Listed(dgemma.Regex):
    """The texts of an automaton over tokens, without a pattern."""

    def __init__(self, automaton):
        self.__dict__.update(automaton=automaton, pattern="", tokenizer=None)


@dataclass(frozen=True)
class Case:
    """A random automaton with three states, a random network, and what each position may hold."""

    seed: int
    kind: str
    length: int
    possible: tuple[tuple[int, ...], ...]  # by position: all tokens, an allowed set, or one pinned token
    pins: tuple[int, ...] = ()
    table: list = field(init=False)
    is_final: list = field(init=False)
    logits: torch.Tensor = field(init=False)

    def __post_init__(self):
        generator = np.random.default_rng(self.seed)
        while True:
            table = generator.integers(-1, 3, (3, NUM_TOKENS)).tolist()
            is_final = (generator.random(3) < 0.5).tolist()
            object.__setattr__(self, "table", table)
            object.__setattr__(self, "is_final", is_final)
            texts = list(itertools.product(*self.possible))
            if 3 <= sum(map(self.accepts, texts)) <= 0.6 * len(texts):
                break
        drawn = torch.Generator().manual_seed(self.seed)
        canvases = (NUM_TOKENS + 1) ** self.length
        logits = 2 * torch.randn(canvases, self.length, NUM_TOKENS + 1, generator=drawn)
        object.__setattr__(self, "logits", logits)

    def state_after(self, text):
        state = 0
        for token in text:
            state = self.table[state][token] if state >= 0 else -1
        return state

    def accepts(self, text):
        state = self.state_after(text)
        return state >= 0 and self.is_final[state]

    def probabilities(self, canvas):
        """The network's prediction (C, tokens) in double precision."""
        code = sum(token * (NUM_TOKENS + 1) ** at for at, token in enumerate(canvas))
        return self.logits[code, :, :NUM_TOKENS].double().softmax(-1).tolist()

    def texts(self, canvas, fixed):
        """The accepted texts that agree with the fixed positions, each with its weight under the prediction."""
        law = self.probabilities(canvas)
        choices = [(canvas[at],) if at in fixed else self.possible[at] for at in range(self.length)]
        found = [text for text in itertools.product(*choices) if self.accepts(text)]
        free = [at for at in range(self.length) if at not in fixed]
        return {text: float(np.prod([law[at][text[at]] for at in free])) for text in found}

    def drafts(self, canvas, fixed, *, greedy=False):
        """Every text that a step may draw, with the box of its token uniforms: {text: [(low, high), ...]}.

        A uniform chooses the next state, then a token that leads there. The width of the token's interval is its
        conditional probability given the tokens before it. With `greedy`, which is the baseline, the width is the
        token's probability among the tokens that can still lead to an accepted text.
        """
        weights, law = self.texts(canvas, fixed), self.probabilities(canvas)
        boxes = {(): []}
        for at in range(self.length):
            grown = {}
            for start, box in boxes.items():
                share = {}
                for text, weight in weights.items():
                    if text[:at] == start:
                        share[text[at]] = law[at][text[at]] if greedy else share.get(text[at], 0.0) + weight
                low, total = 0.0, sum(share.values())
                for token in sorted(share, key=lambda token: (self.state_after((*start, token)), token)):
                    high = low + share[token] / total
                    grown[(*start, token)] = [*box, (0.0, 1.0) if at in fixed else (low, high)]
                    low = high
            boxes = grown
        return boxes

    def canvases(self, draft):
        """The canvas after the first step, with the boxes of the event and noise uniforms of each position."""
        outcomes = []
        for at, token in enumerate(draft):
            if at in self.pins:
                outcomes.append([(token, (0.0, 1.0), (0.0, 1.0))])
                continue
            kept = [(token, (0.0, KEPT), (0.0, 1.0))]
            if self.kind == "mask":
                outcomes.append([*kept, (MASK, (KEPT, 1.0), (0.0, 1.0))])
            else:
                num = len(self.possible[at])
                noise = [(other, (KEPT, 1.0), (i / num, (i + 1) / num)) for i, other in enumerate(self.possible[at])]
                outcomes.append(kept + noise)
        for outcome in itertools.product(*outcomes):
            tokens, events, noises = zip(*outcome, strict=True)
            yield tokens, list(events), list(noises)

    def first_canvases(self):
        if self.kind == "mask":
            open_ones = [(MASK,)] * self.length
        else:
            open_ones = list(self.possible)
        choices = [self.possible[at] if at in self.pins else open_ones[at] for at in range(self.length)]
        return list(itertools.product(*choices))

    def fixed_on(self, canvas):
        return {at for at, token in enumerate(canvas) if at in self.pins or (self.kind == "mask" and token != MASK)}

    def branches(self, *, greedy=False):
        """Every branch of a run: the first canvas, boxes of (step, purpose), the returned text and its probability."""
        starts = self.first_canvases()
        for start in starts:
            for draft, box in self.drafts(start, set(self.pins), greedy=greedy).items():
                for canvas, events, noises in self.canvases(draft):
                    for text, last in self.drafts(canvas, self.fixed_on(canvas), greedy=greedy).items():
                        boxes = [box, events, noises, last]
                        sides = [high - low for part in boxes for low, high in part]
                        yield start, boxes, text, float(np.prod(sides)) / len(starts)

    def law(self, **options):
        total = {}
        for _, _, text, weight in self.branches(**options):
            total[text] = total.get(text, 0.0) + weight
        return total

    def direct_law(self):
        """The same law by summing over texts and canvases, without uniforms."""
        total = dict.fromkeys(filter(self.accepts, itertools.product(*self.possible)), 0.0)
        starts = self.first_canvases()
        for start in starts:
            drafts = self.texts(start, set(self.pins))
            for draft, weight in drafts.items():
                for canvas in itertools.product(range(NUM_TOKENS + 1), repeat=self.length):
                    chance = np.prod([self.chance(at, canvas[at], draft[at]) for at in range(self.length)])
                    if chance:
                        finals = self.texts(canvas, self.fixed_on(canvas))
                        for text, final in finals.items():
                            shares = weight / sum(drafts.values()) * final / sum(finals.values())
                            total[text] += float(chance * shares / len(starts))
        return total

    def chance(self, at, token, drawn):
        """q(z | x) of one position after the first step."""
        if at in self.pins:
            return float(token == drawn)
        if self.kind == "mask":
            return KEPT * (token == drawn) + (1 - KEPT) * (token == MASK)
        allowed = self.possible[at]
        return KEPT * (token == drawn) + (1 - KEPT) * (token in allowed) / len(allowed)


class Scripted(dgemma.Denoiser):
    """The network of a case, run with prescribed uniforms: (step, purpose) → (rows, C)."""

    generation = dgemma.GenerationDefaults()
    device = torch.device("cpu")

    def __init__(self, case, uniforms):
        self.case, self.uniforms = case, uniforms
        vocab_size = NUM_TOKENS + (case.kind == "mask")
        self.config = dgemma.presets.tiny().replace(vocab_size=vocab_size, canvas_length=case.length)

    def encode(self, tokens, cache=None, attention_mask=None):
        return Prefix(torch.full((len(tokens),), tokens.shape[1]))

    def denoise(self, canvas, cache, self_cond=None, self_cond_mask=None):
        code = (canvas * (NUM_TOKENS + 1) ** torch.arange(canvas.shape[1])).sum(1)
        return dgemma.Prediction(self.case.logits[code][..., : self.config.vocab_size])

    def step(self, state, *, cache, knobs):
        number = int(state.step[0])
        injected = {purpose: u[state.rows] for (step, purpose), u in self.uniforms.items() if step == number}
        return dgemma.step(self, inject(state, injected), cache=cache, knobs=knobs)


def run_branches(case, branches, place):
    """Run `generate` on every branch, with each uniform at a `place` in [0, 1] of its interval. Return the texts."""
    names = [(0, "token"), (0, "event"), (0, "noise"), (1, "token")]
    boxes = torch.tensor([boxes for _, boxes, _, _ in branches], dtype=torch.float64)  # (R, 4, C, 2)
    points = boxes[..., 0] + place * (boxes[..., 1] - boxes[..., 0])
    middle = torch.full_like(points[:, 0], 0.5)
    uniforms = {name: points[:, at] for at, name in enumerate(names)} | {(1, "event"): middle, (1, "noise"): middle}
    model = Scripted(case, uniforms)
    starts = torch.tensor([start for start, _, _, _ in branches])
    allowed = torch.zeros(1, case.length, model.config.vocab_size, dtype=torch.bool)
    for at, tokens in enumerate(case.possible):
        allowed[0, at, list(tokens)] = True
    frozen = torch.zeros_like(starts, dtype=torch.bool)
    frozen[:, list(case.pins)] = True
    automaton = TokenAutomaton(
        np.array([1, 2, 3, 0][: model.config.vocab_size]),
        np.column_stack((np.full(3, -1), case.table)).astype(np.int32),
        np.array(case.is_final),
    )
    if case.kind == "mask":
        noise = dgemma.MaskNoise(NUM_TOKENS + 1, mask_token_id=MASK, schedule=Linear())
    else:
        noise = dgemma.UniformNoise(NUM_TOKENS, schedule=Linear())
    out = dgemma.generate(
        model,
        torch.zeros(len(branches), 1, dtype=torch.int64),
        constraint=Listed(automaton),
        noise=noise,
        sampler=dgemma.Ancestral(),
        steps=2,
        temperature=1.0,
        stop=None,
        max_new_tokens=case.length,
        canvas=torch.where(starts == MASK, -1, starts),
        frozen=frozen,
        allowed=allowed,
        eos_token_ids=(),
        progress=False,
    )
    return [tuple(text) for text in out.new_tokens.tolist()]


def total_variation(one, other):
    return 0.5 * sum(abs(one.get(text, 0.0) - other.get(text, 0.0)) for text in {*one, *other})


FREE, PINNED, ALLOWED = (0, 1, 2), (1,), (0, 2)
CASES = [
    Case(0, "mask", 3, (FREE, FREE, FREE)),
    Case(1, "mask", 3, (FREE, PINNED, FREE), (1,)),
    Case(2, "mask", 3, (FREE, FREE, ALLOWED)),
    Case(11, "uniform", 2, (FREE, FREE)),
    Case(11, "uniform", 3, (FREE, PINNED, FREE), (1,)),
    Case(5, "uniform", 3, (PINNED, FREE, ALLOWED), (0,)),
]


@pytest.mark.parametrize("case", CASES, ids=["mask", "mask-pin", "mask-allowed", "uniform", "uniform-pin", "both"])
def test_a_run_returns_texts_with_the_enumerated_law(case):
    branches = [branch for branch in case.branches() if branch[3] > 1e-9]
    for place in (1e-3, 0.5, 1 - 1e-3):
        law = {}
        for text, (_, _, _, weight) in zip(run_branches(case, branches, place), branches, strict=True):
            law[text] = law.get(text, 0.0) + weight
        assert total_variation(law, case.direct_law()) < 1e-7  # branches below 1e-9 are left out


def test_runs_with_greedy_masks_have_another_law():
    """The baseline draws each token among those that can still lead to an accepted text.

    It ignores the probability that the rest of the text is accepted too.
    """
    distances = [total_variation(case.law(greedy=True), case.direct_law()) for case in CASES]
    assert sum(distances) / len(distances) == pytest.approx(0.2495, abs=1e-3)  # 0 is unbiased


def test_self_conditioning_shows_the_prediction_before_the_constraint(monkeypatch):
    """The model was trained on its own predictions. Those that a constraint has made sharp would mislead it."""
    tokenizer = dgemma.ByteTokenizer()
    model = dgemma.DiffusionGemma(dgemma.presets.tiny().replace(vocab_size=tokenizer.vocab_size, canvas_length=2))
    shown, predicted, denoise = [], [], model.denoise

    def remember(canvas, cache, self_cond=None, **options):
        shown.append(self_cond)
        predicted.append(denoise(canvas, cache, self_cond=self_cond, **options))
        return predicted[-1]

    monkeypatch.setattr(model, "denoise", remember)
    options = {"sampler": dgemma.Ancestral(), "steps": 2, "temperature": 0.5, "max_new_tokens": 2, "stop": None}
    out = dgemma.generate(model, torch.tensor([[97]]), constraint=dgemma.Regex("ab", tokenizer), **options)
    assert tokenizer.decode(out.new_tokens[0]) == "ab"
    assert shown[0] is None
    assert torch.equal(shown[1].logits, predicted[0].logits / 0.5)
