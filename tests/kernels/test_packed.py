"""Experts packed to 12 bits per weight: lossless decoding, products against float64 of the original weights, and the
whole denoiser against one with plain weights."""

import gc
import random
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import dgemma
from dgemma.train import LoRA, Objective, TrainConfig, add_lora, train
from dgemma_kernels import accelerate
from dgemma_kernels.engine import forward
from dgemma_kernels.formats import ENCODERS, packed
from dgemma_kernels.formats.packed import pack
from dgemma_kernels.ops import configs
from dgemma_kernels.ops.experts import kernel as experts
from dgemma_kernels.ops.experts import reference as experts_reference
from kernel_inputs import NUM_EXPERTS, draw_routing, draw_tokens, logits_of, make_model, sort_choices

E, D, F = NUM_EXPERTS, 72, 88  # neither width is a multiple of any tile, nor of the 64 columns of a plane
pytestmark = pytest.mark.usefixtures("small_chunks")
CANVAS, VOCAB = 4, 40
NATIVE = torch.cuda.is_available()
# Per row. float32: sums of up to 1,088 products. bfloat16: four roundings of up to 2**-8. GeGLU enlarges the first of
# them where the gate is negative. On an H200 we measured up to 3.6e-6 and 9.5e-3, in rows with few large values.
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}
# The interpreter does not multiply bfloat16.
DTYPES = [torch.float32, torch.bfloat16] if NATIVE else [torch.float32]
# Inputs that outliers multiply are scaled up, so that errors show. A placeholder is about 2**-15 of a row's largest
# weight. If it stays in place of its outlier, it adds an eighth of that weight to an output. A missing outlier changes
# the output by more than a hundredth of that weight.
LOUD = 2.0**12
# float32 sums in another sequence, in two layers, with activations of about ten. A GPU adds in yet another sequence.
CLOSE = {"rtol": 2e-4, "atol": 2e-4} if NATIVE else {"rtol": 2e-5, "atol": 2e-5}


def from_bits(sign: Tensor, upper: Tensor, lower: Tensor) -> Tensor:
    """Make bfloat16 values from these bit patterns: one bit, seven bits, eight bits."""
    return (upper << 8 | lower | -(sign << 15)).to(torch.int16).view(torch.bfloat16)


def same_bits(a: Tensor, b: Tensor) -> bool:
    integers = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(integers), b.view(integers))


def draw_weights(*shape: int, seed: int = 0, tops: tuple[int, int] = (20, 63), odd: bool = True) -> Tensor:
    """Draw weights of any sign and mantissa. Each row draws its top byte between the two `tops`.

    The upper byte of a weight is the top byte or one of the seven below it. In the first column it is the top byte. By
    default magnitudes are 2**-101 to 2. With `odd`, one weight in a hundred is zero, denormal or tiny.
    """
    generator = torch.Generator().manual_seed(seed)
    top = torch.randint(tops[0], tops[1] + 1, (*shape[:-1], 1), generator=generator)
    upper = top - torch.randint(8, shape, generator=generator)
    upper[..., :1] = top
    sign, lower = (torch.randint(n, shape, generator=generator) for n in (2, 256))
    weights = from_bits(sign, upper, lower)
    if odd and shape[-1] > 1:
        others = weights[..., 1:].flatten()
        places = torch.randperm(len(others), generator=generator)[: weights.numel() // 100]
        values = torch.tensor([0.0, -0.0, 2.0**-133, -(2.0**-126), 1e-30, -3e-39]).bfloat16()
        others[places] = values[torch.arange(len(places)) % len(values)]
        weights = torch.cat((weights[..., :1], others.view(*shape[:-1], -1)), dim=-1)
    return weights


def test_every_pattern_below_2_127_is_packed_without_loss(device):
    # One row per upper byte, with all 512 patterns of that byte. Half of the first row are zeros and denormals.
    upper, sign, lower = torch.meshgrid(*(torch.arange(n) for n in (127, 2, 256)), indexing="ij")
    weights = from_bits(sign, upper, lower).view(1, 127, 512).to(device)
    got = pack(weights)
    assert same_bits(got.decode(), weights)
    assert len(got.places) == 256
    assert same_bits(pack(weights.float()).decode(), weights.float())


def test_eight_upper_bytes_have_codes_and_the_ninth_is_an_outlier(device):
    # Each row has all 4,096 patterns of eight upper bytes, which start one byte above those of the previous row.
    sign, upper, lower = torch.meshgrid(*(torch.arange(n) for n in (2, 8, 256)), indexing="ij")
    first = torch.arange(1, 120)
    weights = from_bits(sign.flatten(), upper.flatten() + first[:, None], lower.flatten())
    got = pack(weights[None].to(device))
    assert same_bits(got.decode().cpu(), weights[None])
    assert len(got.places) == 0
    weights[5, 1234] = from_bits(*torch.tensor([1, 5, 255]))  # the largest value below those of row 5, which start at 6
    got = pack(weights[None].to(device))
    assert same_bits(got.decode().cpu(), weights[None])
    assert got.places.tolist() == [5 << 16 | 1234]


@pytest.mark.parametrize("seed", range(12))
def test_any_shape_is_decoded_without_loss(seed, device):
    draw = random.Random(seed)
    gated, tops = draw.random() < 0.5, (draw.randint(20, 63), 63)
    shape = draw.randint(1, 3), draw.randint(1, 140) * (1 + gated), draw.randint(1, 210)
    weights = draw_weights(*shape, seed=seed, tops=tops).to(device)
    assert same_bits(pack(weights, gated=gated).decode(), weights)


def test_packed_parameters_have_no_autograd_graph():
    got = pack(torch.nn.Parameter(draw_weights(2, 130, 72)))
    assert len(got.outliers)
    assert not any(tensor.requires_grad for tensor in got.tensors())


def test_packing_in_chunks_equals_packing_at_once(monkeypatch):
    weights = draw_weights(5, 130, 72)
    whole = pack(weights)
    monkeypatch.setattr(packed, "_CHUNK", 2 * 130 * 72)
    for got, want in zip(pack(weights).tensors(), whole.tensors(), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(("num_rows", "width"), [(1408, 2816), (2816, 704)], ids=["gate_up", "down"])
def test_the_published_sizes_take_three_quarters_of_the_bytes(num_rows, width):
    weights = torch.randn(1, num_rows, width, generator=torch.Generator().manual_seed(0)).bfloat16()
    num_bytes = sum(tensor.numel() * tensor.itemsize for tensor in pack(weights, gated=width == 2816).tensors())
    # 704 columns leave the last plane of codes half empty: 17 planes instead of 16.5. Scales and outliers add 1 %.
    assert num_bytes / (2 * weights.numel()) < (0.76 if width == 2816 else 0.79)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda w: w.float().add_(2.0**-20), r"got other torch\.float32 values\. Use weights="),
        (lambda w: w.index_fill_(2, torch.tensor(3), torch.inf), "must be finite values that bfloat16 represents"),
        (lambda w: w.index_fill_(1, torch.tensor(7), 0.0), r"at most 1 % of values .* got 360 of 7,200\. Use weights="),
        (lambda w: w.expand(5, 20, 72).repeat(1, 820, 1), r"<= 16384, .* got \(5, 16400, 72\)"),
    ],
    ids=["float32", "inf", "a row of zeros", "too many rows"],
)
def test_weights_that_cannot_be_packed_are_refused(change, sentence):
    weights = change(draw_weights(5, 20, 72, odd=False))
    with pytest.raises(ValueError, match=sentence):
        pack(weights)


@pytest.mark.parametrize(("others", "value"), [(2.0**126, 2.0**127), (2.0**14, 2.0**-133)], ids=["scale", "outlier"])
def test_rows_whose_scale_or_outliers_overflow_are_refused(others, value):
    weights = torch.full((1, 20, 72), others).bfloat16()
    weights[0, 3, 9] = value
    with pytest.raises(ValueError, match=r'must be below 2\^127, .* must not underflow .*\. Use weights="bf16"'):
        pack(weights)


def draw_ordinary(*shape: int, seed: int) -> Tensor:
    """Draw normal weights without outliers, in rows of different magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(*shape, generator=generator)
    size = 2.0 ** torch.randint(-8, 2, (*shape[:-1], 1), generator=generator)  # neighbouring rows differ
    return (weights.sign() * weights.abs().clamp(min=2.0**-6) * size * shape[-1] ** -0.5).bfloat16().float()


def shrink(weights: Tensor, at: tuple) -> None:
    """Make outliers: zeros of both signs, and values below the least value that has a code, down to 1/16 of it."""
    rows = weights.abs().amax(-1, keepdim=True).expand_as(weights)[at]
    # If the largest weight of a row is 1/2 to 2 times 4**n, the least value with a code is 2**(2n - 15). `least` is
    # that value or a quarter of it.
    least = 2.0 ** (2 * (rows.log2() / 2 + 0.25).floor() - 15)
    value = torch.where(torch.rand(rows.shape) < 0.5, -1, 1) * least * (0.25 + 0.7 * torch.rand(rows.shape))
    value = torch.where(torch.rand(rows.shape) < 0.2, value * 0, value)
    weights[at] = value.bfloat16().float()


OUTLIERS = {  # places in weights (E, N, K)
    "none": [],
    "the last": [(-1, -1, -1), (-1, 0, -1)],
    "more than one list": [(4, slice(None), 5), (0, slice(None), -2)],  # in every row, 64 to 128 per block
}


def draw_outliers(*shape: int, seed: int, outliers: str) -> tuple[Tensor, Tensor]:
    """Return weights and the factor of each input column."""
    weights, loud = draw_ordinary(*shape, seed=seed), torch.ones(shape[-1])
    for at in OUTLIERS[outliers]:
        shrink(weights, at)
        loud[at[-1]] = LOUD
    return weights, loud


ROUTINGS = [
    ("one-token", "more than one list"),
    ("even", "the last"),
    ("even", "more than one list"),
    ("one-expert-has-every-row", "more than one list"),
    ("two-experts-have-no-rows", "none"),
]


@pytest.mark.usefixtures("described")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("routing", "outliers", "width", "hidden"),
    [
        *((*case, D, F) for case in ROUTINGS),
        *(pytest.param(*case, 128, 192, marks=pytest.mark.slow) for case in ROUTINGS),
        ("even", "more than one list", 200, 80),  # an odd number of halves of planes
        # A program loads 32 outliers at a time for more than 1,024 columns, else 16.
        pytest.param("even", "more than one list", 1088, 64, marks=pytest.mark.slow),
    ],
)
def test_products_match_float64(routing, outliers, width, hidden, dtype, device):
    index = draw_routing(routing)
    gate_up, loud = draw_outliers(E, 2 * hidden, width, seed=1, outliers=outliers)
    down, hidden_loud = draw_outliers(E, width, hidden, seed=2, outliers=outliers)
    x, hidden_rows = torch.randn(index.shape[0], width) * loud, torch.randn(index.numel(), hidden) * hidden_loud
    index, x, hidden_rows, gate_up, down = (
        t.to(device) for t in (index, x.to(dtype), hidden_rows.to(dtype), gate_up, down)
    )
    weights, tiles = torch.rand(index.shape, device=device), sort_choices(index, "packed")
    lists = pack(gate_up.to(dtype), gated=True), pack(down.to(dtype))
    assert [len(packed.places) > 0 for packed in lists] == [outliers != "none"] * 2

    got = experts.expert_gate_up(x, lists[0], tiles)
    want = experts_reference.expert_gate_up(x.double(), gate_up.double(), tiles)
    assert got.dtype == dtype
    assert ((got - want).norm(dim=-1) / want.norm(dim=-1)).max() < LIMITS[dtype]

    got = experts.expert_down(hidden_rows, lists[1], weights, tiles)
    want = experts_reference.expert_down(hidden_rows.double(), down.double(), weights.double(), tiles)
    assert got.dtype == dtype
    assert ((got - want).norm(dim=-1) / want.norm(dim=-1)).max() < LIMITS[dtype]


def make_rounded_model(device: torch.device) -> dgemma.DiffusionGemma:
    """Make a float32 model whose experts have bfloat16 values, with a few outliers."""
    model = make_model(device, moe_intermediate_size=80)
    for layer in model.layers:
        for weight in (layer.experts.gate_up_proj, layer.experts.down_proj):
            weight[:, 3, 5], weight[1, 7, 9] = 0.0, 1e-12
            weight.copy_(weight.bfloat16())
    return model


@pytest.mark.slow
def test_both_modes_equal_the_reference(device):
    want, got = map(logits_of, (make_rounded_model(device), accelerate(make_rounded_model(device), weights="packed")))
    torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "table"), [("packed", configs.EXPERTS["packed"]), ("fp8", configs.EXPERTS["fp8"])])
def test_tokens_are_sorted_into_tiles_of_the_weights_format(weights, table, device, monkeypatch):
    sizes, sort_by_expert = set(), forward.sort_by_expert
    monkeypatch.setattr(configs, "gpu_name", lambda _: "default")
    monkeypatch.setitem(table, "default", (replace(table["default"][0], rows=16),))
    monkeypatch.setattr(forward, "sort_by_expert", lambda *args: sizes.add(args[2]) or sort_by_expert(*args))
    accelerate(make_rounded_model(device), weights).causal_logits(draw_tokens(1, 2))
    assert sizes == {16}


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["packed", "fp8"])
def test_the_experts_of_a_model_are_freed_with_it_and_the_denoiser_still_works(weights, device):
    model = make_rounded_model(device)
    fast = accelerate(model, weights)
    parameter = weakref.ref(model.layers[0].experts.gate_up_proj)
    del model
    gc.collect()
    assert parameter() is None
    cache = fast.encode(draw_tokens(1, 3))
    assert fast.denoise(draw_tokens(1, CANVAS), cache).logits.isfinite().all()
    with pytest.raises(ValueError, match="attention_mask must be"):
        fast.encode(draw_tokens(1, 3), cache, torch.ones(1, 1, device=device))


@pytest.mark.parametrize("weights", ["packed", pytest.param("fp8", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_experts_are_released_layer_by_layer_and_the_model_then_raises(weights, device, monkeypatch):
    model, canvas = make_rounded_model(device), draw_tokens(1, CANVAS)
    kept = accelerate(make_rounded_model(device), weights)
    parameters = [weakref.ref(layer.experts.down_proj) for layer in model.layers]
    alive: list[list[bool]] = []  # at the start of each layer
    encode = ENCODERS[weights]

    def note(*args, gated):
        if gated:
            alive.append([one() is not None for one in parameters])
        return encode(*args, gated=gated)

    monkeypatch.setitem(ENCODERS, weights, note)
    fast = accelerate(model, weights, release=True)
    assert alive == [[True, True], [False, True]]
    assert [one() for one in parameters] == [None, None]
    logits = [denoiser.denoise(canvas, denoiser.encode(canvas)).logits for denoiser in (kept, fast)]
    assert torch.equal(*logits)
    state = make_rounded_model(device).state_dict()
    for use in (lambda: model.encode(canvas), model.state_dict, lambda: model.load_state_dict(state)):
        with pytest.raises(RuntimeError, match=r"e\(release=True\) has taken the experts out of this model\. Use"):
            use()
    with pytest.raises(ValueError, match=r"accelerate model must have its experts, .* has taken out\. Load the model"):
        accelerate(model, weights)


def test_functions_that_need_experts_refuse_a_released_model_and_do_not_change_it(device, tmp_path):
    model = make_rounded_model(device).requires_grad_(True)
    accelerate(model, "packed", release=True)
    modules, objective = list(model.modules()), Objective(noise=dgemma.UniformNoise(VOCAB), canvas_len=CANVAS)
    config = TrainConfig(steps=1, batch_size=1, precision="weights")
    with pytest.raises(ValueError, match=r"add_lora model must have its experts, .* or accelerate it without rel"):
        add_lora(model, LoRA(targets=("attention",)))
    with pytest.raises(ValueError, match="train model must have its experts, "):
        train(model, objective, lambda step, rows: None, config, out=tmp_path / "run")
    with pytest.raises(RuntimeError, match="has taken the experts out of this model"):
        model.save_pretrained(tmp_path / "saved")
    assert list(model.modules()) == modules
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_casting_the_model_does_not_change_the_denoiser(device):
    model, canvas = make_rounded_model(device), draw_tokens(1, CANVAS)
    fast = accelerate(model, "packed")
    want = fast.causal_logits(canvas)
    model.to(torch.bfloat16)
    assert fast.dtype == torch.float32
    assert torch.equal(fast.causal_logits(canvas), want)


def test_the_models_own_weights_cannot_be_released(device):
    with pytest.raises(ValueError, match=r'accelerate release must be False for weights="bf16", which are the model'):
        accelerate(make_rounded_model(device), release=True)


def test_a_model_that_cannot_be_packed_is_left_as_it_was(device):
    model, canvas = make_model(device, moe_intermediate_size=80), draw_tokens(1, CANVAS)
    with pytest.raises(ValueError, match=r"must be finite values that bfloat16 represents, got other torch\.float32"):
        accelerate(model, weights="packed", release=True)
    assert model.denoise(canvas, model.encode(canvas)).logits.isfinite().all()


def test_an_error_in_a_later_layer_says_that_earlier_experts_were_released(device):
    model = make_rounded_model(device)
    model.layers[1].experts.down_proj[0] = 0.0
    with pytest.raises(ValueError, match=r'Use weights="bf16"\. Load the model again: release has removed'):
        accelerate(model, weights="packed", release=True)
    model = make_rounded_model(device)
    model.layers[1].experts.down_proj[0] = 0.0
    with pytest.raises(ValueError, match=r'got 2,565 of 10,240\. Use weights="bf16"\.$'):
        accelerate(model, weights="packed")
