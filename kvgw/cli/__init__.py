"""The command ``kvgw``: one module a command."""

from kvgw.cli.app import main

__all__ = ["main"]
