"""Progress bar for long work: shown in terminals and notebooks after two seconds, never in a pipe."""

import sys

from tqdm.auto import tqdm


def progress_bar(*, desc: str, unit: str, show: bool, total: int | None = None) -> tqdm:
    """Return a bar to `update` as work is done; `show=False` hides it.

    Example: `with progress_bar(desc="denoising", unit="step", show=True) as bar: bar.update()`.
    """
    is_visible = sys.stderr.isatty() or "ipykernel" in sys.modules
    return tqdm(desc=desc, unit=unit, total=total, delay=2.0, leave=False, disable=not (show and is_visible))
