"""The places of images in a prompt: runs of the image token, which are read as a whole."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.checks import require
from dgemma.model.vision.images import Images


def split_images(images: Images, tokens: Tensor, image_token_id: int) -> tuple[Images | None, ...]:
    """Return the images of each row of tokens (B, T), None for a row without images."""
    counts = _is_first(tokens == image_token_id).sum(1).tolist()
    rule = f"be as many as the runs of image tokens in the prompt, {sum(counts)}"
    require(sum(counts) == len(images), "images", rule, len(images), "Use tokenizer.place_images(ids, images).")
    numbers = iter(range(len(images)))
    return tuple(images.select([next(numbers) for _ in range(count)]) if count else None for count in counts)


def join_images(rows: Sequence[Images | None] | None) -> Images | None:
    """Return the images of some rows as one value; None if there are none."""
    present = [images for images in rows or () if images is not None]
    return Images.join(present) if present else None


def find_blocks(tokens: Tensor, images: Images, image_token_id: int) -> Tensor:
    """Return the number of the image that each of tokens (B, T) belongs to, row after row; -1 for text. (B, T) int64.

    Raise unless the runs of image tokens have the sizes of the images.
    """
    is_image = tokens == image_token_id
    image_index = torch.where(is_image, _is_first(is_image).flatten().cumsum(0).view_as(tokens) - 1, -1)
    sizes = tuple(image_index[is_image].bincount().tolist())  # the host waits for the device here
    rule = f"have the sizes of the prompt's runs of image tokens, {sizes}"
    require(sizes == images.num_tokens, "images", rule, images.num_tokens, "Use tokenizer.place_images(ids, images).")
    return image_index


def _is_first(is_image: Tensor) -> Tensor:
    """Return True at the first token of each run, (B, T) bool."""
    return is_image & ~F.pad(is_image, (1, 0))[:, :-1]


def insert_features(embedded: Tensor, features: Tensor, image_index: Tensor) -> Tensor:
    """Replace the embeddings (B, T, D) of image tokens by the images' features (N, D), in order."""
    return embedded.masked_scatter((image_index >= 0)[..., None], features.to(embedded.dtype))


def split_tokens(num_tokens: int, size: int, image_index: Tensor | None) -> Iterator[slice]:
    """Yield chunks of about `size` tokens that cover all `num_tokens`. None of them cuts an image.

    A chunk is longer than `size` only if an image is.
    """
    cuts_image = [False] * (num_tokens + 1)  # a cut before this token is inside an image
    if image_index is not None:
        cuts_image[1:num_tokens] = (
            ((image_index[:, 1:] == image_index[:, :-1]) & (image_index[:, 1:] >= 0)).any(0).tolist()
        )
    start = 0
    while start < num_tokens:
        end = limit = min(start + size, num_tokens)
        while end > start and cuts_image[end]:
            end -= 1
        if end == start:
            end = next(at for at in range(limit, num_tokens + 1) if not cuts_image[at])
        yield slice(start, end)
        start = end
