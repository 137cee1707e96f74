"""Images as the model reads them: patches and where each patch lies."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Images:
    """Patches of I images, padded to the largest, and the columns and rows of each image's grid of patches.

    The images are in the order of their tokens in the prompt: row by row of the batch.

    Example: `ImageProcessor()(["photo.jpg"]).num_tokens` is (256,) for a square photo.
    """

    patches: Tensor  # (I, L, patch_dim), values in [0, 1]
    grids: tuple[tuple[int, int], ...]  # columns and rows of patches
    pooling: int = 3  # patches per side of a token

    def __len__(self) -> int:
        return len(self.grids)

    @property
    def num_tokens(self) -> tuple[int, ...]:
        """The number of tokens of each image."""
        return tuple(columns * rows // self.pooling**2 for columns, rows in self.grids)

    @property
    def positions(self) -> Tensor:
        """Column and row of each patch, (I, L, 2) int64; -1 for padding."""
        places = torch.full((*self.patches.shape[:2], 2), -1, dtype=torch.int64)
        for image, (columns, rows) in enumerate(self.grids):
            y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
            places[image, : rows * columns] = torch.stack((x, y), dim=-1).flatten(0, 1)
        return places.to(self.patches.device)

    def to(self, device: torch.device | str) -> Self:
        return type(self)(self.patches.to(device), self.grids, self.pooling)

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Return the images of several values as one, in this order.

        Example: `Images.join([processor(["a.png"]), processor(["b.png"])])`.
        """
        longest = max(part.patches.shape[1] for part in parts)
        padded = [F.pad(part.patches, (0, 0, 0, longest - part.patches.shape[1])) for part in parts]
        return cls(torch.cat(padded), tuple(grid for part in parts for grid in part.grids), parts[0].pooling)
