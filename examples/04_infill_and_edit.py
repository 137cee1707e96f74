"""Fill holes, given the text on both sides, and rewrite a text in place. Frozen tokens never change."""

import argparse

import torch

import dgemma

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, help="steps per canvas, at most; default: the checkpoint's")
options = {"steps": parser.parse_args().steps, "progress": False}

# Under mask noise, the network sees which tokens are holes. Under uniform noise, a token to fill looks like any other.
model = dgemma.DiffusionGemma.from_pretrained("dgemma/text-mask", dtype=torch.float32)
tokenizer = dgemma.Tokenizer.from_pretrained("dgemma/text-mask")

# Holes of two, four and eight tokens between two halves of a sentence. The text on the left is the prefix. The text on
# the right is frozen on the same canvas, so that the model sees it while it fills the hole.
left = tokenizer.encode("Once upon a time there was a fox named Max. He lived")
right = tokenizer.encode(", and he was happy.", bos=False)
for length in (2, 4, 8):
    start, stop = len(left), len(left) + length
    text = torch.tensor([left + [tokenizer.pad_token_id] * length + right])
    filled = dgemma.infill(model, text, [(start, stop)], seed=0, **options)
    tokens = filled.tokens[0].tolist()
    assert (tokens[:start], tokens[stop:]) == (left, right)
    print(f"{tokenizer.decode(left)}[{tokenizer.decode(tokens[start:stop])}]{tokenizer.decode(right)}")

# An edit adds noise up to a level and then denoises. More noise keeps fewer tokens. `frozen` keeps chosen tokens.
original = "Once upon a time there was a young duck who lived on the bank of a wide river. His name was Victor."
text = torch.tensor([tokenizer.encode(original)])
print(f"\n{original}")
for level in (0.1, 0.4, 0.8):
    edited = dgemma.edit(model, text, noise_level=level, seed=1, **options)
    kept = (edited.tokens == text).float().mean().item()
    print(f"  noise {level}, {kept:4.0%} of the tokens kept: {tokenizer.decode(edited.tokens[0])}")

frozen = torch.zeros_like(text, dtype=torch.bool)
frozen[:, :10] = True
edited = dgemma.edit(model, text, noise_level=0.8, frozen=frozen, seed=1, **options)
assert torch.equal(edited.tokens[:, :10], text[:, :10])
print(f"  noise 0.8, beginning frozen:     {tokenizer.decode(edited.tokens[0])}")
