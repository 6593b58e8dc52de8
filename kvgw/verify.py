"""Verifying the audit log: in the catalog, with the copies of its checkpoints outside, or in an exported file.

An export is one JSON document a line, each with its ``kind``: first ``log``, then ``record`` in rising order, each
``checkpoint`` after its record, and last ``head``. It needs neither a gateway nor a database to be verified.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from kvgw.settings import SettingsError
from kvgw.witness import notes_in
from tenancy.audit import auditing
from tenancy.audit.checkpoints import CheckpointBroken, read
from tenancy.audit.verifying import INSIDE, Broken, Finding, Verdict, Verification
from tenancy.engine import Database
from tenancy.sight import NO_TENANT, WHOLE_AUDIT

EXPORT_VERSION: Final = 1
BESIDE: Final = "in the export"

_PAGE: Final = 1000
_LINE_BYTES_MAX: Final = 64 * 1024


class Log(msgspec.Struct, frozen=True, tag_field="kind", tag="log"):
    """The first line of an export."""

    version: int
    whole: bool
    public_key: str


class RecordLine(msgspec.Struct, frozen=True, tag_field="kind", tag="record"):
    """A record, with all that its hash covers."""

    seq: int
    at_ms: int
    actor: str
    action: str
    tenant: str
    namespace: str
    target: str
    result: str
    detail: str
    previous: str
    hash: str


class CheckpointLine(msgspec.Struct, frozen=True, tag_field="kind", tag="checkpoint"):
    """A checkpoint."""

    seq: int
    note: str


class HeadLine(msgspec.Struct, frozen=True, tag_field="kind", tag="head"):
    """The end of the log."""

    seq: int
    hash: str


Line: TypeAlias = Log | RecordLine | CheckpointLine | HeadLine
_LINES: Final[msgspec.json.Decoder[Line]] = msgspec.json.Decoder(Line)


async def verify_catalog(database: Database, public_key: bytes, outside: Mapping[str, AsyncIterator[str]]) -> Verdict:
    """Verify the log in a catalog, beside gateways that go on writing it.

    `outside`: notes of checkpoints by where they are, in rising order. Raises what the database and the sources raise
    when they cannot be read.
    """
    sources = {INSIDE: _notes_inside(database), **outside}
    check = Verification(public_key, list(sources))
    try:
        before = await _newest_inside(database, public_key)
        await _feed(check, sources)
        while True:
            page = await database.read(partial(auditing.page, tenant=None, after=check.seq, limit=_PAGE), WHOLE_AUDIT)
            for record in page.records:
                check.record(record.fields(), record.previous, record.hash)
                if check.hungry:
                    await _feed(check, sources)
            if not page.records:
                check.finish(page.head.seq, page.head.hash)
                check.compare_copies(before, await _newest_inside(database, public_key))
                return check.whole()
    except Broken as error:
        return check.broken(error)


def verify_file(file: Path, public_key: bytes | None, outside: Path | None) -> Verdict:
    """Verify an export; `public_key` None: whose the export says it is. `outside`: a file of checkpoints.

    Raises `SettingsError` for what cannot be read, naming the line.
    """
    lines = _lines(file)
    first = next(lines, None)
    if not isinstance(first, Log) or first.version != EXPORT_VERSION:
        raise SettingsError(f"{file} is not an export of this version: it does not begin with its kind, log")
    key = public_key or _unhex("public_key", first.public_key)
    sources = {} if outside is None else {f"in {outside}": notes_in(outside)}
    check = Verification(key, list(sources), whole=first.whole)
    try:
        _feed_now(check, sources)
        for line in lines:
            if isinstance(line, RecordLine):
                check.record(_fields(line), _unhex("previous", line.previous), _unhex("hash", line.hash))
                if check.hungry:
                    _feed_now(check, sources)
            elif isinstance(line, CheckpointLine):
                check.checkpoint(BESIDE, line.note)
            elif isinstance(line, HeadLine):
                check.finish(line.seq, _unhex("hash", line.hash))
                return check.whole()
    except Broken as error:
        return check.broken(error)
    raise SettingsError(f"{file} has no end: the line of kind head is missing, so that the export was cut off")


def encode_line(line: Line) -> bytes:
    """A line of an export."""
    return msgspec.json.encode(line) + b"\n"


async def _notes_inside(database: Database) -> AsyncIterator[str]:
    after = 0
    while found := await database.read(partial(auditing.notes, after=after, limit=_PAGE), NO_TENANT):
        for _, note in found:
            yield note
        after = found[-1][0]


async def _newest_inside(database: Database, public_key: bytes) -> int:
    """The record that the newest checkpoint in the database is about, as it is signed; 0: there is none."""
    last = await database.read(auditing.last_checkpoint, NO_TENANT)
    if last is None:
        return 0
    seq, _, note = last
    try:
        signed = read(note, public_key)
    except CheckpointBroken as error:
        raise Broken(Finding.TAMPERED, seq, f"a checkpoint {INSIDE} is not genuine: {error}") from error
    if signed.seq != seq:
        raise Broken(Finding.TAMPERED, seq, f"the checkpoint {INSIDE} of record {seq} is about record {signed.seq}")
    return seq


async def _feed(check: Verification, sources: Mapping[str, AsyncIterator[str]]) -> None:
    while check.hungry:
        source = min(check.hungry)
        try:
            note = await anext(sources[source])
        except StopAsyncIteration:
            check.exhausted(source)
        else:
            check.checkpoint(source, note)


def _feed_now(check: Verification, sources: Mapping[str, Iterator[str]]) -> None:
    while check.hungry:
        source = min(check.hungry)
        note = next(sources[source], None) if source in sources else None
        if note is None:
            check.exhausted(source)
        else:
            check.checkpoint(source, note)


def _fields(line: RecordLine) -> tuple[str, ...]:
    return (
        str(line.seq),
        str(line.at_ms),
        line.actor,
        line.action,
        line.tenant,
        line.namespace,
        line.target,
        line.result,
        line.detail,
    )


def _lines(file: Path) -> Iterator[Line]:
    number = 1
    try:
        with file.open("rb") as lines:
            while line := lines.readline(_LINE_BYTES_MAX):
                yield _LINES.decode(line)
                number += 1
    except OSError as error:
        raise SettingsError(f"{file} cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise SettingsError(f"line {number} of {file} cannot be read: {error}") from error


def _unhex(name: str, text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise SettingsError(f"{name} {text!r:.80} is not hexadecimal") from None
