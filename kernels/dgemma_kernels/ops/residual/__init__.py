"""Norms and the residual stream in training, with their gradients; the norms' weights are frozen."""
