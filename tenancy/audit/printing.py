"""Text from outside, on its way to a log or a terminal. Imports nothing."""

from __future__ import annotations


def printable(text: str) -> str:
    """`text` on one line: what does not print, or could steer a terminal, is written as an escape (F10)."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
