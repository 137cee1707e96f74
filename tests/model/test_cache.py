"""The prefix cache: any chunking, any padding, any batch gives the same prefix."""

import pytest
import torch

import dgemma
from dgemma import DiffusionGemma, PrefixCache
from dgemma.model import cache as cache_module
from dgemma.model.config import Conventions
from published import pair

ROUNDING = 2e-5  # float32 sums in another order; logits here are of order one


@pytest.fixture(scope="module")
def model() -> DiffusionGemma:
    return pair()[0].requires_grad_(False)


def predict(model: DiffusionGemma, cache: PrefixCache, canvas: torch.Tensor) -> torch.Tensor:
    return model.denoise(canvas, cache).logits


def canvas_for(batch: int) -> torch.Tensor:
    return torch.randint(0, 512, (batch, 12), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("seed", range(2))
def test_encoding_in_random_chunks_equals_encoding_whole(model, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(5, 512, (2, 61), generator=generator)  # well past the window of 24
    cuts = torch.randint(1, 61, (5,), generator=generator).unique().tolist()
    whole, chunked = model.encode(tokens), None
    for start, stop in zip([0, *cuts], [*cuts, 61], strict=True):
        chunked = model.encode(tokens[:, start:stop], chunked)
    assert chunked.num_slots == whole.num_slots == 61
    torch.testing.assert_close(
        predict(model, chunked, canvas_for(2)), predict(model, whole, canvas_for(2)), atol=ROUNDING, rtol=0
    )
    for a, b in zip(chunked.layers, whole.layers, strict=True):
        torch.testing.assert_close(a.view(61)[0], b.view(61)[0], atol=ROUNDING, rtol=1e-5)


def test_prompts_longer_than_a_chunk_are_read_in_pieces(model, monkeypatch):
    tokens = torch.randint(5, 512, (2, 50))
    mask = torch.ones_like(tokens)
    mask[0, :30] = 0  # the padding is wider than a chunk
    whole = predict(model, model.encode(tokens, attention_mask=mask), canvas_for(2))
    causal = model.causal_logits(tokens, attention_mask=mask)
    monkeypatch.setattr("dgemma.model.diffusion._ENCODE_CHUNK", 7)
    torch.testing.assert_close(
        predict(model, model.encode(tokens, attention_mask=mask), canvas_for(2)), whole, atol=ROUNDING, rtol=0
    )
    torch.testing.assert_close(
        model.causal_logits(tokens, attention_mask=mask)[mask.bool()], causal[mask.bool()], atol=ROUNDING, rtol=0
    )


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_a_row_equals_itself_alone_wherever_its_padding_is(model, side):
    tokens, mask = torch.randint(5, 512, (3, 40)), torch.ones(3, 40, dtype=torch.long)
    hole = {"left": slice(0, 11), "right": slice(29, 40), "middle": slice(9, 20)}[side]
    mask[1, hole] = 0
    cache = model.encode(tokens, attention_mask=mask)
    later = torch.randint(5, 512, (3, 10))
    cache = model.encode(later, cache)
    assert cache.lengths.tolist() == [50, 39, 50]
    together = predict(model, cache, canvas_for(3))
    for row in range(3):
        alone = model.encode(torch.cat((tokens[row][mask[row].bool()], later[row]))[None])
        torch.testing.assert_close(
            together[row : row + 1], predict(model, alone, canvas_for(3)[row : row + 1]), atol=ROUNDING, rtol=0
        )


def test_sliding_layers_keep_only_their_window():
    published = dgemma.presets.diffusiongemma_26b_a4b()
    cache = PrefixCache(published, 1, device="meta", dtype=torch.bfloat16)
    cache.reserve(262_144)
    assert 5.3e9 < cache.num_bytes < 5.5e9  # 5 full layers × 2 × 2 heads × 512 × 2 bytes × 262,144
    tiny = DiffusionGemma(dgemma.presets.tiny())
    long = tiny.encode(torch.randint(5, 512, (1, 200)))
    assert [layer.keys.shape[2] for layer in long.layers] == [23, 23, 200]


def test_appending_copies_a_full_layer_rarely(model, monkeypatch):
    grown = []
    grow = cache_module._grow
    monkeypatch.setattr(cache_module, "_grow", lambda *args: grown.append(args[2]) or grow(*args))
    cache = model.encode(torch.randint(5, 512, (1, 100)))
    for _ in range(40):
        model.encode(torch.randint(5, 512, (1, 1)), cache)
    assert cache.num_slots == 140
    # Room grows by a quarter at a time: about log(1.4)/log(1.25) = 1.5 times for keys and as often for values.
    assert len(grown) <= 6


def test_encoding_no_tokens_leaves_the_cache_unchanged(model):
    cache = model.encode(torch.randint(5, 512, (2, 30)))
    before = predict(model, cache, canvas_for(2))
    model.encode(torch.zeros(2, 0, dtype=torch.long), cache)
    assert model.causal_logits(torch.zeros(2, 0, dtype=torch.long), cache).shape == (2, 0, 512)
    assert torch.equal(predict(model, cache, canvas_for(2)), before)
    with pytest.raises(ValueError, match="canvas must not be empty"):
        model.denoise(torch.zeros(2, 0, dtype=torch.long), cache)


def test_clones_and_selections_are_independent(model):
    tokens = torch.randint(5, 512, (3, 30))
    cache = model.encode(tokens)
    expected = predict(model, cache, canvas_for(3))
    copy, picked = cache.clone(), cache.select(torch.tensor([2, 0]))
    model.encode(tokens, cache)
    assert (copy.num_slots, picked.num_slots) == (30, 30)
    assert torch.equal(predict(model, copy, canvas_for(3)), expected)
    torch.testing.assert_close(
        predict(model, picked, canvas_for(3)[[2, 0]]),
        predict(model, copy, canvas_for(3))[[2, 0]],
        atol=ROUNDING,
        rtol=0,
    )


def test_splicing_the_selected_rows_gives_back_every_row(model):
    tokens, mask = torch.randint(5, 512, (3, 40)), torch.ones(3, 40, dtype=torch.long)
    mask[1, :33] = 0
    cache = model.encode(tokens, attention_mask=mask)
    expected = predict(model, cache, canvas_for(3))
    spliced = cache.select(torch.tensor([1, 1, 1]))
    for rows in (torch.tensor([1]), torch.tensor([2, 0])):
        spliced.splice(rows, cache.select(rows))
    assert spliced.lengths.tolist() == [40, 7, 40]
    torch.testing.assert_close(predict(model, spliced, canvas_for(3)), expected, atol=ROUNDING, rtol=0)


def test_the_prefix_that_a_canvas_sees_in_sliding_layers_is_a_convention():
    config = dgemma.presets.tiny().replace(num_hidden_layers=2, layer_types=("sliding_attention", "full_attention"))
    torch.manual_seed(0)
    transformers_like = DiffusionGemma(config).requires_grad_(False)
    jax_like = DiffusionGemma(config, conventions=Conventions(sliding_prefix="window")).requires_grad_(False)
    jax_like.load_state_dict(transformers_like.state_dict())
    tokens = torch.randint(5, 512, (1, 24))  # as long as the window; only one convention keeps the oldest token
    caches = [m.encode(tokens) for m in (transformers_like, jax_like)]
    assert [c.layers[0].view(24)[0].shape[2] for c in caches] == [23, 24]
    torch.testing.assert_close(caches[0].layers[0].keys, caches[1].layers[0].keys[:, :, 1:])
    a, b = (predict(m, c, canvas_for(1)) for m, c in zip((transformers_like, jax_like), caches, strict=True))
    assert not torch.equal(a, b)


@pytest.mark.parametrize(
    ("tokens", "mask", "sentence"),
    [
        (torch.full((1, 3), 512), None, r"must hold ids in \[0, 512\)"),
        (torch.full((1, 3), -1), None, r"must hold ids in \[0, 512\)"),
        (torch.full((1, 9000), 5), None, "within max_position_embeddings"),
        (torch.full((1, 3), 5), torch.ones(1, 4), "attention_mask must be"),
    ],
)
def test_tokens_that_do_not_fit_raise_one_sentence(model, tokens, mask, sentence):
    with pytest.raises(ValueError, match=sentence):
        model.encode(tokens, attention_mask=mask)


def test_a_mask_that_contradicts_the_cache_and_a_wrong_batch_raise(model):
    cache = model.encode(torch.randint(5, 512, (2, 6)))
    mask = torch.ones(2, 9)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="must keep the mask of the cached tokens"):
        model.encode(torch.full((2, 3), 5), cache, mask)
    with pytest.raises(ValueError, match="cache's batch size 2, got 1"):
        model.denoise(canvas_for(1), cache)


@pytest.mark.parametrize("name", ["a number", "another kind", "num_key_value_heads", "head_dim", "sliding_window"])
def test_a_cache_that_the_model_did_not_make_is_refused(model, name):
    tokens, config = torch.randint(5, 512, (1, 8)), model.config
    if name in ("a number", "another kind"):
        cache = 3 if name == "a number" else dgemma.TokenCache(tokens, torch.tensor([8]), 8)
    else:
        cache = DiffusionGemma(config.replace(**{name: 2 * getattr(config, name)})).encode(tokens)
    for read in (model.encode, model.causal_logits, model.denoise):
        with pytest.raises(ValueError, match="cache must come from encode of this model"):
            read(tokens, cache)


def test_every_cache_has_the_members_of_the_protocol(model):
    prompt = torch.randint(5, 512, (1, 8))
    guided = dgemma.Guided(model, strength=1.0, unconditional=4)
    for cache in (model.encode(prompt), guided.encode(prompt), dgemma.TokenCache(prompt, torch.tensor([8]), 8)):
        assert isinstance(cache, cache_module.Cache)
    for value in (prompt, model):
        with pytest.raises(ValueError, match="generate cache must be Cache or None"):
            dgemma.generate(model, prompt, cache=value)
