"""`generate` with images equals `generate` of transformers, whose encoder alone discards the images' mask."""

import pytest
import torch

import dgemma
from dgemma import presets
from dgemma.model import diffusion
from dgemma.model.vision.places import split_images, split_tokens
from image_prompts import IMAGE, padded, prompts, random_images
from parity.test_generate import compare, published_generate
from published import pair

CONFIG = presets.tiny(vision=True)  # a window of 24 tokens
# Rows of a batch: numbers of text tokens, and grids (columns, rows) of patches. A token covers 3 × 3 patches.
ROWS = {
    "one": [[5, (6, 9), 7]],
    "first": [[(9, 12)]],  # directly after bos
    "several": [[3, (3, 3), (6, 6), 2, (15, 3), 1]],
    "longer-than-the-window": [[4, (21, 12), 2]],  # 28 tokens
    "edge-of-the-window": [[1, (9, 9), 13], [1, (9, 9), 14], [1, (9, 9), 15], [2, (9, 9), 20]],
    "batch": [[2, (6, 6), 3, (3, 9), 1], [9], [4, (12, 3)], [(3, 3), (3, 3), (3, 3), 6]],
}


def of_images(tokens, images):
    pixels, positions = padded(images)
    is_image = (tokens == IMAGE).long()
    return {"pixel_values": pixels, "image_position_ids": positions, "mm_token_type_ids": is_image}


@pytest.mark.parametrize("chunk", [pytest.param(1024, marks=pytest.mark.slow), 7], ids=["whole", "chunks"])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_generated_tokens_equal_the_published_ones(monkeypatch, rows, chunk):
    """The second of two canvases also depends on the keys that the first wrote after the images."""
    monkeypatch.setattr(diffusion, "_ENCODE_CHUNK", chunk)
    ours, theirs = pair(CONFIG, seed=4)
    tokens, mask, images = prompts(rows)
    seeds = list(range(5, 5 + len(rows)))
    options = {"max_new_tokens": 64, "max_denoising_steps": 4, "eos_token_id": [1]}
    expected = published_generate(monkeypatch, theirs, tokens, mask, seeds, **options, **of_images(tokens, images))
    settings = {"max_new_tokens": 64, "steps": 4, "seed": 5, "eos_token_ids": [1], "attention_mask": mask}
    found = dgemma.generate(ours, tokens, images=images, **settings)
    compare(found, expected, tokens.shape[1])
    if rows is ROWS["batch"]:
        by_row = split_images(images, tokens, IMAGE)
        assert torch.equal(dgemma.generate(ours, tokens, images=by_row, **settings).tokens, found.tokens)


def test_the_encoder_s_keys_equal_the_published_ones_and_other_pixels_give_other_keys(monkeypatch):
    """Keys of the last, full layer: they depend on every mask before. Float32 rounding through three layers."""
    ours, theirs = pair(CONFIG, seed=4)
    tokens, mask, images = prompts([[30, (9, 9), 3]])
    kept = {}
    prepare = type(theirs)._prepare_denoiser_inputs

    def keep(self, decoder_attention_mask, past_key_values, *args, **kwargs):
        kept["keys"] = past_key_values.layers[-1].keys.clone()
        return prepare(self, decoder_attention_mask, past_key_values, *args, **kwargs)

    monkeypatch.setattr(type(theirs), "_prepare_denoiser_inputs", keep)
    options = {"max_new_tokens": 32, "max_denoising_steps": 1}
    published_generate(monkeypatch, theirs, tokens, mask, [5], **options, **of_images(tokens, images))
    with torch.no_grad():
        found = ours.encode(tokens, images=images).layers[-1].view(tokens.shape[1])[0]
        other = ours.encode(tokens, images=random_images(images.grids, seed=9)).layers[-1].view(tokens.shape[1])[0]
    assert (found - kept["keys"]).abs().max() < 1e-4 * kept["keys"].abs().max()
    before, after = (found - other).abs().amax((0, 1, 3)).split([32, tokens.shape[1] - 32])
    assert before.max() < 1e-5  # bos, 30 tokens and the start marker do not see the image
    assert after.min() > 1e-3


def test_images_in_a_second_turn_equal_the_published_ones(monkeypatch):
    """transformers reads the second prompt into the cache of the first; its type ids cover the cached tokens too."""
    ours, theirs = pair(CONFIG, seed=4)
    first, _, first_images = prompts([[5, (6, 6), 4]])
    second, _, second_images = prompts([[3, (6, 9), 5, (3, 3), 2]], seed=1)
    options = {"max_denoising_steps": 3, "eos_token_id": [1], "return_dict_in_generate": True}
    ones = torch.ones_like(first)
    before = published_generate(
        monkeypatch, theirs, first, ones, [8], max_new_tokens=32, **options, **of_images(first, first_images)
    )
    assert not (before.sequences[:, first.shape[1] :] == IMAGE).any()  # or it would be read as an image
    # The published cache lacks the last canvas, so the second prompt begins with it.
    cache = before.past_key_values
    new = torch.cat((before.sequences[:, cache.get_seq_length() :], second), dim=1)
    whole = torch.cat((before.sequences[:, : cache.get_seq_length()], new), dim=1)
    more = of_images(new, second_images) | {"mm_token_type_ids": (whole == IMAGE).long()}
    expected = published_generate(
        monkeypatch,
        theirs,
        new,
        torch.ones_like(whole),
        [6],
        past_key_values=cache,
        max_new_tokens=32,
        **options,
        **more,
    )
    settings = {"max_new_tokens": 32, "steps": 3, "eos_token_ids": [1]}
    out = dgemma.generate(ours, first, images=first_images, seed=8, **settings)
    assert torch.equal(out.tokens, before.sequences)
    found = dgemma.generate(ours, second, images=second_images, cache=out.cache, seed=6, **settings)
    compare(found, expected, new.shape[1])


def test_no_chunk_cuts_an_image_and_only_images_are_longer_than_a_chunk():
    tokens, _, _ = prompts(ROWS["batch"])
    blocks = torch.where(tokens == IMAGE, 0, -1)
    for size in (1, 3, 8, 100):
        chunks = list(split_tokens(tokens.shape[1], size, blocks))
        assert [chunk.start for chunk in chunks] == [0, *(chunk.stop for chunk in chunks[:-1])]
        assert chunks[-1].stop == tokens.shape[1]
        for chunk in chunks[:-1]:
            assert not ((tokens[:, chunk.stop - 1] == IMAGE) & (tokens[:, chunk.stop] == IMAGE)).any()
    assert [c.stop for c in split_tokens(6, 2, torch.tensor([[-1, 0, 0, 0, -1, -1]]))] == [1, 4, 6]
