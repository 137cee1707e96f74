"""Moving a sliding layer's newest tokens to the front of its buffer."""

from unittest.mock import MagicMock

import torch

from dgemma_kernels.ops.prefix import kernel, reference


def test_forget_moves_the_newest_tokens_to_the_front(device):
    # 64 columns: two programs per head.
    keys, values = torch.randn(2, 2, 3, 2, 150, 64, generator=torch.Generator().manual_seed(0)).to(device)
    lengths = torch.tensor([150, 133, 7], device=device)
    want = keys.clone(), values.clone()
    reference.forget(*want, lengths, 131)
    kernel.forget(keys, values, lengths, 131)
    for got, expected in zip((keys, values), want, strict=True):
        assert torch.equal(got[..., :131, :], expected[..., :131, :])


def test_forget_launches_for_any_number_of_rows(monkeypatch):
    # CUDA takes 2³¹ - 1 programs along the first axis of a grid and 65,535 along the others.
    launch = MagicMock()
    monkeypatch.setattr(kernel, "_forget_kernel", launch)
    cache = torch.empty(25, 512, 8, 1, 256, device="meta")
    kernel.forget(cache, cache, torch.empty(512, device="meta"), 1023)
    first, *others = launch.__getitem__.call_args.args[0]
    assert first < 2**31
    assert all(size <= 65_535 for size in others)
