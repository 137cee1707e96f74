"""Pictures of denoising: a web page, a live terminal view, plots and an animated GIF."""

from dgemma.view import plots
from dgemma.view.board import Board
from dgemma.view.gif import to_gif
from dgemma.view.html import Page, to_html
from dgemma.view.terminal import BoardView, LiveView

__all__ = ["Board", "BoardView", "LiveView", "Page", "plots", "to_gif", "to_html"]
