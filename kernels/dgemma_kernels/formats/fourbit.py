"""Experts of four bits per weight, int4 and NVFP4, in the order in which the kernels read them.

`dgemma.quantization.weights` defines the formats. Codes and scales are only moved, never decoded, from there to here.
The kernels decode to bfloat16, so a product equals that of the decoded weights. A decoded int4 weight is (code -
zero_point) * scale or code * scale + bias, with a bfloat16 scale and bias, rounded once. A decoded NVFP4 weight is e2m1
* scale, which bfloat16 represents exactly; the float32 scale of a row multiplies the sums.

The bytes that a program reads together are contiguous. A plane has 128 rows by 64 columns, as 64 lines of 16 words. A
word of 32 bits holds eight codes: columns c, c + 1, c + 8 and c + 9 of rows r and r + 64. Their bit positions are
chosen so that few instructions turn them into bfloat16 values. Within a plane, words have the order in which the
threads of a warpgroup hold the left operand of a product. Each thread loads four neighbouring words, decodes 32
weights, and multiplies them from registers.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from dgemma.quantization.weights import E2M1, NVFP4_GROUP, IntWeight, NvFp4Weight, unpack_nibbles
from dgemma_kernels.blocks import finish_products, inside
from dgemma_kernels.formats.float8 import quantize
from dgemma_kernels.formats.packed import Weights

ROWS, COLS = 128, 64  # of a plane; with `gated`, the first 64 rows are gate and the others up
_CHUNK = 1 << 25  # weights arranged at a time
_INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))

# Each halfword of a word holds one code of every pair. Per pair, these are the bits of a code in its halfword, lowest
# first. Pairs 0 and 1 are columns c, c + 1 and c + 8, c + 9 of row r; pairs 2 and 3 are the same columns of row r + 64.
# The first of a pair is in the lower halfword.
#
# As a bfloat16, an integer n < 256 in the lower byte is n * 2**-133, also where the byte reaches into the exponent. So
# a code of row r is code * 2**-133 and a code of row r + 64 is code * 2**-129. An fma multiplies it by scale * 2**117
# or scale * 2**113 and adds the offset times 2**-16. The sums are multiplied by 2**16.
#
# In three of NVFP4's four pairs, the sign is nine bits above the lowest bit of the magnitude. A bfloat16 that holds
# e2m1 * 2**-126 has the same distance between them.
_BITS = {
    "int4": ((0, 1, 2, 3), (8, 9, 10, 11), (4, 5, 6, 7), (12, 13, 14, 15)),
    "nvfp4": ((0, 1, 2, 9), (3, 4, 5, 12), (6, 7, 8, 15), (10, 11, 13, 14)),
}
_SCALED = (2.0**117, 2.0**113)  # rows r and r + 64
_BIAS = 21  # bias of the exponents of NVFP4's scales, which are -9 to 8 in e4m3


@dataclass(frozen=True, kw_only=True)
class FourBit:
    """Weights (E, N, K) in four bits. N' is N rounded up to blocks of 128 rows, K' is K rounded up to 64 columns.

    Every plane has 64 / `group` scales per row, those of rows r and r + 64 in one integer. For int4 they are two
    bfloat16. For NVFP4 they are two bytes. Each is a float without a sign, with five bits of exponent and three of
    mantissa, so that every positive value of e4m3 is exact.

    Example: `arrange(quantize(experts.down_proj, "int4"), dtype=torch.bfloat16).decode()`.
    """

    kind: str  # "int4" or "nvfp4"
    codes: Tensor  # (E N' / 128, K' / 64, 64, 16) int32
    scale: Tensor  # (E N' / 128, K' / 64, 64, 64 / group) int32, for NVFP4 int16
    zero: Tensor | None  # of int4, like scale: two bfloat16, -zero_point * 2**-133 and -zero_point * 2**-129
    bias: Tensor | None  # of int4, like scale: two bfloat16, times 2**-16
    row_scale: Tensor | None  # of NVFP4: (E N' / 128, 128) float32
    group: int
    shape: torch.Size  # (E, N, K)
    dtype: torch.dtype  # of the rows they multiply
    gated: bool  # the first half of the rows is gate, the second up
    float8_rows: bool = False  # `experts.multiply_experts` may round the rows that they multiply to float8

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor that it stores."""
        return tuple(t for t in (self.codes, self.scale, self.zero, self.bias, self.row_scale) if t is not None)

    def decode(self) -> Tensor:
        """Return the weights that the kernels multiply, exactly: (E, N, K) float64."""
        width = self.shape[2]
        codes = self._in_rows(_read_codes(self.codes, self.kind)).long()[..., :width]
        if self.row_scale is not None:
            byte = self._per_column(self.scale.long() & 0xFF, self.scale.long() >> 8 & 0xFF)
            scale = torch.ldexp(1 + (byte & 7) / 8.0, (byte >> 3) - _BIAS).double()
            values = codes.new_tensor(E2M1, dtype=torch.float64)[codes] * scale
            return values * self._in_rows(self.row_scale[:, :, None])
        scale = self._floats(self.scale, *_SCALED)
        if self.bias is not None:
            values = codes * scale + self._floats(self.bias, 2.0**-16, 2.0**-16)
        elif self.zero is not None:
            values = (codes + self._floats(self.zero, 2.0**-133, 2.0**-129)) * scale
        else:
            values = (codes - 8) * scale
        return values.bfloat16().double()

    def _floats(self, pairs: Tensor, low: float, high: float) -> Tensor:
        """Return bfloat16 values, of rows r divided by `low` and of rows r + 64 by `high`: (E, N, K) float64."""
        first, second = ((x & 0xFFFF) << 16 for x in (pairs, pairs >> 16))
        values = (x.view(torch.float32).double() for x in (first, second))
        return self._per_column(*(value / factor for value, factor in zip(values, (low, high), strict=True)))

    def _per_column(self, low: Tensor, high: Tensor) -> Tensor:
        """Repeat values (blocks, planes, 64, groups) of rows r and r + 64 over the columns of a group: (E, N, K)."""
        rows = self._in_rows(torch.stack((low, high), 1).transpose(2, 3).flatten(3).flatten(1, 2))
        return rows.repeat_interleave(self.group, -1)[..., : self.shape[2]]

    def _in_rows(self, blocks: Tensor) -> Tensor:
        """Order (blocks, 128, n) as (E, N, n)."""
        parts = 2 if self.gated else 1
        rows = blocks.unflatten(0, (self.shape[0], -1)).unflatten(2, (parts, -1)).transpose(1, 2).flatten(2, 3)
        return rows[:, :, : self.shape[1] // parts].flatten(1, 2)


@dataclass(frozen=True, kw_only=True)
class OrderedRows:
    """Rows in float8 (e4m3) with one scale per row, for products with int4 codes.

    The order of columns is that of the codes. In every 16 columns, the first eight are stored at even positions and the
    last eight at odd ones. `sums` corrects for the offset of 8 in all codes. For each group of 64 values it has
    their sum times -8 * 2**-49, rounded to bfloat16. The rounding errors of these sums follow, also in bfloat16.

    Example: `order_rows(x).decode()` differs from x by at most |x| / 16 or scale / 1024, the larger.
    """

    values: Tensor  # (M, D) float8_e4m3fn
    scale: Tensor  # (M,) float32
    sums: Tensor  # (M, 2, 64); of each 64, the first D / 64 are defined
    dtype: torch.dtype  # of the original values and of results from them

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def decode(self) -> Tensor:
        """Return values times scales, exactly and in the original order: (M, D) float64."""
        values = self.values.double().unflatten(1, (-1, 8, 2)).transpose(2, 3).flatten(1)
        return values * self.scale[:, None]


def order_rows(x: Tensor) -> OrderedRows:
    """Round x (M, D) to float8 with one scale per row, for products with int4 codes.

    D is a multiple of 64, up to 4,096.

    Example: `order_rows(normed).values.dtype` is `torch.float8_e4m3fn`.
    """
    rounded = quantize(x)
    pairs = rounded.values.view(torch.uint8).unflatten(1, (-1, 2, 8)).transpose(2, 3).flatten(1)
    exact = rounded.values.float().unflatten(1, (-1, COLS)).sum(-1) * (-8 * 2.0**-49)
    sums = exact.bfloat16()
    both = torch.stack((sums, (exact - sums.float()).bfloat16()), 1)
    return OrderedRows(
        values=pairs.contiguous().view(torch.float8_e4m3fn),
        scale=rounded.scale,
        sums=pad(both, (0, COLS - both.shape[2])),
        dtype=x.dtype,
    )


@torch.no_grad()
def arrange(weight: IntWeight | NvFp4Weight, *, dtype: torch.dtype, gated: bool = False) -> FourBit:
    """Put a quantised weight (E, N, K) into the order of the kernels. Scales and biases of int4 round to bfloat16.

    With `gated` the first half of the rows is gate and the second half up, as `expert_gate_up` takes them. `dtype` is
    that of the rows to multiply.

    Example: `arrange(quantize(experts.gate_up_proj, "int4"), dtype=torch.bfloat16, gated=True)`.
    """
    if isinstance(weight, NvFp4Weight):
        group = NVFP4_GROUP
    elif weight.bits != 4 or weight.group_index is not None:
        got = "a group_index" if weight.bits == 4 else f"{weight.bits} bits"
        raise ValueError(f"Experts of four bits must have groups of neighbouring columns, got {got}.")
    else:
        group = weight.group_size
    if group not in (16, 32) and group % COLS:
        raise ValueError(f"Experts of four bits must have groups of 16, 32 or a multiple of 64 columns, got {group}.")
    if gated and weight.shape[1] % 2:
        raise ValueError(f"Experts of four bits must have an even number of rows if gated, got {weight.shape[1]}.")
    chunks = zip(*_arrange_chunks(weight, gated), strict=True)
    codes, scale, zero, bias, row_scale = (None if parts[0] is None else torch.cat(parts) for parts in chunks)
    assert codes is not None
    assert scale is not None
    return FourBit(
        kind=weight.format,
        codes=codes,
        scale=scale,
        zero=zero,
        bias=bias,
        row_scale=row_scale,
        group=min(group, COLS),
        shape=weight.shape,
        dtype=dtype,
        gated=gated,
    )


def _arrange_chunks(weight: IntWeight | NvFp4Weight, gated: bool) -> Iterator[tuple[Tensor | None, ...]]:
    """Yield for a few experts at a time: codes, scales, offsets and scales of rows."""
    num_experts, num_rows, width = weight.shape
    parts, tensors = 2 if gated else 1, weight.tensors()

    def in_blocks(x: Tensor, size: int) -> Tensor:
        """Order (e, N, n) as blocks (e N' / 128, 2, 64, n'), with n' a multiple of `size`."""
        x = x.unflatten(1, (parts, -1))
        x = pad(x, (0, -x.shape[-1] % size, 0, -x.shape[2] % (ROWS // parts)))
        return x.unflatten(2, (-1, ROWS // parts)).transpose(1, 2).flatten(2, 3).flatten(0, 1).unflatten(1, (2, -1))

    def pair(low: Tensor, high: Tensor, bits: int) -> Tensor:
        """Join integers for rows r and for rows r + 64, both (e, N, G) → (blocks, planes, 64, groups)."""
        groups, repeats = max(1, COLS * low.shape[-1] // width), max(1, width // (COLS * low.shape[-1]))
        both = (in_blocks(x.int().repeat_interleave(repeats, -1), groups) for x in (low, high))
        low, high = (x.unflatten(-1, (-1, groups)).transpose(2, 3)[:, half] for half, x in enumerate(both))
        return low & (1 << bits) - 1 | high << bits

    def pair_floats(x: Tensor, *factors: float) -> Tensor:
        """Join bfloat16 values of rows r and of rows r + 64, each times its own factor, a power of two."""
        exact = [x.bfloat16().double() * factor for factor in factors]
        rounded = [value.bfloat16() for value in exact]
        if not all(torch.equal(got.double(), want) for got, want in zip(rounded, exact, strict=True)):
            raise ValueError(f"Scales of int4 experts must be from 2**-100 to 2**10, got {x.abs().max().item():.3g}.")
        low, high = (value.contiguous().view(torch.int16) for value in rounded)
        return pair(low, high, 16)

    count = max(1, _CHUNK // (num_rows * width))
    for start in range(0, num_experts, count):
        part = {name: tensor[start : start + count] for name, tensor in tensors.items()}
        codes, zero, bias, row_scale = unpack_nibbles(part["codes"]), None, None, None
        if isinstance(weight, NvFp4Weight):
            scale = part["scale"].float()
            if not scale.isfinite().all():
                raise ValueError("Scales of nvfp4 experts must be finite, got NaN.")
            # The bytes have neither sign nor zero. So codes take the sign of their scale, and are 0 if the scale is 0.
            each = scale.repeat_interleave(NVFP4_GROUP, -1)
            codes = torch.where(each < 0, codes ^ 8, codes).masked_fill(each == 0, 0)
            mantissa, exponent = torch.frexp(scale.abs().clamp(min=2.0**-9))
            byte = (exponent - 1 + _BIAS) << 3 | (mantissa * 16 - 8).int()
            scales = pair(byte, byte, 8).to(torch.int16)
            row_scale = in_blocks(part["row_scale"][..., None], 1).flatten(1).contiguous()
        else:
            scales = pair_floats(part["scale"], *_SCALED)
            if "zero_point" in part:
                code = part["zero_point"].int()
                zero = pair(code | 0x8000, code << 4 | 0x8000, 16).contiguous()
            elif "bias" in part:
                bias = pair_floats(part["bias"], 2.0**-16, 2.0**-16).contiguous()
        yield _write_codes(in_blocks(codes, COLS), weight.format), scales.contiguous(), zero, bias, row_scale


def _write_codes(blocks: Tensor, kind: str) -> Tensor:
    """Join codes (blocks, 2, 64, K') in planes (blocks, K' / 64, 64, 16) of words."""
    # Column 16 g + 8 h + 2 t + i of a plane is in word g of thread t.
    codes = blocks.int().unflatten(-1, (-1, 4, 2, 4, 2)).permute(0, 3, 2, 6, 4, 1, 5, 7)  # (b, k, 64, t, g, 2, h, i)
    word = torch.zeros(codes.shape[:5], dtype=torch.int32, device=codes.device)
    for number, bits in enumerate(_BITS[kind]):
        for i in range(2):
            code = codes[..., number // 2, number % 2, i]
            for bit, place in enumerate(bits):
                word |= (code >> bit & 1) << place + 16 * i
    return word.flatten(3)


def _read_codes(planes: Tensor, kind: str) -> Tensor:
    """Undo `_write_codes`: (blocks, planes, 64, 16) → (blocks, 128, K')."""
    word = planes.unflatten(-1, (4, 4))
    codes = []
    for bits in _BITS[kind]:
        for i in range(2):
            codes.append(sum((word >> place + 16 * i & 1) << bit for bit, place in enumerate(bits)))
    wide = torch.stack(codes, -1).unflatten(-1, (2, 2, 2))  # (b, k, 64, t, g, 2, h, i)
    return wide.permute(0, 5, 2, 1, 4, 6, 3, 7).flatten(3).flatten(1, 2).to(torch.uint8)


# Eight weights from a word of codes, in PTX, because the compiler decodes weights one by one. Ampere and Ada have no
# product of bfloat16, only fma, which rounds like a product if -0.0 is added.
_STORE = """
    mov.b32 {$0, $1}, w0;
    mov.b32 {$2, $3}, w1;
    mov.b32 {$4, $5}, w2;
    mov.b32 {$6, $7}, w3;
    }"""
_INTEGERS = """{
    .reg .b32 t, one, none, low, high, add_low, add_high, w0, w1, w2, w3;
    mov.b32 none, 0x80008000;
    prmt.b32 low, $9, $9, 0x1010;
    prmt.b32 high, $9, $9, 0x3232;
    shr.u32 t, $8, 8;
    and.b32 w0, $8, 0x000f000f;
    and.b32 w1, t, 0x000f000f;
    and.b32 w2, $8, 0x00f000f0;
    and.b32 w3, t, 0x00f000f0;
    """
_FMA = """
    fma.rn.bf16x2 w0, w0, low, add_low;
    fma.rn.bf16x2 w1, w1, low, add_low;
    fma.rn.bf16x2 w2, w2, high, add_high;
    fma.rn.bf16x2 w3, w3, high, add_high;"""
# The addends are -8 * scale * 2**-16. The scales already have the factors `_SCALED`, so the other factor is
# -8 * 2**-133 for rows r and -8 * 2**-129 for rows r + 64.
_SYMMETRIC: tl.constexpr = tl.constexpr(
    _INTEGERS
    + """
    mov.b32 t, 0x80088008;
    fma.rn.bf16x2 add_low, low, t, none;
    mov.b32 t, 0x80808080;
    fma.rn.bf16x2 add_high, high, t, none;"""
    + _FMA
    + _STORE
)
_BIASED: tl.constexpr = tl.constexpr(
    _INTEGERS
    + """
    prmt.b32 add_low, $10, $10, 0x1010;
    prmt.b32 add_high, $10, $10, 0x3232;"""
    + _FMA
    + _STORE
)
# zero_point * scale would round, so codes minus zero points come first, as multiples of 2**-133 and 2**-129.
_ASYMMETRIC: tl.constexpr = tl.constexpr(
    _INTEGERS
    + """
    mov.b32 one, 0x3f803f80;
    prmt.b32 add_low, $10, $10, 0x1010;
    prmt.b32 add_high, $10, $10, 0x3232;
    fma.rn.bf16x2 w0, w0, one, add_low;
    fma.rn.bf16x2 w1, w1, one, add_low;
    fma.rn.bf16x2 w2, w2, one, add_high;
    fma.rn.bf16x2 w3, w3, one, add_high;
    mov.b32 add_low, none;
    mov.b32 add_high, none;"""
    + _FMA
    + _STORE
)
# Codes become e2m1 * 2**-126, and the bytes of scales become scale * 2**118. `lop3` with 0xEA is (a & b) | c.
_FLOATS: tl.constexpr = tl.constexpr(
    """{
    .reg .b32 t, low, high, add_low, add_high, w0, w1, w2, w3;
    mov.b32 add_low, 0x80008000;
    mov.b32 add_high, 0x80008000;
    cvt.u32.u16 t, $9;
    and.b32 low, t, 0xff;
    shr.u32 high, t, 8;
    mad.lo.u32 low, low, 0x00100010, 0x70007000;
    mad.lo.u32 high, high, 0x00100010, 0x70007000;
    shl.b32 t, $8, 6;
    and.b32 w0, t, 0x81c081c0;
    shl.b32 t, $8, 3;
    and.b32 w1, t, 0x81c081c0;
    and.b32 w2, $8, 0x81c081c0;
    shr.u32 t, $8, 4;
    and.b32 w3, t, 0x00c000c0;
    shr.u32 t, $8, 5;
    lop3.b32 w3, t, 0x01000100, w3, 0xEA;
    shl.b32 t, $8, 1;
    lop3.b32 w3, t, 0x80008000, w3, 0xEA;"""
    + _FMA
    + _STORE
)
_TYPES: tl.constexpr = tl.constexpr((tl.bfloat16,) * 8)


@triton.jit
def _per_word(x: tl.tensor) -> tl.tensor:
    """Repeat (rows, groups) over the words of each row: (rows, 16)."""
    GROUPS: tl.constexpr = x.shape[1]
    wide = x.reshape(x.shape[0], 1, GROUPS, 1).broadcast_to(x.shape[0], 4, GROUPS, 4 // GROUPS)
    return wide.reshape(x.shape[0], 16)


@triton.jit
def _decode(words: tl.tensor, scale: tl.tensor, zero: tl.tensor, bias: tl.tensor) -> tl.tensor:
    """Return rows r and r + 64 of n planes side by side: (64 n, 16) → twice (64, 64 n) bfloat16."""
    each = _per_word(scale)
    offset = zero if zero is not None else bias
    if offset is not None:
        offset = _per_word(offset)
    if _INTERPRETED:
        a, b, c, d, e, f, g, h = _decode_slowly(words, each, offset, zero is not None)
    elif scale.dtype == tl.int16:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _FLOATS, "=h,=h,=h,=h,=h,=h,=h,=h,r,h", [words, each], _TYPES, True, 1
        )
    elif offset is None:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _SYMMETRIC, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [words, each], _TYPES, True, 1
        )
    else:
        ASM: tl.constexpr = _BIASED if zero is None else _ASYMMETRIC
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            ASM, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r", [words, each, offset], _TYPES, True, 1
        )
    return _in_order(a, b, c, d), _in_order(e, f, g, h)


@triton.jit
def _in_order(a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor) -> tl.tensor:
    """Put the weights of word g of thread t at columns 16 g + 2 t + (0, 1, 8, 9) of their plane."""
    PLANES: tl.constexpr = a.shape[0] // 64
    weights = tl.join(tl.join(a, c), tl.join(b, d))  # (rows, 16, 2, 2): columns h * 8 + i
    weights = weights.reshape(PLANES, 64, 4, 4, 2, 2).permute(1, 0, 3, 4, 2, 5)
    return weights.reshape(64, 64 * PLANES)


@triton.jit
def _decode_slowly(words: tl.tensor, scale: tl.tensor, offset: tl.tensor, ZERO: tl.constexpr) -> tl.tensor:
    """Compute the eight weights of a word without PTX, for the interpreter."""
    words = words.to(tl.uint32, bitcast=True)
    if scale.dtype == tl.int16:
        byte = scale.to(tl.uint16, bitcast=True).to(tl.uint32)
        low = ((byte & 0xFF) * 16 + 0x7000 << 16).to(tl.float32, bitcast=True)
        high = ((byte >> 8) * 16 + 0x7000 << 16).to(tl.float32, bitcast=True)
        add_low, add_high = 0.0, 0.0
        w0, w1, w2 = words << 6 & 0x81C081C0, words << 3 & 0x81C081C0, words & 0x81C081C0
        w3 = words >> 4 & 0x00C000C0 | words >> 5 & 0x01000100 | words << 1 & 0x80008000
    else:
        low = (scale << 16).to(tl.float32, bitcast=True)
        high = (scale.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
        if offset is None:
            add_low, add_high = low * -(2.0**-130), high * -(2.0**-126)
        else:
            add_low = (offset << 16).to(tl.float32, bitcast=True)
            add_high = (offset.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
            if ZERO:
                add_low, add_high = add_low * low, add_high * high
        w0, w1 = words & 0x000F000F, words >> 8 & 0x000F000F
        w2, w3 = words & 0x00F000F0, words >> 8 & 0x00F000F0
    first = _multiply_add(w0, low, add_low), _multiply_add(w0 >> 16, low, add_low)
    second = _multiply_add(w1, low, add_low), _multiply_add(w1 >> 16, low, add_low)
    third = _multiply_add(w2, high, add_high), _multiply_add(w2 >> 16, high, add_high)
    return (*first, *second, *third, _multiply_add(w3, high, add_high), _multiply_add(w3 >> 16, high, add_high))


@triton.jit
def _multiply_add(halfword: tl.tensor, scale: tl.tensor, add: tl.tensor) -> tl.tensor:
    """Return the bfloat16 in the lower 16 bits times `scale` plus `add`, rounded to nearest."""
    # `.to(tl.bfloat16)` truncates in the interpreter, so the bits are rounded first.
    exact = (halfword << 16).to(tl.float32, bitcast=True) * scale + add
    bits = exact.to(tl.uint32, bitcast=True)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def _load_planes(data: tl.tensor, number: tl.tensor, PLANES: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """Load the rows of PLANES planes, WIDTH values each."""
    at = tl.arange(0, 64 * PLANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    return tl.load(data + number.to(tl.int64) * (64 * WIDTH) + at)


@triton.jit
def multiply_four_bit(
    inputs: tl.tensor,
    input_inside: tl.tensor,
    weights: Weights,
    expert: tl.tensor,
    block: tl.tensor,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUPS: tl.constexpr,
) -> tl.tensor:
    """Multiply rows r and rows r + 64 of one of an expert's BLOCKS blocks by M rows of inputs: two (64, M) float32.

    inputs: (M, 1) pointers to the rows. GROUPS is the number of scales per row of a plane. WIDTH, rounded
    up to a multiple of 64, is a multiple of DEPTH.
    """
    PLANES: tl.constexpr = (WIDTH + 63) // 64
    AT_ONCE: tl.constexpr = DEPTH // 64
    depth = tl.arange(0, DEPTH)
    sums = tl.zeros([128, M], tl.float32)
    first = (expert * BLOCKS + block) * PLANES
    for plane in range(0, PLANES, AT_ONCE):
        words = _load_planes(weights.data, first + plane, AT_ONCE, 16)
        scale = _load_planes(weights.scale, first + plane, AT_ONCE, GROUPS)
        zero, bias = None, None
        if weights.zero is not None:
            zero = _load_planes(weights.zero, first + plane, AT_ONCE, GROUPS)
        if weights.bias is not None:
            bias = _load_planes(weights.bias, first + plane, AT_ONCE, GROUPS)
        left = inside(depth, WIDTH - plane * 64, WIDTH % DEPTH == 0)
        at = inputs + plane * 64 + depth[None, :]
        rows = tl.load(at, mask=input_inside[:, None] & left[None, :], other=0.0).T
        low, high = _decode(words, scale, zero, bias)
        both = tl.join(low, high).permute(2, 0, 1).reshape(128, DEPTH)  # one product, so that it is waited for once
        sums = finish_products(tl.dot(both.to(rows.dtype), rows, sums, input_precision="ieee"))
    low_sums, high_sums = sums.reshape(2, 64, M).permute(1, 2, 0).split()
    if weights.row_scale is None:
        return low_sums * 65536.0, high_sums * 65536.0
    else:  # noqa: RET505
        at = weights.row_scale + (expert * BLOCKS + block) * 128 + tl.arange(0, 64)
        low_scale, high_scale = tl.load(at), tl.load(at + 64)
        return low_sums * (256.0 * low_scale[:, None]), high_sums * (256.0 * high_scale[:, None])
