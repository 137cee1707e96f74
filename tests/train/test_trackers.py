"""Trackers get every line of the log: read back with TensorBoard's own reader."""

import sys
from types import SimpleNamespace

import pytest

import dgemma
import next_token
from dgemma.train.config import TrainConfig
from dgemma.train.loop import train
from next_token import NextToken, counting


def run(out, steps, **options):
    config = TrainConfig(steps=steps, batch_size=2, precision="weights", checkpoint_every=2, log_every=3)
    return train(next_token.model(), NextToken(), counting, config, out=out, **options)


@pytest.mark.slow  # needs extras that only developers install
def test_tensorboard_shows_the_numbers_and_texts_of_the_log_once(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def note(record):
        return {"sample": f"text {record.step}"} if record.step == 2 else record.step == 3

    run(tmp_path, 5, trackers="tensorboard", on_step=note)
    result = run(tmp_path, 5, trackers=["tensorboard"])
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    for name in ("loss", "grad_norm", "lr"):
        steps, values = result.log.column(name)
        scalars = events.Scalars(name)
        assert [scalar.step for scalar in scalars] == steps == [1, 2, 3, 4, 5]
        assert [scalar.value for scalar in scalars] == pytest.approx(values, rel=1e-6)  # stored as float32
    (text,) = events.Tensors("sample/text_summary")
    assert (text.step, text.tensor_proto.string_val) == (2, [b"text 2"])
    assert result.log.column("sample") == ([2], ["text 2"])


def test_an_unknown_tracker_is_refused(tmp_path):
    with pytest.raises(ValueError, match="trackers must be among tensorboard, wandb, trackio, got"):
        run(tmp_path, 1, trackers="mlflow")
    assert not list(tmp_path.iterdir())  # refused before anything was written


@pytest.mark.parametrize("module", ["wandb", "trackio"])
def test_a_run_that_failed_does_not_look_finished(tmp_path, monkeypatch, module):
    """trackio has no exit codes."""
    ends = []
    tracked = SimpleNamespace(log=lambda values, step: None, finish=lambda **options: ends.append(options))
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(init=lambda **options: tracked))
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, 3, trackers=module, on_step=lambda record: 1 / 0)
    with monkeypatch.context() as patch:  # all steps succeed, and the last file cannot be written
        patch.setattr(dgemma.DiffusionGemma, "save_pretrained", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(tmp_path, 3, trackers=module)
    run(tmp_path, 3, trackers=module)
    failed = {"exit_code": 1} if module == "wandb" else {}
    assert ends == [failed, failed, {}]
