"""Stop rules: the published one against transformers, the others by hand, and how they combine."""

from dataclasses import replace

import pytest
import torch
from transformers.models.diffusion_gemma.generation_diffusion_gemma import StableAndConfidentStoppingCriteria

from dgemma.diffusion.noise import UniformNoise
from dgemma.diffusion.prediction import Prediction
from dgemma.sampling.confidence import Confidence
from dgemma.sampling.stopping import ConfidenceGap, EndOfText, StableAndConfident, StepCap, StopRule, Unchanged
from toy import LENGTH, SEQUENCES, fresh_state, mask_noise, propagate


def canvas_state(canvas, *, is_open=None, frozen=None, step=1, steps=9):
    canvas = torch.as_tensor(canvas)
    state = fresh_state(canvas, UniformNoise(64), steps)
    state = replace(state, step=torch.full_like(state.step, step))
    if is_open is not None:
        state = replace(state, open=torch.tensor(is_open))
    if frozen is not None:
        state = replace(state, frozen=torch.tensor(frozen))
    return state


def ask(rule, state, predictions):
    """The rule's answers to a run of predictions (logits), step by step."""
    state = replace(state, stop_memory=rule.start(state))
    answers = []
    for logits in predictions:
        done, memory = rule(Prediction(logits), state)
        answers.append(done.tolist())
        state = replace(state, stop_memory=memory)
    return answers


class Answer(StopRule):
    """A rule that returns the given answers in order, and counts its calls."""

    def __init__(self, *answers):
        self.answers = answers

    def start(self, state):
        return 0

    def __call__(self, prediction, state):
        return torch.tensor([self.answers[state.stop_memory]]), state.stop_memory + 1


@pytest.mark.parametrize("stability", [0, 1, 2, 3])
def test_stable_and_confident_agrees_with_transformers(stability):
    batch, canvas_len, vocab, num_steps = 6, 8, 20, 24
    generator = torch.Generator().manual_seed(stability)
    reference = StableAndConfidentStoppingCriteria(stability_threshold=stability, confidence_threshold=0.005)
    rule = StableAndConfident(stability=stability, confidence=0.005)
    state = canvas_state(torch.zeros(batch, canvas_len, dtype=torch.int64))
    state = replace(state, stop_memory=rule.start(state))
    tokens = torch.randint(vocab, (batch, canvas_len), generator=generator)
    seen = set()
    for _ in range(num_steps):
        moved = torch.rand(batch, 1, generator=generator) < 0.3
        tokens = torch.where(moved, torch.randint(vocab, tokens.shape, generator=generator), tokens)
        # Peaks of 6 to 14: mean entropies on both sides of 0.005 nats.
        peak = 6 + 8 * torch.rand(batch, 1, 1, generator=generator)
        logits = peak * torch.nn.functional.one_hot(tokens, vocab) + 0.1 * torch.randn(1, 1, vocab, generator=generator)
        expected = reference(logits.argmax(-1), logits)
        done, memory = rule(Prediction(logits), state)
        assert torch.equal(done, expected)
        state = replace(state, stop_memory=memory)
        seen |= set(done.tolist())
    assert seen == {False, True}  # the run had both


def test_frozen_positions_neither_dilute_the_entropy_nor_count_as_changed():
    sure, flat = [20.0, 0.0], [0.0, 0.0]
    state = canvas_state([[0] * 4], frozen=[[True, True, True, False]])
    wobbling = [torch.tensor([[sure if n % 2 else [0.0, 20.0]] * 3 + [sure]]) for n in range(2)]
    assert ask(StableAndConfident(), state, wobbling) == [[False], [True]]
    # One open position at log 2 = 0.693 nats; averaged over all four it would pass a threshold of 0.2.
    rule = StableAndConfident(confidence=0.2)
    assert ask(rule, state, [torch.tensor([[sure] * 3 + [flat]])] * 2) == [[False]] * 2


def test_a_canvas_frozen_throughout_is_done_once_stable():
    state = canvas_state([[0, 0]], frozen=[[True, True]])
    assert ask(StableAndConfident(stability=0), state, [torch.zeros(1, 2, 4)]) == [[True]]


def test_end_of_text_needs_a_committed_stop_token_with_nothing_open_before_it():
    canvas = [[5, 6, 1, 7], [5, 6, 1, 7], [5, 6, 1, 7], [5, 6, 9, 7], [106, 5, 5, 5]]
    is_open = [
        [False, False, False, True],  # what follows may be open
        [False, True, False, False],  # something before is open
        [False, False, True, True],  # the stop token is noise
        [False, False, False, False],  # no stop token
        [False, True, True, True],  # another stop token, at once
    ]
    rule = EndOfText(token_ids=(1, 106))
    assert ask(rule, canvas_state(canvas, is_open=is_open), [torch.zeros(5, 4, 64)]) == [
        [True, False, False, False, True]
    ]


def law_of_texts(states, stop_token):
    """The distribution of the text: the tokens up to and including the first stop token."""
    law = {}
    for tokens, weight in zip(states.state.draft.tolist(), states.weight.tolist(), strict=True):
        end = tokens.index(stop_token) + 1 if stop_token in tokens else LENGTH
        law[tuple(tokens[:end])] = law.get(tuple(tokens[:end]), 0.0) + weight
    return law


@pytest.mark.parametrize("sampler", [Confidence(), Confidence(block_len=1)], ids=["any-order", "left-to-right"])
def test_ending_at_the_stop_token_never_changes_the_text(sampler):
    stop_token = 2
    whole = propagate(sampler, mask_noise(), steps=3)
    ended = propagate(sampler, mask_noise(), steps=3, stop=EndOfText(token_ids=(stop_token,)))
    expected, found = (law_of_texts(run.states, stop_token) for run in (whole, ended))
    assert found.keys() == expected.keys()
    for text, weight in expected.items():
        assert found[text] == pytest.approx(weight, abs=1e-12)
    if sampler.block_len == 1:  # from left to right, a text that ends early needs fewer forwards
        assert ended.nfe < whole.nfe - 0.1
    assert len(expected) < len(SEQUENCES)


def gap_logits(*gaps):
    """One row whose positions have these gaps between their two best logits."""
    return torch.tensor([[[gap, 0.0, -9.0] for gap in gaps]])


@pytest.mark.parametrize(
    ("step", "threshold"), [(1, 7.5), (3, 7.5), (4, 5.0), (6, 5.0), (7, 2.5), (9, 2.5)], ids=lambda x: str(x)
)
def test_the_required_gap_is_smaller_in_each_third_of_the_run(step, threshold):
    state = canvas_state([[0, 0]], step=step, steps=9)  # after step 1 of 9, ...
    below, at = gap_logits(threshold - 0.6, threshold + 0.4), gap_logits(threshold - 0.5, threshold + 0.5)
    assert ask(ConfidenceGap(), state, [below]) == [[False]]
    assert ask(ConfidenceGap(), state, [at]) == [[True]]


def test_the_gap_is_averaged_over_the_unfrozen_positions_of_the_span():
    logits = gap_logits(0.0, 9.0, 9.0, 0.0)
    assert ask(ConfidenceGap(), canvas_state([[0] * 4]), [logits]) == [[False]]
    assert ask(ConfidenceGap(span=(1, 3)), canvas_state([[0] * 4]), [logits]) == [[True]]
    frozen = [[True, False, False, True]]
    assert ask(ConfidenceGap(), canvas_state([[0] * 4], frozen=frozen), [logits]) == [[True]]


def test_a_gap_too_large_for_probabilities_is_still_a_number():
    # exp(-200) is 0 in float32. The log ratio of probabilities would be infinite, and the row's mean gap with it, which
    # would pass every threshold.
    logits = torch.tensor([[[200.0, 0.0], [0.0, 0.0]]])
    assert ask(ConfidenceGap(thresholds=(101.0, 101.0, 101.0)), canvas_state([[0, 0]]), [logits]) == [[False]]
    assert ask(ConfidenceGap(thresholds=(99.0, 99.0, 99.0)), canvas_state([[0, 0]]), [logits]) == [[True]]


def test_a_position_with_one_allowed_token_does_not_count_for_the_mean():
    rule, state = ConfidenceGap(), canvas_state([[0, 0]])
    allowed = torch.tensor([[[True, False], [True, True]]])
    prediction = Prediction(torch.zeros(1, 2, 2)).shaped(allowed=allowed)
    assert rule(prediction, state)[0].tolist() == [False]
    only = Prediction(torch.zeros(1, 2, 2)).shaped(allowed=torch.tensor([True, False]))
    assert rule(only, state)[0].tolist() == [True]


def test_unchanged_waits_for_a_full_canvas_and_a_step_that_changes_nothing():
    rule, logits = Unchanged(), Prediction(torch.zeros(3, 2, 4))
    before = canvas_state([[0, 1], [0, 1], [0, 1]])
    state = replace(before, stop_memory=rule.start(before), canvas=torch.tensor([[0, 1], [0, 2], [0, 1]]))
    state = replace(state, open=torch.tensor([[False, False], [False, False], [False, True]]))
    assert rule(logits, state)[0].tolist() == [True, False, False]


@pytest.mark.parametrize("first", [0, 24], ids=["whole", "skipping-the-noisier-steps"])
def test_step_cap_counts_the_steps_that_were_run(first):
    memory = StepCap(3).start(canvas_state([[0, 0]], step=first, steps=48))
    answers = []
    for n in (1, 2, 3, 4):
        state = replace(canvas_state([[0, 0]], step=first + n, steps=48), stop_memory=memory)
        done, memory = StepCap(3)(Prediction(torch.zeros(1, 2, 4)), state)
        answers.append(done.item())
    assert answers == [False, False, True, True]


def test_google_compares_the_argmax_with_the_canvas_it_came_from():
    says_zero, says_one = (torch.tensor([[[20.0, 0.0]]]), torch.tensor([[[0.0, 20.0]]]))
    rule = StableAndConfident(compare="canvas")

    def answers(first_canvas, *steps):
        """Each step: what is predicted from the canvas before it, and the canvas after it."""
        state = canvas_state([[first_canvas]])
        state, found = replace(state, stop_memory=rule.start(state)), []
        for logits, canvas in steps:
            done, memory = rule(Prediction(logits), replace(state, canvas=torch.tensor([[canvas]])))
            state = replace(state, stop_memory=memory)
            found.append(done.item())
        return found

    assert answers(0, (says_zero, 0)) == [True]  # the first canvas equals the argmax: done after one step
    assert answers(1, (says_zero, 0), (says_zero, 0)) == [False, True]
    # The argmax is 0 twice, but the canvas was drawn as 1, so the row is not done.
    assert answers(1, (says_zero, 1), (says_zero, 0), (says_zero, 0)) == [False, False, True]
    assert answers(1, (says_zero, 0), (says_one, 1), (says_one, 1)) == [False, False, True]


def test_a_longer_stability_compares_with_as_many_canvases():
    says_zero = torch.tensor([[[20.0, 0.0]]])
    rule = StableAndConfident(compare="canvas", stability=2)
    assert ask(rule, canvas_state([[0]]), [says_zero] * 2) == [[False], [True]]
    assert ask(StableAndConfident(compare="canvas", stability=0), canvas_state([[1]]), [says_zero]) == [[True]]
    frozen = canvas_state([[1]], frozen=[[True]])
    assert ask(StableAndConfident(compare="canvas"), frozen, [says_zero]) == [[True]]


def test_a_span_that_leaves_the_canvas_is_refused_when_the_canvas_is_known():
    ConfidenceGap(span=(1, 4)).start(canvas_state([[0] * 4]))
    with pytest.raises(ValueError, match=r"ConfidenceGap\.span must end within the canvas of 4 tokens, got \(3, 5\)"):
        ConfidenceGap(span=(3, 5)).start(canvas_state([[0] * 4]))


def test_rules_combine_with_or_and_and_and_each_is_called_at_every_step():
    logits = [torch.zeros(1, 2, 4)] * 4
    left, right = Answer(False, True, False, True), Answer(False, False, True, True)
    assert ask(left | right, canvas_state([[0, 0]]), logits) == [[False], [True], [True], [True]]
    assert ask(left & right, canvas_state([[0, 0]]), logits) == [[False], [False], [False], [True]]
    assert ask((left & right) | left, canvas_state([[0, 0]]), logits) == [[False], [True], [False], [True]]
