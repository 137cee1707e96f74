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
def float8_scale(values: tl.tensor, AXIS: tl.constexpr) -> tl.tensor:
    """By what rows along AXIS are divided so that float8 (e4m3) holds their largest value; `quantized.quantize`."""
    return tl.maximum(tl.max(tl.abs(values), AXIS), 2.0**-80) / 448.0


@triton.jit
def wait_for_launches_before(DEPENDENT: tl.constexpr) -> None:
    """Under programmatic dependent launch (`configs.dependent_launch`), the start of what needs earlier kernels.

    Waits until the kernel in front is complete and only then lets the next one start. As every kernel here does both,
    all kernels further in front are complete too. Before it, only the model's weights may be read, nothing written.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
