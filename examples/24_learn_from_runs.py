"""Learn from runs: reinforcement learning on two-digit sums, for right answers and for few forwards.

A small model first learns "27+58=085" from a few examples. Then it learns from its own runs. Each prompt gets a group
of runs, the reward is 1 for the right sum, and the advantage also counts the forwards. The gradient uses the exact
probability of the tokens that a run drew.

    python examples/24_learn_from_runs.py       90 seconds of one CPU core

On 512 sums that were in no training step (± 2 %, one seed):

    after 300 updates on examples    48.0 % right, 2.79 forwards
    after 80 updates on runs         60.0 % right, 2.53 forwards
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor

import dgemma
from dgemma.model.config import FULL
from dgemma.train import Objective, TrainBatch, TrainConfig, soften_attention, train
from dgemma.train.learning import PolicyGradient, Problems, rewards

CHARACTERS = "0123456789+="
MASK, EOS = len(CHARACTERS), len(CHARACTERS) + 1
NUM_DIGITS = 3  # of an answer: one canvas
CONFIG = dgemma.presets.tiny().replace(
    vocab_size=len(CHARACTERS) + 2,
    canvas_length=NUM_DIGITS,
    num_hidden_layers=2,
    layer_types=(FULL, FULL),
    num_experts=1,
    top_k_experts=1,
    moe_intermediate_size=8,
    pad_token_id=EOS,
    eos_token_id=EOS,
)
NOISE = dgemma.MaskNoise(CONFIG.vocab_size, mask_token_id=MASK)
OPTIONS = {
    "max_new_tokens": NUM_DIGITS,
    "steps": NUM_DIGITS,
    "noise": NOISE,
    "sampler": dgemma.Threshold(tau=0.9),
    "temperature": 1.0,
    "stop": None,
    "eos_token_ids": [],
}
PAIRS = torch.cartesian_prod(torch.arange(10, 100), torch.arange(10, 100))  # (8100, 2)
PAIRS = PAIRS[torch.randperm(len(PAIRS), generator=torch.Generator().manual_seed(0))]
TRAIN, TEST = PAIRS[:-512].tolist(), PAIRS[-512:].tolist()


class Characters:
    """A tokenizer of single characters."""

    fingerprint = CHARACTERS

    def encode(self, text: str) -> list[int]:
        return [CHARACTERS.index(character) for character in text]

    def decode_batch(self, tokens: Tensor) -> list[str]:
        return ["".join(CHARACTERS[token] for token in row if token < MASK) for row in tokens.tolist()]


TOKENIZER = Characters()


def prompt_of(pair: list[int]) -> list[int]:
    return TOKENIZER.encode(f"{pair[0]}+{pair[1]}=")


def examples(step: int, rows: range) -> TrainBatch:
    """A source of examples: prompts with their answers."""
    pairs = [TRAIN[(step * 256 + row) % len(TRAIN)] for row in rows]
    tokens = torch.tensor([prompt_of(pair) + TOKENIZER.encode(f"{sum(pair):03d}") for pair in pairs])
    length = torch.full((len(pairs),), tokens.shape[1])
    return TrainBatch(tokens=tokens, prompt_len=length - NUM_DIGITS, length=length)


def measure(model: dgemma.DiffusionGemma) -> str:
    """Return accuracy and forwards on the held-out sums."""
    prompts = torch.tensor([prompt_of(pair) for pair in TEST])
    out = dgemma.generate(model, prompts, **OPTIONS, progress=False, seed=1)
    right = rewards.numeric(TOKENIZER.decode_batch(out.new_tokens), [sum(pair) for pair in TEST])
    return f"{sum(right) / len(right):6.1%} right, {out.steps.float().mean():.2f} forwards"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=300, help="updates on examples (%(default)s)")
    parser.add_argument("--runs", type=int, default=80, help="updates on runs (%(default)s)")
    parser.add_argument("--speed-weight", type=float, default=0.1, help="weight of few forwards (%(default)s)")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = dgemma.DiffusionGemma(CONFIG)
    soften_attention(model)
    settings = {"precision": "weights", "progress": False, "log_every": 10}
    with tempfile.TemporaryDirectory() as folder:
        supervised = Objective(noise=NOISE, canvas_len=NUM_DIGITS, fill_token=EOS, causal_weight=0.0)
        config = TrainConfig(steps=options.examples, batch_size=256, lr=4e-3, warmup=50, **settings)
        train(model, supervised, examples, config, out=Path(folder) / "examples")
        print(f"after {options.examples} updates on examples: {measure(model)}", flush=True)

        problems = Problems(
            prompts=[prompt_of(pair) for pair in TRAIN], answers=[sum(pair) for pair in TRAIN], batch_size=64
        )
        policy = PolicyGradient(
            problems=problems,
            reward=rewards.numeric,
            tokenizer=TOKENIZER,
            options=OPTIONS,
            group=8,
            speed_weight=options.speed_weight,
        )

        def show(record) -> None:
            if record.step % 10 == 0:
                reward, forwards = (float(record.sums[f"run/{name}"].mean()) for name in ("reward", "forwards"))
                print(f"  update {record.step:3d}: reward {reward:.3f}, forwards {forwards:.2f}", flush=True)

        config = TrainConfig(steps=options.runs, batch_size=64, lr=5e-4, warmup=5, weight_decay=0.0, **settings)
        train(model, policy, problems, config, out=Path(folder) / "runs", on_step=show)
        print(f"after {options.runs} updates on runs:      {measure(model)}")


if __name__ == "__main__":
    main()
