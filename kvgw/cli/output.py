"""What the commands print: tables for people, JSON for programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tenancy.audit.printing import printable

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def console() -> Console:
    """Standard output."""
    return Console()


def error_console() -> Console:
    """Standard error."""
    return Console(stderr=True)


def print_json(value: object) -> None:
    """Print a value as one JSON document, indented."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> None:
    """Print a table; numbers belong in columns whose name ends in a space.

    A cell is shown as it is: what a tenant chose, as a model's name, is neither markup nor steers the terminal (F10).
    """
    table = Table(title=Text(printable(title)), title_justify="left", header_style="bold")
    for column in columns:
        table.add_column(column.strip(), justify="right" if column.endswith(" ") else "left", overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(printable(cell)) for cell in row))
    console().print(table)


def human_bytes(count: int) -> str:
    """A size for people: 12.5 MiB."""
    if count < 0:
        return "–"
    size = float(count)
    for unit in _UNITS:
        if size < 1024 or unit == _UNITS[-1]:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def human_limit(count: int) -> str:
    """A limit for people."""
    return "none" if count >= 2**62 else human_bytes(count)


def human_ms(milliseconds: int) -> str:
    """A duration for people: 1 h, 30 d."""
    for size, unit in ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1000, "s")):
        if milliseconds >= size and milliseconds % size == 0:
            return f"{milliseconds // size} {unit}"
    return f"{milliseconds} ms"
