"""Model configurations by name: small ones, those of the shipped checkpoints, one for a GPU, the published one."""

from typing import Any

from dgemma.model.config import FULL, SLIDING, ModelConfig
from dgemma.model.published import default_layer_types

_TINY_VISION: dict[str, Any] = {
    "model_type": "gemma4_vision",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "position_embedding_size": 256,
    "standardize": True,
}
_VISION_26B: dict[str, Any] = {
    "model_type": "gemma4_vision",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 72,
    "global_head_dim": 72,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "position_embedding_size": 10240,
    "default_output_length": 280,
    "rms_norm_eps": 1e-06,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": 131_072,
    "initializer_range": 0.02,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
    "standardize": True,
    "use_clipped_linears": False,
    "dtype": "bfloat16",
}
_OTHERS_26B: dict[str, Any] = {
    "architectures": ["DiffusionGemmaForBlockDiffusion"],
    "dtype": "bfloat16",
    "eos_token_id": [1, 106],
    "boi_token_id": 255_999,
    "eoi_token_id": 258_882,
    "image_token_id": 258_880,
    "initializer_range": 0.02,
    "vision_soft_tokens_per_image": 280,
}
# A column per preset. `num_hidden_layers` is the length of `layer_types`.
_NAMES = ("tiny", "text", "sudoku", "small", "medium_1b", "26b_a4b")
_SIZES: dict[str, tuple[int, ...]] = {
    "vocab_size": (512, 8192, 824, 4096, 262_144, 262_144),
    "hidden_size": (64, 384, 256, 384, 1024, 2816),
    "intermediate_size": (96, 384, 256, 512, 768, 2112),
    "canvas_length": (32, 64, 81, 128, 256, 256),
    "sliding_window": (24, 256, 256, 256, 1024, 1024),
    "num_attention_heads": (4, 6, 8, 6, 8, 16),
    "num_key_value_heads": (2, 2, 8, 3, 4, 8),
    "head_dim": (16, 64, 32, 64, 128, 256),
    "num_global_key_value_heads": (1, 1, 8, 1, 1, 2),
    "global_head_dim": (32, 64, 32, 128, 256, 512),
    "num_experts": (8, 8, 4, 32, 64, 128),
    "top_k_experts": (2, 2, 2, 4, 4, 8),
    "moe_intermediate_size": (32, 128, 64, 160, 256, 704),
    "max_position_embeddings": (8192, 8192, 512, 16_384, 65_536, 262_144),
}


def _preset(name: str, layer_types: tuple[str, ...], **others: Any) -> ModelConfig:
    sizes: dict[str, Any] = {field: values[_NAMES.index(name)] for field, values in _SIZES.items()}
    return ModelConfig(layer_types=layer_types, num_hidden_layers=len(layer_types), **sizes, **others)


def tiny(*, vision: bool = False) -> ModelConfig:
    """Return a config of about 300,000 weights with every feature of the published model, for tests.

    With `vision` it also reads images, with a tower of 38,000 weights. An image token covers 12 × 12 pixels.

    Example: `DiffusionGemma(presets.tiny())`.
    """
    sight: dict[str, Any] = {}
    if vision:  # with the tokens of ByteTokenizer
        tokens = {"boi_token_id": 53, "image_token_id": 54, "eoi_token_id": 55}
        sight = {"vision_config": dict(_TINY_VISION), "carried": tokens}
    return _preset("tiny", (SLIDING, SLIDING, FULL), **sight)


def text() -> ModelConfig:
    """The checkpoint dgemma/text: 19.6 million weights, 12.5 active per token; two of its eight layers are full.

    Most tokens are whole words. Half of a layer is dense, so that a token uses most of the shipped weights.
    """
    return _preset("text", (SLIDING, SLIDING, SLIDING, FULL) * 2)


def sudoku() -> ModelConfig:
    """The checkpoint dgemma/sudoku: 5.6 million weights for the tokens of `dgemma.data.sudoku`; a canvas is a grid.

    The window is wider than prompt and canvas together, so that every layer sees everything.
    """
    return _preset("sudoku", (SLIDING,) * 7 + (FULL,))


def small() -> ModelConfig:
    """About 40 million weights: trains in minutes on one GPU."""
    return _preset("small", default_layer_types(6))


def medium_1b() -> ModelConfig:
    """0.94 billion weights, 0.38 active: the published vocabulary and proportions, to train from scratch on one GPU."""
    return _preset("medium_1b", default_layer_types(12))


def diffusiongemma_26b_a4b() -> ModelConfig:
    """The published google/diffusiongemma-26B-A4B-it: 25.2B text parameters, 3.8B active."""
    return _preset("26b_a4b", default_layer_types(30), vision_config=dict(_VISION_26B), carried=dict(_OTHERS_26B))
