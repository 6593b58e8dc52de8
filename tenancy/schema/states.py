"""The states of chunks and placements, and the tiers, as a statement names them.

Literals: the tables have partial indexes on them, and SQLite prepares a statement anew in each execution when a bound
value could decide whether such an index fits.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import ColumnClause, String, literal_column


def _literal(word: str) -> ColumnClause[str]:
    return literal_column(f"'{word}'", String)


LIVE: Final = _literal("live")
DELETING: Final = _literal("deleting")
"""Of a chunk."""

DUE: Final = _literal("due")
WRITING: Final = _literal("writing")
OK: Final = _literal("ok")
QUARANTINED: Final = _literal("quarantined")
DOOMED: Final = _literal("doomed")
"""Of a placement."""

ACTIVE: Final = _literal("active")
"""Of a namespace."""

NVME: Final = _literal("nvme")
S3: Final = _literal("s3")
"""Where a placement is."""
