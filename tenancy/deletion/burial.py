"""The end of a deletion job: its receipt, and for a namespace or tenant the last of its rows. Transaction bodies.

The name of what is buried is free again, and whoever takes it gets new ids and new keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from uuid import UUID

import msgspec
from sqlalchemy import Connection, Table, delete, select, update

from tenancy import quota as usages
from tenancy.audit import chain
from tenancy.audit.chain import Act
from tenancy.deletion import erasure, jobs, receipt
from tenancy.deletion.jobs import Job
from tenancy.errors import RegistryRefused
from tenancy.keys.signing import Signer
from tenancy.model import Scope
from tenancy.schema import deletion_blob, deletion_job, metadata, namespace, owned, quota, tenant

RETAINED_LISTED_MAX = 1_000
_PAGE = 10_000
_RECORDS = frozenset({"audit_record", "deletion_job", "deletion_blob"})
"""What outlives a namespace and a tenant."""


def finish(
    connection: Connection, job: Job, signer: Signer, actor: str, unseen: Sequence[str], now_ms: int
) -> str | None:
    """Bury what the job deletes and write its receipt; None when another gateway has done so."""
    if not jobs.is_at(connection, job):
        return None
    subject = _subject(connection, job, unseen)
    if job.kind == "namespace":
        _end_others(connection, job, now_ms)
        bury_namespace(connection, job.scope)
    elif job.kind == "tenant":
        bury_tenant(connection, job.scope.tenant)
    act = Act(
        actor=actor,
        action="deletion.done",
        target=job.job_id.hex(),
        tenant=job.scope.tenant,
        namespace=None if job.kind == "tenant" else job.scope.namespace,
        detail={"kind": job.kind, "root": receipt.root_of(subject).hex(), "chunks": subject.chunks},
    )
    text = receipt.write(subject, signer, now_ms, chain.record(connection, act, now_ms))
    connection.execute(
        delete(deletion_blob).where(*owned(deletion_blob, job.scope), deletion_blob.c.job_id == job.job_id)
    )
    connection.execute(
        update(deletion_job)
        .where(*jobs.at(job))
        .values(
            state="done",
            finished_ms=now_ms,
            chunks=subject.chunks,
            bytes=subject.bytes,
            retained=subject.retained_count,
            receipt=text,
        )
    )
    return text


def _end_others(connection: Connection, job: Job, now_ms: int) -> None:
    """Jobs that delete parts of a namespace end with the whole of it; its receipt is theirs."""
    others = (*owned(deletion_job, job.scope), deletion_job.c.job_id != job.job_id)
    progress = jobs.Progress(removed=True, sentence=f"the whole namespace was deleted: see job {job.job_id.hex()}")
    connection.execute(
        delete(deletion_blob).where(*owned(deletion_blob, job.scope), deletion_blob.c.job_id != job.job_id)
    )
    connection.execute(
        update(deletion_job)
        .where(*others, deletion_job.c.state != "done")
        .values(state="done", finished_ms=now_ms, note=jobs.encoded(progress))
    )


def bury_namespace(connection: Connection, scope: Scope) -> None:
    """Drop every row of a namespace, and itself. Raises `RegistryRefused` while chunks are charged to it."""
    usage = usages.lock(connection, scope)[1]
    if usage.stored_bytes or usage.objects or usage.s3_bytes:
        raise RegistryRefused(f"{usage.objects} chunks of the namespace still have rows")
    for table in _tables("namespace_id"):
        connection.execute(delete(table).where(*owned(table, scope)))
    connection.execute(delete(quota).where(quota.c.tenant_id == scope.tenant, quota.c.scope_id == scope.namespace))
    connection.execute(delete(namespace).where(*owned(namespace, scope)))


def bury_tenant(connection: Connection, tenant_id: UUID) -> None:
    """Drop a tenant without namespaces, its tokens and its limits. Raises `RegistryRefused` if it has a namespace."""
    left = connection.scalars(select(namespace.c.name).where(namespace.c.tenant_id == tenant_id)).all()
    if left:
        raise RegistryRefused(f"the tenant still has the namespaces {', '.join(sorted(left)[:8])}")
    for table in _tables("tenant_id"):
        connection.execute(delete(table).where(table.c.tenant_id == tenant_id))


def _tables(column: str) -> list[Table]:
    """The tables of a namespace, or of a tenant, children first."""
    buried = [table for table in reversed(metadata.sorted_tables) if column in table.c and table.name not in _RECORDS]
    return [table for table in buried if column == "tenant_id" or table is not namespace]


def _subject(connection: Connection, job: Job, unseen: Sequence[str]) -> receipt.Subject:
    count, length, kept = erasure.retained(connection, job, RETAINED_LISTED_MAX)
    blobs: list[bytes] = []
    while page := erasure.blobs(connection, job, blobs[-1] if blobs else b"", _PAGE):
        blobs += page
    parts = _parts(connection, job)
    stated = [msgspec.json.decode(text) for _, text in parts]
    return receipt.Subject(
        job=job,
        tenant_name=str(connection.scalar(select(tenant.c.name).where(tenant.c.tenant_id == job.scope.tenant)) or ""),
        namespace_name=str(connection.scalar(select(namespace.c.name).where(*owned(namespace, job.scope))) or ""),
        blobs=blobs,
        retained=kept,
        retained_count=count,
        entries=job.entries + sum(one["counts"]["entries"] for one in stated),
        chunks=job.chunks - count + sum(one["counts"]["chunks"] for one in stated),
        bytes=job.bytes - length + sum(one["counts"]["bytes"] for one in stated),
        parts=[
            receipt.Part(scope.namespace, bytes.fromhex(one["job"]), _digest(text), one["blobs"]["root"])
            for (scope, text), one in zip(parts, stated, strict=True)
        ],
        unseen=unseen,
    )


def _parts(connection: Connection, job: Job) -> list[tuple[Scope, str]]:
    """Of a tenant's job: the receipts of all namespaces that it had, by namespace id."""
    if job.kind != "tenant":
        return []
    rows = connection.execute(
        select(deletion_job.c.namespace_id, deletion_job.c.receipt).where(
            deletion_job.c.tenant_id == job.scope.tenant,
            deletion_job.c.kind == "namespace",
            deletion_job.c.receipt.is_not(None),
        )
    )
    return sorted((Scope(job.scope.tenant, row.namespace_id), row.receipt) for row in rows)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
