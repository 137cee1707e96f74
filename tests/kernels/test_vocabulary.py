"""The vocabulary pass against float64 softmax and against `Prediction`, which has no chunks."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dgemma.diffusion.prediction import Allow, Prediction, SoftCap
from dgemma_kernels.engine.prediction import FusedPrediction, Logits
from dgemma_kernels.ops.vocabulary import kernel as vocabulary
from dgemma_kernels.ops.vocabulary import reference
from dgemma_kernels.ops.vocabulary.kernel import Shaping, pack_allowed

CHUNK = 128  # instead of 4,096, because the interpreter adds a chunk in a Python loop

VOCABULARIES = pytest.mark.parametrize(
    "vocab_size", [7, CHUNK, CHUNK + 1, 2 * CHUNK + 70], ids=["under-a-chunk", "one-chunk", "one-more", "ragged"]
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
TWINS = pytest.mark.parametrize("twin", [vocabulary, reference], ids=["kernel", "reference"])


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "CHUNK", CHUNK)


def draw(vocab_size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Draw four rows: two of random logits, one with a peak, one of equal logits. Two rows share a temperature."""
    logits = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 6
    logits[2, vocab_size // 2] = 70.0  # far above the cap
    logits[3] = 1.5
    return logits.to(dtype).to(device), torch.tensor([0.8, 0.4125], device=device)


def exact(logits: Tensor, temperature: Tensor, softcap: float | None = 30.0) -> Tensor:
    """Return the processed logits in float64."""
    x = logits.double()
    x = softcap * torch.tanh(x / softcap) if softcap is not None else x
    return x / temperature.double().repeat_interleave(logits.shape[0] // temperature.shape[0])[:, None]


@DTYPES
@VOCABULARIES
@TWINS
def test_statistics_are_those_of_the_capped_softmax_over_the_temperature(twin, vocab_size, dtype, device):
    logits, temperature = draw(vocab_size, dtype, device)
    got = twin.vocabulary_statistics(logits, Shaping(temperature))
    law = torch.distributions.Categorical(logits=exact(logits, temperature))
    best = law.probs.topk(2).values
    # A capped logit of 30 / 0.4 has an absolute error near 2e-5 in float32, which is a probability's relative error.
    close = {"rtol": 5e-5, "atol": 2e-5}
    torch.testing.assert_close(got.entropy.double(), law.entropy(), **close)
    torch.testing.assert_close(got.confidence.double(), best[:, 0], **close)
    torch.testing.assert_close(got.margin.double(), best[:, 0] - best[:, 1], **close)
    torch.testing.assert_close(got.log_normalizer.double(), exact(logits, temperature).logsumexp(-1), **close)
    assert got.argmax.tolist() == [*logits[:3].double().argmax(-1).tolist(), 0]  # where all tie, the lowest id


def test_without_cap_and_temperature_the_distribution_is_the_plain_softmax(device):
    logits, _ = draw(CHUNK + 1, torch.float32, device)
    got = vocabulary.vocabulary_statistics(logits, Shaping(torch.ones(1, device=device), softcap=None))
    law = torch.distributions.Categorical(logits=logits.double())
    torch.testing.assert_close(got.entropy.double(), law.entropy(), rtol=5e-5, atol=2e-5)


def test_ties_across_chunks_go_to_the_lowest_id(device):
    logits = torch.zeros(1, 3 * CHUNK, device=device)
    logits[0, [CHUNK + 9, CHUNK + 70, 2 * CHUNK + 1]] = 5.0
    got = vocabulary.vocabulary_statistics(logits, Shaping(torch.ones(1, device=device)))
    assert got.argmax.item() == CHUNK + 9
    assert got.margin.item() == 0.0


def test_forbidden_tokens_have_probability_zero(device):
    vocab_size = 2 * CHUNK + 70
    logits, temperature = draw(vocab_size, torch.float32, device)
    allowed = torch.zeros(2, vocab_size, dtype=torch.bool, device=device)
    allowed[0, [3, 31, 32, vocab_size - 1]] = True  # none in the middle chunk; 31 and 32 are in two words
    allowed[1, CHUNK + 5] = True  # one alone
    words = pack_allowed(allowed)
    got = vocabulary.vocabulary_statistics(logits, Shaping(temperature, allowed=words))
    x = exact(logits, temperature).masked_fill(~allowed.repeat_interleave(2, 0), -torch.inf)
    law = torch.distributions.Categorical(probs=x.softmax(-1))
    torch.testing.assert_close(got.entropy.double(), law.entropy(), rtol=5e-5, atol=2e-5)
    assert got.argmax.tolist() == x.argmax(-1).tolist()
    assert got.entropy[2:].tolist() == [0.0, 0.0]
    assert got.margin[2:].tolist() == [1.0, 1.0]
    tokens = vocabulary.sample(logits, got, torch.rand(4).double().to(device), Shaping(temperature, allowed=words))
    assert allowed.repeat_interleave(2, 0).gather(1, tokens[:, None]).all()
    weights, scale = vocabulary.soft_probabilities(logits, got, Shaping(temperature, allowed=words))
    torch.testing.assert_close(weights.double() * scale[:, None], law.probs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("k", [1, 3, 70, 10_000])
def test_the_k_largest_logits_keep_their_probabilities(device, k):
    vocab_size = 2 * CHUNK + 70
    logits, temperature = draw(vocab_size, torch.float32, device)
    logits[0, [5, 6, CHUNK, vocab_size - 1]] = logits.max() + 1  # more equal ones than k, which all stay
    floor = vocabulary.kth_largest(logits, k)
    shaping = Shaping(temperature, floor=floor)
    got = vocabulary.vocabulary_statistics(logits, shaping)
    x = exact(logits, temperature)
    kept = x >= x.sort(dim=-1, descending=True).values[:, min(k, vocab_size) - 1 :][:, :1]
    law = torch.distributions.Categorical(probs=x.masked_fill(~kept, -torch.inf).softmax(-1))
    torch.testing.assert_close(got.entropy.double(), law.entropy(), rtol=5e-5, atol=2e-5)
    tokens = vocabulary.sample(logits, got, torch.rand(4).double().to(device), shaping)
    assert kept.gather(1, tokens[:, None]).all()
    weights, scale = vocabulary.soft_probabilities(logits, got, shaping)
    torch.testing.assert_close(weights.double() * scale[:, None], law.probs, rtol=1e-4, atol=1e-6)


@TWINS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("k", [None, 3])
def test_the_fewest_tokens_that_reach_a_share_stay_with_those_as_probable_as_the_last(twin, k, dtype, device):
    logits, temperature = draw(CHUNK + 70, dtype, device)
    floor = None if k is None else twin.kth_largest(logits, k)
    x = exact(logits, temperature)
    probabilities = (x if floor is None else x.masked_fill(logits < floor[:, None], -torch.inf)).softmax(-1)
    for p in (1e-6, 0.3, 0.9):
        kept = logits >= twin.nucleus_floor(logits, Shaping(temperature, floor=floor), p)[:, None]
        least = logits.masked_fill(~kept, torch.inf).amin(-1)
        share, larger = ((probabilities * stay).sum(-1) for stay in (kept, logits > least[:, None]))
        assert (share > p - 1e-5).all()  # float32 sums
        assert (larger < p + 1e-5).all()
    assert (twin.nucleus_floor(logits, Shaping(temperature, floor=floor), 1e-6) == logits.amax(-1)).all()


@TWINS
def test_nan_among_the_logits_is_noticed_after_a_cut_to_the_largest(twin, device):
    logits, temperature = draw(CHUNK + 1, torch.float32, device)
    logits[0, 5], logits[1] = torch.nan, torch.nan
    for floor in (twin.kth_largest(logits, 3), twin.nucleus_floor(logits, Shaping(temperature), 0.5)):
        got = twin.vocabulary_statistics(logits, Shaping(temperature, floor=floor))
        assert got.entropy.isnan().tolist() == [True, True, False, False]


class Sizes(TorchDispatchMode):
    """Notes the size of the largest new tensor, in numbers."""

    def __init__(self, *known):
        super().__init__()
        self.known, self.largest = {tensor.untyped_storage().data_ptr() for tensor in known}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        for tensor in result if isinstance(result, tuple) else (result,):
            is_new = isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.known
            self.largest = max(self.largest, tensor.numel() if is_new else 0)
        return result


def test_the_search_for_the_largest_copies_no_vocabulary_of_whole_chunks(device):
    logits = torch.randn(2, 64 * 20, device=device)
    with Sizes(logits) as sizes:
        vocabulary.kth_largest(logits, 3)
    assert sizes.largest == 2 * 3 * 64  # the chunks with the largest maxima


def test_a_mask_copies_one_slice_of_positions_at_a_time(monkeypatch, device):
    monkeypatch.setattr("dgemma.diffusion.prediction._SLICE_ELEMENTS", 2 * 2 * 640)  # two positions of two rows
    logits, allowed = torch.randn(2, 5, 640, device=device), torch.rand(2, 5, 640, device=device) < 0.3
    fused = FusedPrediction(Logits(logits), (SoftCap(30.0),)).shaped(allowed=allowed, top_k=3)
    with Sizes(logits, allowed) as sizes:
        floor = fused._find_floor(3, Allow(allowed))
    assert sizes.largest == 2 * 2 * 640
    assert torch.equal(floor, logits.masked_fill(~allowed, -torch.inf).sort(-1).values[..., -3].flatten())


@DTYPES
@VOCABULARIES
@TWINS
def test_sample_equals_prediction_sample_for_the_same_uniform(twin, vocab_size, dtype, device):
    logits, temperature = draw(vocab_size, dtype, device)
    shaped = exact(logits, temperature)
    u = torch.tensor([0.0, 0.3, 0.999999, 0.6180339887], dtype=torch.float64, device=device)
    statistics = twin.vocabulary_statistics(logits, Shaping(temperature))
    got = twin.sample(logits, statistics, u, Shaping(temperature))
    assert got.tolist() == Prediction(shaped[None]).sample(u[None])[0].tolist()


@VOCABULARIES
@TWINS
def test_soft_probabilities_in_float8_are_the_nearest_to_the_softmax(twin, vocab_size, device):
    logits, temperature = draw(vocab_size, torch.float32, device)
    statistics = twin.vocabulary_statistics(logits, Shaping(temperature))
    weights, scale = twin.soft_probabilities(logits, statistics, Shaping(temperature), float8=True)
    want = exact(logits, temperature).softmax(-1)
    assert weights.dtype == torch.float8_e4m3fn
    assert weights.float().amax(-1).tolist() == [448.0] * 4
    torch.testing.assert_close(scale.double(), want.amax(-1) / 448, rtol=1e-5, atol=0)
    # Half a step: 1/16 of a value, or half of the smallest value, 2**-9.
    off = (weights.double() - want / scale[:, None]).abs()
    assert (off <= torch.maximum(want / scale[:, None] / 16, torch.tensor(2.0**-10)) * 1.001).all()


@DTYPES
@VOCABULARIES
@TWINS
def test_soft_probabilities_are_the_softmax_of_rounded_logits(twin, vocab_size, dtype, device):
    if twin is vocabulary and dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("Triton's interpreter truncates to bfloat16 instead of rounding.")
    logits, temperature = draw(vocab_size, dtype, device)
    statistics = twin.vocabulary_statistics(logits, Shaping(temperature))
    weights, scale = twin.soft_probabilities(logits, statistics, Shaping(temperature))
    # As in transformers: processed in float32, rounded to the embedding's dtype, softmax in float32. The weights are
    # rounded as its probabilities would be: in bfloat16 by at most 2e-3.
    processed = torch.tanh(logits.float() / 30.0) * 30.0 / temperature.repeat_interleave(2)[:, None]
    want = processed.to(dtype).softmax(-1, dtype=torch.float32)
    assert weights.dtype == dtype
    # A logit between two 16-bit values may round differently; that is rare and hardly changes the norm.
    assert ((weights.double() * scale[:, None] - want.double()).norm() / want.double().norm()).item() < 2e-3
    # Without the first rounding, bfloat16 would be off by several per cent.
    if dtype == torch.bfloat16 and vocab_size > CHUNK:
        plain = processed.softmax(-1)
        assert ((plain.double() - want.double()).norm() / want.double().norm()).item() > 2e-3
