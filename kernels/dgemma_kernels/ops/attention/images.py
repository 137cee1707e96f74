"""The spans of images among new tokens, for `attention`."""

import torch
from torch import Tensor


def image_spans(numbers: Tensor) -> Tensor:
    """Return the numbers of the first and the last token of each token's image, or of the token itself if it is text.

    numbers: (B, T) integers, the image of each token, 0 for text. The tokens of an image are neighbours.
    Returns (B, T, 2) int32. It reads nothing from the device, so it can be captured.

    Example: `image_spans(torch.tensor([[0, 5, 5]]))` is [[[0, 0], [1, 2], [1, 2]]].
    """
    last = numbers.shape[1] - 1
    own = torch.arange(last + 1, device=numbers.device).expand_as(numbers)
    continues = torch.nn.functional.pad((numbers[:, 1:] == numbers[:, :-1]) & (numbers[:, 1:] > 0), (1, 1))
    first = own.masked_fill(continues[:, :-1], 0).cummax(1).values
    end = own.masked_fill(continues[:, 1:], last).flip(1).cummin(1).values.flip(1)
    return torch.stack((first, end), dim=-1).int()
