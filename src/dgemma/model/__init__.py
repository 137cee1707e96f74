"""The network: follow `diffusion.py`, which names every other file here."""

from dgemma.model.cache import CacheMark, PrefixCache
from dgemma.model.diffusion import DiffusionGemma

__all__ = ["CacheMark", "DiffusionGemma", "PrefixCache"]
