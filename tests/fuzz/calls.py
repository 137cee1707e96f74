"""Odd arguments for every public function: a valid call in which one or two arguments are replaced."""

import inspect
import math
import random
from collections.abc import Callable
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


class Fresh:
    """An argument that is made anew for each call, because calls change it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make


class Target:
    """A function and some arguments of a valid call: its required ones from `pool`, by name, and its `own`.

    A case replaces any parameter of the function, whether the valid call passes it or not.
    """

    def __init__(self, function: Callable[..., Any], pool: dict[str, Any], own: dict[str, Any], name: str) -> None:
        self.function, self.name = function, name or function.__qualname__
        self.parameters = signature_names(function)
        signature = inspect.signature(function).parameters
        needed = [key for key in self.parameters if signature[key].default is inspect.Parameter.empty or key in _SMALL]
        self.arguments = {key: pool[key] for key in needed if key not in own} | own

    def make(self) -> dict[str, Any]:
        return {key: value.make() if isinstance(value, Fresh) else value for key, value in self.arguments.items()}


_SMALL: dict[str, Any] = {"steps": 2, "max_new_tokens": C, "num_draws": 1, "num_samples": 1, "progress": False}


def _pool(context: Any) -> dict[str, Any]:
    """A valid argument for each name of a parameter. Relative paths lead into the folder of the case."""
    model, noise, byte, run = context.model, dgemma.UniformNoise(V), dgemma.ByteTokenizer(), context.trajectory
    u, level, tokens = torch.full((2, C), 0.5).double(), torch.tensor([0.5, 0.5]), torch.full((2, C), 130)
    knobs = dgemma.Knobs(sampler=dgemma.EntropyBound(), temperature=dgemma.LinearTemperature())
    start = {"knobs": knobs, "noise": noise, "seeds": torch.arange(2), "canvas_len": C, "num_steps": 2}
    template, puzzles = ["a ", dgemma.Slot(["b", "cd"]), " e"], sudoku.generate_puzzles(2, givens=60)
    return {
        **_SMALL,
        **start,
        "model": model,
        "denoiser": model,
        "tokenizer": byte,
        "config": TINY,
        "cache": Fresh(_cache_of(model)),
        "prompt_tokens": prompt(),
        "tokens": tokens,
        "canvas": tokens,
        "prompts": [[130, 131], [140]],
        "seed": 3,
        "holes": [(2, 4)],
        "template": template,
        "templates": [template],
        "options": ["a", "b"],
        "frozen": None,
        "state": Fresh(lambda: dgemma.start_state(**start)),
        "changes": {"top_k": 3},
        "block": 0,
        "step": 1,
        "sampler": knobs.sampler,
        "temperature": knobs.temperature,
        "vocab_size": V,
        "mask_token_id": 4,
        "u": u,
        "u_event": u,
        "u_token": u,
        "noise_level": level,
        "logits": torch.zeros(2, C, V),
        "k": 3,
        "rows": torch.tensor([0]),
        "batch_size": 2,
        "strength": 1.0,
        "unconditional": 4,
        "plan": run.plan,
        "name": "entropy",
        "path": Path("out"),
        "folder": Path("none"),
        "path_or_repo": context.checkpoint,
        "trajectory": run,
        "text": "1" * 81,
        "token": "a",
        "value": 3,
        "messages": [{"role": "user", "content": "x"}],
        "file": context.file,
        "num_canvases": 2,
        "max_len": 20,
        "row_len": 16,
        "context": 8,
        "paths": context.text,
        "digits": puzzles.puzzles,
        "puzzles": puzzles.puzzles,
        "grids": torch.from_numpy(puzzles.solutions),
        "count": 1,
        "kind": "mask",
        "lr": 0.1,
        "factor": 1.0,
        "parameters": dict(model.named_parameters()),
        "prompt_len": torch.ones(2).long(),
        "tau": 0.9,
    }


def _cache_of(model: Any) -> Callable[[], Any]:
    return lambda: model.encode(prompt())


def targets(context: Any) -> list[Target]:
    """Return the public functions, each with a valid call."""
    model, run, byte, pool = context.model, context.trajectory, dgemma.ByteTokenizer(), _pool(context)
    noise, canvas = dgemma.UniformNoise(V), torch.full((2, C), -1).index_fill(1, torch.tensor([2]), 200)

    def call(function: Callable[..., Any], name: str = "", /, **own: Any) -> Target:
        return Target(function, pool, own, name)

    def predict(method: str, **own: Any) -> Target:
        """A method of a prediction, under the names of its parameters."""
        return call(getattr(dgemma.Prediction(torch.zeros(2, C, V)), method), f"Prediction.{method}", **own)

    def change(name: str) -> Target:
        made = pool["state"].make
        return call(lambda value: apply_changes({name: value}, made(), pool["knobs"]), f"apply_changes {name}")

    everything = {"canvas": canvas, "frozen": canvas >= 0, "allowed": torch.ones(V, dtype=torch.bool), "seed": 3}
    everything |= {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "stop": None, "eos_token_ids": [1], "noise_level": 1.0}
    everything |= {"attention_mask": torch.ones(2, 4), "record": True, "record_top": 2, "cache": None, "on_step": None}
    source = TextSource(file=context.file, canvas_len=8, num_canvases=2, batch_size=2)
    training = {"config": train.TrainConfig(steps=1, batch_size=2, precision="weights", progress=False)}
    training["objective"] = train.recipes.dgemma(TINY, noise=noise, fill_token=1)
    fresh, saved = Fresh(tiny_model), {"path": context.saved}
    plain = (
        *(dgemma.generate, dgemma.stream, dgemma.generate_many, dgemma.infill, dgemma.Slot, dgemma.start_state),
        *(dgemma.step, apply_changes, dgemma.Knobs, dgemma.LinearTemperature, dgemma.UniformNoise, dgemma.Prediction),
        *(noise.prior, noise.refill, noise.corrupt, model.denoise, model.new_cache, dgemma.DiffusionGemma),
        *(dgemma.DiffusionGemma.from_pretrained, model.save_pretrained, run.array, run.at, run.replay, run.save),
        *(dgemma.Tokenizer.from_pretrained, byte.encode_batch, byte.chat, byte.token_id, LiveView, describe_noise),
        *(describe_sampler, train.TrainConfig, train.Objective, train.muon, TextSource, PromptSource, scan),
        *(read_documents, TrainLog, sudoku.parse, sudoku.to_text, sudoku.solve, sudoku.canvas_tokens),
        *(sudoku.prompt_tokens, sudoku.sudoku_noise, Board),
    )
    return [
        *map(call, plain),
        call(dgemma.generate, **everything),
        call(dgemma.edit, noise_level=0.5),
        call(dgemma.generate_causal, top_k=3),
        call(dgemma.slots, tokenizer=byte),
        call(dgemma.decide_many, tokenizer=byte),
        *map(change, ("canvas", "frozen", "allowed", "top_k", "sampler", "temperature", "self_cond", "seeds")),
        call(dgemma.MaskNoise, mask_token_id=4),
        call(dgemma.HybridNoise, mask_token_id=4),
        predict("shaped", temperature=torch.ones(2), allowed=None, top_k=3, top_p=0.5),
        *(predict(method) for method in ("top", "log_prob", "sample")),
        call(model.encode, tokens=prompt(), cache=pool["cache"], attention_mask=torch.ones(2, 8)),
        call(model.causal_logits, tokens=prompt(), attention_mask=torch.ones(2, 4)),
        call(lambda rows: model.encode(prompt()).select(rows), "PrefixCache.select"),
        *(
            call(lambda value, name=name: TINY.replace(**{name: value}), f"ModelConfig.{name}")
            for name in ("canvas_length", "layer_types", "rope_parameters", "rms_norm_eps", "vocab_size")
        ),
        call(dgemma.ModelConfig.from_hf, source=TINY.to_hf()),
        call(
            lambda **arguments: dgemma.generate(dgemma.Guided(**arguments), prompt(), **_RUN),
            "Guided",
            **{name: pool[name] for name in ("denoiser", "strength", "unconditional")},
        ),
        call(dgemma.observe, residuals=[0]),
        call(dgemma.Trajectory, top=3),
        call(run.fork, block=0, step=1, seed=4),
        call(run.moment, block=0, step=1),
        call(dgemma.Trajectory.load, **saved),
        call(to_html, path=Path("page.html"), tokenizer=byte),
        call(byte.encode, text="hi"),
        call(byte.decode, tokens=[130]),
        call(byte.decode_batch, tokens=[[1, 2]]),
        call(byte.reply, tokens=[130]),
        call(train.LoRA, rank=2),
        call(train.add_lora, model=fresh, lora=train.LoRA(rank=2)),
        call(train.load_lora, model=fresh),
        call(train.TrainBatch, length=torch.full((2,), C)),
        call(train.recipes.dgemma, noise=noise, fill_token=1),
        call(train.recipes.mdlm, mask_token_id=4),
        call(train.evaluate, source=_steady_source(0, range(2)), batch_size=2),
        call(train.train, model=fresh, source=_steady_source, out=Path("run"), **training),
        call(source, "TextSource()", step=0, rows=range(2)),
        call(TokenFile.open, folder=context.tokens),
        call(sudoku.is_solution, puzzles=torch.from_numpy(pool["puzzles"])),
        call(sudoku.canvas_digits, tokens=sudoku.canvas_tokens(pool["puzzles"])),
        call(sudoku.generate_puzzles, givens=60),
        *map(call, _rules()),
    ]


def _rules() -> list[type]:
    """The samplers and stop rules."""
    kinds = [getattr(dgemma.sampling, name) for name in dgemma.sampling.__all__]
    bases = (dgemma.Sampler, dgemma.StopRule)
    return [kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, bases) and is_dataclass(kind)]


_RUN: dict[str, Any] = {"max_new_tokens": C, "steps": 2, "progress": False}


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
    target = source.choice(context.targets)
    arguments = target.make()
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
    dgemma.generate(context.model, prompt(1), **_RUN, **options)


_CALLBACKS = {"source", "evaluate", "on_step", "optimizer"}
# Python and torch name the operation and the types that they refuse. An AttributeError or a KeyError names neither.
_CLEAR = (TypeError, RuntimeError, IndexError, ValueError)
FAMILIES = [Family("public functions", prepare, attempt, 20, others_errors=_CLEAR)]
