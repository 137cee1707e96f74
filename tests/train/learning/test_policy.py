"""The policy gradient is the gradient of the expected reward, by enumeration of all runs of a small model."""

import copy
import functools
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import dgemma
from dgemma.run.step import predict, start_state
from dgemma.train import LoRA, TrainConfig, add_lora, train
from dgemma.train.learning import Problems
from dgemma.train.learning.runs import Runs, roll_out
from learning_toy import (
    CANVAS_LEN,
    HEAT,
    NOISE,
    NUM_TOKENS,
    OPTIONS,
    PROMPT,
    REWARD_OF,
    Digits,
    learn,
    objective,
    share_of_ones,
    small_model,
    table_reward,
)


@functools.cache
def all_runs() -> tuple[dgemma.DiffusionGemma, Runs]:
    """A model and each of its runs, as one group: 4 choices of the positions of the first step, times 9 texts."""
    model, prompt = small_model(), torch.tensor([PROMPT])
    more: Any = {"reward": table_reward, "tokenizer": Digits(), "options": OPTIONS}
    many = roll_out(model, [prompt], [None], torch.arange(2000)[None], **more)
    taken = torch.cat(many.trajectory.array("next_canvas").unbind(), dim=1)  # (2000, 2 · C)
    first = {tuple(run): seed for seed, run in reversed(list(enumerate(taken.tolist())))}
    assert len(first) == 4 * NUM_TOKENS**CANVAS_LEN
    return model, roll_out(model, [prompt], [None], torch.tensor([list(first.values())]), **more)


def expected_score(model: dgemma.DiffusionGemma, speed_weight: float = 0.0) -> Tensor:
    """E[reward - speed_weight · forwards], from the definition: each mask is written in step 1 with probability 1/2."""
    knobs = dgemma.Knobs(sampler=dgemma.Ancestral(), temperature=dgemma.ConstantTemperature(value=HEAT), stop=None)
    cache = model.encode(torch.tensor([[PROMPT]]))
    start = start_state(knobs, NOISE, seeds=torch.tensor([0]), canvas_len=CANVAS_LEN, num_steps=2)
    first = predict(model, start, cache=cache, knobs=knobs)
    total = torch.zeros((), dtype=torch.float64)
    for written in itertools.product((False, True), repeat=CANVAS_LEN):
        early = torch.tensor(written)
        for text in itertools.product(range(NUM_TOKENS), repeat=CANVAS_LEN):
            tokens = torch.tensor([text])
            state = replace(start, canvas=torch.where(early, tokens, NUM_TOKENS), open=~early[None], self_cond=first)
            second = predict(model, state, cache=cache, knobs=knobs)
            log_prob = torch.where(early, first.log_prob(tokens), second.log_prob(tokens)).sum()
            score = REWARD_OF["".join(map(str, text))] - speed_weight * (1 if all(written) else 2)
            total = total + 0.25 * log_prob.exp() * score
    return total


def gradient(value: Tensor, model: dgemma.DiffusionGemma) -> Tensor:
    parts = torch.autograd.grad(value, list(model.parameters()), allow_unused=True, materialize_grads=True)
    return torch.cat([part.flatten() for part in parts])


def run_losses(model, runs, advantages, seed=0, **changes):
    """The losses of all runs, and their probabilities (R,)."""
    losses = objective(**changes)._losses(model, runs, advantages, None, torch.tensor(seed))["policy"]
    return losses, runs.trajectory.log_prob(model).exp().detach()


def test_the_policy_gradient_is_the_gradient_of_the_expected_reward():
    model, runs = all_runs()
    losses, prob = run_losses(model, runs, runs.rewards[0])
    assert float(prob.sum()) == pytest.approx(1.0, abs=1e-12)
    expected = gradient(-expected_score(model), model)
    torch.testing.assert_close(gradient((prob * losses).sum(), model), expected, rtol=1e-9, atol=1e-12)
    assert float(expected.norm()) > 1e-3


def test_leave_one_out_groups_have_the_gradient_of_reward_and_forwards_without_bias():
    """Mean over all groups of two runs, each with its probability."""
    (model, runs), speed_weight = all_runs(), 0.3
    policy = objective(advantage="leave_one_out", speed_weight=speed_weight)
    losses, prob = run_losses(model, runs, torch.ones_like(runs.rewards[0]))
    pairs = torch.cartesian_prod(*[torch.arange(len(prob))] * 2)  # (R², 2)
    groups = runs._replace(rewards=runs.rewards[0][pairs], forwards=runs.forwards[0][pairs])
    of_groups = prob[pairs].prod(1) * (policy.advantages(groups) * losses[pairs]).mean(1)
    expected = gradient(-expected_score(model, speed_weight), model)
    torch.testing.assert_close(gradient(of_groups.sum(), model), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("through_self_cond", [True, False])
def test_a_random_subset_of_steps_is_unbiased(through_self_cond):
    """Mean over both choices of one of two steps."""
    model, runs = all_runs()
    of_choice = {}
    for seed in range(5):
        losses, prob = run_losses(model, runs, runs.rewards[0], seed, num_steps=1, through_self_cond=through_self_cond)
        found = gradient((prob * losses).sum(), model)
        of_choice[float(found.norm())] = found
    assert len(of_choice) == 2
    losses, prob = run_losses(model, runs, runs.rewards[0], through_self_cond=through_self_cond)
    every = gradient((prob * losses).sum(), model)
    torch.testing.assert_close(torch.stack(list(of_choice.values())).mean(0), every, rtol=1e-9, atol=1e-12)


def test_the_kl_estimate_has_the_mean_and_the_gradient_of_its_definition():
    """Its mean is KL(policy ‖ start). Its gradient, runs given, is that of KL(start ‖ policy) in each state."""
    (model, runs), start = all_runs(), small_model()
    with torch.no_grad():
        for weight in start.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1), dtype=weight.dtype)
    policy = objective(kl_weight=1.0, reference=start)
    kl = policy._losses(model, runs, runs.rewards[0], None, torch.tensor(0))["kl"]
    own, other = (runs.trajectory.log_prob(m).detach() for m in (model, start))
    assert float((own.exp() * kl).sum().detach()) == pytest.approx(float((own.exp() * (own - other)).sum()), rel=1e-9)
    steps, of_start = (runs.trajectory.step_log_probs(m) for m in (model, start))
    weight = own.exp() * (of_start - steps).detach().exp()  # probability of the state, times that of start's step
    expected = gradient((own.exp() * steps).sum() - (weight * steps).sum(), model)
    torch.testing.assert_close(gradient((own.exp() * kl).sum(), model), expected, rtol=1e-9, atol=1e-12)


def test_clipping_stops_the_gradient_of_ratios_that_have_gone_far_enough():
    model, runs = all_runs()
    own = runs.trajectory.log_prob(model).detach()[None]
    advantages = torch.ones_like(own[0])
    policy = objective(clip=0.2)
    far = policy._losses(model, runs, advantages, own - 0.5, torch.tensor(0))  # ratio 1.65
    assert far["policy"].tolist() == pytest.approx([-1.2] * own.numel())
    assert not gradient(far["policy"].sum(), model).any()
    assert far["run/clipped"].tolist() == [1.0] * own.numel()
    back = policy._losses(model, runs, -advantages, own - 0.5, torch.tensor(0))
    assert back["policy"].tolist() == pytest.approx([1.6487212707] * own.numel())
    assert not back["run/clipped"].any()
    clamped = policy._losses(model, runs, -advantages, own - 50.0, torch.tensor(0))
    assert clamped["run/ratio"].tolist() == pytest.approx([22026.4657948] * own.numel())


def test_runs_that_top_k_excludes_under_other_weights_have_the_ratio_zero():
    """With r = 0, the loss -min(r A, clip(r) A) is 0 for A = 1, and 1 - clip for A = -1."""
    model, other = small_model(), small_model()
    with torch.no_grad():
        for weight in other.parameters():
            weight.neg_()
    more: Any = {"reward": table_reward, "tokenizer": Digits(), "options": {**OPTIONS, "top_k": 1}}
    runs = roll_out(model, [torch.tensor([PROMPT])], [None], torch.arange(8)[None], **more)
    excluded = runs.trajectory.log_prob(other, strict=False).detach() == -torch.inf
    assert bool(excluded.any())
    advantages = torch.tensor([1.0, -1.0] * 4, dtype=torch.float64)
    # Under the weights that made the runs (`reference`), each token has probability 1.
    policy = objective(clip=0.2, kl_weight=1.0, reference=model)
    of_model = policy._score(model, runs).sum(0, keepdim=True).detach()
    # An engine that rounds may write a token that the model itself excludes: then there is no older probability.
    for old, gain, cost in ((of_model, 0.0, 0.8), (None, -1.0, 1.0)):
        terms = policy._losses(other, runs, advantages, old, torch.tensor(0))
        expected = torch.where(advantages > 0, gain, cost).double()
        torch.testing.assert_close(terms["policy"][excluded].detach(), expected[excluded], rtol=0, atol=1e-4)
        assert terms["kl"].detach().tolist() == [0.0] * 8  # excluded, or equally likely under both
        assert terms["run/excluded"].tolist() == excluded.double().tolist()
        assert bool(gradient((terms["policy"] + terms["kl"]).sum(), other).isfinite().all())


def test_advantages_are_z_scores_within_each_group():
    policy = objective(speed_weight=0.5)
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.1, 0.1, 0.1, 0.1]], dtype=torch.float64)
    forwards = torch.tensor([[2.0, 2.0, 2.0, 2.0], [1.0, 3.0, 1.0, 3.0], [5.0, 5.0, 5.0, 5.0]], dtype=torch.float64)
    found = policy.advantages(Runs(None, rewards, forwards))
    expected = [[3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)], [0.5, -0.5, 0.5, -0.5], [0.0] * 4]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_the_ratio_is_exactly_one_before_the_first_update(tmp_path):
    """Old probabilities come from a pass without gradients; two updates share the runs."""
    _, result = learn(tmp_path, options={**OPTIONS, "max_new_tokens": 2 * CANVAS_LEN})
    ratios = result.log.column("run/ratio")[1]
    assert ratios[0] == ratios[2] == 1.0
    assert ratios[1] != 1.0 != ratios[3]
    lines = result.log.lines()[0]
    names = ("reward", "forwards", "entropy", "ratio", "clipped", "excluded", "spread")
    assert {"loss/policy", *(f"run/{name}" for name in names)} <= lines.keys()
    assert 2 <= lines["run/forwards"] <= 4


def test_an_interrupted_run_continues_with_the_same_bits(tmp_path):
    """It stops between two updates that share their runs, so these are generated again from the earlier weights."""
    whole, _ = learn(tmp_path / "whole")
    _, stopped = learn(tmp_path / "parts", stop_at=3)
    assert stopped.interrupted
    resumed, result = learn(tmp_path / "parts")
    assert result.num_new_steps == 1
    for (name, a), b in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, msg=name)


@pytest.mark.slow
def test_learning_raises_the_reward(tmp_path):
    _, result = learn(tmp_path, steps=40, updates=1, speed_weight=0.1)
    rewards = result.log.column("run/reward")[1]
    assert sum(rewards[-5:]) / 5 > 0.85 > 0.6 > sum(rewards[:5]) / 5


def test_adapters_learn_and_stay_near_the_base_model(tmp_path):
    model = small_model()
    base = copy.deepcopy(model)
    add_lora(model, LoRA(rank=2))
    _, result = learn(tmp_path, model=model, kl_weight=0.1)
    kl = result.log.column("loss/kl")[1]
    assert kl[0] == 0.0 < kl[-1]
    changed = [name for name, weight in model.named_parameters() if "lora_b" in name and weight.any()]
    assert changed
    own = dict(model.named_parameters())
    assert all(torch.equal(weight, own[name]) for name, weight in base.named_parameters() if name in own)


def test_all_weights_need_a_reference_for_a_divergence(tmp_path):
    with pytest.raises(ValueError, match=r"PolicyGradient\.reference must be a model if this one has no adapters"):
        learn(tmp_path, kl_weight=0.1)


@pytest.mark.parametrize("found", [None, 1.0, [0.5], [0.5, math.nan], ["right", "wrong"]])
def test_a_reward_without_a_number_per_text_is_refused(found):
    policy = objective(group=2, reward=lambda texts, answers: found)
    with pytest.raises(ValueError, match="reward must return one finite number for each of 2 texts, got"):
        policy(small_model(), policy.problems(0, range(1)), seeds=torch.tensor([0]))


def test_a_step_needs_all_prompts_of_its_batch(tmp_path):
    """With fewer, every step would skip the same prompts."""
    policy = objective(problems=Problems(prompts=[[0], [1]], answers=[None] * 2, batch_size=2))
    config = TrainConfig(steps=1, batch_size=1, precision="weights", progress=False)
    with pytest.raises(ValueError, match=r"TrainConfig\.batch_size must equal Problems\.batch_size 2, got 1"):
        train(small_model(), policy, policy.problems, config, out=tmp_path)


def test_weights_whose_runs_have_no_numbers_are_restored(tmp_path):
    """The first update makes weights so large that the prediction of the next step is NaN."""
    model, policy = small_model(), objective(reward=share_of_ones)
    config = TrainConfig(steps=4, batch_size=1, lr=1e30, warmup=0, precision="weights", progress=False)
    with pytest.raises(FloatingPointError, match=r"got NaN.* The model is restored from step-000000\."):
        train(model, policy, policy.problems, config, out=tmp_path)
    for weight, start in zip(model.parameters(), small_model().parameters(), strict=True):
        assert torch.equal(weight, start)


def test_runs_may_come_from_another_denoiser(tmp_path):
    copies = []

    def engine(model):
        copies.append(copy.deepcopy(model))
        return copies[-1]

    other, _ = learn(tmp_path / "engine", engine=engine, updates=1, steps=2)
    own, _ = learn(tmp_path / "own", updates=1, steps=2)
    assert len(copies) == 4  # two micro-batches per step
    for a, b in zip(own.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
