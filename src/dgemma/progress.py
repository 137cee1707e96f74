"""Progress on long work: a bar in terminals and notebooks after two seconds, nothing where output is piped."""

import sys

from tqdm.auto import tqdm


def progress_bar(*, desc: str, unit: str, show: bool, total: int | None = None) -> tqdm:
    """A bar to `update` as work is done; `show=False` makes it silent.

    Example: `with progress_bar(desc="denoising", unit="step", show=True) as bar: bar.update()`.
    """
    somebody_looks = sys.stderr.isatty() or "ipykernel" in sys.modules
    return tqdm(desc=desc, unit=unit, total=total, delay=2.0, leave=False, disable=not (show and somebody_looks))
