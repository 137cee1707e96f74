"""Compare settings of generation on validation texts: dialogues and everyday prose that are not in the training text.

    python examples/text_corpus/choose.py --model runs/text/checkpoint --count 200 --out runs/text/choice.json
    python examples/text_corpus/choose.py --count 2

The defaults of the checkpoint are chosen by this table, never by the held-out prompts. Per setting, it has the share
of right JSON, and that of short answers written exactly as the reference, which other right answers are not. For prose
it has the autoregressive nats per token of the same weights, the doubled words per thousand, and tokens per forward.
"""

import argparse
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from dialogues import write_dialogue
from everyday import write_everyday
from held_out import parse

import dgemma
from dgemma.sampling import P2, EntropyBound, LinearTemperature, Threshold

VALIDATION = 1  # the seed of validation texts, as in prepare.py
SHORT = ("reading", "arithmetic", "compare")  # kinds of dialogues with short answers
BEGINNING = 8  # words of a text that is continued
_DOUBLED = re.compile(r"\b(\w+) \1\b")


def settings(vocab_size: int, mask_token_id: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the options of each setting."""
    noises = {"mask": dgemma.MaskNoise(vocab_size, mask_token_id=mask_token_id)}
    noises["uniform"] = dgemma.UniformNoise(vocab_size)
    samplers: dict[str, list[tuple[Any, int]]] = {
        "mask": [
            *((P2(), steps) for steps in (12, 16, 24, 32)),
            (Threshold(tau=0.9), 64),
            (EntropyBound(bound=0.3), 64),
        ],
        "uniform": [(EntropyBound(bound=bound), 24) for bound in (0.3, 1.0, 3.0)],
    }
    for kind, noise in noises.items():
        stop = {} if kind == "uniform" else {"stop": None}
        for (sampler, steps), (start, end) in itertools.product(samplers[kind], ((0.6, 0.3), (0.8, 0.4))):
            options = {"sampler": sampler, "steps": steps, "temperature": LinearTemperature(start=start, end=end)}
            yield f"{kind}, {sampler}, {steps} steps, {start} to {end}", {"noise": noise, **options, **stop}


def right_json(text: str, answer: str) -> bool:
    return parse(text) == json.loads(answer)


def right_words(text: str, answer: str) -> bool:
    return text.strip() == answer.strip()


class Judge:
    """A model with its validation prompts; `measure` returns the numbers of one setting."""

    def __init__(self, name: str, device: str, count: int, batch_size: int) -> None:
        self.model = dgemma.DiffusionGemma.from_pretrained(name, dtype=torch.float32, device=device)
        self.tokenizer = dgemma.Tokenizer.from_pretrained(name)
        self.batch_size = batch_size
        each = -(-count // len(SHORT))
        self.json = [self._turn(number, "extraction") for number in range(count)]
        self.short = [self._turn(number, kind) for kind in SHORT for number in range(each)]
        texts = [write_everyday(number, VALIDATION) for number in range(count)]
        self.prose = [self.tokenizer.encode(" ".join(text.split(" ")[:BEGINNING])) for text in texts]

    def _turn(self, number: int, kind: str) -> tuple[list[int], str]:
        """Return the prompt of a dialogue's last turn, and its answer."""
        dialogue = write_dialogue(number, VALIDATION, kind)
        *before, last = dialogue.messages
        if self.tokenizer.has_chat_template:
            return self.tokenizer.chat(before), last["content"]
        return self.tokenizer.encode(before[-1]["content"]), last["content"]

    def _write(self, prompts: list[list[int]], options: dict[str, Any]) -> list[Any]:
        rows = [torch.tensor(prompt) for prompt in prompts]
        common = {"batch_size": self.batch_size, "max_new_tokens": 64, "seed": 0, "progress": False}
        return list(dgemma.generate_many(self.model, rows, tokenizer=self.tokenizer, **common, **options))

    def _share(
        self, cases: list[tuple[list[int], str]], options: dict[str, Any], is_right: Callable[[str, str], bool]
    ) -> float:
        written = self._write([prompt for prompt, _ in cases], options)
        return sum(is_right(each.text, answer) for each, (_, answer) in zip(written, cases, strict=True)) / len(cases)

    def _until_end(self, tokens: list[int]) -> list[int]:
        """Return the tokens up to the first end of a text."""
        ends = [at for at, token in enumerate(tokens) if token in self.model.generation.eos_token_id]
        return tokens[: ends[0] + 1] if ends else tokens

    def measure(self, options: dict[str, Any]) -> dict[str, float]:
        written = self._write(self.prose, options)
        nats = tokens = 0.0
        for prompt, each in zip(self.prose, written, strict=True):
            new = self._until_end(each.new_tokens.tolist())
            row = torch.tensor([prompt + new], device=self.model.device)
            with torch.no_grad():
                log_probs = self.model.causal_logits(row[:, :-1]).log_softmax(-1).gather(-1, row[:, 1:, None])
            nats, tokens = nats - float(log_probs[0, len(prompt) - 1 :].sum()), tokens + len(new)
        text = " ".join(each.text for each in written)
        return {
            "json": self._share(self.json, options, right_json),
            "exact": self._share(self.short, options, right_words),
            "nats": nats / tokens,
            "doubled": 1000 * len(_DOUBLED.findall(text)) / max(1, len(text.split())),
            "tokens_per_forward": tokens / sum(int(each.steps.sum()) for each in written),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="dgemma/text", help="a checkpoint with a tokenizer (%(default)s)")
    parser.add_argument("--count", type=int, default=100, help="prompts of each kind (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=128, help="prompts at a time (%(default)s)")
    parser.add_argument("--only", default="", help="only settings with this text in their name")
    parser.add_argument("--out", type=Path, help="a JSON file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.count < 1:
        parser.error(f"--count must be at least 1, got {args.count}.")
    judge = Judge(args.model, args.device, args.count, args.batch_size)
    named = dict(settings(judge.model.config.vocab_size, judge.tokenizer.mask_token_id))
    width = max(map(len, named))
    print(f"{'setting':{width}}{'JSON':>8}{'exact':>8}{'nats':>8}{'doubled':>9}{'tokens/forward':>16}")
    found = {}
    for name, options in named.items():
        if args.only not in name:
            continue
        found[name] = row = judge.measure(options)
        shares = f"{row['json']:8.1%}{row['exact']:8.1%}{row['nats']:8.2f}{row['doubled']:9.1f}"
        print(f"{name:{width}}{shares}{row['tokens_per_forward']:16.2f}", flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
