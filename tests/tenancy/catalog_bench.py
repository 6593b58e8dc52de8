"""What the catalog's suites work with: a catalog of two namespaces, short ways to put, and the laws after every step.

A database joins by giving `Bench.make` two things: a catalog for a node, and a way to run raw statements as a test.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import UUID

from sqlalchemy import Connection, Engine, event, exists, func, select

from tenancy import quota as quota_rows
from tenancy.births import Batch, NewChunk
from tenancy.catalog import Catalog
from tenancy.formats import FormatDescription
from tenancy.model import Node, Scope, Usage
from tenancy.placements import DueWrite, Endings, Turn
from tenancy.policy import Policy
from tenancy.putting import Committed, Reserved
from tenancy.registry import KeyRow
from tenancy.schema import TENANT_SCOPE, chunk, entry, owned, placement, quota
from tenancy.usage import counted_rows
from tests.tenancy.statement_lint import linted_statements

NOW = 1_700_000_000_000
TTL = 10_000
PLAIN, SEALED = 100, 200
HERE, ELSEWHERE = Node("node-a", "boot-1"), Node("node-b", "boot-2")
AFTER_RESTART = Node("node-a", "boot-3")
BOTH = ("nvme", "s3")

Transact = Callable[[Callable[[Connection], Any]], Awaitable[Any]]


class Backend(Protocol):
    """A database with an empty catalog in it."""

    def catalog(self, node: Node) -> Catalog: ...

    async def transact(self, body: Callable[[Connection], Any]) -> Any: ...

    async def gather_statistics(self) -> None:
        """What a database does by itself after a while, so that it plans for the rows that there are."""


def name(text: str) -> bytes:
    """An entry key, content id or the like, of 32 bytes."""
    return text.encode().ljust(32, b".")


def description(fingerprint: str = "format", **changes: Any) -> FormatDescription:
    fields: dict[str, Any] = {
        "fingerprint": name(fingerprint),
        "canonical": b"canonical",
        "model": "m",
        "weights": "w",
        "tokenizer": "t",
        "kv_dtype": "float16",
        "kv_quantisation": None,
        "adapter": None,
        "adapter_digest": None,
        "engine": "e",
        "engine_abi": "1",
        "layout": "l",
        "tokens_per_chunk": 16,
        "chunk_bytes": PLAIN,
    }
    return FormatDescription(**(fields | changes))


@dataclass
class Put:
    """A PUT that went through: its answers, and the blob of each key that was wanted."""

    reserved: Reserved
    committed: Committed | None
    blobs: dict[str, bytes]


class Watched:
    """A catalog after each of whose calls the laws are checked."""

    def __init__(self, catalog: Catalog, bench: Bench) -> None:
        self._catalog = catalog
        self._bench = bench
        self.node = catalog.node

    def __getattr__(self, called: str) -> Any:
        method = getattr(self._catalog, called)

        async def call(*arguments: Any) -> Any:
            try:
                return await method(*arguments)
            finally:
                await self._bench.check()

        return call


@dataclass
class Bench:
    """One tenant with two namespaces, "one" and "two", and one format in each."""

    backend: Backend
    scope: Scope
    other: Scope
    now: int = NOW
    _serial: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @classmethod
    async def make(cls, backend: Backend, *, tenant_limits: Policy | None = None, **limits: int) -> Bench:
        """`limits` are those of both namespaces."""
        tenant = UUID(int=0xA)
        bench = cls(backend, Scope(tenant, UUID(int=1)), Scope(tenant, UUID(int=2)))
        catalog = backend.catalog(HERE)
        await catalog.create_tenant(tenant, "tenant", NOW)
        for scope, called in ((bench.scope, "one"), (bench.other, "two")):
            await catalog.create_namespace(
                scope, called, Policy(**limits), [KeyRow("data", epoch, b"k") for epoch in (1, 2)], NOW
            )
            row = await catalog.register_format(scope, description(), NOW)
            assert row is not None
            assert row.format_id == 1
        if tenant_limits is not None:
            values = {key: getattr(tenant_limits, key) for key in ("limit_bytes", "limit_objects", "limit_s3_bytes")}
            await bench.run(
                quota.update().where(quota.c.tenant_id == tenant, quota.c.scope_id == TENANT_SCOPE).values(**values)
            )
        return bench

    @property
    def catalog(self) -> Any:
        return self.on(HERE)

    def on(self, node: Node) -> Any:
        return Watched(self.backend.catalog(node), self)

    async def run(self, statement: Any) -> None:
        """A statement that no transaction body makes."""
        await self.backend.transact(lambda connection: connection.execute(statement))

    async def rows(self, statement: Any) -> list[Any]:
        return list(await self.backend.transact(lambda connection: connection.execute(statement).all()))

    def unique(self) -> bytes:
        return next(self._serial).to_bytes(16, "big")

    def batch(self, keys: Sequence[str], **changes: Any) -> Batch:
        names = tuple(name(key) for key in keys)
        node = changes.pop("node", HERE)
        tiers = changes.pop("tiers", BOTH)
        fields: dict[str, Any] = {
            "scope": self.scope,
            "format_id": 1,
            "entry_keys": names,
            "parents": (None, *names[:-1]),
            "depth": 0,
            "tokens": 16,
            "sealed_length": SEALED,
            "ttl_ms": TTL,
            "durability": "nvme",
            "label_macs": (),
            "writer": "w",
            "tiers": tuple((tier, node.node if tier == "nvme" else "") for tier in tiers),
        }
        return Batch(**(fields | changes))

    def new_chunk(self, index: int, content: str, *, epoch: int = 1, written: frozenset[str]) -> NewChunk:
        blob_id = self.unique()
        return NewChunk(
            index,
            blob_id,
            name(content),
            name("salt"),
            name("root"),
            epoch,
            16,
            PLAIN,
            self.now,
            written,
            blob_id.hex(),
        )

    async def put(
        self,
        *keys: str,
        contents: Sequence[str] | None = None,
        node: Node = HERE,
        epoch: int = 1,
        written: Sequence[str] | None = None,
        **changes: Any,
    ) -> Put:
        """Reserve and commit. Contents are named after their keys unless `contents` says otherwise."""
        catalog = self.on(node)
        batch = self.batch(keys, node=node, **changes)
        reservation = self.unique()
        reserved = await catalog.reserve(batch, reservation, self.now + 60_000, self.now)
        if not reserved.wanted:
            return Put(reserved, None, {})
        if written is None:
            written = () if batch.durability == "staged" else (batch.durability,)
        new = [
            self.new_chunk(index, (contents or keys)[index], epoch=epoch, written=frozenset(written))
            for index in reserved.wanted
        ]
        committed = await catalog.commit(batch, reservation, new, self.now)
        return Put(reserved, committed, {keys[one.index]: one.blob_id for one in new})

    async def see(self, *keys: str, node: Node = HERE, scope: Scope | None = None) -> dict[str, Any]:
        """Visible keys, with what was found."""
        found = await self.on(node).lookup(scope or self.scope, [1], [name(key) for key in keys], self.now)
        return {key: found[name(key)] for key in keys if name(key) in found}

    async def delete(self, *keys: str) -> tuple[int, list[bytes]]:
        return await self.catalog.delete_keys(self.scope, 1, [name(key) for key in keys], self.now)

    async def claim(self, tier: str, *, node: Node = HERE, lease_ms: int = 1000, limit: int = 100) -> list[DueWrite]:
        return await self.on(node).claim_due(self.scope, tier, self.now + lease_ms, self.now, limit)

    async def end(
        self,
        *,
        done: Sequence[DueWrite] = (),
        failed: Sequence[tuple[DueWrite, int]] = (),
        lost: Sequence[DueWrite] = (),
        node: Node = HERE,
    ) -> frozenset[bytes]:
        """Write down how writes ended; blobs that nobody needs any more."""
        turn: Turn = await self.on(node).settle_writes(self.scope, Endings(done, failed, lost), None, self.now)
        return turn.unneeded

    async def sweep(self, *, node: Node = HERE) -> int:
        """Delete and purge whatever may be deleted now; how many chunks went."""
        gone = [
            one for tier in BOTH for one in await self.on(node).doomed(self.scope, tier, self.now, 10_000)
        ]  # fmt: skip
        return await self.on(node).purge(self.scope, gone, 10_000)

    async def usage(self) -> Usage:
        usage, *_ = await self.backend.catalog(HERE).usage(self.scope)
        return usage

    async def tenant_usage(self) -> Usage:
        tenant, _ = await self.backend.transact(lambda connection: quota_rows.lock(connection, self.scope))
        return tenant

    async def states(self) -> dict[tuple[bytes, str, str], str]:
        """Placements: (blob, tier, node) → state."""
        statement = select(placement.c.blob_id, placement.c.tier, placement.c.node, placement.c.state)
        return {
            (row[0], row[1], row[2]): row[3] for row in await self.rows(statement.where(*owned(placement, self.scope)))
        }

    async def chunks(self) -> dict[bytes, str]:
        """Chunks: blob → state."""
        statement = select(chunk.c.blob_id, chunk.c.state).where(*owned(chunk, self.scope))
        return {row[0]: row[1] for row in await self.rows(statement)}

    async def check(self) -> None:
        """Law 4 in both namespaces and the tenant, and that rows fit together."""
        await self.backend.transact(lambda connection: check_laws(connection, (self.scope, self.other)))


def check_laws(connection: Connection, scopes: Sequence[Scope]) -> None:
    """`scopes`: all namespaces of one tenant."""
    usages = []
    for scope in scopes:
        tenant, mine = quota_rows.lock(connection, scope)
        usages.append(mine)
        assert mine == counted_rows(connection, scope), "law 4: counters = rows"
        for usage in (tenant, mine):
            assert usage.stored_bytes <= usage.limit_bytes, "law 4: never over the limit"
            assert usage.objects <= usage.limit_objects, "law 4: never over the limit"
            assert usage.s3_bytes <= usage.limit_s3_bytes, "law 4: never over the limit"
        _check_rows(connection, scope)
    for counter in ("stored_bytes", "objects", "s3_bytes"):
        assert getattr(tenant, counter) == sum(getattr(one, counter) for one in usages), "law 4: tenant = Σ namespaces"


def _check_rows(connection: Connection, scope: Scope) -> None:
    pointed = exists(select(1).where(*owned(entry, scope), entry.c.blob_id == chunk.c.blob_id))
    wrong = select(func.count()).where(*owned(chunk, scope), pointed == (chunk.c.state != "live"))
    assert connection.scalar(wrong) == 0, "a chunk is live exactly while an entry points at it"
    dying = exists(
        select(1).where(*owned(chunk, scope), chunk.c.blob_id == placement.c.blob_id, chunk.c.state == "deleting")
    )
    stray = select(func.count()).where(*owned(placement, scope), placement.c.state != "doomed", dying)
    assert connection.scalar(stray) == 0, "every placement of a dying chunk is doomed"


@contextmanager
def counted_statements() -> Iterator[list[str]]:
    """The statements that any engine of this process sends meanwhile, without those that only frame a transaction."""
    seen: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if not statement.lstrip().upper().startswith(("BEGIN", "COMMIT", "PRAGMA", "SELECT SET_CONFIG")):
            seen.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(Engine, "before_cursor_execute", note)


class BenchSuite:
    """Base of the suites: says how a bench comes about."""

    def backend(self) -> Any:
        """An async context manager of a fresh `Backend`."""
        raise NotImplementedError

    @asynccontextmanager
    async def bench(self, **options: Any) -> AsyncIterator[Bench]:
        """A bench, all of whose statements are looked at for their tenant (I08)."""
        async with self.backend() as backend:
            with linted_statements():
                yield await Bench.make(backend, **options)
