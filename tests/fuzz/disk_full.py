"""Fills the disk at every write of a training run: python tests/fuzz/disk_full.py (as root, on Linux).

A tmpfs of each size holds a run: its tokens, log, checkpoints and result. Every failure must be one sentence, leave no
temporary file, and leave the last checkpoint. The run is then continued on a larger disk and must give the same bits.
"""

import argparse
import contextlib
import io
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[0] = str(ROOT / "tests")
PAGE = 4096  # tmpfs counts whole pages, so every size in between behaves like the next one


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step", type=int, default=1, help="pages between two sizes (1: every size that matters)")
    arguments = parser.parse_args()
    from dgemma.cli import main as command

    with tempfile.TemporaryDirectory() as folder:
        disk, text = Path(folder) / "disk", Path(folder) / "text.txt"
        disk.mkdir()
        text.write_text("\f".join(f"story {number} of a few more words" for number in range(40)))
        checkpoint = _tiny_checkpoint(Path(folder))

        def train(out: Path) -> tuple[int, str]:
            words = ["train", str(text), "--separator", "\f", "-m", str(checkpoint), "--out", str(out), "--steps", "3"]
            words += ["--batch-size", "2", "--canvases", "2"]
            err = io.StringIO()
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
                code = command(words)
            return code, err.getvalue()

        assert train(Path(folder) / "whole")[0] == 0
        expected = (Path(folder) / "whole" / "final" / "model.safetensors").read_bytes()
        sentences: Counter[str] = Counter()
        bad: list[str] = []
        pages, finished, began = 1, 0, time.monotonic()
        while finished < 3:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={pages * PAGE}", "tmpfs", str(disk)], check=True)
            try:
                code, err = train(disk / "run")
                last = err.strip().splitlines()[-1] if err.strip() else ""
                if code:
                    sentences[last.split(" could not be ")[0].rsplit("/", 1)[-1]] += 1
                    bad += _check(pages, code, err, disk)
                    before = sorted(path.name for path in (disk / "run").glob("step-*"))
                    subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
                    code, err = train(disk / "run")
                    lost = not set(before[-1:]) <= {path.name for path in (disk / "run").glob("step-*")}
                    if code or lost or (disk / "run" / "final" / "model.safetensors").read_bytes() != expected:
                        bad.append(f"{pages} pages: the continued run differs ({code}): {err[-200:]}")
                else:
                    finished += 1
                    if (disk / "run" / "final" / "model.safetensors").read_bytes() != expected:
                        bad.append(f"{pages} pages: a finished run differs")
            finally:
                subprocess.run(["umount", str(disk)], check=True)
            pages += arguments.step
    print(f"{sum(sentences.values())} full disks from {PAGE} to {(pages - 1) * PAGE} bytes, by what was being written:")
    print("\n".join(f"  {count:5} {name}" for name, count in sentences.most_common()))
    print(
        "\n".join(["bad:", *bad]) if bad else "each said so in one sentence, lost nothing, and resumed to the same bits"
    )
    print(f"{time.monotonic() - began:.0f} seconds")
    return int(bool(bad))


def _check(pages: int, code: int, err: str, disk: Path) -> list[str]:
    """Return what a failed run did wrong."""
    bad = []
    sentence = err.strip().splitlines()[-1]
    says_so = "could not be written: " in sentence and "Free some space" in sentence
    if code != 1 or "Traceback" in err or not says_so:
        bad.append(f"{pages} pages: {code} {err[-300:]!r}")
    left = [path for path in disk.rglob("*") if path.name.endswith(".new")]
    if left:
        bad.append(f"{pages} pages: temporary files stay behind: {left}")
    return bad


def _tiny_checkpoint(folder: Path) -> Path:
    import dgemma
    from fuzz.files import tiny_model

    tiny_model().save_pretrained(folder / "checkpoint")
    dgemma.ByteTokenizer().save_pretrained(folder / "checkpoint")
    return folder / "checkpoint"


if __name__ == "__main__":
    sys.exit(main())
