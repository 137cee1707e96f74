"""Write text from noise with a model that ships with the library. Start here.

The model does not write from left to right. It reads the prompt once and takes a canvas of 64 random tokens. It
predicts all of them at once, keeps some, returns others to noise, and repeats until no noise is left. The model is
small: 19.6 million weights, trained for minutes on books and on stories that a program assembled from phrases. It
tells such stories.

    python examples/01_generate.py
    python examples/01_generate.py "It was a dark night, and the old captain" --steps 32 --seed 7
"""

import argparse

import torch

import dgemma

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("prompt", nargs="?", default="Once upon a time there was")
parser.add_argument("--steps", type=int, help="steps per canvas, at most; default: the checkpoint's")
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()

model = dgemma.DiffusionGemma.from_pretrained("dgemma/text", dtype=torch.float32)
tokenizer = dgemma.Tokenizer.from_pretrained("dgemma/text")
prompt = torch.tensor([tokenizer.encode(options.prompt)])  # (1, P)


def show(record: dgemma.StepRecord) -> None:
    """Print the text that would be committed now, and the mean entropy."""
    step, num_steps = int(record.step), int(record.state.num_steps)
    if step == 0:
        print(f"noise    {tokenizer.decode(record.canvas[0])[:90]!r}")
    if step % max(1, num_steps // 8) == 0:
        print(f"step {step + 1:3d} {tokenizer.decode(record.state.draft[0])[:90]!r}  {record.entropy.mean():.2f} nats")


out = dgemma.generate(model, prompt, max_new_tokens=64, steps=options.steps, seed=options.seed, on_step=show)

print(f"\n{tokenizer.decode(out.tokens[0])}")
print(f"\n{out.new_tokens.numel()} tokens in {out.steps.sum()} forwards. The same seed gives the same text again.")
