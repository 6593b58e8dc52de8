"""What a demo says while it runs."""

from __future__ import annotations

import time

from rich.console import Console

LOG_COLUMNS = 120
"""Width of the tables where no terminal says one."""


class Progress:
    """Says what happens, and when it began, one line each: readable in a terminal and in a log."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._started = time.monotonic()

    def stage(self, text: str) -> None:
        self.console.print(f"[dim]{time.monotonic() - self._started:6.1f} s[/]  {text}", highlight=False)
