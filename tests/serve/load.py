"""Load test of `dgemma serve`: many clients at once, each of which checks that it gets its own answer.

python tests/serve/load.py --clients 200 --seconds 60 --max-queue 128

The expected texts come from `dgemma.generate`, one prompt at a time. In a batch, float32 sums round differently, which
can decide a near tie: such a text is counted as "rounded" if it is closest to the text of its own prompt, else as
"crossed". A client that gets a 429 waits and asks again. The last line is JSON: all counts, and latencies.
"""

import argparse
import asyncio
import collections
import difflib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

import openai
import torch

import dgemma
from dgemma.model.layout import lay_out_by_column

WORDS = ("Once upon a time", "The dog was", "Lily had a red ball.", "It was a dark night", "Tom ran to the park")


def expected_texts(name: str, count: int, steps: int) -> list[tuple[str, str]]:
    """Return prompts and the text that follows each, with its own seed."""
    model, tokenizer = dgemma.DiffusionGemma.from_pretrained(name), dgemma.Tokenizer.from_pretrained(name)
    lay_out_by_column(model)  # as the server does
    pairs = []
    for seed in range(count):
        prompt = f"{WORDS[seed % len(WORDS)]} {'and then ' * (seed % 4)}"
        tokens = torch.tensor([tokenizer.encode(prompt)])
        out = dgemma.generate(model, tokens, seed=[seed], max_new_tokens=1, steps=steps, progress=False)
        pairs.append((prompt, tokenizer.decode(out.new_tokens[0])))
    return pairs


class Load:
    """The counts of a run, and its clients."""

    def __init__(self, name: str, port: int, pairs: list[tuple[str, str]], steps: int, max_tokens: int) -> None:
        self.client = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=300
        )
        self.name, self.pairs, self.steps, self.max_tokens = name, pairs, steps, max_tokens
        self.seconds: list[float] = []
        self.counts: collections.Counter[str] = collections.Counter()

    async def ask(self, number: int) -> None:
        seed = number % len(self.pairs)
        prompt, _ = self.pairs[seed]
        options: dict[str, Any] = {"seed": seed, "max_tokens": self.max_tokens, "extra_body": {"steps": self.steps}}
        start = time.monotonic()
        try:
            answer = await self.client.completions.create(model=self.name, prompt=prompt, **options)
        except openai.RateLimitError:
            self.counts["refused_429"] += 1
            await asyncio.sleep(1)
            return
        except openai.OpenAIError as error:
            self.counts[f"error {type(error).__name__}: {error.__cause__!r}"[:200]] += 1
            return
        self.seconds.append(time.monotonic() - start)
        self.counts[self.judge(answer.choices[0].text, seed)] += 1

    def judge(self, text: str, own: int) -> str:
        if text == self.pairs[own][1]:
            return "right"
        likeness = [difflib.SequenceMatcher(None, text, want, autojunk=False).ratio() for _, want in self.pairs]
        return "rounded" if max(likeness) == likeness[own] else "crossed"

    async def run(self, clients: int, seconds: float) -> None:
        end = time.monotonic() + seconds

        async def work(number: int) -> None:
            while time.monotonic() < end:
                await self.ask(number)
                number += clients

        await asyncio.gather(*(work(number) for number in range(clients)))


def start_server(name: str, *options: str) -> tuple[subprocess.Popen[bytes], int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "dgemma", "serve", "-m", name, "--port", str(port), *options]
    process = subprocess.Popen(command, env=os.environ)
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return process, port
        except OSError:
            time.sleep(0.2)
    raise SystemExit("The server did not start.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="dgemma/text")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-queue", type=int, default=128)
    parser.add_argument("--steps", type=int, default=4, help="forwards of each answer, which has one canvas")
    arguments = parser.parse_args()
    pairs = expected_texts(arguments.model, 23, arguments.steps)
    canvas_len = dgemma.DiffusionGemma.from_pretrained(arguments.model).config.canvas_length
    options = ("--batch-size", str(arguments.batch_size), "--max-queue", str(arguments.max_queue))
    process, port = start_server(arguments.model, *options)
    try:
        load = Load(arguments.model, port, pairs, arguments.steps, canvas_len)
        start = time.monotonic()
        asyncio.run(load.run(arguments.clients, arguments.seconds))
        elapsed = time.monotonic() - start
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    ordered = sorted(load.seconds)
    report = {
        **vars(arguments),
        **load.counts,
        "answers_per_s": len(ordered) / elapsed,
        "median_s": statistics.median(ordered),
        "p99_s": ordered[int(0.99 * (len(ordered) - 1))],
        "slowest_s": ordered[-1],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
