"""Several processes give the losses and weights of one process, also if a run continues with another number of them.

Runs are in float64, so that rounding is far below any real difference. They are made once for all tests here.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import dgemma
from dgemma.train.distributed import FullySharded, spread_experts
from dgemma.train.log import TrainLog
from several_processes import (
    CONFIG,
    OBJECTIVE,
    SEEING,
    Job,
    launch,
    run_alone,
    run_together,
    source_with_images,
    uneven_source,
)

EXACT = {"rtol": 1e-9, "atol": 1e-9}  # sums have another order, which three steps of Adam amplify

ON_TWO = [
    Job(out=Path("sharded_2")),
    Job(out=Path("experts_2"), parallel={"expert_parallel": 2}, config={"micro_batch_size": 3}),  # uneven ones
]
ON_FOUR = [
    Job(out=Path("sharded_4"), config={"micro_batch_size": 1}),
    Job(out=Path("copies_4"), parallel={"replicas": 2, "expert_parallel": 2}, config={"recompute_activations": True}),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All runs, in one folder. One continues from four processes to two and to one, another from one to two."""
    folder = tmp_path_factory.mktemp("runs")
    shrinking, growing = Job(out=folder / "shrinking"), Job(out=folder / "growing")
    mixed = {"dtype": torch.float32, "config": {"precision": "mixed"}}
    adapted = {"lora": True}
    apart = {"expert_parallel": 2}
    seeing = {"model": SEEING, "source": source_with_images}

    run_alone(Job(out=folder / "alone"))
    run_alone(replace(growing, stop=1))
    run_alone(Job(out=folder / "mixed_1", **mixed))
    run_alone(Job(out=folder / "adapted_1", **adapted))
    run_alone(Job(out=folder / "seeing_1", **seeing))
    on_four = [replace(job, out=folder / job.out) for job in ON_FOUR]
    failures = launch(4, run_together, [*on_four, replace(shrinking, parallel=apart, stop=1)])
    on_two = [
        *(replace(job, out=folder / job.out) for job in ON_TWO),
        replace(shrinking, stop=2),
        replace(growing, parallel=apart),
        Job(out=folder / "mixed_2", parallel=apart, **mixed),
        Job(out=folder / "adapted_2", parallel=apart, **adapted),
        Job(out=folder / "seeing_2", **seeing),
        Job(out=folder / "minutes", config={"steps": None, "minutes": 1e-6}),
    ]
    failures += launch(2, run_together, on_two)
    assert not any(map(any, failures)), failures
    run_alone(shrinking)
    return folder


@pytest.fixture(scope="module")
def damaged(runs, tmp_path_factory):
    """Flip a bit in one file of a run of two processes; return the errors when it continues, and its folder."""
    folder = tmp_path_factory.mktemp("damaged") / "run"
    shutil.copytree(runs / "sharded_2", folder)
    file = folder / "step-000003" / "state-00001-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return launch(2, run_together, [Job(out=folder)]), folder


def _losses(folder: Path) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in TrainLog(folder / "log.jsonl").lines()]


def _final(folder: Path) -> dict[str, torch.Tensor]:
    return dict(dgemma.DiffusionGemma.from_pretrained(folder / "final").state_dict())


def _assert_same_run(folder: Path, expected: Path) -> None:
    assert len(_losses(expected)) == 3
    torch.testing.assert_close(_losses(folder), _losses(expected), **EXACT)
    torch.testing.assert_close(_final(folder), _final(expected), **EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*(str(job.out) for job in ON_TWO + ON_FOUR), "shrinking", "growing"])
def test_several_processes_give_the_losses_and_weights_of_one(runs, name):
    """Also if a run of four continues with two and then one, or a run of one with two."""
    _assert_same_run(runs / name, runs / "alone")


@pytest.mark.slow
def test_training_changes_every_weight(runs):
    """Otherwise the equalities above would prove little."""
    model = dgemma.DiffusionGemma(CONFIG, dtype=torch.float64)
    model.reset_parameters(torch.Generator().manual_seed(0))
    trained = _final(runs / "alone")
    assert all(not torch.equal(weight, trained[name]) for name, weight in model.named_parameters())


@pytest.mark.slow
def test_bfloat16_losses_on_two_processes_are_close_to_those_on_one(runs):
    """Layers and norms are gathered in bfloat16. Losses are equal while norms are 1.

    Once training has changed the norms, each is rounded by up to 2**-8. Losses then differed by 4e-4.
    """
    two, one = ([loss for loss, _ in _losses(runs / name)] for name in ("mixed_2", "mixed_1"))
    torch.testing.assert_close(two[0], one[0], rtol=1e-4, atol=0)
    torch.testing.assert_close(two, one, rtol=2e-3, atol=0)


@pytest.mark.slow
def test_adapters_on_sharded_experts_train_as_on_one_process(runs):
    two, one = runs / "adapted_2", runs / "adapted_1"
    torch.testing.assert_close(_losses(two), _losses(one), **EXACT)
    torch.testing.assert_close(
        *(load_file(run / "final" / "adapters" / "adapter_model.safetensors") for run in (two, one)), **EXACT
    )


@pytest.mark.slow
def test_one_process_may_have_images_and_another_only_text(runs):
    _assert_same_run(runs / "seeing_2", runs / "seeing_1")


@pytest.mark.slow
def test_minutes_end_all_processes_after_the_same_step(runs):
    assert len(_losses(runs / "minutes")) == 1  # the step during which the time ends
    assert _final(runs / "minutes")


@pytest.mark.slow
def test_a_flipped_bit_in_one_process_file_is_detected_by_all(damaged):
    (errors,), folder = damaged
    message = "step-000003 must be a complete checkpoint, but state-00001-of-00002.safetensors has changed since it was"
    assert all(message in error for error in errors)
    with pytest.raises(ValueError, match=r"state-00001-of-00002\.safetensors has changed since it was written"):
        run_alone(Job(out=folder))


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """Return the errors of two processes if one has less work than the other, and if one is killed."""
    folder = tmp_path_factory.mktemp("failures")
    decoder_alone = replace(OBJECTIVE, causal_weight=0.0)
    uneven = Job(out=folder / "uneven", objective=decoder_alone, source=uneven_source)
    return launch(2, run_together, [uneven, Job(out=folder / "dying", dies=1)])


@pytest.mark.slow
def test_processes_with_unequal_work_raise_instead_of_waiting(failures):
    for error in failures[0]:
        assert "processes must run the layers equally often" in error


@pytest.mark.slow
def test_a_lost_process_ends_the_others_with_a_sentence(failures):
    survivor, _ = failures[1]
    assert "Process 0 of 2 lost another process" in survivor
    assert "to continue from the last checkpoint" in survivor


def test_starting_without_torchrun_names_the_command(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RuntimeError, match=r"Run `torchrun --nproc-per-node 2 train\.py`"):
        FullySharded()


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"expert_parallel": 3}, r"divides the 4 processes, got \(3, 1\)"),
        ({"expert_parallel": 2, "replicas": 4}, r"divides the 4 processes, got \(2, 4\)"),
        ({"replicas": 0}, r"divides the 4 processes, got \(1, 0\)"),
    ],
)
def test_a_mesh_that_does_not_fit_the_processes_is_refused(monkeypatch, settings, rule):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=rule):
        FullySharded(**settings)


def test_experts_that_cannot_be_shared_evenly_are_refused():
    experts = dgemma.DiffusionGemma(CONFIG, device="meta").layers[0].experts
    with pytest.raises(ValueError, match="expert_parallel must divide the model's 4 experts, got 3"):
        spread_experts(experts, SimpleNamespace(size=lambda: 3))
