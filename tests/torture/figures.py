"""What a torture came to: counts, and what did not hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

COUNTS: Final = ("kills", "stops", "faults", "operations", "outages", "inspections")
BREACHES: Final = (
    "wrong_bytes",
    "lost_acked",
    "read_after_end",
    "leaked_slots",
    "leaked_connections",
    "leaked_reservations",
    "leaked_files",
    "leaked_uploads",
    "quota_drift",
    "fsck_findings",
    "audit_broken",
    "unforeseen",
)
"""Each must be 0."""
OVER_DEADLINE_MS: Final = 250.0
"""A call may be so much longer than its deadline."""
EXAMPLES_MAX: Final = 20


@dataclass
class Figures:
    """Of one part of a torture, or of all of it."""

    counts: Counter[str] = field(default_factory=Counter)
    breaches: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    longest_over_deadline_ms: float = 0.0
    harness_lag_ms: float = 0.0
    """The longest that the load's own event loop was late while a call was over its deadline; left out above."""
    clock_set_ms: float = 0.0
    """How far the machine's clock was set at once, at most: after that lives last longer, or end early."""
    faults_by_kind: Counter[str] = field(default_factory=Counter)

    def breach(self, kind: str, what: str, count: int = 1) -> None:
        """Note that something did not hold."""
        assert kind in BREACHES, kind
        if count:
            self.breaches[kind] += count
            if len(self.examples) < EXAMPLES_MAX:
                self.examples.append(f"{kind}: {what}")

    def fault(self, kind: str, count: int = 1) -> None:
        self.counts["faults"] += count
        self.faults_by_kind[kind] += count

    def over(self, milliseconds: float, lag_ms: float, what: str) -> None:
        """A call took this much longer than its deadline."""
        self.harness_lag_ms = max(self.harness_lag_ms, lag_ms)
        own_ms = max(0.0, milliseconds - lag_ms)
        self.longest_over_deadline_ms = max(self.longest_over_deadline_ms, own_ms)
        if own_ms > OVER_DEADLINE_MS and len(self.examples) < EXAMPLES_MAX:
            self.examples.append(f"over its deadline: {what} by {own_ms:.0f} ms")

    def add(self, other: Figures) -> None:
        """Take in another part's."""
        self.counts += other.counts
        self.breaches += other.breaches
        self.faults_by_kind += other.faults_by_kind
        self.examples += other.examples[: EXAMPLES_MAX - len(self.examples)]
        self.longest_over_deadline_ms = max(self.longest_over_deadline_ms, other.longest_over_deadline_ms)
        self.harness_lag_ms = max(self.harness_lag_ms, other.harness_lag_ms)
        self.clock_set_ms = max(self.clock_set_ms, other.clock_set_ms)

    @property
    def held(self) -> bool:
        """Whether every law held."""
        return not self.breaches and self.longest_over_deadline_ms <= OVER_DEADLINE_MS

    def as_json(self) -> dict[str, Any]:
        return {
            **{name: self.counts[name] for name in COUNTS},
            **{name: self.breaches[name] for name in BREACHES},
            "longest_over_deadline_ms": round(self.longest_over_deadline_ms, 1),
            "harness_lag_ms": round(self.harness_lag_ms, 1),
            "clock_set_ms": round(self.clock_set_ms, 1),
            "faults_by_kind": dict(sorted(self.faults_by_kind.items())),
            "examples": self.examples,
        }

    def line(self) -> str:
        """One line of progress."""
        broken = ", ".join(f"{kind} {count}" for kind, count in sorted(self.breaches.items())) or "all held"
        return ", ".join([*(f"{self.counts[name]} {name}" for name in COUNTS), broken])


def table(parts: dict[str, Figures]) -> str:
    """A column for each part, and one for all."""
    total = Figures()
    for part in parts.values():
        total.add(part)
    columns = {**parts, "all": total}
    rows = [[name, *(str(one.as_json()[name]) for one in columns.values())] for name in _names()]
    rows.insert(0, ["", *columns])
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) if at == 0 else cell.rjust(width) for at, (cell, width) in
                       enumerate(zip(row, widths, strict=True))) for row in rows]  # fmt: skip
    lines += [f"  {example}" for example in total.examples]
    return "\n".join([*lines, "everything held" if total.held else "NOT everything held"])


def _names() -> list[str]:
    return [*COUNTS, *BREACHES, "longest_over_deadline_ms", "harness_lag_ms", "clock_set_ms"]
