"""The gateway for engines that name every chunk by itself, in no order that matters: answers per key, and deletion."""

from __future__ import annotations

from collections.abc import Sequence

from kvgw.client import Buffer
from kvgw.engines.remote import Remote
from kvgw.errors import KvgwError
from kvgw.kvformat import KVFormat
from kvgw.model import Outcome


class KeyedRemote(Remote):
    """A `Remote` that also says which single chunks were read, and deletes. Owned by one event loop."""

    async def get_each(
        self, tenant: str, kv_format: KVFormat, keys: Sequence[bytes], into: Sequence[memoryview], until: float
    ) -> frozenset[int]:
        """Read chunks into buffers of exactly ``chunk_bytes`` bytes; indices of those that hold their chunk now."""
        try:
            client = self._client(tenant)
            registered = await self._register(client, tenant, kv_format, until)
            report = await client.get(registered, keys, into, deadline_s=self._left(until))
        except KvgwError as error:
            await self._failed(tenant, "load_outages", error)
            return frozenset()
        hits = frozenset(hit.index for hit in report.hits)
        if report.outcome is Outcome.OUTAGE:
            self._counters.reason("load_outages", report.reason)
        elif len(hits) < len(keys):
            self._counters.add("chunks_lost", len(keys) - len(hits))
        return hits

    async def put_each(
        self, tenant: str, kv_format: KVFormat, keys: Sequence[bytes], chunks: Sequence[Buffer], until: float
    ) -> frozenset[int]:
        """Store chunks of which nobody knows what they follow; indices of those that the gateway has now."""
        try:
            client = self._client(tenant)
            registered = await self._register(client, tenant, kv_format, until)
            report = await client.put(registered, keys, chunks, chained=False, deadline_s=self._left(until))
        except KvgwError as error:
            await self._failed(tenant, "store_outages", error)
            return frozenset()
        self._not_taken(report, len(keys) - len(report.there))
        return report.there

    async def delete(self, tenant: str, kv_format: KVFormat, keys: Sequence[bytes], until: float) -> None:
        """Make entries invisible at once, all or none of them. Raises `RequestRefused`, or `Outage` when unsure."""
        client = self._client(tenant)
        registered = await self._register(client, tenant, kv_format, until)
        await client.delete(registered, keys, deadline_s=self._left(until))
