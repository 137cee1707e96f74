"""The law of every sampler: the probabilities of all runs add up to one, and are the frequencies of the runs."""

import itertools
import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from dgemma import DenoiseState, MaskNoise, Noise, Prediction, UniformNoise
from dgemma.constraints.canvas_language import Language
from dgemma.constraints.joint import condition
from dgemma.constraints.tables import with_gaps, with_stops
from dgemma.constraints.token_automaton import TokenAutomaton
from dgemma.diffusion.decision import Decision
from dgemma.diffusion.law import log_written
from dgemma.run.knobs import Knobs
from dgemma.run.step import predict, settle, start_state, step
from dgemma.sampling import (
    P2,
    Ancestral,
    EntropyBound,
    Fork,
    LeaveOneOutGibbs,
    ReMDM,
    Sampler,
    SoftEntropyBound,
    SoftThreshold,
    Threshold,
    law_of_rule,
)
from dgemma.sampling.ranking import log_gumbel_choice
from dgemma.sampling.temperature import ConstantTemperature
from every_sampler import SAMPLERS, noises
from rowwise import RowwiseDenoiser
from toy import inject

NUM_TOKENS, STOP = 3, 2  # without the mask
MASK, UNIFORM = MaskNoise(NUM_TOKENS + 1, mask_token_id=NUM_TOKENS), UniformNoise(NUM_TOKENS)


@dataclass
class TableModel(RowwiseDenoiser):
    """Logits from a table of neighbouring tokens. With `self_cond`, the last prediction also counts."""

    vocab_size: int = 4
    uses_self_cond: bool = False
    table: Tensor = field(init=False)

    def __post_init__(self):
        generator = torch.Generator().manual_seed(5)
        shape = (4, self.vocab_size, self.vocab_size, self.vocab_size)
        self.table = torch.randn(shape, generator=generator, dtype=torch.float64)
        self.mix = torch.randn(*shape[1:3], generator=generator, dtype=torch.float64)

    def denoise(self, canvas, cache, self_cond=None):
        logits = self.table[torch.arange(canvas.shape[1]), canvas, canvas.roll(1, dims=1)]
        if self.uses_self_cond and self_cond is not None:
            last = self_cond.logits if isinstance(self_cond, Prediction) else self_cond
            logits = logits + 2 * last.softmax(-1) @ self.mix
        return Prediction(logits)


def no_two_zeros(batch_size: int, vocab_size: int) -> Language:
    """Texts of 0 and 1 without two zeros in a row, that end with 1, and with a stop token if they are short."""
    classes = np.array([1, 2, 0, 0])[:vocab_size]
    automaton = TokenAutomaton(classes, np.array([[-1, 1, 0], [-1, -1, 0]], dtype=np.int32), np.array([True, False]))
    start = torch.zeros(batch_size, dtype=torch.int64)
    end = torch.tensor([[True, False, True]]).expand(batch_size, -1)
    return Language(with_stops(automaton, (STOP,), vocab_size), start, end)


@dataclass(frozen=True)
class Setting:
    sampler: Sampler
    noise: Noise
    self_cond: bool
    constrained: bool

    @property
    def model(self) -> TableModel:
        return TableModel(vocab_size=self.noise.vocab_size, uses_self_cond=self.self_cond)

    @property
    def knobs(self) -> Knobs:
        return Knobs(sampler=self.sampler, temperature=ConstantTemperature(value=0.7))

    def start(self, batch_size: int, canvas_len: int, num_steps: int, **more) -> DenoiseState:
        language = no_two_zeros(batch_size, self.noise.vocab_size) if self.constrained else None
        size = {"canvas_len": canvas_len, "num_steps": num_steps}
        return start_state(self.knobs, self.noise, seeds=torch.arange(batch_size), language=language, **size, **more)


def settings():
    for sampler in SAMPLERS:
        for noise in noises(sampler, 99):
            has_mask = noise.mask_token is not None
            more = {"mask_token_id": NUM_TOKENS} if has_mask else {}
            noise = replace(noise, vocab_size=NUM_TOKENS + has_mask, **more)
            yield sampler, noise


def cases(*, quick: bool):
    """Every sampler with self-conditioning and a language, and without both. The first are quick, or the others."""
    found = []
    for (sampler, noise), both in itertools.product(settings(), (False, True)):
        marks = [] if both is quick else [pytest.mark.slow]
        name = f"{sampler}-{noise.kind}" + "-both" * both
        found.append(pytest.param(Setting(sampler, noise, both, both), id=name, marks=marks))
    return found


def noise_outcomes(state: DenoiseState, renoise: Tensor) -> tuple[Tensor, Tensor]:
    """Uniforms (R, n, C) that draw every combination of noise tokens, and their probabilities (R, n)."""
    share = state.noise.mask_share(state.next_noise_level)[:, None]  # (R, 1)
    tokens = (torch.arange(NUM_TOKENS) + 0.5) / NUM_TOKENS
    uniforms = torch.cat((share / 2, share + (1 - share) * tokens), dim=1)  # (R, 4)
    weights = torch.cat((share, (1 - share).expand(-1, NUM_TOKENS) / NUM_TOKENS), dim=1)
    combinations = torch.tensor(list(itertools.product(range(1 + NUM_TOKENS), repeat=state.canvas_len)))  # (n, C)
    first = (weights > 0).int().argmax(-1)[:, None, None]  # where nothing is renoised, one outcome of probability 1
    stands = renoise[:, None] | (combinations == first)
    of_position = torch.where(renoise[:, None], weights[:, combinations], 1.0)
    return uniforms[:, combinations], torch.where(stands.all(-1), of_position.prod(-1), 0.0)


def all_runs(setting: Setting, canvas_len: int, num_steps: int, model: TableModel | None = None):
    """Every run from one first canvas: the last states, and their log-probabilities and noise probabilities (R,)."""
    model, knobs = model or setting.model, setting.knobs
    state = setting.start(1, canvas_len, num_steps)
    log_prob, noise_prob = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    vocab_size = setting.noise.vocab_size
    kinds = [*range(NUM_TOKENS), vocab_size, vocab_size + 1]  # write a token but not the mask, stay, renoise
    events = torch.tensor(list(itertools.product(kinds, repeat=canvas_len)))
    finished = []
    for _ in range(num_steps):
        finished.append((log_prob[state.done], noise_prob[state.done], state.draft[state.done]))
        if bool(state.done.all()):
            return [torch.cat(parts) for parts in zip(*finished, strict=True)]
        going = (~state.done).nonzero()[:, 0].repeat_interleave(len(events))
        event = events.repeat(int((~state.done).sum()), 1)
        state, log_prob, noise_prob = state.select(going), log_prob[going], noise_prob[going]
        prediction = predict(model, state, cache=None, knobs=knobs)
        write, renoise = event < vocab_size, event == vocab_size + 1
        decision = Decision(tokens=event.clamp(max=vocab_size - 1), write=write, renoise=renoise)
        law = setting.sampler.law(prediction, state, decision)
        log_prob = log_prob + law.log_prob
        uniforms, weights = noise_outcomes(state, renoise)
        rows, outcome = ((weights > 0) & (log_prob > -torch.inf)[:, None]).nonzero(as_tuple=True)
        log_prob, noise_prob = log_prob[rows], noise_prob[rows] * weights[rows, outcome]
        state = replace(state, memory=law.memory).select(rows)
        state = inject(state, {"noise": uniforms[rows, outcome]})
        prediction = predict(model, state, cache=None, knobs=knobs)
        decision = Decision(tokens=decision.tokens[rows], write=write[rows], renoise=renoise[rows], memory=state.memory)
        state = replace(settle(state, prediction, decision, knobs).state, injected={})
    finished.append((log_prob, noise_prob, state.draft))
    return [torch.cat(parts) for parts in zip(*finished, strict=True)]


@pytest.mark.parametrize("setting", cases(quick=True))
def test_the_probabilities_of_all_runs_add_up_to_one(setting):
    canvas_len, num_steps = (3, 2) if setting.noise.kind == "mask" else (2, 2 if setting.constrained else 3)
    with torch.no_grad():
        log_prob, noise_prob, _ = all_runs(setting, canvas_len, num_steps)
    assert float((log_prob.exp() * noise_prob).sum()) == pytest.approx(1.0, abs=1e-9)


@dataclass(frozen=True)
class Coins(Sampler):
    """The sampler of docs/extending.md, whose positions are drawn."""

    def __call__(self, prediction, state):
        write = state.open & (state.uniform("coin") < prediction.confidence)
        tokens = prediction.sample(state.uniform("token"))
        return Decision(tokens=tokens, write=write, renoise=torch.zeros_like(write))

    def law(self, prediction, state, decision):
        implied = replace(self(prediction, state), write=decision.write & state.open)
        law = law_of_rule(implied, prediction, state, decision, drawn=True)
        share = prediction.confidence.double()
        of_position = torch.where(decision.write, share, 1 - share).log()
        return law._replace(drawn=law.drawn + torch.where(state.open, of_position, 0.0).sum(-1))


@pytest.mark.parametrize("constrained", [False, True])
def test_the_law_of_the_documents_counts_tokens_that_are_drawn_together(constrained):
    setting = Setting(Coins(), MASK, self_cond=False, constrained=constrained)
    with torch.no_grad():
        log_prob, noise_prob, _ = all_runs(setting, 3, 2)
    assert float((log_prob.exp() * noise_prob).sum()) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("setting", cases(quick=False))
def test_the_probability_of_a_run_is_its_frequency(setting):
    """Chi-square over the runs that these rows should take at least five times; the limit is five deviations."""
    num_rows, canvas_len = 2048 if isinstance(setting.sampler, LeaveOneOutGibbs) else 1024, 2
    num_steps = 3 if setting.noise.kind == "mask" or isinstance(setting.sampler, LeaveOneOutGibbs) else 2
    state, model = setting.start(num_rows, canvas_len, num_steps), setting.model
    first = setting.noise.prior(state.uniform("other"))[0]
    state = replace(state, canvas=first.expand(num_rows, -1))
    log_prob, noise_prob, run = torch.zeros(num_rows), torch.ones(num_rows, dtype=torch.float64), [state.canvas]
    with torch.no_grad():
        for _ in range(num_steps):
            share = setting.noise.mask_share(state.next_noise_level)[:, None]
            state, record = step(model, state, cache=None, knobs=setting.knobs)
            log_prob = log_prob + record.log_prob
            drawn = torch.where(setting.noise.masked(state.canvas), share, (1 - share) / NUM_TOKENS)
            noise_prob = noise_prob * torch.where(record.renoised, drawn, 1.0).prod(-1)
            run += [state.canvas, record.accepted, record.renoised]
    runs, index, counts = torch.cat(run, dim=1).unique(dim=0, return_inverse=True, return_counts=True)
    expected = torch.zeros(len(runs), dtype=torch.float64)
    expected[index] = num_rows * (log_prob.exp() * noise_prob)
    assert float(expected.sum()) <= num_rows * (1 + 1e-9)
    often = expected >= 5
    chi = ((counts - expected).square() / expected)[often].sum()
    degrees = int(often.sum())
    assert degrees > 0
    assert chi < degrees + 5 * math.sqrt(2 * degrees)


@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize(
    ("sampler", "noise"),
    [
        (SoftThreshold(tau=0.6, softness=0.2), MASK),
        (SoftThreshold(tau=0.6, softness=0.2), UNIFORM),
        (SoftEntropyBound(bound=0.5, softness=0.3), MASK),
        (SoftEntropyBound(bound=0.5, softness=0.3), UNIFORM),
        (Fork(tau=0.6), MASK),
        (Ancestral(), UNIFORM),
        (P2(), MASK),
        (ReMDM(strategy="conf"), MASK),
    ],
    ids=str,
)
def test_the_policy_gradient_is_the_gradient_of_the_expected_reward(sampler, noise, constrained):
    """Over all runs, with self-conditioning; rewards are random numbers per text. The slope is a central difference."""
    setting = Setting(sampler, noise, self_cond=True, constrained=constrained)
    model, generator = setting.model, torch.Generator().manual_seed(3)
    rewards = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    direction = torch.randn(model.table.shape, generator=generator, dtype=torch.float64)

    def weighed(scale: float) -> tuple[Tensor, Tensor]:
        """The probabilities of all runs times their rewards, and their log-probabilities."""
        model.table = table + scale * direction
        log_prob, noise_prob, draft = all_runs(setting, 2, 2, model)
        return log_prob.exp() * noise_prob * rewards[draft[:, 0], draft[:, 1]], log_prob

    table = model.table.requires_grad_()
    value, log_prob = weighed(0.0)
    (gradient,) = torch.autograd.grad((value.detach() * log_prob).sum(), [table])
    with torch.no_grad():
        expected = (weighed(1e-5)[0].sum() - weighed(-1e-5)[0].sum()) / 2e-5
    assert float((gradient * direction).sum()) == pytest.approx(float(expected), rel=1e-6)
    assert abs(float(expected)) > 1e-4


@pytest.mark.parametrize("noise", [MASK, UNIFORM], ids=["mask", "uniform"])
def test_soft_rules_become_the_hard_rules_as_they_harden(noise):
    pairs = [(SoftEntropyBound(bound=0.5, softness=1e-9), EntropyBound(bound=0.5))]
    if noise is MASK:
        pairs.append((SoftThreshold(tau=0.6, softness=1e-9), Threshold(tau=0.6)))
    for soft, hard in pairs:
        setting = Setting(soft, noise, self_cond=False, constrained=False)
        state = setting.start(64, 4, 3)
        prediction = predict(setting.model, state, cache=None, knobs=setting.knobs)
        shifted = Prediction(prediction.logits + torch.rand(64, 4, 1) * prediction.logits)  # rows differ
        found, wanted = soft(shifted, state), hard(shifted, state)
        assert torch.equal(found.write, wanted.write)
        assert torch.equal(found.tokens, wanted.tokens)
        law = soft.law(shifted, state, replace(wanted, renoise=state.open & ~wanted.write))
        rule = hard.law(shifted, state, wanted)
        torch.testing.assert_close(law.log_prob, rule.log_prob, rtol=1e-9, atol=1e-9)


def test_fork_writes_what_is_sure_or_the_leftmost_open_position():
    logits = torch.tensor([[[0.0, 0, 9], [0, 0, 0], [9, 0, 0]], [[0.0, 0, 1], [0, 0, 0], [2, 0, 0]]])
    state = Setting(Fork(), UNIFORM, self_cond=False, constrained=False).start(2, 3, 3)
    state = replace(state, open=torch.tensor([[True, True, True], [False, True, True]]))
    decision = Fork(tau=0.9)(Prediction(logits), state)
    assert decision.write.tolist() == [[True, False, True], [False, True, False]]
    assert decision.renoise.tolist() == [[False, True, False], [False, False, True]]


def test_tokens_between_two_holes_are_not_constrained():
    """Holes of one token, which must be 0 or 1, on both sides of a free position."""
    automaton = TokenAutomaton(np.array([1, 1, 0]), np.array([[-1, 1], [-1, -1]], np.int32), np.array([False, True]))
    tensors, (start,) = with_gaps(automaton, [0], NUM_TOKENS)
    end = torch.tensor([[False, True, False]]).expand(27, -1)
    gaps = torch.tensor([[False, True, False]]).expand(27, -1)
    language = Language(tensors, torch.full((27,), start), end, gaps=gaps)
    texts = torch.cartesian_prod(*[torch.arange(NUM_TOKENS)] * 3)
    logits = torch.randn(1, 3, NUM_TOKENS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    everywhere = torch.ones_like(texts, dtype=torch.bool)
    conditioned = condition(Prediction(logits.expand(27, -1, -1)), language, texts, ~everywhere)
    probs = torch.stack([logits[0, 0, :2].softmax(0), logits[0, 2, :2].softmax(0)])
    probs = torch.nn.functional.pad(probs, (0, 1))
    expected = probs[0, texts[:, 0]] * logits[0, 1].softmax(0)[texts[:, 1]] * probs[1, texts[:, 2]]
    found = log_written(conditioned, texts, everywhere).exp()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("spread", [3, 3000], ids=["likely", "almost-impossible"])
def test_gumbel_choices_have_the_probability_of_plackett_and_luce(spread):
    """All sets of one to four of four positions, by summing over the orders in which they can be drawn.

    Probabilities are summed as logarithms: with scores that differ by thousands, they are below any float. Then nearly
    all of the probability and of the gradient is that of a single order.
    """
    score = spread * torch.randn(1, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    score.requires_grad_()
    among = torch.tensor([[True, True, False, True, True]])
    for count in (1, 2, 3, 4):
        every = []
        for members in itertools.combinations((0, 1, 3, 4), count):
            of_orders = []
            for order in itertools.permutations(members):
                left, log_prob = [0, 1, 3, 4], torch.tensor(0.0, dtype=torch.float64)
                for position in order:
                    log_prob = log_prob + score[0, position] - score[0, left].logsumexp(0)
                    left.remove(position)
                of_orders.append(log_prob)
            expected = torch.stack(of_orders).logsumexp(0)
            chosen = torch.zeros_like(among).index_fill(1, torch.tensor(members), True)
            found = log_gumbel_choice(score, chosen, among)[0]
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
            if count < 4:  # all four are certain, so nothing depends on their scores
                slopes = [torch.autograd.grad(value, score)[0] for value in (found, expected)]
                torch.testing.assert_close(*slopes, rtol=1e-9, atol=1e-9)
            every.append(found)
        assert torch.stack(every).logsumexp(0).item() == pytest.approx(0.0, abs=1e-10)


def test_a_sampler_without_a_law_says_so():
    class Everything(Sampler):
        pass

    with pytest.raises(NotImplementedError, match=r"Everything has no law, so its runs have no log-probability\."):
        Everything().law(None, None, None)
