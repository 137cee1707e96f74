"""Constrain the tokens at each position: allowed sets, a pattern, and slots with a list of options.

`allowed` applies to the prediction (other tokens get probability zero) and to the noise (it is drawn from the same
set). So no other token ever appears on the canvas.
"""

import argparse

import torch

import dgemma

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=24, help="steps per canvas (%(default)s)")
options = {"steps": parser.parse_args().steps, "sampler": dgemma.Ancestral(), "temperature": 0.7, "stop": None}

model = dgemma.DiffusionGemma.from_pretrained("dgemma/text", dtype=torch.float32)
tokenizer = dgemma.Tokenizer.from_pretrained("dgemma/text")
canvas_len, vocab_size = model.config.canvas_length, tokenizer.vocab_size

# One set for all positions: no letter "e".
prompt = torch.tensor([tokenizer.encode("In this sad condition, a man")])
without_e = [token for token in range(vocab_size) if "e" not in tokenizer.decode([token]).lower()]
out = dgemma.generate(model, prompt, max_new_tokens=canvas_len, allowed=without_e, seed=2, **options)
text = tokenizer.decode(out.new_tokens[0])
assert "e" not in text.lower()
print(f"without e: {text!r}\n")

# One set per position: a space, 1, 8, any digit, any digit. The rest is free.
digits = tokenizer.encode("0123456789", bos=False)
one, eight = digits[1], digits[8]
year = [tokenizer.encode(" ", bos=False), [one], [eight], digits, digits]
allowed = torch.ones(canvas_len, vocab_size, dtype=torch.bool)
for position, tokens in enumerate(year):
    allowed[position] = False
    allowed[position, tokens] = True
prompt = torch.tensor([tokenizer.encode("In the year")])
out = dgemma.generate(model, prompt, max_new_tokens=canvas_len, allowed=allowed, seed=2, **options)
print(f"a year:    {tokenizer.decode(out.tokens[0])!r}\n")

# A template with a slot: the model scores each option, given the text before and after the slot.
nouns = [" ship", " king", " cake"]  # words in the vocabulary begin with a space
template = ["The whale rose near the", dgemma.Slot(nouns, name="noun"), " and the sailors cried out."]
choice = dgemma.slots(model, template, tokenizer=tokenizer)["noun"]
print("The whale rose near the ... and the sailors cried out.")
for noun, probability in zip(nouns, choice.probabilities.tolist(), strict=True):
    print(f" {noun:6} {probability:6.1%}")
