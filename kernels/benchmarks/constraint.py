"""The cost of a constraint: a captured step with and without a JSON schema, at the published vocabulary and canvas.

python kernels/benchmarks/constraint.py --automaton FILE      parity first, then time and memory
python kernels/benchmarks/constraint.py --make FILE           builds the automaton (needs outlines-core, no GPU)

The model has two layers of the published size. The constraint's cost does not depend on the number of layers, so it is
compared with the recorded step of all 30. The vocabulary has 262,144 tokens: those of the shipped tokenizer, and
random pairs and triples of them.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from step import CANVAS, GPU, draw_tokens, knobs_of, last_step, time_replays
from timing import demand_parity, describe_run, results_folder, time_graph

import dgemma
from dgemma.constraints.automaton import Automaton
from dgemma.constraints.canvas_language import Language
from dgemma.constraints.joint import ClassBias, condition
from dgemma.constraints.tables import with_stops
from dgemma.constraints.token_automaton import spell_tokens
from dgemma.constraints.token_text import token_texts
from dgemma.diffusion.prediction import Prediction, SoftCap
from dgemma.run.step import start_state
from dgemma_kernels import accelerate
from dgemma_kernels.engine.prediction import FusedPrediction, Logits
from dgemma_kernels.ops.automaton import kernel
from dgemma_kernels.ops.automaton.tables import with_tables

VOCAB_SIZE = 262_144
FULL_STEP_MS = 14.6  # the recorded bf16 step of all 30 layers on an H200
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "birth_date": {"type": "string", "format": "date"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "occupation": {"enum": ["teacher", "doctor", "lawyer", "engineer", "farmer", "artist", "student", "retired"]},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string"},
                "city": {"type": "string", "maxLength": 12},
                "country": {"enum": ["Norway", "Sweden", "Denmark", "Finland", "Iceland"]},
            },
            "required": ["street", "city", "country"],
        },
        "languages": {"type": "array", "items": {"enum": ["Norwegian", "English", "German", "French"]}, "maxItems": 3},
        "married": {"type": "boolean"},
        "income": {"type": "number", "minimum": 0},
        "notes": {"type": "string"},
    },
    "required": ["name", "birth_date", "age", "occupation", "address", "languages", "married", "income", "notes"],
}


def make_automaton(path: Path) -> None:
    """Build the automaton of SCHEMA over 262,144 tokens and save its tables."""
    tokenizer = dgemma.Tokenizer.from_pretrained("dgemma/text")
    pieces = [text for text in token_texts(tokenizer) if text]
    draw, texts = random.Random(0), list(token_texts(tokenizer))
    seen = set(pieces)
    while len(texts) < VOCAB_SIZE:
        text = b"".join(draw.choice(pieces) for _ in range(draw.choice((2, 2, 2, 3))))
        if len(text) <= 16 and text not in seen:
            seen.add(text)
            texts.append(text)
    from dgemma.constraints.builder import read_pattern

    pattern = dgemma.JsonSchema(SCHEMA, tokenizer).pattern
    tokens = spell_tokens(read_pattern(pattern), texts)
    automaton = with_stops(tokens, (1,), VOCAB_SIZE)
    tables = {"token_class": automaton.token_class, "next_state": automaton.next_state, "is_end": automaton.is_end}
    final = torch.cat((torch.from_numpy(tokens.is_final), torch.ones(1, dtype=torch.bool)))
    save_file({name: table.contiguous() for name, table in (tables | {"final": final}).items()}, path)
    print(describe(automaton))


def describe(automaton: Automaton) -> dict[str, int]:
    return {
        "states": automaton.num_states,
        "classes": automaton.num_classes,
        "arcs": len(automaton.arc_source),
        "links": len(automaton.link_arc),
        "most_arcs": int(automaton.arc_source.bincount().max()),
        "wide_classes": len(with_tables(automaton).wide_classes),
        "bytes": sum(t.nbytes for t in torch.utils._pytree.tree_leaves(with_tables(automaton))),
    }


def load_language(path: Path) -> Language:
    tables = load_file(path)
    automaton = Automaton.build(tables["token_class"], tables["next_state"], tables["is_end"]).to(GPU)
    return Language(automaton, torch.zeros(1, dtype=torch.int64, device=GPU), tables["final"][None].to(GPU))


def check_parity(language: Language, logits: torch.Tensor) -> Any:
    """Compare the kernels with the library's own PyTorch code on this GPU; return the conditioned prediction."""
    temperature = torch.tensor([0.6], device=GPU)
    fused = FusedPrediction(Logits(logits), (SoftCap(30.0),)).shaped(temperature=temperature)
    canvas = draw_tokens(1, CANVAS)
    fixed = torch.zeros_like(canvas, dtype=torch.bool)
    got = condition(fused, language, canvas, fixed)
    plain = Prediction(logits, (SoftCap(30.0),)).shaped(temperature=temperature)
    want = condition(plain, language, canvas, fixed)
    joint: Any = got.joint
    expected: Any = want.joint
    for name, one, other in (
        ("forward", joint._passes.forward, expected._passes.forward),
        ("backward", joint._passes.backward, expected._passes.backward),
        ("best", joint._passes.best, expected._passes.best),
        ("bias", joint.bias, expected.bias),
    ):
        demand_parity(name, one.nan_to_num(neginf=0.0), other.nan_to_num(neginf=0.0), 1e-4)
    demand_parity("entropy", got.entropy, want.entropy, 1e-3)
    u = torch.rand(1, CANVAS, dtype=torch.float64, device=GPU)
    same = (got.sample(u) == want.sample(u)).float().mean().item()
    best = (got.argmax == want.argmax).float().mean().item()
    print(f"[parity] samples equal {same:.3f}, best texts equal {best:.3f}")
    state = language.automaton.advance(language.start, got.sample(u))
    assert bool(language.end[0, state[0]]), "A sample must be in the language."
    return got


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--automaton", type=Path)
    parser.add_argument("--make", type=Path)
    options = parser.parse_args()
    if options.make is not None:
        make_automaton(options.make)
        return
    language = load_language(options.automaton)
    size = describe(language.automaton)
    print(f"[automaton] {size}", flush=True)
    generator = torch.Generator(device=GPU).manual_seed(0)
    logits = (4 * torch.randn(1, CANVAS, VOCAB_SIZE, device=GPU, generator=generator)).bfloat16()
    got: Any = check_parity(language, logits)
    results: dict[str, Any] = {"automaton": size}
    results["parts"] = time_parts(got, language)
    config = dgemma.presets.diffusiongemma_26b_a4b().replace(
        num_hidden_layers=2, layer_types=dgemma.model.published.default_layer_types(2)
    )
    model = accelerate(dgemma.DiffusionGemma(config, device=GPU, dtype=torch.bfloat16).requires_grad_(False), "bf16")
    knobs = knobs_of(model, stop=True)
    cache = model.encode(draw_tokens(1, 1024))
    steps = {}
    for name, constraint in (("free", None), ("constrained", language)):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        noise = dgemma.UniformNoise(VOCAB_SIZE)
        seeds = torch.zeros(1, dtype=torch.int64, device=GPU)
        state = start_state(knobs, noise, seeds=seeds, canvas_len=CANVAS, num_steps=48, language=constraint)
        for _ in range(3):
            state, record = model.step(state, cache=cache, knobs=knobs)
        assert torch.isfinite(record.entropy).all()
        captured = last_step(model)
        (step_ms, spread), *_ = time_replays(captured.replay)
        (soft_ms, _), *_ = time_replays(captured.soften)
        peak = torch.cuda.max_memory_allocated() - before
        steps[name] = {"step_ms": step_ms, "spread_ms": spread, "soft_ms": soft_ms, "peak_bytes": peak}
        print(f"[{name}] {steps[name]}", flush=True)
        if constraint is not None:
            end = language.automaton.advance(language.start, state.draft)
            assert bool(language.end[0, end[0]]), "A draft must be in the language."
    cost = sum(steps["constrained"][part] - steps["free"][part] for part in ("step_ms", "soft_ms"))
    results |= {"steps": steps, "cost_ms": cost, "share_of_full_step": cost / FULL_STEP_MS}
    print(f"[cost] {cost:.3f} ms, {100 * cost / FULL_STEP_MS:.1f} % of {FULL_STEP_MS} ms")
    path = results_folder() / "constraint.json"
    path.write_text(json.dumps({"run": describe_run(), **results}, indent=1) + "\n")
    print(f"wrote {path}")


def time_parts(got: Any, language: Language) -> dict[str, float]:
    """The median milliseconds of each part of the conditioning, in graphs of their own."""
    joint, automaton = got.joint, language.automaton
    prediction, u = joint.prediction, torch.rand(1, CANVAS, dtype=torch.float64, device=GPU)
    sums, best = joint._sums_and_maxima
    weights, best_weights, passed = joint._weights, joint._best_weights, joint._passes
    path = kernel.best_path(language, best_weights, passed.best)
    calls = {
        "class sums": lambda: kernel.class_sums(prediction, automaton),
        "arc weights": lambda: (
            kernel.arc_weights(language, sums, total=True),
            kernel.arc_weights(language, best, total=False),
        ),
        "passes": lambda: kernel.passes(language, weights, best_weights),
        "sampled path": lambda: kernel.sample_path(language, weights, passed.backward, u),
        "best path": lambda: kernel.best_path(language, best_weights, passed.best),
        "class bias": lambda: kernel.class_bias(language, passed),
        "tokens of a path": lambda: joint._spell(path, lambda p: p.argmax, joint.canvas, joint.decided),
        "statistics": lambda: prediction.with_bias(ClassBias(joint.bias, automaton.token_class)).entropy,
    }
    times = {}
    for name, call in calls.items():
        times[name] = time_graph(call)[0]
        print(f"[{name}] {times[name]:.3f} ms", flush=True)
    return times


if __name__ == "__main__":
    main()
