"""`Trajectory.log_prob` is the log-probability of the recorded decisions, and has gradients."""

from typing import Any

import pytest
import torch

import dgemma

MASK = 7


def small_model(canvas_length: int = 2, vocab_size: int = 8, seed: int = 0) -> dgemma.DiffusionGemma:
    config = dgemma.presets.tiny().replace(canvas_length=canvas_length, vocab_size=vocab_size, initializer_range=0.3)
    torch.manual_seed(seed)
    return dgemma.DiffusionGemma(config, dtype=torch.float64)


def test_the_probabilities_of_all_runs_add_up_to_one():
    """Two canvases of two positions and two tokens, one token per step, have 16 runs."""
    model, count = small_model(), 300
    out = dgemma.generate(
        model,
        torch.full((count, 1), 5),
        max_new_tokens=4,
        steps=2,
        noise=dgemma.MaskNoise(8, mask_token_id=MASK),
        sampler=dgemma.EntropyBound(bound=0.0),
        temperature=8.0,
        stop=None,
        allowed=[1, 2],
        eos_token_ids=[],
        record=True,
        progress=False,
    )
    log_prob = out.trajectory.log_prob(model).detach()
    runs = {tuple(text): value for text, value in zip(out.new_tokens.tolist(), log_prob.exp().tolist(), strict=True)}
    assert len(runs) == 16
    assert sum(runs.values()) == pytest.approx(1.0, abs=1e-9)
    often = max(runs, key=lambda run: runs[run])
    share = (out.new_tokens == torch.tensor(often)).all(1).double().mean().item()
    assert share == pytest.approx(runs[often], abs=4 * (runs[often] / count) ** 0.5)


@pytest.mark.parametrize(
    ("noise", "sampler"),
    [
        (dgemma.UniformNoise(8), dgemma.EntropyBound(bound=1.0)),
        (dgemma.UniformNoise(8), dgemma.LeaveOneOutGibbs()),
        (dgemma.MaskNoise(8, mask_token_id=MASK), dgemma.Ancestral()),
    ],
)
def test_log_prob_adds_up_what_the_steps_predicted(noise, sampler):
    """Rows end in different blocks, a callback changes the temperature, and the run continues a cache."""
    model = small_model(canvas_length=4)
    cache = model.encode(torch.tensor([[1, 2], [3, 4], [5, 6]]))
    sums = torch.zeros(3, dtype=torch.float64)

    def add(record: dgemma.StepRecord) -> Any:
        tokens = record.state.canvas
        log_prob = torch.where(record.accepted, record.prediction.log_prob(tokens), 0.0).sum(1)
        sums.index_add_(0, record.rows, log_prob.detach())
        return {"temperature": 0.7} if int(record.step[0]) == 1 else None

    out = dgemma.generate(
        model,
        torch.tensor([[1], [2], [3]]),
        cache=cache.clone(),
        max_new_tokens=12,
        steps=5,
        noise=noise,
        sampler=sampler,
        eos_token_ids=[2],
        top_k=6,
        on_step=add,
        record=True,
        progress=False,
    )
    assert len(set((out.steps > 0).sum(1).tolist())) > 1, "choose prompts whose rows end in different blocks"
    torch.testing.assert_close(out.trajectory.log_prob(model, cache=cache).detach(), sums, rtol=1e-9, atol=1e-9)


def test_the_gradient_is_that_of_finite_differences():
    model = small_model(canvas_length=4)
    prompt = torch.tensor([[1], [2]])
    options: Any = {"max_new_tokens": 8, "steps": 3, "stop": None, "eos_token_ids": [], "progress": False}
    run = dgemma.generate(model, prompt, record=True, **options).trajectory
    weight = model.layers[0].self_attn.q_proj.weight
    (gradient,) = torch.autograd.grad(run.log_prob(model).sum(), [weight])
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1), dtype=weight.dtype)
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            weight += sign * 1e-6 * direction
            values.append(run.log_prob(model).sum().item())
            weight -= sign * 1e-6 * direction
    slope = (values[0] - values[1]) / 2e-6
    assert (gradient * direction).sum().item() == pytest.approx(slope, rel=1e-5)
    assert abs(slope) > 1e-3


def test_a_constrained_run_is_refused():
    pytest.importorskip("outlines_core")
    model = small_model(canvas_length=8, vocab_size=512)
    constraint = dgemma.Regex("[ab]{2}", dgemma.ByteTokenizer())
    run = dgemma.generate(
        model, torch.tensor([[5]]), max_new_tokens=8, steps=2, constraint=constraint, record=True, progress=False
    ).trajectory
    with pytest.raises(ValueError, match="needs a run without a constraint"):
        run.log_prob(model)
