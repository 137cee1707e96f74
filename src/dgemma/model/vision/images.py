"""Images as the model reads them: patches, and the grid that they come from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from dgemma.checks import require, require_tensor, short_repr
from dgemma.model.config import VisionConfig


@dataclass(frozen=True, eq=False)
class Images:
    """The patches of some images, one image after the other, and the size of each image in patches.

    The images are in the order of their tokens in the prompt; in a batch, row after row.

    Example: `ImageProcessor()(["photo.jpg"]).num_tokens` is (256,) for a square photo.
    """

    patches: Tensor  # (L, patch_dim) uint8: the pixels of a patch, row by row
    grids: tuple[tuple[int, int], ...]  # columns and rows of patches, both multiples of `pooling`
    pooling: int = 3  # patches per side of a token

    __repr__ = short_repr

    def __post_init__(self) -> None:
        rule = f"be uint8 patches ({sum(self.num_patches)}, patch_dim), as many as the grids have"
        require_tensor(self.patches, "Images.patches", rule, shape=(sum(self.num_patches), None), dtypes=(torch.uint8,))

    def __len__(self) -> int:
        return len(self.grids)

    @property
    def num_patches(self) -> tuple[int, ...]:
        """The number of patches of each image."""
        return tuple(columns * rows for columns, rows in self.grids)

    @property
    def num_tokens(self) -> tuple[int, ...]:
        """The number of tokens of each image."""
        return tuple(patches // self.pooling**2 for patches in self.num_patches)

    @property
    def positions(self) -> Tensor:
        """Column and row of each patch in its image, (L, 2) int64."""
        grids = [torch.cartesian_prod(torch.arange(rows), torch.arange(columns)) for columns, rows in self.grids]
        return torch.cat(grids).flip(-1).to(self.patches.device)

    def check(self, config: VisionConfig) -> None:
        """Raise unless a vision tower of this config reads images of this geometry."""
        sizes = self.patches.shape[1], self.pooling
        fits = sizes == (config.patch_dim, config.pooling_kernel_size)
        fix = "Use ImageProcessor.from_pretrained(path) of the same checkpoint."
        rule = f"have patches of {config.patch_dim} values and {config.pooling_kernel_size} patches per token side"
        require(fits, "images", rule, sizes, fix)
        longest, most = max(max(grid) for grid in self.grids), config.position_embedding_size
        fix = "Lower max_soft_tokens (--image-tokens)."
        require(longest <= most, "images", f"have at most {most} patches per side", longest, fix)

    def to(self, device: torch.device | str) -> Self:
        return type(self)(self.patches.to(device), self.grids, self.pooling)

    def select(self, numbers: Sequence[int]) -> Self:
        """Return some of the images, by their numbers, in this order."""
        parts = self.patches.split(self.num_patches)
        patches = torch.cat([parts[number] for number in numbers]) if numbers else self.patches[:0]
        return type(self)(patches, tuple(self.grids[number] for number in numbers), self.pooling)

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Return the images of several values as one, in this order.

        Example: `Images.join([processor(["a.png"]), processor(["b.png"])])`.
        """
        grids = tuple(grid for part in parts for grid in part.grids)
        return cls(torch.cat([part.patches for part in parts]), grids, parts[0].pooling)
