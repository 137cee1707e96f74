"""Checkpoints of transformers and dgemma are interchangeable: equal tensors, and logits equal up to rounding."""

from dataclasses import replace

import pytest
import torch
from transformers import (
    AutoTokenizer,
    DiffusionGemmaConfig,
    DiffusionGemmaForBlockDiffusion,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
)

from dgemma import ByteTokenizer, Tokenizer, presets
from dgemma.model.config import ModelConfig
from dgemma.model.diffusion import DiffusionGemma

TOLERANCE = 1e-5  # relative to the largest |logit|: float32 rounding through three layers


def _shake(model, seed):
    """Give every weight and per-mode scalar a different value, so that swapping two tensors changes the result."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        buffers = [b for n, b in model.named_buffers() if n.endswith(("layer_scalar", "std_bias", "std_scale"))]
        for tensor in (*model.parameters(), *buffers):
            spread = 0.3 if tensor.dim() == 1 else 0.08
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * spread + (tensor.dim() == 1))
    return model


def _theirs():
    config = DiffusionGemmaConfig(**presets.tiny(vision=True).to_hf())
    return _shake(DiffusionGemmaForBlockDiffusion(config), seed=1).eval()


def _assert_same_logits(ours, theirs):
    generator = torch.Generator().manual_seed(7)
    prompt = torch.randint(5, 512, (2, 30), generator=generator)  # longer than the window of 24
    canvas = torch.randint(5, 512, (2, 9), generator=generator)
    with torch.no_grad():
        first = theirs(input_ids=prompt, decoder_input_ids=canvas).logits
        second = theirs(input_ids=prompt, decoder_input_ids=canvas, self_conditioning_logits=first).logits
        cache = ours.encode(prompt)
        for expected, self_cond in ((first, None), (second, first)):
            got = ours.denoise(canvas, cache, self_cond=self_cond).logits
            assert (got - expected).abs().max() < TOLERANCE * expected.abs().max()


def _assert_same_tensors(ours, theirs):
    """transformers lists the shared stack twice, as encoder and decoder; we have it once, with a scalar for each."""
    state, seen = ours.state_dict(), set()
    for name, tensor in theirs.state_dict().items():
        if "vision" in name and ours.vision is None:
            continue
        target = name.replace("lm_head", "embed_tokens").replace("model.decoder.", "").replace(".linear.", ".")
        for theirs_prefix in ("vision_tower.encoder.", "vision_tower.", "embed_vision."):
            target = target.replace(f"model.encoder.{theirs_prefix}", "vision.")
        if target.startswith("model.encoder.language_model."):
            target = target.removeprefix("model.encoder.language_model.").replace("layer_scalar", "causal_layer_scalar")
        assert torch.equal(state[target], tensor), name
        seen.add(target)
    assert seen == set(state)


@pytest.mark.parametrize("max_shard_size", ["5GB", "100KB"], ids=["single", "sharded"])
def test_our_checkpoint_loads_in_transformers(tmp_path, max_shard_size):
    sees = max_shard_size == "5GB"
    ours = _shake(DiffusionGemma(presets.tiny(vision=sees)), seed=0)
    ours.generation = replace(ours.generation, noise={"kind": "uniform"}, sampler={"name": "ancestral"})
    ours.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    theirs, info = DiffusionGemmaForBlockDiffusion.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert all(not sees and "vision" in key for key in info["missing_keys"])
    _assert_same_tensors(ours, theirs)
    _assert_same_logits(ours, theirs.eval())
    assert theirs.generation_config.eos_token_id == [1, 106, 50]
    assert theirs.generation_config.sampler_config.entropy_bound == 0.1
    theirs.save_pretrained(tmp_path / "theirs")
    again = DiffusionGemma.from_pretrained(tmp_path / "theirs")
    assert again.generation == ours.generation
    assert again.config.layer_types == ours.config.layer_types


@pytest.mark.parametrize("max_shard_size", ["5GB", "100KB"], ids=["single", "sharded"])
def test_a_transformers_checkpoint_loads_here(tmp_path, max_shard_size):
    theirs = _theirs()
    theirs.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors").exists() == (max_shard_size == "5GB")
    ours = DiffusionGemma.from_pretrained(tmp_path)
    _assert_same_tensors(ours, theirs)
    _assert_same_logits(ours, theirs)


def test_a_saved_model_brings_its_tokenizer_to_transformers(tmp_path):
    model = DiffusionGemma.from_pretrained("dgemma/text-mask")
    model.save_pretrained(tmp_path)
    ours, theirs = Tokenizer.from_pretrained("dgemma/text"), AutoTokenizer.from_pretrained(tmp_path)
    text = "The fox asked: why not? Ünder"
    assert theirs.encode(text) == ours.encode(text), "with the bos token, as in training"
    assert theirs.decode(ours.encode(text, bos=False)) == text


def test_a_tokenizer_that_the_folder_has_already_stays(tmp_path):
    ByteTokenizer().save_pretrained(tmp_path)
    DiffusionGemma.from_pretrained("dgemma/text").save_pretrained(tmp_path)
    assert isinstance(Tokenizer.from_pretrained(tmp_path), ByteTokenizer)
    assert not (tmp_path / "tokenizer.json").exists()


def _gemma4_text(**changes):
    tiny = presets.tiny()
    text = tiny.to_hf()["text_config"]
    for name in ("model_type", "use_bidirectional_attention"):
        text.pop(name)
    moe = {"enable_moe_block": True, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0}
    return Gemma4TextConfig(**text | moe | changes)


@pytest.mark.parametrize("multimodal", [False, True], ids=["text-only", "with-vision"])
def test_a_gemma4_checkpoint_with_experts_can_be_loaded(tmp_path, caplog, multimodal):
    """Causal logits equal Gemma 4's. The self-conditioning block is new and has no effect before training."""
    if multimodal:
        tiny = presets.tiny(vision=True)
        theirs = Gemma4ForConditionalGeneration(
            Gemma4Config(text_config=_gemma4_text(), vision_config=tiny.vision_config, **tiny.carried)
        )
    else:
        theirs = Gemma4ForCausalLM(_gemma4_text())
    _shake(theirs, seed=2).eval().save_pretrained(tmp_path / "gemma4")
    ours = DiffusionGemma.from_pretrained(tmp_path / "gemma4")
    notices = [record.getMessage() for record in caplog.records if "newly initialised" in record.getMessage()]
    assert len(notices) == 1
    for part in ("pre_norm", "gate_proj", "up_proj", "down_proj"):
        assert f"self_conditioning.{part}.weight" in notices[0]

    tokens = torch.randint(5, 512, (2, 40), generator=torch.Generator().manual_seed(8))
    with torch.no_grad():
        expected = theirs(input_ids=tokens).logits
        got = ours.causal_logits(tokens)
        assert (got - expected).abs().max() < TOLERANCE * expected.abs().max()
        cache = ours.encode(tokens)
        plain = ours.denoise(tokens[:, :8], cache)
        assert torch.equal(ours.denoise(tokens[:, :8], cache, self_cond=plain).logits, plain.logits)

    if multimodal:  # the vision tower is kept, under DiffusionGemma's names
        ours.save_pretrained(tmp_path / "diffusion")
        back, info = DiffusionGemmaForBlockDiffusion.from_pretrained(tmp_path / "diffusion", output_loading_info=True)
        assert not any(info.values())
        _assert_same_tensors(ours, back)


@pytest.mark.parametrize(
    ("field", "value"), [("hidden_size_per_layer_input", 8), ("num_kv_shared_layers", 1), ("attention_k_eq_v", False)]
)
def test_gemma4_features_that_dgemma_lacks_are_refused_by_name(tmp_path, field, value):
    _gemma4_text(**{field: value}).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"ModelConfig.{field} must be"):
        ModelConfig.from_hf(tmp_path)


def test_gemma4_without_experts_is_refused(tmp_path):
    _gemma4_text(enable_moe_block=False).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"enable_moe_block must be True .* 26B-A4B"):
        ModelConfig.from_hf(tmp_path)
