"""The command line."""

from longspan.cli.app import app, main

__all__ = ["app", "main"]
