"""Load the published 26B checkpoint and ask it a question. Needs the weights (52 GB) and a GPU that holds them.

    python examples/15_published_checkpoint.py --checkpoint google/diffusiongemma-26B-A4B-it "Why is the sky blue?"
    python examples/15_published_checkpoint.py --checkpoint path/to/folder --thinking "What is 17 · 23?"

The environment variable DGEMMA_CHECKPOINT can name the checkpoint too. Without a checkpoint or a GPU, the script prints
what it needs.
"""

import argparse
import os
import time

import torch

import dgemma
from dgemma.view.terminal import LiveView

PUBLISHED = "google/diffusiongemma-26B-A4B-it"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", default="Why is the sky blue?")
    parser.add_argument("--checkpoint", default=os.environ.get("DGEMMA_CHECKPOINT"), help="folder, or hub id")
    parser.add_argument("--thinking", action="store_true", help="let it think before it answers")
    arguments = parser.parse_args()
    if arguments.checkpoint is None or not torch.cuda.is_available():
        with torch.device("meta"):  # shapes, no memory
            model = dgemma.DiffusionGemma(dgemma.presets.diffusiongemma_26b_a4b())
        size, active = model.num_parameters(), model.num_parameters(active=True)
        print(f"{PUBLISHED}: {size:,} parameters, {active:,} of them active per token.")
        print(f"In bfloat16 that is {2 * size / 1e9:.1f} GB on a GPU. Not loaded:")
        if not torch.cuda.is_available():
            print("  torch finds no GPU.")
        if arguments.checkpoint is None:
            print(f"  no checkpoint; try --checkpoint {PUBLISHED}")
        return

    from dgemma_kernels import accelerate

    model = dgemma.DiffusionGemma.from_pretrained(arguments.checkpoint, dtype=torch.bfloat16, device="cuda")
    tokenizer = dgemma.Tokenizer.from_pretrained(arguments.checkpoint)
    fast = accelerate(model)
    prompt = torch.tensor([tokenizer.chat(arguments.question, thinking=arguments.thinking)], device="cuda")
    start = time.perf_counter()
    with LiveView(tokenizer) as view:
        out = dgemma.generate(fast, prompt, max_new_tokens=1024, on_step=view)
    seconds = time.perf_counter() - start
    reply = tokenizer.reply(out.new_tokens[0])
    if reply.thought:
        print(f"[{reply.thought}]\n")
    print(reply.answer)
    num_tokens = int((out.new_tokens != model.generation.pad_token_id).sum())
    print(f"\n{num_tokens} tokens in {seconds:.1f} s, {out.tokens_per_forward.item():.1f} per forward")


if __name__ == "__main__":
    main()
