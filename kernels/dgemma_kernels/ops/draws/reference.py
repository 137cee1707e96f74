"""Counter-based uniforms in plain PyTorch: the library's own function is the reference for `kernel`."""

from dgemma.diffusion.draws import uniform

__all__ = ["uniform"]
