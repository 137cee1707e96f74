"""Attention over prefix and new tokens against float64, and its reference against transformers' masked attention."""

import pytest
import torch
from torch import Tensor

from attention_cases import draw
from dgemma_kernels.ops.attention import reference
from dgemma_kernels.ops.attention.kernel import AttentionTile, attention, choose_num_splits, default_tile
from kernel_inputs import error

# float32 sums of at most a hundred terms; float16 rounds the softmax weights and the output, 2**-11 each.
LIMITS = {torch.float32: 2e-6, torch.float16: 2e-3}
MODES = pytest.mark.parametrize(
    "mode",
    [
        {},
        {"causal": True},
        {"causal": True, "window": 9},
        {"causal": True, "canvas_len": 5},
        {"causal": True, "window": 9, "canvas_len": 5, "keep": 8},
    ],
    ids=["bidirectional", "causal", "window", "then-canvas", "window-then-canvas"],
)
# Ragged rows, one without a prefix; tokens that do not fill a tile of rows.
TILES = pytest.mark.parametrize(
    ("tile", "num_splits", "heads", "dtype"),
    [
        (None, None, (2, 1), torch.float32),  # one key head per row, which halves the programs
        (AttentionTile(16, 16, 4, 2), 1, (2, 1), torch.float32),
        (AttentionTile(32, 16, 4, 2, tma=True), 3, (2, 1), torch.float32),
        (AttentionTile(16, 32, 4, 2, tma=True, value_dim=16), 2, (2, 1), torch.float32),
        (AttentionTile(16, 16, 4, 2), 9, (2, 1), torch.float32),
        (None, None, (4, 2), torch.float16),
    ],
    ids=["default", "one-part", "three-parts", "half-the-values", "more-parts-than-keys", "float16"],
)


@MODES
@TILES
def test_attention_matches_float64_over_ragged_prefixes(mode, tile, num_splits, heads, dtype, device):
    queries, keys, values, length = draw([0, 27], 11, (heads[1], 32), heads=heads[0], dtype=dtype, device=device)
    got = attention(queries, keys, values, length, **mode, tile=tile, num_splits=num_splits)
    want = reference.attention(queries.double(), keys.double(), values.double(), length, **mode)
    assert error(got, want) < LIMITS[dtype]


@pytest.mark.parametrize(
    "options", [{"num_splits": 1}, {"num_splits": 3}, {"part": 64}], ids=["whole", "parts", "fixed"]
)
def test_attention_in_float8_is_the_nearest_value_in_units_of_one_scale(options, device):
    queries, keys, values, length = draw([0, 27], 11, (2, 32), heads=4, dtype=torch.float32, device=device)
    values = torch.nn.functional.normalize(values, dim=-1) * 32**0.5  # root mean square 1, as after a norm
    got = attention(queries, keys, values, length, **options, float8=True)
    twin = reference.attention(queries.double(), keys.double(), values.double(), length, float8=True)
    want = reference.attention(queries.double(), keys.double(), values.double(), length).flatten(0, 1).flatten(1)
    # Values up to the square root of 32 fit 448 units of 1/64, and not of 1/128.
    assert got.scale.tolist() == twin.scale.tolist() == [1 / 64] * 22
    assert got.dtype == torch.float32
    bound = torch.maximum(want.abs() / 16, torch.tensor(2.0**-10 / 64)) * 1.001  # half a step
    for rows in (got, twin):
        assert ((rows.decode() - want).abs() <= bound).all()


@pytest.mark.parametrize("heads", [(8, 1), (2, 2)], ids=["eight-share-a-key-head", "one-each"])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_one_token_attends_to_all_earlier_tokens(heads, num_splits, device):
    case = draw([40, 0], 1, (heads[1], 16), heads=heads[0], dtype=torch.float32, device=device)
    queries, keys, values, length = case
    got = attention(queries, keys, values, length, causal=True, num_splits=num_splits)
    group = heads[0] // heads[1]
    keys, values = (x.double().repeat_interleave(group, 1)[0, :, :41] for x in (keys, values))  # (N, 41, H)
    scores = torch.einsum("nh,njh->nj", queries[0, 0].double(), keys)
    want = torch.einsum("nj,njh->nh", scores.softmax(-1), values)
    assert error(got[0, 0], want) < 2e-6
    # With no prefix a token sees only itself, whatever the scores.
    own = case[2][1, :, 0].repeat_interleave(group, 0)
    assert torch.allclose(got[1, 0], own, atol=1e-6)


@pytest.mark.parametrize("window", [None, 9], ids=["full", "window"])
def test_tokens_and_a_canvas_in_one_call_equal_two_calls(window, device):
    queries, keys, values, length = draw([13], 11, (1, 16), heads=2, dtype=torch.float32, device=device)
    keep = 13 + 6 if window is None else window - 1
    together = attention(queries, keys, values, length, causal=True, window=window, canvas_len=5, keep=keep)
    tokens = attention(queries[:, :6].contiguous(), keys, values, length, causal=True, window=window)
    kept = [x[:, :, 13 + 6 - keep :].contiguous() for x in (keys, values)]
    canvas = attention(queries[:, 6:].contiguous(), *kept, torch.full_like(length, keep))
    torch.testing.assert_close(together, torch.cat((tokens, canvas), dim=1), rtol=1e-5, atol=1e-5)


def test_large_scores_do_not_overflow(device):
    queries, keys, values, length = draw([30], 8, (1, 16), heads=2, dtype=torch.float32, device=device)
    queries *= 1e4
    got = attention(queries, keys, values, length, num_splits=3)
    # Scores this far apart leave one key per row: the output is its value.
    winner = torch.einsum("tnh,jh->tnj", queries[0], keys[0, 0, :38]).argmax(-1)
    assert torch.allclose(got[0], values[0, 0][winner], atol=1e-5)


PART = 64 if torch.cuda.is_available() else 16  # the keys of a tile
FIXED = {"full": (None, 0), "sliding": (20, 18)}  # a window and what a canvas keeps of it, in sixteenths of a part


def place(row: dict[str, Tensor], capacity: int, dropped: int) -> list[Tensor]:
    """Put keys and values into buffers without the first `dropped` tokens: 64 zeros before, NaN after."""
    buffers = []
    for name in ("keys", "values"):
        buffer = torch.full((row[name].shape[0], capacity + 64, row[name].shape[2]), torch.nan)
        buffer[:, :64] = 0.0
        buffer[:, 64 : 64 + row[name].shape[1] - dropped] = row[name][:, dropped:]
        buffers.append(buffer)
    return buffers


@pytest.mark.parametrize("kind", FIXED)
def test_fixed_parts_give_a_token_the_same_bits_in_any_batch_slot_chunk_and_capacity(kind, device):
    generator = torch.Generator().manual_seed(0)
    unit = PART // 16  # the sizes below are written for parts of 16 keys, as in the interpreter
    window, keep = (None if size is None else size * unit for size in FIXED[kind])
    canvas_len, lengths = 5, [45 * unit, 3 * unit, 21 * unit]  # of the prefixes
    rows = []
    for length in lengths:
        shapes = {"queries": (length + canvas_len, 2, 16), "keys": (1, length + canvas_len, 16)}
        shapes["values"] = shapes["keys"]
        rows.append({name: 0.5 * torch.randn(shape, generator=generator) for name, shape in shapes.items()})

    def attend(tokens: list[tuple[int, int, int]], capacity: int, canvas: int) -> Tensor:
        """Attend from tokens [start, stop) of each row, whose first `dropped` tokens are not in the buffers."""
        placed = [place(rows[row], capacity, dropped) for row, _, dropped in tokens]
        keys, values = (torch.stack(each).to(device)[:, :, 64:] for each in zip(*placed, strict=True))
        count = canvas if canvas else min(lengths[row] - start for row, start, _ in tokens)
        queries = torch.stack([rows[row]["queries"][start : start + count] for row, start, _ in tokens]).to(device)
        position = torch.tensor([start for _, start, _ in tokens], device=device)
        slot = position - torch.tensor([dropped for _, _, dropped in tokens], device=device)
        mode = {"causal": True, "window": window, "canvas_len": canvas, "keep": keep}
        got = attention(queries, keys, values, slot, **mode, part=PART, position=position)
        if not any(dropped for _, _, dropped in tokens):
            for at in range(len(tokens)):
                one = [x[at : at + 1].double() for x in (queries, keys, values)]
                want = reference.attention(*one, slot[at : at + 1], **mode)
                assert error(got[at : at + 1], want) < LIMITS[torch.float32]
        return got

    whole = [attend([(row, 0, 0)], 64 * unit, 0)[0] for row in (0, 2)]
    canvases = [attend([(row, lengths[row], 0)], 64 * unit, canvas_len)[0] for row in range(3)]
    together = attend([(row, lengths[row], 0) for row in (2, 0, 1)], 50 * unit, canvas_len)
    for row, got in zip((2, 0, 1), together, strict=True):
        assert torch.equal(got, canvases[row])
    for start in (17 * unit, 45 * unit - 1):
        chunks = attend([(2, 13 * unit, 0), (0, start, 0)], 51 * unit, 0)
        assert torch.equal(chunks[0], whole[1][13 * unit : 13 * unit + chunks.shape[1]])
        assert torch.equal(chunks[1], whole[0][start : start + chunks.shape[1]])
    if window is not None:
        for dropped in (1, 27 * unit):  # as after sliding layers forgot old tokens
            assert torch.equal(attend([(0, lengths[0], dropped)], 50 * unit, canvas_len)[0], canvases[0])


def test_reference_matches_transformers_eager_attention():
    modeling = pytest.importorskip("transformers.models.diffusion_gemma.modeling_diffusion_gemma")
    queries, keys, values, length = draw([7], 5, (2, 16), heads=4, dtype=torch.float64, device="cpu")
    keys, values = keys[:, :, :12], values[:, :, :12]
    mask = torch.full((5, 12), -torch.inf, dtype=torch.float64)
    for query in range(5):
        mask[query, 7 + query - 3 : 7 + query + 1] = 0.0  # a window of four, its own slot included
    module = type("Module", (), {"num_key_value_groups": 2, "training": False})()
    want, _ = modeling.eager_attention_forward(module, queries.transpose(1, 2), keys, values, mask, scaling=1.0)
    got = reference.attention(queries, keys, values, length, causal=True, window=4)
    assert torch.allclose(got, want, atol=1e-6)  # transformers rounds the softmax to float32


def test_canvases_of_any_batch_fill_an_h200_in_one_round():
    # 132 multiprocessors; one canvas is 512 rows × 8 key heads (sliding) or 2048 × 2 (full).
    for num_rows, kv_heads, head_dim in ((512, 8, 256), (2048, 2, 512)):
        tile = default_tile(num_rows, head_dim, hopper=True)
        programs = num_rows // tile.rows * kv_heads * (head_dim // (tile.value_dim or head_dim))
        for batch in (1, 2, 128 // programs):
            assert batch * programs * choose_num_splits(batch * programs, 132, 40) == 128
