"""Train a small text model from scratch, by the published objective: a tokenizer, packed text, a checkpoint, samples.

    python examples/08_train_text.py                                    an excerpt and a toy model: shows that it runs
    python examples/text_corpus/prepare.py --out runs/corpus
    python examples/08_train_text.py --corpus runs/corpus --out runs/text --minutes 8      the `text` checkpoint: a GPU

The corpus is a folder with train.txt, validation.txt and test.txt, documents parted by a form feed. Its tokenizer and
token files are made once, beside them. The folder given by --out gets `checkpoint` (bfloat16; `from_pretrained` and
transformers read it), `results.json` and `samples.md`, which nobody has edited.
"""

import argparse
import gzip
import json
import lzma
import math
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import dgemma
from dgemma import draws
from dgemma.config import FULL, SLIDING
from dgemma.data.text import TextSource, TokenFile, read_documents, scan
from dgemma.data.vocabulary import train_tokenizer
from dgemma.train.initial import soften_attention
from dgemma.train.likelihood import evaluate
from dgemma.train.loop import StepRecord, TrainConfig, TrainResult, train
from dgemma.train.objective import Objective

EXCERPT = Path(dgemma.__file__).parent / "assets" / "text" / "held_out.txt"
SEPARATOR = "\f"
PROMPTS = (
    "",
    "It was a dark night, and the old captain",
    '"My dear Emma," said Mr. Knightley,',
    "And the LORD said unto",
    "The condition of our relations with foreign powers",
)
# name: what is passed to `generate`, beside the checkpoint's own defaults
SAMPLERS: dict[str, dict[str, Any]] = {
    "published sampler, at most 48 steps a canvas": {},
    "published sampler, at most 16 steps": {"steps": 16},
    "entropy bound 1 nat": {"sampler": dgemma.EntropyBound(bound=1.0)},
    "ancestral, 64 steps, temperature 0.8": {
        "sampler": dgemma.Ancestral(),
        "steps": 64,
        "stop": None,
        "temperature": 0.8,
    },
}


@dataclass(frozen=True, kw_only=True)
class Size:
    model: dgemma.ModelConfig
    num_canvases: int  # of a row
    batch_size: int
    lr: float
    num_samples: int  # of noise for each canvas of the test text
    prompts: tuple[str, ...]
    new_tokens: int


def text_model() -> dgemma.ModelConfig:
    """5.5 million weights: half of the experts' at work on each token, two layers that see everything."""
    return dgemma.presets.tiny().replace(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=192,
        canvas_length=64,
        num_hidden_layers=6,
        layer_types=(SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL),
        sliding_window=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_global_key_value_heads=1,
        global_head_dim=64,
        num_experts=8,
        top_k_experts=4,
        moe_intermediate_size=64,
    )


SIZES = {
    "text": Size(
        model=text_model(), num_canvases=8, batch_size=128, lr=2e-3, num_samples=16, prompts=PROMPTS, new_tokens=192
    ),
    "tiny": Size(
        model=dgemma.presets.tiny(),
        num_canvases=2,
        batch_size=8,
        lr=1e-2,
        num_samples=2,
        prompts=PROMPTS[:1],
        new_tokens=32,
    ),
}


def prepare(corpus: Path, vocab_size: int) -> tuple[dgemma.Tokenizer, dict[str, TokenFile]]:
    """The tokenizer and the token files of a corpus, made where they are missing."""

    def documents(part: str) -> Any:
        return read_documents(corpus / f"{part}.txt", separator=SEPARATOR)

    if (corpus / "tokenizer").is_dir():
        tokenizer = dgemma.Tokenizer.from_pretrained(corpus / "tokenizer")
    else:
        tokenizer = train_tokenizer((d.text for d in documents("train")), vocab_size, corpus / "tokenizer")
    files = {}
    for part in ("train", "validation", "test"):
        made = (corpus / "tokens" / part).is_dir()
        files[part] = (
            TokenFile.open(corpus / "tokens" / part)
            if made
            else TokenFile.write(documents(part), tokenizer, corpus / "tokens" / part)
        )
    return tokenizer, files


def split_excerpt(corpus: Path) -> None:
    """The excerpt that ships, as a corpus of its own."""
    documents = [d.text for d in read_documents(EXCERPT, separator=SEPARATOR)]
    for part, chosen in (("train", documents[2:]), ("validation", documents[:1]), ("test", documents[1:2])):
        (corpus / f"{part}.txt").write_text(SEPARATOR.join(chosen))


def make_objective(config: dgemma.ModelConfig) -> Objective:
    """The published one, over all canvases of a row at once."""
    return Objective(noise=dgemma.UniformNoise(config.vocab_size), canvas_len=config.canvas_length, canvases="all")


def fit(
    model: dgemma.DiffusionGemma, files: dict[str, TokenFile], size: Size, options: argparse.Namespace
) -> dict[str, Any]:
    """Train for a number of steps, or for as many as fit into the minutes."""
    objective = make_objective(size.model)
    rows = {"canvas_len": size.model.canvas_length, "num_canvases": size.num_canvases}
    source = TextSource(file=files["train"], **rows, batch_size=size.batch_size, seed=options.seed)
    config = TrainConfig(
        steps=options.steps or 10_000,
        batch_size=size.batch_size,
        lr=size.lr,
        betas=(0.9, 0.98),
        weight_decay=0.05,
        warmup=200 if options.steps is None else options.steps // 10,
        final_lr=0.02,
        ema_decay=0.998,
        precision="mixed" if model.device.type == "cuda" else "weights",
        compile=options.compile,
        checkpoint_every=10**9,  # the last step only, and where the run stops
        seed=options.seed,
    )
    shares = (0.15, 0.35, 0.6, 0.85, 1.0) if options.minutes else (math.inf,)
    budget, began = 60 * (options.minutes or 0), time.perf_counter()
    for share in shares:
        clock: list[float] = []

        def overdue(record: StepRecord, clock: list[float] = clock, share: float = share) -> bool:
            clock.append(time.perf_counter())
            return len(clock) > 10 and clock[-1] - began > share * budget

        result = train(
            model, objective, source, config, out=options.run, on_step=overdue if budget else None, allow_changes=True
        )
        print(f"{time.perf_counter() - began:.0f} s: step {result.step} of {config.steps}, {last(result)}", flush=True)
        if not result.interrupted or share == 1.0:
            break
        # The schedule must end when the time does, whatever else runs on the GPU: plan again as the pace shows itself.
        middle = len(clock) // 2
        pace = (clock[-1] - clock[middle]) / (len(clock) - 1 - middle)
        left = 0.97 * budget - (time.perf_counter() - began)
        config = replace(config, steps=result.step + max(1, int(left / pace)))
    steps, losses = result.log.column("loss")
    return {
        "steps": result.step,
        "planned_steps": config.steps,
        "batch_size": size.batch_size,
        "row_tokens": 1 + source.stride,
        "epochs": result.step * size.batch_size / source.num_rows,
        "tokens_per_second": result.tokens_per_second,
        "lr": size.lr,
        "loss": [[step, round(loss, 4)] for step, loss in zip(steps, losses, strict=True)][
            :: max(1, len(steps) // 200)
        ],
    }


def last(result: TrainResult) -> str:
    """The two terms of the last loss, in nats a token, and the pace."""
    terms = (f"{name} {result.log.column(f'loss/{name}')[1][-1]:.3f}" for name in ("decoder", "causal"))
    return f"{', '.join(terms)}, {result.tokens_per_second:,.0f} tokens/s"


def compare(model: dgemma.DiffusionGemma, tokenizer: dgemma.Tokenizer, file: TokenFile, size: Size) -> dict[str, Any]:
    """Bits per byte of the test text: the bound, the causal mode, and two compressors that see nothing else."""
    stride = size.model.canvas_length * size.num_canvases
    batch = scan(file, row_len=stride, context=stride)
    noise = dgemma.UniformNoise(size.model.vocab_size)
    found = evaluate(model, batch, noise, batch_size=64, num_samples=size.num_samples, num_bytes=file.num_bytes)
    print(found)
    texts = [tokenizer.decode(file.document(number)) for number in range(file.num_documents)]
    text = SEPARATOR.join(texts).encode()
    to_bits = found.num_tokens / file.num_bytes / math.log(2)
    bits = {
        "diffusion, at most": found.nelbo.value * to_bits,
        "causal, the same weights": found.causal.value * to_bits,
        "gzip -9, of the test text alone": 8 * len(gzip.compress(text, 9)) / len(text),
        "xz -9e, of the test text alone": 8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text),
    }
    for name, value in bits.items():
        print(f"{name:36}{value:7.3f} bits per byte")
    return {"bits_per_byte": bits, "num_bytes": file.num_bytes, "likelihood": found.summary()}


@torch.no_grad()
def word_by_word(
    model: dgemma.DiffusionGemma, prompt: torch.Tensor, *, num_tokens: int, temperature: float, seed: int
) -> list[int]:
    """The causal mode of the same weights: a token a forward. prompt: (1, P)."""
    cache, given, written = model.new_cache(1), prompt, []
    seeds = torch.tensor([seed], device=prompt.device)
    for step in range(num_tokens):
        logits = model.causal_logits(given, cache)[:, -1:]  # (1, 1, V)
        u = draws.uniform(seeds, torch.zeros_like(seeds), torch.full_like(seeds, step), 1, "token")
        given = dgemma.Prediction(logits / temperature).sample(u)  # (1, 1)
        written.append(int(given))
        if written[-1] == model.config.eos_token_id:
            break
    return written


def write_samples(model: dgemma.DiffusionGemma, tokenizer: dgemma.Tokenizer, size: Size, path: Path) -> None:
    """Every prompt by every sampler, seed 0: the first attempt, whatever it is."""
    tokens, attention_mask = tokenizer.encode_batch(size.prompts)
    prompt = {"prompt_tokens": tokens.to(model.device), "attention_mask": attention_mask.to(model.device)}
    seeds = [0] * len(size.prompts)
    lines = ["# Samples", "", "Seed 0 everywhere; nothing was chosen or edited. The prompt is in bold."]
    for name, options in SAMPLERS.items():
        out = dgemma.generate(model, **prompt, max_new_tokens=size.new_tokens, seed=seeds, progress=False, **options)
        lines += ["", f"## {name}"]
        for row, text in enumerate(size.prompts):
            forwards = f"{int(out.steps[row].sum())} forwards, {float(out.tokens_per_forward[row]):.1f} tokens each"
            lines += ["", _quote(text, tokenizer.decode(out.new_tokens[row])), "", f"({forwards})"]
    lines += ["", "## word by word, temperature 0.8"]
    for text in size.prompts:
        tokens, _ = tokenizer.encode_batch([text])
        written = word_by_word(model, tokens.to(model.device), num_tokens=size.new_tokens, temperature=0.8, seed=0)
        lines += ["", _quote(text, tokenizer.decode(written))]
    path.write_text("\n".join(lines) + "\n")
    print("\n".join(lines[:12]))


def _quote(prompt: str, text: str) -> str:
    shown = (f"**{prompt}**" if prompt else "") + text
    return "\n".join(f"> {line}" if line else ">" for line in shown.splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--corpus", type=Path, help="folder of train.txt, validation.txt, test.txt; default: an excerpt"
    )
    parser.add_argument("--out", type=Path, help="default: a temporary folder")
    parser.add_argument("--run", type=Path, help="where training keeps its own checkpoints; default: run, in --out")
    parser.add_argument("--size", choices=SIZES, help="default: text with a corpus, else tiny")
    parser.add_argument("--minutes", type=float, help="train for about this long")
    parser.add_argument("--steps", type=int, help="train for so many steps")
    parser.add_argument("--batch-size", type=int, help="rows of a step, instead of the size's own")
    parser.add_argument("--lr", type=float, help="instead of the size's own")
    parser.add_argument("--compile", action="store_true", help="compile the layers: longer to start, faster after")
    parser.add_argument("--prepare-only", action="store_true", help="make the tokenizer and the token files, and stop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    size = SIZES[options.size or ("text" if options.corpus else "tiny")]
    size = replace(size, batch_size=options.batch_size or size.batch_size, lr=options.lr or size.lr)
    if options.steps is None and options.minutes is None:
        options.steps = 10
    with tempfile.TemporaryDirectory() as scratch:
        options.out = options.out or Path(scratch) / "out"
        options.run = options.run or options.out / "run"
        corpus = options.corpus or Path(scratch)
        if options.corpus is None:
            split_excerpt(corpus)
        tokenizer, files = prepare(corpus, size.model.vocab_size)
        for part, file in files.items():
            print(f"{part}: {file.num_documents} documents, {file.num_tokens:,} tokens, {file.num_bytes:,} bytes")
        if not options.prepare_only:
            make_checkpoint(options, size, tokenizer, files)


def make_checkpoint(
    options: argparse.Namespace, size: Size, tokenizer: dgemma.Tokenizer, files: dict[str, TokenFile]
) -> None:
    torch.manual_seed(options.seed)
    model = dgemma.DiffusionGemma(size.model, device=options.device)
    soften_attention(model)
    print(f"{model.num_parameters():,} weights, {model.num_parameters(active=True):,} active", flush=True)
    began = time.perf_counter()
    results = {"parameters": model.num_parameters(), "train": fit(model, files, size, options)}
    results["train"]["seconds"] = time.perf_counter() - began

    # What ships is what is measured: weights rounded to bfloat16. The published stop tokens 106 and 50 are words here.
    model = model.to(torch.bfloat16)
    model.generation = dgemma.GenerationDefaults(eos_token_id=(tokenizer.eos_token_id,))
    model.save_pretrained(options.out / "checkpoint")
    tokenizer.save_pretrained(options.out / "checkpoint")
    model = dgemma.DiffusionGemma.from_pretrained(
        options.out / "checkpoint", dtype=torch.float32, device=options.device
    )
    results["test"] = compare(model, tokenizer, files["test"], size)
    results["seconds"] = time.perf_counter() - began
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    write_samples(model, tokenizer, size, options.out / "samples.md")


if __name__ == "__main__":
    main()
