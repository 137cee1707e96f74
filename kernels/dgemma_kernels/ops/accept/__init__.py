"""Entropy-bound acceptance, renoising and the stop rule, in one launch."""
