"""The catalog on PostgreSQL: several gateways over one database.

A transaction body is the same plain function as on SQLite; here it runs in a greenlet over asyncpg. The role must be an
ordinary one: row-level security is forced, and a superuser or a role with BYPASSRLS would see every tenant's rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final, Protocol, TypeVar
from uuid import UUID

from sqlalchemy import URL, Connection, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from tenancy import versions
from tenancy.engine import Ending, Ends, anything, ends_nothing
from tenancy.errors import CatalogMisconfigured, CatalogUnavailable
from tenancy.schema import metadata
from tenancy.sight import NO_TENANT, Sight, look

Result = TypeVar("Result")

CONNECT_SECONDS: Final = 5.0
STATEMENT_SECONDS: Final = 30
LOCK_SECONDS: Final = 10
POOL_SECONDS: Final = 5.0
TRANSACTION_SECONDS: Final = 60.0
"""A transaction that is not over by then is given up: the network may have dropped the connection without a word."""

QUICK_CONNECTIONS: Final = 2
"""Beside the pool, for statements that must not wait for it."""
QUICK_SECONDS: Final = 1.0

_ALL: Final = "SELECT, INSERT, UPDATE, DELETE"
_GRANTS: Final = {
    "audit_record": "SELECT, INSERT",
    "audit_head": "SELECT, UPDATE",
    "audit_checkpoint": "SELECT, INSERT",
}
"""A gateway adds to the audit log; not even it changes what is in there."""

_ROLE = text(
    "SELECT current_user, rolsuper, rolbypassrls, "
    "EXISTS (SELECT 1 FROM pg_class WHERE relname = 'chunk' AND relnamespace = current_schema()::regnamespace "
    "AND pg_has_role(current_user, relowner, 'MEMBER')) "
    "FROM pg_roles WHERE rolname = current_user"
)


class Memory(Protocol):
    """What the gateways of this catalog may answer without asking it."""

    def version(self, tenant: UUID) -> int | None:
        """See `Database.version`."""
        ...

    def ended(self, tenant: UUID, version: int) -> None:
        """A transaction of this gateway has raised the version: from now on nothing older is answered here."""
        ...

    async def settled(self, tenant: UUID, version: int) -> None:
        """Return when no other gateway answers anything older either."""
        ...


class PostgresDatabase:
    """A pool of connections to one database. Raises `CatalogUnavailable` when it cannot be reached in time.

    Without a `memory` nothing is answered from one here, and no other gateway is waited for: for whoever works on a
    catalog while no gateway runs.
    """

    def __init__(self, url: URL, pool: int) -> None:
        self._engine = _engine(url, pool, pre_ping=True)
        # It sees the versions of all tenants, and no other row of any.
        quick = _engine(url, QUICK_CONNECTIONS, pre_ping=False, settings={"kvgw.versions": "every"})
        self._quick = quick.execution_options(isolation_level="AUTOCOMMIT")
        self.memory: Memory | None = None

    async def write(
        self, body: Callable[[Connection], Result], sight: Sight = NO_TENANT, ends: Ends[Result] = anything
    ) -> Result:
        def transaction(connection: Connection) -> tuple[Result, Ending, int | None]:
            look(connection, sight)
            result = body(connection)
            ending = Ending.NOTHING if sight.tenant is None else ends(result)
            if sight.tenant is None or ending is Ending.NOTHING:
                return result, ending, None
            return result, ending, versions.raise_version(connection, sight.tenant)

        async with _mapped_errors(), asyncio.timeout(TRANSACTION_SECONDS), self._engine.begin() as connection:
            result, ending, version = await connection.run_sync(transaction)
        if self.memory is not None and sight.tenant is not None and version is not None:
            self.memory.ended(sight.tenant, version)
            if ending is Ending.TOLD:
                await self.memory.settled(sight.tenant, version)
        return result

    async def read(self, body: Callable[[Connection], Result], sight: Sight = NO_TENANT) -> Result:
        return await self.write(body, sight, ends_nothing)

    async def quick(self, body: Callable[[Connection], Result]) -> Result:
        """Run `body`, whose statements are transactions of their own, on a connection that is free at once."""
        async with _mapped_errors(), asyncio.timeout(QUICK_SECONDS), self._quick.connect() as connection:
            return await connection.run_sync(body)

    def version(self, tenant: UUID) -> int | None:
        return None if self.memory is None else self.memory.version(tenant)

    async def check_role(self) -> None:
        """Raises `CatalogMisconfigured` if row-level security would not hold for this role."""
        async with _mapped_errors(), self._engine.connect() as connection:
            name, superuser, bypasses, owns = (await connection.execute(_ROLE)).one()
        if superuser or bypasses or owns:
            power = (
                "is a superuser: it would see every tenant's rows"
                if superuser
                else "may bypass row-level security: it would see every tenant's rows"
                if bypasses
                else "owns the catalog's tables: it could switch row-level security off"
            )
            raise CatalogMisconfigured(
                f"the database role {name!r} {power}. Use an ordinary role in catalog.url (CREATE ROLE kvgw_app "
                "LOGIN), and keep the other for catalog.owner_url, which only kvgw migrate uses"
            )

    async def aclose(self) -> None:
        await self._quick.dispose()
        await self._engine.dispose()


def _engine(url: URL, pool: int, *, pre_ping: bool, settings: Mapping[str, str] | None = None) -> AsyncEngine:
    return create_async_engine(
        url.set(drivername="postgresql+asyncpg"),
        pool_size=pool,
        max_overflow=0,
        pool_timeout=POOL_SECONDS,
        pool_pre_ping=pre_ping,
        pool_recycle=1800,
        connect_args={
            "timeout": CONNECT_SECONDS,
            "server_settings": {
                "application_name": "kvgw",
                "statement_timeout": f"{STATEMENT_SECONDS}s",
                "lock_timeout": f"{LOCK_SECONDS}s",
                "idle_in_transaction_session_timeout": f"{STATEMENT_SECONDS}s",
                "timezone": "UTC",
                **(settings or {}),
            },
        },
    )


def parse_url(url: str, password: str | None) -> URL:
    """Read ``postgresql://user@host:port/database``. Raises `CatalogMisconfigured` without echoing a password."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise CatalogMisconfigured("catalog.url is not a URL: write postgresql://user@host:5432/database") from None
    if parsed.get_backend_name() != "postgresql" or not parsed.database or not parsed.username:
        raise CatalogMisconfigured(
            f"catalog.url {parsed.render_as_string(hide_password=True)} must be postgresql://user@host:5432/database"
        )
    if parsed.password is not None:
        raise CatalogMisconfigured("catalog.url must not hold a password: name a file in catalog.password_file")
    return parsed if password is None else parsed.set(password=password)


@asynccontextmanager
async def _mapped_errors() -> AsyncIterator[None]:
    try:
        yield
    except IntegrityError:
        raise  # a broken rule of the schema is a bug of ours, not an outage
    except PoolTimeout as error:
        raise CatalogUnavailable("no connection to the catalog database was free in time") from error
    except DBAPIError as error:
        raise CatalogUnavailable(f"the catalog database failed: {_sentence(error)}") from error
    except SQLAlchemyError as error:
        raise CatalogUnavailable(f"the catalog database failed: {type(error).__name__}") from error
    except (OSError, TimeoutError) as error:
        raise CatalogUnavailable(
            f"the catalog database does not answer: {str(error) or type(error).__name__}"
        ) from error


def _sentence(error: DBAPIError) -> str:
    """The server's own sentence, without the statement and its parameters."""
    sentence = str(error.orig)
    # Once connected the driver's class stands before it; while connecting it does not.
    sentence = sentence.partition(": ")[2] if sentence.startswith("<class") else sentence
    return sentence or type(error.orig).__name__


def grant_to(connection: Connection, role: str) -> None:
    """Give a gateway's role what it needs of the catalog's tables, and nothing else. Raises `CatalogMisconfigured`."""
    known = connection.scalar(text("SELECT 1 FROM pg_roles WHERE rolname = :role"), {"role": role})
    if known is None:
        raise CatalogMisconfigured(f"there is no database role {role!r}: CREATE ROLE it with LOGIN first")
    name = connection.dialect.identifier_preparer.quote(role)
    schema = connection.dialect.identifier_preparer.quote(str(connection.scalar(text("SELECT current_schema()"))))
    connection.execute(text(f"GRANT USAGE ON SCHEMA {schema} TO {name}"))
    for table in sorted(metadata.tables):
        connection.execute(text(f"GRANT {_GRANTS.get(table, _ALL)} ON {table} TO {name}"))
    connection.execute(text(f"GRANT SELECT ON alembic_version TO {name}"))
