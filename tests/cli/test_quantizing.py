"""The command `dgemma quantize`."""

import json

import pytest

from dgemma import DiffusionGemma
from dgemma.cli.main import main
from quantized_files import random_model


def test_quantize_writes_a_checkpoint_and_lists_its_formats(tmp_path, capsys):
    random_model().save_pretrained(tmp_path / "plain")
    options = ["--to", "int4", "--group-size", "32", "--device", "cpu"]
    assert main(["quantize", str(tmp_path / "plain"), "--out", str(tmp_path / "small"), *options]) == 0
    table = capsys.readouterr().out
    assert DiffusionGemma.from_pretrained(tmp_path / "small").layers[0].experts.down_proj.format == "int4"
    assert main(["info", str(tmp_path / "small")]) == 0
    described = capsys.readouterr().out
    for line in ("experts", "attention", "dense MLP"):
        # Formats and numbers of weights. Files have a few more bytes than memory, for shapes.
        (row,) = [row.split()[:-1] for row in table.splitlines() if row.startswith(line)]
        assert row in [other.split()[:-1] for other in described.splitlines()]
    assert main(["info", "--json", str(tmp_path / "small")]) == 0
    formats = {part["part"]: part["format"] for part in json.loads(capsys.readouterr().out)["memory"]}
    assert formats["experts"] == "int4"
    assert formats["attention"] == formats["dense MLP"] == "fp8"


@pytest.mark.slow  # runs a model of 12 million weights once per layer
@pytest.mark.usefixtures("shallow")
def test_calibration_reads_a_text(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a dog. " * 20)
    options = ["--to", "int4", "--dense", "none", "--calibration", str(text), "--device", "cpu"]
    assert main(["quantize", "dgemma/text", "--out", str(tmp_path / "out"), *options]) == 0
    assert "int4" in capsys.readouterr().out


@pytest.mark.parametrize("option", [("--group-size", "32"), ("--zero-points",), ("--calibration", "text.txt")])
def test_options_of_int4_are_refused_for_other_formats(tmp_path, capsys, option):
    assert main(["quantize", "dgemma/text", "--to", "fp8", "--out", str(tmp_path / "out"), *option]) == 2
    assert f"{option[0]} must be used with int4, got 'fp8'. Remove {option[0]}." in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_short_calibration_text_is_refused_before_the_weights_are_read(tmp_path, capsys, monkeypatch):
    (tmp_path / "text.txt").write_text("Once upon a time.")
    monkeypatch.setattr(DiffusionGemma, "from_pretrained", None)
    options = ["--to", "int4", "--calibration", str(tmp_path / "text.txt"), "--device", "cpu"]
    assert main(["quantize", "dgemma/text", "--out", str(tmp_path / "out"), *options]) == 2
    assert "--calibration must hold at least 128 tokens, two canvases, got 5." in capsys.readouterr().err
