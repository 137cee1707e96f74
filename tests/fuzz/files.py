"""Damaged files of every format that dgemma reads, loaded and then used."""

import json
import math
import os
import pickle
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

import dgemma
import quantized_files
from dgemma import train
from dgemma.data import sudoku
from dgemma.data.text import TextSource, TokenFile, read_documents, scan
from dgemma.model.config import GenerationDefaults
from dgemma.train.checkpoints import Checkpoints
from dgemma.train.log import TrainLog
from dgemma.train.parallel import Parallel
from dgemma.view import to_html
from fuzz.harness import Family, Silent
from fuzz.mutate import CONTROL, ODD_JSON, damage_bytes, damage_json, damage_json_file, damage_safetensors, dump_json

TINY = dgemma.presets.tiny().replace(
    vocab_size=384, hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_experts=2, top_k_experts=1
)
TINY = TINY.replace(num_hidden_layers=2, layer_types=TINY.layer_types[-2:], canvas_length=8, head_dim=4)
TINY = TINY.replace(global_head_dim=4, num_attention_heads=2, num_key_value_heads=1, num_global_key_value_heads=1)


class Payload:
    """A pickle that leaves a file behind if anything executes it."""

    def __reduce__(self) -> Any:
        return exec, ("import os; open(os.environ['DGEMMA_FUZZ_CANARY'], 'w').close()",)


def tiny_model(seed: int = 0) -> dgemma.DiffusionGemma:
    model = dgemma.DiffusionGemma(TINY)
    model.reset_parameters(torch.Generator().manual_seed(seed))
    return model.eval()


def prompt(rows: int = 2) -> torch.Tensor:
    return torch.arange(128, 128 + 4 * rows).reshape(rows, 4)


def _copy(shared: Path, folder: Path) -> Path:
    target = folder / "copy"
    shutil.copytree(shared, target)
    return target


def _odd_file(path: Path, source: random.Random) -> bool:
    """Sometimes replace a file by a pipe, a folder, a device, a pickle or nothing; return True if so."""
    if source.random() > 0.04:
        return False
    path.unlink()
    kind = source.randrange(5)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    elif kind == 2:
        path.symlink_to("/dev/zero")
    elif kind == 3:
        path.write_bytes(pickle.dumps(Payload()))
    return True


def prepare_checkpoint(folder: Path) -> Any:
    model = tiny_model()
    model.save_pretrained(folder / "one")
    model.save_pretrained(folder / "shards", max_shard_size=4000)
    for name in ("one", "shards"):
        dgemma.ByteTokenizer().save_pretrained(folder / name)
    return SimpleNamespace(folder=folder)


def attempt_checkpoint(context: Any, source: random.Random, folder: Path) -> int:
    copy = _copy(context.folder / source.choice(("one", "shards")), folder)
    file = source.choice(sorted(copy.iterdir()))
    if not _odd_file(file, source):
        damage = damage_safetensors if file.suffix == ".safetensors" else damage_json_file
        file.write_bytes(damage(file.read_bytes(), source))
    model = dgemma.DiffusionGemma.from_pretrained(copy)
    if model.config == TINY:
        with torch.no_grad():
            model.causal_logits(prompt(1))
    return sum(path.stat().st_size for path in copy.iterdir())


def prepare_quantized(folder: Path) -> Any:
    formats = {
        "int4": (quantized_files.compressed, {"format": "pack-quantized"}),
        "int4, zero points": (quantized_files.compressed, {"format": "pack-quantized", "symmetric": False}),
        "int8": (quantized_files.compressed, {"format": "int-quantized"}),
        "fp8": (quantized_files.compressed, {"format": "float-quantized"}),
        "nvfp4": (quantized_files.compressed, {"format": "nvfp4-pack-quantized"}),
        "modelopt": (quantized_files.modelopt, {}),
        "auto-round": (quantized_files.gptq, {}),
        "gptq": (quantized_files.gptq, {"order": True, "method": "gptq"}),
        "mlx": (quantized_files.mlx, {}),
    }
    for name, (write, options) in formats.items():
        write(folder / name, **options)
    return SimpleNamespace(folder=folder, formats=list(formats))


EXPRESSIONS = ("re:(.+)+!$", "re:(.|.)*[!?]", "re:(a|b", "re:" + "(" * 2000, "re:(?:.*){9}!", "*" * 50 + "!")


def attempt_quantized(context: Any, source: random.Random, folder: Path) -> int:
    """Damage the config, the header, or the scales and indices of one module, and predict with what is accepted."""
    copy = _copy(context.folder / source.choice(context.formats), folder)
    config, tensors = copy / "config.json", copy / "model.safetensors"
    kind = source.random()
    if kind < 0.45:
        published = json.loads(config.read_text())
        name = "quantization_config" if "quantization_config" in published else "quantization"
        odd = [*ODD_JSON, 4.0, "4", [4], {"4": 4}, *([pattern] for pattern in EXPRESSIONS)]
        published[name] = damage_json(published[name], source, odd=odd)
        config.write_bytes(dump_json(published))
    elif kind < 0.75:
        tensors.write_bytes(damage_safetensors(tensors.read_bytes(), source))
    else:
        stored = load_file(tensors)
        _damage_scale(stored, source)
        save_file(stored, tensors, metadata={"format": "pt"})
    model = dgemma.DiffusionGemma.from_pretrained(copy)
    with torch.no_grad():
        logits = model.causal_logits(prompt(1) % model.config.vocab_size)
    if kind >= 0.75 and not logits.isfinite().all():
        raise Silent("a scale that is no number was accepted")
    return sum(path.stat().st_size for path in copy.iterdir())


def _damage_scale(stored: dict[str, torch.Tensor], source: random.Random) -> None:
    roles = ("weight_scale", "weight_scale_2", "global_scale", "scales", "biases", "g_idx", "zeros", "_point")
    name = source.choice([name for name in stored if name.endswith(roles)])
    tensor = stored[name]
    if source.random() < 0.5:
        dtypes = (torch.float32, torch.float16, torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool)
        stored[name] = tensor.to(source.choice(dtypes))
    elif tensor.is_floating_point():
        stored[name] = tensor.float().fill_(source.choice((math.nan, math.inf, -math.inf))).to(tensor.dtype)
    else:
        stored[name] = torch.full_like(tensor, source.choice((0, 1, 9, -1)))


def prepare_gguf(folder: Path) -> Any:
    quantized_files.gguf(folder / "model.gguf")
    return SimpleNamespace(data=(folder / "model.gguf").read_bytes())


def attempt_gguf(context: Any, source: random.Random, folder: Path) -> int:
    """Damage the bytes of the whole file or of its header, and predict with what is accepted."""
    path = folder / "model.gguf"
    data = context.data
    if source.random() < 0.7:  # numbers of the header
        at = source.randrange(4, 12_000)
        number = source.choice((0, 1, 2, 7, 26, 30, 255, 2**16, 2**31, 2**40, 2**63))
        data = data[:at] + number.to_bytes(8, "little")[: source.choice((1, 4, 8))] + data[at:][8:]
        data = data[: len(context.data)].ljust(len(context.data), b"\0")
    else:
        data = damage_bytes(data, source)
    path.write_bytes(data)
    _odd_file(path, source)
    model = dgemma.DiffusionGemma.from_pretrained(path)
    with torch.no_grad():
        model.causal_logits(prompt(1) % model.config.vocab_size)
    return len(data)


def prepare_config(folder: Path) -> Any:
    generation = tiny_model().generation.to_hf()
    return SimpleNamespace(config=TINY.to_hf(), generation=generation)


def attempt_config(context: Any, source: random.Random, folder: Path) -> None:
    if source.random() < 0.7:
        config = dgemma.ModelConfig.from_hf(damage_json(context.config, source))
        if config.num_hidden_layers < 50:
            dgemma.DiffusionGemma(config, device="meta")
    else:
        GenerationDefaults.from_hf(damage_json(context.generation, source))


def prepare_trajectory(folder: Path) -> Any:
    model = tiny_model()
    runs = {}
    for name, noise in (("uniform", None), ("mask", dgemma.MaskNoise(384, mask_token_id=4))):
        sampler = None if noise is None else dgemma.Threshold(tau=0.5)
        options = {"noise": noise, "sampler": sampler, "steps": 3, "max_new_tokens": 16, "eos_token_ids": ()}
        canvas = torch.full((2, 16), -1)
        canvas[:, 3] = 200
        out = dgemma.generate(
            model,
            prompt(),
            record=True,
            record_top=2,
            progress=False,
            canvas=canvas,
            frozen=canvas >= 0,
            allowed=list(range(100, 384)),
            on_step=lambda record: {"top_k": 5} if int(record.step[0]) == 1 else None,
            **options,
        )
        runs[name] = folder / f"{name}.safetensors"
        out.trajectory.save(runs[name])
    return SimpleNamespace(model=model, runs={name: path.read_bytes() for name, path in runs.items()})


def attempt_trajectory(context: Any, source: random.Random, folder: Path) -> int:
    path = folder / "run.safetensors"
    path.write_bytes(damage_safetensors(context.runs[source.choice(("uniform", "mask"))], source, metadata="dgemma"))
    _odd_file(path, source)
    size = path.stat().st_size if path.is_file() else 0
    run = dgemma.Trajectory.load(path)
    run.array("entropy"), run.new_tokens, run.num_forwards, repr(run)
    use = source.randrange(8)
    if use == 0:
        to_html(run, tokenizer=dgemma.ByteTokenizer())
    elif use == 1:
        run.replay(context.model)
    elif use == 2:
        run.save(folder / "again.safetensors")
        dgemma.Trajectory.load(folder / "again.safetensors")
    elif use == 3:
        run.fork(context.model, block=0, step=1, seed=3)
    return size


def prepare_adapters(folder: Path) -> Any:
    model = tiny_model()
    train.add_lora(model, train.LoRA(rank=2))
    train.save_lora(model, folder)
    data = (folder / "adapter_model.safetensors").read_bytes()
    return SimpleNamespace(data=data, config=json.loads((folder / "adapter_config.json").read_text()))


def attempt_adapters(context: Any, source: random.Random, folder: Path) -> int:
    path, damages_config = folder / "adapter_model.safetensors", source.random() < 0.4
    config = damage_json(context.config, source) if damages_config else context.config
    (folder / "adapter_config.json").write_bytes(dump_json(config))
    path.write_bytes(context.data if damages_config else damage_safetensors(context.data, source, metadata="noise"))
    if not damages_config:
        _odd_file(path, source)
    model = tiny_model()
    try:
        train.load_lora(model, folder)
    except ValueError:
        if not all(weight.requires_grad for weight in model.parameters()):
            raise Silent("a refused file left weights frozen") from None
        raise
    with torch.no_grad():
        model.causal_logits(prompt(1))
    return path.stat().st_size


def prepare_tokens(folder: Path) -> Any:
    text = folder / "text.txt"
    text.write_text("\f".join(f"story {n} of a few words" for n in range(6)))
    TokenFile.write(read_documents(text, separator="\f"), dgemma.ByteTokenizer(), folder / "tokens")
    return SimpleNamespace(folder=folder / "tokens", file=TokenFile.open(folder / "tokens"))


def attempt_tokens(context: Any, source: random.Random, folder: Path) -> int:
    copy = _copy(context.folder, folder)
    path = copy / source.choice(("about.json", "tokens.bin", "lengths.npy"))
    before = path.read_bytes()
    is_json = path.suffix == ".json"
    if not _odd_file(path, source):
        path.write_bytes((damage_json_file if is_json else damage_bytes)(before, source))
    file = TokenFile.open(copy)
    same = np.array_equal(file.tokens, context.file.tokens) and np.array_equal(file.starts, context.file.starts)
    if not same or (file.num_bytes != context.file.num_bytes and not is_json):
        raise Silent("other tokens were accepted")
    batch = TextSource(file=file, canvas_len=8, num_canvases=2, batch_size=2)(0, range(2))
    scan(file, row_len=16, context=8)
    return int(batch.tokens.numel())


def _steady_source(step: int, rows: range) -> train.TrainBatch:
    tokens = torch.full((len(rows), 17), 130) + torch.arange(17)
    return train.TrainBatch(tokens=tokens, prompt_len=torch.ones(len(rows)).long(), length=torch.full((len(rows),), 17))


def _train(model: dgemma.DiffusionGemma, out: Path, steps: int = 2) -> Any:
    objective = train.recipes.dgemma(TINY, noise=dgemma.UniformNoise(384), fill_token=1)
    config = train.TrainConfig(steps=steps, batch_size=2, precision="weights", progress=False, checkpoint_every=1)
    return train.train(model, objective, _steady_source, config, out=out)


def prepare_training(folder: Path) -> Any:
    _train(tiny_model(), folder / "run")
    shutil.rmtree(folder / "run" / "final")
    checkpoints = Checkpoints(folder=folder / "run", keep_last=2, parallel=Parallel())
    return SimpleNamespace(folder=folder / "run", names=checkpoints.names(checkpoints.path(2)))


def attempt_training(context: Any, source: random.Random, folder: Path) -> int:
    """Damage the last checkpoint or the log of a run. A change of the state must be noticed."""
    copy = _copy(context.folder, folder)
    path = copy / source.choice(("step-000002/run.json", "step-000002/state-00000-of-00001.safetensors", "log.jsonl"))
    before = path.read_bytes()
    if path.suffix != ".safetensors" and source.random() < 0.6:
        lines = before.splitlines() if path.suffix == ".jsonl" else [before]
        number = source.randrange(len(lines))
        lines[number] = damage_json_file(lines[number], source)
        path.write_bytes(b"\n".join(lines) + b"\n")
    elif not _odd_file(path, source):
        path.write_bytes(damage_bytes(before, source))
    elif path.name == "state-00000-of-00001.safetensors" and not path.exists():
        (path.parent / ".metadata").write_bytes(pickle.dumps(Payload()))
    log = TrainLog(copy / "log.jsonl")
    log.lines(), log.column("loss")
    if path.name == "log.jsonl":
        log.cut(1)
        return len(before)
    checkpoints = Checkpoints(folder=copy, keep_last=2, parallel=Parallel())
    last = checkpoints.latest()
    assert last is not None
    state = {f"model.{name}": tensor for name, tensor in tiny_model().state_dict().items()}
    checkpoints.load(last, state)
    if path.suffix == ".safetensors" and path.read_bytes() != before:
        raise Silent("another state was accepted")
    return len(before)


def prepare_puzzles(folder: Path) -> Any:
    sudoku.generate_puzzles(3, givens=60).save(folder / "puzzles.txt")
    return SimpleNamespace(data=(folder / "puzzles.txt").read_bytes())


def attempt_puzzles(context: Any, source: random.Random, folder: Path) -> int:
    path = folder / "puzzles.txt"
    path.write_bytes(damage_bytes(context.data, source))
    _odd_file(path, source)
    sudoku.Puzzles.load(path).givens.sum()
    return path.stat().st_size


DOCUMENTS = b'{"prompt": "a", "answer": "b"}\n{"text": "c \\u00e9"}\n\n{"prompt": "x", "answer": "", "id": 7}\n'


def attempt_documents(context: Any, source: random.Random, folder: Path) -> int:
    path = folder / source.choice(("a.jsonl", "a.txt"))
    data = DOCUMENTS
    if path.suffix == ".jsonl" and source.random() < 0.5:
        lines = [line for line in data.splitlines() if line]
        number = source.randrange(len(lines))
        lines[number] = damage_json_file(lines[number], source)
        data = b"\n".join(lines)
    else:
        data = damage_bytes(data, source)
    path.write_bytes(data)
    _odd_file(path, source)
    list(read_documents(path, separator=source.choice((None, "\n", "b"))))
    return len(data)


def prepare_tokenizer(folder: Path) -> Any:
    text = ["a story of some words, told twice: " + " ".join(map(str, range(40)))] * 4
    from dgemma.data.corpus import train_tokenizer

    train_tokenizer(text, 270, folder / "plain")
    (folder / "plain" / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'odd' %}{{ raise_exception('roles') }}{% endif %}"
        "<{{ m.role }}>{{ m.content | trim }}{% endfor %}{% if enable_thinking %}!{% endif %}"
    )
    dgemma.Tokenizer.from_pretrained(folder / "plain").chat("warm up the imports")
    return SimpleNamespace(folder=folder / "plain")


def attempt_tokenizer(context: Any, source: random.Random, folder: Path) -> int:
    copy = _copy(context.folder, folder)
    path = copy / source.choice(("tokenizer.json", "tokenizer.json", "tokenizer_config.json"))
    if not _odd_file(path, source):
        path.write_bytes(damage_json_file(path.read_bytes(), source))
    tokenizer = dgemma.Tokenizer.from_pretrained(copy)
    tokenizer.decode(tokenizer.encode("a story"))
    tokenizer.save_pretrained(folder / "again")
    return sum(file.stat().st_size for file in copy.iterdir())


TEMPLATES = (
    "{{ messages[0].role", "{% for %}", "{{ 1/0 }}", "{{ raise_exception('" + CONTROL + "') }}", "{{ x.y.z }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages | nothing }}", "{{ messages.append(1) }}",
    "{{ cycler.__init__.__globals__.os.system('touch $DGEMMA_FUZZ_CANARY') }}", "{% include '/etc/passwd' %}",
    "{% for a in range(10**9) %}{% endfor %}", "{{ 'x' * 10**12 }}",
)  # fmt: skip


def attempt_template(context: Any, source: random.Random, folder: Path) -> None:
    copy = _copy(context.folder, folder)
    template = copy / "chat_template.jinja"
    if source.random() < 0.5:
        template.write_text(source.choice(TEMPLATES))
    else:
        template.write_bytes(damage_bytes(template.read_bytes(), source))
    tokenizer = dgemma.Tokenizer.from_pretrained(copy)
    turns = [{"role": source.choice(("user", "odd", "", CONTROL)), "content": source.choice(("hi", "", None, 3))}]
    tokenizer.chat(source.choice(("hi", turns)), thinking=source.random() < 0.3)


def nothing(folder: Path) -> None:
    return None


FAMILIES = [
    Family("checkpoint", prepare_checkpoint, attempt_checkpoint, 14),
    Family("config", prepare_config, attempt_config, 16),
    Family("quantised checkpoint", prepare_quantized, attempt_quantized, 16),
    Family("gguf", prepare_gguf, attempt_gguf, 12),
    Family("trajectory", prepare_trajectory, attempt_trajectory, 16),
    Family("adapters", prepare_adapters, attempt_adapters, 8),
    Family("tokens", prepare_tokens, attempt_tokens, 10),
    Family("training state", prepare_training, attempt_training, 10),
    Family("puzzles", prepare_puzzles, attempt_puzzles, 4),
    Family("documents", nothing, attempt_documents, 6),
    Family("tokenizer", prepare_tokenizer, attempt_tokenizer, 3),
    Family("chat template", prepare_tokenizer, attempt_template, 1),
]
