"""Deletion jobs: the rows by which a deletion goes on to its receipt, whatever gateway dies meanwhile.

    removing ─▶ erasing ─▶ verifying ─▶ done
                   ▲           │
                   └─ failed ◀─┘

*removing*: entries end, in bounded transactions; only then the request is acknowledged. *erasing*: the sweep deletes
bytes, and every gateway clears its staging once no row is left. *verifying*: every gateway looks through its own
memory and disk, and one through what all share. Transaction bodies; every change of state names the state it leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, func, insert, select, update

from tenancy.deletion import selection
from tenancy.deletion.selection import Selector
from tenancy.model import Scope
from tenancy.schema import deletion_job, owned


class Look(msgspec.Struct, frozen=True):
    """What somebody saw who looked through a tier after the deletion."""

    tier: str
    node: str
    boot: str
    method: str
    at_ms: int
    left: list[str] = []
    """Names of what should not be there; the first few."""


class Progress(msgspec.Struct, frozen=True):
    """How far a job is."""

    attempt: int = 1
    removed: bool = False
    """Whether all that the job selects has ended."""
    sentence: str = ""
    """What it waits for, or why it failed."""
    retry_ms: int = 0
    key_destroyed_ms: int = 0
    cleared: dict[str, int] = {}
    """Boot of each gateway that has cleared its memory and disk → when."""
    looks: list[Look] = []


@dataclass(frozen=True, slots=True)
class Job:
    """A row of deletion_job."""

    scope: Scope
    """A tenant's own job has `NO_NAMESPACE`."""
    job_id: bytes
    kind: str
    selector: Selector
    state: str
    requested_by: str
    requested_ms: int
    finished_ms: int | None = None
    entries: int = 0
    chunks: int = 0
    bytes: int = 0
    retained: int = 0
    progress: Progress = field(default_factory=Progress)
    receipt: str | None = None


NO_NAMESPACE: Final = UUID(int=0)
_WHOLE: Final = ("namespace", "tenant")
_UNFINISHED: Final = ("removing", "erasing", "verifying", "failed")
_PROGRESS: Final = msgspec.json.Decoder(Progress)


def add(connection: Connection, job: Job) -> None:
    """Write down a new job."""
    connection.execute(
        insert(deletion_job),
        {
            **key_of(job),
            "kind": job.kind,
            "selector": selection.encode(job.selector),
            "state": job.state,
            "requested_by": job.requested_by,
            "requested_ms": job.requested_ms,
            "entries": 0,
            "chunks": 0,
            "bytes": 0,
            "retained": 0,
            "note": encoded(job.progress),
        },
    )


def jobs(connection: Connection, tenant: UUID, *, unfinished: bool, limit: int) -> list[Job]:
    """A tenant's jobs, the newest first; or those that are not done, whole namespaces first and then the oldest."""
    query = select(deletion_job).where(deletion_job.c.tenant_id == tenant).limit(limit)
    if unfinished:
        query = query.where(deletion_job.c.state.in_(_UNFINISHED)).order_by(
            deletion_job.c.kind.not_in(_WHOLE), deletion_job.c.requested_ms
        )
    else:
        query = query.order_by(deletion_job.c.requested_ms.desc())
    return [_job(row) for row in connection.execute(query)]


def job(connection: Connection, tenant: UUID, job_id: bytes) -> Job | None:
    """The tenant's job with this id."""
    row = connection.execute(
        select(deletion_job).where(deletion_job.c.tenant_id == tenant, deletion_job.c.job_id == job_id)
    ).first()
    return None if row is None else _job(row)


def count_parts(connection: Connection, tenant: UUID) -> int:
    """A tenant's jobs that are not done and delete less than a namespace."""
    return (
        connection.scalar(
            select(func.count())
            .select_from(deletion_job)
            .where(
                deletion_job.c.tenant_id == tenant,
                deletion_job.c.kind.not_in(_WHOLE),
                deletion_job.c.state.in_(_UNFINISHED),
            )
        )
        or 0
    )


def is_being_deleted(connection: Connection, scope: Scope) -> bool:
    """Whether a job that is not done deletes the whole namespace."""
    found = connection.scalar(
        select(deletion_job.c.job_id).where(
            *owned(deletion_job, scope), deletion_job.c.kind == "namespace", deletion_job.c.state.in_(_UNFINISHED)
        )
    )
    return found is not None


def move(connection: Connection, job: Job, state: str, progress: Progress) -> bool:
    """Take the job from the state in which it was read to another; False when another gateway was first."""
    moved = connection.execute(
        update(deletion_job)
        .where(*at(job), deletion_job.c.state == job.state)
        .values(state=state, note=encoded(progress))
    )
    return moved.rowcount == 1


def note_cleared(connection: Connection, job: Job, boot: str, now_ms: int) -> None:
    """A gateway has cleared its memory and its disk."""
    current = _current(connection, job)
    if current is not None:
        _note(connection, job, msgspec.structs.replace(current, cleared={**current.cleared, boot: now_ms}))


def note_looks(connection: Connection, job: Job, looks: Sequence[Look]) -> None:
    """A gateway has looked; its earlier looks at the same tiers do not count any more."""
    current = _current(connection, job)
    if current is not None:
        new = {(look.tier, look.boot) for look in looks}
        kept = [look for look in current.looks if (look.tier, look.boot) not in new]
        _note(connection, job, msgspec.structs.replace(current, looks=[*kept, *looks]))


def note_key_destroyed(connection: Connection, job: Job, now_ms: int) -> None:
    """The namespace's key is gone."""
    current = _current(connection, job)
    if current is not None and not current.key_destroyed_ms:
        _note(connection, job, msgspec.structs.replace(current, key_destroyed_ms=now_ms))


def note_sentence(connection: Connection, job: Job, sentence: str) -> None:
    """What the job waits for."""
    current = _current(connection, job)
    if current is not None and current.sentence != sentence:
        _note(connection, job, msgspec.structs.replace(current, sentence=sentence))


def is_at(connection: Connection, job: Job) -> bool:
    """Lock the job; whether it is still in the state in which it was read."""
    return _current(connection, job) is not None


def _current(connection: Connection, job: Job) -> Progress | None:
    """The job's progress, locked; None when the job is not any more in the state in which it was read."""
    row = connection.execute(
        select(deletion_job.c.state, deletion_job.c.note).where(*at(job)).with_for_update()
    ).first()
    return _PROGRESS.decode(row.note) if row is not None and row.state == job.state else None


def _note(connection: Connection, job: Job, progress: Progress) -> None:
    connection.execute(update(deletion_job).where(*at(job)).values(note=encoded(progress)))


def key_of(job: Job) -> dict[str, object]:
    """The columns that name the job."""
    return {"tenant_id": job.scope.tenant, "namespace_id": job.scope.namespace, "job_id": job.job_id}


def at(job: Job) -> tuple[ColumnElement[bool], ...]:
    """The job's own row."""
    return (*owned(deletion_job, job.scope), deletion_job.c.job_id == job.job_id)


def encoded(progress: Progress) -> str:
    """As the job keeps it."""
    return msgspec.json.encode(progress).decode()


def _job(row: Row[*tuple[Any, ...]]) -> Job:
    return Job(
        scope=Scope(row.tenant_id, row.namespace_id),
        job_id=row.job_id,
        kind=row.kind,
        selector=selection.decode(row.selector),
        state=row.state,
        requested_by=row.requested_by,
        requested_ms=row.requested_ms,
        finished_ms=row.finished_ms,
        entries=row.entries,
        chunks=row.chunks,
        bytes=row.bytes,
        retained=row.retained,
        progress=_PROGRESS.decode(row.note),
        receipt=row.receipt,
    )
