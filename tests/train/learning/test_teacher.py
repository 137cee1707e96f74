"""Self-distillation: merged runs, and the exact posterior as the fixed point of their loss, by enumeration."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import dgemma
from dgemma.sampling import Ancestral, EntropyBound, FirstHitting
from dgemma.train.learning import Teacher
from dgemma.train.learning.teacher import merge_steps
from learning_toy import OPTIONS, learn, small_model
from rowwise import RowwiseDenoiser

MASK = 2
PAIR = torch.tensor([[0.4, 0.1], [0.1, 0.4]], dtype=torch.float64)
# Of three tokens with two values each: the third tells, with errors, whether the first two are equal.
JOINT = PAIR[..., None] * torch.tensor([[[0.1, 0.9], [0.8, 0.2]], [[0.8, 0.2], [0.1, 0.9]]], dtype=torch.float64)
NOISE = dgemma.MaskNoise(3, mask_token_id=MASK)


@dataclass
class ExactNetwork(RowwiseDenoiser):
    """The posterior of each token, given the canvas; `bias` (3, 3, 3, 3, 3) is added to the logits of each canvas."""

    config: Any = field(default_factory=lambda: dgemma.presets.tiny().replace(vocab_size=3, canvas_length=3))
    bias: Tensor = field(default_factory=lambda: torch.zeros((3,) * 5, dtype=torch.float64, requires_grad=True))

    def denoise(self, canvas, cache, self_cond=None):
        logits = []
        for row in canvas.tolist():
            law = JOINT
            for position, token in enumerate(row):
                if token != MASK:
                    law = law * (torch.arange(2) == token).view([2 if i == position else 1 for i in range(3)])
            probs = torch.stack([law.sum((1, 2)), law.sum((0, 2)), law.sum((0, 1))]) / law.sum()
            logits.append(torch.nn.functional.pad(probs.log().clamp(min=-1e3), (0, 1), value=-1e3))
        return dgemma.Prediction(torch.stack(logits) + self.bias[tuple(canvas.T)])


def recorded(model, seeds, steps, **more):
    prompt = torch.zeros(len(seeds), 1, dtype=torch.int64)
    options: Any = {"max_new_tokens": 3, "noise": NOISE, "temperature": 1.0, "stop": None}
    options |= {
        "eos_token_ids": [],
        "seed": seeds,
        "record": True,
        "record_top": 0,
        "progress": False,
        "steps": steps,
        **more,
    }
    return dgemma.generate(model, prompt, **options).trajectory


def loss_of_merged_runs(sampler, steps, every):
    """Return the expected loss of all runs of the exact network, found by seeds, and its gradient."""
    model = ExactNetwork()
    many = recorded(model, list(range(3000)), steps, sampler=sampler)
    events = [many.array(name).int() for name in ("next_canvas", "accepted", "renoised")]
    taken = torch.cat(events).permute(1, 0, 2).flatten(1)
    first = {tuple(run): seed for seed, run in reversed(list(enumerate(taken.tolist())))}
    runs = recorded(model, list(first.values()), steps, sampler=sampler)
    prob = runs.log_prob(model).detach().exp()
    assert float(prob.sum()) == pytest.approx(1.0, abs=1e-12)
    loss = -(prob * merge_steps(runs, every).log_prob(model, strict=False)).sum()
    return float(loss.detach()), torch.autograd.grad(loss, [model.bias])[0]


@pytest.mark.parametrize("every", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_the_exact_posterior_is_the_fixed_point_of_runs_of_one_token_per_step(every):
    loss, gradient = loss_of_merged_runs(FirstHitting(), 3, every)
    assert float(gradient.abs().max()) < 1e-12
    marginals = JOINT.sum((1, 2))[:, None, None] * JOINT.sum((0, 2))[:, None] * JOINT.sum((0, 1))
    if every == 3:  # all tokens from their marginals, in one step
        assert loss == pytest.approx(float(-(JOINT * marginals.log()).sum()), rel=1e-9)


def test_runs_that_write_several_tokens_per_step_move_the_fixed_point():
    """Tokens of one step are independent, so the third token often tells that the first two differ."""
    _, gradient = loss_of_merged_runs(Ancestral(), 2, 2)
    pull = gradient[MASK, MASK, MASK]  # (3, 3), on the empty canvas
    assert float(pull[:2].abs().max()) < 1e-12
    # The first two are written before the third in one run of eight. Then P(equal) is 0.5 instead of 0.8.
    assert float(pull[2, 1]) == pytest.approx((0.8 - 0.5) * (0.9 - 0.2) / 8, rel=1e-9)


def test_merged_steps_write_what_their_steps_wrote_and_kept():
    """Uniform noise, where refused positions return to noise, and rows that finish at different steps."""
    model = small_model(vocab_size=8, canvas_length=4)
    more: Any = {"noise": dgemma.UniformNoise(8), "sampler": EntropyBound(bound=1.0), "max_new_tokens": 8}
    run = recorded(model, list(range(12)), 7, stop=dgemma.StableAndConfident(confidence=2.0), **more)
    assert len(set(run.num_forwards[:, 0].tolist())) > 1
    merged = merge_steps(run, 3)
    assert merged.num_forwards.tolist() == run.num_forwards.tolist()
    for block, row in itertools.product(range(2), range(12)):
        own = [step for step in run if step.block == block and row in step.rows]
        parts = [step for step in merged if step.block == block and row in step.rows]
        assert len(parts) == -(-len(own) // 3)
        for number, part in enumerate(parts):
            steps = own[3 * number : 3 * number + 3]
            at = [int((step.rows == row).nonzero()) for step in (part, *steps)]
            assert torch.equal(part.canvas[at[0]], steps[0].canvas[at[1]])
            assert torch.equal(part.next_canvas[at[0]], steps[-1].next_canvas[at[-1]])
            for position in range(4):
                events = [
                    "write" if step.accepted[place, position] else "renoise" if step.renoised[place, position] else ""
                    for step, place in zip(steps, at[1:], strict=True)
                ]
                last = [event for event in events if event][-1:]
                assert bool(part.accepted[at[0], position]) == (last == ["write"])
                assert bool(part.renoised[at[0], position]) == (last == ["renoise"])
    log_prob = merged.log_prob(model, strict=False)
    assert bool(log_prob.isfinite().all())
    log_prob.sum().backward()
    assert model.layers[0].self_attn.q_proj.weight.grad.any()


def test_merging_single_steps_changes_no_probability_of_drawn_tokens():
    model = small_model(vocab_size=8, canvas_length=4)
    more: Any = {"noise": dgemma.MaskNoise(8, mask_token_id=7), "sampler": dgemma.Confidence(), "max_new_tokens": 8}
    run = recorded(model, [1, 2, 3], 4, **more)
    expected = run.log_prob(model).detach()
    torch.testing.assert_close(merge_steps(run, 1).log_prob(model, strict=False).detach(), expected, rtol=1e-12, atol=0)


def test_a_merged_run_has_the_probability_of_its_tokens_before_top_k():
    """Top-k of the canvas before the merged steps may exclude a token that a later step wrote."""
    model = ExactNetwork()
    run = recorded(model, list(range(6)), 3, sampler=FirstHitting(), top_k=1)
    found = merge_steps(run, 3).log_prob(model, strict=False)
    marginals = torch.stack((JOINT.sum((1, 2)), JOINT.sum((0, 2)), JOINT.sum((0, 1))))
    expected = marginals.gather(1, run.new_tokens.T).log().sum(0)
    torch.testing.assert_close(found.detach(), expected, rtol=1e-12, atol=0)
    assert bool((run.new_tokens != marginals.argmax(1)).any()), "choose seeds with a token that top-k excludes at first"


@pytest.mark.slow
def test_right_slow_runs_teach_the_fast_policy(tmp_path):
    slow = Teacher(options={"steps": 2}, every=2, group=3, right=0.5)
    _, result = learn(tmp_path, updates=1, steps=4, teacher=slow, policy_weight=0.0, options={**OPTIONS, "steps": 1})
    lines = result.log.lines()
    assert all(0 <= line["run/taught"] <= 1 for line in lines)
    assert any(line["loss/teacher"] > 0 for line in lines)
    assert all(line["run/forwards"] == 1 and line["loss/policy"] == 0 for line in lines)
    assert all(line["loss"] == pytest.approx(line["loss/teacher"]) for line in lines)
