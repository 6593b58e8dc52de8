"""Verifying the audit log, record by record in constant memory: every link is computed anew.

The log is whole when its numbers run from one without a gap, each record's hash is that of its fields and of the hash
before it, the head row agrees with the last record, and every checkpoint, in the database and outside, says of the log
what it is. A log that ends before a checkpoint, or before its own head, was truncated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from tenancy.audit.chain import chained_hash
from tenancy.audit.checkpoints import Checkpoint, CheckpointBroken, read

UNWITNESSED_MAX: Final = 10_000
"""Records after the last checkpoint that can be explained by a gateway that was busy, or stopped."""


INSIDE: Final = "in the database"
"""The source whose checkpoints stand beside the log itself; whoever can change one can change the other."""


class Finding(IntEnum):
    """What became of a verification; the exit code of ``kvgw audit verify``."""

    WHOLE = 0
    TAMPERED = 1
    TRUNCATED = 2
    """Records are missing at the end, or checkpoints that must be there."""
    UNREADABLE = 3


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of a verification."""

    finding: Finding
    seq: int
    """The first record that is wrong or missing; 0 when none is."""
    sentence: str
    records: int
    """That were found right."""
    checkpoints: int
    """Whose signature and hash agree."""


class Broken(Exception):
    """The log is not what it was; verification ends at the first such place."""

    def __init__(self, finding: Finding, seq: int, sentence: str) -> None:
        super().__init__(sentence)
        self.finding = finding
        self.seq = seq


class Verification:
    """Feed it records in their order, and each source's checkpoints in theirs whenever that is `hungry`."""

    def __init__(self, public_key: bytes, sources: Sequence[str] = (), *, whole: bool = True) -> None:
        """`whole`: every record is there; else those of one tenant, between which links cannot be checked."""
        self._public_key = public_key
        self._whole = whole
        self.seq = 0
        self.hash = bytes(32)
        self.records = 0
        self.checkpoints = 0
        self.witnessed = 0
        """The newest record that a checkpoint agreed with."""
        self._pending: dict[str, Checkpoint] = {}
        self._newest: dict[str, tuple[int, int]] = dict.fromkeys(sources, (0, 0))
        """Of each source, the last two records that its checkpoints are about."""
        self.hungry = set(sources)
        self._next_checkpoint = 0

    def record(self, fields: Sequence[str], previous: bytes, digest: bytes) -> None:
        """The next record: `fields` as `Record.fields` gives them. Raises `Broken`."""
        seq = int(fields[0])
        expected = self.seq + 1
        if self._whole and seq != expected:
            why = f"record {expected} is missing: the next one is {seq}" if seq > expected else f"{seq} comes again"
            raise Broken(Finding.TAMPERED, expected, why)
        if not self._whole and seq <= self.seq:
            raise Broken(Finding.TAMPERED, seq, f"record {seq} comes after record {self.seq}")
        if seq == expected and (self._whole or self.records) and previous != self.hash:
            raise Broken(Finding.TAMPERED, seq, f"record {seq} does not continue the one before it")
        if chained_hash(fields, previous) != digest:
            raise Broken(Finding.TAMPERED, seq, f"record {seq} was changed: its fields do not give its hash")
        self.seq, self.hash = seq, digest
        self.records += 1
        if seq == self._next_checkpoint:
            self._meet()

    def resume(self, note: str) -> None:
        """Begin after the record of a checkpoint instead of at the beginning of the log. Raises `Broken`."""
        try:
            one = read(note, self._public_key)
        except CheckpointBroken as error:
            raise Broken(Finding.TAMPERED, 0, f"the last checkpoint is not genuine: {error}") from error
        self.seq, self.hash = one.seq, one.hash

    def checkpoint(self, source: str, note: str) -> None:
        """The next checkpoint of a source; it is compared when its record comes. Raises `Broken`."""
        try:
            one = read(note, self._public_key)
        except CheckpointBroken as error:
            raise Broken(Finding.TAMPERED, self.seq, f"a checkpoint {source} is not genuine: {error}") from error
        if one.seq < self.seq:
            raise Broken(
                Finding.TRUNCATED,
                one.seq,
                f"the checkpoints {source} run backward at record {one.seq}: the log was once set back",
            )
        self.hungry.discard(source)
        self._pending[source] = one
        if one.seq == self.seq:
            self._meet()
        else:
            self._look_ahead()

    def exhausted(self, source: str) -> None:
        """The source has no more checkpoints."""
        self.hungry.discard(source)

    def finish(self, head_seq: int, head_hash: bytes) -> None:
        """The end of the log, and what the head row says. Raises `Broken`."""
        if not self._whole:
            return
        ahead = [(one.seq, source) for source, one in self._pending.items()]
        if ahead:
            seq, source = max(ahead)
            raise Broken(
                Finding.TRUNCATED,
                self.seq + 1,
                f"the log ends at record {self.seq}, but a checkpoint {source} knows {seq} records",
            )
        if head_seq > self.seq:
            raise Broken(
                Finding.TRUNCATED, self.seq + 1, f"the log ends at record {self.seq}, but its head says {head_seq}"
            )
        if head_seq < self.seq:
            raise Broken(Finding.TAMPERED, head_seq + 1, f"records after {head_seq}, the head, were put in")
        if head_hash != self.hash:
            raise Broken(Finding.TAMPERED, head_seq, f"the head has another hash than record {head_seq}")
        if self.seq - self.witnessed > UNWITNESSED_MAX:
            raise Broken(
                Finding.TRUNCATED,
                self.witnessed + 1,
                f"checkpoints are missing: none after record {self.witnessed}, of {self.seq}",
            )

    def compare_copies(self, before: int, now: int) -> None:
        """Hold the checkpoints in the database against those outside. Raises `Broken`.

        `before`, `now`: the newest one in the database before any source was read, and after all were. Copies are
        written outside first: whatever was in the database before has one there, and of those outside a crash, or a
        gateway that is about to go on, explains one that the database lacks now, not two.
        """
        inside = self._newest[INSIDE][1]
        outside = [two for source, two in self._newest.items() if source != INSIDE]
        if not outside:
            return
        last_but_one, last = max(outside, key=lambda two: two[1])
        copied = min(inside, before)
        if copied > last:
            raise Broken(
                Finding.TRUNCATED, copied, f"the checkpoint of record {copied} has no copy outside the database"
            )
        if last_but_one > max(inside, now):
            raise Broken(
                Finding.TRUNCATED,
                last_but_one,
                f"checkpoints after record {max(inside, now)} are missing in the database",
            )

    def whole(self) -> Verdict:
        """What to say when nothing was broken."""
        kind = "whole" if self._whole else "unchanged, as far as one tenant's records can show"
        return Verdict(Finding.WHOLE, 0, f"the log is {kind}", self.records, self.checkpoints)

    def broken(self, error: Broken) -> Verdict:
        """What to say when something was."""
        return Verdict(error.finding, error.seq, str(error), self.records, self.checkpoints)

    def _meet(self) -> None:
        """Compare the checkpoints of the record that just came."""
        for source, one in list(self._pending.items()):
            if one.seq != self.seq:
                continue
            if one.hash != self.hash:
                raise Broken(
                    Finding.TAMPERED, one.seq, f"record {one.seq} is not what a checkpoint {source} says it was"
                )
            self.checkpoints += 1
            self._newest[source] = (self._newest.get(source, (0, 0))[1], one.seq)
            self.witnessed = one.seq
            del self._pending[source]
            self.hungry.add(source)
        self._look_ahead()

    def _look_ahead(self) -> None:
        self._next_checkpoint = min((one.seq for one in self._pending.values()), default=0)
