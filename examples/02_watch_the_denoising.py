"""Watch the denoising: live in the terminal, then as a web page, as plots and as an animation.

    python examples/02_watch_the_denoising.py --out pictures

run.html needs no network connection. Open it in a browser, play it, and hover over a position to see its candidates.
With matplotlib installed, the script also writes entropy.png, order.png and run.gif. entropy.png shows steps from top
to bottom and positions from left to right. order.png shows the step at which each position settled.
"""

import argparse
import importlib.util
from pathlib import Path

import torch

import dgemma
from dgemma.view.plots import plot_entropy, plot_order
from dgemma.view.terminal import LiveView

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", type=Path, default=Path(), help="folder for the pictures; default: this one")
parser.add_argument("--steps", type=int, help="steps per canvas, at most; default: the checkpoint's")
options = parser.parse_args()
options.out.mkdir(parents=True, exist_ok=True)

model = dgemma.DiffusionGemma.from_pretrained("dgemma/text", dtype=torch.float32)
tokenizer = dgemma.Tokenizer.from_pretrained("dgemma/text")
text = "Once upon a time there was"
prompt = torch.tensor([tokenizer.encode(text)])

with LiveView(tokenizer, prefix=text) as view:  # draws on a terminal only
    out = dgemma.generate(model, prompt, max_new_tokens=128, steps=options.steps, seed=1, on_step=view, record=True)
print(text + tokenizer.decode(out.new_tokens[0]))
print(f"\n{out.steps.sum()} forwards for two canvases, {out.tokens_per_forward.item():.1f} tokens per forward")

run = out.trajectory
dgemma.view.to_html(run, options.out / "run.html", tokenizer=tokenizer)
names = ["run.html"]
if importlib.util.find_spec("matplotlib"):
    plot_entropy(run, tokenizer=tokenizer).savefig(options.out / "entropy.png")
    plot_order(run, tokenizer=tokenizer).savefig(options.out / "order.png")
    dgemma.view.to_gif(run, options.out / "run.gif", tokenizer=tokenizer)
    names += ["entropy.png", "order.png", "run.gif"]
print(f"wrote {', '.join(names)} to {options.out.resolve()}")
