"""Several threads use one accelerated model: each gets what it would get alone."""

import threading
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch

import dgemma
from dgemma_kernels import accelerate
from dgemma_kernels.ops.vocabulary import kernel as vocabulary
from kernel_inputs import make_model

pytestmark = pytest.mark.usefixtures("small_chunks")
CANVAS, VOCAB, STEPS = 4, 40, 2


@pytest.fixture(scope="module")
def fast():
    return accelerate(make_model(torch.device("cuda" if torch.cuda.is_available() else "cpu")))


def prompt(seed: int, device: torch.device) -> torch.Tensor:
    return torch.randint(VOCAB, (1, 5), generator=torch.Generator().manual_seed(seed)).to(device)


def write(fast, seed: int, on_step=None) -> list[torch.Tensor]:
    """Generate one canvas of one row. Return its tokens and the recorded predictions of every step."""
    options = {"max_new_tokens": CANVAS, "steps": STEPS, "stop": None, "eos_token_ids": [], "progress": False}
    out = dgemma.generate(
        fast, prompt(seed, fast.device), seed=seed, record=True, record_top=2, on_step=on_step, **options
    )
    return [out.new_tokens.cpu(), *(out.trajectory.array(name) for name in ("canvas", "entropy", "top_tokens"))]


@pytest.fixture(scope="module")
def alone(fast) -> list[list[torch.Tensor]]:
    """The texts of seeds 0 and 1 without other threads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "CHUNK", 16)
        return [write(fast, seed) for seed in range(2)]


@pytest.mark.parametrize("method", ["encode", "causal_logits", "causal_step", "denoise", "step"])
def test_a_call_waits_while_another_thread_holds_the_turn(fast, method):
    # The arguments are wrong, so that the call ends in an error as soon as it has the turn.
    wrong = {"causal_step": {"cache": None, "rule": None}, "step": {"cache": None, "knobs": None}}.get(method, {})
    arguments = (None, None) if method == "denoise" else (None,)
    with ThreadPoolExecutor(1) as threads:
        with fast.turn:
            call = threads.submit(getattr(fast, method), *arguments, **wrong)
            assert not wait([call], timeout=0.05).done
        assert call.exception(timeout=60) is not None


def test_logits_stay_readable_until_their_own_thread_takes_the_next_step(fast):
    stepper, place = fast._stepper, fast._stepper.place(torch.Size((1, 2)))
    mine = stepper.renew(place)
    mine.read().fill_(0.0)
    with ThreadPoolExecutor(1) as threads:
        theirs = threads.submit(stepper.renew, place).result()
    place.logits.fill_(1.0)  # the other thread's step
    assert mine.read().eq(0).all()
    assert theirs.read().eq(1).all()
    first, _ = stepper.renew(place), stepper.renew(place)
    with pytest.raises(RuntimeError, match="overwritten by a later step"):
        first.read()


@pytest.mark.slow
@pytest.mark.parametrize("is_free", [True, False], ids=["freely", "alternating"])
def test_two_threads_write_what_each_writes_alone(fast, alone, is_free):
    both = threading.Barrier(2, timeout=60)

    def alternate(record):
        both.wait()  # by now the other thread has taken its step and overwritten the shared logits
        record.prediction.top(3)  # this thread can still read its own
        both.wait()

    with ThreadPoolExecutor(2) as threads:
        together = list(threads.map(lambda seed: write(fast, seed, None if is_free else alternate), range(2)))
    for want, got in zip(alone, together, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs streams")
def test_threads_with_separate_streams_write_what_each_writes_alone(fast):
    alone = [write(fast, seed) for seed in range(4)]

    def write_aside(seed):
        with torch.cuda.stream(torch.cuda.Stream()):
            return write(fast, seed)

    for _ in range(5):
        with ThreadPoolExecutor(4) as threads:
            together = list(threads.map(write_aside, range(4)))
        for want, got in zip(alone, together, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
