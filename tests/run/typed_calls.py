"""Calls that mypy checks and nothing runs: it must accept the first ones and refuse the others.

An `ignore` that is not needed is an error, because `warn_unused_ignores` is set.
"""

import torch

import dgemma
from dgemma.many.on_ray import generate_on_ray

model, tokens = dgemma.DiffusionGemma(dgemma.presets.tiny()), torch.full((1, 8), 5)
dgemma.generate(model, tokens, steps=3, temperature=0.5, sampler=dgemma.EntropyBound(), record=True, seed=[4])
dgemma.infill(model, tokens, [(2, 4)], steps=3, progress=False)
for _ in dgemma.stream(model, tokens, stop=None, frozen=None):
    pass
dgemma.edit(model, tokens, noise_level=0.4, allowed=[7, 8], record_top=3)
dgemma.generate_many(model, ["Once"], batch_size=2, steps=3, out="run.jsonl")

dgemma.generate(model, tokens, stepz=3)  # type: ignore[call-arg]
dgemma.generate(model, tokens, steps="many")  # type: ignore[arg-type]
dgemma.stream(model, tokens, record=True)  # type: ignore[call-arg]
dgemma.infill(model, tokens, [(2, 4)], max_new_tokens=8)  # type: ignore[call-arg]
dgemma.edit(model, tokens, stepz=3)  # type: ignore[call-arg]
dgemma.edit(model, tokens, record="all")  # type: ignore[arg-type]
dgemma.generate_many(model, ["Once"], stepz=3)  # type: ignore[call-arg]
dgemma.generate_many(model, ["Once"], batch_size="8")  # type: ignore[arg-type]
generate_on_ray(lambda: model, ["Once"], workers=1, canvas=tokens)  # type: ignore[call-arg]

dgemma.train.TrainConfig(steps=1, batch_size=1, precision="weights")
dgemma.train.TrainConfig(steps=1, batch_size=1, precision="fp8")  # type: ignore[arg-type]
dgemma.train.Objective(noise=dgemma.UniformNoise(512), canvas_len=32, canvases="two")  # type: ignore[arg-type]
dgemma.generate_causal(model, tokens, max_new_tokens=8, temperature=0.5)
dgemma.generate_causal(model, tokens, steps=3)  # type: ignore[call-arg]
