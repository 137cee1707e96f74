"""Generate with the published sampler, and watch a canvas settle.

The tiny model ships without training: its weights are random, so the text is not language. What you see is real all
the same: the loop, the sampler and the stop rule are those of the 26B model.
"""

import torch

import dgemma
from dgemma import StepRecord

torch.manual_seed(2)
model = dgemma.DiffusionGemma(dgemma.presets.tiny())
with torch.no_grad():
    model.norm.weight.mul_(60)  # sharpen, so that random weights have opinions
tokenizer = dgemma.ByteTokenizer()
prompt, _ = tokenizer.encode_batch(["Why is the sky blue?"])


def show(record: StepRecord) -> None:
    """One line a step: the draft, with a dot for every position that was refused."""
    accepted = record.accepted[0].tolist()
    draft = tokenizer.decode(record.state.draft[0])
    marks = "".join("█" if kept else "·" for kept in accepted)
    print(f"step {int(record.step[0]):2d}  {marks}  entropy {record.entropy.mean():.3f}  {draft!r}")


letters = tokenizer.encode(" abcdefghijklmnopqrstuvwxyz", bos=False)
print(f"{model.num_parameters():,} random weights, canvas of {model.config.canvas_length} tokens\n")
out = dgemma.generate(model, prompt, max_new_tokens=32, steps=16, allowed=letters, on_step=show)
print(f"\n{out.steps.sum().item()} forwards, {out.tokens_per_forward.item():.1f} tokens per forward")
