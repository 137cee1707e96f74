import zlib

import pytest
import torch

import dgemma
from dgemma.diffusion import draws
from rowwise import RowwiseDenoiser

# Random123 1.14.0, tests/kat_vectors, rows "philox4x32 10": counter, key, output.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return [int(word, 16) for word in text.split()]


def as_int64(low, high):
    value = low | high << 32
    return value - (1 << 64) if value >> 63 else value


def row(seed=0, block=0, step=0, num_positions=64, purpose="token"):
    seeds, block, step = (torch.tensor([x]) for x in (seed, block, step))
    return draws.uniform(seeds, block, step, num_positions, purpose)[0]


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS, ids=["zeros", "ones", "digits-of-pi"])
def test_philox_gives_the_published_answers(counter, key, output):
    found = draws.philox(torch.tensor(as_int64(*words(key))), *(torch.tensor(word) for word in words(counter)))
    assert [word.item() for word in found] == words(output)


def test_uniforms_fill_the_half_open_unit_interval_with_53_bits():
    u = row(num_positions=1 << 16)
    assert u.dtype == torch.float64
    assert 0 <= u.min() < 1e-4
    assert 1 - 1e-4 < u.max() < 1
    assert (u * 2**53 == (u * 2**53).floor()).all()
    assert ((u * 2**53) % 2 == 1).double().mean().item() == pytest.approx(0.5, abs=0.02)  # the last bit varies


def test_the_largest_uniform_is_below_one(monkeypatch):
    ones = torch.tensor([[0xFFFFFFFF]])
    monkeypatch.setattr(draws, "philox", lambda *_: (ones, ones, ones, ones))
    assert row(num_positions=1).item() == 1 - 2.0**-53


def test_a_row_does_not_depend_on_its_batch_nor_a_position_on_the_canvas():
    seeds, block, step = torch.tensor([5, -3, 2**40]), torch.tensor([0, 1, 2]), torch.tensor([9, 9, 4])
    batch = draws.uniform(seeds, block, step, 32, "noise")
    for i in range(3):
        alone = draws.uniform(seeds[i : i + 1], block[i : i + 1], step[i : i + 1], 48, "noise")
        assert torch.equal(batch[i], alone[0, :32])


@pytest.mark.parametrize(
    "other",
    [{"seed": 1}, {"seed": 1 << 32}, {"block": 1}, {"step": 1}, {"purpose": "event"}],
    ids=["seed", "high-half-of-seed", "block", "step", "purpose"],
)
def test_every_coordinate_gives_an_independent_stream(other):
    n = 1 << 14
    a, b = row(num_positions=n), row(num_positions=n, **other)
    correlation = torch.corrcoef(torch.stack([a, b]))[0, 1]
    assert correlation.abs() < 5 / n**0.5  # five standard deviations of independent streams
    assert not (a == b).any()


def test_integers_have_equal_cells_up_to_the_last():
    u = torch.tensor([0.0, 0.2, 0.3999, 0.4, 1 - 2.0**-53], dtype=torch.float64)
    assert draws.integers(u, 5).tolist() == [0, 1, 1, 2, 4]
    assert draws.integers(u[-1:], 262144).item() == 262143


def test_seeds_of_32_bits_give_the_draws_of_the_same_seeds_in_64():
    seeds, zero = torch.tensor([0, 7, 2**31 - 1]), torch.zeros(3, dtype=torch.int64)
    assert torch.equal(
        draws.uniform(seeds.int(), zero, zero, 64, "prior"), draws.uniform(seeds, zero, zero, 64, "prior")
    )


def test_gumbel_noise_picks_tokens_with_the_probabilities_of_a_softmax():
    n, logits = 1 << 16, torch.tensor([0.0, 1.0, -2.0], dtype=torch.float64)
    u = torch.stack([row(seed=seed, num_positions=n) for seed in range(3)], dim=-1)  # (n, 3)
    counts = (logits + draws.gumbel(u)).argmax(-1).bincount(minlength=3) / n
    assert counts.tolist() == pytest.approx(logits.softmax(-1).tolist(), abs=5 * 0.5 / n**0.5)
    assert bool(draws.gumbel(torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)).isfinite().all())


@pytest.mark.parametrize("purpose", ["", "token", "training self_cond", "ünïcode 中"])
def test_the_word_of_a_purpose_is_its_crc32(purpose):
    assert draws.purpose_word(purpose) == zlib.crc32(purpose.encode())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "sampler"),
    [(dgemma.UniformNoise(64), dgemma.EntropyBound()), (dgemma.MaskNoise(64, mask_token_id=4), dgemma.Ancestral())],
    ids=["published", "ancestral"],
)
def test_a_step_with_its_draws_compiles_into_one_graph(noise, sampler):
    # `fullgraph` raises at a graph break. The eager backend changes no number. `test_model` compiles the real model.
    model = RowwiseDenoiser()
    cache = model.encode(torch.tensor([[2, 5, 6]]))
    knobs = dgemma.Knobs(sampler=sampler, temperature=dgemma.LinearTemperature(start=0.8, end=0.4))
    start = dgemma.start_state(knobs, noise, seeds=torch.tensor([3]), canvas_len=8, num_steps=4)
    torch._dynamo.reset()
    canvases = []
    for step in (dgemma.step, torch.compile(dgemma.step, fullgraph=True, dynamic=False, backend="eager")):
        state = start
        with torch.no_grad():
            for _ in range(2):
                state, _record = step(model, state, cache=cache, knobs=knobs)
        canvases.append(state.canvas.tolist())
    assert canvases[0] == canvases[1]
