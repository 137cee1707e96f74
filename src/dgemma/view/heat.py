"""Colours of certainty, from certain to uncertain, for dark pages, light pages and terminals.

Lightness is monotonic, so that the order remains visible with colour blindness and in grey prints. Colours are
interpolated in OKLab (Björn Ottosson, 2020), where equal steps look equal.
"""

import numpy as np
from numpy.typing import NDArray

LEVELS = 16  # 0 is certain

_DARK = ("#f5f1e8", "#f6cf86", "#f0935f", "#d65f86", "#8f66c9")  # on a page of #101218
_LIGHT = ("#1b1824", "#4a2c80", "#95337f", "#c94f62", "#c58430")  # on a page of #fbfaf7
TERMINAL = (None, None, 179, 173, 173, 168, 132, 97)  # of the 256 colours, readable on black and on white

_TO_LMS = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
_TO_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


def palette(*, dark: bool) -> list[str]:
    """Return the colours of the levels as #rrggbb, most certain first.

    Example: `palette(dark=True)[0]` is "#f5f1e8".
    """
    stops = np.array([_to_oklab(colour) for colour in (_DARK if dark else _LIGHT)])
    at = np.linspace(0, len(stops) - 1, LEVELS)
    mixed = np.stack([np.interp(at, np.arange(len(stops)), channel) for channel in stops.T], axis=-1)
    return [_to_hex(lab) for lab in mixed]


def _to_oklab(colour: str) -> NDArray[np.float64]:
    encoded = np.frombuffer(bytes.fromhex(colour[1:]), np.uint8) / 255
    linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    return _TO_LAB @ np.cbrt(_TO_LMS @ linear)


def _to_hex(lab: NDArray[np.float64]) -> str:
    linear = np.linalg.solve(_TO_LMS, np.linalg.solve(_TO_LAB, lab) ** 3).clip(0, 1)
    encoded = np.where(linear <= 0.0031308, linear * 12.92, 1.055 * linear ** (1 / 2.4) - 0.055)
    return "#" + bytes((encoded * 255).round().astype(np.uint8).tolist()).hex()
