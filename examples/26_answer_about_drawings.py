"""Images: a model learns from random weights to answer questions about drawings.

A drawing has one to three shapes of different colours, in different quarters of the paper. A question asks for the
colour in a quarter, for the quarter of a colour, or for the number of shapes. One in eight arrangements of kinds,
colours and quarters is for tests, and is in no training drawing.

The model has a vision tower of one layer. `ImageProcessor` cuts a drawing into 64 tokens, and the answer is a canvas of
four words. The script then asks again with the drawing of another question.

    python examples/26_answer_about_drawings.py
    dgemma chat -m drawings/model --image drawings/drawing.png        with --out drawings: ask yourself

Right answers, of 300 questions; one run each. The 1000 updates took 157 and 159 CPU seconds: about three minutes on one
core.

                            seed 0    seed 1
    with its drawing        98.0 %    97.0 %
    with another drawing    32.3 %    29.3 %
    most frequent answers   33.0 %    33.0 %
"""

import argparse
import json
import random
import tempfile
import time
import zlib
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import tokenizers
import torch
from PIL import Image, ImageDraw

import dgemma
from dgemma.model.config import FULL, SLIDING
from dgemma.model.vision.images import Images
from dgemma.train import CrossEntropy, Objective, TrainBatch, TrainConfig, muon, soften_attention, train

COLOURS = {"red": (200, 30, 30), "green": (20, 130, 40), "blue": (30, 60, 200), "black": (20, 20, 20)}
KINDS = ("circle", "square", "triangle", "cross")
QUARTERS = ("top left", "top right", "bottom left", "bottom right")
MARKERS = ("<pad>", "<eos>", "<bos>", "<mask>", "<|image>", "<|image|>", "<image|>")
NUMBERS = ("one", "two", "three")
ASKED = ("top", "bottom", "left", "right", "what", "where", "how", "many", "colour", "is", "?")
WORDS = (*MARKERS, *COLOURS, *NUMBERS, *ASKED)
SIDE, PATCH = 64, 16  # pixels per side of a quarter of the paper, and of a patch, which is here also a token
TEMPLATE = """{{ bos_token }}{% for message in messages %}{% if message.content is string %}{{ message.content }}
{% else %}{% for part in message.content %}{{ "<|image|>" if part.type == "image" else part.text }}
{% endfor %}{% endif %}{% endfor %}"""
CANVAS = 4  # words of an answer, with end-of-text
NOISE = dgemma.MaskNoise(len(WORDS), mask_token_id=WORDS.index("<mask>"))
PROCESSOR = dgemma.ImageProcessor(max_soft_tokens=70, patch_size=PATCH, pooling_kernel_size=1)


class Shape(NamedTuple):
    kind: str
    colour: str
    quarter: int


class Question(NamedTuple):
    kind: str
    images: Images
    tokens: list[int]  # of the prompt
    answer: str


def make_shapes(rng: random.Random, *, test: bool) -> list[Shape]:
    """Return one to three shapes of different colours in different quarters, in a test's or another arrangement."""
    while True:
        count = rng.choice((1, 2, 3))
        places = zip(rng.sample(list(COLOURS), count), rng.sample(range(4), count), strict=True)
        shapes = [Shape(rng.choice(KINDS), colour, quarter) for colour, quarter in places]
        if (zlib.crc32(repr(sorted(shapes)).encode()) % 8 == 0) == test:
            return shapes


def draw(shapes: list[Shape], rng: random.Random) -> Image.Image:
    """Draw each shape in its quarter of the paper, at a random place and size."""
    paper = Image.new("RGB", (2 * SIDE, 2 * SIDE), "white")
    pen = ImageDraw.Draw(paper)
    for kind, colour, quarter in shapes:
        r, fill = rng.randint(22, 26), COLOURS[colour]
        x, y = (SIDE * half + SIDE // 2 + rng.randint(-4, 4) for half in (quarter % 2, quarter // 2))
        if kind == "circle":
            pen.ellipse((x - r, y - r, x + r, y + r), fill)
        elif kind == "square":
            pen.rectangle((x - r, y - r, x + r, y + r), fill)
        elif kind == "triangle":
            pen.polygon(((x, y - r), (x - r, y + r), (x + r, y + r)), fill)
        else:
            pen.rectangle((x - r, y - r // 3, x + r, y + r // 3), fill)
            pen.rectangle((x - r // 3, y - r, x + r // 3, y + r), fill)
    return paper


def make_question(rng: random.Random, *, test: bool) -> Question:
    shapes = make_shapes(rng, test=test)
    shape, kind = shapes[0], rng.choice(("colour", "where", "count"))
    if kind == "colour":
        text, answer = f"what colour is {QUARTERS[shape.quarter]} ?", shape.colour
    elif kind == "where":
        text, answer = f"where is {shape.colour} ?", QUARTERS[shape.quarter]
    else:
        text, answer = "how many ?", NUMBERS[len(shapes) - 1]
    images = PROCESSOR([draw(shapes, rng)])
    start, image, end = (WORDS.index(marker) for marker in MARKERS[-3:])
    tokens = [WORDS.index("<bos>"), start, *[image] * images.num_tokens[0], end, *encode(text)]
    return Question(kind, images, tokens, answer)


def encode(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


def make_batch(questions: list[Question]) -> TrainBatch:
    texts = [[*question.tokens, *encode(question.answer)] for question in questions]
    longest = max(map(len, texts))
    return TrainBatch(
        tokens=torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts]),
        prompt_len=torch.tensor([len(question.tokens) for question in questions]),
        length=torch.tensor([len(text) for text in texts]),
        images=tuple(question.images for question in questions),
    )


def answer(model: dgemma.DiffusionGemma, questions: list[Question], images: list[Images]) -> list[str]:
    """Return the model's answers to questions about these images."""
    longest = max(len(question.tokens) for question in questions)
    mask = torch.tensor([[at >= longest - len(q.tokens) for at in range(longest)] for q in questions])
    rows = [[*[0] * (longest - len(q.tokens)), *q.tokens] for q in questions]
    out = dgemma.generate(
        model,
        torch.tensor(rows, device=model.device),
        attention_mask=mask.to(model.device),
        images=images,
        sampler=dgemma.EntropyBound(greedy=True),
        progress=False,
    )
    return [" ".join(WORDS[token] for token in row if token >= len(MARKERS)) for row in out.new_tokens.tolist()]


def new_model(device: str) -> dgemma.DiffusionGemma:
    tiny = dgemma.presets.tiny(vision=True)
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "patch_size": PATCH}
    config = tiny.replace(
        vocab_size=len(WORDS),
        intermediate_size=128,
        canvas_length=CANVAS,
        layer_types=(SLIDING, SLIDING, FULL),
        sliding_window=128,  # the whole prompt
        num_experts=1,
        top_k_experts=1,
        moe_intermediate_size=8,
        initializer_range=tiny.hidden_size**-0.5,  # embeddings as large as the outputs of layers
        **{f"{marker[1:4]}_token_id": WORDS.index(marker) for marker in MARKERS[:3]},
        vision_config={**tiny.vision_config, **vision, "pooling_kernel_size": 1, "position_embedding_size": 70},
        carried=dict(zip(("boi_token_id", "image_token_id", "eoi_token_id"), (4, 5, 6), strict=True)),
    )
    model = dgemma.DiffusionGemma(config, device=device)
    model.generation = dgemma.GenerationDefaults(max_new_tokens=CANVAS, max_denoising_steps=4, eos_token_id=(1,))
    soften_attention(model)
    with torch.no_grad():  # pixels and positions get the same weight
        model.vision.patch_embedder.input_proj.weight.normal_(std=config.vision.patch_dim**-0.5)
        model.vision.patch_embedder.position_embedding_table.normal_(std=0.7)
    return model


def save_processors(folder: Path) -> None:
    """Write the image processor, a tokenizer of whole words, and a chat template that repeats the turns."""
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": asdict(PROCESSOR)}))
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>")
    )
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(MARKERS))
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {f"{marker[1:-1]}_token": marker for marker in MARKERS[:4]}
    names |= {"unk_token": "<pad>", "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def report(name: str, questions: list[Question], answers: list[str]) -> None:
    """Print the share of right answers, of all questions and of each kind."""
    right = [question.answer == answer for question, answer in zip(questions, answers, strict=True)]
    kinds = Counter(question.kind for question in questions)
    right_kinds = Counter(question.kind for question, is_right in zip(questions, right, strict=True) if is_right)
    parts = ", ".join(f"{kind} {right_kinds[kind] / kinds[kind]:.0%}" for kind in sorted(kinds))
    print(f"{name:22} {sum(right) / len(right):6.1%} right ({parts})", flush=True)


def main(args: argparse.Namespace, out: Path) -> None:
    torch.manual_seed(args.seed)
    model = new_model(args.device)
    tests = [make_question(random.Random(f"test {number}"), test=True) for number in range(args.tests)]

    def source(step: int, rows: range) -> TrainBatch:
        names = (f"{args.seed} {step} {row}" for row in rows)
        return make_batch([make_question(random.Random(name), test=False) for name in names])

    loss = CrossEntropy(scored="noised")
    objective = Objective(noise=NOISE, canvas_len=CANVAS, causal_weight=0.0, loss=loss, t_range=(0.3, 1.0))
    config = TrainConfig(steps=args.steps, batch_size=16, lr=3e-3, warmup=20, precision="weights", seed=args.seed)
    began = time.perf_counter()
    with ExitStack() as stack:
        if args.fast:
            from dgemma_kernels import accelerate_training  # needs Triton

            stack.enter_context(accelerate_training(model))
        train(model, objective, source, config, out=out / "run", optimizer=lambda named: muon(named, lr=config.lr))
    print(f"{model.num_parameters():,} weights, {args.steps} updates in {time.perf_counter() - began:.0f} s")
    images = [question.images for question in tests]
    report("with its drawing", tests, answer(model, tests, images))
    report("with another drawing", tests, answer(model, tests, images[1:] + images[:1]))
    frequent = {
        kind: Counter(question.answer for question in tests if question.kind == kind).most_common(1)[0][0]
        for kind in {question.kind for question in tests}
    }
    report("most frequent answers", tests, [frequent[question.kind] for question in tests])
    model.save_pretrained(out / "model")
    save_processors(out / "model")
    draw(make_shapes(random.Random("drawing"), test=True), random.Random(0)).save(out / "drawing.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="updates (%(default)s)")
    parser.add_argument("--tests", type=int, default=300, help="questions to test with (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for the run, the model and a drawing; default: temporary")
    parser.add_argument("--fast", action="store_true", help="train with kernels, on a GPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as scratch:
        arguments = parser.parse_args()
        main(arguments, arguments.out or Path(scratch))
