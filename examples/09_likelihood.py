"""How well does the model know a text? The diffusion bound with its interval, and the same weights word by word.

The bound is an expectation over noise levels and noise, so it is an estimate with an interval; its table says which
levels it comes from. The text was held out of training. With its words shuffled it costs more, and with its letters
reversed more than 8 bits a byte, the price of knowing nothing.
"""

import argparse
import math
import random
from pathlib import Path

import torch

import dgemma
from dgemma.train.likelihood import evaluate

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--rows", type=int, default=6, help="of 64 tokens each (%(default)s)")
parser.add_argument("--samples", type=int, default=8, help="noise levels for each row (%(default)s)")
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
print(f"{'bits per byte':22}{'diffusion, at most':>20}{'word by word':>14}")
for name, text in texts.items():
    tokens = torch.tensor(tokenizer.encode(text, bos=False)[: 64 * options.rows]).view(-1, 64)  # one canvas a row
    num_bytes = sum(len(tokenizer.decode(row).encode()) for row in tokens)
    rows = torch.nn.functional.pad(tokens, (1, 0), value=tokenizer.bos_token_id)  # (rows, 65)
    found = evaluate(model, rows, noise, num_samples=options.samples, num_bytes=num_bytes, progress=False)
    causal = found.causal.value * found.num_tokens / num_bytes / math.log(2)
    print(f"{name:22}{found.bits_per_byte.value:20.2f}{causal:14.2f}")
    if name == "as it was written":
        report = str(found)
print(f"\nas it was written:\n{report}")
