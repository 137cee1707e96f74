"""Bad arguments: one line on standard error, exit code 2, nothing on standard output, no traceback."""

import importlib
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dgemma
from dgemma.cli import loading
from dgemma.cli.main import build_parser
from dgemma.quantization.rounding import FORMATS

COMMANDS = (
    *("generate", "chat", "infill", "edit", "sudoku"),
    *("info", "bench", "quantize", "evaluate", "train", "serve"),
)
CONTRADICTION = "55" + "." * 79


def refuses(ran, *messages):
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.count("\n") == 1
    assert ran.err.endswith("\n")
    for words in messages:
        assert words in ran.err


REFUSED = [
    (("generte",), "evaluate, train, serve, got 'generte', perhaps you meant generate."),
    (("generate", ""), "must not be empty"),
    (("generate", "bytes \udcff"), "must be UTF-8"),
    (("generate", "-m", "/no/such/folder", "Hi"), "'/no/such/folder' is neither a folder nor a hub id"),
    (("generate", "-m", "dgemma/novels", "Hi"), "dgemma/novels does not ship with dgemma"),
    (("generate", "dgemma/text", "Hi"), "dgemma/text is a model, not part of the text. Write --model before it"),
    (("generate", "--steps", "0", "Hi"), "--steps must be a whole number of at least 1, got 0"),
    (("generate", "--output", "run.jsonl", "Hi"), "unknown: --output, perhaps you meant --out."),
    (("generate", "--temp", "2", "Hi"), "unknown: --temp, perhaps you meant --temperature."),
    (("infill", "--level", "3", "a__"), "unknown: --level. See"),
    (("generate", "--gif", "run.png", "Hi"), "--gif must be a file that ends in .gif, got 'run.png'"),
    (
        ("generate", "--temperature", "1e-300", "Hi"),
        "ConstantTemperature.value must be from 1e-30 to 1e+30, got 1e-300",
    ),
    (
        ("generate", "--sampler", "threshold:tau=1,tau=0.5", "Hi"),
        "--sampler must name every field once, got 'tau' again",
    ),
    (("sudoku", "--sampler", "leave-one-out-gibbs"), "LeaveOneOutGibbs must run under uniform noise, got 'mask'."),
    (("evaluate", "--separator", "", "words.txt"), "--separator must not be empty"),
    (("generate", "--sampler", "best", "Hi"), "--sampler must be one of ancestral,"),
    (("generate", "--sampler", "threshold:bound=1", "Hi"), "which takes tau=…, block_len=…, greedy=…"),
    (("generate", "--sampler", "threshold:tau", "Hi"), "got 'tau'"),
    (("generate", "--noise", "hybrid", "Hi"), "EntropyBound must run under mask or uniform noise, got 'hybrid'"),
    (("generate", "--regex", "a", "--choice", "b", "Hi"), "--choice must not be used with --regex"),
    (("generate", "--regex", "a[", "Hi"), "got 'a[': unterminated character set at position 1"),
    (("generate", "--device", "gpu", "Hi"), "--device must be cpu, cuda or cuda:N, got 'gpu'"),
    (("generate", "--html", "/no/such/folder/run.html", "Hi"), "--html must be a file that can be written"),
    (
        ("generate", "--html", "a.gif", "--gif", "../" + Path.cwd().name + "/a.gif", "Hi"),
        "--gif must be another file than that of --html, got",
    ),
    (("generate", "--input", "a.jsonl", "--out", "a.jsonl"), "--out must be another file than that of --input"),
    (("infill", "no holes, only _"), "must have a hole"),
    (("edit", "--keep", "ho", "Hi"), "--keep must name words of the text, got 'ho'"),
    (("edit", "--keep", "Hi you", "Hi you"), "--keep must leave words to rewrite, got the whole text"),
    (("sudoku", "--givens", "5"), "--givens must be a whole number from 23 to 81, got 5"),
    (("sudoku", "." * 80), "a puzzle must have 81 characters, got 80"),
    (("sudoku", CONTRADICTION), "contradict each other"),
    (("sudoku", "-m", "dgemma/text"), "must be a Sudoku solver, with 824 tokens and canvas 81"),
    (("generate", "--device", "cuda", "Hi"), "must name a device that torch can use here, got 'cuda'"),
    (("generate", "--fast", "Hi"), "--fast needs a GPU"),
    (("generate", "--weights", "fp8", "Hi"), "--weights must be used with --fast"),
    (("train", "words.txt"), "required: --out"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[" ".join(w[:3])[:40] for w, _ in REFUSED])
def test_bad_arguments_get_one_sentence(command, words, message):
    refuses(command(*words), f"dgemma {words[0]}:" if words[1:] else "dgemma:", message)


def test_a_prompt_longer_than_the_context_is_refused(command, checkpoint):
    refuses(command("generate", "-m", checkpoint, "x" * 400), "got 657. The run writes 256 tokens.")
    refuses(command("generate", "-m", checkpoint, "-n", 32, "x" * 400), "got 433. The run writes 32 tokens.")
    refuses(command("generate", "-m", checkpoint, "-n", 999, "Hi"), "be an integer of at least 1 and at most 256")


def test_a_port_in_use_is_refused_before_the_model_is_loaded(command, checkpoint, monkeypatch):
    pytest.importorskip("fastapi")
    monkeypatch.setattr(loading, "load_denoiser", lambda arguments: pytest.fail("the model was loaded"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        ran = command("serve", "-m", checkpoint, "--port", other.getsockname()[1])
    assert (ran.code, ran.out) == (1, "")
    assert "cannot be used: Address already in use. Choose another one." in ran.err


def test_other_encodings_than_utf8_are_refused(command, checkpoint):
    refuses(command("generate", "-m", checkpoint, stdin="Où?".encode("latin-1")), "standard input must be UTF-8")
    refuses(command("chat", "-m", checkpoint, stdin="Où?".encode("latin-1")), "standard input must be UTF-8")


def test_a_folder_without_a_model_is_not_a_checkpoint(command, checkpoint, tmp_path):
    for words in (("generate", "-m", tmp_path, "Hi"), ("info", tmp_path)):
        refuses(command(*words), f"{tmp_path} holds no checkpoint: there is no config.json")
    dgemma.ByteTokenizer().save_pretrained(tmp_path)
    refuses(command("generate", "-m", tmp_path, "Hi"), f"{tmp_path}/config.json does not exist")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"sampler": {"name": "best"}}, "must be one of ancestral,"),
        ({"noise": {"kind": "mask", "mask_token_id": 10**6}}, "must fit mask: MaskNoise.mask_token_id must"),
    ],
)
def test_a_mistake_in_a_config_is_named_by_its_entry(command, checkpoint, tmp_path, entry, message):
    folder, (name,) = shutil.copytree(checkpoint, tmp_path / "model"), entry
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entry))
    for words in (("generate", "-m", folder, "Hi"), ("bench", "-m", folder)):
        refuses(command(*words), f"GenerationDefaults.{name} ", message, "or correct config.json.")
    others = ("--sampler", "ancestral", "--noise", "uniform")
    assert command("generate", "-m", folder, *others, "-n", 32, "--steps", 1, "Hi").code == 0


@pytest.mark.parametrize("line", [{"prompt": "2 + 2 =", "answer": ""}, {"text": ""}], ids=["answers", "texts"])
def test_files_with_only_empty_answers_or_texts_are_refused(line, command, checkpoint, tmp_path):
    (tmp_path / "empty.jsonl").write_text(2 * f"{json.dumps(line)}\n")
    for words in (("evaluate",), ("train", "--out", tmp_path / "run")):
        ran = command(*words, "-m", checkpoint, tmp_path / "empty.jsonl")
        refuses(ran, "the files must have a text or an answer that is not empty, got none. Add one to the files.")
    assert not (tmp_path / "run").exists()


def test_a_file_in_place_of_a_folder_is_refused_and_nothing_is_written(command, checkpoint, tmp_path):
    (tmp_path / "words.txt").write_text("some words " * 40)
    # A file in place of a folder fails for every user. The superuser may write into read-only folders.
    refuses(command("generate", "-m", checkpoint, "--html", tmp_path / "words.txt" / "run.html", "Hi"), "--html must")
    out = tmp_path / "words.txt" / "run"
    refuses(command("train", "-m", checkpoint, "--out", out, tmp_path / "words.txt"), "Not a directory")
    (tmp_path / "link.html").symlink_to("run.html")  # a link to a file that is still to be made
    for file in ("run.html", "link.html"):
        refuses(command("generate", "-m", "/no/such/folder", "--html", tmp_path / file, "Hi"), "neither a folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.html", "words.txt"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_not_reported_as_a_bad_argument(command, checkpoint):
    ran = command("generate", "-m", checkpoint, "-n", "32", "--steps", "1", "--html", "/dev/full", "Hi")
    assert ran.code == 1
    assert ran.err.startswith("dgemma generate: /dev/full could not be written: No space left on device. ")
    assert ran.err.count("\n") == 1


def test_no_command_prints_the_help(command):
    ran = command()
    assert ran.code == 0
    assert ran.out.startswith("usage: dgemma COMMAND")
    assert all(f"\n    {name} " in ran.out for name in COMMANDS)


@pytest.mark.parametrize("columns", ["40", "80"])
@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_the_width_of_the_terminal(command, monkeypatch, name, columns):
    monkeypatch.setenv("COLUMNS", columns)
    ran = command(name, "--help")
    assert ran.code == 0
    assert ran.out.startswith(f"usage: dgemma {name} ")
    unbreakable = ("google/diffusiongemma", "--sampler NAME[", "(entropy-bound:bound")
    long = [
        line for line in ran.out.splitlines() if len(line) > int(columns) and not any(u in line for u in unbreakable)
    ]
    assert not long


def test_every_command_has_a_function_and_every_option_is_explained():
    (commands,) = (action for action in build_parser()._actions if action.dest == "command")
    assert tuple(commands.choices) == COMMANDS
    for name, parser in commands.choices.items():
        assert [action.dest for action in parser._actions if not action.help] == [], name
        module = importlib.import_module(f"dgemma.cli.{parser.get_default('module')}")
        assert callable(getattr(module, f"run_{name}"))


def test_choices_that_the_parser_lists_without_torch_are_those_of_the_library():
    (commands,) = (action for action in build_parser()._actions if action.dest == "command")
    choices = {action.dest: action.choices for parser in commands.choices.values() for action in parser._actions}
    assert tuple(choices["to"]) == FORMATS
    assert all(callable(getattr(dgemma.presets, name)) for name in choices["preset"])
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in choices["dtype"])


# They slow the start: importing transformers takes as long as writing a canvas, training a twentieth of the start.
@pytest.mark.slow
def test_the_module_runs_the_command_without_importing_optional_packages_or_training():
    script = """
import runpy, sys
for words in ("--help", "generate -n 64 --steps 1 Once", "infill --steps 1 A____."):
    sys.argv = ["dgemma", *words.split()]
    try:
        runpy.run_module("dgemma", run_name="__main__")
    except SystemExit as left:
        assert left.code == 0, words
    assert not {"transformers", "matplotlib", "PIL", "dgemma.train"} & set(sys.modules), words
"""
    command = [sys.executable, "-c", script]
    ran = subprocess.run(command, capture_output=True, text=True, env=_source_path(), timeout=120)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("called", [["-m", "dgemma"], ["script.py"]], ids=["module", "script"])
def test_ctrl_c_while_torch_is_imported_leaves_no_traceback(called, tmp_path):
    ran = _interrupt_import([*called, "generate", "Hi"], tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "\nStopped.\n")


def test_ctrl_c_in_another_program_that_imports_dgemma_is_not_handled(tmp_path):
    ran = _interrupt_import(["-c", "import dgemma; dgemma.generate"], tmp_path)
    assert ran.returncode != 130
    assert ran.stderr.startswith("Traceback")


@pytest.mark.parametrize(
    ("words", "code"),
    [("--help", 0), ("info", 0), ("generate --loud Hi", 2), ("generate -m ./novels Hi", 2), ("info dgemma/novels", 2)],
)
def test_help_the_list_of_checkpoints_and_wrong_options_and_paths_do_not_wait_for_torch(words, code, tmp_path):
    ran = _interrupt_import(["-m", "dgemma", *words.split()], tmp_path)
    assert ran.returncode == code
    assert "Stopped" not in ran.stderr


def _interrupt_import(words: list[str], folder: Path) -> subprocess.CompletedProcess:
    """Run Python with a fake torch that raises KeyboardInterrupt. The script acts like an installed command."""
    (folder / "torch.py").write_text("raise KeyboardInterrupt")
    (folder / "script.py").write_text("import sys\nfrom dgemma.cli import main\nsys.exit(main())\n")
    path = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{_source_path()['PYTHONPATH']}"}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, env=path, check=False, timeout=60
    )


def _source_path() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(dgemma.__file__).parents[1])}
