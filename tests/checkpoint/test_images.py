"""The image processor against transformers' Gemma4ImageProcessorPil, and pictures that it must refuse."""

import base64
import io
import itertools
import json
import random
import struct
import sys
import zlib
from contextlib import suppress

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Gemma4Processor, GemmaTokenizer
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from dgemma import ByteTokenizer, ImageProcessor, Tokenizer, presets
from dgemma.checkpoint.images import open_image, take_images

BUDGETS = (70, 140, 280, 560, 1120)


def noise(width, height, mode="RGB", seed=0):
    channels = {"L": 1, "RGB": 3, "RGBA": 4, "CMYK": 4}[mode]
    pixels = np.random.default_rng(seed).integers(256, size=(height, width, channels), dtype=np.uint8)
    return Image.fromarray(pixels[..., 0] if channels == 1 else pixels, mode)


def saved(image, format="PNG", **options):
    data = io.BytesIO()
    image.save(data, format, **options)
    return data.getvalue()


def assert_same(image, budget):
    """Pixels, positions and the number of tokens equal the published processor's."""
    theirs = Gemma4ImageProcessorPil(max_soft_tokens=budget)([image], return_tensors="pt")
    ours = ImageProcessor(max_soft_tokens=budget)([image])
    assert ours.num_tokens == tuple(theirs["num_soft_tokens_per_image"])
    length = len(ours.patches)
    assert torch.equal(ours.patches.float() / 255, theirs["pixel_values"][0, :length].float())
    assert torch.equal(ours.positions, theirs["image_position_ids"][0, :length])
    assert (theirs["image_position_ids"][0, length:] == -1).all()


@pytest.mark.slow
def test_pixels_positions_and_tokens_equal_the_published_ones_on_200_sizes():
    rng = random.Random(0)
    sizes = [(1, 1), (1, 300), (2000, 1), (47, 48), (384, 384), (768, 48), (1023, 1), (333, 7), (48, 3360)]
    sizes += [(rng.randint(1, 400), rng.randint(1, 400)) for _ in range(200 - len(sizes))]
    for number, (width, height) in enumerate(sizes):
        assert_same(noise(width, height, seed=number), 70 if number % 8 else 280)


@pytest.mark.parametrize(("budget", "mode"), [*((b, "RGBA") for b in BUDGETS), (70, "L"), (70, "CMYK")])
def test_every_budget_and_mode_equals_the_published_one(budget, mode):
    assert_same(noise(200, 99, mode), budget)


def test_a_picture_is_enlarged_until_it_fills_the_budget():
    """512² becomes 768², 256 tokens. Without enlarging it would be 528², 121 tokens."""
    assert ImageProcessor().size(512, 512) == (768, 768)
    assert ImageProcessor()([noise(512, 512)]).num_tokens == (256,)
    with pytest.raises(ValueError, match=r"max_soft_tokens must be 70 or 140 or 280 or 560 or 1120, got 100"):
        ImageProcessor(max_soft_tokens=100)


def test_paths_bytes_data_urls_arrays_and_images_give_the_same_patches(tmp_path):
    image = noise(30, 20)
    (tmp_path / "a.png").write_bytes(saved(image))
    url = "data:image/png;base64," + base64.b64encode(saved(image)).decode()
    shouted = url.replace("data:image/png;base64", "DATA:IMAGE/PNG;BASE64")
    sources = [tmp_path / "a.png", str(tmp_path / "a.png"), saved(image), url, shouted, np.asarray(image), image]
    images = ImageProcessor(max_soft_tokens=70)(sources)
    first, *others = images.patches.split(images.num_patches)
    assert all(torch.equal(first, other) for other in others)


def test_the_camera_s_orientation_is_applied_and_transparency_becomes_white():
    image = noise(30, 20)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 90° clockwise
    turned = open_image(saved(image, exif=exif.tobytes()))
    assert np.array_equal(np.asarray(turned), np.rot90(np.asarray(image), k=-1))
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    assert (np.asarray(open_image(clear)) == 255).all()


def test_of_a_photo_with_depth_the_photo_is_read():
    """Phones store depth or brightness as a second frame, in the format that Pillow calls MPO."""
    photo, depth = Image.new("RGB", (30, 20), "red"), Image.new("RGB", (15, 10), "blue")
    stored = saved(photo, "MPO", save_all=True, append_images=[depth])
    assert Image.open(io.BytesIO(stored)).n_frames == 2
    assert open_image(stored).size == (30, 20)


def tiny_png(width, height):
    """A PNG of a hundred bytes, whose header has any size."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(9))) + chunk(b"IEND", b"")


def test_bad_pictures_get_one_sentence(monkeypatch, tmp_path):
    frames = [noise(4, 4), noise(4, 4, seed=1)]
    cases = [
        (b"not a picture", "must be a picture that Pillow can read"),
        (saved(noise(90, 90))[:5000], "must be a picture that Pillow can read"),
        (
            tiny_png(100_000, 100_000),
            r"must be .* \(.*exceeds limit.*\)\. Save it as PNG, with at most 67,108,864 pixels",
        ),
        (tiny_png(0, 4), "its format is unknown, or it has no pixels"),
        ("http://example.com/x.png", "got 'http://example.com/x.png'. Download it: other URLs are not fetched."),
        (saved(frames[0], "GIF", save_all=True, append_images=frames[1:]), "must be a still picture, got several"),
        (Image.new("F", (4, 4)), "must have 8 bits per channel, got mode F"),
        (Image.new("RGB", (0, 4)), "must have 1 to 67,108,864 pixels, got 0 × 4"),
        (np.zeros((4, 4), np.uint8), r"image array must be uint8 of shape \(H, W, 3\)"),
        ("data:text/html;base64,aaaa", "image URL must begin with data:image/"),
        ("data:image/png;base64,a", "image URL must hold base64 data"),
        (3, "image must be a path, bytes, an array or a PIL image, got 3"),
    ]
    for source, sentence in cases:
        with pytest.raises(ValueError, match=sentence):
            open_image(source)
    large = saved(Image.new("1", (1 << 14, (1 << 12) + 1)))
    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("decoded before its size was checked"))
    with pytest.raises(ValueError, match="must have 1 to 67,108,864 pixels, got 16384 × 4097"):
        open_image(large)
    with pytest.raises(FileNotFoundError):
        open_image(tmp_path / "absent.png")
    for images in ("photo.jpg", b"", [], None):
        with pytest.raises(ValueError, match="ImageProcessor images must be a list of pictures"):
            ImageProcessor()(images)


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_damaged_files_never_raise_anything_but_a_value_error():
    rng = random.Random(0)
    files = [saved(noise(20, 20), format) for format in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM")]
    for data, _ in itertools.product(files, range(60)):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 8)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        with suppress(ValueError):
            assert open_image(bytes(damaged)).mode == "RGB"


def test_settings_come_from_the_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(presets.tiny(vision=True).to_hf()))
    assert ImageProcessor.from_pretrained(tmp_path) == ImageProcessor(patch_size=4)
    Gemma4ImageProcessorPil(max_soft_tokens=140).save_pretrained(tmp_path)
    assert ImageProcessor.from_pretrained(tmp_path) == ImageProcessor(max_soft_tokens=140)
    assert ImageProcessor.from_pretrained(tmp_path, max_soft_tokens=70).max_soft_tokens == 70
    nested = {"image_processor": {"max_soft_tokens": 560, "do_normalize": True}}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    with pytest.raises(ValueError, match=r"processor_config.json must be .*, got {'do_normalize': True}"):
        ImageProcessor.from_pretrained(tmp_path)


def test_images_take_their_places_in_a_chat_and_bos_stays_first():
    tokenizer, processor = ByteTokenizer(), ImageProcessor(max_soft_tokens=70, patch_size=4)
    url = "data:image/png;base64," + base64.b64encode(saved(noise(9, 9))).decode()
    messages = [
        {"role": "user", "content": [{"type": "image", "image": url}, {"type": "text", "text": "this?"}]},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]},
    ]
    marked, sources = take_images(messages)
    assert sources == [url, url]
    images = processor(sources).select([0, 1])
    assert tokenizer.chat(marked, images=images)[0] == tokenizer.bos_token_id
    prompt = tokenizer.encode("<|image|>What is this?")
    assert tokenizer.place_images(prompt, images.select([0]))[:2] == [tokenizer.bos_token_id, 53]
    with pytest.raises(ValueError, match=r"as many as the <\|image\|> in the prompt, 1, got 2"):
        tokenizer.place_images(prompt, images)
    with pytest.raises(ValueError, match="an image part must name a file or a data URL"):
        take_images([{"role": "user", "content": [{"type": "image"}]}])


def test_parts_of_other_kinds_are_refused():
    """Published templates leave them out, or write the marker of a video that nothing replaces."""
    tokenizer, message = ByteTokenizer(), r'content must be {"type": "text", "text": "…"} or {"type": "image"}, got'
    for part in ({"type": "video", "video": "a.mp4"}, {"type": "audio"}, {"type": "text"}, "text", None):
        question, answer = ({"role": role, "content": [part]} for role in ("user", "assistant"))
        with pytest.raises(ValueError, match=message):
            tokenizer.chat([question])
        with pytest.raises(ValueError, match=message):
            tokenizer.chat_turn([{"role": "user", "content": "x"}, answer])


def test_without_pillow_the_sentence_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"Images need Pillow. Install it: pip install -e"):
        open_image(b"")


def test_the_tokens_of_a_chat_with_images_equal_those_of_transformers(monkeypatch, tmp_path):
    template = """{{ bos_token }}{% for m in messages %}{{ '<|turn>' + m.role + '\n' }}
    {%- if m.content is string %}{{ m.content | trim }}{% else %}{% for part in m.content %}
    {%- if part.type == 'image' %}{{ '\n\n<|image|>\n\n' }}{% else %}{{ part.text | trim }}{% endif %}
    {%- endfor %}{% endif %}{{ '<turn|>\n' }}{% endfor %}{{ '<|turn>model\n' if add_generation_prompt else '' }}"""
    names = {"boi": "<|image>", "image": "<|image|>", "eoi": "<image|>"}
    names |= {"boa": "<|audio>", "audio": "<|audio|>", "eoa": "<audio|>"}
    markers = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>", *names.values())
    vocab = {piece: number for number, piece in enumerate([*markers, *map(chr, range(33, 127)), "▁", "\n"])}
    pieces = GemmaTokenizer(
        vocab=vocab, merges=[], extra_special_tokens={f"{name}_token": marker for name, marker in names.items()}
    )
    pieces.add_special_tokens({"additional_special_tokens": ["<|turn>", "<turn|>"]})
    pieces.chat_template = template
    pieces.save_pretrained(tmp_path)
    # Its video processor needs torchvision.
    monkeypatch.setattr(Gemma4Processor, "check_argument_for_proper_class", lambda *_: None)
    theirs = Gemma4Processor(None, Gemma4ImageProcessorPil(max_soft_tokens=70), pieces, None, chat_template=template)
    shown = [noise(30, 20), noise(9, 50, seed=1), noise(64, 64, seed=2)]
    messages = [
        {"role": "user", "content": [{"type": "image", "image": shown[0]}, {"type": "text", "text": "What is this?"}]},
        {"role": "model", "content": "A cat."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "And"}, *({"type": "image", "image": i} for i in shown[1:])],
        },
    ]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    images = ImageProcessor(max_soft_tokens=70)(shown)
    assert Tokenizer.from_pretrained(tmp_path).chat(messages, images=images) == expected["input_ids"][0]
    assert expected["input_ids"][0].count(vocab["<|image|>"]) == sum(images.num_tokens)
