"""The audit log on PostgreSQL, tampered with by a superuser who switched its triggers off."""

from __future__ import annotations

import pytest

from tenancy.errors import CatalogUnavailable
from tenancy.postgres import PostgresDatabase, parse_url
from tenancy.sight import WHOLE_AUDIT
from tests.support.aio import aio
from tests.support.catalogs import APP_ROLE
from tests.tenancy.audit_bench import acts
from tests.tenancy.audit_contract import AuditContract
from tests.tenancy.catalog_bench import HERE, NOW
from tests.tenancy.test_catalog_postgres import OnPostgres
from tests.tenancy.test_rls import runs


@pytest.mark.postgres
class TestAuditOnPostgres(OnPostgres, AuditContract):
    @aio
    async def test_a_gateway_can_neither_change_nor_remove_what_was_recorded(self) -> None:
        async with self.backend() as backend:
            await backend.catalog(HERE).record_all(acts(3), NOW)
        database = PostgresDatabase(parse_url(self.server.url(self.database, APP_ROLE), None), pool=1)
        try:
            for change in (
                "UPDATE audit_record SET target = ''",
                "DELETE FROM audit_record",
                "TRUNCATE audit_record",
                "ALTER TABLE audit_record DISABLE TRIGGER USER",
                "UPDATE audit_checkpoint SET note = ''",
                "DELETE FROM audit_checkpoint",
                "DELETE FROM audit_head",
            ):
                with pytest.raises(CatalogUnavailable, match=r"permission denied|must be owner"):
                    await database.write(runs(change), WHOLE_AUDIT)
        finally:
            await database.aclose()
