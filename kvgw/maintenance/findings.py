"""What a check of the house found, and what came of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final, Literal
from uuid import UUID

EXAMPLES_MAX: Final = 20
"""Findings of one kind that are named; all are counted."""

Kind = Literal[
    "dangling",
    "orphan",
    "unreferenced",
    "headless",
    "undoomed",
    "stranded",
    "write",
    "reservation",
    "counter",
    "deletion",
    "audit",
]
Verdict = Literal["clean", "findings", "refused", "unseen"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be."""

    kind: Kind
    tenant: UUID | None
    namespace: UUID | None
    what: str
    """A blob's name or another name of the thing; never a key or content."""
    sentence: str


@dataclass(slots=True)
class FsckReport:
    """What a check found."""

    looked: Counter[str] = field(default_factory=Counter)
    """How much was looked at: blobs and rows by tier, chunks, counters, audit records."""
    found: Counter[Kind] = field(default_factory=Counter)
    mended: Counter[Kind] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    """The first `EXAMPLES_MAX` of each kind."""
    refused: list[str] = field(default_factory=list)
    """What looked implausible, so that nothing was touched there."""
    unseen: list[str] = field(default_factory=list)
    """Where nobody could look, and why."""

    def note(self, finding: Finding) -> None:
        """Count a finding, and name it while there is room."""
        self.found[finding.kind] += 1
        if self.found[finding.kind] <= EXAMPLES_MAX:
            self.findings.append(finding)

    def mend(self, kind: Kind, count: int) -> None:
        """Count findings that were set right; what came up meanwhile and was set right with them does not count."""
        self.mended[kind] = min(self.found[kind], self.mended[kind] + count)

    @property
    def left(self) -> int:
        """Findings that were not set right."""
        return self.found.total() - self.mended.total()

    @property
    def verdict(self) -> Verdict:
        """The worst of what there is to say."""
        if self.unseen:
            return "unseen"
        if self.refused:
            return "refused"
        return "findings" if self.left else "clean"


def seconds(milliseconds: int) -> str:
    """A duration in a sentence."""
    return f"{milliseconds / 1000:.0f} s"
