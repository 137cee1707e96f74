"""Checkpoints on disk: weights in safetensors, configs and tokenizers."""
