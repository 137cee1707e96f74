"""Device functions that several kernels share."""

import triton
import triton.language as tl

_INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))
_BLOCKS = 4  # at most per row
_PER_WARP = 256  # values of a block that one warp holds
MANY_ROWS = 1024  # from this many rows on, programs hide the waits of others, so registers matter more than early loads


def blocks_of(width: int, per_thread: int = 8) -> dict[str, int]:
    """Return the launch arguments of a kernel whose programs have a row each, in blocks.

    A thread has `per_thread` values of each block.

    Example: `blocks_of(2816)` has blocks of 1,024 values and four warps.
    """
    block = max(triton.next_power_of_2(width) // _BLOCKS, 64)
    return {"WIDTH": width, "BLOCK": block, "num_warps": min(max(block // (32 * per_thread), 1), 16)}


def rows_of(num_rows: int, width: int) -> dict[str, int]:
    """Return the launch arguments of a kernel whose programs have ROWS rows each, 1 or, if there are many rows, 8.

    Example: `rows_of(4096, 704)` has 8 rows in blocks of 256 values on eight warps.
    """
    if num_rows < MANY_ROWS:
        return {"ROWS": 1, **blocks_of(width)}
    return {"ROWS": 8, "WIDTH": width, "BLOCK": min(triton.next_power_of_2(width), _PER_WARP), "num_warps": 8}


@triton.jit
def inside(index: tl.tensor, limit: tl.tensor, EXACT: tl.constexpr) -> tl.tensor:
    """Return index < limit, or constant True if EXACT: if the block size divides the limit, no mask is needed."""
    if EXACT:
        return tl.full(index.shape, True, tl.int1)
    else:  # noqa: RET505 (without `else`, Triton also compiles the code after the return)
        return index < limit


@triton.jit
def gelu_tanh_times(gate: tl.tensor, up: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return gelu_tanh(gate) * up from float32 sums. Values are rounded as by separate operations."""
    gate = gate.to(dtype).to(tl.float32)
    # 0.5 (1 + tanh(u)) is 1 / (1 + e^(-2u)), u = sqrt(2 / pi) (gate + 0.044715 gate³). 1 / y as rsqrt(y)² is shorter
    # than a division.
    root = tl.rsqrt(1.0 + tl.exp2(gate * (-2.302208198 - 0.1029432397 * gate * gate)))
    gate *= root * root
    return (gate.to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def float8_scale(values: tl.tensor, AXIS: tl.constexpr) -> tl.tensor:
    """Return the scale of rows along AXIS: their largest value / the largest float8, as in `float8.quantize`."""
    return tl.maximum(tl.max(tl.abs(values), AXIS), 2.0**-80) / 448.0


@triton.jit
def load_row(row: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr) -> tl.tuple:
    """Return a row as a tuple of blocks. For 2,816 columns, one block of the next power of two would be almost a third
    empty."""
    cols = tl.arange(0, BLOCK)
    blocks = ()
    for start in tl.static_range(0, WIDTH, BLOCK):
        left = inside(cols, WIDTH - start, WIDTH - start >= BLOCK)
        blocks += (tl.load(row + start + cols, mask=left, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    return blocks


@triton.jit
def store_block(row: tl.tensor, block: tl.tensor, AT: tl.constexpr, WIDTH: tl.constexpr) -> None:
    BLOCK: tl.constexpr = block.shape[0]
    cols = tl.arange(0, BLOCK)
    left = inside(cols, WIDTH - AT * BLOCK, WIDTH - AT * BLOCK >= BLOCK)
    tl.store(row + AT * BLOCK + cols, block.to(row.dtype.element_ty), mask=left)


@triton.jit
def row_float8_scale(row: tl.tuple) -> tl.tensor:
    """Return `float8_scale` of a row that is given as blocks."""
    largest = tl.abs(row[0])
    for i in tl.static_range(1, len(row)):
        largest = tl.maximum(largest, tl.abs(row[i]))
    return float8_scale(largest, 0)


@triton.jit
def store_rounded(rows: tl.tuple, row: tl.tuple, WIDTH: tl.constexpr) -> None:
    """Store this program's row. rows: values and scales; if the scales are not None, the values are float8."""
    values, scale = rows
    out = values + tl.program_id(0).to(tl.int64) * WIDTH
    if scale is None:
        for i in tl.static_range(len(row)):
            store_block(out, row[i], i, WIDTH)
    else:
        row_scale = row_float8_scale(row)
        tl.store(scale + tl.program_id(0), row_scale)
        for i in tl.static_range(len(row)):
            store_block(out, row[i] / row_scale, i, WIDTH)


@triton.jit
def load_rows(
    x: tl.tensor, row: tl.tensor, num_rows: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr
) -> tl.tuple:
    """Return rows `row` (ROWS,) of x as a tuple of blocks (ROWS, BLOCK). Rows begin STRIDE values apart."""
    cols = tl.arange(0, BLOCK)[None, :]
    at = x + row.to(tl.int64)[:, None] * STRIDE + cols
    blocks = ()
    for start in tl.static_range(0, WIDTH, BLOCK):
        left = (row < num_rows)[:, None] & inside(cols, WIDTH - start, WIDTH - start >= BLOCK)
        blocks += (tl.load(at + start, mask=left, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    return blocks


@triton.jit
def store_rows_rounded(
    out: tl.tensor, scale: tl.tensor, row: tl.tensor, num_rows: tl.tensor, blocks: tl.tuple, WIDTH: tl.constexpr
) -> None:
    """Store rows `row` (ROWS,) in float8, with one scale per row, as `float8.quantize` does."""
    BLOCK: tl.constexpr = blocks[0].shape[1]
    largest = tl.abs(blocks[0])
    for i in tl.static_range(1, len(blocks)):
        largest = tl.maximum(largest, tl.abs(blocks[i]))
    scales = float8_scale(largest, 1)
    tl.store(scale + row, scales, mask=row < num_rows)
    inverse = (1.0 / scales)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    at = out + row.to(tl.int64)[:, None] * WIDTH + cols
    for i in tl.static_range(len(blocks)):
        left = (row < num_rows)[:, None] & inside(cols, WIDTH - i * BLOCK, WIDTH - i * BLOCK >= BLOCK)
        tl.store(at + i * BLOCK, (blocks[i] * inverse).to(out.dtype.element_ty), mask=left)


@triton.jit
def finish_products(sums: tl.tensor) -> tl.tensor:
    """Return `sums` once its products are complete.

    Without it, products of Triton 3.6 still run when the next iteration overwrites their left operand's registers.
    """
    if not _INTERPRETED:
        sums = tl.inline_asm_elementwise("// complete", "=f,0", [sums], tl.float32, True, 1)
    return sums


@triton.jit
def wait_for_launches_before(DEPENDENT: tl.constexpr) -> None:
    """Wait for the previous kernel, then let the next one start, under programmatic dependent launch.

    Every kernel with `configs.dependent_launch` calls it. So after the wait all earlier kernels are complete too.
    Before the call a kernel may read only the model's weights and must write nothing.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
