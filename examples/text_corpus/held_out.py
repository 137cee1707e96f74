"""Print a model's answers to prompts that were used in no choice, and autoregressive answers of the same weights.

    python examples/text_corpus/held_out.py --model runs/text/checkpoint
    python examples/text_corpus/held_out.py --model dgemma/text --count 3

The prompts are in `held_out_prompts.toml`: everyday prose, holes in such prose, dialogues, and JSON from a sentence.
Every answer has seed 0, and none is selected. JSON is written twice: freely, and under a schema with the right keys. A
model without a chat template continues the text of the question.
"""

import argparse
import json
import tomllib
from pathlib import Path
from typing import Any

import torch

import dgemma

HOLE = 12  # tokens
TYPES = {str: "string", int: "integer"}
HELD_OUT = tomllib.loads(Path(__file__).with_name("held_out_prompts.toml").read_text("utf-8"))


class Writer:
    """A model with its tokenizer; each method returns a text."""

    def __init__(self, name: str, device: str, new_tokens: int) -> None:
        self.model = dgemma.DiffusionGemma.from_pretrained(name, dtype=torch.float32, device=device)
        self.tokenizer = dgemma.Tokenizer.from_pretrained(name)
        self.device, self.new_tokens = device, new_tokens

    def _rows(self, tokens: list[int]) -> torch.Tensor:
        return torch.tensor([tokens], device=self.device)

    def write(self, prompt: list[int], **options: Any) -> str:
        """Return the text after a prompt, by diffusion."""
        rows = self._rows(prompt)
        out = dgemma.generate(self.model, rows, max_new_tokens=self.new_tokens, progress=False, **options)
        return self.tokenizer.decode(out.new_tokens[0])

    def write_causal(self, prompt: list[int]) -> str:
        """Return the text after a prompt, token by token."""
        options = {"max_new_tokens": self.new_tokens, "temperature": 0.8}
        return self.tokenizer.decode(dgemma.generate_causal(self.model, self._rows(prompt), **options)[0])

    def fill(self, left: str, right: str) -> str:
        """Return the text of a hole between two texts."""
        before, after = self.tokenizer.encode(left.rstrip(" ")), self.tokenizer.encode(right, bos=False)
        rows = self._rows(before + [self.tokenizer.pad_token_id] * HOLE + after)
        out = dgemma.infill(self.model, rows, [(len(before), len(before) + HOLE)], progress=False)
        return self.tokenizer.decode(out.tokens[0, len(before) : len(before) + HOLE])

    def chat(self, question: str) -> list[int]:
        """Return the tokens of a question."""
        return self.tokenizer.chat(question) if self.tokenizer.has_chat_template else self.tokenizer.encode(question)


def schema_of(answer: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with the keys and types of an answer."""
    properties = {key: {"type": TYPES[type(value)]} for key, value in answer.items()}
    return {"type": "object", "properties": properties, "required": list(answer), "additionalProperties": False}


def parse(text: str) -> Any:
    """Return the value of a JSON text; None if it is not valid."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="dgemma/text", help="a checkpoint with a tokenizer (%(default)s)")
    parser.add_argument("--count", type=int, default=20, help="use the first few of each list (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens per answer (%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    writer = Writer(args.model, args.device, args.new_tokens)
    print("# Everyday prose")
    for prompt in HELD_OUT["everyday"][: args.count]:
        tokens = writer.tokenizer.encode(prompt)
        print(f"\n{prompt}\n  diffusion:      {writer.write(tokens)}\n  autoregressive: {writer.write_causal(tokens)}")
    print("\n# Holes")
    for left, right in HELD_OUT["infills"][: args.count]:
        print(f"\n{left.rstrip(' ')}[{writer.fill(left, right)}]{right}")
    print("\n# Dialogues")
    for question in HELD_OUT["dialogues"][: args.count]:
        tokens = writer.chat(question)
        print(
            f"\n{question}\n  diffusion:      {writer.write(tokens)}\n  autoregressive: {writer.write_causal(tokens)}"
        )
    print("\n# JSON from a sentence")
    right_free = right_schema = 0
    cases = HELD_OUT["extractions"][: args.count]
    for case in cases:
        tokens = writer.chat(case["prompt"])
        free = writer.write(tokens)
        schema = writer.write(tokens, constraint=dgemma.JsonSchema(schema_of(case["answer"]), writer.tokenizer))
        right_free += parse(free) == case["answer"]
        right_schema += parse(schema) == case["answer"]
        print(f"\n{case['prompt']}\n  free:   {free}\n  schema: {schema}\n  right:  {json.dumps(case['answer'])}")
    print(f"\nJSON right: {right_free} of {len(cases)} free, {right_schema} of {len(cases)} under the schema")


if __name__ == "__main__":
    main()
