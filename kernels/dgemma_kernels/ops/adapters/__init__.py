"""Products of the adapters of linear layers, in training."""
