"""Checkpoints on disk: weights in safetensors, configs and tokenizers."""

from dgemma.checkpoint.hub import push_to_hub
from dgemma.checkpoint.loading import load_pretrained
from dgemma.checkpoint.saving import save_pretrained
from dgemma.model.diffusion import DiffusionGemma, ModelFiles

DiffusionGemma.files = ModelFiles(load_pretrained, save_pretrained, push_to_hub)
