"""Training on a GPU: fast versions of whole functions with their gradients, installed by `accelerate_training`."""
