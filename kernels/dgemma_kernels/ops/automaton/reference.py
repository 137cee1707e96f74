"""Sums over the paths of an automaton in plain PyTorch: the library's own functions are the reference for `kernel`."""

from dgemma.constraints.paths import (
    arc_weights,
    best_pass,
    best_path,
    class_bias,
    class_sums,
    passes,
    sample_path,
)

__all__ = ["arc_weights", "best_pass", "best_path", "class_bias", "class_sums", "passes", "sample_path"]
