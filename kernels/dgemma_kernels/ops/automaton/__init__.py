"""Conditioning on a language: sums over the paths of a token automaton."""

from dgemma_kernels.ops.automaton.kernel import (
    arc_weights,
    best_pass,
    best_path,
    class_bias,
    class_sums,
    passes,
    sample_path,
)

__all__ = ["arc_weights", "best_pass", "best_path", "class_bias", "class_sums", "passes", "sample_path"]
