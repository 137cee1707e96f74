"""Conditioning on a language of about 500 states at the published vocabulary."""

import torch

from dgemma.constraints.automaton import Automaton
from dgemma.constraints.canvas_language import Language
from dgemma.diffusion.prediction import SoftCap
from dgemma_kernels.engine.prediction import FusedPrediction, Logits
from dgemma_kernels.ops.automaton import kernel

B, C, V, Q, K = 1, 256, 262_144, 500, 64
WGMMA: set[str] = set()


def run_condition() -> None:
    table = torch.arange(Q)[:, None] + torch.arange(K) % 3
    table[::16] = torch.arange(K)  # states with many arcs
    automaton = Automaton.build((torch.arange(V) % K).int(), table % Q, torch.zeros(Q, dtype=torch.bool))
    language = Language(automaton, torch.zeros(B, dtype=torch.int64), torch.ones(B, Q, dtype=torch.bool))
    logits = torch.empty(B, C, V, dtype=torch.bfloat16)
    prediction = FusedPrediction(Logits(logits), (SoftCap(30.0),)).shaped(temperature=torch.ones(B))
    sums, _ = kernel.class_sums(prediction, automaton)
    weights = kernel.arc_weights(language, sums, total=True)
    best_weights = kernel.arc_weights(language, sums, total=False)
    passed = kernel.passes(language, weights, best_weights)
    kernel.sample_path(language, weights, passed.backward, torch.zeros(B, C, dtype=torch.float64))
    kernel.best_path(language, best_weights, kernel.best_pass(language, best_weights))
    kernel.class_bias(language, passed)


CALLS = {"a language of 500 states": run_condition}
