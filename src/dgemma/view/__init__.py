"""Pictures of denoising: a page to scrub, a live terminal, plots, an animated GIF."""

from dgemma.view.html import Page
from dgemma.view.terminal import BoardView, LiveView

__all__ = ["BoardView", "LiveView", "Page"]
