"""Adapters of PEFT and of dgemma are interchangeable: logits equal up to rounding."""

import peft
import pytest
import torch
from transformers import DiffusionGemmaForBlockDiffusion, Gemma4ForCausalLM, Gemma4TextConfig

from dgemma import DiffusionGemma, presets
from dgemma.train import LoRA, add_lora, load_lora, save_lora
from dgemma.train.lora import adapter_weights

TOLERANCE = 1e-5  # relative to the largest |logit|: float32 rounding through three layers


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A checkpoint with random weights; its logits are large enough to show an adapter."""
    folder = tmp_path_factory.mktemp("base")
    model = DiffusionGemma(presets.tiny(vision=True))
    model.reset_parameters(torch.Generator().manual_seed(1))
    model.save_pretrained(folder)
    return folder


def _stir(weights):
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in weights:
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)


def _same_logits(ours, theirs, base):
    prompt, canvas = torch.arange(60).view(2, 30) + 5, torch.arange(18).view(2, 9) * 7 + 5
    with torch.no_grad():
        signal = theirs(input_ids=prompt, decoder_input_ids=canvas).logits
        expected = theirs(input_ids=prompt, decoder_input_ids=canvas, self_conditioning_logits=signal).logits
        got = ours.denoise(canvas, ours.encode(prompt), self_cond=signal).logits
        plain = DiffusionGemma.from_pretrained(base)
        without = plain.denoise(canvas, plain.encode(prompt), self_cond=signal).logits
    assert (got - expected).abs().max() < TOLERANCE * expected.abs().max()
    assert (got - without).abs().max() > 0.01 * expected.abs().max()  # the adapter matters


@pytest.mark.parametrize(
    "targets",
    [
        ("attention", "dense", "experts", "router", "self_conditioning", "vision_projection"),
        ("layers.1.self_attn.q_proj", "layers.2.experts"),
    ],
    ids=["everything", "two modules"],
)
def test_peft_loads_adapters_from_here(tmp_path, base, targets):
    ours = DiffusionGemma.from_pretrained(base)
    _stir(add_lora(ours, LoRA(rank=2, alpha=3.0, targets=targets)))
    save_lora(ours, tmp_path)
    theirs = DiffusionGemmaForBlockDiffusion.from_pretrained(base)
    _same_logits(ours, peft.PeftModel.from_pretrained(theirs, tmp_path).eval(), base)


def _peft(base, **settings):
    theirs = DiffusionGemmaForBlockDiffusion.from_pretrained(base)
    return peft.get_peft_model(theirs, peft.LoraConfig(r=4, lora_alpha=6, lora_dropout=0.0, **settings)).eval()


ATTENTION = r".*(decoder|language_model)\.layers.*\.(q_proj|v_proj|mlp\.gate_proj)"
EXPERTS = [
    f"model.{stack}.layers.1.experts.{weight}"
    for stack in ("decoder", "encoder.language_model")
    for weight in ("gate_up_proj", "down_proj")
]


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ATTENTION},
        {"target_modules": ATTENTION, "use_rslora": True},
        {"target_modules": [], "target_parameters": EXPERTS},
        {"target_modules": [], "target_parameters": EXPERTS[1::2]},
    ],
    ids=["modules", "rank-stabilised", "experts", "half of the experts"],
)
def test_adapters_of_peft_load_here(tmp_path, base, settings):
    theirs = _peft(base, **settings)
    modules = dict(theirs.named_modules())
    for name, module in modules.items():  # as the documentation ties them
        if "encoder.language_model" in name and hasattr(module, "lora_A"):
            twin = modules[name.replace("encoder.language_model", "decoder")]
            twin.lora_A, twin.lora_B = module.lora_A, module.lora_B
    _stir(weight for name, weight in theirs.named_parameters() if "lora_" in name)
    theirs.save_pretrained(tmp_path)
    ours = DiffusionGemma.from_pretrained(base)
    assert load_lora(ours, tmp_path).rank == 4
    _same_logits(ours, theirs, base)


def test_an_adapter_of_gemma_4_loads_here(tmp_path):
    text = presets.tiny().to_hf()["text_config"]
    for name in ("model_type", "use_bidirectional_attention"):
        text.pop(name)
    moe = {"enable_moe_block": True, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0}
    base = Gemma4ForCausalLM(Gemma4TextConfig(**text | moe))
    base.save_pretrained(tmp_path / "base")
    theirs = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "router.proj"])).eval()
    _stir(weight for name, weight in theirs.named_parameters() if "lora_" in name)
    theirs.save_pretrained(tmp_path / "adapter")
    ours, tokens = DiffusionGemma.from_pretrained(tmp_path / "base"), torch.arange(20)[None] + 5
    before = ours.causal_logits(tokens)
    load_lora(ours, tmp_path / "adapter")
    with torch.no_grad():
        expected = theirs(input_ids=tokens).logits
    assert (ours.causal_logits(tokens) - expected).abs().max() < TOLERANCE * expected.abs().max()
    assert (before - expected).abs().max() > 0.01 * expected.abs().max()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"target_modules": ATTENTION}, "must be equal in the encoder and the decoder"),
        ({"target_modules": r".*decoder.*\.q_proj"}, "must adapt the encoder and the decoder alike"),
        (
            {"target_modules": ATTENTION, "use_dora": True},
            r"must have no setting that dgemma lacks, got \['use_dora'\]",
        ),
        ({"target_modules": ["lm_head"]}, r"must be base_model\.model\.MODULE\.lora_A\.weight"),
    ],
)
def test_adapters_that_one_stack_cannot_have_are_refused(tmp_path, base, settings, sentence):
    theirs = _peft(base, **settings)
    _stir(weight for name, weight in theirs.named_parameters() if "lora_" in name)
    theirs.save_pretrained(tmp_path)
    ours = DiffusionGemma.from_pretrained(base)
    with pytest.raises(ValueError, match=sentence):
        load_lora(ours, tmp_path)
    assert not list(adapter_weights(ours))
    assert all(weight.requires_grad for weight in ours.parameters())
