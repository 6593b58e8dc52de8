"""What matches found lately, in memory: a match of keys that were all there is answered without the catalog.

Only what is visible is remembered, under the catalog's version for its tenant: a change that may have ended anything
makes all of it void before the change is acknowledged (law 5). Where several gateways write, `coherence` knows the
version, or that it is not known now; then nothing is remembered, or answered.

Keys are remembered as runs, the way they were asked for: found by its first key, a run is compared as one piece of
memory. Where two lists of keys part, a run is cut; where one goes on, it grows.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from tenancy.model import FoundChunk, Scope

BLOB_ID_BYTES: Final = 16
RUN_BYTES: Final = 704
"""What a run takes beside its entries: its objects, and its place among the others."""
ENTRY_BYTES: Final = 1 + BLOB_ID_BYTES + 8 + 1 + 8
"""What an entry takes beside its key: length of the key, blob id, expiry, tier, and room for what its tier was."""


class Run:
    """Chunks found one after the other, each visible until it expires, unless the version changes.

    All of them lie in a few buffers: objects of their own for each would take five times as much.
    """

    __slots__ = ("blob_ids", "expiries", "keys", "lengths", "on_nvme", "soonest_ms", "tiers", "tiers_as_of")

    def __init__(self, lengths: bytes, keys: bytes, blob_ids: bytes, expiries: array[int], on_nvme: bytes) -> None:
        self.lengths = lengths
        """Of each engine key, in bytes."""
        self.keys = keys
        """All engine keys."""
        self.blob_ids = blob_ids
        self.expiries = expiries
        """Unix milliseconds."""
        self.on_nvme = on_nvme
        """1 for a chunk on this node's NVMe; 0: in S3 alone."""
        self.soonest_ms = min(expiries)
        self.tiers: list[str] = []
        """Where the leading chunks were when staging had changed `tiers_as_of` times."""
        self.tiers_as_of = -1

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        return RUN_BYTES + len(self.keys) + ENTRY_BYTES * len(self.lengths)

    def lives(self, count: int, now_ms: int) -> bool:
        """Whether none of the first `count` has expired."""
        return self.soonest_ms > now_ms or min(self.expiries[:count]) > now_ms

    def blobs(self, count: int) -> list[bytes]:
        """Blob ids of the first `count`."""
        return [self.blob_ids[at : at + BLOB_ID_BYTES] for at in range(0, count * BLOB_ID_BYTES, BLOB_ID_BYTES)]

    def part(self, start: int, stop: int) -> Run:
        """Some of it, as a run of its own."""
        first = sum(self.lengths[:start])
        return Run(
            self.lengths[start:stop],
            self.keys[first : first + sum(self.lengths[start:stop])],
            self.blob_ids[start * BLOB_ID_BYTES : stop * BLOB_ID_BYTES],
            self.expiries[start:stop],
            self.on_nvme[start:stop],
        )

    def and_then(self, other: Run) -> Run:
        """This, and another that follows it."""
        return Run(
            self.lengths + other.lengths,
            self.keys + other.keys,
            self.blob_ids + other.blob_ids,
            self.expiries + other.expiries,
            self.on_nvme + other.on_nvme,
        )

    def key(self, index: int) -> bytes:
        """One engine key."""
        first = sum(self.lengths[:index])
        return self.keys[first : first + self.lengths[index]]


class Span(NamedTuple):
    """The first chunks of a run: so many."""

    run: Run
    length: int


Found: TypeAlias = Sequence[tuple[bytes, FoundChunk]]
"""Engine keys, in the order in which they were asked for, and what each stands for."""


class _Shelf:
    """What is known of one namespace: runs by KV format and first engine key, those asked longest ago first."""

    __slots__ = ("entries", "nbytes", "runs", "version")

    def __init__(self, version: int) -> None:
        self.version = version
        self.runs: OrderedDict[tuple[int, bytes], Run] = OrderedDict()
        self.nbytes = 0
        self.entries = 0

    def put(self, format_id: int, run: Run) -> None:
        """Keep a run, in the place of one that begins alike."""
        name = format_id, run.key(0)
        self.drop(name)
        self.runs[name] = run
        self.nbytes += run.nbytes
        self.entries += len(run)

    def drop(self, name: tuple[int, bytes]) -> None:
        run = self.runs.pop(name, None)
        if run is not None:
            self.nbytes -= run.nbytes
            self.entries -= len(run)

    def find(self, format_id: int, keys: Sequence[bytes], asked: tuple[bytes, bytes], now_ms: int) -> list[Span] | None:
        """The runs that make up all of `keys`; `asked`: the keys' lengths, and the keys in one piece."""
        lengths, joined = asked
        spans = []
        at = begin = 0
        while at < len(lengths):
            name = format_id, keys[at]
            run = self.runs.get(name)
            if run is None:
                return None
            count = min(len(run), len(lengths) - at)
            whole = count == len(run)
            end = begin + (len(run.keys) if whole else sum(run.lengths[:count]))
            if run.lengths[:count] != lengths[at : at + count] or run.keys[: end - begin] != joined[begin:end]:
                return None
            if not run.lives(count, now_ms):
                return None
            self.runs.move_to_end(name)
            spans.append(Span(run, count))
            at, begin = at + count, end
        return spans

    def add(self, format_id: int, found: Found) -> None:
        """Keep what was found, as runs that end where another one begins."""
        at = 0
        while at < len(found):
            run = self.runs.get((format_id, found[at][0]))
            shared = 1 if run is None else _shared(run, found, at)
            rest = None if run is None or shared == len(run) else run.part(shared, len(run))
            end = at + shared
            while rest is None and end < len(found) and (format_id, found[end][0]) not in self.runs:
                end += 1
            new = _run_of(found[at:end])
            if rest is not None and end == len(found):
                new = new.and_then(rest)  # nothing else was asked for: no reason to cut
            elif rest is not None and (format_id, rest.key(0)) not in self.runs:
                self.put(format_id, rest)
            self.put(format_id, new)
            at = end


class MatchIndex:
    """Belongs to one event loop."""

    def __init__(self, bytes_max: int) -> None:
        """Beyond `bytes_max`, what was asked longest ago in the namespace asked longest ago is forgotten."""
        self._bytes_max = bytes_max
        self._shelves: OrderedDict[Scope, _Shelf] = OrderedDict()
        self.nbytes = 0
        """Memory that is used."""

    def __len__(self) -> int:
        """Entries in all namespaces together."""
        return sum(shelf.entries for shelf in self._shelves.values())

    def find(
        self, scope: Scope, version: int | None, format_ids: Sequence[int], engine_keys: Sequence[bytes], now_ms: int
    ) -> list[list[Span]] | None:
        """For each format its chunks, one for each key; None unless every one of them is known to be there."""
        shelf = self._shelves.get(scope)
        if shelf is None or shelf.version != version:
            return None
        asked = bytes(map(len, engine_keys)), b"".join(engine_keys)
        found = []
        for format_id in format_ids:
            spans = shelf.find(format_id, engine_keys, asked, now_ms)
            if spans is None:
                return None
            found.append(spans)
        self._shelves.move_to_end(scope)
        return found

    def remember(self, scope: Scope, version: int | None, format_id: int, found: Found) -> None:
        """Keep what a look-up found that began under `version`."""
        if version is None or not found:
            return
        shelf = self._shelves.get(scope)
        if shelf is None or shelf.version != version:
            self.nbytes -= 0 if shelf is None else shelf.nbytes
            shelf = self._shelves[scope] = _Shelf(version)
        before = shelf.nbytes
        shelf.add(format_id, found)
        self.nbytes += shelf.nbytes - before
        self._shelves.move_to_end(scope)
        while self.nbytes > self._bytes_max and self._shelves:
            self._forget_one()

    def _forget_one(self) -> None:
        scope, shelf = next(iter(self._shelves.items()))
        before = shelf.nbytes
        shelf.drop(next(iter(shelf.runs)))
        self.nbytes -= before - shelf.nbytes
        if not shelf.runs:
            del self._shelves[scope]


def _shared(run: Run, found: Found, at: int) -> int:
    """How many leading keys of a run are those that were found from `at` on."""
    begin = 0
    for index, length in enumerate(run.lengths):
        if at + index == len(found) or run.keys[begin : begin + length] != found[at + index][0]:
            return index
        begin += length
    return len(run)


def _run_of(found: Found) -> Run:
    return Run(
        bytes([len(key) for key, _ in found]),
        b"".join([key for key, _ in found]),
        b"".join([one.blob_id for _, one in found]),
        array("q", [one.expires_ms for _, one in found]),
        bytes([one.on_nvme for _, one in found]),
    )
