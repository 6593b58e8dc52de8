"""How a gateway's log looks: one line a message, whatever is in it."""

from __future__ import annotations

import logging

from tenancy.audit.printing import printable

FORM = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class OneLine(logging.Formatter):
    """Writes as escapes what could begin a line of its own or steer the terminal of whoever reads the log (F10)."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # as in logging
        return printable(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(printable(line) for line in super().format(record).split("\n"))


def set_up() -> None:
    """Log to standard error, from level INFO."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine(FORM))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("alembic").setLevel(logging.WARNING)
