"""Attention under any mask, and its gradient, against float64."""

import pytest
import torch

from dgemma.train.one_pass import canvas_masks, text_masks
from dgemma_kernels.ops.masked import kernel, reference
from dgemma_kernels.training import attention
from kernel_inputs import error, make_model

ROWS, HEADS, KV_HEADS, DIM = 2, 4, 2, 32
CANVAS, CLEAN = 40, 120  # neither is a multiple of a block
STARTS = torch.tensor([[1, 41, 81], [10, 50, 90]])
DOCUMENTS = torch.tensor([20, 70, 100])  # where the second to fourth document of a row begin


def mask_of(case, device):
    """The mask (B, 1, T, S) of packed rows, as training makes it, and the numbers of queries and keys."""
    model = make_model(device, sliding_window=30)
    text = (torch.arange(CLEAN)[:, None] >= DOCUMENTS).sum(1).expand(ROWS, -1)
    if case == "text":
        tokens = torch.zeros(ROWS, CLEAN, dtype=torch.int64, device=device)
        return text_masks(model, tokens, documents=text.to(device), image_index=None)[0]
    place = (STARTS[..., None] + torch.arange(CANVAS)).clamp(max=CLEAN - 1)
    documents = text, text.gather(1, place.flatten(1)).view_as(place)
    documents = tuple(each.to(device) for each in documents)
    return canvas_masks(model, STARTS.to(device), CANVAS, CLEAN, documents=documents)[1]


def draw(num_queries, num_keys, device):
    """Queries, keys and values, the last two by position and head in memory, and a gradient of the output."""
    generator = torch.Generator().manual_seed(1)
    shapes = (num_queries, HEADS), (num_keys, KV_HEADS), (num_keys, KV_HEADS), (num_queries, HEADS)
    queries, keys, values, grad = (torch.randn(ROWS, *shape, DIM, generator=generator).to(device) for shape in shapes)
    return queries, keys.transpose(1, 2), values.transpose(1, 2), grad


def with_gradients(attend, tensors, grad, mask):
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = attend(*leaves, mask)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("case", ["text", "canvases"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 3e-3)])
def test_attention_and_its_gradient_match_float64(device, case, dtype, tolerance):
    mask = mask_of(case, device)
    tensors = [x.to(dtype) for x in draw(mask.shape[2], mask.shape[3], device)]
    got = with_gradients(kernel.attend, tensors[:3], tensors[3], mask)
    exact = [x.double() for x in tensors]
    want = with_gradients(reference.attend, exact[:3], exact[3], mask)
    for ours, theirs in zip(got, want, strict=True):
        assert error(ours, theirs) < tolerance


def test_one_mask_serves_all_rows(device):
    mask = mask_of("text", device)[:1]
    queries, keys, values, _ = draw(CLEAN, CLEAN, device)
    want = reference.attend(queries.double(), keys.double(), values.double(), mask.expand(ROWS, -1, -1, -1))
    assert error(kernel.attend(queries, keys, values, mask), want) < 1e-5


def test_blocks_that_nothing_sees_are_not_read(device):
    queries, keys, values, grad = draw(70, 200, device)
    mask = torch.ones(ROWS, 1, 70, 200, dtype=torch.bool, device=device)
    mask[..., 64:128] = False
    for hidden in (keys, values):
        hidden[:, :, 64:128] = torch.nan
    for found in with_gradients(kernel.attend, (queries, keys, values), grad, mask):
        assert found.isfinite().all()


def test_a_query_that_sees_no_key_gets_zeros_and_gives_no_gradient(device):
    queries, keys, values, grad = draw(70, 70, device)
    mask = torch.ones(ROWS, 1, 70, 70, dtype=torch.bool, device=device)
    mask[:, :, 3] = False
    out, of_queries, of_keys, _ = with_gradients(kernel.attend, (queries, keys, values), grad, mask)
    assert not out[:, 3].any()
    assert not of_queries[:, 3].any()
    assert of_keys.isfinite().all()


@pytest.mark.parametrize("head_dim", [32, 128])
def test_training_uses_the_kernels_for_small_heads_under_a_mask(device, head_dim, monkeypatch):
    calls = []
    monkeypatch.setattr(attention, "COMPILED_ON", (device.type,))
    monkeypatch.setattr(kernel, "attend", lambda *tensors: calls.append([x.dtype for x in tensors]))
    monkeypatch.setattr(attention.attention.attend, "__wrapped__", lambda *tensors: calls.append("plain"))
    queries, keys = (
        torch.zeros(ROWS, 5, HEADS, head_dim, device=device),
        torch.zeros(ROWS, 2, 7, head_dim, device=device),
    )
    mask = torch.ones(ROWS, 1, 5, 7, dtype=torch.bool, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        attention.attend(queries, keys, keys, mask)
    assert calls == ([[torch.bfloat16] * 3 + [torch.bool]] if head_dim == 32 else ["plain"])
