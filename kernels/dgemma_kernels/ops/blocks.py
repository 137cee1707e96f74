"""Device functions that several kernels share."""

import triton
import triton.language as tl

_INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def inside(index: tl.tensor, limit: tl.tensor, EXACT: tl.constexpr) -> tl.tensor:
    """Return index < limit, or constant True if EXACT: if the block size divides the limit, no mask is needed."""
    if EXACT:
        return tl.full(index.shape, True, tl.int1)
    else:  # noqa: RET505 (Triton compiles both returns of a branch without else)
        return index < limit


@triton.jit
def gelu_tanh_times(gate: tl.tensor, up: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return gelu_tanh(gate) * up from float32 sums, with the roundings of separate layers."""
    gate = gate.to(dtype).to(tl.float32)
    # 0.5 (1 + tanh(u)) is sigmoid(2u), u = sqrt(2 / pi) (gate + 0.044715 gate³).
    gate *= tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    return (gate.to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def float8_scale(values: tl.tensor, AXIS: tl.constexpr) -> tl.tensor:
    """Return the scale of rows along AXIS: their largest value / the largest float8, as in `float8.quantize`."""
    return tl.maximum(tl.max(tl.abs(values), AXIS), 2.0**-80) / 448.0


@triton.jit
def finish_products(sums: tl.tensor) -> tl.tensor:
    """Return `sums` once its products are complete.

    Without it, products of Triton 3.6 run on while the next iteration overwrites the registers of their left operand.
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
