"""Head norms, rotation and cache write against transformers' modules."""

import pytest
import torch
from torch import Tensor

from dgemma_kernels.ops.qkv import kernel as qkv
from dgemma_kernels.ops.qkv import reference

EPS = 1e-6
# (query heads, key heads, head_dim, own v heads): the two published layouts, smaller; and odd numbers of heads.
LAYOUTS = pytest.mark.parametrize(
    "layout", [(4, 2, 32, True), (8, 1, 64, False), (3, 3, 16, True)], ids=["sliding", "full", "odd"]
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
BATCH, TOKENS, CAPACITY = 2, 5, 24
START, LENGTH = [0, 131_072], [0, 17]  # no prefix; a long one, of which a sliding buffer has only the end


def frequencies(head_dim: int, *, own_value: bool) -> Tensor:
    """Return the default rotation for sliding layers; in full layers a quarter of the pairs rotate."""
    if own_value:
        return 1.0 / 10_000.0 ** (torch.arange(0, head_dim, 2).float() / head_dim)
    turning = 1.0 / 1_000_000.0 ** (torch.arange(0, head_dim // 4, 2).float() / head_dim)
    return torch.cat([turning, torch.zeros(head_dim // 2 - turning.numel())])


def draw(layout: tuple[int, int, int, bool], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    heads, kv_heads, head_dim, own_value = layout
    generator = torch.Generator().manual_seed(heads)
    width = (heads + kv_heads * (2 if own_value else 1)) * head_dim
    return {
        "projected": torch.randn(BATCH * TOKENS, width, generator=generator).to(dtype).to(device),
        "query_weight": (1 + 0.2 * torch.randn(head_dim, generator=generator)).to(dtype).to(device),
        "key_weight": (1 + 0.2 * torch.randn(head_dim, generator=generator)).to(dtype).to(device),
        "inv_freq": frequencies(head_dim, own_value=own_value).to(device),
        "start": torch.tensor(START, device=device),
        "length": torch.tensor(LENGTH, device=device),
        "keys": torch.full((BATCH, kv_heads, CAPACITY, head_dim), torch.nan, dtype=dtype, device=device),
        "values": torch.full((BATCH, kv_heads, CAPACITY, head_dim), torch.nan, dtype=dtype, device=device),
    }


def published(case: dict[str, Tensor], num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values (B, T, heads, H) by transformers' norm and rotation."""
    modeling = pytest.importorskip("transformers.models.diffusion_gemma.modeling_diffusion_gemma")
    kv_heads, head_dim = case["keys"].shape[1], case["keys"].shape[3]
    heads = case["projected"].view(BATCH, TOKENS, -1, head_dim)
    key = heads[:, :, num_heads : num_heads + kv_heads]
    value = heads[:, :, num_heads + kv_heads :] if heads.shape[2] > num_heads + kv_heads else key
    positions = case["start"][:, None] + torch.arange(TOKENS, device=heads.device)
    angle = positions[..., None].float() * case["inv_freq"]
    angle = torch.cat((angle, angle), dim=-1)
    cos, sin = angle.cos().to(heads.dtype), angle.sin().to(heads.dtype)

    def norm(x: Tensor, weight: Tensor | None) -> Tensor:
        module = modeling.DiffusionGemmaRMSNorm(head_dim, eps=EPS, with_scale=weight is not None)
        if weight is not None:
            module.weight.data = weight
        return module(x)

    def rotate(x: Tensor) -> Tensor:
        return modeling.apply_rotary_pos_emb(x, cos, sin, unsqueeze_dim=2)

    with torch.no_grad():
        query = rotate(norm(heads[:, :, :num_heads], case["query_weight"]))
        return query, rotate(norm(key, case["key_weight"])), norm(value, None)


@DTYPES
@LAYOUTS
@pytest.mark.parametrize("twin", [qkv, reference], ids=["kernel", "reference"])
def test_prepare_qkv_matches_transformers(layout, dtype, twin, device):
    case = draw(layout, dtype, device)
    query = twin.prepare_qkv(**case, num_heads=layout[0], eps=EPS)
    want_query, want_key, want_value = published(case, layout[0])
    # One unit in the last place of values up to 4, because a square root or a sum may round differently.
    close = {"atol": 2e-6, "rtol": 1e-6} if dtype == torch.float32 else {"atol": 4e-3, "rtol": 0.0}
    torch.testing.assert_close(query, want_query, **close)
    for row, length in enumerate(LENGTH):
        slots = slice(length, length + TOKENS)
        torch.testing.assert_close(case["keys"][row, :, slots].transpose(0, 1), want_key[row], **close)
        torch.testing.assert_close(case["values"][row, :, slots].transpose(0, 1), want_value[row], **close)
    for cache, written in ((case["keys"], want_key), (case["values"], want_value)):
        assert (~cache.isnan()).sum() == written.numel()  # no other slot was written


@pytest.mark.parametrize("twin", [qkv, reference], ids=["kernel", "reference"])
def test_scales_multiply_rows_and_columns_before_the_norms(twin, device):
    layout = (4, 2, 32, True)
    want, got = draw(layout, torch.float32, device), draw(layout, torch.float32, device)
    generator = torch.Generator().manual_seed(1)
    scales = [2.0 ** torch.randint(-3, 4, (size,), generator=generator).to(device) for size in want["projected"].shape]
    got["projected"] = got["projected"] / scales[0][:, None] / scales[1]  # powers of two: exact
    query = twin.prepare_qkv(**got, num_heads=layout[0], eps=EPS, scales=tuple(scales))
    assert torch.equal(query, twin.prepare_qkv(**want, num_heads=layout[0], eps=EPS))
    for name in ("keys", "values"):
        assert torch.equal(got[name].nan_to_num(9.0), want[name].nan_to_num(9.0))


@LAYOUTS
@pytest.mark.parametrize("twin", [qkv, reference], ids=["kernel", "reference"])
def test_float8_queries_are_those_of_transformers_rounded(layout, twin, device):
    case = draw(layout, torch.float16, device)
    query = twin.prepare_qkv(**case, num_heads=layout[0], eps=EPS, float8=True)
    want = published(case, layout[0])[0].float()
    assert query.dtype == torch.float16
    torch.testing.assert_close(query.scale, want.abs().amax(-1) / 448, rtol=2e-3, atol=0)  # two float16 steps of 2**-11
    # Float8 has three bits of mantissa, so values are off by at most a sixteenth of themselves. Values below 2**-6 of
    # the scale have steps of 2**-9 times the scale, and are off by at most half a step. The rotation may add an error
    # of two float16 steps.
    allowed = (want.abs() / 16).clamp(min=query.scale[..., None] / 1024) + 4e-3
    assert ((query.decode() - want).abs() <= allowed).all()


def test_prepare_qkv_rounds_where_transformers_rounds(device):
    # Rounding elsewhere (once at the end, say) changes about half of the float16 values.
    case = draw((4, 2, 32, True), torch.float16, device)
    query = qkv.prepare_qkv(**case, num_heads=4, eps=EPS)
    assert (query != published(case, 4)[0]).float().mean() < 0.01


@DTYPES
@pytest.mark.parametrize("twin", [qkv, reference], ids=["kernel", "reference"])
def test_with_rotary_pairs_keys_equal_values_where_they_do_not_rotate_and_scores_are_those_of_transformers(
    dtype, twin, device
):
    layout, pairs = (8, 1, 64, False), 8  # a quarter of 32 pairs rotates
    case = draw(layout, dtype, device)
    query = twin.prepare_qkv(**case, num_heads=layout[0], eps=EPS, rotary_pairs=pairs)
    want_query, want_key, want_value = published(case, layout[0])
    still = torch.arange(64, device=device) % 32 >= pairs
    for row, length in enumerate(LENGTH):
        keys, values = (case[name][row, 0, length : length + TOKENS] for name in ("keys", "values"))
        assert torch.equal(keys[:, still], values[:, still])
        assert not torch.equal(keys[:, ~still], values[:, ~still])
        torch.testing.assert_close(values, want_value[row, :, 0], atol=4e-3 if dtype == torch.float16 else 2e-6, rtol=0)
        scores = query[row].double() @ keys.double().T  # (T, N, T)
        want = want_query[row].double() @ want_key[row, :, 0].double().T
        # A score is a sum of 64 products of operands of size 1, each rounded by up to 2**-11 or 2**-24. The errors are
        # independent, so their sum is about 8 times one of them.
        assert (scores - want).abs().max() < (2e-2 if dtype == torch.float16 else 2e-5)
