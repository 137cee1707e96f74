"""Kernels for a single token. Each replaces several launches of the path for many tokens."""
