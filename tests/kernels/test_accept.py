"""Accept, renoise and stop against the library's sampler and stop rule, and against cases worked by hand."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dgemma import draws
from dgemma.noise import UniformNoise
from dgemma.prediction import Prediction
from dgemma.sampling.entropy_bound import EntropyBound
from dgemma.sampling.stopping import StableAndConfident
from dgemma_kernels import accept as kernel
from dgemma_kernels import reference
from toy import fresh_state

VOCAB = 262_144
TWINS = pytest.mark.parametrize("twin", [kernel, reference], ids=["kernel", "reference"])


def inputs(entropy: Tensor, **changes: Tensor) -> dict[str, Tensor]:
    """A batch in its second step: sampled tokens 1000 + position, argmax 2000 + position, unchanged since the first."""
    batch, canvas_len = entropy.shape
    position = torch.arange(canvas_len, device=entropy.device).expand(batch, -1).contiguous()
    row = torch.arange(batch, device=entropy.device)
    tensors = {
        "entropy": entropy,
        "tokens": 1000 + position,
        "argmax": 2000 + position,
        "canvas": 3000 + position,
        "frozen": torch.zeros_like(position, dtype=torch.bool),
        "previous": 2000 + position,
        "done": torch.zeros_like(row, dtype=torch.bool),
        "seeds": 7 + row,
        "block": 3 + 0 * row,
        "step": 1 + 0 * row,
    }
    return tensors | changes


def run(twin, tensors: dict[str, Tensor], *, bound: float = 0.1, confidence: float = 0.005, vocab_size: int = VOCAB):
    return twin.accept(**tensors, bound=bound, confidence=confidence, vocab_size=vocab_size)


@TWINS
def test_published_fixture_accepts_the_two_most_certain(twin, device):
    # Logits [5,0,0,0,0], [1,0…], [9,0…], [0…] have entropies .1578, 1.5002, .0049, 1.6094; the published sampler with
    # bound 0.1 accepts positions 0 and 2.
    logits = torch.zeros(4, 5)
    logits[:, 0] = torch.tensor([5.0, 1.0, 9.0, 0.0])
    entropy = torch.distributions.Categorical(logits=logits).entropy()[None].to(device)
    assert run(twin, inputs(entropy)).accept.tolist() == [[True, False, True, False]]


@TWINS
@pytest.mark.parametrize("canvas_len", [5, 16, 40], ids=["under-a-block", "one-block", "ragged"])
def test_zero_bound_accepts_exactly_the_most_certain_position(twin, canvas_len, device):
    entropy = torch.rand(3, canvas_len, generator=torch.Generator().manual_seed(1)).to(device) + 0.1
    result = run(twin, inputs(entropy), bound=0.0)
    assert result.accept.sum(-1).tolist() == [1, 1, 1]
    assert result.accept.int().argmax(-1).tolist() == entropy.argmin(-1).tolist()


@TWINS
def test_of_equal_entropies_the_first_position_wins(twin, device):
    # 0.25 is exact: three of them make 0.75, and the fourth exclusive sum is the first above the bound of 0.7.
    result = run(twin, inputs(torch.full((1, 8), 0.25, device=device)), bound=0.7)
    assert result.accept.tolist() == [[True, True, True, False, False, False, False, False]]


@TWINS
def test_refused_positions_get_the_counters_noise(twin, device):
    entropy = torch.linspace(0.01, 2.0, 40).repeat(2, 1).to(device)
    seeds = torch.tensor([5, -(1 << 40) + 3])  # a seed of more than 32 bits and a negative one
    tensors = inputs(entropy, seeds=seeds.to(device), step=torch.tensor([0, 47]).to(device))
    result = run(twin, tensors)
    u = draws.uniform(seeds, torch.tensor([3, 3]), torch.tensor([0, 47]), 40, "noise")
    want = torch.where(result.accept.cpu(), 1000 + torch.arange(40), draws.integers(u, VOCAB))
    assert result.canvas.cpu().tolist() == want.tolist()
    assert 0 < result.accept.sum() < 80


@TWINS
def test_frozen_positions_stay_and_cost_nothing(twin, device):
    entropy = torch.tensor([[0.06, 5.0, 0.06, 0.06]], device=device)
    frozen = torch.tensor([[False, True, False, False]], device=device)
    result = run(twin, inputs(entropy, frozen=frozen))
    # Exclusive sums of the open ones are 0, .06 and .12.
    assert result.accept.tolist() == [[True, False, True, False]]
    assert result.canvas[0, 1].item() == 3001


@TWINS
@pytest.mark.parametrize(
    ("entropy", "changed", "done"),
    [(0.004, None, True), (0.004, 3, False), (0.006, None, False)],
    ids=["stable-and-confident", "one-argmax-changed", "too-uncertain"],
)
def test_a_row_stops_when_its_argmax_holds_and_its_entropy_is_low(twin, entropy, changed, done, device):
    tensors = inputs(torch.full((1, 9), entropy, device=device))
    if changed is not None:
        tensors["previous"][0, changed] = 0
    assert run(twin, tensors).done.tolist() == [done]


@TWINS
def test_frozen_positions_neither_block_nor_dilute_the_stop(twin, device):
    entropy = torch.tensor([[0.004, 9.0, 0.004], [0.006, 0.0, 0.006]], device=device)
    frozen = torch.tensor([[False, True, False]] * 2, device=device)
    tensors = inputs(entropy, frozen=frozen)
    tensors["previous"][:, 1] = 0
    assert run(twin, tensors).done.tolist() == [True, False]


@TWINS
def test_done_rows_are_left_as_they_were(twin, device):
    tensors = inputs(torch.full((2, 6), 0.5, device=device), done=torch.tensor([True, False], device=device))
    tensors["previous"][0] = 42
    result = run(twin, tensors)
    assert result.canvas[0].tolist() == tensors["canvas"][0].tolist()
    assert result.argmax[0].tolist() == [42] * 6
    assert result.argmax[1].tolist() == tensors["argmax"][1].tolist()
    assert not result.accept[0].any()
    assert result.done.tolist() == [True, False]


def test_a_step_of_the_library_gives_the_same_canvas_and_stop(device):
    logits = torch.randn(3, 24, 50, generator=torch.Generator().manual_seed(4)) * torch.linspace(1, 9, 24)[:, None]
    logits[2] *= 0.1  # too uncertain to stop; row 1 changes its argmax
    prediction = Prediction(logits)
    frozen = (torch.arange(24).expand(3, -1) % 7 == 0).contiguous()
    tensors = inputs(prediction.entropy, frozen=frozen, argmax=prediction.argmax, previous=prediction.argmax.clone())
    tensors["previous"][1, 3] = -1
    state = replace(
        fresh_state(tensors["canvas"], UniformNoise(50), 48),
        **{name: tensors[name] for name in ("frozen", "seeds", "block", "step")},
        open=~frozen,
        stop_memory=tensors["previous"][:, None],
    )
    decision = EntropyBound(bound=0.5)(prediction, state)
    noise = state.noise.refill(state)
    canvas = torch.where(decision.write, decision.tokens, torch.where(decision.renoise, noise, state.canvas))
    done, _ = StableAndConfident(confidence=2.5)(prediction, state)
    assert 0 < decision.write.sum() < decision.write.numel()
    assert done.tolist() == [True, False, False]

    tensors = {name: tensor.to(device) for name, tensor in (tensors | {"tokens": decision.tokens}).items()}
    result = run(kernel, tensors, bound=0.5, confidence=2.5, vocab_size=50)
    assert result.canvas.tolist() == canvas.tolist()
    assert result.done.tolist() == done.tolist()
    assert result.accept.tolist() == decision.write.tolist()


def test_noise_reaches_both_ends_of_a_small_vocabulary(device):
    # 3 tokens over 512 draws: each is missing with probability (2 / 3)**512, which is never.
    entropy = torch.full((2, 256), math.log(3), device=device)
    assert run(kernel, inputs(entropy), bound=0.0, vocab_size=3).canvas[:, 1:].unique().tolist() == [0, 1, 2]


def test_unsupported_input_raises():
    with pytest.raises(ValueError, match="entropy must be contiguous"):
        run(kernel, inputs(torch.zeros(1, 4, dtype=torch.float64)))
    with pytest.raises(ValueError, match="at most 1024"):
        run(kernel, inputs(torch.zeros(1, 1025)))
