import itertools
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma import GenerationDefaults, presets
from dgemma.diffusion.decision import transition
from dgemma.diffusion.noise import HybridNoise, MaskNoise, UniformNoise
from dgemma.diffusion.schedule import Loop
from dgemma.run.options import learnt_noise
from dgemma.sampling.named import describe_noise
from toy import MASK, NUM_TOKENS, exact_network, fresh_state, hybrid_noise, likelihood, mask_noise, uniform_noise

PROCESSES = [
    mask_noise(),
    uniform_noise(),
    hybrid_noise(),
    hybrid_noise(uniform_share=0.6, gamma=2.0),
    hybrid_noise(uniform_share=0.05, gamma=0.5),
]
LEVELS = [(1.0, 0.7), (0.9, 0.2), (0.5, 0.499), (0.3, 0.0)]  # noise level before and after a step


def name(process):
    return f"{process.kind}-{process.gamma}" if process.kind == "hybrid" else process.kind


def level(*values):
    return torch.tensor(values, dtype=torch.float64)


def forward(process, noise_level):
    """The whole (V, V) matrix q(z | x), row x; the mask stays or becomes noise like any token."""
    table = likelihood(process, level(noise_level))[0]
    if process.kind == "uniform":
        return table
    clean = table[0, 0] - table[0, 1]  # the probability that a token is kept
    noise_row = table[0].clone()
    noise_row[0] -= clean
    mask_row = noise_row.clone()
    mask_row[MASK] += clean
    return torch.cat([table, mask_row[None]])


def forward_between(process, before, after):
    """q(z_t | z_s) from the two marginals only: the matrix that maps one to the other."""
    return torch.linalg.solve(forward(process, after), forward(process, before))


@pytest.mark.parametrize("process", PROCESSES, ids=name)
@pytest.mark.parametrize("noise_level", [0.0, 0.3, 1.0])
def test_marginal_is_the_published_mixture(process, noise_level):
    tokens = torch.eye(process.vocab_size).double()[:NUM_TOKENS]
    torch.testing.assert_close(
        process.marginal(tokens, level(1 - noise_level)), likelihood(process, level(noise_level))[0], atol=1e-15, rtol=0
    )


@pytest.mark.parametrize("process", PROCESSES, ids=name)
@pytest.mark.parametrize("levels", LEVELS, ids=str)
def test_the_posterior_follows_from_bayes_rule(process, levels):
    before, after = levels
    to_s, to_t = forward(process, after)[:NUM_TOKENS], forward(process, before)[:NUM_TOKENS]  # (x, z)
    joint = to_s[:, :, None] * forward_between(process, before, after)[None]  # (x, z_s, z_t)
    for x, z_t in itertools.product(range(NUM_TOKENS), range(process.vocab_size)):
        if to_t[x, z_t] == 0:
            continue  # a canvas that cannot occur
        x_probs = torch.eye(process.vocab_size).double()[x]
        found = process.posterior(torch.tensor(z_t), x_probs, level(1 - before)[0], level(1 - after)[0])
        torch.testing.assert_close(found, joint[x, :, z_t] / to_t[x, z_t], atol=1e-12, rtol=0)


@pytest.mark.parametrize("levels", LEVELS, ids=str)
def test_uniform_posterior_is_the_closed_form_of_duo(levels):
    """The formula of arXiv:2506.10892 for a distribution over x, as plug-in samplers use it."""
    alpha_t, alpha_s = 1 - levels[0], 1 - levels[1]
    a, k = alpha_t / alpha_s, NUM_TOKENS
    x = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    for z_t in range(k):
        z = torch.eye(k).double()[z_t]
        above = k * alpha_t * x * z + (a - alpha_t) * z + (alpha_s - alpha_t) * x + (1 - a) * (1 - alpha_s) / k
        expected = above / (k * alpha_t * (x @ z) + 1 - alpha_t)
        found = uniform_noise().posterior(torch.tensor(z_t), x, level(alpha_t)[0], level(alpha_s)[0])
        torch.testing.assert_close(found, expected, atol=1e-14, rtol=0)


@pytest.mark.parametrize("process", PROCESSES, ids=name)
@pytest.mark.parametrize("levels", LEVELS, ids=str)
def test_clean_stay_and_noise_routes_add_up_to_the_posterior(process, levels):
    before, after = levels
    pairs = torch.cartesian_prod(torch.arange(NUM_TOKENS), torch.arange(process.vocab_size))
    x0, z = pairs[:, :1], pairs[:, 1:]
    clean, stay = process.routes(x0, z, level(before).expand(len(pairs)), level(after).expand(len(pairs)))
    one_hot = torch.eye(process.vocab_size).double()
    noise = likelihood(process, level(after))[0, 0].clone()
    noise[0] = noise[0] - (likelihood(process, level(after))[0, 0, 0] - likelihood(process, level(after))[0, 1, 0])
    noise = noise / noise.sum() if after else noise  # at level 0 the noise route must have probability 0
    law = clean * one_hot[x0[:, 0]] + stay * one_hot[z[:, 0]] + (1 - clean - stay) * noise
    expected = process.posterior(z[:, 0], one_hot[x0[:, 0]], level(1 - before), level(1 - after))
    torch.testing.assert_close(law, expected, atol=1e-12, rtol=0)


def test_an_event_keeps_its_probability_of_1e_minus_7():
    """A 24-bit uniform would make it 1.2e-7, a fifth more (arXiv:2409.02908). Here the event has its own draw."""
    state = replace(
        fresh_state(torch.full((4, 1), MASK), mask_noise(), 1),
        noise_level=torch.ones(4).double(),
        next_noise_level=torch.full((4,), 1 - 1e-7, dtype=torch.float64),
        injected={"event": level(0.0, 0.999e-7, 1.001e-7, 0.5)[:, None]},
    )
    assert transition(torch.zeros(4, 1, dtype=torch.int64), state).write[:, 0].tolist() == [True, True, False, False]


@pytest.mark.parametrize("process", [p for p in PROCESSES if p.kind != "mask"], ids=name)
@pytest.mark.parametrize("noise_level", [0.9, 0.4, 0.01])
def test_mean_and_leave_one_out_convert_into_each_other(process, noise_level):
    """Both by enumeration of the toy's 27 texts, on every canvas."""
    canvas = torch.cartesian_prod(*[torch.arange(process.vocab_size)] * 3)
    mean, loo = (exact_network(process, p).at(noise_level).denoise(canvas, None).logits for p in ("mean", "loo"))
    levels = level(noise_level).expand(len(canvas))
    to_loo, to_mean = process.to_loo(mean, canvas, levels), process.to_mean(loo, canvas, levels)
    torch.testing.assert_close(to_loo.softmax(-1), loo.softmax(-1), atol=1e-14, rtol=0)
    torch.testing.assert_close(to_mean.softmax(-1), mean.softmax(-1), atol=1e-14, rtol=0)


def test_under_masking_a_token_is_certain_and_a_mask_carries_no_evidence():
    logits = torch.randn(1, 2, 4, generator=torch.Generator().manual_seed(0)).double()
    mean = mask_noise().to_mean(logits, torch.tensor([[1, MASK]]), level(0.5))
    assert mean[0, 0].tolist() == [-math.inf, 0.0, -math.inf, -math.inf]
    torch.testing.assert_close(mean[0, 1], logits[0, 1], atol=0, rtol=0)
    torch.testing.assert_close(mask_noise().to_loo(logits, torch.tensor([[1, MASK]]), level(0.5)), logits)


def grid(n):
    return ((torch.arange(n) + 0.5) / n).double()


@pytest.mark.parametrize("process", PROCESSES, ids=name)
def test_corrupt_draws_the_published_mixture(process):
    """On a grid of both uniforms; frequencies are exact to one cell of the grid."""
    n, x, t = 600, 1, 0.4
    event, token = grid(n)[:, None].expand(n, n), grid(n)[None, :].expand(n, n)
    z = process.corrupt(torch.full((n, n), x), level(t).expand(n), event, token)
    frequency = torch.bincount(z.flatten(), minlength=process.vocab_size) / n**2
    torch.testing.assert_close(frequency.double(), likelihood(process, level(t))[0, x], atol=2.5 / n, rtol=0)


def test_prior_is_uniform_or_all_masks():
    u = grid(300)[None]
    assert torch.bincount(uniform_noise().prior(u)[0]).tolist() == [100, 100, 100]
    assert (mask_noise().prior(u) == MASK).all()
    assert (hybrid_noise().prior(u) == MASK).all()


@pytest.mark.parametrize("next_level", [0.0, 0.6], ids=["last-step", "mid-run"])
def test_hybrid_refill_mixes_masks_and_tokens_according_to_its_level(next_level):
    process = HybridNoise(6, mask_token_id=2, uniform_share=0.5)
    frequency = torch.bincount(process.refill(grid(5000)[None], level(next_level))[0], minlength=6) / 5000
    # c = 2·(t(1-t))^(1/2), and c/t grows without bound as t goes to 0
    share = 0.6 / (0.6 + 2 * math.sqrt(0.24)) if next_level else 0.0
    expected = [share if token == 2 else (1 - share) / 5 for token in range(6)]
    assert frequency.tolist() == pytest.approx(expected, abs=1e-3)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_noise_never_leaves_the_allowed_set_and_is_uniform_on_it(data):
    vocab = data.draw(st.integers(2, 9))
    allowed = torch.tensor(data.draw(st.lists(st.booleans(), min_size=vocab, max_size=vocab).filter(any)))
    cells = 60 * int(allowed.sum())
    u = grid(cells)[None]
    counts = torch.bincount(UniformNoise(vocab).prior(u, allowed=allowed)[0], minlength=vocab)
    assert counts.tolist() == [60 if ok else 0 for ok in allowed.tolist()]


def test_allowed_sets_may_differ_by_row_and_position_and_never_exclude_the_mask():
    process = HybridNoise(5, mask_token_id=4, uniform_share=0.5)
    allowed = torch.zeros(2, 3, 5, dtype=torch.bool)
    want = torch.tensor([[0, 1, 2], [3, 2, 0]])
    allowed.scatter_(-1, want[..., None], True)
    tokens, masks = (
        process.refill(torch.full((2, 3), u).double(), level(0.5, 0.5), allowed=allowed) for u in (0.999, 0.001)
    )
    assert tokens.tolist() == want.tolist()
    assert (masks == 4).all()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: MaskNoise(4, mask_token_id=4), "MaskNoise.mask_token_id must be an id below 4, got 4"),
        (lambda: HybridNoise(8, uniform_share=1.0), "HybridNoise.uniform_share must lie in .*got 1.0"),
        (lambda: HybridNoise(8, gamma=3.0), "HybridNoise.gamma must lie in .*got 3.0"),
    ],
)
def test_impossible_processes_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def saying(noise, vocab_size=NUM_TOKENS + 1):
    """A model whose checkpoint has this description of its noise."""
    config = presets.tiny().replace(vocab_size=vocab_size, pad_token_id=0, bos_token_id=1)
    return SimpleNamespace(config=config, generation=GenerationDefaults.from_hf({"noise": noise}))


@pytest.mark.parametrize("process", PROCESSES, ids=name)
def test_a_process_is_rebuilt_from_its_description_in_a_checkpoint(process):
    kept = json.loads(json.dumps(describe_noise(replace(process, schedule=Loop()))))
    assert learnt_noise(saying(kept, process.vocab_size)) == process  # the description has no schedule


def test_a_checkpoint_without_a_noise_has_the_published_one():
    assert learnt_noise(saying(None)) == UniformNoise(NUM_TOKENS + 1)


def test_a_process_that_cannot_be_rebuilt_is_refused_and_not_replaced():
    class Own(HybridNoise):
        pass

    with pytest.raises(ValueError, match=r"noise must be one of uniform, mask, hybrid, got 'Own'\. Pass"):
        learnt_noise(saying(describe_noise(Own(NUM_TOKENS + 1, mask_token_id=MASK))))
    with pytest.raises(ValueError, match=r"noise must fit mask, which takes mask_token_id=…, got 'mask=3'.*config"):
        learnt_noise(saying({"kind": "mask", "mask": 3}))


@pytest.mark.parametrize("process", PROCESSES, ids=name)
def test_a_level_per_row_applies_to_rows_even_if_there_are_as_many_positions(process):
    vocab_size = process.vocab_size
    x = torch.rand(2, 2, vocab_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(-1)
    z_t, alpha_t, alpha_s = torch.tensor([[0, 1], [1, 0]]), level(0.3, 0.5), level(0.4, 0.9)
    posterior, marginal = process.posterior(z_t, x, alpha_t, alpha_s), process.marginal(x, alpha_s)
    for row in range(2):
        one = process.posterior(z_t[row], x[row], alpha_t[row], alpha_s[row])
        torch.testing.assert_close(posterior[row], one)
        torch.testing.assert_close(marginal[row], process.marginal(x[row], alpha_s[row]))
