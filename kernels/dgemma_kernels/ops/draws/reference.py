"""Counter-based uniforms in plain PyTorch: the library's own function is the meaning of `kernel`."""

from dgemma.diffusion.draws import uniform

__all__ = ["uniform"]
