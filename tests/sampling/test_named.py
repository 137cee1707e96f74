"""Samplers by name: a checkpoint's sampler is stored, rebuilt, used by default, and checked with a clear error."""

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import dgemma
from dgemma.sampling.named import SAMPLERS
from every_sampler import SAMPLERS as EVERY

GIBBS = dgemma.LeaveOneOutGibbs(corrections=1, num_positions=3, choice_temperature=0.5)


def model(sampler=None, **defaults):
    config = dgemma.presets.tiny().replace(num_hidden_layers=1, layer_types=("full_attention",))
    model = dgemma.DiffusionGemma(config).eval()
    model.generation = replace(model.generation, sampler=sampler, **defaults)
    return model


def prompt():
    return torch.full((2, 3), 5)


@pytest.mark.parametrize("sampler", EVERY, ids=repr)
def test_every_sampler_is_rebuilt_from_its_description(sampler):
    kept = json.loads(json.dumps(dgemma.describe_sampler(sampler)))
    assert dgemma.default_sampler(model(kept)) == sampler
    assert SAMPLERS[kept["name"]] is type(sampler)


def test_a_description_is_json_for_all_kinds_of_scalars():
    sampler = dgemma.LeaveOneOutGibbs(num_positions=np.int64(8), choice_temperature=torch.tensor(0.5))
    assert json.loads(json.dumps(dgemma.describe_sampler(sampler))) == {
        "name": "leave-one-out-gibbs",
        "corrections": 2,
        "num_positions": 8,
        "choice_temperature": 0.5,
        "parametrisation": "mean",
    }


def test_a_checkpoint_that_names_no_sampler_has_the_published_one_with_its_bound():
    assert dgemma.default_sampler(model(entropy_bound=3.0)) == dgemma.EntropyBound(bound=3.0)


def test_a_run_without_a_sampler_uses_the_checkpoints_sampler():
    plain, own = model(max_denoising_steps=3), model(dgemma.describe_sampler(GIBBS), max_denoising_steps=3)
    own.load_state_dict(plain.state_dict())
    options = {"max_new_tokens": 32, "seed": 3, "eos_token_ids": []}
    named = dgemma.generate(plain, prompt(), sampler=GIBBS, **options)
    assert torch.equal(dgemma.generate(own, prompt(), **options).new_tokens, named.new_tokens)
    assert not torch.equal(dgemma.generate(plain, prompt(), **options).new_tokens, named.new_tokens)
    tokens, holes = torch.randint(5, 90, (1, 40)), [(8, 20)]
    for work in (lambda m, **s: dgemma.infill(m, tokens, holes, **s), lambda m, **s: dgemma.edit(m, tokens, **s)):
        assert torch.equal(work(own).tokens, work(plain, sampler=GIBBS).tokens)


@pytest.mark.parametrize("named", [True, False], ids=["the checkpoint's", "given"])
def test_gibbs_takes_all_its_steps_unless_a_rule_is_given(named):
    rule = {"stability_threshold": 2, "confidence_threshold": 0.25}
    plan = dgemma.read_plan(
        model(dgemma.describe_sampler(GIBBS) if named else None, **rule), prompt(), sampler=None if named else GIBBS
    )
    assert (plan.knobs.sampler, plan.knobs.stop) == (GIBBS, None)
    plan = dgemma.read_plan(model(dgemma.describe_sampler(GIBBS)), prompt(), stop=dgemma.StepCap(3))
    assert plan.knobs.stop == dgemma.StepCap(3)
    other = dgemma.read_plan(model({"name": "entropy-bound", "greedy": True}, **rule), prompt())
    assert other.knobs.sampler == dgemma.EntropyBound(greedy=True)
    assert other.knobs.stop == dgemma.StableAndConfident(stability=2, confidence=0.25)


@pytest.mark.parametrize(
    ("description", "sentence"),
    [
        ({"name": "gibbs"}, r"one of ancestral, .*, token-editing, got 'gibbs'\. Pass another"),
        ({"name": "ancestral", "tau": 1}, r"which takes parametrisation=…, got 'tau=1'\. Pass"),
        ({"name": "p2", "eta": "high"}, "fit p2: P2.eta must be float, got 'high'"),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else "",
)
def test_a_bad_description_raises_one_sentence_and_another_sampler_still_runs(description, sentence):
    broken = model(description)
    with pytest.raises(ValueError, match=f"^GenerationDefaults.sampler must .*{sentence}.*correct config.json.$"):
        dgemma.generate(broken, prompt(), max_new_tokens=32)
    dgemma.generate(broken, prompt(), max_new_tokens=32, steps=1, sampler=dgemma.Ancestral())


def test_a_user_defined_sampler_cannot_be_stored_in_a_checkpoint():
    @dataclass(frozen=True, kw_only=True)
    class Ancestral(dgemma.Ancestral):
        pass

    with pytest.raises(ValueError, match=r"be a sampler of dgemma \(ancestral, .*got the class Ancestral\. .* as"):
        dgemma.describe_sampler(Ancestral())


def test_training_under_another_noise_resets_bound_and_sampler():
    own = model(dgemma.describe_sampler(GIBBS), entropy_bound=3.0).generation
    assert own.after_learning({"kind": "uniform"}) == replace(own, noise={"kind": "uniform"})
    learnt = own.after_learning({"kind": "mask", "mask_token_id": 4})
    assert (learnt.sampler, learnt.entropy_bound) == (None, 0.1)
