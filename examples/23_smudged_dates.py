r"""Train a model, in about a minute on a CPU, to restore smudged dates; then use a calendar as a constraint.

"Sat ?4 Mar 1984" could be three days, of which one is a Saturday. The model learns the format of dates, but not which
weekday each date has. The constraint is the calendar: a regular expression of every day of 40 years. Four ways to use
it are compared: not at all, by rejection, by masking, and by exact conditioning. Masking writes from left to right, and
draws each character among those that continue some date of the calendar.

    python examples/23_smudged_dates.py --out dates                     train, compare, write dates/results.json
    python examples/23_smudged_dates.py --model dates/checkpoint        compare again
"""

import argparse
import datetime
import json
import random
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import dgemma
from dgemma.train import CrossEntropy, Objective, TrainBatch, TrainConfig, muon, soften_attention, train

FIRST, LAST = datetime.date(1960, 1, 1), datetime.date(1999, 12, 31)
DATES = [FIRST + datetime.timedelta(days) for days in range((LAST - FIRST).days + 1)]
PLACES = (4, 5, 7, 8, 9, 13, 14)  # in "Sat 24 Mar 1984": day, month and the last two digits of the year
TOKENIZER = dgemma.ByteTokenizer()
NOISE = dgemma.MaskNoise(TOKENIZER.vocab_size, mask_token_id=TOKENIZER.mask_token_id)
ROPE = {"rope_type": "default", "rope_theta": 100.0}
# A dense network of two layers that see prompt and answer.
CONFIG = dgemma.ModelConfig(
    vocab_size=TOKENIZER.vocab_size,
    hidden_size=64,
    intermediate_size=128,
    canvas_length=16,
    num_hidden_layers=2,
    layer_types=("sliding_attention", "full_attention"),
    sliding_window=64,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=16,
    num_global_key_value_heads=4,
    global_head_dim=16,
    num_experts=1,
    top_k_experts=1,
    moe_intermediate_size=64,
    rope_parameters={"sliding_attention": ROPE, "full_attention": ROPE},
    max_position_embeddings=256,
)


def written(date: datetime.date) -> str:
    return f"{date:%a %d %b %Y}"


def smudge(date: datetime.date, count: int, draw: random.Random) -> str:
    text = list(written(date))
    for place in draw.sample(PLACES, count):
        text[place] = "?"
    return "".join(text)


def num_readings(text: str) -> int:
    """The number of days that a smudged text could be."""
    return len(re.findall(text.replace("?", "."), "\n".join(map(written, DATES))))


def calendar() -> dgemma.Regex:
    """The calendar as a regular expression. Days that have the same weekday in the same years share an alternative."""
    years: dict[tuple[str, str], list[str]] = defaultdict(list)
    for date in DATES:
        years[f"{date:%a}", f"{date:%d %b}"].append(str(date.year))
    days: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (weekday, day), in_years in years.items():
        days[weekday, "|".join(in_years)].append(day)
    parts = (f"{weekday} ({'|'.join(of)}) ({in_years})" for (weekday, in_years), of in days.items())
    return dgemma.Regex("|".join(parts), TOKENIZER)


def prompts(texts: Sequence[str]) -> torch.Tensor:
    return TOKENIZER.encode_batch(list(texts)).tokens


def source(step: int, rows: range) -> TrainBatch:
    """Random dates with up to two smudges, as prompt and answer."""
    draws = [random.Random(f"{step} {row}") for row in rows]
    dates = [draw.choice(DATES) for draw in draws]
    questions = prompts([smudge(date, draw.randrange(3), draw) for date, draw in zip(dates, draws, strict=True)])
    answers = torch.tensor([TOKENIZER.encode(written(date), bos=False) for date in dates])
    prompt_len = torch.full((len(rows),), questions.shape[1])
    tokens = torch.cat((questions, answers), dim=1)
    return TrainBatch(tokens=tokens, prompt_len=prompt_len, length=torch.full_like(prompt_len, tokens.shape[1]))


def train_model(out: Path, steps: int) -> dgemma.DiffusionGemma:
    torch.manual_seed(0)
    model = dgemma.DiffusionGemma(CONFIG)
    soften_attention(model)
    loss = CrossEntropy(scored="noised")
    objective = Objective(noise=NOISE, canvas_len=16, loss=loss, self_cond_prob=0.0, causal_weight=0.0)
    training = TrainConfig(steps=steps, batch_size=64, warmup=30, final_lr=0.02, precision="weights")
    result = train(model, objective, source, training, out=out / "run", optimizer=partial(muon, lr=1e-2))
    print(f"{result.step} steps, loss {result.log.lines()[-1]['loss']:.3f}")
    return model


def write(
    model: dgemma.DiffusionGemma, texts: Sequence[str], seed: int = 0, **options: Any
) -> tuple[list[str], list[int]]:
    """Draw an answer per text with the published sampler. Also return the number of forwards of each."""
    out = dgemma.generate(
        model,
        prompts(texts),
        noise=NOISE,
        temperature=1.0,
        max_new_tokens=16,
        eos_token_ids=TOKENIZER.eos_token_id,
        seed=seed,
        progress=False,
        **options,
    )
    return TOKENIZER.decode_batch(out.new_tokens), out.steps.sum(1).tolist()


def reject(
    model: dgemma.DiffusionGemma, texts: Sequence[str], *, most_tries: int, **options: Any
) -> tuple[list[str], list[int]]:
    """Draw freely until the answer is in the calendar."""
    valid, answers, forwards = set(map(written, DATES)), [""] * len(texts), [0] * len(texts)
    for attempt in range(most_tries):
        left = [row for row, found in enumerate(answers) if found not in valid]
        if left:
            drawn, steps = write(model, [texts[row] for row in left], seed=attempt * len(texts), **options)
            for row, text, count in zip(left, drawn, steps, strict=True):
                answers[row] = text
                forwards[row] += count
    return answers, forwards


@torch.no_grad()
def mask(
    model: dgemma.DiffusionGemma, texts: Sequence[str], constraint: dgemma.Regex, *, once: bool
) -> tuple[list[str], list[int]]:
    """Draw characters from left to right, each among those that continue some date. `once` uses one forward for all."""
    automaton, generator = constraint.automaton, torch.Generator().manual_seed(0)
    table, token_class = torch.from_numpy(automaton.next_state).long(), torch.from_numpy(automaton.token_class).long()
    prefix, length = model.encode(prompts(texts)), len(written(FIRST))
    canvas = torch.full((len(texts), 16), TOKENIZER.mask_token_id)
    state = torch.zeros(len(texts), dtype=torch.int64)
    for place in range(length):
        if place == 0 or not once:
            prediction = model.denoise(canvas, prefix)
        after = table[state][:, token_class]  # (B, V)
        probabilities = prediction.logits[:, place].masked_fill(after < 0, -torch.inf).softmax(-1)
        canvas[:, place] = probabilities.multinomial(1, generator=generator)[:, 0]
        state = after.gather(1, canvas[:, place, None])[:, 0]
    return TOKENIZER.decode_batch(canvas[:, :length]), [1 if once else length] * len(texts)


def compare(model: dgemma.DiffusionGemma, num_tests: int, most_tries: int) -> list[dict[str, Any]]:
    """Read new smudged dates in every way and return a row of results for each."""
    constraint, valid = calendar(), set(map(written, DATES))
    ways: dict[str, Callable[[list[str]], tuple[list[str], list[int]]]] = {
        "free": partial(write, model),
        "rejection": partial(reject, model, most_tries=most_tries),
        "masking": partial(mask, model, constraint=constraint, once=False),
        "exact": partial(write, model, constraint=constraint),
        "free, one forward": partial(write, model, steps=1),
        "rejection, one forward": partial(reject, model, most_tries=most_tries, steps=1),
        "masking, one forward": partial(mask, model, constraint=constraint, once=True),
        "exact, one forward": partial(write, model, constraint=constraint, steps=1),
    }
    draw = random.Random("test")
    tests = {count: [draw.choice(DATES) for _ in range(num_tests)] for count in (1, 2)}
    texts = {count: [smudge(date, count, draw) for date in dates] for count, dates in tests.items()}
    best = {count: sum(1 / num_readings(text) for text in texts[count]) / num_tests for count in texts}
    print(f"{'':24}one smudge  two smudges  valid  forwards")
    print(f"{'best possible':24}{best[1]:10.1%}{best[2]:13.1%}")
    rows: list[dict[str, Any]] = [{"way": "best possible", "one": best[1], "two": best[2]}]
    for name, way in ways.items():
        found, num_valid, num_forwards = {}, 0, 0
        for count, dates in tests.items():
            answers, forwards = way(texts[count])
            found[count] = sum(text == written(date) for text, date in zip(answers, dates, strict=True)) / num_tests
            num_valid += sum(text in valid for text in answers)
            num_forwards += sum(forwards)
        row = {"way": name, "one": found[1], "two": found[2]}
        row |= {"valid": num_valid / (2 * num_tests), "forwards": num_forwards / (2 * num_tests)}
        print(f"{name:24}{row['one']:10.1%}{row['two']:13.1%}{row['valid']:7.0%}{row['forwards']:10.1f}", flush=True)
        rows.append(row)
    shown = texts[2][:5]
    for text, restored in zip(shown, write(model, shown, constraint=constraint, steps=1)[0], strict=True):
        print(f"{text} → {restored}")
    return rows


def main(args: argparse.Namespace, scratch: Path) -> None:
    out = args.out or scratch
    if args.model is None:
        began = time.process_time()
        model = train_model(out, args.steps)
        seconds = time.process_time() - began
        model.save_pretrained(out / "checkpoint")
    else:
        model, seconds = dgemma.DiffusionGemma.from_pretrained(args.model, dtype=torch.float32), 0.0
    results = {"cpu_seconds": seconds, "weights": model.num_parameters(), "tests": args.num_tests}
    results["states"] = calendar().automaton.num_states
    results["ways"] = compare(model.eval(), args.num_tests, args.tries)
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="training steps (%(default)s)")
    parser.add_argument("--model", type=Path, help="a checkpoint of an earlier run, instead of training")
    parser.add_argument("--num-tests", type=int, default=400, help="dates of each kind (%(default)s)")
    parser.add_argument(
        "--tries", type=int, default=16, help="draws per date, at most, of rejection sampling (%(default)s)"
    )
    parser.add_argument("--out", type=Path, help="folder for the checkpoint and results.json; default: temporary")
    with tempfile.TemporaryDirectory() as folder:
        main(parser.parse_args(), Path(folder))
