"""Own tokens are drawn from the first prediction, at its most certain positions with noise, and scored like noise."""

import pytest
import torch
import torch.nn.functional as F

import dgemma
from dgemma import DiffusionGemma, MaskNoise, UniformNoise
from dgemma.train import Objective, TrainBatch, one_pass
from dgemma.train.canvases import OwnDraws
from dgemma.train.one_pass import show_own_tokens

VOCAB, CANVAS_LEN, MASK = 40, 6, 4
BATCH = TrainBatch(
    tokens=torch.arange(5, 5 + 2 * 15).reshape(2, 15), prompt_len=torch.tensor([3, 0]), length=torch.tensor([15, 12])
)
SEEDS = torch.tensor([3, 8])
MASKS = MaskNoise(VOCAB, mask_token_id=MASK)
NOISES = {"uniform": UniformNoise(VOCAB), "masks": MASKS}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    model = DiffusionGemma(
        dgemma.presets.tiny().replace(vocab_size=VOCAB, canvas_length=CANVAS_LEN, num_experts=4), dtype=torch.float64
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model


def objective_of(noise=NOISES["uniform"], **fields):
    return Objective(noise=noise, canvas_len=CANVAS_LEN, canvases="all", own_prob=1.0, **fields)


def predict(model, batch, canvases, z):
    """Return the hidden states of the one pass, and the logits (C, V) of each canvas alone."""
    clean = one_pass.read_clean(model, canvases.tokens[:, : canvases.prefix_len])
    hidden = one_pass.predict_canvases(model, z, canvases.starts, clean)
    rows = [
        [model.denoise(z[row, k][None], model.encode(batch.tokens[row, None, :start])).logits[0] for k, start in pairs]
        for row, pairs in enumerate(enumerate(starts) for starts in canvases.starts.tolist())
    ]
    return hidden, torch.stack([torch.stack(row) for row in rows])


@torch.no_grad()
def test_tokens_have_the_probabilities_of_the_first_prediction(model):
    canvases, noisy = objective_of().draw(BATCH, SEEDS)
    hidden, logits = predict(model, BATCH, canvases, noisy.z)
    num_draws = 2000
    counts = torch.zeros(*noisy.z.shape, VOCAB)
    for u in ((torch.arange(num_draws, dtype=torch.float64) + 0.5) / num_draws).tolist():
        every = OwnDraws(torch.tensor(True), torch.tensor(1.0), torch.full(noisy.z.shape, u))
        z = show_own_tokens(model, noisy._replace(own=every), hidden, None)
        counts += F.one_hot(z, VOCAB)
    clean = F.one_hot(canvases.x, VOCAB).double()
    expected = torch.where(noisy.replaced[..., None], (logits / 0.7).softmax(-1), clean)
    torch.testing.assert_close(counts.double() / num_draws, expected, atol=1 / num_draws, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("share", [0.0, 0.4, 0.99])
def test_the_most_probable_tokens_are_shown_at_a_share_of_the_positions_with_noise(model, share):
    canvases, noisy = objective_of(t_range=(0.8, 0.8)).draw(BATCH, SEEDS)
    hidden, logits = predict(model, BATCH, canvases, noisy.z)
    is_shown = torch.tensor([True, False])[:, None, None].expand(2, 2, 1)
    own = OwnDraws(is_shown, torch.tensor(share), noisy.own.u_token)
    z = show_own_tokens(model, noisy._replace(own=own), hidden, None)
    whole = show_own_tokens(model, noisy._replace(own=own._replace(share=torch.tensor(1.0))), hidden, None)
    assert torch.equal(z[1], noisy.z[1])
    probability = (logits / 0.7).softmax(-1).gather(-1, whole[..., None])[..., 0]
    for k in range(2):
        where = noisy.replaced[0, k].nonzero().flatten().tolist()
        best = sorted(where, key=lambda at, k=k: -probability[0, k, at])[: -int(-share * len(where) // 1)]
        expected = [whole[0, k, at] if at in best else noisy.z[0, k, at] for at in range(CANVAS_LEN)]
        assert z[0, k].tolist() == expected


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
@pytest.mark.parametrize("self_cond_prob", [0.0, 1.0])
def test_the_loss_is_the_cross_entropy_after_canvases_with_own_tokens(model, monkeypatch, noise, self_cond_prob):
    seen, predict_canvases = [], one_pass.predict_canvases

    def spy(model, z, *args, **options):
        seen.append(z)
        return predict_canvases(model, z, *args, **options)

    monkeypatch.setattr(one_pass, "predict_canvases", spy)
    objective = objective_of(noise, self_cond_prob=self_cond_prob)
    terms = objective(model, BATCH, seeds=SEEDS)
    monkeypatch.undo()
    canvases, noisy = objective.draw(BATCH, SEEDS)
    first, z = seen
    assert torch.equal(first, noisy.z)
    assert 0 < (z != first).sum() < noisy.replaced.sum()
    assert torch.equal(z[~noisy.replaced], canvases.x[~noisy.replaced])
    for row in range(2):
        total = 0.0
        for k, start in enumerate(canvases.starts[row].tolist()):
            prefix = BATCH.tokens[row, None, :start]
            before = model.denoise(first[row, k][None], model.encode(prefix)).logits if self_cond_prob else None
            if noise is MASKS and self_cond_prob:
                before[..., MASK] = -torch.inf  # a mask is noise, never a proposal
            logits = model.denoise(z[row, k][None], model.encode(prefix), self_cond=before).logits[0]
            if noise is MASKS:
                logits[:, MASK] = -torch.inf
            total += F.cross_entropy(logits, canvases.x[row, k], reduction="sum")
        torch.testing.assert_close(terms.sums["decoder"][row], total, rtol=1e-9, atol=0)
        alone = objective(model, BATCH.select(slice(row, row + 1)), seeds=SEEDS[row : row + 1])
        torch.testing.assert_close(alone.sums["decoder"][0], terms.sums["decoder"][row], rtol=1e-9, atol=0)


@torch.no_grad()
def test_a_share_of_the_canvases_shows_own_tokens():
    rows = BATCH.select(torch.zeros(300, dtype=torch.int64))
    objective = Objective(noise=UniformNoise(VOCAB), canvas_len=CANVAS_LEN, canvases="all", own_prob=0.25)
    own = objective.draw(rows, torch.arange(300)).noisy.own
    assert abs(own.is_shown.double().mean() - 0.25) < 4 * (0.25 * 0.75 / 600) ** 0.5
    assert abs(own.share.mean() - 0.5) < 4 * (1 / 12 / 600) ** 0.5


@torch.no_grad()
def test_canvases_of_masks_show_none():
    rows = BATCH.select(torch.zeros(20, dtype=torch.int64))
    noisy = objective_of(masks=MASKS, masks_prob=0.5).draw(rows, torch.arange(20)).noisy
    assert 0 < noisy.masked.sum() < noisy.masked.numel()
    assert torch.equal(noisy.own.is_shown[..., 0], ~noisy.masked)
