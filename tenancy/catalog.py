"""The catalog: decides what may be reused, by whom, and until when. One transaction and one statement per batch.

A thin face over the transaction bodies of this package; each method is one of them, run in the database.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from uuid import UUID

from sqlalchemy import Connection

from tenancy import (
    eviction,
    formats,
    generation,
    holding,
    making_room,
    outbox,
    placements,
    putting,
    repair,
    sweep,
    usage,
    visible,
)
from tenancy.audit import chain
from tenancy.audit.chain import Act
from tenancy.audit.records import Records
from tenancy.births import Batch, NewChunk
from tenancy.engine import Database, Ending, ends_nothing, ends_untold, ends_what_it_names
from tenancy.eviction import Candidate
from tenancy.formats import FormatDescription
from tenancy.inspections import Inspections
from tenancy.model import FormatRow, FoundChunk, Node, Scope, Usage
from tenancy.outbox import Debts, Waiting
from tenancy.placements import Claim, DueWrite, Endings, Turn
from tenancy.presence import Presence
from tenancy.putting import Committed, Reserved
from tenancy.registrar import Registrar
from tenancy.sight import Sight
from tenancy.sweep import DoomedPlacement


class Catalog(Registrar, Records, Presence, Inspections):
    """Every question and change of state, asked by one gateway process. Raises `CatalogUnavailable`."""

    def __init__(self, database: Database, node: Node) -> None:
        super().__init__(database)
        self.node = node

    # Formats

    async def format(self, scope: Scope, fingerprint: bytes) -> FormatRow | None:
        return await self._database.read(
            partial(formats.find, scope=scope, fingerprint=fingerprint), Sight(scope.tenant)
        )

    async def register_format(self, scope: Scope, description: FormatDescription, now_ms: int) -> FormatRow | None:
        return await self._database.write(
            partial(formats.register, scope=scope, description=description, now_ms=now_ms),
            Sight(scope.tenant),
            ends_nothing,
        )

    # Reading

    async def lookup(
        self, scope: Scope, format_ids: Sequence[int], entry_keys: Sequence[bytes], now_ms: int
    ) -> dict[bytes, FoundChunk]:
        return await self._database.read(
            lambda connection: visible.lookup(connection, scope, format_ids, entry_keys, self.node, now_ms),
            Sight(scope.tenant),
        )

    async def extend(
        self, scope: Scope, format_id: int, entry_keys: Sequence[bytes], ttl_ms: int | None, now_ms: int
    ) -> int:
        return await self._database.write(
            lambda connection: usage.extend(connection, scope, format_id, entry_keys, ttl_ms, now_ms),
            Sight(scope.tenant),
            ends_nothing,
        )

    async def hold(self, scope: Scope, format_id: int, entry_keys: Sequence[bytes], until_ms: int, now_ms: int) -> int:
        return await self._database.write(
            lambda connection: holding.hold(connection, scope, format_id, entry_keys, until_ms, now_ms),
            Sight(scope.tenant),
            ends_nothing,
        )

    async def record_hits(self, scope: Scope, hits: Sequence[tuple[int, bytes, int, int]]) -> None:
        await self._database.write(
            partial(usage.record_hits, scope=scope, hits=hits), Sight(scope.tenant), ends_nothing
        )

    async def usage(self, scope: Scope) -> tuple[Usage, int, int, int]:
        return await self._database.read(partial(usage.namespace_usage, scope=scope), Sight(scope.tenant))

    async def counted_rows(self, scope: Scope) -> Usage:
        return await self._database.read(partial(usage.counted_rows, scope=scope), Sight(scope.tenant))

    # Writing

    async def reserve(self, batch: Batch, reservation_id: bytes, lease_until_ms: int, now_ms: int) -> Reserved:
        return await self._database.write(
            lambda connection: putting.reserve(connection, batch, self.node, reservation_id, lease_until_ms, now_ms),
            Sight(batch.scope.tenant),
            _replaced,
        )

    async def commit(self, batch: Batch, reservation_id: bytes, chunks: Sequence[NewChunk], now_ms: int) -> Committed:
        return await self._database.write(
            lambda connection: putting.commit(connection, batch, self.node, reservation_id, chunks, now_ms),
            Sight(batch.scope.tenant),
            _replaced,
        )

    async def abort(self, scope: Scope, reservation_id: bytes) -> None:
        await self._database.write(
            partial(putting.abort, scope=scope, reservation_id=reservation_id), Sight(scope.tenant), ends_nothing
        )

    async def reclaim_expired(self, scope: Scope, now_ms: int) -> int:
        return await self._database.write(
            partial(putting.reclaim_expired, scope=scope, now_ms=now_ms), Sight(scope.tenant), ends_nothing
        )

    # Ending

    async def delete_keys(
        self, scope: Scope, format_id: int, entry_keys: Sequence[bytes], now_ms: int
    ) -> tuple[int, list[bytes]]:
        return await self._database.write(
            lambda connection: sweep.delete_keys(connection, scope, format_id, entry_keys, now_ms), Sight(scope.tenant)
        )

    async def delete_for_good(
        self, scope: Scope, format_id: int, entry_keys: Sequence[bytes], act: Act, now_ms: int
    ) -> tuple[int, list[bytes], int]:
        """`delete_keys`, recorded as `act` with the number of keys that went, and the catalog's new generation.

        Once the generation is written down, no older copy is taken for this catalog.
        """

        def body(connection: Connection) -> tuple[int, list[bytes], int]:
            count, unneeded = sweep.delete_keys(connection, scope, format_id, entry_keys, now_ms)
            grown = generation.grow(connection) if count else generation.current(connection)
            chain.record(connection, replace(act, detail={**act.detail, "deleted": count}), now_ms)
            return count, unneeded, grown

        return await self._database.write(body, Sight(scope.tenant))

    async def expire(self, scope: Scope, now_ms: int, limit: int) -> tuple[int, list[bytes]]:
        return await self._database.write(
            partial(sweep.expire, scope=scope, now_ms=now_ms, limit=limit), Sight(scope.tenant), ends_what_it_names
        )

    async def doomed(self, scope: Scope, tier: str, now_ms: int, limit: int) -> list[DoomedPlacement]:
        return await self._database.read(
            partial(sweep.doomed, scope=scope, node=self.node, tier=tier, now_ms=now_ms, limit=limit),
            Sight(scope.tenant),
        )

    async def purge(self, scope: Scope, gone: Sequence[DoomedPlacement], limit: int) -> int:
        return await self._database.write(
            partial(sweep.purge, scope=scope, node=self.node, gone=gone, limit=limit),
            Sight(scope.tenant),
            ends_untold if gone else ends_what_it_names,
        )

    async def forget_tombstones(self, scope: Scope, before_ms: int) -> int:
        return await self._database.write(
            partial(sweep.forget_tombstones, scope=scope, before_ms=before_ms), Sight(scope.tenant), ends_nothing
        )

    async def lose_unplaced(self, scope: Scope, now_ms: int) -> tuple[int, list[bytes]]:
        return await self._database.write(
            partial(sweep.lose_unplaced, scope=scope, node=self.node, now_ms=now_ms),
            Sight(scope.tenant),
            ends_what_it_names,
        )

    async def eviction_candidates(self, scope: Scope, now_ms: int, limit: int) -> list[Candidate]:
        return await self._database.read(
            partial(eviction.eviction_candidates, scope=scope, node=self.node, now_ms=now_ms, limit=limit),
            Sight(scope.tenant),
        )

    async def on_nvme(self, scope: Scope) -> int:
        return await self._database.read(partial(eviction.on_nvme, scope=scope, node=self.node), Sight(scope.tenant))

    async def leaving(self, scope: Scope) -> int:
        return await self._database.read(partial(making_room.leaving, scope=scope), Sight(scope.tenant))

    async def make_room(self, scope: Scope, now_ms: int) -> list[bytes]:
        return await self._database.write(
            partial(making_room.make_room, scope=scope, now_ms=now_ms), Sight(scope.tenant), ends_untold
        )

    async def leaving_nvme(self, scope: Scope) -> int:
        return await self._database.read(
            partial(eviction.leaving_nvme, scope=scope, node=self.node), Sight(scope.tenant)
        )

    async def evict_nvme(self, scope: Scope, blob_ids: Sequence[bytes], now_ms: int) -> list[bytes]:
        return await self._database.write(
            partial(eviction.evict_nvme, scope=scope, node=self.node, blob_ids=blob_ids, now_ms=now_ms),
            Sight(scope.tenant),
            ends_untold,
        )

    # Placements

    async def claim_due(
        self, scope: Scope, tier: str, lease_until_ms: int, now_ms: int, limit: int, bytes_max: int | None = None
    ) -> list[DueWrite]:
        return await self._database.write(
            lambda connection: placements.claim_due(
                connection, scope, self.node, tier, lease_until_ms, now_ms, limit, bytes_max
            ),
            Sight(scope.tenant),
            ends_nothing,
        )

    async def settle_writes(self, scope: Scope, ended: Endings, claim: Claim | None, now_ms: int) -> Turn:
        return await self._database.write(
            lambda connection: placements.settle_writes(connection, scope, self.node, ended, claim, now_ms),
            Sight(scope.tenant),
            ends_untold if ended.lost else ends_nothing,
        )

    async def outbox_length(self, scope: Scope) -> dict[str, tuple[int, int, int]]:
        return await self._database.read(partial(placements.outbox_length, scope=scope), Sight(scope.tenant))

    async def own_outbox(self, scope: Scope) -> dict[str, Waiting]:
        return await self._database.read(partial(outbox.own_outbox, scope=scope, node=self.node), Sight(scope.tenant))

    async def on_disk(self, scope: Scope, blob_ids: Sequence[bytes]) -> set[bytes]:
        return await self._database.read(
            partial(outbox.on_disk, scope=scope, node=self.node, blob_ids=blob_ids), Sight(scope.tenant)
        )

    async def debts(self, scope: Scope, blob_ids: Sequence[bytes]) -> Debts:
        return await self._database.read(
            partial(outbox.debts, scope=scope, node=self.node, blob_ids=blob_ids), Sight(scope.tenant)
        )

    async def renew(self, scope: Scope, now_ms: int, limit: int) -> int:
        return await self._database.write(
            partial(repair.renew, scope=scope, node=self.node, now_ms=now_ms, limit=limit),
            Sight(scope.tenant),
            ends_nothing,
        )

    async def promote(self, scope: Scope, blob_ids: Sequence[bytes], now_ms: int) -> set[bytes]:
        return await self._database.write(
            partial(repair.promote, scope=scope, node=self.node, blob_ids=blob_ids, now_ms=now_ms),
            Sight(scope.tenant),
            ends_nothing,
        )

    async def known_objects(self, scope: Scope, tier: str, node: str, blob_ids: Sequence[bytes]) -> set[bytes]:
        return await self._database.read(
            partial(placements.known_objects, scope=scope, tier=tier, node=node, blob_ids=blob_ids), Sight(scope.tenant)
        )

    async def quarantine(self, scope: Scope, blob_id: bytes, tier: str, node: str, now_ms: int) -> list[bytes]:
        """Nobody reads this placement again; if it was the chunk's last hope its entries end: unneeded blobs."""

        def body(connection: Connection) -> list[bytes]:
            repair.quarantine(connection, scope, blob_id, tier, node, now_ms)
            return repair.abandon_unreadable(connection, scope, [blob_id], now_ms)

        return await self._database.write(body, Sight(scope.tenant), ends_untold)

    # What was found visible, and whether it still is

    def version(self, tenant: UUID) -> int | None:
        """See `Database.version`."""
        return self._database.version(tenant)


def _replaced(result: Reserved | Committed) -> Ending:
    return Ending.UNTOLD if result.doomed else Ending.NOTHING
