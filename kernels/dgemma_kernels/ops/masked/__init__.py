"""Attention under any boolean mask, with its gradient."""
