"""Tasks built on a run: infilling, editing, slots, guidance, autoregressive decoding, and other models."""
