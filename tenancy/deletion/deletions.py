"""The catalog's face for deletions that leave a receipt."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Final, TypeVar
from uuid import UUID

from sqlalchemy import Connection, select

from tenancy import generation, registry
from tenancy.audit import chain
from tenancy.audit.chain import Act
from tenancy.deletion import burial, erasure, jobs, selection
from tenancy.deletion.erasure import Outstanding
from tenancy.deletion.jobs import Job, Look, Progress
from tenancy.deletion.selection import Prefix
from tenancy.engine import Database, ends_untold
from tenancy.errors import NamespaceUnknown, RegistryRefused
from tenancy.keys.signing import Signer
from tenancy.model import Scope
from tenancy.removal import EntryName
from tenancy.schema import namespace
from tenancy.sight import NO_TENANT, Sight

Result = TypeVar("Result")

BATCH: Final = 500
"""Entries that end in one transaction."""
PAGE: Final = 5_000
"""Blob ids that are read at once."""
JOBS_MAX: Final = 200
"""Jobs of one tenant that are listed, or worked on in one turn."""


class Deletions:
    """Every question and change of deletion jobs. Raises `CatalogUnavailable`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def begin(self, begun: Sequence[Job], act: Act, now_ms: int) -> None:
        """Write down jobs of one tenant, with `act`, in one transaction.

        A namespace or tenant that is to go is invisible from here on. Raises `NamespaceUnknown` when it is on its way
        already, `RegistryRefused` when its policy forbids its deletion or too many wait, `DeletionUnsupported`.
        """

        def body(connection: Connection) -> None:
            for job in begun:
                if job.kind == "namespace":
                    _close_namespace(connection, job.scope)
                elif job.kind == "tenant":
                    registry.set_tenant_state(connection, job.scope.tenant, "deleting")
                else:
                    _check_part(connection, job)
                jobs.add(connection, job)
            chain.record(connection, act, now_ms)

        await self._database.write(body, Sight(begun[0].scope.tenant))

    async def remove(self, job: Job, now_ms: int) -> AsyncIterator[tuple[bytes, ...]]:
        """End all entries that the job selects, a transaction at a time; the blobs that nothing needs any more.

        Nobody may be told so before `settle`. Raises `DeletionUnsupported` for a prefix whose chain was broken
        meanwhile.
        """
        if isinstance(job.selector, Prefix):
            found = partial(selection.follow, scope=job.scope, selector=job.selector)
            names = await self._read(job, found)
            for start in range(0, len(names), BATCH):
                batch = names[start : start + BATCH]
                yield await self._write(job, partial(erasure.remove_named, job=job, names=batch, now_ms=now_ms))
            return
        after: EntryName | None = None
        while True:
            step = partial(erasure.remove, job=job, after=after, now_ms=now_ms, limit=BATCH)
            removed = await self._write(job, step)
            yield removed.unneeded
            after = removed.last
            if after is None:
                break
        if job.kind == "namespace":
            while stray := await self._write(job, partial(erasure.doom_stray, job=job, limit=BATCH)):
                yield stray
            while await self._write(job, partial(erasure.note_dying, job=job, limit=BATCH)):
                continue

    async def settle(self, job: Job) -> None:
        """Return when no gateway answers from memory what was there before `remove` (law 5)."""
        await self._database.write(_nothing_more, Sight(job.scope.tenant))

    async def grow_generation(self) -> int:
        """The catalog's new generation, to be written down beside the keys."""
        return await self._database.write(generation.grow, NO_TENANT)

    async def unfinished(self, tenant: UUID) -> list[Job]:
        return await self._database.read(
            partial(jobs.jobs, tenant=tenant, unfinished=True, limit=JOBS_MAX), Sight(tenant)
        )

    async def newest(self, tenant: UUID) -> list[Job]:
        return await self._database.read(
            partial(jobs.jobs, tenant=tenant, unfinished=False, limit=JOBS_MAX), Sight(tenant)
        )

    async def job(self, tenant: UUID, job_id: bytes) -> Job | None:
        return await self._database.read(partial(jobs.job, tenant=tenant, job_id=job_id), Sight(tenant))

    async def again(self, job: Job) -> Job | None:
        """The job as it is now."""
        return await self.job(job.scope.tenant, job.job_id)

    async def blobs(self, job: Job) -> AsyncIterator[list[bytes]]:
        """The ids of the blobs that the job deletes, a page at a time."""
        after = b""
        while page := await self._read(job, partial(erasure.blobs, job=job, after=after, limit=PAGE)):
            yield page
            after = page[-1]

    async def outstanding(self, job: Job) -> Outstanding:
        return await self._read(job, partial(erasure.outstanding, job=job))

    async def left_in_catalog(self, job: Job) -> list[str]:
        return await self._read(job, partial(erasure.left_in_catalog, job=job))

    async def drop_tombstones(self, job: Job) -> None:
        """Drop the tombstones of a namespace that goes."""
        while await self._write(job, partial(erasure.drop_tombstones, scope=job.scope, limit=BATCH)) == BATCH:
            continue

    async def rows_left(self, scope: Scope, blob_ids: Sequence[bytes], *, whole: bool) -> list[str]:
        """What rows there are of these blobs, or of the whole namespace: for whoever looks again much later."""
        return await self._database.read(
            partial(erasure.rows_left, scope=scope, blob_ids=blob_ids, whole=whole), Sight(scope.tenant)
        )

    async def scrub(self) -> bool:
        """Overwrite what the database's own files still hold of deleted rows, where it is one file; False: not now.

        SQLite zeroes what it deletes, but the log before a checkpoint still has the pages as they were.
        """
        return await self._database.read(_checkpoint, NO_TENANT)

    async def move(self, job: Job, state: str, progress: Progress) -> bool:
        return await self._write(job, partial(jobs.move, job=job, state=state, progress=progress))

    async def note_cleared(self, job: Job, boot: str, now_ms: int) -> None:
        await self._write(job, partial(jobs.note_cleared, job=job, boot=boot, now_ms=now_ms))

    async def note_looks(self, job: Job, looks: Sequence[Look]) -> None:
        await self._write(job, partial(jobs.note_looks, job=job, looks=looks))

    async def note_key_destroyed(self, job: Job, now_ms: int) -> None:
        await self._write(job, partial(jobs.note_key_destroyed, job=job, now_ms=now_ms))

    async def note_sentence(self, job: Job, sentence: str) -> None:
        await self._write(job, partial(jobs.note_sentence, job=job, sentence=sentence))

    async def finish(self, job: Job, signer: Signer, actor: str, unseen: Sequence[str], now_ms: int) -> str | None:
        """The receipt, written down with the last of the job's changes. Raises `RegistryRefused` if it is too early."""
        return await self._write(
            job, partial(burial.finish, job=job, signer=signer, actor=actor, unseen=unseen, now_ms=now_ms)
        )

    async def _read(self, job: Job, body: Callable[[Connection], Result]) -> Result:
        return await self._database.read(body, Sight(job.scope.tenant))

    async def _write(self, job: Job, body: Callable[[Connection], Result]) -> Result:
        return await self._database.write(body, Sight(job.scope.tenant), ends_untold)


def _check_part(connection: Connection, job: Job) -> None:
    """Refuse now, not when it has begun, what cannot be done, and what would keep maintenance from other tenants'."""
    count = jobs.count_parts(connection, job.scope.tenant)
    if count >= JOBS_MAX:
        raise RegistryRefused(
            f"the tenant has {count} deletions that are not done, and at most {JOBS_MAX} may wait; kvgw deletions list "
            "says what for"
        )
    if isinstance(job.selector, Prefix):
        selection.follow(connection, job.scope, job.selector)


def _close_namespace(connection: Connection, scope: Scope) -> None:
    """Let a namespace go: from here on nothing of it is visible, and nothing is stored in it."""
    row = connection.execute(
        select(namespace.c.deletion_allowed, namespace.c.state, namespace.c.name).where(
            namespace.c.tenant_id == scope.tenant, namespace.c.namespace_id == scope.namespace
        )
    ).first()
    if row is None or (row.state == "deleting" and jobs.is_being_deleted(connection, scope)):
        raise NamespaceUnknown("the namespace does not exist, or is being deleted")
    if not row.deletion_allowed:
        raise RegistryRefused(
            f"the namespace {row.name!r} must not be deleted: its policy says so (deletion_allowed); allow it first"
        )
    if row.state != "deleting":  # one whose key was shredded is not visible any more, but has its rows and bytes
        registry.set_namespace_state(connection, scope, "deleting")


def _nothing_more(_: Connection) -> None:
    """What was done before is what counts."""


def _checkpoint(connection: Connection) -> bool:
    if connection.dialect.name != "sqlite":
        return True
    busy = connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").scalar()
    return not busy
