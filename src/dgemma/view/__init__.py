"""Pictures of denoising: a page to scrub, a live terminal, plots, an animated GIF."""

from dgemma.view.board import Board
from dgemma.view.html import Page
from dgemma.view.terminal import BoardView, LiveView

__all__ = ["Board", "BoardView", "LiveView", "Page"]
