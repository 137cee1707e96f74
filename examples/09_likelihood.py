"""Measure how well the model predicts a text: the diffusion bound with its interval, and the autoregressive likelihood.

The bound is an expectation over noise levels and noise, so it is an estimate with an interval. Its table shows how much
each noise level contributes. The text was held out of training. With shuffled words it needs more bits. With reversed
letters it needs more than the 8 bits per byte of the uncompressed text.
"""

import argparse
import math
import random
from pathlib import Path

import torch

import dgemma
from dgemma.train.likelihood import evaluate

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--rows", type=int, default=6, help="rows of 64 tokens (%(default)s)")
parser.add_argument("--samples", type=int, default=8, help="noise levels per row (%(default)s)")
options = parser.parse_args()

model = dgemma.DiffusionGemma.from_pretrained("dgemma/text", dtype=torch.float32)
tokenizer = dgemma.Tokenizer.from_pretrained("dgemma/text")
noise = dgemma.UniformNoise(model.config.vocab_size)

held_out = (Path(dgemma.__file__).parent / "assets" / "text" / "held_out.txt").read_text()
words = held_out[:8000].split()
texts = {
    "as it was written": " ".join(words),
    "its words shuffled": " ".join(random.Random(0).sample(words, len(words))),
    "its letters reversed": " ".join(words)[::-1],
}
print(f"{'bits per byte':22}{'diffusion bound':>20}{'autoregressive':>16}")
for name, text in texts.items():
    tokens = torch.tensor(tokenizer.encode(text, bos=False)[: 64 * options.rows]).view(-1, 64)  # one canvas per row
    num_bytes = sum(len(tokenizer.decode(row).encode()) for row in tokens)
    rows = torch.nn.functional.pad(tokens, (1, 0), value=tokenizer.bos_token_id)  # (rows, 65)
    result = evaluate(model, rows, noise, num_samples=options.samples, num_bytes=num_bytes, progress=False)
    causal = result.causal.value * result.num_tokens / num_bytes / math.log(2)
    print(f"{name:22}{result.bits_per_byte.value:20.2f}{causal:16.2f}")
    if name == "as it was written":
        report = str(result)
print(f"\nas it was written:\n{report}")
