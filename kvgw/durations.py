"""Durations as people write them: ``30s``, ``5m``, ``1h``, ``24h``, ``7d``."""

from __future__ import annotations

import re
from typing import Final

from kvgw.errors import FormatError

_UNITS_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_WRITTEN: Final = re.compile(r"([1-9][0-9]{0,11})(ms|s|m|h|d)", re.ASCII)
DURATION_MS_MAX: Final = 10 * 366 * 86_400_000


def duration_ms(written: str) -> int:
    """Milliseconds of a duration such as ``5m``. Raises `FormatError` for anything else, or more than ten years."""
    found = _WRITTEN.fullmatch(written)
    if found is None:
        raise FormatError(f"{written!r:.40} is no duration; write a number and ms, s, m, h or d, as in 5m or 24h")
    length = int(found[1]) * _UNITS_MS[found[2]]
    if length > DURATION_MS_MAX:
        raise FormatError(f"the duration {written} is longer than ten years")
    return length


def written(milliseconds: int) -> str:
    """The shortest way to write a duration: 3,600,000 is ``1h``."""
    for unit in ("d", "h", "m", "s"):
        if milliseconds % _UNITS_MS[unit] == 0:
            return f"{milliseconds // _UNITS_MS[unit]}{unit}"
    return f"{milliseconds}ms"
