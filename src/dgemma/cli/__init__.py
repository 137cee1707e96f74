"""`dgemma` on the command line: one file a family of commands, each a thin layer over the library."""

from dgemma.cli.main import main

__all__ = ["main"]
