"""Reservations that race their reclaim, and counters that are counted anew (Q03, Q08)."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from sqlalchemy import select, update

from tenancy.audit.chain import Act
from tenancy.errors import ReservationExpired
from tenancy.schema import TENANT_SCOPE, audit_record, quota
from tests.support.aio import aio
from tests.tenancy.catalog_bench import HERE, NOW, SEALED, BenchSuite

RACES = int(os.environ.get("KVGW_TEST_RACES", "100"))
ACT = Act(actor="test", action="quota.repair")


class CatalogCounts(BenchSuite):
    @aio
    async def test_Q03_of_a_commit_and_its_reclaim_exactly_one_happens(self) -> None:
        async with self.bench() as bench:
            catalog = bench.backend.catalog(HERE)
            won = {"commit": 0, "reclaim": 0}
            for number in range(RACES):
                batch, lease = bench.batch([f"k{number}"]), number.to_bytes(16, "big")
                await catalog.reserve(batch, lease, NOW + 1, NOW)
                chunk = bench.new_chunk(0, f"k{number}", written=frozenset({"nvme"}))
                commit = catalog.commit(batch, lease, [chunk], NOW + 2)
                reclaim = catalog.reclaim_expired(bench.scope, NOW + 2)
                # On SQLite, where transactions are serial, whoever asks first wins; on PostgreSQL they overlap.
                both = (commit, reclaim) if number % 2 else (reclaim, commit)
                ended = await asyncio.gather(*both, return_exceptions=True)
                committed, reclaimed = ended if number % 2 else reversed(ended)
                if isinstance(committed, ReservationExpired):
                    assert reclaimed == 1, f"race {number}: neither happened"
                    won["reclaim"] += 1
                else:
                    assert (reclaimed, committed.stored) == (0, frozenset({0})), f"race {number}: both happened"
                    won["commit"] += 1
            assert min(won.values()) > 0, f"nothing raced: {won}"
            await bench.check()

    @aio
    async def test_Q08_drift_is_found_and_set_right_while_others_write(self) -> None:
        async with self.bench() as bench:
            catalog = bench.backend.catalog(HERE)
            tenant, mine = bench.scope.tenant, bench.scope.namespace

            async def recount(*, repair: bool) -> list[Any]:
                counted = await catalog.recount(tenant, repair=repair, act=ACT, now_ms=NOW)
                return [one for one in counted if not one.right]

            await bench.put("a", "b", "c")
            assert await recount(repair=True) == []
            for more in (7, -SEALED, 10 * SEALED):
                await bench.run(
                    update(quota)
                    .where(quota.c.tenant_id == tenant, quota.c.scope_id == mine)
                    .values(stored_bytes=quota.c.stored_bytes + more, objects=quota.c.objects + 1)
                )
                (found, summed) = await recount(repair=False)
                assert (found.namespace, found.stored_bytes, found.objects) == (mine, more, 1)
                assert (summed.namespace, summed.stored_bytes) == (None, -more), "the tenant's is not their sum"
                assert len(await recount(repair=False)) == 2, "looking changes nothing"
                writes = [_put(bench, catalog, bench.batch([f"w{more}-{number}"])) for number in range(8)]
                await asyncio.gather(recount(repair=True), *writes, recount(repair=True))
                assert await recount(repair=False) == [], "exact, though others wrote meanwhile"
                await bench.check()
            audited = await bench.rows(select(audit_record.c.action).where(audit_record.c.tenant_id == tenant))
            assert [row.action for row in audited].count("quota.repair") >= 3, "what was set is written down"

    @aio
    async def test_a_tenants_own_drift_is_set_from_its_namespaces(self) -> None:
        async with self.bench() as bench:
            await bench.put("a")
            catalog, tenant = bench.backend.catalog(HERE), bench.scope.tenant
            await bench.run(
                update(quota)
                .where(quota.c.tenant_id == tenant, quota.c.scope_id == TENANT_SCOPE)
                .values(s3_bytes=quota.c.s3_bytes + 5)
            )
            counted = await catalog.recount(tenant, repair=True, act=ACT, now_ms=NOW)
            assert [(one.namespace, one.s3_bytes) for one in counted if not one.right] == [(None, 5)]
            await bench.check()


async def _put(bench: Any, catalog: Any, batch: Any) -> None:
    lease = bench.unique()
    await catalog.reserve(batch, lease, NOW + 60_000, NOW)
    await catalog.commit(batch, lease, [bench.new_chunk(0, batch.entry_keys[0].decode(), written=frozenset())], NOW)
