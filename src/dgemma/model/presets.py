"""Model configurations by name: small ones, those of the shipped checkpoints, one for a GPU, the published one."""

from typing import Any

from dgemma.model.config import FULL, SLIDING, ModelConfig, default_layer_types

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


def tiny(*, vision: bool = False) -> ModelConfig:
    """Return a config of about 300,000 weights with every feature of the published model, for tests.

    With `vision` it also reads images, with a tower of 30,000 weights. An image token covers 12 × 12 pixels.

    Example: `DiffusionGemma(presets.tiny())`.
    """
    return ModelConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        canvas_length=32,
        num_hidden_layers=3,
        layer_types=(SLIDING, SLIDING, FULL),
        sliding_window=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_global_key_value_heads=1,
        global_head_dim=32,
        num_experts=8,
        top_k_experts=2,
        moe_intermediate_size=32,
        max_position_embeddings=8192,
        vision_config=dict(_TINY_VISION) if vision else None,
        carried={"boi_token_id": 53, "image_token_id": 54, "eoi_token_id": 55} if vision else {},  # as ByteTokenizer
    )


def text() -> ModelConfig:
    """The checkpoint dgemma/text: 19.6 million weights, 12.5 active per token; two of its eight layers are full.

    Most tokens are whole words. Half of a layer is dense, so that a token uses most of the shipped weights.
    """
    return ModelConfig(
        vocab_size=8192,
        hidden_size=384,
        intermediate_size=384,
        canvas_length=64,
        num_hidden_layers=8,
        layer_types=(SLIDING, SLIDING, SLIDING, FULL) * 2,
        sliding_window=256,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        num_global_key_value_heads=1,
        global_head_dim=64,
        num_experts=8,
        top_k_experts=2,
        moe_intermediate_size=128,
        max_position_embeddings=8192,
    )


def sudoku() -> ModelConfig:
    """The checkpoint dgemma/sudoku: 5.6 million weights for the tokens of `dgemma.data.sudoku`; a canvas is a grid.

    The window is wider than prompt and canvas together, so that every layer sees everything.
    """
    return ModelConfig(
        vocab_size=824,
        hidden_size=256,
        intermediate_size=256,
        canvas_length=81,
        num_hidden_layers=8,
        layer_types=(SLIDING,) * 7 + (FULL,),
        sliding_window=256,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=32,
        num_global_key_value_heads=8,
        global_head_dim=32,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=64,
        max_position_embeddings=512,
    )


def small() -> ModelConfig:
    """About 40 million weights: trains in minutes on one GPU."""
    return ModelConfig(
        vocab_size=4096,
        hidden_size=384,
        intermediate_size=512,
        canvas_length=128,
        num_hidden_layers=6,
        layer_types=default_layer_types(6),
        sliding_window=256,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=64,
        num_global_key_value_heads=1,
        global_head_dim=128,
        num_experts=32,
        top_k_experts=4,
        moe_intermediate_size=160,
        max_position_embeddings=16_384,
    )


def medium_1b() -> ModelConfig:
    """0.94 billion weights, 0.38 active: the published vocabulary and proportions, to train from scratch on one GPU."""
    return ModelConfig(
        vocab_size=262_144,
        hidden_size=1024,
        intermediate_size=768,
        canvas_length=256,
        num_hidden_layers=12,
        layer_types=default_layer_types(12),
        sliding_window=1024,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        num_global_key_value_heads=1,
        global_head_dim=256,
        num_experts=64,
        top_k_experts=4,
        moe_intermediate_size=256,
        max_position_embeddings=65_536,
    )


def diffusiongemma_26b_a4b() -> ModelConfig:
    """The published google/diffusiongemma-26B-A4B-it: 25.2B text parameters, 3.8B active."""
    return ModelConfig(
        vocab_size=262_144,
        hidden_size=2816,
        intermediate_size=2112,
        canvas_length=256,
        num_hidden_layers=30,
        layer_types=default_layer_types(30),
        sliding_window=1024,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
        num_global_key_value_heads=2,
        global_head_dim=512,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
        max_position_embeddings=262_144,
        vision_config={
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
        },
        carried={
            "architectures": ["DiffusionGemmaForBlockDiffusion"],
            "dtype": "bfloat16",
            "eos_token_id": [1, 106],
            "boi_token_id": 255_999,
            "eoi_token_id": 258_882,
            "image_token_id": 258_880,
            "initializer_range": 0.02,
            "vision_soft_tokens_per_image": 280,
        },
    )
