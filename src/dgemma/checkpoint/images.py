"""The image processor: any picture → patches that fill a budget of tokens. Also pictures inside chats.

It needs Pillow (`pip install -e ".[images]"`). The reference is transformers' Gemma4ImageProcessorPil.
"""

import base64
import binascii
import hashlib
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
from einops import rearrange

from dgemma.checkpoint.tokenizer import IMAGE_MARKER, Tokenizer, explained
from dgemma.checks import Checked, Count, Words, require
from dgemma.files import read_bytes, read_json
from dgemma.location import resolve, stored_folder
from dgemma.model.config import ModelConfig
from dgemma.model.denoiser import Denoiser, require_vision
from dgemma.model.vision.images import Images
from dgemma.printing import printable

if TYPE_CHECKING:
    from PIL.Image import Image

    ImageSource = str | Path | bytes | np.ndarray | Image

_FILES = ("config.json", "preprocessor_config.json", "processor_config.json")  # a later one takes precedence
_SETTINGS = ("max_soft_tokens", "patch_size", "pooling_kernel_size")
_FIXED = {"do_resize": True, "do_rescale": True, "do_convert_rgb": True, "do_normalize": False, "resample": 3}
_MOST_PIXELS = 1 << 26  # a larger picture is refused before it is decoded
_MOST_BYTES = 1 << 26  # of a file
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # other decoders are rarely used, and less safe


@dataclass(frozen=True, kw_only=True)
class ImageProcessor(Checked):
    """Resizes pictures so that they fill a budget of tokens, and cuts them into patches.

    A token covers 3 × 3 patches of 16 × 16 pixels. The aspect ratio is kept, except for rounding to whole tokens.

    Example: `ImageProcessor(max_soft_tokens=70)(["photo.jpg"]).num_tokens`.
    """

    max_soft_tokens: Literal[70, 140, 280, 560, 1120] = 280
    patch_size: Count = 16
    pooling_kernel_size: Count = 3

    @classmethod
    def from_pretrained(cls, path_or_repo: str | Path, *, max_soft_tokens: int | None = None) -> Self:
        """Read the settings of a checkpoint folder or hub id, by default with the checkpoint's budget of tokens.

        Example: `ImageProcessor.from_pretrained(path, max_soft_tokens=560)`.
        """
        folder = stored_folder(resolve(path_or_repo, files=_FILES))
        settings: dict[str, Any] = {}
        for name in _FILES:
            if (folder / name).is_file():
                stored = read_json(folder / name)
                stored = stored.get("vision_config" if name == "config.json" else "image_processor", stored) or {}
                owner = f"the image settings of {folder / name}"
                require(isinstance(stored, Mapping), owner, "be a dictionary", stored)
                others = {
                    key: stored.get(key, value) for key, value in _FIXED.items() if stored.get(key, value) != value
                }
                require(not others, owner, f"be {_FIXED}", others, "dgemma has no others.")
                settings |= {key: stored[key] for key in _SETTINGS if key in stored}
        return cls(**settings | ({} if max_soft_tokens is None else {"max_soft_tokens": max_soft_tokens}))

    def __call__(self, images: Sequence["ImageSource"]) -> Images:
        """Return the patches of pictures: paths, file contents, data URLs, arrays (H, W, 3) of uint8 or PIL images.

        Example: `processor(["photo.jpg", numpy_array]).grids`.
        """
        is_list = isinstance(images, Sequence) and not isinstance(images, str | bytes) and len(images) > 0
        require(is_list, "ImageProcessor images", "be a list of pictures", images)
        arrays = [self._resize(open_image(image)) for image in images]
        p = self.patch_size
        patches = [torch.from_numpy(rearrange(a, "(y h) (x w) c -> (y x) (h w c)", h=p, w=p)) for a in arrays]
        grids = tuple((a.shape[1] // p, a.shape[0] // p) for a in arrays)
        return Images(torch.cat(patches), grids, self.pooling_kernel_size)

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

    def _resize(self, image: "Image") -> np.ndarray:
        from PIL import Image

        size = self.size(*image.size)
        return np.array(image if size == image.size else image.resize(size, Image.Resampling.BICUBIC))


def open_image(source: "ImageSource", *, most_pixels: int = _MOST_PIXELS) -> "Image":
    """Return a picture as an upright RGB image. Transparency becomes white. A larger picture is not decoded."""
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise ImportError('Images need Pillow. Install it: pip install -e ".[images]".') from error
    if isinstance(source, np.ndarray):
        fits = source.dtype == np.uint8 and source.ndim == 3 and source.shape[2] == 3 and source.size > 0
        require(fits, "image array", "be uint8 of shape (H, W, 3)", Words(f"{source.dtype} of shape {source.shape}"))
        source = Image.fromarray(source)
    is_path = isinstance(source, Path) or (isinstance(source, str) and not is_data_url(source))
    name = f"image {printable(str(source))}" if is_path else "image"
    problem = f"{name} must be a picture that Pillow can read"
    fix = f"Save it as PNG, with at most {most_pixels:,} pixels."
    if not isinstance(source, Image.Image):
        data = io.BytesIO(_read(source))
        with explained(problem, fix):
            try:
                source = Image.open(data, formats=_FORMATS)
            except UnidentifiedImageError:
                # Pillow's message shows an address.
                raise ValueError("its format is unknown, or it has no pixels") from None
    # The header has the size and the mode, so nothing is decoded before these checks.
    width, height = source.size
    fits = 0 < width * height <= most_pixels
    require(fits, name, f"have 1 to {most_pixels:,} pixels", Words(f"{width} × {height}"), "Resize it.")
    with explained(problem, fix):
        # A phone stores depth or brightness as further frames of a photo, which Pillow calls MPO.
        is_animated = getattr(source, "is_animated", False) and source.format != "MPO"
    require(not is_animated, name, "be a still picture", Words("several frames"), "Pass one frame.")
    is_wide = source.mode in ("I", "F") or ";" in source.mode
    require(not is_wide, name, "have 8 bits per channel", Words(f"mode {source.mode}"), "Convert it to RGB.")
    with explained(problem, fix):
        image = ImageOps.exif_transpose(source)
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        return image.convert("RGB")


def image_digest(source: "ImageSource") -> str:
    """Return a digest of a picture's pixels, by which a result is known to belong to it."""
    image = open_image(source)
    return hashlib.blake2b(repr(image.size).encode() + image.tobytes(), digest_size=16).hexdigest()


def processor_of(model: Denoiser) -> ImageProcessor:
    """Return the image processor of a model's checkpoint, or one for the sizes of its vision tower."""
    require_vision(model)
    if model.source is not None:
        return ImageProcessor.from_pretrained(model.source, max_soft_tokens=model.image_tokens)
    vision = model.config.vision if isinstance(model.config, ModelConfig) else None
    sizes = {} if vision is None else {name: getattr(vision, name) for name in _SETTINGS[1:]}
    return ImageProcessor(**sizes | ({} if model.image_tokens is None else {"max_soft_tokens": model.image_tokens}))


def encode_text(tokenizer: Tokenizer, text: str, images: Images | None) -> list[int]:
    """Return the tokens of a text with images. A text without the marker `<|image|>` begins with its images."""
    if images is None:
        return tokenizer.encode(text)
    marked = text if IMAGE_MARKER in text else IMAGE_MARKER * len(images) + text
    return tokenizer.place_images(tokenizer.encode(marked), images)


def take_images(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a chat whose image parts are markers, and the pictures that the parts name, in order.

    A part is {"type": "image", "image": "photo.jpg"} or OpenAI's {"type": "image_url", "image_url": {"url": ...}}.
    """
    sources: list[str] = []

    def mark(part: Any) -> Any:
        if not isinstance(part, Mapping) or part.get("type") not in ("image", "image_url"):
            return part
        source: Any = part.get(part["type"])
        source = source.get("url") if isinstance(source, Mapping) else source
        require(isinstance(source, str), "an image part", "name a file or a data URL", part)
        sources.append(source)
        return {"type": "image"}

    def mark_all(message: Mapping[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        return {**message, "content": [mark(part) for part in content]} if isinstance(content, list) else dict(message)

    return [mark_all(message) for message in messages], sources


def is_data_url(source: str) -> bool:
    return source[:5].lower() == "data:"


def _read(source: str | Path | bytes) -> bytes:
    """Return the bytes of a file, or of a data URL."""
    if isinstance(source, bytes):
        return source
    if isinstance(source, str) and is_data_url(source):
        head, _, data = source.partition(",")
        is_base64 = head.lower().startswith("data:image/") and head.lower().endswith(";base64")
        require(is_base64, "image URL", "begin with data:image/…;base64,", head)
        require(len(data) <= 2 * _MOST_BYTES, "image URL", f"have at most {2 * _MOST_BYTES:,} characters", len(data))
        try:
            return base64.b64decode(data, validate=True)
        except binascii.Error as error:
            raise ValueError(f"image URL must hold base64 data, got an error: {error}.") from None
    require(isinstance(source, str | Path), "image", "be a path, bytes, an array or a PIL image", source)
    is_url = isinstance(source, str) and "://" in source
    require(not is_url, "image", "be a file or a data URL", source, "Download it: other URLs are not fetched.")
    return read_bytes(source, most=_MOST_BYTES)
