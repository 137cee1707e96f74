"""The image processor: any picture → patches at the published size, and the number of tokens that it takes.

It needs Pillow (`pip install -e ".[images]"`).
"""

import base64
import binascii
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np
import torch
from einops import rearrange

from dgemma.checks import require, show
from dgemma.files import read_bytes, read_json
from dgemma.model.vision.images import Images

if TYPE_CHECKING:
    from PIL.Image import Image

    ImageSource = str | Path | bytes | np.ndarray | Image

TokenBudget = Literal[70, 140, 280, 560, 1120]

_MOST_PIXELS = 1 << 26  # of a picture; a larger one is refused before it is decoded
_MOST_BYTES = 1 << 26  # of a file
_SETTINGS = ("max_soft_tokens", "patch_size", "pooling_kernel_size")
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # others have rarely used decoders


@dataclass(frozen=True, kw_only=True)
class ImageProcessor:
    """Resizes pictures so that they fill a budget of tokens, and cuts them into patches.

    A token covers 3 × 3 patches of 16 × 16 pixels. The aspect ratio is kept, except for rounding to whole tokens.

    Example: `ImageProcessor(max_soft_tokens=70)(["photo.jpg"]).num_tokens`.
    """

    max_soft_tokens: TokenBudget = 280
    patch_size: int = 16
    pooling_kernel_size: int = 3

    def __post_init__(self) -> None:
        budgets = get_args(TokenBudget)
        require(
            self.max_soft_tokens in budgets,
            "ImageProcessor.max_soft_tokens",
            f"be one of {budgets}",
            self.max_soft_tokens,
        )

    @classmethod
    def from_pretrained(cls, path: str | Path, **settings: Any) -> Self:
        """Read the settings of a checkpoint folder. A folder without them has the published ones.

        Example: `ImageProcessor.from_pretrained(path, max_soft_tokens=560)`.
        """
        for name in ("processor_config.json", "preprocessor_config.json"):
            file = Path(path) / name
            if file.is_file():
                stored = read_json(file)
                stored = stored.get("image_processor", stored)
                settings = {key: stored[key] for key in _SETTINGS if key in stored} | settings
                break
        return cls(**settings)

    def __call__(self, pictures: Sequence["ImageSource"]) -> Images:
        """Return the patches of pictures: paths, file contents, data URLs, arrays (H, W, 3) of uint8 or PIL images.

        Example: `processor(["photo.jpg", numpy_array]).patches.shape` is (2, L, 768).
        """
        require(
            not isinstance(pictures, str | bytes) and len(pictures) > 0, "images", "be a list of pictures", pictures
        )
        arrays = [self._resize(open_picture(picture)) for picture in pictures]
        p = self.patch_size
        patches = [torch.from_numpy(rearrange(a, "(y h) (x w) c -> (y x) (h w c)", h=p, w=p)) for a in arrays]
        grids = tuple((a.shape[1] // p, a.shape[0] // p) for a in arrays)
        padded = torch.nn.utils.rnn.pad_sequence([patch.float() / 255 for patch in patches], batch_first=True)
        return Images(padded, grids, self.pooling_kernel_size)

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height that a picture is resized to, both whole tokens.

        Example: `ImageProcessor().size(512, 512)` is (768, 768), which is 256 tokens.
        """
        unit = self.patch_size * self.pooling_kernel_size
        factor = math.sqrt(self.max_soft_tokens * unit**2 / (width * height))
        columns, rows = math.floor(factor * width / unit), math.floor(factor * height / unit)
        # A very long or tall picture becomes one token high or wide.
        if rows == 0:
            columns, rows = min(width // height, self.max_soft_tokens), 1
        elif columns == 0:
            columns, rows = 1, min(height // width, self.max_soft_tokens)
        return columns * unit, rows * unit

    def _resize(self, picture: "Image") -> np.ndarray:
        from PIL.Image import Resampling

        size = self.size(*picture.size)
        return np.asarray(picture if size == picture.size else picture.resize(size, Resampling.BICUBIC))


def open_picture(picture: "ImageSource") -> "Image":
    """Return a picture as an upright RGB image. Transparency becomes white.

    Example: `open_picture("photo.jpg").size`.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise ImportError('Images need Pillow. Install it: pip install -e ".[images]".') from error
    if isinstance(picture, np.ndarray):
        fits = picture.dtype == np.uint8 and picture.ndim == 3 and picture.shape[2] == 3 and picture.size > 0
        require(fits, "image array", "be uint8 of shape (H, W, 3)", f"{picture.dtype} of shape {picture.shape}")
        return Image.fromarray(picture)
    image = picture
    name = "image" if isinstance(picture, bytes | Image.Image) else f"image {show(str(picture))}"
    try:
        if not isinstance(image, Image.Image):
            image = Image.open(io.BytesIO(_read(image)), formats=_FORMATS)
        # Sizes and frames are known from the header, before anything is decoded.
        pixels = image.width * image.height
        require(
            0 < pixels <= _MOST_PIXELS, name, f"have 1 to {_MOST_PIXELS:,} pixels", f"{image.width} × {image.height}"
        )
        require(
            getattr(image, "n_frames", 1) == 1,
            name,
            "be a still picture",
            f"{getattr(image, 'n_frames', 1)} frames",
            "Pass one frame.",
        )
        require(
            image.mode not in ("I", "F") and ";" not in image.mode,
            name,
            "have 8 bits per channel",
            f"mode {image.mode}",
            "Convert it to RGB.",
        )
        image = ImageOps.exif_transpose(image)
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
        return image.convert("RGB")
    except (UnidentifiedImageError, OSError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError):
            raise
        raise ValueError(
            f"{name} must be a picture that Pillow can read, got {error or type(error).__name__}."
        ) from error


def _read(picture: str | Path | bytes) -> bytes:
    """Return the bytes of a file, or of a data URL."""
    if isinstance(picture, bytes):
        return picture
    if isinstance(picture, str) and picture.startswith("data:"):
        head, _, data = picture.partition(",")
        require(
            head.startswith("data:image/") and head.endswith(";base64"),
            "image URL",
            "begin with data:image/…;base64,",
            head,
        )
        try:
            return base64.b64decode(data, validate=True)
        except binascii.Error as error:
            raise ValueError(f"image URL must hold base64 data, got {error}.") from error
    return read_bytes(picture, most=_MOST_BYTES)
