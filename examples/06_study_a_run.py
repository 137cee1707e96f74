"""Study a run: entropy over steps, the order in which positions settle, router choices, and an intervention.

Everything that a step sees and does is recorded, and most of it can be changed between two steps. The intervention
here removes self-conditioning: the model no longer sees its previous prediction.
"""

import argparse

import torch

import dgemma

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=24, help="steps per canvas (%(default)s)")
options = {"steps": parser.parse_args().steps, "max_new_tokens": 64}

model = dgemma.DiffusionGemma.from_pretrained("dgemma/text", dtype=torch.float32)
tokenizer = dgemma.Tokenizer.from_pretrained("dgemma/text")
prompt = torch.tensor([tokenizer.encode("Once upon a time there was")])

with dgemma.observe(model, router=True) as observation:
    out = dgemma.generate(model, prompt, seed=5, record=True, **options)
run = out.trajectory
print(f"{tokenizer.decode(out.tokens[0])}\n\nstep  mean entropy  accepted of {run[0].canvas.shape[1]}")
entropy, accepted = run.array("entropy")[:, 0], run.array("accepted")[:, 0]  # (steps, C)
for step in range(0, len(run), max(1, len(run) // 6)):
    print(f"{step:4d}  {entropy[step].mean():12.2f}  {'█' * int(accepted[step].sum())}")

# A position has settled when its argmax no longer changes. Is text written from left to right?
argmax = run.array("argmax")[:, 0]  # (steps, C)
differs_from_last = (argmax != argmax[-1]).int()
settled = len(run) - differs_from_last.flip(0).argmax(0)  # (C,): the step after the last difference
settled = torch.where(differs_from_last.any(0), settled, 0).float()
thirds = ", ".join(f"{third.mean():.1f}" for third in settled.tensor_split(3))
print(f"\nmean step at which positions settled, by thirds of the canvas from the left: {thirds}")

# How evenly does a layer use its experts? Each token goes to 2 of 8; an even load would be 12.5% each.
print("\nshare of each expert, over all steps and positions:")
for layer in range(model.config.num_hidden_layers):
    experts = torch.cat([step.router[layer].experts.flatten() for step in observation.steps])
    load = torch.bincount(experts, minlength=model.config.num_experts) / experts.numel()
    print(f"  layer {layer}: {' '.join(f'{share:4.0%}' for share in sorted(load.tolist(), reverse=True))}")


def forget(record: dgemma.StepRecord) -> dict[str, None]:
    """Hide this step's prediction from the next step."""
    return {"self_cond": None}


print("\nfour runs each, with self-conditioning and without:")
prompts = prompt.expand(4, -1)
for name, on_step in (("with", None), ("without", forget)):
    out = dgemma.generate(model, prompts, seed=0, on_step=on_step, record=True, **options)
    halfway = out.trajectory.array("entropy")[len(out.trajectory) // 2].nanmean()
    print(f"  {name:8} forwards {out.steps.sum(1).tolist()}, mean entropy halfway {halfway:.2f}")
    print(f"           {tokenizer.decode(out.new_tokens[0])!r}")
