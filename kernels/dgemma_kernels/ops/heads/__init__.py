"""Norms and rotations of heads, with their gradient, in training."""
