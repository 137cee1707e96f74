"""--fast passes the right arguments to the kernels, which have their own tests."""

import gc
import weakref
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

import dgemma
from dgemma.cli import loading
from dgemma.quantization.rounding import quantize


@pytest.mark.parametrize(
    ("stored", "option", "asked", "release"),
    [
        ("bf16", None, "bf16", False),
        ("int4", None, "int4", True),
        ("bf16", "bf16", "bf16", False),
        ("bf16", "packed", "packed", True),
        ("bf16", "nvfp4", "nvfp4", True),
    ],
)
def test_the_kernels_get_the_requested_weights_and_the_model_is_released(stored, option, asked, release, monkeypatch):
    # Otherwise the bf16 experts would stay in memory next to the fp8 ones: 69 GiB at the published size instead of 27.
    # `release` frees them while they are rounded.
    kernels = pytest.importorskip("dgemma_kernels")
    loaded = []

    def load(arguments):
        model = dgemma.DiffusionGemma(dgemma.presets.tiny())
        if stored != "bf16":
            experts = model.layers[0].experts
            weight = quantize(experts.gate_up_proj, stored)
            del experts.gate_up_proj
            experts.gate_up_proj = weight
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr(loading, "pick_device", lambda arguments: torch.device("cuda"))
    monkeypatch.setattr(loading, "load_model", load)
    monkeypatch.setattr(
        kernels, "accelerate", lambda model, weights, release: SimpleNamespace(weights=weights, release=release)
    )
    denoiser = loading.load_denoiser(Namespace(fast=True, weights=option, model="any"))
    gc.collect()
    assert (denoiser.weights, denoiser.release) == (asked, release)
    assert loaded[0]() is None
