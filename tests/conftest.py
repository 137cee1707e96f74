"""Setup for all tests: Triton's interpreter if there is no GPU, and one thread per worker."""

import gc
import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    # Triton decides at its import whether functions are compiled or interpreted, and transformers imports it too.
    os.environ["TRITON_INTERPRET"] = "1"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Shells start background jobs with SIGINT ignored. Tests send Ctrl-C to child processes, which would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
gc.set_threshold(100_000)  # collecting as often as Python does by default takes 2 % of the time

PATIENCE = 900  # seconds for one test with its fixtures; compiling all kernels takes minutes
QUICK_LANE = "not slow and not compile"  # as in addopts of pyproject.toml


def pytest_configure(config: pytest.Config) -> None:
    # Someone who names a file or a test wants it to run. Deselecting it would end in "no tests ran".
    if config.option.markexpr == QUICK_LANE and config.args and all(".py" in argument for argument in config.args):
        config.option.markexpr = ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move tests that share runs of several processes to the front.

    A worker that has no tests left takes the last tests of another worker. If such a test needed the runs, this worker
    would have to make them again.
    """
    items.sort(key=lambda item: "runs" not in getattr(item, "fixturenames", ()))


def pytest_collection_finish() -> None:
    gc.freeze()  # the garbage collector need not visit the millions of objects of imported modules again


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # Triton reports frozen objects as leaks


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Raise an error in a test that hangs, so that the run continues."""

    def fail(*_: object) -> None:
        raise TimeoutError(f"{item.nodeid} must end within {PATIENCE} s.")

    signal.signal(signal.SIGALRM, fail)
    signal.alarm(PATIENCE)
    try:
        return (yield)
    finally:
        signal.alarm(0)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.option.markexpr == QUICK_LANE:
        terminalreporter.write_line("Quick lane done. Others: pytest -m slow, pytest -m compile; all: pytest -m ''.")


@pytest.fixture
def shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let checkpoints load with their last two layers and few steps as default, for tests in which any text will do."""
    from dgemma import DiffusionGemma

    files = DiffusionGemma.files

    def load_shallow(*arguments: object, **options: object) -> torch.nn.Module:
        model = files.load(*arguments, **options)
        model.layers = model.layers[-2:]
        model.config = model.config.replace(num_hidden_layers=2, layer_types=model.config.layer_types[-2:])
        # A model of two layers is never certain, so every canvas takes all steps. A notebook repeats a run up to step 8
        # and then changes it, so there must be a ninth step.
        model.generation = replace(model.generation, max_denoising_steps=9)
        return model

    monkeypatch.setattr(DiffusionGemma, "files", files._replace(load=load_shallow))


@pytest.fixture(autouse=True)
def _same_inputs_every_run() -> None:
    """Seed torch's generators, from which tests draw inputs, so that a failure can be repeated."""
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        # `torch.manual_seed` would also queue a call for the GPU that is absent, which takes a millisecond.
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _same_arithmetic_in_any_order_of_tests() -> None:
    """Disable oneDNN, whose small products take twice as long on Arm.

    It stays enabled in other processes that tests start, as it is for users. Processes of `fork_server` disable it too.

    On some CPUs torch disables it at the first bfloat16 product, and later results would round differently.
    """
    torch.backends.mkldnn.enabled = False
