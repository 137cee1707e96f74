"""Moving a sliding layer's newest tokens to the front of its buffer."""

import pytest
import torch

from dgemma_kernels.engine.cache import forget


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forget_moves_the_newest_tokens_to_the_front(dtype, device):
    # Keys and values of two layers; rows that are full, hold a few tokens too many, and hold few tokens.
    sliding = torch.randn(2, 2, 3, 2, 150, 64, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    before, lengths = sliding.clone(), torch.tensor([150, 133, 7], device=device)
    forget(sliding, lengths, 131)
    for row, first in enumerate((19, 2, 0)):
        assert torch.equal(sliding[:, :, row, :, :131], before[:, :, row, :, first : first + 131])
