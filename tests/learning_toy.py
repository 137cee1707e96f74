"""A small model whose runs can be enumerated, an objective for it, and a short training run on it."""

import itertools
from typing import Any

import torch
from torch import Tensor

import dgemma
from dgemma.train import TrainConfig, train
from dgemma.train.learning import PolicyGradient, Problems

NUM_TOKENS, CANVAS_LEN, PROMPT = 3, 2, 0
HEAT = 4.0  # so that every run is likely
NOISE = dgemma.MaskNoise(NUM_TOKENS + 1, mask_token_id=NUM_TOKENS)
OPTIONS: dict[str, Any] = {
    "max_new_tokens": CANVAS_LEN,
    "steps": 2,
    "noise": NOISE,
    "sampler": dgemma.Ancestral(),
    "temperature": HEAT,
    "stop": None,
    "eos_token_ids": [],
}
REWARD_OF = {"".join(map(str, x)): (3 * x[0] - x[1]) / 4 for x in itertools.product(range(NUM_TOKENS), repeat=2)}


class Digits:
    """A tokenizer whose tokens are digits."""

    fingerprint = "digits"

    def decode_batch(self, tokens: Tensor) -> list[str]:
        return ["".join(map(str, row)) for row in tokens.tolist()]


def table_reward(texts, answers):
    return [REWARD_OF[text] for text in texts]


def small_model(vocab_size: int = NUM_TOKENS + 1, canvas_length: int = CANVAS_LEN) -> dgemma.DiffusionGemma:
    config = dgemma.presets.tiny().replace(
        canvas_length=canvas_length,
        vocab_size=vocab_size,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=1,
        num_hidden_layers=1,
        layer_types=("full_attention",),
        num_experts=2,
    )
    torch.manual_seed(0)
    return dgemma.DiffusionGemma(config, dtype=torch.float64)


def objective(**changes: Any) -> PolicyGradient:
    problems = Problems(prompts=[[PROMPT]], answers=[None], batch_size=1, updates=changes.pop("updates", 1))
    settings = {"problems": problems, "reward": table_reward, "tokenizer": Digits(), "options": OPTIONS}
    return PolicyGradient(**{**settings, **changes})


def share_of_ones(texts, answers):
    return [text.count("1") / len(text) for text in texts]


def learn(folder, *, steps=4, updates=2, stop_at=None, model=None, **changes):
    model = model or small_model()
    problems = Problems(prompts=[[0], [1, 2], [2]], answers=[None] * 3, batch_size=2, updates=updates)
    policy = objective(problems=problems, reward=share_of_ones, group=4, **changes)
    config = TrainConfig(
        steps=steps, batch_size=2, micro_batch_size=1, lr=3e-3, warmup=0, precision="weights", progress=False
    )
    on_step = None if stop_at is None else lambda record: record.step == stop_at
    return model, train(model, policy, problems, config, out=folder, on_step=on_step)
