"""Experts of four bits per weight: codes keep their values, products match float64 of the decoded weights, and the
denoiser equals a model with the decoded weights."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import dgemma
from dgemma.quantization.rounding import quantize
from dgemma.quantization.weights import E2M1, IntWeight, NvFp4Weight, pack_nibbles, set_weight
from dgemma_kernels import accelerate
from dgemma_kernels.engine import forward
from dgemma_kernels.engine.precision import FAST
from dgemma_kernels.formats import float8
from dgemma_kernels.formats.fourbit import arrange
from dgemma_kernels.ops import configs
from dgemma_kernels.ops.experts import kernel as experts
from dgemma_kernels.ops.experts import reference as experts_reference
from dgemma_kernels.ops.router import reference as router
from kernel_inputs import NUM_EXPERTS, draw_routing, logits_of, make_model, sort_choices

E = NUM_EXPERTS
NATIVE = torch.cuda.is_available()
DTYPES = [torch.float32, torch.bfloat16] if NATIVE else [torch.float32]  # the interpreter does not multiply bfloat16
# Per tensor. float32: sums of up to 192 products. bfloat16: two products and four roundings of up to 2**-8. One
# rounding moves a tensor of normal values by 1.7e-3 of its norm, so four give about 3.3e-3.
LIMITS = {torch.float32: 1e-6, torch.bfloat16: 6e-3}
# A group of int4 has 64 columns, and a float8 product has rows in multiples of 16.
WIDE = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "vocab_size": 48}


def draw_weight(kind: str, num_rows: int, width: int, seed: int = 0) -> IntWeight | NvFp4Weight:
    """Draw any codes, with scales of several sizes: "int4/32", "int4/64 zero", "int4/64 bias", "nvfp4"."""
    generator = torch.Generator().manual_seed(seed)
    codes = pack_nibbles(torch.randint(16, (E, num_rows, width), generator=generator, dtype=torch.uint8))
    if kind == "nvfp4":
        scale = torch.randn(E, num_rows, width // 16, generator=generator).mul_(100).to(torch.float8_e4m3fn)
        scale[0, 0, 0], scale[0, 1, 0] = 0.0, 2.0**-9
        return NvFp4Weight(codes=codes, scale=scale, row_scale=torch.rand(E, num_rows, generator=generator) * 1e-3)
    group, _, offset = kind.removeprefix("int4/").partition(" ")
    shape = (E, num_rows, width // int(group))
    scale = (torch.rand(shape, generator=generator) * 0.1).bfloat16()
    zero = torch.randint(16, shape, generator=generator, dtype=torch.uint8) if offset == "zero" else None
    bias = torch.randn(shape, generator=generator).bfloat16() if offset == "bias" else None
    return IntWeight(codes=codes, scale=scale, zero_point=zero, bias=bias)


def true_values(weight: IntWeight | NvFp4Weight) -> Tensor:
    """Return the values that the kernels multiply: int4 rounds once to bfloat16, NVFP4 is exact."""
    exact = weight.decode(torch.float64)
    return exact.bfloat16().double() if isinstance(weight, IntWeight) else exact


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("kind", ["int4/16", "int4/32", "int4/64", "int4/64 zero", "int4/192 bias", "nvfp4"])
def test_the_order_of_the_kernels_keeps_every_value(kind, gated, device):
    weight = draw_weight(kind, 200, 192).to(device)  # 200 rows do not fill two blocks
    got = arrange(weight, dtype=torch.bfloat16, gated=gated)
    assert torch.equal(got.decode(), true_values(weight))
    assert got.shape == weight.shape


def test_every_code_and_every_scale_of_nvfp4_is_decoded_exactly(device):
    # 16 columns have the 16 codes; rows have the 254 scales of e4m3 that are numbers, negative ones too.
    bytes_ = torch.arange(256, dtype=torch.uint8)
    scale = bytes_[(bytes_ & 0x7F) != 0x7F].view(torch.float8_e4m3fn)
    codes = pack_nibbles(torch.arange(16, dtype=torch.uint8).expand(1, len(scale), 16).contiguous())
    weight = NvFp4Weight(codes=codes, scale=scale.view(1, -1, 1), row_scale=torch.ones(1, len(scale)))
    want = torch.tensor(E2M1, dtype=torch.float64) * scale.double()[:, None]
    assert torch.equal(arrange(weight.to(device), dtype=torch.bfloat16).decode()[0].cpu(), want)
    # The kernel's own decoding, by the product with a unit matrix.
    index = torch.zeros(16, 1, dtype=torch.int32, device=device)  # every token to the only expert
    tiles = router.sort_by_expert(index, router.count_pairs(index, 1), 16)
    eye = torch.eye(16, dtype=torch.bfloat16 if NATIVE else torch.float32, device=device)
    down = arrange(weight.to(device), dtype=eye.dtype)
    got = experts.expert_down(eye, down, torch.ones(16, 1, device=device), tiles)  # (16, 1, N)
    assert torch.equal(got[:, 0].T.double().cpu(), want)


def check_products(kind: str, routing: str, width: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    index = draw_routing(routing).to(device)
    tiles = sort_choices(index, kind.partition("/")[0])
    gate_up, down = (draw_weight(kind, *shape).to(device) for shape in ((2 * hidden, width), (width, hidden)))
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(index.shape[0], width, generator=generator).to(device, dtype) * 0.1
    weights = torch.rand(index.shape, generator=generator).to(device)
    got_hidden = experts.expert_gate_up(x, arrange(gate_up, dtype=dtype, gated=True), tiles)
    got = experts.expert_down(got_hidden, arrange(down, dtype=dtype), weights, tiles)
    want_hidden = experts_reference.expert_gate_up(x.double(), true_values(gate_up), tiles)
    want = experts_reference.expert_down(got_hidden.double(), true_values(down), weights.double(), tiles)
    for name, result, expected in (("gate_up", got_hidden, want_hidden), ("down", got, want)):
        error = (result.double() - expected).norm() / expected.norm()
        assert error < LIMITS[dtype], name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kind", "routing", "width", "hidden"),
    [
        ("int4/64", "even", 192, 64),
        pytest.param("int4/32 zero", "one-expert-has-every-row", 96, 160, marks=pytest.mark.slow),
        pytest.param("int4/32 bias", "one-token", 160, 96, marks=pytest.mark.slow),
        ("nvfp4", "two-experts-have-no-rows", 80, 112),  # neither width is a multiple of a plane's 64 columns
    ],
)
def test_products_match_float64(kind, routing, width, hidden, dtype, device):
    check_products(kind, routing, width, hidden, dtype, device)


@pytest.mark.skipif(not NATIVE, reason="the interpreter multiplies in order")
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_no_product_reads_registers_that_the_next_iteration_overwrites(rows, device, monkeypatch):
    # With products of one iteration still running, results at 64 rows were infinite and differed between runs.
    config = configs.ExpertConfig(1 << 62, rows, configs.TileShape(64, 64, 4, 4), configs.TileShape(128, 64, 4, 4))
    monkeypatch.setitem(configs.EXPERTS["int4"], "default", (config,))
    check_products("int4/64", "one-expert-has-every-row", 1408, 704, torch.bfloat16, device)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"bits": 8}, "must have groups of neighbouring columns, got 8 bits"),
        ({"group_index": torch.zeros(1, 64, dtype=torch.int32)}, "got a group_index"),
        ({"scale": torch.ones(1, 4, 8)}, "groups of 16, 32 or a multiple of 64 columns, got 8"),
        ({"scale": torch.full((1, 4, 1), 2.0**12)}, r"must be from 2\*\*-100 to 2\*\*10, got"),
    ],
    ids=["8 bits", "order of columns", "small groups", "large scales"],
)
def test_integers_that_the_kernels_cannot_multiply_are_refused(change, sentence):
    width = 64 if change.get("bits") == 8 else 32
    fields = {"codes": torch.zeros(1, 4, width, dtype=torch.uint8), "scale": torch.ones(1, 4, 1)} | change
    with pytest.raises(ValueError, match=sentence):
        arrange(IntWeight(**fields), dtype=torch.bfloat16)


def test_scales_of_nan_are_refused():
    scale = torch.full((1, 4, 4), torch.nan).to(torch.float8_e4m3fn)
    weight = NvFp4Weight(codes=torch.zeros(1, 4, 32, dtype=torch.uint8), scale=scale, row_scale=torch.ones(1, 4))
    with pytest.raises(ValueError, match="nvfp4 experts must be finite, got NaN"):
        arrange(weight, dtype=torch.bfloat16)


def make_decoded(device: torch.device, format: str) -> dgemma.DiffusionGemma:
    """Return a model whose experts have the values of this format, in float32."""
    model = make_model(device, **WIDE)
    for layer in model.layers:
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(layer.experts, name)
            weight.copy_(true_values(quantize(weight.detach(), format)))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("format", ["int4", "nvfp4"])
def test_the_denoiser_equals_a_model_with_the_decoded_weights(format, device):
    want = logits_of(make_decoded(device, format))
    quantized = make_model(device, **WIDE)
    for layer in quantized.layers:
        for name in ("gate_up_proj", "down_proj"):
            set_weight(layer.experts, name, quantize(getattr(layer.experts, name).detach(), format))
    close = {"rtol": 2e-4, "atol": 2e-4} if NATIVE else {"rtol": 2e-5, "atol": 2e-5}  # sums in another order
    for model, weights in ((make_model(device, **WIDE), format), (quantized, None)):  # None: the model's own format
        torch.testing.assert_close(logits_of(accelerate(model, weights)), want, **close)


def test_quantised_experts_keep_their_format(device):
    model = make_model(device, **WIDE)
    for layer in model.layers:
        for name in ("gate_up_proj", "down_proj"):
            set_weight(layer.experts, name, quantize(getattr(layer.experts, name).detach(), "int4"))
    with pytest.raises(ValueError, match="must be the format of the model's experts, int4, got 'fp8'"):
        accelerate(model, "fp8")


@pytest.mark.slow
@pytest.mark.parametrize("part", ["attention", "dense", "head"])
def test_float8_products_round_weights_and_inputs_and_nothing_else(part, device):
    model = make_decoded(device, "int4")

    def round_rows(rows: Tensor, unit: float | None) -> Tensor:
        if unit is None:
            return float8.quantize(rows).decode().to(rows.dtype)
        return (rows / unit).to(torch.float8_e4m3fn).to(rows.dtype) * unit

    for layer in model.layers:
        owner = {"attention": layer.self_attn, "dense": layer.mlp}.get(part)
        for name, linear in () if owner is None else owner.named_children():
            if isinstance(linear, torch.nn.Linear):
                linear.weight.copy_(float8.quantize(linear.weight.detach()).decode())
                # Heads of 16 have values up to 4, which fit 448 units of 1/64.
                unit = 1 / 64 if name == "o_proj" else None
                linear.register_forward_pre_hook(lambda _, rows, unit=unit: (round_rows(rows[0], unit),))
    got, want = logits_of(accelerate(make_model(device, **WIDE), "int4", precision=[part])), logits_of(model)
    if part == "head":  # the head is the embedding, which must not be rounded
        assert ((got - want).norm() / want.norm()) < 0.05  # float8 has three bits of mantissa
        return
    effect = (logits_of(make_decoded(device, "int4")) - want).norm()  # of rounding
    # The GPU's products add in 14 bits, so some inputs are rounded the other way. Random errors of 2**-13 in every
    # product give 0.07 (attention) and 0.09 (dense). Another rounding to float8 would give about 1.
    assert ((got - want).norm() / effect) < (0.2 if NATIVE else 1e-3)


@pytest.mark.slow
def test_the_dense_product_next_to_the_router_equals_the_librarys(device, monkeypatch):
    monkeypatch.setattr(forward, "_BESIDE", range(0))
    want = logits_of(accelerate(make_model(device, **WIDE), "int4", precision=["dense"]))
    calls, beside = [], forward.multiply_beside
    monkeypatch.setattr(forward, "multiply_beside", lambda *operands: calls.append(1) or beside(*operands))
    monkeypatch.setattr(forward, "tensor_descriptors", lambda device: True)
    monkeypatch.setattr(forward, "_BESIDE", range(8, 9))  # the canvases of `logits_of` have 8 rows
    got = logits_of(accelerate(make_model(device, **WIDE), "int4", precision=["dense"]))
    assert calls
    torch.testing.assert_close(got, want, rtol=2e-2 if NATIVE else 0, atol=2e-2 if NATIVE else 0)


@pytest.mark.slow
def test_the_soft_embedding_is_the_product_of_rounded_probabilities_and_columns(device):
    model = make_model(device, **WIDE)
    fast = accelerate(make_model(device, **WIDE), "int4", precision=["soft_embedding"])
    canvas = torch.arange(8, device=device).view(2, 4)
    prediction = fast.denoise(canvas, fast.encode(canvas)).shaped(temperature=0.7)
    probabilities = float8.quantize(prediction.logits.softmax(-1).flatten(0, 1)).decode()
    columns = float8.quantize(model.embed_tokens.weight.detach().T).decode()
    want = (probabilities @ columns.T * 8).view(2, 4, -1)  # 8: the square root of the hidden size
    for self_cond in (prediction, prediction.logits):
        got = fast._workspace.soft_embedding(self_cond, canvas.shape)
        # The kernel's probabilities have another rounding error, and may round to the other float8 neighbour.
        assert ((got - want).norm() / want.norm()) < (5e-3 if NATIVE else 1e-3)


@pytest.mark.parametrize(
    ("part", "change", "shape"),
    [("head", {"vocab_size": 40}, (40, 64)), ("dense", {"intermediate_size": 40}, (64, 40))],
)
def test_shapes_that_the_librarys_float8_product_does_not_multiply_are_refused(part, change, shape, device):
    sentence = rf'"{part}" needs .* multiples of 16, got \({shape[0]}, {shape[1]}\)\.'
    with pytest.raises(ValueError, match=sentence):
        accelerate(make_model(device, **WIDE | change), "int4", precision=[part])


@pytest.mark.parametrize("page", ["docstring", "docs/getting-started.md"])
def test_the_documented_table_of_fast_is_the_one_in_use(page):
    text = accelerate.__doc__ if page == "docstring" else (Path(__file__).parents[2] / page).read_text()
    rows = re.findall(r'\| ([^|\n]*) \| ([^|\n]*attention"[^|\n]*) \|', text)
    found = {format: tuple(re.findall(r'"(\w+)"', parts)) for key, parts in rows for format in re.findall(r"\w+", key)}
    assert found == FAST
