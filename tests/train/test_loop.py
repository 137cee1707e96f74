"""A run is a function of its configuration: split, interrupted or resumed, it ends in the same bits."""

import json
import math
import shutil
import signal
import threading
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import dgemma
import next_token
from dgemma import DiffusionGemma
from dgemma.model import experts
from dgemma.train import loop
from dgemma.train.adapter_files import load_lora
from dgemma.train.batch import feed
from dgemma.train.checkpoints import Checkpoints
from dgemma.train.config import TrainConfig
from dgemma.train.loop import train
from dgemma.train.lora import LoRA, add_lora
from dgemma.train.losses import CrossEntropy
from dgemma.train.objective import Objective, RowMean
from dgemma.train.parallel import Parallel
from dgemma.train.update import Updater
from dgemma_kernels import accelerate_training
from dgemma_kernels.training import door
from fork_server import start_script
from next_token import NextToken, counting

MASK = dgemma.MaskNoise(next_token.VOCAB, mask_token_id=3)
PROPOSE_MASK = CrossEntropy(propose_mask=True)  # the mask token occurs in the text
SETTINGS = {"steps": 6, "batch_size": 4, "lr": 1e-2, "warmup": 2, "precision": "weights", "log_every": 4}


def config(**changes) -> TrainConfig:
    return TrainConfig(**(SETTINGS | changes))


def run(out, *, model=None, objective=None, source=counting, **kwargs):
    names = {"on_step", "evaluate", "optimizer", "allow_changes"}
    options = {name: kwargs.pop(name) for name in names & kwargs.keys()}
    model = model if model is not None else next_token.model()
    return model, train(model, objective or NextToken(), source, config(**kwargs), out=out, **options)


def weights(model) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same_bits(left, right) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def stop_at(step: int):
    return lambda record: record.step == step


def test_weights_that_no_gradient_reaches_are_named(tmp_path, caplog):
    run(tmp_path / "all", steps=9)
    assert "No gradient" not in caplog.text
    model = next_token.model()
    model.layers[0].experts.register_forward_hook(lambda module, inputs, out: out * 0)
    run(tmp_path / "some", model=model, steps=9)
    assert "No gradient reaches 7 weights, such as layers.0.router.scale" in caplog.text


def test_updates_without_any_loss_name_no_weights(tmp_path, caplog):
    """Runs that all got the same reward, for example: their advantages are 0."""
    nothing = RowMean(lambda model, batch, seeds: 0.0 * seeds * sum(w.sum() for w in model.parameters()))
    run(tmp_path, objective=nothing, steps=9)
    assert "No gradient" not in caplog.text


def test_an_error_ends_the_thread_that_prepares_batches(tmp_path):
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, on_step=lambda record: 1 / 0)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dgemma-feed")]


def test_evaluations_and_the_final_checkpoint_have_the_noise_of_the_training(tmp_path):
    noises = []

    def evaluate(model, step):
        noises.append(dgemma.learnt_noise(model))
        return {}

    objective = Objective(noise=MASK, canvas_len=4, loss=PROPOSE_MASK)
    options = {"objective": objective, "steps": 2, "evaluate": evaluate, "evaluate_every": 1}
    run(tmp_path, on_step=stop_at(1), **options)
    model, result = run(tmp_path, **options)  # resumed with another model object
    noises += [dgemma.learnt_noise(each) for each in (model, DiffusionGemma.from_pretrained(result.final))]
    assert noises == [MASK] * 4


@pytest.mark.parametrize("answers", [[0, 0, 5, 3], [0, 0, 0, 0]])
def test_a_micro_batch_may_lack_answers_and_a_step_may_not(tmp_path, answers):
    def source(step, rows):
        batch = counting(step, range(4))
        prompt_len = torch.full((4,), 4)
        batch = replace(batch, prompt_len=prompt_len, length=prompt_len + torch.tensor(answers))
        return batch.select(slice(rows.start, rows.stop))

    model = next_token.model(torch.float64)
    before = weights(model)
    objective = Objective(noise=dgemma.UniformNoise(next_token.VOCAB), canvas_len=4, causal_scope="answer")
    settings = {"source": source, "objective": objective, "steps": 1, "batch_size": 4, "micro_batch_size": 2}
    if not any(answers):
        with pytest.raises(ValueError, match="length must exceed prompt_len in some row of step"):
            run(tmp_path, model=model, **settings)
        return
    run(tmp_path / "parts", model=model, **settings)
    whole = next_token.model(torch.float64)
    run(tmp_path / "whole", model=whole, **settings | {"micro_batch_size": 4})
    for name, weight in weights(whole).items():
        torch.testing.assert_close(weights(model)[name], weight, rtol=1e-8, atol=1e-11)
    assert any(not torch.equal(weight, before[name]) for name, weight in weights(model).items())


@pytest.mark.parametrize(
    ("precision", "canvases", "micro_batch_size"),
    [pytest.param("weights", "one", 2, marks=pytest.mark.slow), ("mixed", "all", 4)],
)
def test_a_step_never_waits_for_the_device(tmp_path, precision, canvases, micro_batch_size):
    # Fake tensors have shapes but no values, so reading one raises.
    noise = dgemma.UniformNoise(next_token.VOCAB)
    objective = Objective(noise=noise, masks=MASK, canvas_len=4, canvases=canvases)
    sizes = {"rows": range(4), "micro_batch_size": micro_batch_size, "steps": range(1), "vocab_size": next_token.VOCAB}
    (batches,) = feed(counting, seed=0, **sizes, device=torch.device("cpu"))
    # torch has no fake grouped product in float32.
    model = next_token.model(torch.bfloat16 if precision == "weights" else torch.float32)
    settings = config(precision=precision, ema_decay=0.9, micro_batch_size=micro_batch_size)
    with FakeTensorMode() as mode:
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                tensors.update({name: mode.from_tensor(t) for name, t in tensors.items() if t is not None})
        parts = [part.map(mode.from_tensor) for part in batches]
        # AdamW counts its steps on the host unless it is fused, and those would be fake here as well.
        sgd = lambda named: torch.optim.SGD(named.values())  # noqa: E731 (a line shorter)
        updater = Updater(model, objective, settings, Parallel(), sgd)
        record = updater.update(parts, step=0, steps=6, warmup=0)
        with pytest.raises(DataDependentOutputException):
            record.loss.item()


@pytest.mark.parametrize("stopped", [1, 5])
def test_a_resumed_run_ends_in_the_same_bits_and_with_the_same_log(tmp_path, stopped):
    straight, one = run(tmp_path / "straight", ema_decay=0.9)
    resumed, half = run(tmp_path / "resumed", ema_decay=0.9, on_step=stop_at(stopped))
    assert (half.interrupted, half.step, half.checkpoint.name) == (True, stopped, f"step-{stopped:06d}")
    resumed, two = run(tmp_path / "resumed", ema_decay=0.9, model=resumed)
    assert not two.interrupted
    assert_same_bits(weights(straight), weights(resumed))
    measured = ("step", "loss", "loss/causal", "grad_norm", "lr")
    assert [[line[name] for name in measured] for line in one.log.lines()] == [
        [line[name] for name in measured] for line in two.log.lines()
    ]


SCRIPT = """
import signal, sys
import next_token
from dgemma.train import TrainConfig, train
settings = eval(sys.argv[2]) | {"steps": 60, "checkpoint_every": 2, "ema_decay": 0.9}
last, moment = map(float, sys.argv[3:])
def on_step(record):
    if record.step == last:
        signal.setitimer(signal.ITIMER_PROF, moment)
config = TrainConfig(**settings)
train(next_token.model(), next_token.NextToken(), next_token.counting, config, out=sys.argv[1], on_step=on_step)
"""


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_in_the_same_bits(tmp_path):
    """A signal ends the process after some CPU time, in a step or in a save, however busy the machine is."""
    straight, _ = run(tmp_path / "straight", steps=60, ema_decay=0.9)
    out = tmp_path / "killed"
    for last, moment, ends_by in ((3, 0.01, -signal.SIGPROF), (21, 0.03, -signal.SIGPROF), (99, 1, 0)):
        process = start_script(SCRIPT, out, SETTINGS, last, moment)
        process.join(300)
        assert process.exitcode == ends_by
    assert_same_bits(weights(straight), weights(DiffusionGemma.from_pretrained(out / "final")))
    steps = [line["step"] for line in map(json.loads, (out / "log.jsonl").read_text().splitlines())]
    assert steps == list(range(1, 61))


@pytest.mark.parametrize(("saving_part", "saved"), [(0, [0, 2, 4, 5]), (1e9, [0, 5])], ids=["fast", "slow"])
def test_slow_steps_are_saved_when_they_are_logged_unless_saving_is_slow_too(tmp_path, monkeypatch, saving_part, saved):
    monkeypatch.setattr(loop, "_LONGEST_UNSAVED", 0)
    monkeypatch.setattr(loop, "_SAVING_PART", saving_part)
    run(tmp_path, steps=5, log_every=2, checkpoint_every=1000, keep_last=9)
    assert Checkpoints(folder=tmp_path, keep_last=9, parallel=Parallel()).steps() == saved


def test_another_configuration_is_refused_unless_allowed_and_logging_and_saving_may_change(tmp_path):
    run(tmp_path, on_step=stop_at(1))
    with pytest.raises(ValueError, match=r"train config lr must stay 0\.01"):
        run(tmp_path, lr=2e-2)
    assert run(tmp_path, log_every=1, checkpoint_every=3, keep_last=1, on_step=stop_at(3))[1].step == 3
    assert run(tmp_path, lr=2e-2, allow_changes=True)[1].step == 6


def test_another_optimizer_is_refused_unless_allowed(tmp_path):
    def sgd(**settings):
        return lambda named: torch.optim.SGD(named.values(), **({"lr": 0.1} | settings))

    run(tmp_path, optimizer=sgd(), on_step=stop_at(1))
    for other in (sgd(lr=0.2), sgd(weight_decay=0.1), lambda named: torch.optim.Adam(named.values(), lr=0.1), None):
        with pytest.raises(ValueError, match=r"train optimizer .* must stay .*, as in the run .*, got "):
            run(tmp_path, optimizer=other)
    assert run(tmp_path, optimizer=sgd(foreach=True), on_step=stop_at(3))[1].step == 3  # the implementation may change
    assert run(tmp_path, optimizer=sgd(lr=0.2), allow_changes=True)[1].step == 6


def with_momentum(named):
    return torch.optim.SGD(named.values(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("first", "second"), [(None, with_momentum), (with_momentum, None)], ids=["to SGD", "to AdamW"]
)
def test_another_kind_of_optimizer_continues_from_the_weights_alone(tmp_path, first, second):
    run(tmp_path / "changed", optimizer=first, on_step=stop_at(3))
    shutil.copytree(tmp_path / "changed", tmp_path / "again")
    changed, result = run(tmp_path / "changed", optimizer=second, allow_changes=True, on_step=stop_at(4))
    # The fourth step by hand: the saved weights and a new optimizer.
    by_hand, half = (
        next_token.model(),
        load_file(tmp_path / "again" / "step-000003" / "state-00000-of-00001.safetensors"),
    )
    by_hand.load_state_dict({name: half[f"model.{name}"] for name in by_hand.state_dict()})
    settings = config()
    rows = {"rows": range(4), "micro_batch_size": 4, "steps": range(3, 4), "device": torch.device("cpu")}
    (fourth,) = feed(counting, seed=0, vocab_size=next_token.VOCAB, **rows)
    updater = Updater(by_hand, NextToken(), settings, Parallel(), second)
    updater.update(fourth, step=3, steps=settings.steps, warmup=settings.warmup)
    assert result.step == 4
    assert_same_bits(weights(changed), weights(by_hand))


def test_an_average_may_begin_in_the_middle_of_a_run(tmp_path):
    raw, _ = run(tmp_path / "raw")
    half, _ = run(tmp_path / "begun", on_step=stop_at(5))
    start = weights(half)
    with pytest.raises(ValueError, match="train config ema_decay must stay None"):
        run(tmp_path / "begun", ema_decay=0.99)
    averaged, _ = run(tmp_path / "begun", ema_decay=0.99, allow_changes=True)
    for name, weight in weights(averaged).items():  # the decay of the sixth step is 6/15
        torch.testing.assert_close(weight, 0.4 * start[name] + 0.6 * weights(raw)[name])


@dataclass(frozen=True)
class Poisoned(NextToken):
    """The row with `bad_seed` has a loss that is not finite."""

    bad_seed: int = 0

    def __call__(self, model, batch, *, seeds):
        terms = super().__call__(model, batch, seeds=seeds)
        terms.sums["causal"] = terms.sums["causal"] + torch.where(seeds == self.bad_seed, math.nan, 0.0)
        return terms


def test_a_number_that_is_not_finite_stops_the_run_at_the_last_good_checkpoint(tmp_path):
    seeds = {}
    run(tmp_path / "clean", on_step=lambda record: seeds.update({record.step: record.parts[0].seeds}))
    bad = int(seeds[4][2])
    good, _ = run(tmp_path / "good", on_step=stop_at(3))
    model = next_token.model()
    with pytest.raises(FloatingPointError, match=rf"step 4: loss, .* seeds \[{bad}\].*-000003\. Check those"):
        run(tmp_path / "bad", model=model, objective=Poisoned(bad_seed=bad), checkpoint_every=3)
    assert_same_bits(weights(good), weights(model))
    assert sorted(path.name for path in (tmp_path / "bad").glob("step-*")) == ["step-000000", "step-000003"]


def test_a_gradient_that_is_not_finite_is_named_and_the_advice_fits_the_cause(tmp_path):
    class Steep(NextToken):
        def reduce(self, terms, totals):
            loss = super().reduce(terms, totals)
            return loss + (loss - loss.detach()).sqrt()  # zero, with an infinite slope

    sentence = "at step 1: grad_norm, although .* every row here are finite.* not the cause. Check the objective"
    with pytest.raises(FloatingPointError, match=sentence):
        run(tmp_path, objective=Steep())


def test_a_process_whose_prediction_fails_waits_for_no_other(tmp_path):
    """The others are inside the step. They never come to a sum, or to the restoring of a checkpoint."""

    class Pair(Parallel):
        world_size, may_sum = 2, True

        def sum(self, tensor):
            assert self.may_sum
            return tensor

    class Fails(NextToken):
        def __call__(self, model, batch, *, seeds):
            if steps:
                pair.may_sum = False
                raise FloatingPointError("a prediction is NaN")
            return super().__call__(model, batch, seeds=seeds)

    pair, steps = Pair(), []
    with pytest.raises(FloatingPointError, match=r"^a prediction is NaN$"):
        train(next_token.model(), Fails(), counting, config(), out=tmp_path, parallel=pair, on_step=steps.append)
    assert [record.step for record in steps] == [1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_finishes_the_step_saves_and_warns(tmp_path, number, caplog):
    before = signal.getsignal(number)
    _, result = run(tmp_path, on_step=lambda record: signal.raise_signal(number) if record.step == 2 else None)
    assert (result.interrupted, result.step, result.checkpoint.name) == (True, 2, "step-000002")
    assert signal.getsignal(number) == before
    assert "stopped after step 2 of 6. The same call continues from" in caplog.text


def test_mixed_precision_comes_close_to_float32_and_keeps_float32_weights(tmp_path, monkeypatch):
    _, one = run(tmp_path / "exact")
    dtypes, product = set(), experts.F.grouped_mm

    def watch(rows, weights, *, offs):
        dtypes.add((rows.dtype, weights.dtype))
        return product(rows, weights, offs=offs)

    monkeypatch.setattr(experts.F, "grouped_mm", watch)
    mixed, two = run(tmp_path / "mixed", precision="mixed")
    assert dtypes == {(torch.bfloat16, torch.bfloat16)}  # the products of experts, too
    assert {weight.dtype for weight in weights(mixed).values()} == {torch.float32}
    exact_losses, losses = one.log.column("loss")[1], two.log.column("loss")[1]
    assert losses[0] == pytest.approx(exact_losses[0], rel=0.004)  # the same weights, products rounded to 8 bits
    assert losses == pytest.approx(exact_losses, rel=0.05)  # then Adam and the routers amplify the rounding


def test_a_pass_without_gradients_does_not_remove_those_of_the_next_pass(tmp_path):
    # autocast can cache the rounded weights of the first pass, which have no gradient, and use them in the second.
    class TwoPasses(NextToken):
        def __call__(self, model, batch, *, seeds):
            with torch.no_grad():
                super().__call__(model, batch, seeds=seeds)
            return super().__call__(model, batch, seeds=seeds)

    one, _ = run(tmp_path / "one", precision="mixed", steps=2)
    two, _ = run(tmp_path / "two", precision="mixed", steps=2, objective=TwoPasses())
    assert_same_bits(weights(one), weights(two))


def test_mixed_precision_refuses_weights_that_are_already_rounded(tmp_path):
    with pytest.raises(ValueError, match=r"must train float32 weights, got torch\.bfloat16"):
        run(tmp_path, model=next_token.model(torch.bfloat16), precision="mixed")


def test_recomputed_activations_change_nothing_and_end_with_the_run(tmp_path):
    plain, _ = run(tmp_path / "plain", steps=2)
    recomputed, _ = run(tmp_path / "recomputed", steps=2, recompute_activations=True)
    assert_same_bits(weights(plain), weights(recomputed))
    assert not recomputed.recompute_activations


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the door compiles the layers itself (test_door)")
@pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])
def test_layers_compile_into_one_graph_each_and_learn_the_same(recompute, tmp_path, monkeypatch):
    # aot_eager traces forward and backward as the real compiler does, without the minutes of code generation.
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **options: compile_module(self, backend="aot_eager", **options)
    )
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    _, one = run(tmp_path / "plain", steps=3)
    compiled = next_token.model()
    with accelerate_training(compiled), door._compiled_layers(compiled):
        _, two = run(tmp_path / "compiled", model=compiled, steps=3, recompute_activations=recompute)
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2  # a sliding layer and a full one
    assert two.log.column("loss")[1] == pytest.approx(one.log.column("loss")[1], rel=1e-5)
    assert all(layer._compiled_call_impl is None for layer in compiled.layers)


def test_the_average_is_evaluated_and_returned(tmp_path):
    averages = {}

    def evaluate(model, step):
        averages[step] = weights(model)
        return {"norm": float(model.norm.weight.detach().norm())}

    averaged, result = run(tmp_path / "averaged", ema_decay=0.9, evaluate=evaluate, evaluate_every=4)
    raw, _ = run(tmp_path / "raw")
    assert list(averages) == [4, 6]
    assert_same_bits(averages[6], weights(averaged))
    assert_same_bits(weights(averaged), weights(DiffusionGemma.from_pretrained(tmp_path / "averaged/final")))
    assert not torch.equal(averaged.norm.weight, raw.norm.weight)
    assert result.evaluation == {"norm": pytest.approx(float(averaged.norm.weight.detach().norm()))}
    assert result.log.column("evaluation/norm")[0] == [4, 6]
    with pytest.raises(ValueError, match=r"train evaluate must return a dictionary of numbers, or None, got 5\.0"):
        run(tmp_path / "number", evaluate=lambda model, step: 5.0)


def test_a_callback_may_return_numbers_of_torch_and_numpy(tmp_path):
    _, result = run(tmp_path, on_step=lambda record: {"a": torch.tensor(0.5), "b": np.float32(0.25), "c": "text"})
    assert [result.log.column(name)[1][0] for name in "abc"] == [0.5, 0.25, "text"]


def test_adapters_resume_without_the_frozen_weights_being_saved(tmp_path):
    straight, resumed = adapted(), adapted()
    _, result = run(tmp_path / "straight", model=straight)
    _, half = run(tmp_path / "resumed", model=resumed, on_step=stop_at(2))
    with safe_open(half.checkpoint / "state-00000-of-00001.safetensors", "pt") as file:
        assert not any(name == "model.embed_tokens.weight" for name in file.keys())  # noqa: SIM118 (no mapping)
    resumed = adapted()
    run(tmp_path / "resumed", model=resumed)
    assert_same_bits(weights(straight), weights(resumed))
    assert torch.equal(resumed.embed_tokens.weight, next_token.model().embed_tokens.weight)
    loaded = next_token.model()
    load_lora(loaded, result.final / "adapters")
    assert_same_bits(weights(straight), weights(loaded))


def test_adapters_are_not_continued_on_other_frozen_weights(tmp_path):
    run(tmp_path, model=adapted(), on_step=stop_at(2))
    other = adapted()
    with torch.no_grad():
        other.embed_tokens.weight[3, 3] += 1e-4
    with pytest.raises(ValueError, match=r"train frozen weights must stay .*, as in the run in"):
        run(tmp_path, model=other)


def adapted(rank: int = 2) -> DiffusionGemma:
    model = next_token.model()
    add_lora(model, LoRA(rank=rank))
    return model


def test_errors_of_a_source_reach_the_caller(tmp_path):
    def broken(step, rows):
        if step == 2:
            raise OSError("disk gone")
        return counting(step, rows)

    with pytest.raises(OSError, match="disk gone"):
        run(tmp_path, source=broken)
