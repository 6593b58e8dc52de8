"""Mutants that survive, and why: no difference that a test could see or should hold fast, or what is yet to be done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """One mutant, by the text of its line, so that it is found again when lines move."""

    module: str
    line: str
    change: str
    why: str


KILLED: dict[str, str] = {
    "tenancy.quota": "39 of 39",
    "tenancy.sealing": "83 of 91 tried, of 140; five more since",
    "tenancy.putting": "31 of 36 tried, of 66; four more since",
    "tenancy.births": "6 of 6 tried, of 17",
    "tenancy.removal": "19 of 20",
    "tenancy.placements": "31 of 34, before parts of it were written anew; one more since",
    "tenancy.naming": "5 of 5",
    "tenancy.keys.wrapping": "69 of 69, over twenty of them since",
    "storage.staging": "9 of 13 tried, of 84; one more since",
}
"""What the last run of a module's mutants came to, as far as it went."""

_ZEROED = "how much is zeroed at once is a matter of the event loop's pace, and of no byte"

KNOWN: tuple[Known, ...] = (
    Known("storage.staging", "_ZERO_PIECE = 4 << 20  # bytes zeroed between two turns of the event loop: about 0.4 ms",
          "4 → 5", _ZEROED),
    Known("storage.staging", "_ZERO_PIECE = 4 << 20  # bytes zeroed between two turns of the event loop: about 0.4 ms",
          "20 → 21", _ZEROED),
    Known("storage.staging", "self._advance()  # the owner may have come into its guarantee by the charge", "left out",
          "it is called inside a read, and the end of that read wakes whoever waits as well"),
    *(Known("tenancy.sealing", "_ZEROS = bytes(64 * 1024)", change,
            "how much is zeroed at once: the loop goes over all of it whatever the size of a step")
      for change in ("Mult → Add", "64 → 65", "1024 → 1025")),
    Known("tenancy.removal", "needed = exists(select(1).where(*bound(entry), entry.c.blob_id == chunk.c.blob_id))",
          "1 → 2", "EXISTS asks whether there is a row, and not what is in it"),
    Known("tenancy.putting", "heard_since_ms = now_ms - PROCESS_LEASE_MS", "Sub → Add",
          "not killed yet: what another gateway has on its way is tested with several of them, who are not asked here"),
)  # fmt: skip
