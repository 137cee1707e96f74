"""The passes over an automaton against the library's own functions, and a constrained step of the engine."""

import numpy as np
import pytest
import torch

from dgemma.constraints.tables import with_stops
from dgemma.constraints.token_automaton import TokenAutomaton
from dgemma.diffusion.joint import condition
from dgemma.diffusion.language import Language
from dgemma.diffusion.prediction import Prediction, SoftCap
from dgemma_kernels.engine.prediction import FusedPrediction, Logits
from dgemma_kernels.ops.automaton import kernel

VOCAB_SIZE, CANVAS_LEN, BATCH_SIZE = 300, 3, 2


def draw_language(device, *, num_states=18, may_end=False):
    """A random automaton with a class of more than 256 tokens.

    One state has 13 arcs out of it, and one has 17 arcs into it.
    """
    generator = np.random.default_rng(3)
    table = np.where(generator.random((num_states, 20)) < 0.2, generator.integers(0, num_states, (num_states, 20)), -1)
    table[:, 0] = -1
    table[1, 1:19] = np.arange(18)
    table[2:, 3] = 5
    table[0, 1], table[5, 1] = 1, num_states - 1  # so that texts of three tokens exist
    table = table.astype(np.int32)
    classes = np.where(np.arange(VOCAB_SIZE) < 260, 1, generator.integers(0, 20, VOCAB_SIZE))
    is_final = np.arange(num_states) == num_states - 1
    automaton = with_stops(TokenAutomaton(classes, table, is_final), (VOCAB_SIZE - 1,), VOCAB_SIZE).to(device)
    end = torch.from_numpy(np.append(is_final, True)).expand(BATCH_SIZE, -1).to(device)
    flags = torch.arange(CANVAS_LEN, device=device).expand(BATCH_SIZE, -1) >= 1 if may_end else None
    return Language(automaton, torch.tensor([0, 1], device=device), end, flags)


@pytest.mark.slow
@pytest.mark.parametrize("may_end", [False, True], ids=["stops-anywhere", "stops-late"])
def test_the_conditioned_prediction_of_the_kernels_is_that_of_the_library(device, may_end):
    language = draw_language(device, may_end=may_end)
    generator = torch.Generator().manual_seed(1)
    logits = (6 * torch.randn(BATCH_SIZE, CANVAS_LEN, VOCAB_SIZE, generator=generator)).to(device)
    canvas = torch.full((BATCH_SIZE, CANVAS_LEN), 265, device=device)
    fixed = torch.zeros_like(canvas, dtype=torch.bool)
    fixed[0, 1] = True
    u = torch.rand(BATCH_SIZE, CANVAS_LEN, generator=generator, dtype=torch.float64).to(device)
    temperature = torch.tensor([0.7, 1.1], device=device)
    fused = FusedPrediction(Logits(logits), (SoftCap(30.0),)).shaped(temperature=temperature)
    plain = torch.tanh(logits / 30) * 30
    got = condition(fused, language, canvas, fixed)
    want = condition(Prediction(plain).shaped(temperature=temperature), language, canvas, fixed)
    assert got.joint.prediction.automaton_ops is kernel
    assert want.joint.prediction.automaton_ops is None
    for name in ("forward", "backward", "best"):
        torch.testing.assert_close(
            getattr(got.joint._passes, name), getattr(want.joint._passes, name), rtol=1e-5, atol=1e-4
        )
    torch.testing.assert_close(got.joint.bias, want.joint.bias, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(got.entropy, want.entropy, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(got.confidence, want.confidence, rtol=1e-3, atol=1e-4)
    assert torch.equal(got.argmax, want.argmax)
    assert torch.equal(got.sample(u), want.sample(u))
    assert torch.equal(got.shaped(temperature=0.5).sample(u), want.shaped(temperature=0.5).sample(u))
    draft = torch.randint(VOCAB_SIZE, canvas.shape, generator=generator).to(device)
    assert torch.equal(got.joint.project(draft, fixed), want.joint.project(draft, fixed))
