"""Kills runs with SIGKILL at random moments: python tests/fuzz/kill.py --kills 200.

A forked process trains, saves a model over an old one, or writes the page of a generated text, and is killed after a
random time. Earlier checkpoints must still load, and a training run must end in the same bits as one without a kill.
"""

import argparse
import contextlib
import io
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

# A forked process must not inherit a pool of threads. Some libraries read this once, so it comes before `import torch`.
os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).parents[2]
sys.path[0] = str(ROOT / "tests")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    source = random.Random(arguments.seed)
    counts: Counter[str] = Counter()
    bad: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        attacks = {"train": _Training(Path(folder)), "save": _Saving(Path(folder)), "page": _Page(Path(folder))}
        killed = number = 0
        while killed < arguments.kills:
            name = ("train", "save", "page")[number % 3]
            was_killed, problem = attacks[name].attack(source)
            killed += was_killed
            number += 1
            counts[f"{name}: {'killed' if was_killed else 'finished before'}"] += 1
            if problem:
                bad.append(f"{number} {name}: {problem}")
    print("\n".join(f"  {count:5} {name}" for name, count in sorted(counts.items())))
    print("\n".join(["bad:", *bad]) if bad else "nothing committed was lost")
    return int(bool(bad))


def kill_after(seconds: float, work: Callable[[], None]) -> bool:
    """Run `work` in a forked process and kill it after a while; return False if it had finished."""
    process = os.fork()
    if process == 0:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            work()
        os._exit(0)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if os.waitpid(process, os.WNOHANG)[0]:
            return False
        time.sleep(0.001)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return True


def duration(work: Callable[[], None]) -> float:
    began = time.monotonic()
    kill_after(600, work)
    return time.monotonic() - began


class _Training:
    """A run of a few steps with a checkpoint after each, killed and continued until it ends."""

    def __init__(self, folder: Path) -> None:
        from fuzz.files import _train, tiny_model

        self.run = lambda out: _train(tiny_model(), out, steps=6)
        self.folder = folder / "training"
        self.seconds = duration(lambda: self.run(folder / "whole"))
        self.expected = (folder / "whole" / "final" / "model.safetensors").read_bytes()

    def attack(self, source: random.Random) -> tuple[bool, str]:
        before = self._steps()
        was_killed = kill_after(source.uniform(0, 1.1) * self.seconds, lambda: self.run(self.folder))
        lost = [step for step in before[-1:] if not self._steps() or self._steps()[-1] < step]
        if lost:
            return was_killed, f"checkpoint {lost} is gone"
        if not was_killed:
            same = (self.folder / "final" / "model.safetensors").read_bytes() == self.expected
            shutil.rmtree(self.folder)
            return False, "" if same else "the continued run has other bits"
        return True, ""

    def _steps(self) -> list[int]:
        return sorted(int(path.name[5:]) for path in self.folder.glob("step-*"))


class _Saving:
    """One model saved over another, in one file or in several."""

    def __init__(self, folder: Path) -> None:
        from fuzz.files import tiny_model

        self.models = [tiny_model(seed) for seed in range(2)]
        self.folder = folder / "saved"
        self.models[0].save_pretrained(self.folder)
        self.seconds = duration(lambda: self.models[0].save_pretrained(folder / "first"))

    def attack(self, source: random.Random) -> tuple[bool, str]:
        import dgemma

        model, limit = source.choice(self.models), source.choice(("5GB", 4000))
        save = lambda: model.save_pretrained(self.folder, max_shard_size=limit)  # noqa: E731
        was_killed = kill_after(source.uniform(0, 1.3) * self.seconds, save)
        try:
            loaded = dgemma.DiffusionGemma.from_pretrained(self.folder).state_dict()
        except (ValueError, OSError) as error:
            return was_killed, str(error)
        same = [all(bool((loaded[k] == v).all()) for k, v in m.state_dict().items()) for m in self.models]
        return was_killed, "" if any(same) else "the weights are of neither model"


class _Page:
    """`dgemma generate --html` over an old page. Afterwards the file is the whole old page or the whole new one."""

    def __init__(self, folder: Path) -> None:
        from dgemma.cli import main as command
        from fuzz.disk_full import _tiny_checkpoint

        self.page = folder / "page.html"
        words = [
            "generate",
            "-m",
            str(_tiny_checkpoint(folder)),
            "-n",
            "8",
            "--steps",
            "2",
            "--quiet",
            "Once",
            "--html",
        ]
        self.work = lambda: command([*words, str(self.page)])
        self.seconds = duration(self.work)

    def attack(self, source: random.Random) -> tuple[bool, str]:
        was_killed = kill_after(source.uniform(0, 1.1) * self.seconds, self.work)
        text = self.page.read_text()
        return was_killed, "" if text.rstrip().endswith("</html>") else "the page is cut"


if __name__ == "__main__":
    sys.exit(main())
