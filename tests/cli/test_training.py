"""`dgemma train` writes a usable checkpoint, merges adapters, and continues with the same command."""

import functools
import json
import math
import shutil
import statistics
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import dgemma
from data.test_sudoku import SOLUTION
from dgemma.cli import training
from dgemma.data.text import TokenFile
from dgemma.train.adapter_files import load_lora

QUICK = ("--steps", "3", "--batch-size", "2", "--canvases", "2", "--lr", "0.01")


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    file = tmp_path_factory.mktemp("words") / "words.txt"
    file.write_text("to be or not to be, that is the question. " * 12)
    return file


def means(folder, num_steps, words):
    """Return the means of the last lines of the log, as the command prints them. A byte is a token of these models."""
    decoder, causal = (statistics.fmean(losses(folder, name)[-num_steps:]) for name in ("decoder", "causal"))
    return (
        f"denoising nats per token {decoder:.3f}, autoregressive nats per token {causal:.3f}, "
        f"autoregressive bits per byte {bits_per_byte(causal, words):.3f}"
    )


@contextmanager
def stopped_after_a_step(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(training._Samples, "__call__", lambda samples, record: True)
        yield


def losses(folder, name):
    return [json.loads(line)[f"loss/{name}"] for line in (folder / "log.jsonl").read_text().splitlines()]


def bits_per_byte(nats_per_token, words):
    num_bytes = words.stat().st_size
    num_canvases = math.ceil((num_bytes + 2) / 32)  # with begin and end of the text
    return nats_per_token / math.log(2) * 32 * num_canvases / num_bytes


def test_m_accepts_the_folder_of_a_trained_model(command, checkpoint, words, tmp_path):
    ran = command("train", "-m", checkpoint, "--out", tmp_path, *QUICK, words)
    assert ran.code == 0
    assert ran.out == f"Wrote {tmp_path / 'final'} after 3 steps. Means: {means(tmp_path, 3, words)}.\n"
    assert "reads all of" not in ran.err  # 505 tokens are 16 canvases, one or two in each row
    before, after = (load_file(folder / "model.safetensors") for folder in (checkpoint, tmp_path / "final"))
    assert not torch.equal(before["model.decoder.embed_tokens.weight"], after["model.decoder.embed_tokens.weight"])
    assert command("generate", "-m", tmp_path / "final", "-n", "1", "--steps", "1", "Hi").code == 0
    for words_of_run in (("generate", "-m", tmp_path, "Hi"), ("info", tmp_path)):
        ran = command(*words_of_run)
        assert ran.code == 2
        assert f"is the folder of a training run. Use its result, {tmp_path / 'final'}." in ran.err
    shutil.rmtree(tmp_path / "final")  # as before the end of a run
    assert "is the folder of a training run. The call that began it continues" in command("info", tmp_path).err


@pytest.mark.slow  # needs extras that only developers install
def test_a_dataset_trains_like_a_file_with_the_same_rows(command, checkpoint, words, tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text(json.dumps({"text": words.read_text()}) + "\n")
    for out, source in (("file", [words]), ("dataset", ["--dataset", tmp_path / "data"])):
        assert command("train", "-m", checkpoint, "--out", tmp_path / out, *QUICK, *source).code == 0
    assert losses(tmp_path / "file", "decoder") == losses(tmp_path / "dataset", "decoder")
    ran = command("train", "-m", checkpoint, "--out", tmp_path / "both", words, "--dataset", "a")
    assert (ran.code, ran.err[:50]) == (2, "dgemma train: the command line must have files, or")


@pytest.mark.parametrize(
    ("separator", "note"),
    [
        (r"\n", r"--separator '\\n' is in no file, so each file is one document. In bash, write $'\n'."),
        ("question", None),
    ],
)
def test_a_separator_that_is_in_no_file_is_noted(command, checkpoint, words, separator, note):
    ran = command("evaluate", "-m", checkpoint, "--samples", "1", "--rows", "1", "--separator", separator, words)
    assert ran.code == 0
    assert ("--separator" in ran.err) is (note is not None)
    assert note is None or note in ran.err.splitlines()


def test_from_scratch_the_preset_takes_the_tokenizers_vocabulary(command, checkpoint, words, tmp_path):
    ran = command(
        "train", "-m", checkpoint, "--preset", "tiny", "--out", tmp_path, *QUICK, "--ema", "0.5", "--json", words
    )
    summary = json.loads(ran.out)
    assert (summary["final"], summary["step"], summary["new_steps"]) == (str(tmp_path / "final"), 3, 3)
    model = dgemma.DiffusionGemma.from_pretrained(tmp_path / "final")
    assert model.config.vocab_size == 384
    assert model.config.max_position_embeddings == 8192  # the preset's, not the checkpoint's 256
    assert sorted(model.generation.eos_token_id) == [1, 50, 106]


def test_adapters_are_merged_at_the_end(command, checkpoint, words, tmp_path):
    assert command("train", "-m", checkpoint, "--out", tmp_path, *QUICK, "--lora", "2", words).code == 0
    merged = dgemma.DiffusionGemma.from_pretrained(tmp_path / "final")
    adapted = dgemma.DiffusionGemma.from_pretrained(checkpoint)
    tokens = torch.arange(130, 150)[None]
    base = adapted.causal_logits(tokens)
    load_lora(adapted, tmp_path / "final" / "adapters")
    torch.testing.assert_close(merged.causal_logits(tokens), adapted.causal_logits(tokens), rtol=1e-4, atol=1e-5)
    assert (merged.causal_logits(tokens) - base).abs().max() > 1e-3
    write = ("generate", "-n", "32", "--steps", "2", "Hi")
    adapter = ("-m", checkpoint, "--adapter", tmp_path / "final" / "adapters")
    assert command(*write, *adapter).out == command(*write, "-m", tmp_path / "final").out


def test_pictures_of_a_file_train_the_projection(command, tmp_path):
    model = dgemma.DiffusionGemma(dgemma.presets.tiny(vision=True))
    model.save_pretrained(tmp_path / "model")
    dgemma.ByteTokenizer().save_pretrained(tmp_path / "model")
    Image.new("RGB", (60, 20), "red").save(tmp_path / "red.png")
    line = {"prompt": "Colour?", "answer": "red", "images": [str(tmp_path / "red.png")]}
    (tmp_path / "data.jsonl").write_text(json.dumps(line))
    out = command(
        "train", "-m", tmp_path / "model", "--out", tmp_path / "run", *QUICK, "--lora", "2", tmp_path / "data.jsonl"
    )
    assert out.code == 0
    trained = dgemma.DiffusionGemma.from_pretrained(tmp_path / "run" / "final")
    changed = {
        name for name, w in trained.vision.named_parameters() if not torch.equal(w, model.vision.get_parameter(name))
    }
    assert changed == {"embedding_projection.weight"}
    without = command(
        "train", "--preset", "tiny", "-m", tmp_path / "model", "--out", tmp_path / "b", tmp_path / "data.jsonl"
    )
    assert "without a vision tower. Load a model with one" in without.err


def test_the_same_command_continues_where_it_was_stopped(command, checkpoint, words, tmp_path, monkeypatch):
    def train(out):
        return command("train", "-m", checkpoint, "--out", tmp_path / out, *QUICK, words)

    assert train("whole").code == 0
    with stopped_after_a_step(monkeypatch):
        assert train("parts").code == 130
    assert not (tmp_path / "parts" / "final").exists()
    assert train("parts").out.startswith("Wrote ")
    whole, parts = (load_file(tmp_path / out / "final" / "model.safetensors") for out in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    again = train("parts")  # a finished run stays finished
    assert again.code == 0
    assert again.out.startswith(f"Already finished: {tmp_path / 'parts' / 'final'}. Train on with -m")
    assert not list((tmp_path / "parts").glob("step-*"))  # they are several times as large as the result


def test_minutes_replace_steps(command, checkpoint, words, tmp_path, monkeypatch):
    minutes = []
    real = training.train

    def three_steps(model, objective, source, config, **options):
        minutes.append(config.minutes)
        return real(model, objective, source, replace(config, steps=3, minutes=None, warmup=0), **options)

    monkeypatch.setattr(training, "train", three_steps)
    quick = ("train", "-m", checkpoint, "--out", tmp_path, *QUICK[2:], words)
    assert command(*quick, "--minutes", "2.5").code == 0
    assert minutes == [2.5]
    both = command(*quick, "--minutes", "2.5", "--steps", "3")
    assert (both.code, both.err[:53]) == (2, "dgemma train: --steps must not be used with --minutes")


def test_a_refused_text_leaves_no_folder(command, checkpoint, words, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "some words"}\n{"text": 3}\n')
    assert command("train", "-m", checkpoint, "--out", tmp_path / "runs" / "run", tmp_path / "bad.jsonl").code == 2
    assert not (tmp_path / "runs").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes").touch()  # a file of the user
    assert command("train", "-m", checkpoint, "--out", tmp_path / "run", tmp_path / "bad.jsonl").code == 2
    assert (tmp_path / "run" / "notes").exists()


def sample_often(monkeypatch):
    """Print a sample at every training step. A sample takes two denoising steps."""
    generate = training.generate
    monkeypatch.setattr(training, "_SAMPLE_SECONDS", 0)
    monkeypatch.setattr(training, "_SAMPLE_PART", 0)
    monkeypatch.setattr(training, "generate", lambda *args, **options: generate(*args, **options | {"steps": 2}))


def test_means_are_over_the_last_steps_and_samples_come_now_and_then(command, checkpoint, words, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "_NUM_AVERAGED", 2)
    sample_often(monkeypatch)
    ran = command("train", "-m", checkpoint, "--out", tmp_path, *QUICK, words)
    assert ran.out.endswith(f"after 3 steps. Means over the last 2: {means(tmp_path, 2, words)}.\n")
    assert [line.split(":")[0] for line in ran.err.splitlines() if line.startswith("step ")] == [
        f"step {step}, {bits_per_byte(loss, words):.3f} bits per byte"
        for step, loss in enumerate(losses(tmp_path, "causal"), start=1)
    ]


def test_short_documents_do_not_look_likely_by_their_fill(command, checkpoint, tmp_path, words):
    """Most tokens of a canvas with three letters are fill. Their cost belongs to nine bytes, not to 4 × 32."""
    (tmp_path / "short.txt").write_text("to|be|or|not")
    ran = command(
        *("train", "-m", checkpoint, "--out", tmp_path / "run", "--json", "--steps", "1", "--separator", "|"),
        tmp_path / "short.txt",
    )
    found = json.loads(ran.out)
    nats = 4 * 32 * found["autoregressive_nats_per_token"]  # four documents of one canvas
    assert found["autoregressive_bits_per_byte"] == pytest.approx(nats / math.log(2) / 9)


def test_samples_do_not_change_the_training(command, checkpoint, words, tmp_path, monkeypatch):
    for name in ("plain", "sampled"):
        if name == "sampled":
            sample_often(monkeypatch)
        assert command("train", "-m", checkpoint, "--out", tmp_path / name, *QUICK, words).code == 0
    plain, sampled = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("plain", "sampled"))
    assert all(torch.equal(plain[name], sampled[name]) for name in plain)


def test_a_run_keeps_its_tokens_and_refuses_changed_text(command, checkpoint, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 12)
    writes = []
    real = TokenFile.write
    monkeypatch.setattr(TokenFile, "write", lambda *a, **k: writes.append(1) or real(*a, **k))
    run = functools.partial(command, "train", "-m", checkpoint, "--out", tmp_path / "run", *QUICK)
    with stopped_after_a_step(monkeypatch):
        assert run(text).code == 130
        (tmp_path / "elsewhere").mkdir()
        text = text.rename(tmp_path / "elsewhere" / "text.txt")
        assert run(text).code == 130
    assert len(writes) == 1
    for change, named in ((("--separator", "be"), "another separator"), ((), "another file 1, text.txt")):
        if not change:
            text.write_text(text.read_text().replace("question", "answer"))
        ran = run(*change, text)
        assert ran.code == 2
        assert "the text must stay as in the run in" in ran.err
        assert named in ran.err
        assert len(ran.err.strip().splitlines()) == 1
    assert len(writes) == 1
    assert run(text, "--allow-changes").code == 0
    assert len(writes) == 2


def test_a_text_that_every_step_reads_completely_is_noted(command, checkpoint, tmp_path):
    (tmp_path / "one.jsonl").write_text('{"prompt": "to be", "answer": "or not"}')
    note = "The files have 1 row and a step takes 2, so every step reads all of the text"
    ran = command("train", "-m", checkpoint, "--out", tmp_path / "few", *QUICK, tmp_path / "one.jsonl")
    assert ran.code == 0
    assert len([line for line in ran.err.splitlines() if line.startswith(note)]) == 1


def test_mixing_prompts_and_running_text_is_refused(command, checkpoint, words, tmp_path):
    # Every document would become one short row, and most of the text would be unused.
    (tmp_path / "one.jsonl").write_text('{"prompt": "Who goes there?", "answer": "I."}\n')
    ran = command("train", "-m", checkpoint, "--out", tmp_path / "run", *QUICK, words, tmp_path / "one.jsonl")
    assert ran.code == 2
    assert "got 1 of 2 documents without a prompt" in ran.err


def test_the_fill_after_a_cut_answer_is_not_scored(command, checkpoint, tmp_path, monkeypatch):
    # The model would learn to stop in mid-sentence.
    lines = [{"prompt": "p" * 30, "answer": "a"}, {"prompt": "p", "answer": "long " * 60}]
    (tmp_path / "cut.jsonl").write_text("\n".join(map(json.dumps, lines)))
    objectives = []
    real = training.train
    monkeypatch.setattr(
        training,
        "train",
        lambda model, objective, *a, **k: objectives.append(objective) or real(model, objective, *a, **k),
    )
    ran = command("train", "-m", checkpoint, "--out", tmp_path / "run", *QUICK, tmp_path / "cut.jsonl")
    assert ran.code == 0
    assert "1 of 2 answers are cut" in ran.err
    assert objectives[0].truncated == "unscored"


def test_rl_learns_from_prompts_and_answers(command, checkpoint, tmp_path):
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": n + 1}) + "\n" for n in range(5)))
    settings = ("--steps", "2", "--batch-size", "2", "--group", "2", "-n", "4", "--run-steps", "2", "--lora", "2")
    ran = command(
        "train", "-m", checkpoint, "--rl", file, "--reward", "numeric", "--out", tmp_path / "run", "--speed", "1",
        *settings, "--kl", "0.1", "--sampler", "soft-threshold", "--json",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    result = json.loads(ran.out)
    assert result["step"] == 2
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert result["forwards"] == pytest.approx(statistics.fmean(line["run/forwards"] for line in lines))
    assert lines[0]["loss/kl"] == 0.0
    assert command("generate", "-m", tmp_path / "run" / "final", "-n", "1", "--steps", "1", "Hi").code == 0
    file.write_text(json.dumps({"prompt": "1+1=", "answer": "two"}))
    ran = command("train", "-m", checkpoint, "--rl", file, "--reward", "numeric", "--out", tmp_path / "other")
    assert (ran.code, ran.err) == (2, "dgemma train: numeric answer must have a number, got 'two'.\n")
    (tmp_path / "own.py").write_text("def half(texts, answers):\n    return [0.5 for _ in texts]\n")
    own = ("train", "-m", checkpoint, "--rl", file, "--out", tmp_path / "own", *settings, "--batch-size", "1", "--json")
    assert json.loads(command(*own, "--reward", f"{tmp_path / 'own.py'}:half").out)["reward"] == 0.5
    for name, words in {
        f"{tmp_path / 'own.py'}:third": "no attribute 'third'",
        f"{tmp_path / 'none.py'}:half": "No such file",
        "nowhere.rewards:half": "No module named 'nowhere'",
        "json:__name__": "must be a function",
        "half": "must be one of exact, numeric, regex, json, sudoku, countdown, got 'half'. Name your own",
    }.items():
        ran = command("train", "-m", checkpoint, "--rl", file, "--out", tmp_path / "other", "--reward", name)
        assert (ran.code, words in ran.err) == (2, True), ran.err
    ran = command("train", "--rl", file, "--out", tmp_path / "other", "--preset", "tiny")
    assert (ran.code, "start from a checkpoint, got --preset tiny. Name one with -m." in ran.err) == (2, True)
    assert not (tmp_path / "other").exists()


def test_rl_trains_and_saves_a_sudoku_solver(command, tmp_path):
    file = tmp_path / "puzzle.jsonl"
    file.write_text(json.dumps({"prompt": "." + SOLUTION[1:], "answer": SOLUTION}))
    settings = ("--steps", "1", "--batch-size", "1", "--group", "2", "--run-steps", "2", "--lora", "2", "--json")
    ran = command(
        "train", "-m", "dgemma/sudoku", "--rl", file, "--reward", "sudoku", "--out", tmp_path / "run", *settings
    )
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["reward"] == 1.0  # one blank
