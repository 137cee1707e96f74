"""Train on a text whose likelihood is known, and see how close each kind of noise comes to it.

The text is a random Markov chain: 254 states, 30 tokens, about 1.72 nats a token, computed exactly. No model's bound
can lie below; an exact one's is equal. Mask noise shows how much of a canvas is noise. Uniform noise does not: told the
level, the network can be exact; without it, it must guess, and the gap is what that costs.

    python examples/12_markov_chain.py                           all four in turn; without a GPU, on a smaller chain
    python examples/12_markov_chain.py --run mask --out markov   one of them, its numbers in markov/mask/result.json
"""

import argparse
import json
import math
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import dgemma
from dgemma.config import FULL, SLIDING
from dgemma.data.markov import MarkovChain, MarkovSource
from dgemma.train.likelihood import evaluate
from dgemma.train.loop import TrainConfig, train
from dgemma.train.objective import Objective

ROPE = {"rope_type": "default", "rope_theta": 100.0}  # texts are short: turn fast


@dataclass(frozen=True, kw_only=True)
class Size:
    num_states: int
    num_successors: int
    length: int
    hidden_size: int
    num_layers: int
    steps: int
    batch_size: int
    lr: float
    num_eval_rows: int
    num_eval_samples: int


SIZES = {
    "full": Size(
        num_states=254,
        num_successors=7,
        length=30,
        hidden_size=256,
        num_layers=5,
        steps=5000,
        batch_size=512,
        lr=1.5e-3,
        num_eval_rows=8192,
        num_eval_samples=32,
    ),
    "tiny": Size(
        num_states=6,
        num_successors=2,
        length=8,
        hidden_size=32,
        num_layers=2,
        steps=20,
        batch_size=32,
        lr=1e-2,
        num_eval_rows=32,
        num_eval_samples=4,
    ),
}
# name: the noise, whether the network is told its level, and what its logits mean
RUNS = {
    "mask": ("mask", False, "mean"),
    "uniform-told": ("uniform", True, "loo"),
    "uniform-untold": ("uniform", False, "loo"),
    "uniform-untold-mean": ("uniform", False, "mean"),
}


def make_model(size: Size, told: bool, device: str) -> dgemma.DiffusionGemma:
    """A dense little DiffusionGemma, whose canvas is a whole text; after the states come the mask and a spare id."""
    config = dgemma.ModelConfig(
        vocab_size=size.num_states + 2,
        hidden_size=size.hidden_size,
        intermediate_size=4 * size.hidden_size,
        num_hidden_layers=size.num_layers,
        layer_types=(SLIDING,) * (size.num_layers - 1) + (FULL,),
        sliding_window=64,
        canvas_length=size.length,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=size.hidden_size // 4,
        num_global_key_value_heads=4,
        global_head_dim=size.hidden_size // 4,
        num_experts=1,
        top_k_experts=1,
        moe_intermediate_size=8,
        rope_parameters={SLIDING: ROPE, FULL: ROPE},
        max_position_embeddings=256,
        noise_conditioning=told,
    )
    torch.manual_seed(0)
    return dgemma.DiffusionGemma(config, device=device)


def make_objective(size: Size, kind: str, parametrisation: str) -> Objective:
    """For mask noise cross-entropy, for leave-one-out logits the bound itself, and for the mean what was published."""
    vocab_size = size.num_states + 2
    uniform = dgemma.UniformNoise(vocab_size)
    common: dict[str, Any] = {"canvas_len": size.length, "self_cond_prob": 0.0, "causal_weight": 0.0}
    if kind == "mask":
        # The mean over the masked positions of each text: the NELBO's weight 1/t, without its variance.
        noise = dgemma.MaskNoise(vocab_size, mask_token_id=size.num_states)
        return Objective(noise=noise, scored="noised", reduction="example", **common)
    if parametrisation == "loo":
        return Objective(noise=uniform, decoder_loss="nelbo", parametrisation="loo", **common)
    return Objective(noise=uniform, **common)


def run(name: str, size: Size, out: Path, device: str, seed: int, compiled: bool) -> dict[str, Any]:
    """Train, evaluate on fresh texts, and write down how far the bound is from the truth."""
    kind, told, parametrisation = RUNS[name]
    chain = MarkovChain.random(size.num_states, size.num_successors, seed=0)
    source = MarkovSource(chain=chain, length=size.length, seed=seed + 1)
    model = make_model(size, told, device)
    objective = make_objective(size, kind, parametrisation)
    config = TrainConfig(
        steps=size.steps,
        batch_size=size.batch_size,
        lr=size.lr,
        betas=(0.9, 0.98),
        weight_decay=0.0,
        warmup=size.steps // 20,
        final_lr=0.02,
        ema_decay=0.995,
        precision="mixed" if device == "cuda" else "weights",
        compile=compiled,
        checkpoint_every=size.steps,
        seed=seed,
    )
    began = time.perf_counter()
    train(model, objective, source, config, out=out)
    seconds = time.perf_counter() - began

    test = MarkovSource(chain=chain, length=size.length, seed=seed + 2)
    found = evaluate(
        model,
        test,
        objective.noise,
        num_rows=size.num_eval_rows,
        batch_size=1024,
        num_samples=size.num_eval_samples,
        parametrisation=parametrisation,
        lowest_level=1e-3,
    )
    # On the very texts evaluated the likelihood is known too, so the gap has a narrower interval than the bound.
    exact = chain.nll(test(0, range(size.num_eval_rows)).tokens)
    gap = (found.rows.nats - exact) / size.length
    result = {
        "run": name,
        "rate": chain.entropy(size.length) / size.length,
        "gap": gap.mean().item(),
        "gap_error": 1.96 * gap.std().item() / math.sqrt(len(gap)),
        "parameters": model.num_parameters(),
        "steps": size.steps,
        "batch_size": size.batch_size,
        "train_seconds": seconds,
        "seconds": time.perf_counter() - began,
        "likelihood": found.summary(),
    }
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--run", choices=[*RUNS, "all"], default="all")
    parser.add_argument("--size", choices=SIZES, default="full" if device == "cuda" else "tiny")
    parser.add_argument("--steps", type=int, help="instead of the size's own")
    parser.add_argument("--out", type=Path, help="where checkpoints and result.json go; default: a temporary folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default=device)
    parser.add_argument("--compile", action="store_true", help="compile the layers: longer to start, faster after")
    arguments = parser.parse_args()
    size = SIZES[arguments.size]
    size = replace(size, steps=arguments.steps or size.steps)
    with tempfile.TemporaryDirectory() as scratch:
        out = arguments.out or Path(scratch)
        names = list(RUNS) if arguments.run == "all" else [arguments.run]
        print(f"{'noise':26}{'exact':>8}{'bound':>9}{'gap, nats/token':>22}{'seconds':>9}")
        for name in names:
            found = run(name, size, out / name, arguments.device, arguments.seed, arguments.compile)
            gap = f"{found['gap']:.4f} ± {found['gap_error']:.4f}"
            bound = found["likelihood"]["nelbo"]
            print(f"{name:26}{found['rate']:8.4f}{bound:9.4f}{gap:>22}{found['seconds']:9.1f}", flush=True)


if __name__ == "__main__":
    main()
