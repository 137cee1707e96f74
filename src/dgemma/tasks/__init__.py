"""Tasks built on a run: infilling, editing, slots, guidance and autoregressive decoding."""
