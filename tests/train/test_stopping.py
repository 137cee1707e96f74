"""A run limited by minutes ends in time with its learning rate at the floor, at any pace of its steps."""

import signal
import time

import pytest

import next_token
from dgemma.train import RowMean, TrainConfig, train
from next_token import counting

MINUTES = 2
SECONDS = 60 * MINUTES
PEAK, FLOOR = 1e-2, 0.1


def shrink(model, batch, seeds):
    """A minimal loss: one weight shrinks to zero, without a forward."""
    return model.norm.weight.square().sum().expand(len(seeds))


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test advances."""

    class Clock:
        now = 1000.0

    monkeypatch.setattr(time, "perf_counter", lambda: Clock.now)
    return Clock


def run(out, clock, pace, *, minutes=MINUTES, stop_at=None, allow_changes=False, evaluate=None, **changes):
    """Train with steps of `pace(step)` seconds; return the result and the seconds it took."""

    def on_step(record):
        clock.now += pace(record.step)
        return record.step == stop_at

    settings = {"minutes": minutes, "batch_size": 2, "lr": PEAK, "warmup": 2, "final_lr": FLOOR, "precision": "weights"}
    config = TrainConfig(**settings | {"log_every": 1000, "progress": False} | changes)
    began = clock.now
    options = {"out": out, "on_step": on_step, "allow_changes": allow_changes, "evaluate": evaluate}
    model = next_token.model().requires_grad_(False)
    model.norm.requires_grad_(True)  # so that a step takes little time
    result = train(model, RowMean(shrink), counting, config, **options)
    return result, clock.now - began


def after(num_steps, *, first, then):
    return lambda step: first if step <= num_steps else then


@pytest.mark.parametrize(
    ("pace", "least", "most"),
    [
        (lambda step: 2.0, 0.95, 0.98),
        (after(1, first=40.0, then=2.0), 0.95, 0.98),  # compiling
        (after(20, first=2.0, then=6.0), 0.93, 1.0),  # the GPU becomes shared
        (after(20, first=3.0, then=1.0), 0.93, 1.0),  # the GPU becomes free
    ],
    ids=["steady", "slow first step", "slower", "faster"],
)
def test_the_run_uses_its_time_and_the_learning_rate_ends_at_its_floor(tmp_path, clock, pace, least, most):
    result, seconds = run(tmp_path, clock, pace)
    assert least < seconds / SECONDS <= most
    assert not result.interrupted
    assert result.final is not None
    rates = result.log.column("lr")[1]
    assert max(rates) == PEAK
    assert rates[-1] == pytest.approx(FLOOR * PEAK)


def test_a_short_run_shortens_its_warm_up(tmp_path, clock):
    run(tmp_path, clock, lambda step: 2.0, warmup=100, stop_at=20)
    result, _ = run(tmp_path, clock, lambda step: 2.0, warmup=100)  # the planned warm-up is not a change of the run
    rates = result.log.column("lr")[1]
    assert rates[9] == pytest.approx(0.1 * PEAK)  # while the pace is unknown
    assert rates[10] > 0.95 * PEAK
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(FLOOR * PEAK)
    again, none = run(tmp_path, clock, lambda step: 2.0, warmup=100)
    assert (again.step, none) == (result.step, 0)


def test_a_run_limited_by_steps_can_continue_for_minutes(tmp_path, clock):
    run(tmp_path, clock, lambda step: 2.0, minutes=None, steps=60, stop_at=20)
    with pytest.raises(ValueError, match=r"train config steps must stay 60, .*, got None"):
        run(tmp_path, clock, lambda step: 2.0)
    result, seconds = run(tmp_path, clock, lambda step: 2.0, allow_changes=True)
    assert 0.95 * SECONDS < seconds < SECONDS
    assert result.log.column("lr")[1][-1] == pytest.approx(FLOOR * PEAK)


def test_slow_steps_exceed_the_time_by_less_than_one_step(tmp_path, clock):
    result, seconds = run(tmp_path, clock, lambda step: 50.0)
    assert (result.step, seconds) == (3, 150)
    assert result.final is not None
    assert result.log.column("lr")[1][-1] == pytest.approx(FLOOR * PEAK)


def test_a_second_interrupt_raises_keyboard_interrupt(tmp_path, clock):
    def pace(step):
        if step == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return 2.0

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, clock, pace)


def test_the_same_call_continues_and_earlier_minutes_count(tmp_path, clock):
    _, before = run(tmp_path, clock, lambda step: 2.0, stop_at=31)
    assert before == 62
    result, rest = run(tmp_path, clock, lambda step: 2.0)
    assert 0.94 * SECONDS < before + rest < SECONDS
    assert result.num_new_steps == result.step - 31
    again, none = run(tmp_path, clock, lambda step: 2.0)
    assert (again.step, again.num_new_steps, none) == (result.step, 0, 0)  # a finished run stays finished
    _, more = run(tmp_path, clock, lambda step: 2.0, minutes=1.5 * MINUTES, allow_changes=True)
    assert 1.4 * SECONDS < before + rest + more < 1.5 * SECONDS


def test_the_time_of_evaluating_counts_in_a_resumed_run(tmp_path, clock):
    def evaluate(model, step):
        clock.now += 10.0
        return {"x": 0.0}

    began, options = clock.now, {"evaluate": evaluate, "evaluate_every": 5}
    run(tmp_path, clock, lambda step: 1.0, stop_at=27, **options)
    assert clock.now - began == 27 + 5 * 10
    result, _ = run(tmp_path, clock, lambda step: 1.0, **options)
    assert 0.9 * SECONDS < clock.now - began < 1.15 * SECONDS  # the last evaluation comes after the last step
    assert result.final is not None
