"""Tiny checkpoints with random weights, and the command called as a function."""

import io
import sys
from typing import NamedTuple

import pytest
import torch

import dgemma
from dgemma.cli import main
from dgemma.data import sudoku


class Ran(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    """Hide GPUs: expected numbers are from the CPU, and a forked process could not use CUDA."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.fixture
def command(capsys, monkeypatch):
    """`command("info", folder)` runs `dgemma info FOLDER`, with `stdin` piped in."""

    def run(*words, stdin: bytes = b"") -> Ran:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        code = main([str(word) for word in words])
        return Ran(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A text model of bytes, canvas 32, in a context of 256 tokens."""
    folder = tmp_path_factory.mktemp("text")
    _random(dgemma.presets.tiny().replace(vocab_size=384, max_position_embeddings=256)).save_pretrained(folder)
    dgemma.ByteTokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def solver(tmp_path_factory):
    """A checkpoint with the shape of a Sudoku solver and random weights."""
    folder = tmp_path_factory.mktemp("sudoku")
    config = dgemma.presets.tiny().replace(vocab_size=sudoku.VOCAB_SIZE, canvas_length=sudoku.NUM_CELLS)
    _random(config).save_pretrained(folder)
    return folder


def _random(config: dgemma.ModelConfig) -> dgemma.DiffusionGemma:
    model = dgemma.DiffusionGemma(config)
    model.reset_parameters(torch.Generator().manual_seed(0))
    return model
