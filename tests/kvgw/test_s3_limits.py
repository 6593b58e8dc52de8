"""What a client cannot make of S3: uploads that escape the quota (Q06), metadata of its own on objects (F09)."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kvgw.model import Durability, PutOutcome
from kvgw.settings import ServerSettings
from storage.errors import TierUnavailable
from storage.s3 import S3Tier
from tests.support.admin import Admin
from tests.support.aio import run
from tests.support.gateways import House, format_of, house, payloads_of, read
from tests.support.postgres import Postgres
from tests.support.seaweed import S3Server
from tests.support.several import Footing

pytestmark = [pytest.mark.postgres, pytest.mark.s3]

MIB = 1024 * 1024


@pytest.fixture
def footing(postgres: Postgres, seaweed: S3Server, tmp_path: Path) -> Footing:
    made = Footing(postgres, seaweed, tmp_path)
    made.prepare()
    return made


def listed(footing: Footing, what: str, field: str) -> list[Any]:
    with footing.s3.client() as client:
        pages = client.get_paginator(what).paginate(Bucket=footing.s3.bucket, Prefix=f"{footing.database}/v1/")
        return [item for page in pages for item in page.get(field, [])]


async def settled(gateway: House) -> None:
    """Let the sweep delete what may be deleted."""
    await gateway.opened.crew.drain_everywhere()
    await gateway.opened.crew.sweep_everywhere()


def test_Q06_an_upload_that_is_broken_off_counts_until_it_is_gone_and_then_no_more(
    footing: Footing, tmp_path: Path
) -> None:
    async def body() -> None:
        settings = footing.settings(server=ServerSettings(http=""))
        async with house("unix", tmp_path / "gw", settings=settings) as gateway:
            admin = Admin(gateway.opened)
            client = gateway.client()
            registered = await client.register(format_of(MIB))
            sealed = MIB + 256 + 16
            path = "/tenants/-/namespaces/default"
            await admin.own("PATCH", path, {"limit_s3_bytes": sealed + 1})
            gateway.opened.directory.forget(gateway.owner.tenant)
            begun, broken = asyncio.Event(), asyncio.Event()
            real = S3Tier.put

            async def broken_off(tier: S3Tier, name: str, data: memoryview) -> None:
                begun.set()
                await broken.wait()
                await real(tier, name, data)
                raise TierUnavailable("the answer was lost")

            with mock.patch.object(S3Tier, "put", broken_off):
                upload = asyncio.create_task(
                    client.put(registered, [b"first"], payloads_of(registered, 1), durability=Durability.S3)
                )
                await begun.wait()
                meanwhile = await client.put(registered, [b"second"], payloads_of(registered, 1, seed=1))
                assert meanwhile.outcomes == (PutOutcome.OVER_QUOTA,), "what is on its way counts"
                broken.set()
                assert (await upload).outcomes == (PutOutcome.FAILED,)
            await gateway.check_clean()
            report = await client.put(registered, [b"third"], payloads_of(registered, 1, seed=2))
            assert report.outcomes == (PutOutcome.STORED,), "Q06: what was broken off is given back"
            await settled(gateway)
            assert len(listed(footing, "list_objects_v2", "Contents")) == 1, "and its bytes are gone"
            assert listed(footing, "list_multipart_uploads", "Uploads") == []
            (usage,) = await admin.own("GET", "/tenants/-/namespaces")
            assert usage["s3_bytes"] <= usage["limit_s3_bytes"]
            assert (await read(client, registered, [b"third"]))[1] == payloads_of(registered, 1, seed=2)

    run(body())


def test_F09_no_metadata_of_a_client_reaches_an_object(footing: Footing, tmp_path: Path) -> None:
    async def body() -> None:
        async with house("unix", tmp_path / "gw", settings=footing.settings(server=ServerSettings(http=""))) as gateway:
            admin = Admin(gateway.opened)
            planted = {
                "x-kvgw-tenant": "other",
                "x-amz-meta-kvgw": "planted",
                "x-amz-server-side-encryption": "none",
                "x-minio-replication-server-side-encryption-sealed-key": "planted",
            }
            answer = await admin.ask("GET", "/v1/tenants/-", peer=os.geteuid(), headers=planted)
            assert answer.json()["name"] == "default"
            assert not [name for name in answer.headers if name.startswith(("x-kvgw", "x-amz", "x-minio"))]
            client = gateway.client()
            registered = await client.register(format_of())
            await client.put(registered, [b"k"], payloads_of(registered, 1), durability=Durability.S3)
            for item in listed(footing, "list_objects_v2", "Contents"):
                with footing.s3.client() as s3:
                    head = s3.head_object(Bucket=footing.s3.bucket, Key=item["Key"])
                assert head["Metadata"] == {}, "F09: an object carries its bytes and nothing else"
                assert head["ContentType"] in ("application/octet-stream", "binary/octet-stream")

    run(body())
