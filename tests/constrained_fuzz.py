"""Random patterns and JSON schemas, random models, every sampler: all texts are valid by `re` and `jsonschema`.

    python tests/constrained_fuzz.py 10000

Each case draws a language, a tokenizer, a sampler with a noise, a number of blocks, and a batch of four rows. The model
predicts random logits, from nearly uniform to nearly certain, so that the language alone decides whether a text fits.
"""

import itertools
import json
import random
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import jsonschema
import torch
from torch import Tensor

import dgemma
from dgemma.diffusion.prediction import Prediction
from every_sampler import SAMPLERS, noises

CANVAS_LEN, BATCH_SIZE = 16, 4
WORDS = ["red", "green", "blue", "a b", 'say "hi"', "ü", "x\\y", "", "日本", "null"]


class Prefix:
    """A cache that holds the lengths of the rows only."""

    def __init__(self, lengths: Tensor) -> None:
        self.lengths = lengths

    batch_size = property(lambda self: len(self.lengths))
    num_slots = num_seen = property(lambda self: int(self.lengths.max()))

    def select(self, rows: Tensor) -> "Prefix":
        return Prefix(self.lengths[rows])

    def splice(self, rows: Tensor, donor: "Prefix") -> None:
        self.lengths = self.lengths.index_copy(0, rows, donor.lengths)


@dataclass(frozen=True)
class RandomModel(dgemma.Denoiser):
    """Predicts logits that depend on the canvas, the seed and nothing else."""

    vocab_size: int
    seed: int
    scale: float
    takes_noise_level = False

    @property
    def config(self) -> Any:
        return dgemma.presets.tiny().replace(vocab_size=self.vocab_size, canvas_length=CANVAS_LEN)

    generation = dgemma.GenerationDefaults()
    device = torch.device("cpu")

    def encode(self, tokens: Tensor, cache: Any = None, attention_mask: Any = None) -> Prefix:
        return Prefix(torch.full((len(tokens),), tokens.shape[1]) + (0 if cache is None else cache.lengths))

    def denoise(self, canvas: Tensor, cache: Any, self_cond: Any = None, self_cond_mask: Any = None) -> Prediction:
        generator = torch.Generator().manual_seed(self.seed + int(canvas.sum()) % 1000)
        return Prediction(self.scale * torch.randn(*canvas.shape, self.vocab_size, generator=generator))


def random_pattern(draw: random.Random, depth: int = 3) -> str:
    """A pattern that Python and Rust read alike."""
    kind = draw.randrange(7 if depth else 3)
    if kind == 0:
        return "".join(re.escape(draw.choice("abcXYZ019 .,-:{}\"'éß日😀")) for _ in range(draw.randint(1, 4)))
    if kind == 1:
        return draw.choice(["[a-z]", "[0-9]", "[A-Fa-f0-9]", "[^a-z\\n]", "[éß日]", "[ab ]"])
    if kind == 2:
        return f"{random_pattern(draw, 0)}{draw.choice(['?', '*', '+'])}" if depth else draw.choice(["x", "[0-9]", "é"])
    inner = random_pattern(draw, depth - 1)
    if kind == 3:
        return f"(?:{inner}){draw.choice(['?', '*', '+', '{2}', '{1,3}', '{0,2}', '{2,}'])}"
    other = random_pattern(draw, depth - 1)
    return f"(?:{inner}|{other})" if kind == 4 else inner + other


def random_schema(draw: random.Random, depth: int = 2) -> Any:
    kind = draw.choice(
        ["string", "integer", "number", "boolean", "null", "enum", "const"] + ["nested"] * 3 * (depth > 0)
    )
    if kind == "nested":
        kind = draw.choice(["array", "object", "object", "anyOf", "oneOf"])
    if kind == "string":
        lengths = [{"maxLength": draw.randint(0, 5)}, {"minLength": 1, "maxLength": draw.randint(1, 6)}]
        patterns = ["^[a-z]{2,4}$", "^[A-Z]\\d+$", "ab", "^x.y", "[^q]$", "^\\S+$", "^.*$", "^[ -~]+$"]
        others = [{"pattern": draw.choice(patterns)}, {"format": draw.choice(["date", "time", "uuid"])}]
        return {"type": "string", **draw.choice([{}, *lengths, *others])}
    if kind in ("integer", "number"):
        low, high = sorted((draw.randint(-200, 200), draw.randint(-200, 200)))
        bounds = {"minimum": low, "maximum": high + 1, "exclusiveMinimum": low, "exclusiveMaximum": high + 2}
        chosen = draw.choice(
            [(), ("minimum",), ("maximum",), ("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")]
        )
        return {"type": kind, **{name: bounds[name] for name in chosen}}
    if kind == "enum":
        return {"enum": draw.sample([*WORDS, 1, -2.5, None, True, [1, "a"], {"k": 0}], draw.randint(1, 4))}
    if kind == "const":
        return {"const": draw.choice([*WORDS, 7, None, False])}
    if kind == "array":
        least = draw.randint(0, 2)
        limits = {"minItems": least, "maxItems": least + draw.randint(0, 2)} if draw.random() < 0.6 else {}
        if draw.random() < 0.2:
            return {"type": "array", "prefixItems": [random_schema(draw, depth - 1) for _ in range(2)], "items": False}
        return {"type": "array", "items": random_schema(draw, depth - 1), **limits}
    if kind == "object":
        names = draw.sample(["a", "b", "long name", 'q"x', "ключ"], draw.randint(0, 3))
        properties = {name: random_schema(draw, depth - 1) for name in names}
        required = [name for name in names if draw.random() < 0.6]
        extra = {"additionalProperties": draw.choice([False, {"type": "integer"}])} if draw.random() < 0.5 else {}
        return {"type": "object", "properties": properties, "required": required, **extra}
    if kind == "anyOf":
        return {"anyOf": [random_schema(draw, depth - 1) for _ in range(2)]}
    return {"oneOf": [{"type": "boolean"}, {"type": "string", "maxLength": 3}, {"type": "null"}]}


def run_case(case: int, tokenizers: list[Any]) -> Counter:
    """Run one case and count its texts, or its refusal. An invalid text raises."""
    draw = random.Random(case)
    tokenizer = draw.choice(tokenizers)
    is_schema = draw.random() < 0.5
    source = random_schema(draw) if is_schema else random_pattern(draw)
    try:
        make = dgemma.JsonSchema if is_schema else dgemma.Regex
        constraint = make(source, tokenizer)
        shortest = int(constraint.automaton.shortest()[0])
    except ValueError:  # for example, an empty pattern of a schema
        return Counter(["refused"])
    num_blocks = draw.randint(1, 3)
    if shortest > num_blocks * CANVAS_LEN:
        num_blocks = -(-shortest // CANVAS_LEN) + draw.randint(0, 1)
    sampler = draw.choice(SAMPLERS)
    noise = draw.choice(noises(sampler, tokenizer.vocab_size))
    model = RandomModel(tokenizer.vocab_size, case, draw.choice([0.1, 1.0, 5.0, 40.0]))
    options: dict[str, Any] = {}
    if draw.random() < 0.2:
        options = draw.choice([{"top_k": 3}, {"top_p": 0.5}, {"temperature": 0.05}, {"temperature": 3.0}])
    out = dgemma.generate(
        model,
        torch.full((BATCH_SIZE, 1), 2),
        constraint=constraint,
        noise=noise,
        sampler=sampler,
        steps=draw.randint(1, 4),
        max_new_tokens=num_blocks * CANVAS_LEN,
        seed=case,
        eos_token_ids=1,
        progress=False,
        **options,
    )
    for row in out.new_tokens.tolist():
        text = tokenizer.decode(row[: row.index(1)] if 1 in row else row, skip_special=False)
        where = (case, source, type(sampler).__name__, noise.kind, text)
        if is_schema:
            jsonschema.validate(json.loads(text), source)
        else:
            assert re.fullmatch(source, text), where
    kind = "schemas" if is_schema else "patterns"
    return Counter(["cases", kind, f"{num_blocks} blocks", type(sampler).__name__, noise.kind] + ["texts"] * BATCH_SIZE)


def main() -> None:
    torch.set_num_threads(1)
    tokenizers = [dgemma.ByteTokenizer()] * 3 + [dgemma.Tokenizer.from_pretrained("dgemma/text")]
    counts: Counter = Counter()
    began = time.time()
    for case in itertools.count(int(sys.argv[2]) if len(sys.argv) > 2 else 0):
        counts += run_case(case, tokenizers)
        if counts["cases"] >= int(sys.argv[1]):
            break
        if counts["cases"] % 100 == 0:
            print(f"{counts['cases']} cases, {time.time() - began:.0f} s", flush=True)
    print(json.dumps(counts, indent=1))


if __name__ == "__main__":
    main()
