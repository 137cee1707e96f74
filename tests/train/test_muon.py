"""Muon agrees with torch's Muon per matrix, with a singular value decomposition, and with AdamW."""

import copy
import pickle

import pytest
import torch
from torch import nn

import next_token
from dgemma.train import TrainConfig, train
from dgemma.train.optimizer import muon, orthogonal
from dgemma_kernels import accelerate_training

SHAPES = {
    "layers.0.mlp.up_proj.weight": (12, 6),
    "layers.1.mlp.up_proj.weight": (12, 6),
    "layers.0.mlp.down_proj.weight": (6, 12),
    "layers.0.experts.gate_up_proj": (3, 8, 6),
    "layers.0.experts.down_proj": (3, 6, 4),
    "layers.0.router.proj.weight": (3, 6),
    "layers.0.input_layernorm.weight": (6,),
    "embed_tokens.weight": (20, 6),
}
IS_MATRIX = ("mlp", "experts")
BETAS = (0.9, 0.98)


def parameters():
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def index(text):
    """Return an index from text: an integer for "3", a slice of rows for "0:4"."""
    return slice(*map(int, text.split(":"))) if ":" in text else int(text)


def move(optimizer, named, *, steps=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        grads = {name: torch.randn(SHAPES[name], generator=generator) for name in SHAPES}
        for name, parameter in named.items():
            name, *expert_and_rows = name.split("#")
            parameter.grad = grads[name][tuple(index(text) for text in expert_and_rows)]
        optimizer.step()
        optimizer.zero_grad()


def one_by_one(named):
    """Return each matrix of the experts separately; the stacked gate and up projections are two matrices."""
    single = {name: p for name, p in named.items() if "experts" not in name}
    for expert, (gate_up, down) in enumerate(
        zip(named["layers.0.experts.gate_up_proj"], named["layers.0.experts.down_proj"], strict=True)
    ):
        single[f"layers.0.experts.down_proj#{expert}"] = down
        single[f"layers.0.experts.gate_up_proj#{expert}#0:4"] = gate_up[:4]
        single[f"layers.0.experts.gate_up_proj#{expert}#4:8"] = gate_up[4:]
    return {name: nn.Parameter(p.detach().clone()) for name, p in single.items()}


def test_matrices_step_as_in_torchs_muon_and_the_rest_as_in_adamw():
    ours, options = parameters(), {"lr": 0.03, "weight_decay": 0.1}
    move(muon(ours, **options), ours)
    theirs, start = one_by_one(parameters()), one_by_one(parameters())
    matrices = {name: p for name, p in theirs.items() if any(part in name for part in IS_MATRIX)}
    others = {name: p for name, p in theirs.items() if name not in matrices}
    norms = [others["layers.0.input_layernorm.weight"]]
    decaying = [others["layers.0.router.proj.weight"], others["embed_tokens.weight"]]
    adamw = torch.optim.AdamW([{"params": decaying}, {"params": norms, "weight_decay": 0.0}], **options, betas=BETAS)
    move(torch.optim.Muon(matrices.values(), **options, adjust_lr_fn="match_rms_adamw"), matrices)
    move(adamw, others)
    for name, actual in one_by_one(ours).items():
        moved = (theirs[name] - start[name]).abs().max().item()
        close = 1e-6 if name in others else 0.03 * moved  # torch computes in bfloat16
        torch.testing.assert_close(actual, theirs[name], atol=close, rtol=0)
        assert moved > 0.01


def test_the_fused_kernel_takes_the_same_steps_and_counts_them_on_its_device():
    plain, ours = parameters(), parameters()
    move(muon(plain, lr=0.03, weight_decay=0.1), plain)
    optimizer = muon(ours, lr=0.03, weight_decay=0.1)
    for group in optimizer.param_groups:
        assert not group["fused"]  # below it is set, as on a GPU
        group["fused"] = True
    move(optimizer, ours)
    for name in ours:
        torch.testing.assert_close(ours[name], plain[name], atol=1e-6, rtol=0)
    assert optimizer.state[ours["embed_tokens.weight"]]["step"].item() == 3


@pytest.mark.parametrize(
    "make_again",
    [
        lambda ours, optimizer: copy.deepcopy((ours, optimizer)),
        lambda ours, optimizer: pickle.loads(pickle.dumps((ours, optimizer))),
        lambda ours, optimizer: reloaded(*copy.deepcopy((ours, optimizer.state_dict()))),
    ],
    ids=["deepcopy", "pickle", "state_dict"],
)
def test_a_copy_continues_in_the_same_bits(make_again):
    ours = parameters()
    optimizer = muon(ours, lr=0.03, weight_decay=0.1)
    move(optimizer, ours)
    again, optimizer_again = make_again(ours, optimizer)
    move(optimizer, ours, seed=2)
    assert not any(torch.equal(ours[name], again[name]) for name in ours)
    move(optimizer_again, again, seed=2)
    assert all(torch.equal(ours[name], again[name]) for name in ours)


def reloaded(named, state):
    optimizer = muon(named, lr=1.0)
    optimizer.load_state_dict(state)
    return named, optimizer


def test_a_schedule_of_the_learning_rate_reaches_all_parameters():
    named = parameters()
    optimizer = muon(named, lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    move(optimizer, named)
    assert all(torch.equal(named[name], start) for name, start in parameters().items())


@pytest.mark.gpu
def test_the_door_of_training_fuses_adamw_and_multiplies_in_bfloat16():
    model = next_token.model().cuda()
    named = {name: p.detach().cuda().requires_grad_() for name, p in parameters().items()}
    matrices = torch.randn(2, 8, 16, device="cuda")
    assert not any(group["fused"] for group in muon(named, lr=0.1).param_groups)
    assert orthogonal(matrices).dtype == torch.float32
    with accelerate_training(model):
        assert all(group["fused"] for group in muon(named, lr=0.1).param_groups)
        assert orthogonal(matrices).dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(8, 16), (3, 8, 20), (3, 20, 8), (2, 3, 8, 12)])
def test_orthogonal_keeps_the_singular_vectors_and_equalises_the_values(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    actual = left.mT @ orthogonal(matrices) @ right.mT
    values = actual.diagonal(dim1=-2, dim2=-1)
    assert values.min() > 0.68
    assert values.max() < 1.14
    torch.testing.assert_close(actual, torch.diag_embed(values), atol=1e-4, rtol=0)
    # Five rounds in bfloat16, whose steps are 2^-8.
    torch.testing.assert_close(orthogonal(matrices, torch.bfloat16).float(), orthogonal(matrices), atol=0.03, rtol=0)


def test_a_matrix_without_a_gradient_stays_and_zero_gradients_give_no_nan():
    named = {name: p for name, p in parameters().items() if "mlp" in name}
    optimizer, (still, zero, other) = muon(named, lr=0.1), named.values()
    zero.grad, other.grad = torch.zeros_like(zero), torch.ones_like(other)
    before = [p.detach().clone() for p in (still, zero, other)]
    optimizer.step()
    assert [torch.equal(p, was) for p, was in zip((still, zero, other), before, strict=True)] == [True, True, False]
    with pytest.raises(ValueError, match=r"Muon\.step closure must be None"):
        optimizer.step(lambda: 0.0)


@pytest.mark.slow
def test_a_run_with_muon_learns_and_resumes_in_the_same_bits(tmp_path):
    config = TrainConfig(steps=24, batch_size=8, lr=0.0, warmup=4, precision="weights", log_every=4)

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
