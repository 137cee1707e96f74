"""bfloat16 weights in 12 bits each, without loss, so that a step reads three quarters of the bytes.

The upper byte of a bfloat16 holds the sign and seven of the eight exponent bits. Nearly all weights of a row are at
least 2^-14 times its largest weight, so those seven bits take only eight values. A packed weight is its unchanged lower
byte and a code of four bits: the sign, and an index into the eight values. Each row has a power of two as its scale,
applied to float32 sums, where it changes only the exponent.

The few smaller weights, zeros included, are outliers. A list stores them. In their place, the packed weights have a
placeholder, 2^-15 times the row's scale. The product is corrected for this.

The bytes that a program reads together are contiguous. For 128 rows these are the lower bytes of 64 columns, the lower
bytes of the next 64 columns, and the codes of both, two per byte. Within 64 columns, weights have the order in which
the threads of a warpgroup hold the left operand of a product. Each thread loads 16 neighbouring bytes, decodes its
weights, and multiplies them from registers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from dgemma_kernels.blocks import finish_products, inside

HALF, DEPTH = 64, 128  # columns per plane of lower bytes, and per plane of codes, which holds two halves
ROWS = 128  # per block; with `gated`, 64 of gate and 64 of up
_TOP = 0x3F  # upper byte, without the sign, of a row's largest weights divided by its scale: values from 1/2 to 2
_CHUNK = 1 << 26  # weights packed at a time
_MOST_OUTLIERS = 0.01  # largest allowed share, because lists are slow; normally distributed weights have about 0.0001
_INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Weights (E, N, K) whose values bfloat16 represents. N' is N rounded up to whole blocks of 128 rows.

    For every 128 columns, a block has two planes of lower bytes and one of codes; for a last 64 columns, one of each.

    Example: `pack(experts.down_proj).decode()` has the same bits.
    """

    planes: Tensor  # (E N' / 128, planes, 128, 64) uint8
    scale: Tensor  # (E, N') float32, powers of two
    starts: Tensor  # (E N' + 1,) int32: index of each row's first outlier
    places: Tensor  # (outliers,) int32: row << 16 | column
    outliers: Tensor  # (outliers,) bfloat16, divided by their rows' scales
    shape: torch.Size  # (E, N, K)
    dtype: torch.dtype  # of the original weights, and of the rows they multiply
    gated: bool  # the first half of the rows is gate, the second up

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor that it stores."""
        return self.planes, self.scale, self.starts, self.places, self.outliers

    def decode(self) -> Tensor:
        """Return the weights, bit for bit: (E, N, K)."""
        num_experts, num_rows, width = self.shape
        halves = -(-width // HALF)
        pairs = self.planes[:, : halves // 2 * 3].unflatten(1, (-1, 3))
        low, codes = pairs[:, :, :2].flatten(1, 2), pairs[:, :, 2]
        if halves % 2:
            low, codes = torch.cat((low, self.planes[:, -2:-1]), 1), torch.cat((codes, self.planes[:, -1:]), 1)
        codes = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1, 2)[:, :halves]
        bits = torch.stack((low, (codes & 8) << 4 | (codes & 7) + (_TOP - 7)), dim=-1)  # (blocks, halves, 128, 64, 2)
        wide = _in_order(bits.view(torch.bfloat16).squeeze(-1).transpose(1, 2).flatten(2))[..., :width]
        wide = wide.double().view(num_experts, -1, width) * self.scale[..., None]
        row, column = self.places.long() >> 16, self.places.long() & 0xFFFF
        each = torch.arange(len(row), device=row.device, dtype=torch.int32)
        expert = (torch.searchsorted(self.starts, each, right=True) - 1) // self.scale.shape[1]
        wide[expert, row, column] = self.outliers.double() * self.scale[expert, row]
        if self.gated:
            wide = wide.unflatten(1, (-1, 2, ROWS // 2)).transpose(1, 2).flatten(2, 3)
            wide = wide[:, :, : num_rows // 2].flatten(1, 2)
        return wide[:, :num_rows].to(self.dtype)


@torch.no_grad()
def pack(weights: Tensor, *, gated: bool = False) -> Packed:
    """Encode weights (E, N, K) in 12 bits each. They are bfloat16, or float32 with values that bfloat16 represents.

    With `gated` the first half of the rows is gate and the second half up, as `expert_gate_up` takes them.

    Example: `pack(experts.down_proj).planes.shape` is `(128 * 22, 17, 128, 64)`.
    """
    # With these limits and at most 256 experts, indices of plane rows fit 32 bits and places fit 30 bits.
    fits = weights.ndim == 3 and weights.numel() > 0 and max(weights.shape[1:]) <= 1 << 14
    if not fits or (gated and weights.shape[1] % 2):
        raise ValueError(
            f"pack weights must be (E, N, K) with 1 <= N, K <= 16384, and N even if gated, got {tuple(weights.shape)}."
        )
    if weights.dtype not in (torch.bfloat16, torch.float32):  # in float16, outliers divided by scales would underflow
        raise ValueError(f"pack weights must be bfloat16 or float32, got {weights.dtype}.")
    planes, scale, counts, places, outliers = map(torch.cat, zip(*_pack_chunks(weights, gated), strict=True))
    if len(places) > _MOST_OUTLIERS * weights.numel():
        raise ValueError(
            f"pack weights may have at most 1 % of values that are 0 or under 2^-14 of their row's largest, "
            f'got {len(places):,} of {weights.numel():,}. Use weights="bf16".'
        )
    return Packed(
        planes=planes,
        scale=scale,
        starts=pad(counts.cumsum(0), (1, 0)).int(),
        places=places,
        outliers=outliers,
        shape=weights.shape,
        dtype=weights.dtype,
        gated=gated,
    )


def _pack_chunks(weights: Tensor, gated: bool) -> Iterator[tuple[Tensor, ...]]:
    """Yield for a few experts at a time: planes, scale, number of outliers per row, their places and values."""
    _, num_rows, width = weights.shape
    parts = 2 if gated else 1
    for chunk in weights.split(max(1, _CHUNK // (num_rows * width))):
        short = chunk.to(torch.bfloat16)
        if not torch.equal(short, chunk) or not short.isfinite().all():
            raise ValueError(
                f"pack weights must be finite values that bfloat16 represents, got other {chunk.dtype} values. "
                'Use weights="bf16", or load the model with dtype=torch.bfloat16.'
            )
        # The last block is padded with ones, because zeros would be outliers.
        filled = pad(short.unflatten(1, (parts, -1)), (0, 0, 0, -(num_rows // parts) % (ROWS // parts)), value=1.0)
        short = filled.unflatten(2, (-1, ROWS // parts)).transpose(1, 2).flatten(1, 3)  # (E, N', K)
        bits = short.contiguous().view(torch.uint8).unflatten(-1, (-1, 2))
        low, high, negative = bits[..., 0], bits[..., 1] & 0x7F, bits[..., 1] >> 7
        top = high.amax(-1, keepdim=True)
        outlier = (high + 7 < top) | ((high == 0) & (low < 0x80))  # too small for a code; or zero or subnormal
        code = torch.where(outlier, 0, high + 7 - top | negative << 3)
        scale = torch.exp2(2.0 * (top.squeeze(-1).float() - _TOP))
        expert, row, column = outlier.nonzero(as_tuple=True)
        exact, factor = short[outlier].double(), scale[expert, row].double()
        values = (exact / factor).to(torch.bfloat16)
        # Rows with weights of 2^127 or more would need an infinite scale. Outliers divided by a large scale can
        # underflow.
        if scale.isinf().any() or not torch.equal(values.double() * factor, exact):
            raise ValueError(
                "pack weights must be below 2^127, and values under 2^-14 of their row's largest must not underflow "
                'when divided by the scale of the row. Use weights="bf16".'
            )
        low, code = (
            _in_threads(pad(plane, (0, -width % size))).view(-1, ROWS, size // HALF * -(-width // size), HALF)
            for plane, size in ((torch.where(outlier, 0, low), HALF), (code, DEPTH))
        )  # (blocks, 128, halves, 64)
        codes = code[:, :, 0::2] | code[:, :, 1::2] << 4
        pairs = low.shape[2] // 2
        whole = torch.stack((low[:, :, 0 : 2 * pairs : 2], low[:, :, 1 : 2 * pairs : 2], codes[:, :, :pairs]), dim=3)
        rest = torch.cat((low[:, :, 2 * pairs :], codes[:, :, pairs:]), dim=2)
        yield (
            torch.cat((whole.flatten(2, 3), rest), dim=2).transpose(1, 2).contiguous(),
            scale,
            outlier.sum(-1).flatten(),
            (row << 16 | column).int(),
            values,
        )


def _in_threads(x: Tensor) -> Tensor:
    """Move column 16 g + 8 h + 2 t + i of every 64 to place 16 t + 4 g + 2 h + i, next to the others of thread t."""
    return x.unflatten(-1, (-1, 4, 2, 4, 2)).movedim(-2, -4).flatten(-5)


def _in_order(x: Tensor) -> Tensor:
    """Undo `_in_threads`."""
    return x.unflatten(-1, (-1, 4, 4, 2, 2)).movedim(-4, -2).flatten(-5)


# Four weights from four lower bytes and four bytes of codes. Shifts and masks turn codes into upper bytes; two byte
# permutations join the halves. In PTX, because the compiler decodes weights one by one, with several times the work.
_FIRST: tl.constexpr = tl.constexpr(
    """{
    .reg .b32 upper;
    shl.b32 upper, $3, 4;
    lop3.b32 upper, upper, 0x80808080, 0x38383838, 0xEA;
    lop3.b32 upper, $3, 0x07070707, upper, 0xEA;
    prmt.b32 $0, $2, upper, 0x5140;
    prmt.b32 $1, $2, upper, 0x7362;
    }"""
)
_SECOND: tl.constexpr = tl.constexpr(
    """{
    .reg .b32 upper, code;
    shr.u32 code, $3, 4;
    lop3.b32 upper, $3, 0x80808080, 0x38383838, 0xEA;
    lop3.b32 upper, code, 0x07070707, upper, 0xEA;
    prmt.b32 $0, $2, upper, 0x5140;
    prmt.b32 $1, $2, upper, 0x7362;
    }"""
)


@triton.jit
def _decode(low: tl.tensor, codes: tl.tensor, SECOND: tl.constexpr) -> tl.tensor:
    """Return one half of a block's weights divided by their rows' scales, in order: (N, 64) bfloat16."""
    if _INTERPRETED:
        code = (codes >> 4 if SECOND else codes & 15).to(tl.uint16)
        bits = ((code & 8) << 12) | ((0x38 | (code & 7)) << 8) | low.to(tl.uint16)
        weights = bits.to(tl.bfloat16, bitcast=True)
    elif SECOND:
        weights = tl.inline_asm_elementwise(_SECOND, "=r,=r,r,r", [low, codes], tl.bfloat16, True, 4)
    else:
        weights = tl.inline_asm_elementwise(_FIRST, "=r,=r,r,r", [low, codes], tl.bfloat16, True, 4)
    return weights.reshape(low.shape[0], 4, 4, 2, 2).permute(0, 2, 3, 1, 4).reshape(low.shape[0], 64)


@triton.jit
def _load_block(
    planes: tl.tensor, block: tl.tensor, start: tl.tensor, WIDTH: tl.constexpr, DESCRIBED: tl.constexpr
) -> tl.tensor:
    """Return a block's 128 rows by 128 columns from `start` on; columns beyond WIDTH are arbitrary but not NaN."""
    HALVES: tl.constexpr = (WIDTH + 63) // 64
    PLANES: tl.constexpr = HALVES + (HALVES + 1) // 2
    # If there is no second half, it is read from row -128, outside of the planes, which gives zeros.
    whole = start + 64 < WIDTH
    at = (block * PLANES + start // 128 * 3) * 128
    after, codes = tl.where(whole, at + 128, -128), tl.where(whole, at + 256, at + 128)
    if DESCRIBED:
        first, second, both = planes.load([at, 0]), planes.load([after, 0]), planes.load([codes, 0])
    else:
        plane = tl.arange(0, 128)[:, None] * 64 + tl.arange(0, 64)[None, :]
        first = tl.load(planes + at.to(tl.int64) * 64 + plane)
        second = tl.load(planes + after.to(tl.int64) * 64 + plane, mask=whole, other=0)
        both = tl.load(planes + codes.to(tl.int64) * 64 + plane)
    weights = tl.join(_decode(first, both, False), _decode(second, both, True))
    return weights.permute(0, 2, 1).reshape(128, 128)


@triton.jit
def _add_outliers(
    sums: tl.tensor, inputs: tl.tensor, inside: tl.tensor, place: tl.tensor, value: tl.tensor, row: tl.tensor
) -> tl.tensor:
    """Correct the sums for some outliers: add their products with the inputs, subtract those of their placeholders."""
    real = place >= 0
    columns = tl.where(real, place & 0xFFFF, 0)
    rows = tl.load(inputs + columns[None, :], mask=inside[:, None] & real[None, :], other=0.0).T
    here = (place >> 16)[None, :] == row + tl.arange(0, sums.shape[0])[:, None]
    outliers = tl.where(here, value[None, :], 0.0).to(rows.dtype)
    placeholders = tl.where(here, -(2.0**-15), 0.0).to(rows.dtype)
    sums = tl.dot(outliers, rows, sums, input_precision="ieee")
    return tl.dot(placeholders, rows, sums, input_precision="ieee")


class Weights(NamedTuple):
    """Arguments of a kernel for weights of any format, None where the format has none.

    `data` are values, planes or codes. `zero`, `bias` and `row_scale` are those of `FourBit`. `starts`, `places` and
    `outliers` are those of `Packed`.
    """

    data: tl.tensor
    scale: tl.tensor
    zero: tl.tensor
    bias: tl.tensor
    row_scale: tl.tensor
    starts: tl.tensor
    places: tl.tensor
    outliers: tl.tensor


@triton.jit
def multiply_packed(
    inputs: tl.tensor,
    input_inside: tl.tensor,
    weights: Weights,
    expert: tl.tensor,
    block: tl.tensor,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
    DESCRIBED: tl.constexpr,
) -> tl.tensor:
    """Multiply a block of an expert's weights, 128 rows, by M rows of inputs: (128, M) float32.

    An expert has BLOCKS blocks. inputs: (M, 1) pointers to the rows. `weights.data` is a tensor descriptor if
    DESCRIBED, else a pointer.
    """
    LIST: tl.constexpr = 32 if WIDTH > 1024 else 16  # a block has about 29 outliers at width 2816, and 9 at width 704
    row = (expert * BLOCKS + block) * 128  # among the rows of all experts
    row_scale = tl.load(weights.scale + row + tl.arange(0, 128))
    # The first outliers are loaded here, so that after the loop only the inputs that they multiply remain to be loaded.
    begin, end = tl.load(weights.starts + row), tl.load(weights.starts + row + 128)
    at = begin + tl.arange(0, LIST)
    place = tl.load(weights.places + at, mask=at < end, other=-1)
    value = tl.load(weights.outliers + at, mask=at < end, other=0.0)
    depth = tl.arange(0, 128)
    sums = tl.zeros([128, M], tl.float32)
    for start in range(0, WIDTH, 128):
        block_weights = _load_block(weights.data, expert * BLOCKS + block, start, WIDTH, DESCRIBED)
        left = inside(depth, WIDTH - start, WIDTH % 128 == 0)
        rows = tl.load(inputs + start + depth[None, :], mask=input_inside[:, None] & left[None, :], other=0.0).T
        sums = tl.dot(block_weights.to(rows.dtype), rows, sums, input_precision="ieee")
        if rows.dtype != tl.float32:  # float32 products are synchronous; waiting for them would spill registers
            sums = finish_products(sums)
    sums = _add_outliers(sums, inputs, input_inside, place, value, block * 128)
    for more in tl.range(begin + LIST, end, LIST, num_stages=1):
        at = more + tl.arange(0, LIST)
        place = tl.load(weights.places + at, mask=at < end, other=-1)
        value = tl.load(weights.outliers + at, mask=at < end, other=0.0)
        sums = _add_outliers(sums, inputs, input_inside, place, value, block * 128)
    return sums * row_scale[:, None]
