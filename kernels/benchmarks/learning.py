"""Learning from runs: exactness of ratios, where the time of a policy gradient goes, and methods in equal time.

python kernels/benchmarks/learning.py                        about four minutes on an H200
python kernels/benchmarks/learning.py --parts exact speed    about one minute

- exact: the engine writes texts with `dgemma/text`, and their probability is computed again: by the same engine, by
  one that depends on the batch, and by plain PyTorch in the same dtype. An exact ratio has a logarithm of 0.
- speed: updates of `PolicyGradient` on the sums of example 24, divided into runs, scoring, and gradients with the
  optimizer's step. First the gradient within `accelerate_training` is compared with the plain one.
- compare: methods in equal time, from the same weights, on sums that were in no training step. Mean changes over seeds.
"""

import argparse
import copy
import json
import runpy
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timing import demand_parity, describe_run
from torch import Tensor

import dgemma
from dgemma.model.config import FULL
from dgemma.sampling import SoftThreshold
from dgemma.train import Objective, TrainBatch, TrainConfig, soften_attention, train
from dgemma.train.learning import Consistency, PolicyGradient, Problems, rewards
from dgemma.train.learning.runs import sum_canvases
from dgemma.train.log import TrainStep
from dgemma_kernels import accelerate, accelerate_training

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SUMS = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "24_learn_from_runs.py"))
PROMPTS, TEST_PROMPTS = ([SUMS["prompt_of"](pair) for pair in SUMS[name]] for name in ("TRAIN", "TEST"))
ANSWERS, TEST_ANSWERS = ([sum(pair) for pair in SUMS[name]] for name in ("TRAIN", "TEST"))
NUM_DIGITS, WARMUP = SUMS["NUM_DIGITS"], 3  # updates that are not timed


def wait() -> float:
    """Return the time, after all work on the device."""
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def measure_ratios(num_rows: int, num_blocks: int) -> list[dict[str, Any]]:
    """Print how far the log-probability of each canvas is from that of the run itself."""
    if ON_GPU:
        plain = dgemma.DiffusionGemma.from_pretrained("dgemma/text", dtype=torch.bfloat16, device=DEVICE)
    else:  # kernels are interpreted
        shape = {"canvas_length": 8, "vocab_size": 32, "num_hidden_layers": 1, "layer_types": (FULL,)}
        plain = dgemma.DiffusionGemma(dgemma.presets.tiny().replace(**shape))
    canvas_len, vocab_size = plain.config.canvas_length, plain.config.vocab_size
    prompts = torch.randint(5, vocab_size, (num_rows, 16), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    options: dict[str, Any] = {
        "max_new_tokens": num_blocks * canvas_len,
        "steps": 8 if ON_GPU else 2,
        "temperature": 1.0,
        "stop": None,
    }
    options |= {"sampler": SoftThreshold(tau=0.5), "noise": dgemma.UniformNoise(vocab_size)}

    def write(model: dgemma.Denoiser, rows: range) -> tuple[Tensor, Any]:
        """Return the log-probabilities of the canvases when they were written (blocks, R), and the recorded run."""
        found = torch.zeros(num_blocks, len(rows), dtype=torch.float64, device=DEVICE)

        def add(record: Any) -> None:
            found[int(record.block[0])].index_add_(0, record.rows, record.log_prob)

        more: dict[str, Any] = {"seed": list(rows), "on_step": add, "record": True, "eos_token_ids": []}
        out = dgemma.generate(model, prompts[rows.start : rows.stop], **more, **options)
        return found, out.trajectory

    engine = accelerate(plain, batch_invariant=True)
    known, run = write(engine, range(num_rows))
    halves = [write(engine, range(start, start + num_rows // 2))[0] for start in (0, num_rows // 2)]
    scorers = {"the same engine": engine, "without batch_invariant": accelerate(plain), "plain PyTorch": plain}
    found = {"the same engine, half a batch": torch.cat(halves, dim=1)}
    blocks = torch.tensor([step.block for step in run], device=DEVICE)
    with torch.no_grad():
        for name, model in scorers.items():
            found[name] = sum_canvases(run.step_log_probs(model, strict=False), blocks)
    print(f"\n{known.numel()} canvases, log-probability {known.mean():.1f} on average\n")
    print("| scored by | largest log ratio | mean log ratio | outside 0.8 to 1.2 |\n|---|---|---|---|")
    results = []
    for name, values in found.items():
        ratio = (values - known).abs()
        share = (((values - known).exp() - 1).abs() > 0.2).double().mean().item()
        results.append({"scorer": name, "largest": ratio.max().item(), "mean": ratio.mean().item(), "clipped": share})
        print(f"| {name} | {ratio.max():.2e} | {ratio.mean():.2e} | {share:.1%} |", flush=True)
    return results


@dataclass(kw_only=True, eq=False)
class TimedPolicy(PolicyGradient):
    """A policy gradient that adds up the seconds of its runs and of scoring them."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def _time(self, name: str, call: Callable[[], Any]) -> Any:
        began = wait()
        result = call()
        self.seconds[name] += wait() - began
        return result

    def _roll_out(self, *args: Any, **options: Any) -> Any:
        return self._time("runs", partial(super()._roll_out, *args, **options))

    def _score(self, *args: Any, **options: Any) -> Any:
        return self._time("scoring", partial(super()._score, *args, **options))


def policy_of(num_prompts: int, kind: type[PolicyGradient] = PolicyGradient, **changes: Any) -> Any:
    problems = Problems(prompts=PROMPTS, answers=ANSWERS, batch_size=num_prompts)
    settings: dict[str, Any] = {"problems": problems, "reward": rewards.numeric, "tokenizer": SUMS["TOKENIZER"]}
    return kind(**settings, options=SUMS["OPTIONS"], **changes)


def learn(model: dgemma.DiffusionGemma, objective: Any, source: Any, batch_size: int, lr: float, **length: Any) -> int:
    """Train the model, and return the number of updates."""
    settings: dict[str, Any] = {"precision": "weights", "progress": False, "weight_decay": 0.0, "warmup": 5}
    config = TrainConfig(batch_size=batch_size, lr=lr, **settings, **length)
    with tempfile.TemporaryDirectory() as folder:
        return train(model, objective, source, config, out=Path(folder)).step


def objective_of(**changes: Any) -> Objective:
    return Objective(noise=SUMS["NOISE"], canvas_len=NUM_DIGITS, fill_token=SUMS["EOS"], causal_weight=0.0, **changes)


def start_model(seed: int, num_updates: int) -> dgemma.DiffusionGemma:
    """Return a model that has learnt from examples."""
    torch.manual_seed(seed)
    model = dgemma.DiffusionGemma(SUMS["CONFIG"], device=DEVICE)
    soften_attention(model)
    learn(model, objective_of(), SUMS["examples"], 256, 4e-3, steps=num_updates, seed=seed)
    return model


def measure_speed(num_prompts: int, num_updates: int, start: dgemma.DiffusionGemma) -> list[dict[str, Any]]:
    """Print the seconds of an update by part: plain, and within `accelerate_training` without whole layers."""
    demand_equal_gradients(start)
    print("\n| loop | updates per minute | runs per minute | runs | scoring | gradients and step |\n|" + "---|" * 6)
    results = []
    for name in ("plain", "accelerate_training"):
        model = copy.deepcopy(start)
        times: list[float] = []
        policy = policy_of(num_prompts, TimedPolicy, speed_weight=0.1)

        def mark(record: TrainStep, policy: TimedPolicy = policy, times: list[float] = times) -> None:
            times.append(wait())
            if record.step == WARMUP:
                policy.seconds.clear()

        config = TrainConfig(
            steps=WARMUP + num_updates, batch_size=num_prompts, lr=5e-4, precision="weights", progress=False
        )
        door = nullcontext() if name == "plain" else accelerate_training(model, whole_layers=False)
        with door, tempfile.TemporaryDirectory() as folder:
            train(model, policy, policy.problems, config, out=Path(folder), on_step=mark)
        seconds = times[-1] - times[WARMUP - 1]
        shares = {part: policy.seconds[part] / seconds for part in ("runs", "scoring")}
        shares["gradients and step"] = 1 - sum(shares.values())
        pace = 60 * num_updates / seconds
        results.append({"loop": name, "updates_per_minute": pace, "runs_per_update": 8 * num_prompts, **shares})
        parts = " | ".join(f"{share:.0%}" for share in shares.values())
        print(f"| {name} | {pace:.0f} | {pace * 8 * num_prompts:,.0f} | {parts} |", flush=True)
    return results


def demand_equal_gradients(model: dgemma.DiffusionGemma) -> None:
    """Compare the gradient of the same runs, scored with and without `accelerate_training`."""
    policy = policy_of(8)
    runs = policy._roll_out(model, policy.problems(0, range(8)), slice(policy.group))

    def gradient() -> Tensor:
        loss = (policy._score(model, runs).sum(0) * torch.linspace(-1, 1, 64, device=DEVICE)).sum()
        return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))])

    plain = gradient()
    with accelerate_training(model, whole_layers=False):
        error = demand_parity("the gradient", gradient(), plain, 1e-3)  # float32, in another order
    print(f"\nparity: the gradients differ by {error:.1e}")


def measure(model: dgemma.DiffusionGemma) -> dict[str, float]:
    """Return accuracy and forwards on unseen sums, four runs of each, and the accuracy of greedy tokens."""
    prompts, answers = torch.tensor(TEST_PROMPTS * 4, device=DEVICE), TEST_ANSWERS * 4
    found: dict[str, float] = {}
    for name, sampler in (("right", dgemma.Threshold(tau=0.9)), ("greedy", dgemma.Threshold(tau=0.9, greedy=True))):
        out = dgemma.generate(model, prompts, **SUMS["OPTIONS"] | {"sampler": sampler}, progress=False, seed=1)
        right = rewards.numeric(SUMS["TOKENIZER"].decode_batch(out.new_tokens), answers)
        found |= {name: 100 * statistics.mean(right)}
        found.setdefault("forwards", out.steps.double().mean().item())
    return found


def distil(model: dgemma.DiffusionGemma, batch_size: int, lr: float, **length: Any) -> int:
    """Train with `Consistency` on the model's own greedy texts, one token per step."""
    prompts, greedy = torch.tensor(PROMPTS, device=DEVICE), {"sampler": dgemma.Confidence(greedy=True)}
    texts = dgemma.generate(model, prompts, **SUMS["OPTIONS"] | greedy, progress=False).tokens.cpu()

    def source(step: int, rows: range) -> TrainBatch:
        tokens = texts[[(step * batch_size + row) % len(texts) for row in rows]]
        length = torch.full((len(rows),), tokens.shape[1])
        return TrainBatch(tokens=tokens, prompt_len=length - NUM_DIGITS, length=length)

    loss = Consistency(teacher=copy.deepcopy(model), share=0.25, scored="noised")
    return learn(model, objective_of(loss=loss), source, batch_size, lr, **length)


def compare_methods(num_prompts: int, seconds: float, starts: list[dgemma.DiffusionGemma]) -> list[dict[str, Any]]:
    """Print the mean changes by each method over the seeds, in equal time, with standard errors."""

    def by_policy(speed_weight: float, model: dgemma.DiffusionGemma) -> int:
        policy = policy_of(num_prompts, speed_weight=speed_weight)
        return learn(model, policy, policy.problems, num_prompts, 5e-4, minutes=seconds / 60)

    methods: dict[str, Callable[[dgemma.DiffusionGemma], int]] = {
        "reward and speed": partial(by_policy, 0.1),
        "tokens alone": partial(by_policy, 0.0),
        "distillation alone": lambda model: distil(model, 8 * num_prompts, 1e-3, minutes=seconds / 60),
    }
    before = [measure(model) for model in starts]
    names = ("right", "forwards", "greedy")
    means = " | ".join(f"{statistics.mean(row[name] for row in before):.2f}" for name in names)
    print(f"\n| method, {seconds:g} s each | right, % | forwards | greedy, % | updates |\n|---|---|---|---|---|")
    print(f"| before | {means} | |", flush=True)
    results: list[dict[str, Any]] = [{"method": "before", "seeds": before}]
    for method, train_model in methods.items():
        changes: list[dict[str, float]] = []
        updates: list[int] = []
        for start, was in zip(starts, before, strict=True):
            model = copy.deepcopy(start)
            updates.append(train_model(model))
            now = measure(model)
            changes.append({name: now[name] - was[name] for name in names})
        cells = []
        for name in names:
            values = [change[name] for change in changes]
            error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
            cells.append(f"{statistics.mean(values):+.2f} ± {error:.2f}")
        print(f"| {method} | {' | '.join(cells)} | {statistics.mean(updates):.0f} |", flush=True)
        results.append({"method": method, "seeds": changes, "updates": updates})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("exact", "speed", "compare")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--rows", type=int, default=64 if ON_GPU else 2, help="texts of the first part")
    parser.add_argument("--blocks", type=int, default=2 if ON_GPU else 1, help="canvases of a text")
    parser.add_argument("--prompts", type=int, default=512 if ON_GPU else 4, help="prompts per update, 8 runs each")
    parser.add_argument("--examples", type=int, default=300 if ON_GPU else 3, help="updates on examples before")
    parser.add_argument("--updates", type=int, default=20 if ON_GPU else 2, help="timed updates")
    parser.add_argument("--seeds", type=int, default=5 if ON_GPU else 2)
    parser.add_argument("--seconds", type=float, default=8.0 if ON_GPU else 1.0, help="training time of each method")
    parser.add_argument("--output", type=Path, help="a JSON file")
    options = parser.parse_args()
    print(describe_run())
    results: dict[str, Any] = {"run": describe_run()}
    if "exact" in options.parts:
        results["exact"] = measure_ratios(options.rows, options.blocks)
    seeds = range(options.seeds if "compare" in options.parts else 1)
    starts = [start_model(seed, options.examples) for seed in seeds if set(options.parts) != {"exact"}]
    if "speed" in options.parts:
        results["speed"] = measure_speed(options.prompts, options.updates, starts[0])
    if "compare" in options.parts:
        results["compare"] = compare_methods(options.prompts, options.seconds, starts)
    if options.output is not None:
        options.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
