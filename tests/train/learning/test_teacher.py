"""Self-distillation: merged runs, and the exact posterior as the fixed point of their loss, by enumeration."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import dgemma
from dgemma.sampling import Ancestral, EntropyBound
from dgemma.train.learning import Teacher
from dgemma.train.learning.teacher import merge_steps
from learning_toy import OPTIONS, learn, small_model
from rowwise import RowwiseDenoiser

MASK = 2
JOINT = torch.tensor([[0.5, 0.1], [0.15, 0.25]], dtype=torch.float64)  # of two tokens with two values each
NOISE = dgemma.MaskNoise(3, mask_token_id=MASK)


@dataclass
class ExactNetwork(RowwiseDenoiser):
    """The posterior of each token, given the canvas; `bias` (3, 3, 2, 3) is added to the logits of each canvas."""

    config: Any = field(default_factory=lambda: dgemma.presets.tiny().replace(vocab_size=3, canvas_length=2))
    bias: Tensor = field(default_factory=lambda: torch.zeros(3, 3, 2, 3, dtype=torch.float64, requires_grad=True))

    def denoise(self, canvas, cache, self_cond=None):
        logits = []
        for row in canvas.tolist():
            fits = torch.ones_like(JOINT)
            for position, token in enumerate(row):
                if token != MASK:
                    fits = fits * (torch.arange(2) == token).double().unsqueeze(1 - position)
            law = JOINT * fits
            probs = torch.stack([law.sum(1), law.sum(0)]) / law.sum()
            logits.append(torch.nn.functional.pad(probs.log().clamp(min=-1e3), (0, 1), value=-1e3))
        return dgemma.Prediction(torch.stack(logits) + self.bias[canvas[:, 0], canvas[:, 1]])


def recorded(model, seeds, steps, **more):
    prompt = torch.zeros(len(seeds), 1, dtype=torch.int64)
    options: Any = {"max_new_tokens": 2, "noise": NOISE, "sampler": Ancestral(), "temperature": 1.0, "stop": None}
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


@pytest.mark.parametrize(("steps", "every"), [(2, 2), (3, 2)])
def test_the_exact_posterior_is_the_fixed_point_of_merged_runs(steps, every):
    """All runs of the exact network, found by seeds: their probabilities add up to one."""
    model = ExactNetwork()
    many = recorded(model, list(range(3000)), steps)
    events = [many.array(name).int() for name in ("next_canvas", "accepted", "renoised")]
    taken = torch.cat(events).permute(1, 0, 2).flatten(1)
    first = {tuple(run): seed for seed, run in reversed(list(enumerate(taken.tolist())))}
    runs = recorded(model, list(first.values()), steps)
    prob = runs.log_prob(model).detach().exp()
    assert float(prob.sum()) == pytest.approx(1.0, abs=1e-12)
    loss = -(prob * merge_steps(runs, every).log_prob(model, strict=False)).sum()
    (gradient,) = torch.autograd.grad(loss, [model.bias])
    assert float(gradient.abs().max()) < 1e-12
    one_step = -(JOINT * (JOINT.sum(1, keepdim=True) * JOINT.sum(0)).log()).sum()  # both tokens from their marginals
    if steps == every:
        assert float(loss.detach()) == pytest.approx(float(one_step), rel=1e-9)


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


def test_right_slow_runs_teach_the_fast_policy(tmp_path):
    slow = Teacher(options={"steps": 2}, every=2, group=3, right=0.5)
    _, result = learn(tmp_path, updates=1, steps=4, teacher=slow, policy_weight=0.0, options={**OPTIONS, "steps": 1})
    lines = result.log.lines()
    assert all(0 <= line["run/taught"] <= 1 for line in lines)
    assert any(line["loss/teacher"] > 0 for line in lines)
    assert all(line["run/forwards"] == 1 and line["loss/policy"] == 0 for line in lines)
    assert all(line["loss"] == pytest.approx(line["loss/teacher"]) for line in lines)
