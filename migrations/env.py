"""Alembic's door into the catalog: runs on the connection that `tenancy.migrate` hands over, or prints SQL offline."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection

from tenancy.schema import metadata


def _run() -> None:
    config = context.config
    if context.is_offline_mode():
        context.configure(
            url=config.get_main_option("sqlalchemy.url"),
            target_metadata=metadata,
            literal_binds=True,
            dialect_opts={"paramstyle": "named"},
        )
        with context.begin_transaction():
            context.run_migrations()
        return
    connection: Connection = config.attributes["connection"]
    context.configure(
        connection=connection,
        target_metadata=metadata,
        render_as_batch=connection.dialect.name == "sqlite",
        transaction_per_migration=False,
        transactional_ddl=True,  # SQLite's too, since the connection begins its transactions itself
    )
    with context.begin_transaction():
        context.run_migrations()


_run()
