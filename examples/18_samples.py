"""Write a page of samples: the same prompts under several samplers and autoregressively, with seed 0 and no selection.

python examples/18_samples.py                        a minute on a CPU; prints each sample as soon as it is finished
python examples/18_samples.py --out samples.md       the page that ships with the checkpoint
"""

import argparse
from pathlib import Path
from typing import Any

import torch

import dgemma

PROMPTS = [
    "Once upon a time there was",
    "It was a dark night, and the old captain",
    "One cold morning Mila, a small brown mouse,",
    "",
    '"My dear Emma," said Mr. Knightley,',
]
# Arguments of `generate`, by the noise that the model has learnt. The checkpoint sets all other arguments.
OWN: dict[str, dict[str, Any]] = {"the checkpoint's defaults": {}}
SAMPLERS: dict[str, dict[str, dict[str, Any]]] = {
    "uniform": OWN
    | {
        "Gibbs corrections, 16 steps, temperature 1.0 to 0.3": {
            "sampler": dgemma.LeaveOneOutGibbs(corrections=1, num_positions=4, choice_temperature=0.5),
            "steps": 16,
            "temperature": dgemma.LinearTemperature(start=1.0, end=0.3),
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
parser.add_argument("--out", type=Path, help="also write the page to this Markdown file")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
args = parser.parse_args()
if args.num_prompts < 1:
    parser.error(f"--num-prompts must be at least 1, got {args.num_prompts}")
if args.out is not None:
    args.out.parent.mkdir(parents=True, exist_ok=True)  # before the run, so that a wrong path costs no time

model = dgemma.DiffusionGemma.from_pretrained(args.model, dtype=torch.float32, device=args.device)
tokenizer = dgemma.Tokenizer.from_pretrained(args.model)
prompts = {prompt: torch.tensor([tokenizer.encode(prompt)], device=args.device) for prompt in PROMPTS}
prompts = dict(list(prompts.items())[: args.num_prompts])
page: list[str] = []


def write(*lines: str) -> None:
    print(*lines, sep="\n", flush=True)
    page.extend(lines)


write("# Samples", "", "Every sample has seed 0; none was selected or edited. The prompt is in bold.")
kind = (model.generation.noise or {"kind": "uniform"})["kind"]
for name, options in SAMPLERS[kind].items():
    write("", f"## {name}")
    for prompt, tokens in prompts.items():
        out = dgemma.generate(model, tokens, max_new_tokens=args.new_tokens, **options, progress=False)
        counts = f"({int(out.steps.sum())} forwards, {float(out.tokens_per_forward[0]):.1f} tokens per forward)"
        write("", quote(prompt, tokenizer.decode(out.new_tokens[0])), "", counts)
write("", "## autoregressive, temperature 0.8")
for prompt, tokens in prompts.items():
    written = dgemma.generate_causal(model, tokens, max_new_tokens=args.new_tokens, temperature=0.8)
    write("", quote(prompt, tokenizer.decode(written[0])))
if args.out is not None:
    args.out.write_text("\n".join(page) + "\n")
