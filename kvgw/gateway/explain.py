"""Explain: why keys cannot be had. Speaks of the caller's own namespace only, and never reads a chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Final

from kvgw.errors import FormatError, RequestRefused
from kvgw.gateway.rooms import Rooms
from kvgw.kvformat import KVFormat
from kvgw.model import Difference, ExplainReply, ExplainRequest, KeyAnswer, Why
from tenancy.access import Caller, Permission
from tenancy.errors import NamespaceUnknown
from tenancy.explaining import Known
from tenancy.model import Namespace
from tenancy.naming import entry_keys, format_fingerprint

SHOWN_MAX: Final = 200
"""Characters of a field's value that are shown."""

_ENDED: Final = frozenset({Why.UNKNOWN, Why.EXPIRED, Why.EVICTED, Why.DELETED, Why.LOST})


async def explain(rooms: Rooms, caller: Caller, request: ExplainRequest) -> ExplainReply:
    """Answer a caller about its own namespace. Raises the rooms' errors."""
    caller.require(Permission.GET)
    name = caller.namespace(request.namespace)
    namespace = await rooms.catalog.namespace(caller.tenant, name)
    if namespace is None:
        raise NamespaceUnknown("the namespace does not exist, or this credential may not use it")
    with rooms.limiter.admitted(namespace):
        return await explain_in(rooms, namespace, request.keys, request.canonical, request.fingerprint)


async def explain_in(
    rooms: Rooms, namespace: Namespace, keys: Sequence[bytes], canonical: bytes | None, fingerprint: bytes | None
) -> ExplainReply:
    """Answer about any namespace. `fingerprint` counts only without `canonical`. Raises the rooms' errors."""
    tenant = await rooms.catalog.describe_tenant(namespace.scope.tenant)
    for what, state in (("tenant", tenant.state if tenant else "deleting"), ("namespace", namespace.state)):
        if state != "active":
            return ExplainReply([KeyAnswer(Why.NAMESPACE_SUSPENDED)] * len(keys), [], f"the {what} is {state}")
    names = (await rooms.keyring.keys(namespace.scope)).names
    asked = None if canonical is None else KVFormat.from_canonical(canonical)
    if canonical is not None:
        fingerprint = format_fingerprint(names.fingerprint, canonical)
    if fingerprint is None:
        raise RequestRefused("name the KV format, by its canonical form or by its fingerprint")
    known = await rooms.catalog.format(namespace.scope, fingerprint)
    if known is None:
        return await _unknown_format(rooms, namespace, len(keys), asked)
    hashed = entry_keys(names.entry, known.fingerprint, keys)
    found = await rooms.catalog.explain(namespace.scope, known.format_id, hashed, rooms.time.now_ms())
    refused = [rooms.meter.refused_ms(namespace.scope, known.format_id, key) for key in hashed]
    return ExplainReply([_answer(one, at_ms) for one, at_ms in zip(found, refused, strict=True)], [])


def _answer(known: Known, refused_ms: int | None) -> KeyAnswer:
    why = Why(known.why.value)
    if refused_ms is not None and why in _ENDED and refused_ms >= known.at_ms:
        return KeyAnswer(Why.OVER_QUOTA, refused_ms)
    return KeyAnswer(why, known.at_ms)


async def _unknown_format(rooms: Rooms, namespace: Namespace, count: int, asked: KVFormat | None) -> ExplainReply:
    answers = [KeyAnswer(Why.FORMAT_UNKNOWN)] * count
    if asked is None:
        return ExplainReply(answers, [], "no format of the namespace has this fingerprint")
    forms = await rooms.catalog.canonical_forms(namespace.scope)
    if not forms:
        return ExplainReply(answers, [], "the namespace has no format at all")
    differences = await rooms.workers.run(lambda: _nearest(asked, forms))
    return ExplainReply(answers, differences, f"compared with the nearest of {len(forms)} formats of the namespace")


def _nearest(asked: KVFormat, forms: Sequence[bytes]) -> list[Difference]:
    """How `asked` differs from that one of `forms` from which it differs in the fewest fields."""
    found: list[list[Difference]] = []
    for form in forms:
        try:
            other = KVFormat.from_canonical(form)
        except FormatError:
            continue  # of a release that knew other fields
        found.append(_differences(asked, other))
    return min(found, key=len, default=[])


def _differences(asked: KVFormat, other: KVFormat) -> list[Difference]:
    pairs = ((one.name, getattr(asked, one.name), getattr(other, one.name)) for one in fields(KVFormat))
    return [Difference(name, _shown(mine), _shown(theirs)) for name, mine, theirs in pairs if mine != theirs]


def _shown(value: object) -> str:
    text = value.hex() if isinstance(value, bytes) else str(value)
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"
