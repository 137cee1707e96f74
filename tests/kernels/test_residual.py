"""Norms and the residual stream in training, and their gradients, against float64."""

import pytest
import torch

from dgemma.model.layers import rms_norm
from dgemma_kernels.ops.residual import reference
from dgemma_kernels.ops.residual.kernel import after_attention_gradient, after_experts_gradient, rms_norm_gradient
from dgemma_kernels.training.fused import gradient_of

ROWS = 3
WIDTHS = pytest.mark.parametrize("width", [64, 300])  # one block; several, the last one partly filled


def inputs(device, width, num_rows, num_vectors):
    """Return rows (M, D) and vectors (D,) in float16."""
    generator = torch.Generator().manual_seed(width)
    shapes = [(ROWS, width)] * num_rows + [(width,)] * num_vectors
    drawn = [torch.randn(*shape, generator=generator).to(device, torch.float16) for shape in shapes]
    return drawn[:num_rows], drawn[num_rows:]


def assert_matches(function, exact, *values):
    got = function(*values, 1e-6)
    want = exact(*(x.double() if isinstance(x, torch.Tensor) else x for x in values), 1e-6)
    if isinstance(got, torch.Tensor):
        got, want = (got,), (want,)
    for ours, theirs in zip(got, want, strict=True):
        # Rounding to float16: of the result, and of values that the exact function does not round.
        assert ((ours.double() - theirs).norm() / theirs.norm()).item() < 2e-3


@WIDTHS
@pytest.mark.parametrize("weighted", [True, False])
def test_the_gradient_of_a_norm_matches_float64(device, width, weighted):
    rows, (weight,) = inputs(device, width, 2, 1)
    assert_matches(rms_norm_gradient, gradient_of(rms_norm, (0,)), *rows, weight if weighted else None)


def test_another_gradient_is_added_to_that_of_a_norm(device):
    (grad, x, other), (weight,) = inputs(device, 300, 3, 1)
    assert_matches(
        lambda *values: rms_norm_gradient(*values, added=other),
        lambda *values: [of_x + other for of_x in gradient_of(rms_norm, (0,))(*values)],
        *(grad, x, weight),
    )


@WIDTHS
def test_the_gradient_after_attention_matches_float64(device, width):
    rows, vectors = inputs(device, width, 6, 4)
    exact = gradient_of(reference.after_attention, (0, 1), num_outputs=4)
    assert_matches(after_attention_gradient, exact, *rows, *vectors)


@WIDTHS
@pytest.mark.parametrize("per_row", [True, False])
def test_the_gradient_after_experts_matches_float64(device, width, per_row):
    rows, vectors = inputs(device, width, 4, 3)
    scalar = torch.tensor([[0.5], [0.75], [2.0]] if per_row else [0.7], dtype=torch.float16, device=device)
    exact = gradient_of(reference.after_experts, (0, 1, 2))
    assert_matches(after_experts_gradient, exact, *rows, *vectors, scalar)
