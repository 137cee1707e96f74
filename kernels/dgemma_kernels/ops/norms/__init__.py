"""RMSNorm and the residual stream around a layer's products."""

from dgemma_kernels.ops.norms.kernel import (
    ResidualNorms,
    TailNorms,
    attention_residual,
    layer_tail,
    rms_norm,
    round_rows,
    scale_rows,
)

__all__ = ["ResidualNorms", "TailNorms", "attention_residual", "layer_tail", "rms_norm", "round_rows", "scale_rows"]
