"""`Trajectory.log_prob` is the log-probability of a run under any weights, and has gradients."""

from typing import Any

import pytest
import torch

import dgemma
from dgemma.sampling import KLASS, P2, Ancestral, Confidence, EntropyBound, LeaveOneOutGibbs, SoftEntropyBound

MASK = dgemma.MaskNoise(8, mask_token_id=7)
UNIFORM = dgemma.UniformNoise(8)


def small_model(canvas_length: int = 4, vocab_size: int = 8, seed: int = 0) -> dgemma.DiffusionGemma:
    config = dgemma.presets.tiny().replace(canvas_length=canvas_length, vocab_size=vocab_size, initializer_range=0.3)
    config = config.replace(num_hidden_layers=1, layer_types=("full_attention",), num_experts=2)
    torch.manual_seed(seed)
    return dgemma.DiffusionGemma(config, dtype=torch.float64)


def recorded(model: dgemma.DiffusionGemma, prompt: torch.Tensor, **more: Any) -> dgemma.Trajectory:
    options: Any = {"max_new_tokens": 8, "steps": 3, "stop": None, "eos_token_ids": [], **more}
    return dgemma.generate(model, prompt, record=True, progress=False, **options).trajectory


@pytest.mark.parametrize(
    ("noise", "sampler"),
    [
        (UNIFORM, EntropyBound(bound=1.0)),
        (MASK, P2()),
        pytest.param(UNIFORM, LeaveOneOutGibbs(choice_temperature=0.5), marks=pytest.mark.slow),
        pytest.param(MASK, KLASS(tau=0.5), marks=pytest.mark.slow),
        pytest.param(MASK, Confidence(quota="cosine", order_temperature=0.5, anneal=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_log_prob_of_a_run_is_the_sum_over_its_steps(noise, sampler):
    """Rows end in different blocks, a callback changes the temperature, and the run continues a cache."""
    model = small_model()
    cache = model.encode(torch.arange(24).view(12, 2) % 7)
    sums = torch.zeros(12, dtype=torch.float64)

    def add(record: dgemma.StepRecord) -> Any:
        sums.index_add_(0, record.rows, record.log_prob.detach())
        return {"temperature": 0.7} if int(record.step[0]) == 1 else None

    more: Any = {"max_new_tokens": 12, "steps": 5, "top_k": 6, "eos_token_ids": [2]}
    more["stop"] = dgemma.StableAndConfident()
    run = recorded(
        model, torch.arange(12)[:, None] % 5, cache=cache.clone(), noise=noise, sampler=sampler, on_step=add, **more
    )
    assert len(set((run.num_forwards > 0).sum(1).tolist())) > 1, "choose prompts whose rows end in different blocks"
    torch.testing.assert_close(run.log_prob(model, cache=cache).detach(), sums, rtol=1e-9, atol=1e-9)
    assert bool(sums.isfinite().all())


def test_a_knob_that_changes_after_the_last_step_of_a_block_applies_to_the_next_block():
    sums = torch.zeros(2, dtype=torch.float64)

    def cool_down(record: dgemma.StepRecord) -> Any:
        sums.add_(record.log_prob.detach())
        return {"temperature": 0.3} if (int(record.block[0]), int(record.step[0])) == (0, 2) else None

    model = small_model()
    run = recorded(model, torch.tensor([[1], [2]]), temperature=1.0, on_step=cool_down, sampler=EntropyBound(bound=1.0))
    torch.testing.assert_close(run.log_prob(model).detach(), sums, rtol=1e-9, atol=1e-9)


def test_a_run_that_was_not_recorded_has_no_trajectory():
    out = dgemma.generate(small_model(), torch.ones(1, 2).long(), max_new_tokens=4, steps=1)
    with pytest.raises(AttributeError, match=r"needs a recorded run\. Pass record=True"):
        out.trajectory.log_prob(small_model())


def slope(model, run, weight, direction, **options):
    """The derivative of the run's log-probability in a direction of one weight, by finite differences."""
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            weight += sign * 1e-6 * direction
            values.append(run.log_prob(model, **options).sum().item())
            weight -= sign * 1e-6 * direction
    return (values[0] - values[1]) / 2e-6


@pytest.mark.parametrize(
    "case",
    [
        *("published", "p2", "soft", "gibbs"),
        *(pytest.param(case, marks=pytest.mark.slow) for case in ("ancestral", "constrained")),
    ],
)
def test_the_gradient_is_that_of_finite_differences_and_flows_through_self_conditioning(case):
    settings: dict[str, Any] = {
        "published": {},
        "ancestral": {"noise": UNIFORM, "sampler": Ancestral()},
        "p2": {"noise": MASK, "sampler": P2()},
        "soft": {"noise": MASK, "sampler": SoftEntropyBound(bound=2.0, softness=0.3), "top_k": 6},
        "gibbs": {"noise": UNIFORM, "sampler": LeaveOneOutGibbs(choice_temperature=0.5), "allowed": range(6)},
    }
    model, more = small_model(), settings.get(case, {})
    if case == "constrained":
        pytest.importorskip("outlines_core")
        model = small_model(vocab_size=512)
        more = {"constraint": dgemma.Regex("[ab]{8}", dgemma.ByteTokenizer()), "sampler": Ancestral()}
    run = recorded(model, torch.tensor([[5], [2]]), **more)
    weight = model.layers[0].self_attn.q_proj.weight
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1), dtype=weight.dtype)
    (gradient,) = torch.autograd.grad(run.log_prob(model).sum(), [weight])
    expected = slope(model, run, weight, direction)
    assert (gradient * direction).sum().item() == pytest.approx(expected, rel=1e-4)
    assert abs(expected) > 1e-3
    (truncated,) = torch.autograd.grad(run.log_prob(model, through_self_cond=False).sum(), [weight])
    assert not torch.allclose(truncated, gradient, rtol=1e-3)


def test_rules_of_other_weights_make_a_run_impossible_unless_they_are_given():
    model = small_model()
    run = recorded(model, torch.tensor([[1], [2]]), noise=MASK, sampler=Confidence())
    own = run.log_prob(model).detach()
    torch.testing.assert_close(run.log_prob(model, strict=False).detach(), own, rtol=0, atol=0)
    other = small_model(seed=1)
    assert run.log_prob(other).detach().tolist() == [-torch.inf, -torch.inf]
    assert bool(run.log_prob(other, strict=False).isfinite().all())


@pytest.mark.slow
def test_the_mean_importance_ratio_is_one_also_where_other_weights_would_keep_other_tokens():
    """Weights that differ a little; the mean over 4,000 runs lies within four standard errors of 1."""
    model, other = small_model(canvas_length=2), small_model(canvas_length=2)
    with torch.no_grad():
        for weight in other.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2), dtype=weight.dtype)
        more: Any = {"noise": UNIFORM, "sampler": Ancestral(), "max_new_tokens": 2, "steps": 2, "temperature": 3.0}
        run = recorded(model, torch.full((4000, 1), 5), **more)
        ratio = (run.log_prob(other) - run.log_prob(model)).exp()
    assert float(ratio.std()) > 0.05
    assert abs(float(ratio.mean()) - 1) < 4 * float(ratio.std()) / 4000**0.5


def test_token_log_probs_are_those_of_the_run_and_add_up_to_the_steps():
    model = dgemma.DiffusionGemma(dgemma.presets.tiny())
    seen = []

    def note(record):  # rows leave the batch when they are finished
        logits = record.prediction.logits.log_softmax(-1)
        tokens = torch.where(record.accepted, record.state.canvas, 0)
        seen.append((record.rows, record.accepted, logits.gather(-1, tokens[..., None])[..., 0]))

    noise = dgemma.MaskNoise(model.config.vocab_size, mask_token_id=4)
    options = {"max_new_tokens": 40, "steps": 5, "noise": noise, "sampler": dgemma.Threshold(tau=0.004)}
    prompt = torch.tensor([[2, 9, 8], [2, 7, 6]])
    run = dgemma.generate(model, prompt, record=True, on_step=note, stop=None, **options).trajectory
    got = run.token_log_probs(model)
    assert got.shape == (len(run), 2, run.plan.canvas_len)
    for step, (rows, written, log_probs) in zip(got, seen, strict=True):
        expected = torch.full_like(step, torch.nan)
        expected[rows] = log_probs.double().masked_fill(~written, torch.nan)
        torch.testing.assert_close(step, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(got.nansum(-1), run.step_log_probs(model, strict=False), rtol=1e-6, atol=1e-6)
    got.nansum().backward()
    assert model.embed_tokens.weight.grad.isfinite().all()
