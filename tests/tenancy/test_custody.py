"""The life of keys, on SQLite and on PostgreSQL as a role under row-level security."""

from __future__ import annotations

import pytest

from tests.tenancy.custody_contract import CustodyContract
from tests.tenancy.custody_endings import CustodyEndings
from tests.tenancy.test_catalog_postgres import OnPostgres
from tests.tenancy.test_catalog_sqlite import OnSqlite, empty_catalog

__all__ = ["empty_catalog"]


class TestCustodyOnSqlite(OnSqlite, CustodyContract, CustodyEndings):
    pass


@pytest.mark.postgres
class TestCustodyOnPostgres(OnPostgres, CustodyContract, CustodyEndings):
    pass
