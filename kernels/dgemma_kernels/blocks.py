"""Pieces that the product kernels share."""

import triton
import triton.language as tl


@triton.jit
def inside(index: tl.tensor, limit: tl.tensor, EXACT: tl.constexpr) -> tl.tensor:
    """index < limit; where the block size divides the limit (EXACT) a constant, which costs neither test nor mask."""
    if EXACT:
        return tl.full(index.shape, True, tl.int1)
    else:  # noqa: RET505 (Triton compiles both returns of a branch without else)
        return index < limit


@triton.jit
def gelu_tanh_times(gate: tl.tensor, up: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """gelu_tanh(gate) * up from float32 sums, rounded where separate linear, activation and product would round."""
    gate = gate.to(dtype).to(tl.float32)
    # 0.5 (1 + tanh(u)) is sigmoid(2u), u = sqrt(2 / pi) (gate + 0.044715 gate³).
    gate *= tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    return (gate.to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def prefetch_to_l2(address: tl.tensor, num_bytes: tl.tensor) -> None:
    """One thread asks the copy engine for `num_bytes`, a multiple of 16, at `address` and nobody waits. Hopper."""
    tl.inline_asm_elementwise(
        """{
            .reg .pred first;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [address, num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
