"""The contract of all transports on the production footing: PostgreSQL, S3 and keys in S3, chosen by settings alone."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from kvgw.client import Client
from kvgw.model import Durability, PutOutcome
from kvgw.reports import Registered
from kvgw.settings import ServerSettings
from tests.support.gateway_contract import GatewayContract
from tests.support.gateway_isolation import IsolationContract
from tests.support.gateway_refusals import RefusalContract
from tests.support.gateways import House, house, payloads_of, read
from tests.support.postgres import Postgres
from tests.support.seaweed import S3Server
from tests.support.several import Footing


@pytest.mark.postgres
@pytest.mark.s3
class TestPostgresAndS3(GatewayContract, RefusalContract, IsolationContract):
    """One server of each kind for all tests; a database, a prefix and a root key for each."""

    kind = "unix"

    @pytest.fixture(autouse=True)
    def _a_footing(self, postgres: Postgres, seaweed: S3Server, tmp_path: Path) -> None:
        self.footing = Footing(postgres, seaweed, tmp_path)
        self.footing.prepare()

    def house(self, tmp_path: Path, **options: Any) -> AbstractAsyncContextManager[House]:
        settings = self.footing.settings(server=ServerSettings(http=""))
        return house(self.kind, tmp_path / "gw", settings=settings, **options)

    def written(self, tmp_path: Path) -> set[str]:
        return super().written(tmp_path) | set(self._objects())

    async def check_s3(self, gateway: House, client: Client, registered: Registered) -> None:
        payload = payloads_of(registered, 1, seed=3)
        report = await client.put(registered, [b"s3"], payload, durability=Durability.S3)
        assert report.outcomes == (PutOutcome.STORED,)
        (name,) = await gateway.rows("SELECT object FROM placement WHERE tier = 's3' AND state = 'ok'")
        assert f"{self.footing.database}/{name[0]}" in self._objects(), "law 8: it is in S3 when it is acknowledged"
        await client.delete(registered, [b"s3"])
        assert (await read(client, registered, [b"s3"]))[1] == [None], "law 5"

    def _objects(self) -> list[str]:
        with self.footing.s3.client() as client:
            pages = client.get_paginator("list_objects_v2").paginate(
                Bucket=self.footing.s3.bucket, Prefix=f"{self.footing.database}/"
            )
            return [item["Key"] for page in pages for item in page.get("Contents", [])]
