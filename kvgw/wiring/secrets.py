"""Secrets by file: never in a settings file, never in a process's arguments."""

from __future__ import annotations

from pathlib import Path

from kvgw.settings import SettingsError


def read_secret(file: str) -> str:
    """The text of a secret file, without the line end that editors add. Raises `SettingsError` naming the file."""
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"the secret file {file} cannot be read: {error}") from error
