"""Train a small text model from scratch under uniform and mask noise: a tokenizer, packed text, a checkpoint.

    python examples/08_train_text.py                                    an excerpt and a toy model, to see that it runs

Commands that train a text model on one GPU, and sample from it:

    python examples/text_corpus/prepare.py --out runs/corpus
    python examples/08_train_text.py --corpus runs/corpus --out runs/text --minutes 23 --fast
    python examples/18_samples.py --model runs/text/checkpoint --out runs/text/samples.md

One step in three is of running text (train.txt), the others are of answers (answers.jsonl). Prompts are clean and not
scored, and the canvases of an answer begin where its prompt ends, as in generation. --holes is the share of canvases
that are frozen except for holes, to learn infilling. Canvases get uniform noise or masks.

With --own-minutes, a second part follows. The causal mode, which writes the best texts, continues beginnings of the
training text at a low temperature. All modes learn from these texts too: two steps in five. The learning rate falls in
the last part only. docs/learning.md has what this changed in an earlier model.

The --out folder will contain `checkpoint` (bfloat16, for `from_pretrained` and transformers), `results.json`, `run`
with the log of the losses, and `own` with the texts and the log of the second part. Run the same command again to
resume. The likelihood is measured under both noises, on test.txt and on every other text of the corpus whose name ends
in _test.txt.
"""

import argparse
import json
import re
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch

import dgemma
from dgemma.data.corpus import SEPARATOR, Corpus, prepare_corpus
from dgemma.data.text import TextSource, TokenFile, permute, read_documents, scan
from dgemma.sampling.named import describe_noise
from dgemma.train import Objective, TrainConfig, balanced_routers, evaluate, muon, soften_attention, train
from dgemma.train.batch import TrainBatch
from dgemma.train.log import TrainStep

NUMBERS = {  # defaults with and without a GPU
    "steps": (4000, 10, "training steps"),
    "batch-size": (64, 4, "rows per step"),
    "canvases": (8, 2, "canvases per row"),
    "draws": (2, 1, "draws of noise per canvas"),
    "own-texts": (120_000, 8, "texts that the causal mode writes for the second part"),
}
SHARES = (1, 2, 2)  # steps of text, answers and own texts; the last two are short, so a step of them has fewer tokens
BEGINNINGS, LONGEST, ROWS = (4, 28), 128, 4096  # of own texts: tokens of a prompt and of its answer, and of a batch
_REPEATED = re.compile(r"(?s)\b(\w+\W+\w+\W+\w+\W+\w+)\b.*\b\1\b")
EXCERPT = Path(dgemma.__file__).parent / "assets" / "text" / "held_out.txt"


@dataclass(frozen=True, kw_only=True, eq=False)
class AnswerSource:
    """Rows of several prompts with their answers: a `BatchSource` of one shape, for prompts of all lengths.

    Canvases start at fixed places of a row, so the tokens of a prompt end where a canvas starts. The places before it
    are frozen and belong to a document of their own, which nothing else sees. The prompt is frozen as well. Canvases
    that are frozen as a whole are not denoised. So at most `num_open` canvases of a row are open, about as many as an
    average row needs. Of a longer answer, the first canvases are open in one epoch, the last ones in the next.
    """

    file: TokenFile
    canvas_len: int
    num_canvases: int
    batch_size: int
    seed: int = 0

    @property
    def num_open(self) -> int:
        return -(-5 * self.num_canvases // 8)

    @cached_property
    def _sizes(self) -> np.ndarray:
        """The numbers of canvases of each prompt, of its answer, cut to fit a row, and of the open part, (3, D)."""
        answer_len = np.diff(self.file.starts) - self.file.prompt_len
        prompt, answer = -(-np.stack((self.file.prompt_len, answer_len)) // self.canvas_len)
        answer = np.minimum(answer, self.num_canvases - prompt)
        return np.stack((prompt, answer, np.minimum(answer, self.num_open)))

    @cached_property
    def _rows(self) -> list[list[int]]:
        """The documents of each row. Each document goes to the fullest row that has room for it."""
        empty = self.num_canvases, self.num_open
        rooms = [(room, opened) for room in range(self.num_canvases + 1) for opened in range(self.num_open + 1)]
        with_room: dict[tuple[int, int], list[list[int]]] = {room: [] for room in rooms}  # the fullest first
        for number, (prompt, answer, opened) in enumerate(self._sizes.T.tolist()):
            if opened < 1:  # a prompt without room for an answer
                continue
            size = prompt + answer
            fitting = (room for room in rooms if room[0] >= size and room[1] >= opened and with_room[room])
            room = next(fitting, empty)
            row = with_room[room].pop() if with_room[room] else []
            row.append(number)
            with_room[room[0] - size, room[1] - opened].append(row)
        return [row for rows in with_room.values() for row in rows]

    @property
    def num_rows(self) -> int:
        """The number of rows in an epoch."""
        return len(self._rows)

    @property
    def stride(self) -> int:
        """The number of tokens in a row's canvases."""
        return self.canvas_len * self.num_canvases

    def __call__(self, step: int, rows: range) -> TrainBatch:
        row = step * self.batch_size + torch.arange(rows.start, rows.stop)
        epoch = row // self.num_rows
        order = permute(row % self.num_rows, self.num_rows, seed=self.seed, epoch=epoch)
        shape = (len(order), 1 + self.stride)
        tokens = np.full(shape, self.file.eos_token_id)
        frozen, fill, documents = np.ones(shape, dtype=bool), np.zeros(shape, dtype=bool), np.zeros(shape, dtype=int)
        lengths = []
        for at, (place, opens_last) in enumerate(zip(order.tolist(), ((order + epoch) % 2).tolist(), strict=True)):
            start, name = 1, 1  # after the first token, which every row has as its context
            for number in self._rows[place]:
                prompt, answer, opened = self.canvas_len * self._sizes[:, number]
                prompt_len = int(self.file.prompt_len[number])
                text = self.file.document(number)[: prompt_len + answer]
                first, middle = start + prompt - prompt_len, start + prompt
                tokens[at, first : first + len(text)] = text
                documents[at, start:first], documents[at, first : middle + answer] = name, name + 1
                first_open = middle + (answer - opened) * opens_last
                frozen[at, first_open : first_open + opened] = False
                fill[at, first + len(text) : middle + answer] = True
                start, name = middle + answer, name + 2
            lengths.append(start)
        return TrainBatch(
            tokens=torch.from_numpy(tokens),
            prompt_len=torch.ones(len(order), dtype=torch.int64),
            length=torch.tensor(lengths),
            frozen=torch.from_numpy(frozen),
            documents=torch.from_numpy(documents),
            fill=torch.from_numpy(fill),
        )


@dataclass(frozen=True, kw_only=True)
class InTurn:
    """A `BatchSource` that takes `shares[0]` steps from the first source, `shares[1]` from the second, and again."""

    sources: tuple[TextSource | AnswerSource, ...]
    shares: tuple[int, ...]

    def __call__(self, step: int, rows: range) -> TrainBatch:
        turn, number = divmod(step, sum(self.shares))
        for source, share in zip(self.sources, self.shares, strict=True):
            if number < share:
                return source(turn * share + number, rows)
            number -= share
        raise AssertionError("the shares count every step of a turn")


def split_excerpt(folder: Path) -> Path:
    """Split the excerpt that ships with dgemma into the three parts of a small corpus."""
    validation, test, *train = EXCERPT.read_text().split(SEPARATOR)
    for part, documents in (("train", train), ("validation", [validation]), ("test", [test])):
        (folder / f"{part}.txt").write_text(SEPARATOR.join(documents))
    return folder


def answers(folder: Path, tokenizer: dgemma.Tokenizer) -> TokenFile:
    """Tokenise the prompts and answers of a corpus, once."""
    tokens = folder / "tokens" / "answers"
    if (tokens / "about.json").is_file():
        return TokenFile.open(tokens)
    return TokenFile.write(read_documents(folder / "answers.jsonl"), tokenizer, tokens)


@torch.no_grad()
def write_own_texts(writer: dgemma.DiffusionGemma, corpus: Corpus, path: Path, count: int) -> None:
    """Write prompts and answers: beginnings of training texts, and how the causal mode continues them.

    Long texts are chosen as often as their tokens. Dialogues are left out, because all of them are among the answers.
    So are answers in which four words repeat.
    """
    tokenizer, rng = corpus.tokenizer, np.random.default_rng(0)
    sizes = np.diff(corpus.train.starts).astype(float)
    if (turn := tokenizer.token_id("<|turn>")) is not None:
        places = np.nonzero(np.asarray(corpus.train.tokens) == turn)[0]
        sizes[np.unique(np.searchsorted(corpus.train.starts, places, side="right") - 1)] = 0
    pairs: list[dict[str, str]] = []
    while len(pairs) < count:
        length = int(rng.integers(*BEGINNINGS, endpoint=True))
        chance = np.where(sizes >= 2 * length, sizes, 0)
        numbers = rng.choice(len(sizes), min(ROWS, 4 * count), p=chance / chance.sum())
        prompts = torch.from_numpy(np.stack([corpus.train.document(int(n))[:length] for n in numbers]).astype(np.int64))
        options = {"max_new_tokens": LONGEST, "temperature": 0.4, "seed": len(pairs)}
        written = dgemma.generate_causal(writer, prompts.to(writer.device), **options).cpu()
        for prompt, answer in zip(prompts, written, strict=True):
            text = tokenizer.decode(answer)
            if text.strip() and not _REPEATED.search(text):
                pairs.append({"prompt": tokenizer.decode(prompt), "answer": text})
        print(f"{len(pairs)} own texts", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs[:count]), encoding="utf-8")


def report_every(seconds: float) -> Callable[[TrainStep], None]:
    """Return a callback that prints the losses every so many seconds."""
    began = last = time.perf_counter()

    def report(record: TrainStep) -> None:
        nonlocal last
        now = time.perf_counter()
        if now - last < seconds:
            return
        last = now
        losses = ", ".join(f"{name} {record.sums[name].sum() / record.counts[name].sum():.3f}" for name in record.sums)
        print(f"{(now - began) / 60:.1f} minutes, step {record.step}: {losses} nats per token", flush=True)

    return report


def main(args: argparse.Namespace, scratch: Path) -> None:
    if args.device == "cpu" and args.minutes is None and not args.prepare_only:
        print("Without a GPU this only shows that the script runs: the text model needs about 25 minutes of an H200.")
        print("To train a smaller model on a CPU in a few minutes, use `dgemma train`.", flush=True)
    out = args.out or scratch / "out"
    shape = dgemma.presets.text() if args.corpus else dgemma.presets.tiny()
    folder = args.corpus or split_excerpt(scratch)
    corpus = prepare_corpus(folder, shape.vocab_size)
    for part, file in (("train", corpus.train), ("validation", corpus.validation), ("test", corpus.test)):
        print(f"{part}: {file.num_documents} documents, {file.num_tokens:,} tokens, {file.num_bytes:,} bytes")
    packing = {"canvas_len": shape.canvas_length, "num_canvases": args.canvases, "batch_size": args.batch_size}
    sources: list[TextSource | AnswerSource] = [TextSource(file=corpus.train, **packing, seed=args.seed)]
    if (folder / "answers.jsonl").is_file():
        sources.append(AnswerSource(file=answers(folder, corpus.tokenizer), **packing, seed=args.seed))
    shares = SHARES[: len(sources)]
    if args.prepare_only:
        return
    torch.manual_seed(args.seed)
    model = dgemma.DiffusionGemma(shape, device=args.device)
    soften_attention(model)
    # The published stop tokens 106 and 50 are words in this vocabulary. A chat stops at the end of a turn. The bound
    # and the steps were chosen after training: a small model is less certain than the published one, and needs
    # fewer steps for a short canvas.
    turn_end = corpus.tokenizer.token_id("<turn|>")
    model.generation = dgemma.GenerationDefaults(
        max_denoising_steps=20,
        entropy_bound=1.0,
        t_max=0.6,
        t_min=0.3,
        eos_token_id=(corpus.tokenizer.eos_token_id,) + (() if turn_end is None else (turn_end,)),
    )
    print(f"{model.num_parameters():,} weights, {model.num_parameters(active=True):,} active", flush=True)

    uniform = dgemma.UniformNoise(shape.vocab_size)
    masks = dgemma.MaskNoise(shape.vocab_size, mask_token_id=corpus.tokenizer.mask_token_id)
    # All canvases of a row at once, some of them with masks. No input tells the kind of noise: masks show it. Two draws
    # of noise share a pass over the text. The causal mode learns faster than the others, so its loss has a low weight.
    objective = Objective(
        noise=uniform,
        masks=masks,
        masks_prob=0.6,
        holes_prob=args.holes,
        canvas_len=shape.canvas_length,
        canvases="all",
        num_draws=args.draws,
        causal_weight=0.25,
    )
    final_lr = 0.02
    config = TrainConfig(
        steps=args.steps if args.minutes is None else None,
        minutes=args.minutes,
        batch_size=args.batch_size,
        warmup=200,
        final_lr=1.0 if args.own_minutes else final_lr,
        ema_decay=0.995,
        precision="mixed" if model.device.type == "cuda" else "weights",
        seed=args.seed,
    )
    optimizer = partial(muon, lr=2.5e-3, momentum=0.9, weight_decay=0.1)
    began = time.perf_counter()
    with ExitStack() as stack:
        if args.fast:
            from dgemma_kernels import accelerate_training  # needs Triton

            stack.enter_context(accelerate_training(model))
        stack.enter_context(balanced_routers(model, 0.01))
        source = InTurn(sources=tuple(sources), shares=shares)
        result = train(model, objective, source, config, out=out / "run", optimizer=optimizer, on_step=report_every(30))
        parts = [(result, source)]
        if args.own_minutes and not result.interrupted:
            own, last = out / "own", replace(config, steps=None, minutes=args.own_minutes, final_lr=final_lr)
            if not (own / "answers.jsonl").is_file():
                dtype = torch.bfloat16 if model.device.type == "cuda" else torch.float32
                writer = dgemma.DiffusionGemma.from_pretrained(result.final, dtype=dtype, device=args.device)
                write_own_texts(writer, corpus, own / "answers.jsonl", args.own_texts)
            sources.append(AnswerSource(file=answers(own, corpus.tokenizer), **packing, seed=args.seed))
            source = InTurn(sources=tuple(sources), shares=(*shares, SHARES[-1]))
            result = train(
                model, objective, source, last, out=own / "run", optimizer=optimizer, on_step=report_every(30)
            )
            parts.append((result, source))
    if result.interrupted:
        return
    seconds = time.perf_counter() - began

    # Evaluate the weights as they are saved, rounded to bfloat16.
    model.to(torch.bfloat16).save_pretrained(out / "checkpoint")
    corpus.tokenizer.save_pretrained(out / "checkpoint")
    epochs = [0.0] * len(sources)
    for done, source in parts:
        for at, (of, share) in enumerate(zip(source.sources, source.shares, strict=True)):
            epochs[at] += done.step * args.batch_size * share / sum(source.shares) / of.num_rows
    steps = sum(done.step for done, _ in parts)
    print(f"{steps} steps in {seconds:.0f} s, {result.tokens_per_second:,.0f} tokens/s", flush=True)
    print(f"passes over each source: {', '.join(f'{epoch:.1f}' for epoch in epochs)}", flush=True)
    router = result.log.lines()[-1].get("router", [])
    for number, layer in enumerate(router):
        print(f"layer {number}: shares of the experts " + " ".join(f"{share:.2f}" for share in layer["load"]))
    model.to(torch.float32)
    held_out = {"test": corpus.test}
    for path in sorted(args.corpus.glob("*_test.txt")) if args.corpus else ():
        documents = read_documents(path, separator=SEPARATOR)
        held_out[path.stem] = TokenFile.write(documents, corpus.tokenizer, scratch / path.stem)
    found: dict[str, dict[str, object]] = {name: {} for name in held_out}
    for noise in (uniform, masks):
        model.generation = replace(model.generation, noise=describe_noise(noise))
        for name, file in held_out.items():
            rows = scan(file, row_len=sources[0].stride, context=sources[0].stride)
            likelihood = evaluate(model, rows, noise, batch_size=64, num_samples=4, num_bytes=file.num_bytes)
            print(f"{name}, {noise.kind} noise:\n{likelihood}", flush=True)
            found[name][noise.kind] = likelihood.summary()
    results = {
        "options": vars(args),
        "parameters": model.num_parameters(),
        "steps": steps,
        "epochs": epochs,
        "seconds": seconds,
        "tokens_per_second": result.tokens_per_second,
        "router": router,
        **found,
    }
    (out / "results.json").write_text(json.dumps(results, indent=1, default=str) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, help="folder with train.txt, validation.txt, test.txt; default: excerpt")
    parser.add_argument("--out", type=Path, help="default: a temporary folder")
    for name, (on_gpu, without, meaning) in NUMBERS.items():
        default = on_gpu if torch.cuda.is_available() else without
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} (%(default)s)")
    parser.add_argument("--holes", type=float, default=0.3, help="share of canvases with holes (%(default)s)")
    parser.add_argument("--minutes", type=float, help="train for this long, instead of a number of steps")
    parser.add_argument("--own-minutes", type=float, help="then train on own texts too for this long")
    parser.add_argument("--prepare-only", action="store_true", help="only make the tokenizer and the token files")
    parser.add_argument("--fast", action="store_true", help="train with kernels, on a GPU: slower start, faster steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        main(parser.parse_args(), Path(folder))
