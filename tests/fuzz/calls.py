"""Odd arguments for every public function: a valid call in which one or two arguments are replaced."""

import inspect
import math
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import is_dataclass
from pathlib import Path
from types import GeneratorType, SimpleNamespace
from typing import Any

import numpy as np
import torch

import dgemma
from dgemma import schedule, train
from dgemma.data import sudoku
from dgemma.data.text import PromptSource, TextSource, TokenFile, read_documents, scan
from dgemma.run.changes import apply_changes
from dgemma.sampling.named import describe_noise, describe_sampler
from dgemma.train.log import TrainLog
from dgemma.view import Board, LiveView, to_html
from fuzz.files import TINY, _steady_source, prompt, tiny_model
from fuzz.harness import Family, signature_names

V, C = TINY.vocab_size, TINY.canvas_length
PLAIN: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**62, 2**64, -(2**63), 0.0, 0.5, 1.0, 1.5, -0.5, 1e-50, 1e308),
    *(math.nan, math.inf, "", "x", "cuda", "cpu", "mask", "\x1b[2J", b"x", [], [[]], [0], [0, 1], [1, 1], [-1], [5, 6]),
    *([[1], [2]], ["a"], [None], [1.5], {}, {"a": 1}, set(), {3}, range(3), (1, 2), 1j, np.int64(3), np.float32(0.5)),
    *(np.zeros((2, 4)), np.arange(3), np.array(["x"]), print, int, dgemma.EntropyBound, Path("/nowhere/at/all")),
    *(torch.float32, torch.device("cpu"), object()),
]
DTYPES = (
    torch.int64, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool, torch.float32, torch.float64,
    torch.bfloat16, torch.complex64,
)  # fmt: skip
SHAPES = ((), (0,), (1,), (2,), (3,), (2, 0), (0, 4), (1, 4), (2, 4), (3, 4), (2, C), (2, 2 * C), (2, 3, 4))
SHAPES = (*SHAPES, (2, C, V), (1, C, V), (V,), (2, C, 3), (C, V), (2, 1, V))


def odd_value(context: Any, source: random.Random) -> Any:
    kind = source.random()
    if kind < 0.5:
        return source.choice(PLAIN)
    if kind < 0.9:
        dtype, shape = source.choice(DTYPES), source.choice(SHAPES)
        fill = source.choice((0, 0, 1, 5, -1, 10**6, math.nan))
        if math.isnan(fill) and not (dtype.is_floating_point or dtype.is_complex):
            fill = 3
        fill = abs(fill) % 200 if dtype in (torch.uint8, torch.int16) else fill
        tensor = torch.full(shape, fill, dtype=dtype)
        change = source.randrange(12)
        if change == 0:
            return tensor.to("meta")
        if change == 1 and dtype.is_floating_point:
            return tensor.requires_grad_()
        if change == 2 and tensor.dim():
            return tensor.to_sparse()
        return tensor
    return source.choice(context.objects)


def _objects(model: dgemma.DiffusionGemma) -> list[Any]:
    return [
        model,
        model.encode(prompt(1)),
        model.encode(prompt(3)),
        dgemma.UniformNoise(V),
        dgemma.UniformNoise(7),
        dgemma.MaskNoise(V, mask_token_id=4),
        dgemma.EntropyBound(),
        dgemma.Threshold(tau=0.5),
        dgemma.StableAndConfident(),
        dgemma.LinearTemperature(),
        schedule.Linear(),
        dgemma.ByteTokenizer(),
        dgemma.Prediction(torch.zeros(1, C, V)),
        dgemma.Prediction(torch.zeros(2, C, 7)),
        TINY,
    ]


class Target:
    """A function and some arguments of a valid call. `make(context)` builds them anew for every case.

    A case replaces any parameter of the function, whether the valid call passes it or not.
    """

    def __init__(self, function: Callable[..., Any], make: Callable[[Any], dict[str, Any]], name: str = "") -> None:
        self.function, self.make = function, make
        self.name, self.parameters = name or function.__qualname__, signature_names(function)


def _samplers(context: Any) -> Iterator[Target]:
    for name in dgemma.sampling.__all__:
        kind = getattr(dgemma.sampling, name)
        if inspect.isclass(kind) and issubclass(kind, dgemma.Sampler | dgemma.StopRule) and is_dataclass(kind):
            yield Target(kind, lambda context, name=name: dict(_MINIMAL.get(name, {})))


_MINIMAL: dict[str, dict[str, Any]] = {
    "FactorThreshold": {"factor": 1.0},
    "StepCap": {"steps": 3},
    "Threshold": {"tau": 0.9},
}


def _run(**options: Any) -> Callable[[Any], dict[str, Any]]:
    return lambda context: {
        "model": context.model,
        "prompt_tokens": prompt(),
        "max_new_tokens": C,
        "steps": 2,
        "progress": False,
        **options,
    }


def _full_run(context: Any) -> dict[str, Any]:
    canvas = torch.full((2, C), -1)
    canvas[:, 2] = 200
    names = {"canvas": canvas, "frozen": canvas >= 0, "allowed": torch.ones(V, dtype=torch.bool), "seed": 3}
    knobs = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "stop": None, "eos_token_ids": [1], "noise_level": 1.0}
    extra = {"attention_mask": torch.ones(2, 4), "record": True, "record_top": 2, "noise": None, "sampler": None}
    return {**_run()(context), **names, **knobs, **extra, "cache": None, "on_step": None}


def _state(context: Any) -> dict[str, Any]:
    knobs = dgemma.Knobs(sampler=dgemma.EntropyBound(), temperature=dgemma.LinearTemperature())
    noise, seeds = dgemma.UniformNoise(V), torch.arange(2)
    return {"knobs": knobs, "noise": noise, "seeds": seeds, "canvas_len": C, "num_steps": 2}


def _step(context: Any) -> dict[str, Any]:
    state = _state(context)
    cache, knobs = context.model.encode(prompt()), state["knobs"]
    return {"denoiser": context.model, "state": dgemma.start_state(**state), "cache": cache, "knobs": knobs}


def _evaluate(context: Any) -> dict[str, Any]:
    batch = _steady_source(0, range(2))
    return {"model": context.model, "source": batch, "noise": dgemma.UniformNoise(V), "num_samples": 1, "batch_size": 2}


def _train(context: Any) -> dict[str, Any]:
    objective = train.recipes.dgemma(TINY, noise=dgemma.UniformNoise(V), fill_token=1)
    config = train.TrainConfig(steps=1, batch_size=2, precision="weights", progress=False)
    out = context.folder / "run"
    return {"model": tiny_model(), "objective": objective, "source": _steady_source, "config": config, "out": out}


def _batch(context: Any) -> dict[str, Any]:
    batch = _steady_source(0, range(2))
    return {name: getattr(batch, name) for name in ("tokens", "prompt_len", "length")}


def targets(context: Any) -> list[Target]:
    """Return the public functions, each with a valid call."""
    model, noise = context.model, dgemma.UniformNoise(V)
    prediction = lambda: dgemma.Prediction(torch.zeros(2, C, V))  # noqa: E731
    u = torch.full((2, C), 0.5, dtype=torch.float64)
    tokens, level = torch.full((2, C), 130), torch.tensor([0.5, 0.5])
    byte = dgemma.ByteTokenizer()
    puzzles = sudoku.generate_puzzles(2, givens=60)
    run, file = context.trajectory, context.file
    template, short = ["a ", dgemma.Slot(["b", "cd"]), " e"], {"steps": 2, "progress": False}
    return [
        Target(dgemma.generate, _full_run),
        Target(dgemma.generate, _run()),
        Target(dgemma.stream, lambda c: {k: v for k, v in _run()(c).items() if k != "progress"}),
        Target(
            dgemma.generate_many,
            lambda c: {"model": model, "prompts": [[130, 131], [140]], "max_new_tokens": C, "batch_size": 2, **short},
        ),
        Target(dgemma.infill, lambda c: {"model": model, "tokens": tokens, "holes": [(2, 4)], **short}),
        Target(dgemma.edit, lambda c: {"model": model, "tokens": tokens, "noise_level": 0.5, **short}),
        Target(
            dgemma.generate_causal,
            lambda c: {"model": model, "prompt_tokens": prompt(), "max_new_tokens": 2, "top_k": 3},
        ),
        Target(dgemma.slots, lambda c: {"model": model, "template": template, "tokenizer": byte, "num_draws": 1}),
        Target(dgemma.decide_many, lambda c: {"model": model, "templates": [template], "tokenizer": byte}),
        Target(dgemma.Slot, lambda c: {"options": ["a", "b"]}),
        Target(dgemma.start_state, _state),
        Target(dgemma.step, _step),
        Target(
            apply_changes, lambda c: {"changes": {"top_k": 3}, "state": _step(c)["state"], "knobs": _step(c)["knobs"]}
        ),
        *(
            Target(
                lambda value, name=name: apply_changes({name: value}, _step(context)["state"], _step(context)["knobs"]),
                lambda c: {"value": 3},
                f"apply_changes {name}",
            )
            for name in ("canvas", "frozen", "allowed", "top_k", "sampler", "temperature", "self_cond", "seeds")
        ),
        Target(dgemma.Knobs, lambda c: {"sampler": dgemma.EntropyBound(), "temperature": dgemma.LinearTemperature()}),
        Target(dgemma.LinearTemperature, lambda c: {}),
        Target(dgemma.UniformNoise, lambda c: {"vocab_size": V}),
        Target(dgemma.MaskNoise, lambda c: {"vocab_size": V, "mask_token_id": 4}),
        Target(dgemma.HybridNoise, lambda c: {"vocab_size": V, "mask_token_id": 4}),
        Target(noise.prior, lambda c: {"u": u}),
        Target(noise.refill, lambda c: {"u": u, "noise_level": level}),
        Target(noise.corrupt, lambda c: {"tokens": tokens, "noise_level": level, "u_event": u, "u_token": u}),
        Target(dgemma.Prediction, lambda c: {"logits": torch.zeros(2, C, V)}),
        Target(
            lambda **arguments: prediction().shaped(**arguments).entropy,
            lambda c: {"temperature": torch.ones(2), "allowed": None, "top_k": 3, "top_p": 0.5},
            "Prediction.shaped",
        ),
        Target(lambda k: prediction().top(k), lambda c: {"k": 3}, "Prediction.top"),
        Target(lambda tokens: prediction().log_prob(tokens), lambda c: {"tokens": tokens}, "Prediction.log_prob"),
        Target(lambda u: prediction().sample(u), lambda c: {"u": u}, "Prediction.sample"),
        Target(
            model.encode,
            lambda c: {"tokens": prompt(), "cache": model.encode(prompt()), "attention_mask": torch.ones(2, 4)},
        ),
        Target(model.causal_logits, lambda c: {"tokens": prompt(), "attention_mask": torch.ones(2, 4)}),
        Target(model.denoise, lambda c: {"canvas": tokens, "cache": model.encode(prompt())}),
        Target(
            lambda rows: model.encode(prompt()).select(rows),
            lambda c: {"rows": torch.tensor([0])},
            "PrefixCache.select",
        ),
        Target(
            lambda mark: model.encode(prompt()).rollback(mark),
            lambda c: {"mark": model.encode(prompt()).mark()},
            "PrefixCache.rollback",
        ),
        Target(model.new_cache, lambda c: {"batch_size": 2}),
        Target(dgemma.DiffusionGemma, lambda c: {"config": TINY}),
        Target(dgemma.DiffusionGemma.from_pretrained, lambda c: {"path_or_repo": c.checkpoint}),
        Target(model.save_pretrained, lambda c: {"path": c.folder / "saved"}),
        *(
            Target(
                lambda value, name=name: TINY.replace(**{name: value}), lambda c: {"value": 4}, f"ModelConfig.{name}"
            )
            for name in ("canvas_length", "layer_types", "rope_parameters", "rms_norm_eps", "vocab_size")
        ),
        Target(dgemma.ModelConfig.from_hf, lambda c: {"source": TINY.to_hf()}),
        Target(
            lambda **arguments: dgemma.generate(dgemma.Guided(**arguments), prompt(), max_new_tokens=C, **short),
            lambda c: {"denoiser": model, "strength": 1.0, "unconditional": 4},
            "Guided",
        ),
        Target(dgemma.observe, lambda c: {"model": model, "residuals": [0]}),
        Target(dgemma.Trajectory, lambda c: {"plan": run.plan, "top": 3}),
        Target(run.array, lambda c: {"name": "entropy"}),
        Target(run.at, lambda c: {"block": 0, "step": 1}),
        Target(run.fork, lambda c: {"model": model, "block": 0, "step": 1, "seed": 4}),
        Target(run.moment, lambda c: {"model": model, "block": 0, "step": 1}),
        Target(run.replay, lambda c: {"model": model}),
        Target(run.save, lambda c: {"path": c.folder / "run.safetensors"}),
        Target(dgemma.Trajectory.load, lambda c: {"path": c.saved}),
        Target(to_html, lambda c: {"trajectory": run, "path": c.folder / "page.html", "tokenizer": byte}),
        Target(LiveView, lambda c: {"tokenizer": byte}),
        Target(byte.encode, lambda c: {"text": "hi"}),
        Target(byte.decode, lambda c: {"tokens": [130]}),
        Target(byte.encode_batch, lambda c: {"prompts": ["a", [1, 2]]}),
        Target(byte.decode_batch, lambda c: {"tokens": [[1, 2]]}),
        Target(byte.chat, lambda c: {"messages": [{"role": "user", "content": "x"}]}),
        Target(byte.reply, lambda c: {"tokens": [130]}),
        Target(byte.token_id, lambda c: {"token": "a"}),
        Target(dgemma.Tokenizer.from_pretrained, lambda c: {"path_or_repo": c.checkpoint}),
        Target(describe_sampler, lambda c: {"sampler": dgemma.EntropyBound()}),
        Target(describe_noise, lambda c: {"noise": noise}),
        Target(train.LoRA, lambda c: {"rank": 2}),
        Target(train.add_lora, lambda c: {"model": tiny_model(), "lora": train.LoRA(rank=2)}),
        Target(train.load_lora, lambda c: {"model": tiny_model(), "path": c.folder / "none"}),
        Target(train.TrainConfig, lambda c: {"steps": 3, "batch_size": 2}),
        Target(train.TrainBatch, _batch),
        Target(train.Objective, lambda c: {"noise": noise, "canvas_len": C}),
        Target(train.recipes.dgemma, lambda c: {"config": TINY, "noise": noise, "fill_token": 1}),
        Target(train.recipes.mdlm, lambda c: {"config": TINY, "mask_token_id": 4}),
        Target(train.evaluate, _evaluate),
        Target(train.train, _train),
        Target(train.muon, lambda c: {"parameters": dict(model.named_parameters()), "lr": 0.1}),
        Target(TextSource, lambda c: {"file": file, "canvas_len": 8, "num_canvases": 2, "batch_size": 2}),
        Target(
            TextSource(file=file, canvas_len=8, num_canvases=2, batch_size=2),
            lambda c: {"step": 0, "rows": range(2)},
            "TextSource()",
        ),
        Target(PromptSource, lambda c: {"file": file, "max_len": 20, "batch_size": 2}),
        Target(scan, lambda c: {"file": file, "row_len": 16, "context": 8}),
        Target(TokenFile.open, lambda c: {"folder": c.tokens}),
        Target(read_documents, lambda c: {"paths": c.text}),
        Target(TrainLog, lambda c: {"path": c.folder / "log.jsonl"}),
        Target(sudoku.parse, lambda c: {"text": "1" * 81}),
        Target(sudoku.to_text, lambda c: {"digits": puzzles.puzzles}),
        Target(sudoku.solve, lambda c: {"puzzles": puzzles.puzzles}),
        Target(
            sudoku.is_solution,
            lambda c: {"puzzles": torch.from_numpy(puzzles.puzzles), "grids": torch.from_numpy(puzzles.solutions)},
        ),
        Target(sudoku.canvas_tokens, lambda c: {"digits": puzzles.puzzles}),
        Target(sudoku.prompt_tokens, lambda c: {"puzzles": puzzles.puzzles}),
        Target(sudoku.canvas_digits, lambda c: {"tokens": sudoku.canvas_tokens(puzzles.puzzles)}),
        Target(sudoku.generate_puzzles, lambda c: {"count": 1, "givens": 60}),
        Target(sudoku.sudoku_noise, lambda c: {"kind": "mask"}),
        Target(Board, lambda c: {}),
        *_samplers(context),
    ]


def prepare(folder: Path) -> Any:
    model = tiny_model()
    model.save_pretrained(folder / "checkpoint")
    dgemma.ByteTokenizer().save_pretrained(folder / "checkpoint")
    (folder / "text.txt").write_text("\f".join(f"story {n} of a few words" for n in range(6)))
    file = TokenFile.write(
        read_documents(folder / "text.txt", separator="\f"), dgemma.ByteTokenizer(), folder / "tokens"
    )
    out = dgemma.generate(model, prompt(), max_new_tokens=C, steps=3, record=True, progress=False, eos_token_ids=())
    out.trajectory.save(folder / "run.safetensors")
    context = SimpleNamespace(
        model=model, objects=_objects(model), file=file, trajectory=out.trajectory, saved=folder / "run.safetensors"
    )
    context.checkpoint, context.tokens, context.text = folder / "checkpoint", folder / "tokens", folder / "text.txt"
    context.targets = targets(context)
    return context


def attempt(context: Any, source: random.Random, folder: Path) -> None:
    context.folder = folder
    target = source.choice(context.targets)
    arguments = target.make(context)
    for _ in range(source.choice((1, 1, 1, 2))):
        if names := sorted({*arguments, *target.parameters}):
            name, value = source.choice(names), odd_value(context, source)
            if name not in _CALLBACKS or not callable(value):  # errors in a callback are the caller's
                arguments[name] = value
    try:
        result = target.function(**arguments)
        if isinstance(result, GeneratorType):
            result = list(result)
        if isinstance(result, AbstractContextManager):
            with result:
                pass
        if isinstance(result, dgemma.Sampler | dgemma.StopRule):
            _use(context, result)
    except BaseException as error:
        error.args = (f"{target.name}: {error}",) if not isinstance(error, OSError) else error.args
        raise


def _use(context: Any, rule: Any) -> None:
    """Take two steps under a sampler or a stop rule that was accepted."""
    options: dict[str, Any] = {"stop": rule} if isinstance(rule, dgemma.StopRule) else {"sampler": rule, "stop": None}
    if isinstance(rule, dgemma.Sampler) and "uniform" not in rule.valid_for:
        options["noise"] = dgemma.MaskNoise(V, mask_token_id=4)
    dgemma.generate(context.model, prompt(1), max_new_tokens=C, steps=2, progress=False, **options)


_CALLBACKS = {"source", "evaluate", "on_step", "optimizer"}
# Python and torch name the operation and the types that they refuse. An AttributeError or a KeyError names neither.
_CLEAR = (TypeError, RuntimeError, IndexError, ValueError)
FAMILIES = [Family("public functions", prepare, attempt, 20, others_errors=_CLEAR)]
