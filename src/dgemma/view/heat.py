"""Colours of certainty, from certain to uncertain, for dark pages, light pages and terminals.

Lightness is monotonic, so that the order remains visible with colour blindness and in grey prints. The levels of a
palette are equal steps in OKLab (Björn Ottosson, 2020) between five colours, where equal steps look equal.
"""

LEVELS = 16  # 0 is certain
DARK = (  # on a page of #101218
    *("#f5f1e8", "#f6e8cf", "#f6dfb5", "#f6d69b", "#f6cb83", "#f5bb79", "#f3ab6e", "#f19b64"),
    *("#ed8c66", "#e67f72", "#df717c", "#d86384", "#c86394", "#b566a7", "#a267b8", "#8f66c9"),
)
LIGHT = (  # on a page of #fbfaf7
    *("#1b1824", "#271e3b", "#332453", "#40296c", "#4f2d80", "#633180", "#773380", "#8b337f"),
    *("#9c377c", "#a94075", "#b7476d", "#c54d64", "#c95b5b", "#c86a50", "#c77743", "#c58430"),
)
TERMINAL = (None, None, 179, 173, 173, 168, 132, 97)  # of the 256 colours, readable on black and on white
