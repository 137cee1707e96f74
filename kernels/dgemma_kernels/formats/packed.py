"""bfloat16 weights in 12 bits each, without loss: three quarters of the bytes that a step has to read.

Of a bfloat16 the upper byte, a sign and seven of the exponent's eight bits, says little: nearly all weights of a row
lie within 2^14 of its largest, so that those seven bits take eight values. A packed weight is its lower byte as it is
and a code of four bits: the sign, and which of the eight. A row has a power of two as its scale, applied to float32
sums, of which it changes the exponent alone. Weights outside of the eight, smaller than the rest by far or zero, are
outliers: the smallest value that has a code stands in their place, and a list says what to add instead.

What a program reads at a time lies together: of 128 rows the lower bytes of 64 columns, those of the next 64, and the
codes of both, which share bytes. Within 64 columns weights lie in the order in which the threads of a warpgroup
hold a product's left operand: each loads 16 neighbouring bytes, puts its weights together, and multiplies them from
registers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from dgemma_kernels.ops.blocks import inside

HALF, DEPTH = 64, 128  # columns whose codes are the same half of as many bytes, and those of both
ROWS = 128  # of a block; where weights are packed `gated`, a half of gate and a half of up
_TOP = 0x3F  # the upper byte, but for its sign, of a row's largest weights over its scale: from 1/2 to 2
_CHUNK = 1 << 26  # weights packed at a time
_MOST_OUTLIERS = 0.01  # of all weights, a hundred times as many as normal ones have: programs go through lists slowly
_INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Weights (E, N, K), all of which bfloat16 holds. N' is N filled up to whole blocks of 128 rows. The planes of a
    block are low, low, codes for every 128 columns, and low, codes for 64 that are left.

    Example: `pack(experts.down_proj).unpack()` has the same bits.
    """

    planes: Tensor  # (E N' / 128, planes, 128, 64) uint8
    scale: Tensor  # (E, N') float32, powers of two
    starts: Tensor  # (E N' + 1,) int32: where a row's outliers begin
    places: Tensor  # (outliers,) int32: row << 16 | column
    outliers: Tensor  # (outliers,) bfloat16, over their rows' scales
    shape: torch.Size  # (E, N, K)
    dtype: torch.dtype  # what the weights were, and what they multiply is
    gated: bool  # the rows are gate's, then up's

    def tensors(self) -> tuple[Tensor, ...]:
        """All that is held."""
        return self.planes, self.scale, self.starts, self.places, self.outliers

    def unpack(self) -> Tensor:
        """The weights, bit for bit: (E, N, K)."""
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
    """The same weights in 12 bits each. weights: (E, N, K), bfloat16, or float32 whose values bfloat16 holds.

    With `gated` the first half of the rows are gate's and the second up's, as `expert_gate_up` takes them.

    Example: `pack(experts.down_proj).planes.shape` is `(128 * 22, 17, 128, 64)`.
    """
    # Of 256 experts, the most there are, all rows of planes are then counted in 32 bits, and places take 30.
    fits = weights.ndim == 3 and weights.numel() > 0 and max(weights.shape[1:]) <= 1 << 14
    if not fits or (gated and weights.shape[1] % 2):
        raise ValueError(
            f"pack weights must be (E, N, K), N and K at most 16,384, none of them 0, with as many rows of gate as of "
            f"up, got {tuple(weights.shape)}."
        )
    if weights.dtype not in (torch.bfloat16, torch.float32):  # float16 does not hold outliers over their rows' scales
        raise ValueError(f"pack weights must be bfloat16 or float32, got {weights.dtype}.")
    planes, scale, counts, places, outliers = map(torch.cat, zip(*_pack_chunks(weights, gated), strict=True))
    if len(places) > _MOST_OUTLIERS * weights.numel():
        raise ValueError(
            f"pack weights must nearly all lie within 2^14 of their row's largest, got {len(places):,} of "
            f'{weights.numel():,} that do not, or are zero. Use weights="bf16".'
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
    """A few experts at a time: planes, scale, outliers of each row, their places and values."""
    _, num_rows, width = weights.shape
    parts = 2 if gated else 1
    for chunk in weights.split(max(1, _CHUNK // (num_rows * width))):
        short = chunk.to(torch.bfloat16)
        if not torch.equal(short, chunk) or not short.isfinite().all():
            raise ValueError(
                f"pack weights must be finite values of bfloat16, got others in {chunk.dtype}. "
                'Use weights="bf16", or load the model with dtype=torch.bfloat16.'
            )
        # The last block is filled up with ones: zeros would be outliers.
        filled = pad(short.unflatten(1, (parts, -1)), (0, 0, 0, -(num_rows // parts) % (ROWS // parts)), value=1.0)
        short = filled.unflatten(2, (-1, ROWS // parts)).transpose(1, 2).flatten(1, 3)  # (E, N', K)
        bits = short.contiguous().view(torch.uint8).unflatten(-1, (-1, 2))
        low, high, negative = bits[..., 0], bits[..., 1] & 0x7F, bits[..., 1] >> 7
        top = high.amax(-1, keepdim=True)
        outlier = (high + 7 < top) | ((high == 0) & (low < 0x80))  # the latter zero, or smaller than what is normal
        code = torch.where(outlier, 0, high + 7 - top | negative << 3)
        scale = torch.exp2(2.0 * (top.squeeze(-1).float() - _TOP))
        expert, row, column = outlier.nonzero(as_tuple=True)
        exact, factor = short[outlier].double(), scale[expert, row].double()
        values = (exact / factor).to(torch.bfloat16)
        # From 2^127 on float32 has no scale, and over a large one bfloat16 does not hold all of the smallest outliers.
        if scale.isinf().any() or not torch.equal(values.double() * factor, exact):
            raise ValueError('pack weights must span less of the range of bfloat16. Use weights="bf16".')
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
    """Of every 64 columns, 16 g + 8 h + 2 t + i to place 16 t + 4 g + 2 h + i: to thread t what it multiplies."""
    return x.unflatten(-1, (-1, 4, 2, 4, 2)).movedim(-2, -4).flatten(-5)


def _in_order(x: Tensor) -> Tensor:
    """`_in_threads`, undone."""
    return x.unflatten(-1, (-1, 4, 4, 2, 2)).movedim(-4, -2).flatten(-5)


# Four weights from four lower bytes and as many bytes of codes: shifted and masked, signs and exponents are upper
# bytes, and two permutations put the halves together. Written out since the compiler takes weights one by one, at
# several times the work.
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
    """One half of a block's weights over their rows' scales, in order: (N, 64) bfloat16."""
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
    """A block's 128 rows by 128 columns from `start` on; beyond WIDTH any values, but no NaN."""
    HALVES: tl.constexpr = (WIDTH + 63) // 64
    PLANES: tl.constexpr = HALVES + (HALVES + 1) // 2
    whole = start + 64 < WIDTH  # else the second half does not exist: it is read from before the first row, as zeros
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
    """A product with a matrix that has one of these outliers in each column, and one with what stands in for them."""
    real = place >= 0
    columns = tl.where(real, place & 0xFFFF, 0)
    given = tl.load(inputs + columns[None, :], mask=inside[:, None] & real[None, :], other=0.0).T
    here = (place >> 16)[None, :] == row + tl.arange(0, sums.shape[0])[:, None]
    outliers = tl.where(here, value[None, :], 0.0).to(given.dtype)
    stand_ins = tl.where(here, -(2.0**-15), 0.0).to(given.dtype)
    sums = tl.dot(outliers, given, sums, input_precision="ieee")
    return tl.dot(stand_ins, given, sums, input_precision="ieee")


class Weights(NamedTuple):
    """What kernels read of weights: their values and, where there are some, scales; of packed ones the planes, and all
    that `Packed` holds beside them."""

    data: tl.tensor
    scale: tl.tensor
    starts: tl.tensor
    places: tl.tensor
    outliers: tl.tensor


@triton.jit
def multiply_packed(
    inputs: tl.tensor,
    input_inside: tl.tensor,
    held: Weights,
    expert: tl.tensor,
    block: tl.tensor,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
    DESCRIBED: tl.constexpr,
) -> tl.tensor:
    """The 128 rows of an expert's block, one of BLOCKS, times M rows of inputs: (128, M) float32.

    inputs: (M, 1), where the rows begin. `held.data` is a tensor descriptor where DESCRIBED, else a pointer.
    """
    LIST: tl.constexpr = 32 if WIDTH > 1024 else 16  # a block has about 29 and 9 outliers at the published widths
    row = (expert * BLOCKS + block) * 128  # among all experts'
    row_scale = tl.load(held.scale + row + tl.arange(0, 128))
    # The first outliers are asked for here, so that behind the loop only the inputs that they multiply are waited for.
    begin, end = tl.load(held.starts + row), tl.load(held.starts + row + 128)
    at = begin + tl.arange(0, LIST)
    place = tl.load(held.places + at, mask=at < end, other=-1)
    value = tl.load(held.outliers + at, mask=at < end, other=0.0)
    depth = tl.arange(0, 128)
    sums = tl.zeros([128, M], tl.float32)
    for start in range(0, WIDTH, 128):
        weights = _load_block(held.data, expert * BLOCKS + block, start, WIDTH, DESCRIBED)
        left = inside(depth, WIDTH - start, WIDTH % 128 == 0)
        given = tl.load(inputs + start + depth[None, :], mask=input_inside[:, None] & left[None, :], other=0.0).T
        sums = tl.dot(weights.to(given.dtype), given, sums, input_precision="ieee")
    sums = _add_outliers(sums, inputs, input_inside, place, value, block * 128)
    for more in tl.range(begin + LIST, end, LIST, num_stages=1):
        at = more + tl.arange(0, LIST)
        place = tl.load(held.places + at, mask=at < end, other=-1)
        value = tl.load(held.outliers + at, mask=at < end, other=0.0)
        sums = _add_outliers(sums, inputs, input_inside, place, value, block * 128)
    return sums * row_scale[:, None]
