"""The `dgemma` command: one file per family of commands, each a thin layer over the library."""

from dgemma.cli.main import main

__all__ = ["main"]
