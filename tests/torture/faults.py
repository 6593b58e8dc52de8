"""Faults behind the tiers', the catalog's and the key store's own small interfaces.

A `Plan` is asked at every call that goes through a seam and says what becomes of it. The wrappers are ordinary
implementations of the protocols, so that a whole gateway runs over them unchanged.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar
from uuid import UUID, uuid4

from storage.errors import BlobDamaged, BlobMissing, TierUnavailable
from storage.tier import BlobInfo, Tier, check_name
from tenancy.engine import Database, Ends, anything
from tenancy.errors import CatalogUnavailable, KeyUnavailable
from tenancy.keys.keystore import KeyStore, KeyVersions
from tenancy.sight import NO_TENANT, Sight

Result = TypeVar("Result")

EXIT_CODE: Final = 77
"""With which a process ends that a fault ended."""


class Kind(StrEnum):
    """What becomes of a call."""

    ERROR = "error"
    """It fails and nothing was done."""
    LOST_ANSWER = "lost answer"
    """It is done, and its answer is an error: a commit or a PUT whose acknowledgement got lost."""
    CANCEL = "cancel"
    """Whoever waits for it is cancelled when it begins."""
    CANCEL_AFTER = "cancel after"
    """The same when it has been done."""
    EXIT = "exit"
    """The process ends when it begins."""
    EXIT_AFTER = "exit after"
    """The process ends when it has been done."""
    DELAY = "delay"
    TEAR = "tear"
    """A PUT leaves half of its bytes under the blob's name, and fails."""
    CORRUPT = "corrupt"
    """A GET answers with a flipped bit; a PUT stores one."""
    LOSE = "lose"
    """A PUT is acknowledged and keeps nothing, as a disk that does not sync."""


ANYWHERE: Final = (Kind.ERROR, Kind.LOST_ANSWER, Kind.CANCEL, Kind.CANCEL_AFTER)
"""What the protocols allow any call to meet while the process goes on."""


class Plan(Protocol):
    """Says what becomes of the calls."""

    fired: Counter[str]

    def next(self, call: str) -> Kind | None:
        """What becomes of this call, named ``seam.method``; None: nothing happens to it."""
        ...

    def cancel(self) -> None:
        """Cancel whoever waits for the call that just became a cancellation's."""
        ...

    @property
    def delay_s(self) -> float: ...


class Nth:
    """One fault, at the `number`-th call while armed. Counts the calls, so that a loop knows when it is through."""

    delay_s = 0.05

    def __init__(self, number: int = 0, kind: Kind = Kind.ERROR) -> None:
        self._number = number
        self._kind = kind
        self.armed = False
        self.calls = 0
        self.fired: Counter[str] = Counter()
        self.where = ""
        """The call that met the fault."""
        self.victim: asyncio.Task[Any] | None = None

    def aim(self, number: int, kind: Kind) -> None:
        """Begin anew, with another fault; 0: none."""
        self._number, self._kind = number, kind
        self.calls, self.where = 0, ""
        self.fired.clear()

    def __str__(self) -> str:
        return f"{self._kind} at call {self._number}, {self.where or 'which never came'}"

    def next(self, call: str) -> Kind | None:
        if not self.armed:
            return None
        self.calls += 1
        if self.calls != self._number:
            return None
        self.where = call
        self.fired[self._kind] += 1
        return self._kind

    def cancel(self) -> None:
        if self.victim is not None:
            self.victim.cancel()


class Chance:
    """Faults of the given kinds at this rate while armed: for load, where their place does not matter."""

    def __init__(self, rng: random.Random, rate: float, kinds: Sequence[Kind], delay_s: float = 0.02) -> None:
        self._rng = rng
        self._kinds = tuple(kinds)
        self.rate = rate
        self.delay_s = delay_s
        self.armed = False
        self.fired: Counter[str] = Counter()
        self.victims: set[asyncio.Task[Any]] = set()

    def next(self, call: str) -> Kind | None:
        if not self.armed or self._rng.random() >= self.rate:
            return None
        kind = self._rng.choice(self._kinds)
        self.fired[kind] += 1
        return kind

    def cancel(self) -> None:
        """Of those that wait just now anyone: it is not known whose call it was."""
        if self.victims:
            self._rng.choice(sorted(self.victims, key=lambda task: task.get_name())).cancel()


async def _through(
    plan: Plan, call: str, kind: Kind | None, do: Callable[[], Awaitable[Result]], failure: type[Exception]
) -> Result:
    """Do a call as was said of it; kinds that only some calls can meet are plain errors elsewhere."""
    if kind is None:
        return await do()
    if kind is Kind.EXIT:
        os._exit(EXIT_CODE)
    if kind is Kind.DELAY:
        await asyncio.sleep(plan.delay_s)
        return await do()
    if kind is Kind.CANCEL:
        plan.cancel()
        return await do()
    if kind is Kind.EXIT_AFTER:
        try:
            await do()
        finally:  # one that failed by itself is over too: a loop must not take it for a call that never came
            os._exit(EXIT_CODE)
    if kind in (Kind.LOST_ANSWER, Kind.CANCEL_AFTER):
        result = await do()
        if kind is Kind.CANCEL_AFTER:
            plan.cancel()
            await asyncio.sleep(0)
            return result
        raise failure(f"planned: {call} was done, and its answer got lost")
    raise failure(f"planned: {call} fails")


class FaultyTier:
    """A tier in front of which things go wrong."""

    def __init__(self, inner: Tier, plan: Plan) -> None:
        self.label = inner.label
        self._inner = inner
        self._plan = plan

    async def put(self, name: str, sealed: memoryview) -> None:
        kind = self._plan.next(f"{self.label}.put")
        if kind is Kind.TEAR:
            await self._inner.put(name, sealed[: len(sealed) // 2])
            raise TierUnavailable(f"planned: {self.label} tore a PUT")
        if kind is Kind.CORRUPT:
            await self._inner.put(name, memoryview(_flipped(sealed)))
        elif kind is not Kind.LOSE:
            await self._through(kind, "put", lambda: self._inner.put(name, sealed))

    async def get_into(self, name: str, target: memoryview) -> None:
        kind = self._plan.next(f"{self.label}.get")
        if kind is Kind.CORRUPT:
            await self._inner.get_into(name, target)
            target[len(target) // 2] ^= 1
            return
        await self._through(kind, "get", lambda: self._inner.get_into(name, target))

    async def stat(self, names: Sequence[str]) -> dict[str, int]:
        kind = self._plan.next(f"{self.label}.stat")
        return await self._through(kind, "stat", lambda: self._inner.stat(names))

    async def delete(self, names: Sequence[str]) -> None:
        kind = self._plan.next(f"{self.label}.delete")
        await self._through(kind, "delete", lambda: self._inner.delete(names))

    async def scan(self) -> AsyncIterator[BlobInfo]:
        async def nothing() -> None: ...

        await self._through(self._plan.next(f"{self.label}.scan"), "scan", nothing)
        async for info in self._inner.scan():
            yield info

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def _through(self, kind: Kind | None, verb: str, do: Callable[[], Awaitable[Result]]) -> Result:
        return await _through(self._plan, f"{self.label}.{verb}", kind, do, TierUnavailable)


class FaultyDatabase:
    """A catalog's database in front of which things go wrong: before a transaction, or after its commit."""

    def __init__(self, inner: Database, plan: Plan) -> None:
        self._inner = inner
        self._plan = plan

    async def write(
        self, body: Callable[[Any], Result], sight: Sight = NO_TENANT, ends: Ends[Result] = anything
    ) -> Result:
        return await self._through("catalog.write", lambda: self._inner.write(body, sight, ends))

    async def read(self, body: Callable[[Any], Result], sight: Sight = NO_TENANT) -> Result:
        return await self._through("catalog.read", lambda: self._inner.read(body, sight))

    def version(self, tenant: UUID) -> int | None:
        return self._inner.version(tenant)

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def _through(self, call: str, do: Callable[[], Awaitable[Result]]) -> Result:
        return await _through(self._plan, call, self._plan.next(call), do, CatalogUnavailable)


class FaultyKeyStore:
    """A key store in front of which things go wrong."""

    def __init__(self, inner: KeyStore, plan: Plan) -> None:
        self._inner = inner
        self._plan = plan

    async def read(self, namespace: UUID) -> KeyVersions:
        return await self._through("read", lambda: self._inner.read(namespace))

    async def create(self, namespace: UUID, versions: KeyVersions) -> KeyVersions:
        return await self._through("create", lambda: self._inner.create(namespace, versions))

    async def replace(self, namespace: UUID, versions: KeyVersions) -> None:
        await self._through("replace", lambda: self._inner.replace(namespace, versions))

    async def destroy(self, namespace: UUID) -> None:
        await self._through("destroy", lambda: self._inner.destroy(namespace))

    async def generation(self) -> int:
        return await self._through("generation", self._inner.generation)

    async def advance(self, generation: int) -> None:
        await self._through("advance", lambda: self._inner.advance(generation))

    async def _through(self, verb: str, do: Callable[[], Awaitable[Result]]) -> Result:
        call = f"keys.{verb}"
        return await _through(self._plan, call, self._plan.next(call), do, KeyUnavailable)


class FolderTier:
    """Files in the place of S3: they are there again when a gateway, or its process, comes back. Syncs nothing."""

    def __init__(self, root: Path, label: str = "s3") -> None:
        self.label = label
        self._root = root
        root.mkdir(exist_ok=True)

    @property
    def names(self) -> set[str]:
        return {one.name.replace("+", "/") for one in self._root.iterdir() if not one.name.startswith(".")}

    async def put(self, name: str, sealed: memoryview) -> None:
        path, temporary = self._path(name), self._root / f".{uuid4()}"
        temporary.write_bytes(sealed)
        temporary.rename(path)

    async def get_into(self, name: str, target: memoryview) -> None:
        try:
            sealed = self._path(name).read_bytes()
        except FileNotFoundError:
            raise BlobMissing(f"{self.label} has no blob {name}") from None
        if len(sealed) != len(target):
            raise BlobDamaged(f"blob {name} in {self.label} has {len(sealed)} bytes, not {len(target)}")
        target[:] = sealed

    async def stat(self, names: Sequence[str]) -> dict[str, int]:
        paths = {name: self._path(name) for name in names}
        return {name: path.stat().st_size for name, path in paths.items() if path.exists()}

    async def delete(self, names: Sequence[str]) -> None:
        for path in [self._path(name) for name in names]:
            path.unlink(missing_ok=True)

    async def scan(self) -> AsyncIterator[BlobInfo]:
        for name in sorted(self.names):
            found = self._path(name).stat()
            yield BlobInfo(name, found.st_size, found.st_mtime_ns // 1_000_000)

    async def aclose(self) -> None:
        """The files stay."""

    def _path(self, name: str) -> Path:
        return self._root / check_name(name).replace("/", "+")


def _flipped(sealed: memoryview) -> bytes:
    damaged = bytearray(sealed)
    damaged[len(damaged) // 2] ^= 1
    return bytes(damaged)
