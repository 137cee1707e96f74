"""Write a page of samples: the same prompts under several samplers and autoregressively, with seed 0 and no selection.

python examples/18_samples.py --new-tokens 64                        a minute on a CPU; prints the page
python examples/18_samples.py --out samples.md                       the page that ships with the checkpoint
"""

import argparse
from pathlib import Path
from typing import Any

import torch

import dgemma

PROMPTS = [
    "",
    "It was a dark night, and the old captain",
    "Once upon a time there was a little",
    '"My dear Emma," said Mr. Knightley,',
    "Yahweh said to Moses,",
]
# Arguments of `generate`. The checkpoint's values are used for all others.
SAMPLERS: dict[str, dict[str, Any]] = {
    "the checkpoint's sampler": {},
    "the same, 16 steps per canvas": {"steps": 16},
    "published sampler, entropy bound 12 nats, at most 48 steps": {
        "sampler": dgemma.EntropyBound(bound=12.0),
        "steps": 48,
        "temperature": dgemma.LinearTemperature(start=0.8, end=0.4),
    },
    "ancestral, 64 steps, temperature 0.8": {
        "sampler": dgemma.Ancestral(),
        "steps": 64,
        "stop": None,
        "temperature": 0.8,
    },
}


def quote(prompt: str, text: str) -> str:
    shown = (f"**{prompt}**" if prompt else "") + text
    return "\n".join(f"> {line}" if line else ">" for line in shown.splitlines())


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="dgemma/text", help="a checkpoint with a tokenizer (%(default)s)")
parser.add_argument("--num-prompts", type=int, default=len(PROMPTS), help="use the first few prompts (%(default)s)")
parser.add_argument("--new-tokens", type=int, default=192, help="tokens per sample (%(default)s)")
parser.add_argument("--out", type=Path, help="Markdown file; default: print the page")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
args = parser.parse_args()

model = dgemma.DiffusionGemma.from_pretrained(args.model, dtype=torch.float32, device=args.device)
tokenizer = dgemma.Tokenizer.from_pretrained(args.model)
prompts = PROMPTS[: args.num_prompts]
tokens, mask = (tensor.to(args.device) for tensor in tokenizer.encode_batch(prompts))
common = {"attention_mask": mask, "max_new_tokens": args.new_tokens, "seed": [0] * len(prompts)}

page = ["# Samples", "", "Every sample has seed 0; none was selected or edited. The prompt is in bold."]
for name, options in SAMPLERS.items():
    out = dgemma.generate(model, tokens, **common, **options, progress=False)
    page += ["", f"## {name}"]
    for row, prompt in enumerate(prompts):
        forwards = (
            f"({int(out.steps[row].sum())} forwards, {float(out.tokens_per_forward[row]):.1f} tokens per forward)"
        )
        page += ["", quote(prompt, tokenizer.decode(out.new_tokens[row])), "", forwards]
page += ["", "## autoregressive, temperature 0.8"]
for prompt, written in zip(prompts, dgemma.generate_causal(model, tokens, **common, temperature=0.8), strict=True):
    page += ["", quote(prompt, tokenizer.decode(written))]
text = "\n".join(page) + "\n"
if args.out is None:
    print(text, end="")
else:
    args.out.write_text(text)
