"""Kernels run natively where there is a GPU, else in Triton's interpreter, on uninitialised memory full of NaN."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Fills every `torch.empty` with NaN, or the largest integer, so that an element nobody wrote is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _default_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles of no particular GPU, so that a test means the same everywhere; float32 would not fit larger ones."""
    from dgemma_kernels import configs

    monkeypatch.setattr(configs, "gpu_name", lambda device: "default")
