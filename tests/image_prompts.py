"""Prompts with random images for the tiny model that reads images."""

import torch

from dgemma import DiffusionGemma, presets
from dgemma.model.vision.images import Images

START, IMAGE, END = 53, 54, 55  # of ByteTokenizer
GRIDS = ((3, 3), (6, 9), (30, 3), (3, 21))  # columns and rows of patches, among them single tokens and long strips


def random_images(grids=GRIDS, patch_dim=48, seed=0):
    size = (sum(columns * rows for columns, rows in grids), patch_dim)
    return Images(torch.randint(256, size, generator=torch.Generator().manual_seed(seed)).byte(), tuple(grids))


def seeing_model():
    """A tiny model that reads images, with weights so large that another image gives other tokens."""
    torch.manual_seed(0)
    model = DiffusionGemma(presets.tiny(vision=True)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4)
    return model


def padded(images):
    """The arguments of transformers' tower: pixels (I, L, patch_dim), and places, -1 for padding."""
    pad = torch.nn.utils.rnn.pad_sequence
    pixels = pad(images.patches.float().div(255).split(images.num_patches), batch_first=True)
    return pixels, pad(images.positions.split(images.num_patches), batch_first=True, padding_value=-1)


def prompts(rows, seed=0):
    """Return tokens and mask (B, P), padded on the left, and the images of all rows."""
    generator = torch.Generator().manual_seed(seed)
    texts, grids = [], []
    for row in rows:
        text = [2]
        for piece in row:
            if isinstance(piece, int):
                text += torch.randint(128, 384, (piece,), generator=generator).tolist()
            else:
                text += [START, *[IMAGE] * (piece[0] * piece[1] // 9), END]
                grids.append(piece)
        texts.append(text)
    longest = max(map(len, texts))
    tokens = torch.tensor([[0] * (longest - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts])
    return tokens, mask, random_images(grids, seed=seed)
