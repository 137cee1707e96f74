"""Write a page of samples: the same prompts under several samplers and autoregressively, with seed 0 and no selection.

python examples/18_samples.py --num-prompts 2                        a minute on a CPU; prints the page
python examples/18_samples.py --out samples.md                       the page that ships with the checkpoint
"""

import argparse
from pathlib import Path
from typing import Any

import torch

import dgemma

PROMPTS = [
    "Once upon a time there was a little",
    "It was a dark night, and the old captain",
    "One cold morning Mila, a small brown mouse,",
    "",
    '"My dear Emma," said Mr. Knightley,',
]
# Arguments of `generate` by the noise that the model has learnt; the others are the checkpoint's.
OWN: dict[str, dict[str, Any]] = {"the checkpoint's own": {}}
SAMPLERS: dict[str, dict[str, dict[str, Any]]] = {
    "uniform": OWN
    | {
        "published sampler, entropy bound 3 nats, at most 16 steps": {
            "sampler": dgemma.EntropyBound(bound=3.0),
            "steps": 16,
            "temperature": dgemma.LinearTemperature(start=0.8, end=0.4),
        },
        "ancestral, 16 steps, temperature 0.7": {
            "sampler": dgemma.Ancestral(),
            "steps": 16,
            "stop": None,
            "temperature": 0.7,
        },
    },
    "mask": OWN
    | {
        "most confident first, 16 steps, temperature 0.7": {
            "sampler": dgemma.Confidence(),
            "steps": 16,
            "temperature": 0.7,
        },
        "every confidence of 0.8 or more, at most 32 steps, temperature 0.7": {
            "sampler": dgemma.Threshold(tau=0.8),
            "steps": 32,
            "temperature": 0.7,
        },
    },
}


def quote(prompt: str, text: str) -> str:
    shown = (f"**{prompt}**" if prompt else "") + text
    return "\n".join(f"> {line}" if line else ">" for line in shown.splitlines())


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="dgemma/text", help="a checkpoint with a tokenizer (%(default)s)")
parser.add_argument("--num-prompts", type=int, default=len(PROMPTS), help="use the first few prompts (%(default)s)")
parser.add_argument("--new-tokens", type=int, default=64, help="tokens per sample (%(default)s)")
parser.add_argument("--out", type=Path, help="Markdown file; default: print the page")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
args = parser.parse_args()

model = dgemma.DiffusionGemma.from_pretrained(args.model, dtype=torch.float32, device=args.device)
tokenizer = dgemma.Tokenizer.from_pretrained(args.model)
prompts = PROMPTS[: args.num_prompts]
tokens, mask = (tensor.to(args.device) for tensor in tokenizer.encode_batch(prompts))
common = {"attention_mask": mask, "max_new_tokens": args.new_tokens, "seed": [0] * len(prompts)}

page = ["# Samples", "", "Every sample has seed 0; none was selected or edited. The prompt is in bold."]
kind = (model.generation.noise or {"kind": "uniform"})["kind"]
for name, options in SAMPLERS[kind].items():
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
