"""Moving the catalog's schema between revisions, and refusing one that this release does not know.

Every migration runs in one transaction on the connection it is given: killed at any statement, the catalog is in the
old state or the new one.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Final

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from tenancy.errors import CatalogTooNew


def find_scripts() -> Path:
    """The folder of migrations: inside the installed ``kvgw``, or beside this package in a checkout."""
    here = Path(__file__).resolve().parent.parent
    for folder in (here / "kvgw" / "migrations", here / "migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise FileNotFoundError(f"no migrations beside {here}; reinstall kvgw")


_HEAD: Final = "head"
_ALEMBIC: Final = threading.Lock()
"""Alembic keeps what it works on in one place for the whole process: of two threads one would migrate the other's."""


def current_revision(connection: Connection) -> str | None:
    """The revision of this catalog, None when it is empty."""
    return MigrationContext.configure(connection).get_current_revision()


def newest_revision() -> str:
    """The revision that this release writes."""
    head = ScriptDirectory.from_config(_config()).get_current_head()
    if head is None:
        raise FileNotFoundError(f"no migrations in {find_scripts()}; reinstall kvgw")
    return head


def known_revisions() -> set[str]:
    """Every revision that this release can read."""
    return {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}


def check_known(connection: Connection) -> str | None:
    """The catalog's revision. Raises `CatalogTooNew` if this release does not know it."""
    revision = current_revision(connection)
    if revision is not None and revision not in known_revisions():
        raise CatalogTooNew(
            f"the catalog has schema revision {revision}, which this release does not know "
            f"(its newest is {newest_revision()}); run a newer kvgw, or migrate the catalog down with it first"
        )
    return revision


def upgrade(connection: Connection, target: str = _HEAD) -> None:
    """Move the schema up to `target` on a connection that is in a transaction."""
    _one_at_a_time(connection)
    check_known(connection)
    with _alone_in_process(connection):
        command.upgrade(_config(connection), target)


def downgrade(connection: Connection, target: str) -> None:
    """Move the schema down to `target` (a revision, ``-1``, or ``base``)."""
    _one_at_a_time(connection)
    check_known(connection)
    with _alone_in_process(connection):
        command.downgrade(_config(connection), target)


def _one_at_a_time(connection: Connection) -> None:
    """A second migration waits for the first, and then sees what it did; SQLite's transactions are serial anyway."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(5364715)"))


def _alone_in_process(connection: Connection) -> AbstractContextManager[object]:
    """SQLite catalogs are opened by gateways in threads of their own, several of which may be in one process.

    PostgreSQL's are migrated by a command, one in a process, whose one thread must not wait for itself.
    """
    return _ALEMBIC if connection.dialect.name == "sqlite" else nullcontext()


def _config(connection: Connection | None = None) -> Config:
    config = Config()
    # A percent sign in the path would be read as interpolation by the configuration parser.
    config.set_main_option("script_location", str(find_scripts()).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config
