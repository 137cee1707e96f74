"""Accept, renoise and stop against the library's sampler and stop rule, and against cases worked by hand."""

import pytest
import torch
from torch import Tensor

from dgemma.diffusion import draws
from dgemma_kernels.ops.accept import kernel, reference
from dgemma_kernels.ops.accept.kernel import Before

VOCAB = 262_144
TWINS = pytest.mark.parametrize("twin", [kernel, reference], ids=["kernel", "reference"])


def inputs(entropy: Tensor, **changes: Tensor) -> dict[str, Tensor]:
    """Make a batch in its second step: sampled tokens are 1000 + position, argmax is 2000 + position in both steps."""
    batch, canvas_len = entropy.shape
    position = torch.arange(canvas_len, device=entropy.device).expand(batch, -1).contiguous()
    row = torch.arange(batch, device=entropy.device)
    tensors = {
        "entropy": entropy,
        "tokens": 1000 + position,
        "argmax": 2000 + position,
        "canvas": 3000 + position,
        "frozen": torch.zeros_like(position, dtype=torch.bool),
        "draft": 4000 + position,
        "recent": 2000 + position[:, None],
        "done": torch.zeros_like(row, dtype=torch.bool),
        "seeds": 7 + row,
        "block": 3 + 0 * row,
        "step": 1 + 0 * row,
        "num_steps": 48 + 0 * row,
    }
    tensors |= changes
    return {"open": ~tensors["frozen"]} | tensors


def run(twin, tensors: dict[str, Tensor], *, bound: float = 0.1, vocab_size: int = VOCAB, **options):
    return twin.accept(Before(**tensors), bound=bound, vocab_size=vocab_size, **{"confidence": 0.005} | options)


@TWINS
@pytest.mark.parametrize("canvas_len", [5, 16, 40], ids=["under-a-block", "one-block", "ragged"])
def test_zero_bound_accepts_exactly_the_most_certain_position(twin, canvas_len, device):
    entropy = torch.rand(3, canvas_len, generator=torch.Generator().manual_seed(1)).to(device) + 0.1
    result = run(twin, inputs(entropy), bound=0.0)
    assert result.accepted.sum(-1).tolist() == [1, 1, 1]
    assert result.accepted.int().argmax(-1).tolist() == entropy.argmin(-1).tolist()


@TWINS
def test_the_first_of_equal_entropies_is_accepted(twin, device):
    # 0.25 is exact: three of them make 0.75, and the fourth exclusive sum is the first above the bound of 0.7.
    result = run(twin, inputs(torch.full((1, 8), 0.25, device=device)), bound=0.7)
    assert result.accepted.tolist() == [[True, True, True, False, False, False, False, False]]


@TWINS
def test_rejected_positions_get_the_noise_of_their_counters(twin, device):
    entropy = torch.linspace(0.01, 2.0, 40).repeat(2, 1).to(device)
    seeds = torch.tensor([5, -(1 << 40) + 3])  # a seed of more than 32 bits and a negative one
    tensors = inputs(entropy, seeds=seeds.to(device), step=torch.tensor([0, 47]).to(device))
    result = run(twin, tensors)
    u = draws.uniform(seeds, torch.tensor([3, 3]), torch.tensor([0, 47]), 40, "noise")
    want = torch.where(result.accepted.cpu(), 1000 + torch.arange(40), draws.integers(u, VOCAB))
    assert result.canvas.cpu().tolist() == want.tolist()
    assert 0 < result.accepted.sum() < 80


@TWINS
def test_positions_after_the_end_of_a_text_do_not_delay_the_end_of_a_row(twin, device):
    tensors = inputs(torch.tensor([[0.004, 0.004, 3.0]], device=device))
    tensors["recent"][0, 0, 2] = 0
    ended = torch.tensor([[False, False, True]], device=device)
    assert run(twin, tensors).done.tolist() == [False]
    result = run(twin, tensors | {"ended": ended})
    assert result.done.tolist() == [True]
    assert result.open.all()


@TWINS
def test_the_verdict_counts_steps_and_detects_nan_and_stray_tokens(twin, device):
    entropy = torch.full((5, 6), 0.5, device=device)
    entropy[1, 4] = torch.nan
    frozen = torch.zeros(5, 6, dtype=torch.bool, device=device)
    frozen[2:4, 1] = True
    tensors = inputs(entropy, frozen=frozen, num_steps=torch.tensor([7, 2, 9, 9, 1], device=device))
    tensors["canvas"][2, 1] = VOCAB  # frozen, so it stays; the third row's stray token is replaced
    tensors["canvas"][3, 0] = -1
    result = run(twin, tensors)
    # Steps left are those after this second step; the last row is past its end.
    assert result.verdict.tolist() == [[5, 0, 7, 7, 0], [0, 1, 0, 0, 0], [0, 0, 1, 0, 0]]


@TWINS
def test_the_verdict_reports_sampled_tokens_outside_the_vocabulary_that_were_not_accepted(twin, device):
    tensors = inputs(torch.tensor([[0.2, 9.0]], device=device))  # the first one alone exceeds the bound of 0.1
    tensors["tokens"][0, 1] = VOCAB
    result = run(twin, tensors)
    assert result.accepted.tolist() == [[True, False]]
    assert result.verdict[2].tolist() == [1]


@pytest.mark.parametrize(
    ("stability", "options", "ends"),
    [
        (None, {"commit_canvas": True}, []),
        (1, {}, [0]),
        (2, {"commit_canvas": True}, [0]),
        (0, {}, [0, 1]),
        (2, {"compare_canvas": True}, [0]),
    ],
    ids=["never", "stable", "patient", "confident", "canvas"],
)
def test_every_field_is_that_of_the_librarys_settle(stability, options, ends, device):
    """The reference calls the library's sampler and `settle`."""
    generator = torch.Generator().manual_seed(4)
    entropy = torch.rand(5, 24, generator=generator).to(device)
    frozen, closed = torch.rand(2, 5, 24, generator=generator).to(device) < 0.2
    frozen[0, :2], frozen[2] = torch.tensor([True, False]), True
    entropy[0, 0], entropy[4] = 100.0, 20 * entropy[4]  # frozen; a row that is too uncertain to stop
    tensors = inputs(entropy, frozen=frozen)
    tensors["open"] &= ~closed
    tensors["done"][3] = True
    tensors["tokens"][~tensors["open"] | tensors["done"][:, None]] = VOCAB  # not proposed, so not reported
    if stability is None:
        tensors["recent"] = None
    else:
        tensors["recent"] = tensors["argmax"][:, None].repeat(1, stability, 1)
        tensors["recent"][0, :, 0] = 0  # frozen
        tensors["recent"][1, -1:] = 0  # the newest of a row's argmaxes is another one
    got, want = (run(twin, tensors, bound=3.0, confidence=0.8, **options) for twin in (kernel, reference))
    for name, theirs in want._asdict().items():
        ours = getattr(got, name)
        assert ours is theirs if theirs is None else torch.equal(ours, theirs), name
    assert got.done.nonzero().flatten().tolist() == [*ends, 2, 3]
    assert 0 < got.accepted[1].sum() < got.accepted.shape[1] - got.renoised[1].sum()
