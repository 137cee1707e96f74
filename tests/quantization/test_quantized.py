"""Quantised weights: decoding of every code, products, gradients, and quantisation."""

import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F

from dgemma import DiffusionGemma, UniformNoise, presets
from dgemma.checkpoint.quantizing import calibration, quantize_with_calibration
from dgemma.model.experts import looped_product, product_by_group
from dgemma.quantization.rounding import Quantization, gptq, quantize, requantize
from dgemma.quantization.weights import (
    IntWeight,
    NvFp4Weight,
    QuantizedLinear,
    linear,
    linear_layer,
    pack_nibbles,
    quantized_weights,
    unpack_nibbles,
)

FORMATS = ("int4", "int8", "fp8", "nvfp4")


def test_nvfp4_decodes_every_code_with_every_scale():
    # From the definition: sign, two exponent bits with bias 1, one mantissa bit; e4m3 has bias 7 and subnormals.
    def e2m1(code):
        sign, exponent, mantissa = -1 if code & 8 else 1, code >> 1 & 3, code & 1
        return sign * (mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))

    def e4m3(byte):
        sign, exponent, mantissa = -1 if byte & 128 else 1, byte >> 3 & 15, byte & 7
        return sign * (mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))

    scales = [byte for byte in range(256) if byte & 127 != 127]  # the others are NaN
    codes = pack_nibbles(torch.arange(16, dtype=torch.uint8)).repeat(len(scales), 1)
    scale = torch.tensor(scales, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    row_scale = torch.full((len(scales),), 0.75)
    decoded = NvFp4Weight(codes=codes, scale=scale, row_scale=row_scale).decode(torch.float64)
    expected = [[e2m1(code) * e4m3(byte) * 0.75 for code in range(16)] for byte in scales]
    assert torch.equal(decoded, torch.tensor(expected, dtype=torch.float64))


def test_the_even_column_is_in_the_low_bits():
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert pack_nibbles(codes).tolist() == [[0x21, 0x0F]]
    assert torch.equal(unpack_nibbles(pack_nibbles(codes)), codes)


@pytest.mark.parametrize("bits", [4, 8])
def test_integers_decode_by_zero_point_bias_and_group_index(bits):
    values = torch.arange(8) % (1 << bits)
    codes = values.to(torch.uint8)[None].repeat(2, 1)
    stored = pack_nibbles(codes) if bits == 4 else codes
    scale = torch.tensor([[0.5, 2.0], [1.0, 4.0]])

    def decoded(**options):
        return IntWeight(codes=stored, scale=scale, bits=bits, **options).decode(torch.float32).tolist()

    centre = 1 << bits - 1
    for row, scales in enumerate(scale.tolist()):
        group = [0, 0, 0, 0, 1, 1, 1, 1]
        assert decoded()[row] == [(c - centre) * scales[g] for c, g in enumerate(group)]
        zeros = torch.tensor([[3, 1], [0, 2]], dtype=torch.uint8)
        assert decoded(zero_point=zeros)[row] == [(c - int(zeros[row, g])) * scales[g] for c, g in enumerate(group)]
        assert decoded(bias=-scale)[row] == [c * scales[g] - scales[g] for c, g in enumerate(group)]
        order = [1, 0, 0, 1, 1, 0, 1, 0]
        index = torch.tensor(order, dtype=torch.int32)
        assert decoded(group_index=index)[row] == [(c - centre) * scales[g] for c, g in enumerate(order)]


def test_group_indices_belong_to_their_expert():
    codes = pack_nibbles(torch.full((2, 3, 4), 9, dtype=torch.uint8))
    scale = torch.arange(12, dtype=torch.float32).view(2, 3, 2)
    index = torch.tensor([[0, 1, 0, 1], [1, 1, 0, 0]], dtype=torch.int32)
    decoded = IntWeight(codes=codes, scale=scale, group_index=index).decode(torch.float32)
    for expert, row, column in itertools.product(range(2), range(3), range(4)):
        assert decoded[expert, row, column] == scale[expert, row, index[expert, column]]


@pytest.mark.parametrize("to", FORMATS)
def test_products_and_input_gradients_equal_those_of_the_decoded_weight(to):
    torch.manual_seed(0)
    weight = quantize(torch.randn(24, 64), to)
    x, grad = torch.randn(3, 5, 64, requires_grad=True), torch.randn(3, 5, 24)
    plain = weight.decode(torch.float32)
    (expected,) = torch.autograd.grad(F.linear(x, plain), x, grad)
    assert torch.equal(linear(x, weight), F.linear(x, plain))
    torch.testing.assert_close(torch.autograd.grad(QuantizedLinear(weight)(x), x, grad)[0], expected)

    experts = quantize(torch.randn(4, 16, 64), to)
    rows, ends = torch.randn(10, 64, requires_grad=True), torch.tensor([3, 3, 8, 10], dtype=torch.int32)
    reference = looped_product(rows, experts.decode(torch.float32), ends)
    grad = torch.randn(10, 16)
    torch.testing.assert_close(product_by_group(rows, experts, ends), reference)
    (expected,) = torch.autograd.grad(reference, rows, grad)
    torch.testing.assert_close(torch.autograd.grad(product_by_group(rows, experts, ends), rows, grad)[0], expected)


def test_autograd_stores_codes_and_not_decoded_weights():
    weight = quantize(torch.randn(64, 128), "int4")
    x, sizes = torch.randn(2, 128, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()), lambda t: t):
        linear(x, weight)
    assert sum(sizes) < 64 * 128


@pytest.mark.parametrize("to", FORMATS)
def test_casting_a_model_leaves_codes_and_scales_as_they_are(to):
    layer = linear_layer(quantize(torch.randn(8, 64), to))
    before = {name: tensor.clone() for name, tensor in layer.weight.tensors().items()}
    layer.half().double()
    for name, tensor in layer.weight.tensors().items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8))


@pytest.mark.parametrize("to", FORMATS)
def test_pickled_and_copied_weights_have_the_same_bits(to):
    weight = quantize(torch.randn(8, 64), to)
    for other in (pickle.loads(pickle.dumps(weight)), copy.deepcopy(weight)):
        assert other.tensors().keys() == weight.tensors().keys()
        assert torch.equal(other.decode(torch.float32), weight.decode(torch.float32))
    assert weight.decode(torch.float32).isfinite().all()  # the original is unchanged


# Largest error relative to the scale of a row: half a step of each format, and the rounding of a bfloat16 scale.
@pytest.mark.parametrize(("to", "bound"), [("int8", 0.5 / 127 + 2**-8), ("fp8", 2**-4)])
def test_eight_bits_round_to_nearest(to, bound):
    weight = torch.randn(16, 64)
    error = (quantize(weight, to).decode(torch.float32) - weight).abs() / weight.abs().amax(-1, keepdim=True)
    assert error.max() <= bound


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_searched_scale_of_int4_is_at_least_as_good_as_the_largest_value(symmetric):
    torch.manual_seed(0)
    weight = torch.randn(32, 128) + 0.5 * (not symmetric)
    groups = weight.unflatten(-1, (-1, 32))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = torch.maximum(high / 7, -low / 8) if symmetric else (high - low) / 15
    zero = torch.zeros_like(low) if symmetric else (-low / scale).round()
    limits = (-8, 7) if symmetric else (0, 15)
    naive = ((groups / scale + zero).round().clamp(*limits) - zero) * scale
    searched = quantize(weight, "int4", group_size=32, symmetric=symmetric, scale_dtype=torch.float32)
    error = (searched.decode(torch.float32) - weight).square().mean()
    assert error < 0.95 * (naive - groups).square().mean()


@pytest.mark.parametrize("to", FORMATS)
def test_values_of_a_format_survive_quantisation_to_it(to):
    values = quantize(torch.randn(2, 8, 64), to).decode(torch.float32)
    again = quantize(values, to).decode(torch.float32)
    assert (again - values).norm() <= 0.05 * values.norm()
    assert requantize(values, quantize(values, to)).format == to


def test_zeros_stay_zeros():
    for to in FORMATS:
        assert torch.equal(quantize(torch.zeros(4, 64), to).decode(torch.float32), torch.zeros(4, 64))


@pytest.mark.parametrize("symmetric", [True, False])
def test_calibration_reduces_the_error_of_products_with_correlated_inputs(symmetric):
    torch.manual_seed(0)
    mix = torch.randn(2, 64, 64) * torch.logspace(0, -2, 64)
    inputs, new = torch.randn(2, 2, 400, 64) @ mix  # two experts each
    weight = torch.randn(2, 16, 64)
    moments = inputs.mT @ inputs
    calibrated = gptq(weight, moments, group_size=32, symmetric=symmetric).decode(torch.float32)
    nearest = quantize(weight, "int4", group_size=32, symmetric=symmetric).decode(torch.float32)
    errors = [(new @ (rounded - weight).mT).norm() for rounded in (calibrated, nearest)]
    assert errors[0] < 0.8 * errors[1]


def test_calibration_without_inputs_rounds_to_nearest():
    weight = torch.randn(17, 8, 64)  # more experts than are calibrated at once
    silent = gptq(weight, torch.zeros(17, 64, 64), group_size=32)
    assert torch.equal(silent.codes, quantize(weight, "int4", group_size=32).codes)


def test_a_model_is_calibrated_layer_by_layer():
    model = DiffusionGemma(presets.tiny().replace(num_experts=4, vocab_size=64))
    model.reset_parameters(torch.Generator().manual_seed(0))
    exact = {name: weight.clone() for name, weight in model.state_dict().items()}
    run = calibration(torch.randint(64, (2, 48)), UniformNoise(64), canvas_len=32)
    quantize_with_calibration(model, Quantization(experts="int4", dense="int4", group_size=32), run)
    weights = dict(quantized_weights(model))
    assert len(weights) == 3 * (4 + 3 + 2) - 1  # a full layer has no v_proj
    for name, weight in weights.items():
        error = (weight.decode(torch.float32) - exact[name]).norm() / exact[name].norm()
        assert 0.05 < error < 0.6
        # Nearest rounding ignores the inputs, so that it gives other codes.
        assert not torch.equal(weight.codes, quantize(exact[name], "int4", group_size=32).codes)
    assert "gate_up" not in vars(model.layers[0].experts)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("to", FORMATS)
def test_nan_and_infinity_are_not_quantised(to, value):
    weight = torch.ones(4, 64)
    weight[2, 7] = value
    with pytest.raises(ValueError, match="must be finite"):
        quantize(weight, to)
    with pytest.raises(ValueError, match=r"layers.0.experts.down_proj cannot be quantised: quantize weight must be"):
        Quantization(experts=to).apply("layers.0.experts.down_proj", weight[None])
    with pytest.raises(ValueError, match="must be finite"):
        gptq(weight, torch.eye(64))
