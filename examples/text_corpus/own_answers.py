"""Let a model answer the prompts of a corpus token by token, for training its diffusion mode on what it wrote.

    python examples/text_corpus/own_answers.py --model runs/text3/checkpoint --corpus runs/corpus3 --out runs/corpus4
    python examples/08_train_text.py --start runs/text3/checkpoint --corpus runs/corpus4 --out runs/text4 \\
        --answers --holes 0.25 --minutes 3.5 --fast

This is sequence-level self-distillation. In its causal mode a model writes one token per forward, and each token knows
those before it. At a low temperature its texts are also easier to predict than the corpus. So a model that has learned
from them is sure of more tokens at once, and writes a canvas in fewer forwards.

The new corpus has its own answers.jsonl; everything else in it is the old one. Own answers replace a share of the
beginnings of texts. Turns of dialogues keep their answers, because those are right. An answer that did not end within
--new-tokens is left out.
"""

import argparse
import json
import random
import shutil
import time
from pathlib import Path

import torch

import dgemma


def answer(
    model: dgemma.DiffusionGemma, tokenizer: dgemma.Tokenizer, prompts: list[str], args: argparse.Namespace
) -> list[str | None]:
    """Return the answers to prompts of about equal length; None where an answer did not end."""
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    length = max(map(len, encoded))
    rows = torch.full((len(prompts), length), tokenizer.pad_token_id)
    for row, tokens in zip(rows, encoded, strict=True):
        row[length - len(tokens) :] = torch.tensor(tokens)
    written = dgemma.generate_causal(
        model,
        rows.to(model.device),
        attention_mask=(torch.arange(length) >= torch.tensor([[length - len(t)] for t in encoded])).to(model.device),
        max_new_tokens=args.new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=[random.Random(prompt).getrandbits(31) for prompt in prompts],
    ).tolist()
    end = tokenizer.eos_token_id
    return [tokenizer.decode(row[: row.index(end)]) if end in row else None for row in written]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a checkpoint with a tokenizer")
    parser.add_argument("--corpus", type=Path, required=True, help="a corpus with answers.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="folder of the new corpus")
    parser.add_argument("--share", type=float, default=0.75, help="of the texts that get an own answer (%(default)s)")
    parser.add_argument("--count", type=int, help="use the first few lines of answers.jsonl; default: all")
    parser.add_argument("--new-tokens", type=int, default=256, help="longest answer (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    model = dgemma.DiffusionGemma.from_pretrained(args.model, dtype=torch.float32, device=args.device)
    tokenizer = dgemma.Tokenizer.from_pretrained(args.model)
    lines = [json.loads(line) for line in (args.corpus / "answers.jsonl").read_text("utf-8").splitlines()]
    lines = lines[: args.count]
    rng = random.Random(0)
    chosen = [line for line in lines if not line["prompt"].startswith("<|turn>") and rng.random() < args.share]
    chosen.sort(key=lambda line: len(line["prompt"]))
    began, num_left_out = time.perf_counter(), 0
    for start in range(0, len(chosen), args.batch_size):
        batch = chosen[start : start + args.batch_size]
        for line, text in zip(batch, answer(model, tokenizer, [line["prompt"] for line in batch], args), strict=True):
            line["answer"] = text
            num_left_out += text is None
        seconds = time.perf_counter() - began
        print(f"{start + len(batch)} of {len(chosen)} answers, {num_left_out} left out, {seconds:.0f} s", flush=True)
    shutil.copytree(args.corpus, args.out, dirs_exist_ok=True, ignore=shutil.ignore_patterns("answers*"))
    kept = [json.dumps(line, ensure_ascii=False) for line in lines if line["answer"]]
    (args.out / "answers.jsonl").write_text("\n".join(kept) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
