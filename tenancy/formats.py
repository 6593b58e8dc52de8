"""KV formats of a namespace: registered once, then known by fingerprint."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, func, insert, select

from tenancy import quota
from tenancy.model import FormatRow, Scope
from tenancy.schema import kv_format, owned

FORMATS_PER_NAMESPACE_MAX = 10_000


@dataclass(frozen=True, slots=True)
class FormatDescription:
    """A format's fingerprint, canonical form, and the fields that operators select by, as text."""

    fingerprint: bytes
    canonical: bytes
    model: str
    weights: str
    tokenizer: str
    kv_dtype: str
    kv_quantisation: str | None
    adapter: str | None
    adapter_digest: str | None
    engine: str
    engine_abi: str
    layout: str
    tokens_per_chunk: int
    chunk_bytes: int


_ROW = (
    kv_format.c.format_id,
    kv_format.c.fingerprint,
    kv_format.c.chunk_bytes,
    kv_format.c.tokens_per_chunk,
    kv_format.c.canonical,
)


def find(connection: Connection, scope: Scope, fingerprint: bytes) -> FormatRow | None:
    """The format with this fingerprint, or None when the namespace does not know it."""
    row = connection.execute(
        select(*_ROW).where(
            *owned(kv_format, scope),
            kv_format.c.fingerprint == fingerprint,
        )
    ).first()
    return None if row is None else FormatRow(*row)


def register(connection: Connection, scope: Scope, description: FormatDescription, now_ms: int) -> FormatRow | None:
    """Make the format known; one that is known already stays as it is. None: the namespace has too many formats."""
    quota.lock(connection, scope)
    known = find(connection, scope, description.fingerprint)
    if known is not None:
        return known
    count, last = connection.execute(
        select(func.count(), func.coalesce(func.max(kv_format.c.format_id), 0)).where(*owned(kv_format, scope))
    ).one()
    if count >= FORMATS_PER_NAMESPACE_MAX:
        return None
    connection.execute(
        insert(kv_format),
        {
            "tenant_id": scope.tenant,
            "namespace_id": scope.namespace,
            "format_id": last + 1,
            "fingerprint": description.fingerprint,
            "canonical": description.canonical,
            "model": description.model,
            "weights": description.weights,
            "tokenizer": description.tokenizer,
            "kv_dtype": description.kv_dtype,
            "kv_quantisation": description.kv_quantisation,
            "adapter": description.adapter,
            "adapter_digest": description.adapter_digest,
            "engine": description.engine,
            "engine_abi": description.engine_abi,
            "layout": description.layout,
            "tokens_per_chunk": description.tokens_per_chunk,
            "chunk_bytes": description.chunk_bytes,
            "created_ms": now_ms,
        },
    )
    return FormatRow(
        last + 1,
        description.fingerprint,
        description.chunk_bytes,
        description.tokens_per_chunk,
        description.canonical,
    )
