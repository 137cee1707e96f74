"""A checkpoint's own sampler in the engine: the general path, not the published sampler's single launch."""

import copy
from dataclasses import replace

import pytest
import torch

import dgemma
from dgemma_kernels import accelerate
from dgemma_kernels.engine import published
from dgemma_kernels.ops.vocabulary import kernel as vocabulary
from kernel_inputs import make_model


@pytest.mark.slow
def test_a_checkpoint_with_its_own_sampler_generates_the_tokens_of_the_reference(monkeypatch, device):
    monkeypatch.setattr(vocabulary, "CHUNK", 16)  # three chunks
    launches = []
    monkeypatch.setattr(published, "accept", lambda *args, **more: launches.append(1))
    model = make_model(device)
    sampler = dgemma.LeaveOneOutGibbs(corrections=1, num_positions=2, choice_temperature=0.5)
    model.generation = replace(model.generation, sampler=dgemma.describe_sampler(sampler))
    tokens = torch.randint(model.config.vocab_size, (2, 5), generator=torch.Generator().manual_seed(0)).to(device)
    options = {"steps": 3, "max_new_tokens": model.config.canvas_length, "eos_token_ids": (), "progress": False}
    want, got = (dgemma.generate(m, tokens, **options) for m in (copy.deepcopy(model), accelerate(model)))
    assert torch.equal(got.new_tokens, want.new_tokens)
    assert torch.equal(got.steps, want.steps)
    assert not launches
