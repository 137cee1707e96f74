import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

import dgemma
from dgemma import DiffusionGemma, GenerationDefaults, ModelConfig
from dgemma.checkpoint.names import our_names, published_name

PUBLISHED_TEXT = {
    "vocab_size": 262144,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "num_hidden_layers": 30,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "num_global_key_value_heads": 2,
    "global_head_dim": 512,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
    "sliding_window": 1024,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "use_bidirectional_attention": "vision",
    "model_type": "diffusion_gemma_text",
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
}


def test_the_26b_preset_is_the_published_config():
    preset = dgemma.presets.diffusiongemma_26b_a4b()
    text = preset.to_hf()["text_config"]
    assert {name: text[name] for name in PUBLISHED_TEXT} == PUBLISHED_TEXT
    assert ModelConfig.from_hf({"model_type": "diffusion_gemma", "text_config": PUBLISHED_TEXT}) == preset.replace(
        vision_config=None, carried={"model_type": "diffusion_gemma"}
    )


def test_the_26b_preset_has_exactly_the_published_tensors():
    """1,047 untied tensors of 25,823,781,228 values in all, the vision tower's included: model card and shard index."""
    config = dgemma.presets.diffusiongemma_26b_a4b()
    ours = DiffusionGemma(config, device="meta")
    with torch.device("meta"):
        published = DiffusionGemmaForBlockDiffusion(DiffusionGemmaConfig(**config.to_hf()))
    state = {name: tuple(tensor.shape) for name, tensor in ours.state_dict().items()}
    assert len(state) == 1047
    assert sum(math.prod(shape) for shape in state.values()) == 25_823_781_228
    theirs = {k: tuple(v.shape) for k, v in published.state_dict().items() if "inv_freq" not in k}
    untied = {k for k in theirs if "model.decoder." in k or "vision" in k or "layer_scalar" in k}
    assert {published_name(name): shape for name, shape in state.items()} == {name: theirs[name] for name in untied}
    assert all(our_names(published_name(name)) == (name,) for name in state)
    # The card's 25.2B of text, 18M of self-conditioning, 0.57B of vision.
    assert 25.8e9 <= ours.num_parameters() < 25.9e9
    assert 3.8e9 <= ours.num_parameters(active=True) < 3.9e9


@pytest.mark.parametrize("name", ["text", "sudoku"])
def test_checkpoints_that_ship_have_presets(name):
    shipped = ModelConfig.from_hf(Path(dgemma.__file__).parent / "assets" / name)
    # `carried` holds the dtype of the saved weights, which a preset does not define.
    assert getattr(dgemma.presets, name)() == replace(shipped, carried={})


@pytest.mark.parametrize("preset", ["tiny", "small", "diffusiongemma_26b_a4b"])
def test_transformers_reads_what_to_hf_writes_and_from_hf_reads_what_transformers_writes(preset):
    config = getattr(dgemma.presets, preset)()
    theirs = DiffusionGemmaConfig(**json.loads(json.dumps(config.to_hf())))
    assert theirs.text_config.per_layer_config[-1 % config.num_hidden_layers].head_dim == config.global_head_dim
    back = ModelConfig.from_hf(theirs.to_dict())  # newer releases write per_layer_config instead of the global fields
    assert back.replace(vision_config=None, carried={}) == config.replace(vision_config=None, carried={})
    assert back.vision == config.vision  # None for a model without images


def test_a_text_config_alone_and_a_folder_are_read(tmp_path):
    alone = ModelConfig.from_hf(PUBLISHED_TEXT)
    assert alone.global_head_dim == 512
    (tmp_path / "config.json").write_text(json.dumps(dgemma.presets.tiny().to_hf()))
    assert ModelConfig.from_hf(tmp_path).replace(carried={}) == dgemma.presets.tiny()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hidden_size": 2**40}, r"hidden_size must be (an integer|int)"),
        ({"num_experts": 4, "top_k_experts": 5}, "top_k_experts must be at most num_experts"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types must end with 'full_attention'"),
        ({"layer_types": ["full_attention", "linear", "full_attention"]}, "layer_types must hold only"),
        ({"pad_token_id": 512}, "pad_token_id must be a token id"),
        ({"hidden_activation": "relu"}, "hidden_activation must be 'gelu_pytorch_tanh'"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention must be 'vision'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_type 'default' or 'proportional'"),
        ({"rope_parameters": {**PUBLISHED_TEXT["rope_parameters"], "odd": 3}}, r"rope_parameters\['odd'\] must have"),
        ({"sliding_window": 1}, "sliding_window must be at least 2"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config must override exactly the full-attention"),
    ],
)
def test_a_value_that_does_not_fit_is_named_in_one_sentence(changes, sentence):
    published = dgemma.presets.tiny().to_hf()
    published["text_config"] |= changes
    with pytest.raises(ValueError, match=sentence):
        ModelConfig.from_hf(published)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "llama"}, r"model_type must be 'diffusion_gemma'.*got 'llama'"),
        ({"text_config": 3}, "text_config must be a dictionary, got 3"),
        ({"text_config": {}}, "needs head_dim, hidden_size"),
        ({"vision_config": True}, r"vision_config must be Mapping.*got True"),
        ({"vision_config": {"head_dim": 6}}, "VisionConfig.head_dim must be a multiple of 4"),
        ({"vision_config": {"num_key_value_heads": 1}}, "vision_config.num_key_value_heads must be 12, got 1"),
        ({"vision_config": {"use_clipped_linears": True}}, "vision_config.use_clipped_linears must be False"),
        ({"vision_config": {}}, "image_token_id must be a token id below vocab_size, got 258880"),
        ({"canvas_length": 2**20}, "canvas_length must be at most max_position_embeddings, 8192"),
    ],
)
def test_a_config_that_does_not_fit_is_named_in_one_sentence(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        ModelConfig.from_hf(dgemma.presets.tiny().to_hf() | changes)


def test_null_generation_fields_mean_the_published_defaults():
    nulls = {"t_max": None, "eos_token_id": None, "sampler_config": None, "max_denoising_steps": None}
    assert GenerationDefaults.from_hf(nulls) == GenerationDefaults()
    published = GenerationDefaults()
    assert (published.max_denoising_steps, published.entropy_bound, published.eos_token_id) == (48, 0.1, (1, 106, 50))
    assert (published.t_max, published.t_min, published.confidence_threshold) == (0.8, 0.4, 0.005)
    assert GenerationDefaults.from_hf(published.to_hf()) == published


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sampler_config": "EntropyBound"}, "sampler_config must be a dictionary"),
        ({"t_min": 2.0}, "t_min must be at most t_max"),
        ({"eos_token_id": -5}, r"eos_token_id must be a tuple of token ids, got \(-5,\)"),
        ({"noise": "mask"}, r"GenerationDefaults\.noise must be Mapping"),
        ({"sampler": {"kind": "ancestral"}}, r"GenerationDefaults\.sampler must be a dictionary with a \"name\""),
    ],
)
def test_a_generation_value_that_does_not_fit_is_named(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        GenerationDefaults.from_hf(changes)
