"""Attention of new tokens over a cached prefix and themselves."""
