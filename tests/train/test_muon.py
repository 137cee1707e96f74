"""Muon against torch's own, one matrix at a time, against a singular value decomposition and against AdamW."""

import pytest
import torch
from torch import nn

import next_token
from dgemma.train import TrainConfig, train
from dgemma.train.muon import muon, orthogonal

SHAPES = {
    "layers.0.mlp.up_proj.weight": (12, 6),
    "layers.1.mlp.up_proj.weight": (12, 6),
    "layers.0.mlp.down_proj.weight": (6, 12),
    "layers.0.experts.down_proj": (3, 6, 4),
    "layers.0.router.proj.weight": (3, 6),
    "layers.0.input_layernorm.weight": (6,),
    "embed_tokens.weight": (20, 6),
}
IS_MATRIX = ("mlp", "experts")


def parameters():
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def move(optimizer, named, *, steps=3):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        grads = {name: torch.randn(SHAPES[name], generator=generator) for name in SHAPES}
        for name, parameter in named.items():
            parameter.grad = grads[name.split("#")[0]][tuple(map(int, name.split("#")[1:]))]
        optimizer.step()
        optimizer.zero_grad()


def test_matrices_step_as_torchs_muon_has_it_and_the_rest_as_adamw():
    ours, options = parameters(), {"lr": 0.03, "weight_decay": 0.1}
    move(muon(ours, **options), ours)
    # Experts are matrices stacked.
    theirs = {name: p for name, p in parameters().items() if "experts" not in name}
    experts = parameters()["layers.0.experts.down_proj"].detach()
    theirs |= {f"layers.0.experts.down_proj#{n}": nn.Parameter(matrix.clone()) for n, matrix in enumerate(experts)}
    matrices = {name: p for name, p in theirs.items() if any(part in name for part in IS_MATRIX)}
    others = {name: p for name, p in theirs.items() if name not in matrices}
    move(torch.optim.Muon(matrices.values(), **options, adjust_lr_fn="match_rms_adamw"), matrices)
    move(torch.optim.AdamW(others.values(), **options, betas=(0.9, 0.98)), others)
    start = parameters()
    for name, parameter in theirs.items():
        name, *index = name.split("#")
        found, begun = (named[name][tuple(map(int, index))] for named in (ours, start))
        close = 1e-6 if name in others else 0.03 * (parameter - begun).abs().max().item()  # theirs is in bfloat16
        torch.testing.assert_close(found, parameter, atol=close, rtol=0)
        assert (found - begun).abs().max() > 0.01


@pytest.mark.parametrize("shape", [(8, 16), (3, 8, 20), (3, 20, 8), (2, 3, 8, 12)])
def test_orthogonal_keeps_the_singular_vectors_and_levels_the_values(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    found = left.mT @ orthogonal(matrices) @ right.mT
    values = found.diagonal(dim1=-2, dim2=-1)
    assert values.min() > 0.68
    assert values.max() < 1.14
    torch.testing.assert_close(found, torch.diag_embed(values), atol=1e-4, rtol=0)


def test_a_matrix_without_a_gradient_stays_and_zeros_do_no_harm():
    named = {name: p for name, p in parameters().items() if "mlp" in name}
    optimizer, (still, zero, other) = muon(named, lr=0.1), named.values()
    zero.grad, other.grad = torch.zeros_like(zero), torch.ones_like(other)
    before = [p.detach().clone() for p in (still, zero, other)]
    optimizer.step()
    assert [torch.equal(p, was) for p, was in zip((still, zero, other), before, strict=True)] == [True, True, False]
    with pytest.raises(ValueError, match=r"Muon\.step closure must be None"):
        optimizer.step(lambda: 0.0)


def test_a_run_with_it_learns_and_resumes_in_the_same_bits(tmp_path):
    config = TrainConfig(steps=40, batch_size=8, lr=0.0, warmup=4, precision="weights", log_every=4)

    def run(out, stop=None):
        model = next_token.model()
        kwargs = {"out": tmp_path / out, "optimizer": lambda named: muon(named, lr=0.02)}
        on_step = (lambda record: record.step == stop) if stop else None
        result = train(model, next_token.NextToken(), next_token.counting, config, on_step=on_step, **kwargs)
        return model.state_dict(), result.log.column("loss")[1]

    straight, losses = run("straight")
    assert sum(losses[-5:]) / 5 < losses[0] - 1
    run("resumed", stop=7)
    resumed, _ = run("resumed")
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
