"""Fork a trajectory: go back to a step, change one thing, and run again from there.

Draws are counter-based, so everything before the fork repeats exactly. Later differences come from the change.
"""

import argparse

import torch

import dgemma

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=24, help="steps per canvas (%(default)s)")
steps = parser.parse_args().steps

model = dgemma.DiffusionGemma.from_pretrained("dgemma/text", dtype=torch.float32)
tokenizer = dgemma.Tokenizer.from_pretrained("dgemma/text")
prompt = torch.tensor([tokenizer.encode("Once upon a time there was")])

out = dgemma.generate(model, prompt, max_new_tokens=64, steps=steps, stop=None, record=True)
run, middle = out.trajectory, steps // 2
print(f"the run:\n  {tokenizer.decode(out.new_tokens[0])!r}")
run.replay(model)  # raises an error at the first difference
assert torch.equal(run.fork(model, step=middle).new_tokens, out.new_tokens)  # nothing changed: the same text

# Plant two words on the canvas in the middle of the run and freeze them.
moment = run.moment(model, step=middle)
words = torch.tensor(tokenizer.encode(" a kite", bos=False))
place = slice(35, 35 + len(words))
canvas, frozen = moment.state.canvas.clone(), moment.state.frozen.clone()
canvas[0, place], frozen[0, place] = words, True

forks = {
    "new draws from the middle on": {"step": middle, "seed": 1},
    "new draws from three quarters on": {"step": 3 * steps // 4, "seed": 1},
    "colder from the middle on": {"step": middle, "temperature": 0.3},
    "two words planted in the middle": {"step": middle, "canvas": canvas, "frozen": frozen},
}
for name, change in forks.items():
    fork = run.fork(model, **change)
    same = (fork.new_tokens == out.new_tokens).float().mean()
    print(f"\n{name}: {same:.0%} of the positions as in the run\n  {tokenizer.decode(fork.new_tokens[0])!r}")
assert torch.equal(fork.new_tokens[0, place], words)
