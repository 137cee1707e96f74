"""Arguments and files that would give a wrong result in silence, or an error deep inside torch, are refused."""

import json
import threading
from dataclasses import replace

import pytest
import torch

import dgemma
from dgemma import presets, train
from rowwise import RowwiseDenoiser

TINY = presets.tiny().replace(vocab_size=128, hidden_size=16, num_experts=4, canvas_length=8)
PROMPT = torch.tensor([[2, 7, 9]])
RUN = {"max_new_tokens": 8, "steps": 2, "progress": False}


@pytest.fixture(scope="module")
def model():
    made = dgemma.DiffusionGemma(TINY)
    made.reset_parameters(torch.Generator().manual_seed(0))
    return made


class OneRow(dgemma.Denoiser):
    """Predicts one row, whatever the batch."""

    def __init__(self, model):
        self.model, self.config, self.generation, self.device = model, model.config, model.generation, model.device

    def encode(self, tokens, cache=None, attention_mask=None):
        return self.model.encode(tokens, cache, attention_mask)

    def denoise(self, canvas, cache, self_cond=None):
        return dgemma.Prediction(self.model.denoise(canvas, cache).logits[:1])


def test_a_prediction_of_one_row_for_two_is_not_broadcast(model):
    with pytest.raises(
        ValueError, match=r"OneRow\.denoise must return a Prediction of shape \(2, 8, 128\), got \(1, 8"
    ):
        dgemma.generate(OneRow(model), PROMPT.repeat(2, 1), **RUN)


def test_a_temperature_that_falls_below_zero_is_refused_before_the_first_step(model):
    with pytest.raises(ValueError, match="must be above 0 at every step"):
        dgemma.generate(model, PROMPT, temperature=lambda step, num_steps: 0.5 - step, **RUN)


def test_a_canvas_larger_than_the_memory_is_refused_before_it_is_allocated():
    config = TINY.replace(canvas_length=2**30, max_position_embeddings=2**31 - 1, vocab_size=262_144)
    model = RowwiseDenoiser(config)
    with pytest.raises(ValueError, match=r"canvas must fit into the .* GiB of cpu"):
        dgemma.generate(model, PROMPT)
    for no_rows in (PROMPT[0], PROMPT[0, 0]):
        with pytest.raises(ValueError, match=r"prompt_tokens must be integer ids of shape \(batch, length\)"):
            dgemma.generate(model, no_rows)


def test_observe_ignores_what_other_threads_run(model):
    with dgemma.observe(model, residuals=True) as observation:
        thread = threading.Thread(target=dgemma.generate, args=(model, PROMPT), kwargs=RUN)
        thread.start()
        thread.join(60)
        assert observation.passes == []
        dgemma.generate(model, PROMPT, **{**RUN, "steps": 1})
    assert len(observation.steps) == 1


def test_an_optimizer_of_other_weights_is_refused(model, tmp_path):
    other = dgemma.DiffusionGemma(TINY)
    config = train.TrainConfig(steps=1, batch_size=2, precision="weights", progress=False)
    objective = train.recipes.dgemma(TINY, noise=dgemma.UniformNoise(128), fill_token=1)
    batch = train.TrainBatch(tokens=torch.full((2, 9), 5), prompt_len=torch.ones(2).long(), length=torch.full((2,), 9))
    with pytest.raises(ValueError, match="optimizer must update only weights of the model"):
        train.train(
            dgemma.DiffusionGemma(TINY),
            objective,
            lambda step, rows: batch,
            config,
            out=tmp_path,
            optimizer=lambda named: torch.optim.SGD(other.parameters(), lr=0.1),
        )


def test_a_published_config_omits_the_heads_of_full_layers_that_equal_those_of_sliding_layers():
    """transformers saves only overrides that differ."""
    config = TINY.replace(global_head_dim=TINY.head_dim)
    published = config.to_hf()
    text = published["text_config"]
    del text["global_head_dim"], text["num_global_key_value_heads"]
    full = [str(layer) for layer, kind in enumerate(config.layer_types) if kind == "full_attention"]
    for per_layer in ({}, {layer: {"num_key_value_heads": 1} for layer in full}):
        read = dgemma.ModelConfig.from_hf({**published, "text_config": {**text, "per_layer_config": per_layer}})
        assert read.global_head_dim == config.head_dim
        assert read.num_global_key_value_heads == (1 if per_layer else config.num_key_value_heads)


def test_adapters_of_a_huge_rank_are_refused_before_anything_is_allocated_or_frozen(tmp_path):
    model = dgemma.DiffusionGemma(TINY)
    train.add_lora(model, train.LoRA(rank=2))
    train.save_lora(model, tmp_path / "a")
    config = tmp_path / "a" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "r": 2**40}))
    plain = dgemma.DiffusionGemma(TINY)
    with pytest.raises(ValueError, match="must fit the names and shapes of the model"):
        train.load_lora(plain, tmp_path / "a")
    assert all(weight.requires_grad for weight in plain.parameters())


def test_a_strict_replay_ends_where_the_recording_ends(model):
    out = dgemma.generate(model, PROMPT, record=True, stop=dgemma.StepCap(1), eos_token_ids=(), **RUN)
    run = out.trajectory
    run.plan = replace(run.plan, num_steps=10**6, knobs=replace(run.plan.knobs, stop=None))
    with pytest.raises(RuntimeError, match="differs from the run at block 0, step 0, row 0: done"):
        run.replay(model)
