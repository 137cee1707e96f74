"""Watch the denoising: live in the terminal, then as a page to scrub, as plots and as an animation.

    python examples/02_watch_the_denoising.py --out pictures

run.html needs no network: open it in any browser, play it, hover over a position for its candidates. Where matplotlib
is installed there are also entropy.png (steps down, positions across), order.png (when each position settled) and
run.gif.
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
parser.add_argument("--steps", type=int, help="predictions a canvas may take; default: the checkpoint's own")
options = parser.parse_args()
options.out.mkdir(parents=True, exist_ok=True)

model = dgemma.DiffusionGemma.from_pretrained("dgemma/text", dtype=torch.float32)
tokenizer = dgemma.Tokenizer.from_pretrained("dgemma/text")
text = "The old man looked out to sea"
prompt = torch.tensor([tokenizer.encode(text)])

with LiveView(tokenizer, prefix=text) as view:  # draws on a terminal only
    out = dgemma.generate(model, prompt, max_new_tokens=128, steps=options.steps, seed=1, on_step=view, record=True)
print(text + tokenizer.decode(out.new_tokens[0]))
print(f"\n{out.steps.sum()} forwards for two canvases, {out.tokens_per_forward.item():.1f} tokens per forward")

run = out.trajectory
dgemma.view.to_html(run, options.out / "run.html", tokenizer=tokenizer)
written = ["run.html"]
if importlib.util.find_spec("matplotlib"):
    plot_entropy(run, tokenizer=tokenizer).savefig(options.out / "entropy.png")
    plot_order(run, tokenizer=tokenizer).savefig(options.out / "order.png")
    dgemma.view.to_gif(run, options.out / "run.gif", tokenizer=tokenizer)
    written += ["entropy.png", "order.png", "run.gif"]
print(f"wrote {', '.join(written)} to {options.out.resolve()}")
