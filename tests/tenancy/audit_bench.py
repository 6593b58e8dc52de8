"""A log of some records, ways to tamper with it that are taken back again, and its verification in a transaction."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import UUID

from sqlalchemy import Connection, text

from kvgw.verify import verify_catalog
from tenancy.audit import auditing
from tenancy.audit.chain import Act, Record, record_all
from tenancy.audit.checkpoints import Checkpoint, sign
from tenancy.audit.verifying import Verdict
from tenancy.keys.secret import SecretBytes
from tenancy.keys.signing import Signer
from tests.tenancy.catalog_bench import NOW

Result = TypeVar("Result")

SIGNER = Signer(SecretBytes(b"s" * 32))
OTHER_SIGNER = Signer(SecretBytes(b"o" * 32))
OURS, THEIRS = UUID(int=0xA), UUID(int=0xB)


class TakenBack(Exception):
    """Ends a savepoint."""


def acts(count: int) -> list[Act]:
    """Acts of two tenants and of none."""
    owners = (OURS, THEIRS, None)
    return [
        Act(
            actor=f"token:{number}",
            action="namespace.create",
            target=f"target-{number}",
            tenant=owners[number % 3],
            namespace=None if owners[number % 3] is None else UUID(int=number),
            detail={"number": number, "name": "ñ"},
        )
        for number in range(count)
    ]


@dataclass
class Log:
    """A connection inside a transaction over a log of `length` records, with a checkpoint of its end."""

    connection: Connection
    length: int
    checkpoint: Checkpoint

    @classmethod
    def written(cls, connection: Connection, length: int) -> Log:
        lift_triggers(connection)
        for start in range(0, length, 50):
            record_all(connection, acts(length)[start : start + 50], NOW + start)
        head = auditing.head(connection)
        assert head.seq == length
        one = sign(SIGNER, head.seq, head.hash, NOW + length)
        assert auditing.add_checkpoint(connection, one)
        return cls(connection, length, one)

    def run(self, *statements: str, **values: Any) -> None:
        for statement in statements:
            self.connection.execute(text(statement), values)

    def after(self, tamper: Callable[[], None], outside: Iterable[str] | None = None) -> tuple[int, int]:
        """Finding and first bad record after `tamper`, which is taken back again."""
        verdict: Verdict | None = None
        try:
            with self.connection.begin_nested():
                tamper()
                verdict = self.verify(outside)
                raise TakenBack
        except TakenBack:
            assert verdict is not None
            return int(verdict.finding), verdict.seq

    def verify(self, outside: Iterable[str] | None = None) -> Verdict:
        """`outside`: notes outside the database; None: the one of the end."""
        notes = [self.checkpoint.note] if outside is None else list(outside)
        return at_once(verify_catalog(_InTransaction(self.connection), SIGNER.public_key, {"outside": _async(notes)}))

    def records(self) -> list[Record]:
        return auditing.page(self.connection, None, 0, 10_000).records

    def renumber(self, first: int, by: int) -> None:
        """Move the numbers of all records from `first` on."""
        self.run(
            "UPDATE audit_record SET seq = -(seq + :by) WHERE seq >= :first",
            "UPDATE audit_record SET seq = -seq WHERE seq < 0",
            first=first,
            by=by,
        )

    def put(self, one: Record) -> None:
        self.run(
            "INSERT INTO audit_record (seq, at_ms, actor, action, target, result, detail, previous, hash) "
            "VALUES (:seq, :at_ms, :actor, :action, :target, :result, :detail, :previous, :hash)",
            seq=one.seq,
            at_ms=one.at_ms,
            actor=one.actor,
            action=one.action,
            target=one.target,
            result=one.result,
            detail=one.detail,
            previous=one.previous,
            hash=one.hash,
        )

    def set_head(self, seq: int, digest: bytes) -> None:
        self.run("UPDATE audit_head SET seq = :seq, hash = :hash", seq=seq, hash=digest)


def lift_triggers(connection: Connection) -> None:
    """What only the owner of the database can do."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("ALTER TABLE audit_record DISABLE TRIGGER USER"))
        return
    for act in ("update", "delete"):
        connection.execute(text(f"DROP TRIGGER audit_record_no_{act}"))


def at_once(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """The result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("it waited")


class _InTransaction:
    """A database for what already is in one."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def read(self, body: Callable[[Connection], Result], sight: object = None) -> Result:
        return body(self._connection)

    write = read

    async def aclose(self) -> None: ...


async def _async(notes: Iterable[str]) -> AsyncIterator[str]:
    for one in notes:
        yield one
