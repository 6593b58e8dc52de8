"""Simulated tiers: a disk for each node, which forgets what was not synced, and one bucket for all.

They implement the tiers' own protocol; everything above them is the product's.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from kvgw.runtime import finish
from storage.errors import BlobDamaged, BlobMissing, TierFull, TierUnavailable
from storage.nvme.space import NvmeState, NvmeStatistics
from storage.tier import BlobInfo, check_name
from storage.tracing import Trace
from tests.simulation.faults import Kind

if TYPE_CHECKING:
    from tests.simulation.world import Process, World

S3_SECONDS: Final = 10.0
"""Absolute limit of one request, as `s3.request_seconds` is."""
PAGE: Final = 64
STEPS_MAX: Final = 5

Steps = Generator[None, None, Any]


@dataclass(frozen=True)
class Blob:
    """Bytes under a name."""

    data: bytes
    modified_ms: int
    synced: bool = True


@dataclass
class Disk:
    """What a node's disk shows, and what of it would survive a loss of power."""

    capacity: int
    visible: dict[str, Blob] = field(default_factory=dict)
    durable: dict[str, Blob] = field(default_factory=dict)
    unfinished: dict[str, bytes] = field(default_factory=dict)
    full: bool = False
    sync_fails: bool = False

    @property
    def used(self) -> int:
        return sum(len(one.data) for one in self.visible.values())

    def lose_power(self, rng: random.Random) -> None:
        """What was not synced is there or not, whole or torn."""
        for name in sorted({*self.visible, *self.durable}):
            one = rng.choice((self.visible.get(name), self.durable.get(name)))
            if one is not None and not one.synced:
                torn = one.data[: len(one.data) // 2]
                one = replace(one, data=rng.choice((one.data, torn, bytes(len(one.data)))), synced=True)
            for names in (self.visible, self.durable):
                names.pop(name, None)
                if one is not None:
                    names[name] = one
        self.unfinished = {name: data for name, data in self.unfinished.items() if rng.random() < 0.5}

    def rot(self, rng: random.Random) -> str | None:
        """Flip a bit of a stored blob; its name."""
        if not self.visible:
            return None
        name = rng.choice(sorted(self.visible))
        rotten = replace(self.visible[name], data=flipped(self.visible[name].data, rng))
        self.visible[name] = rotten
        if name in self.durable:
            self.durable[name] = rotten
        return name


class NvmeFace:
    """A gateway process's view of its node's disk. Each operation is some steps, which a cancellation does not stop."""

    label = "nvme"

    def __init__(self, world: World, process: Process, disk: Disk) -> None:
        self._world, self._process, self.disk = world, process, disk
        self._suspect = ""
        self._serial = itertools.count()
        disk.unfinished.clear()  # as a gateway does when it opens its folder

    @property
    def statistics(self) -> NvmeStatistics:
        state = NvmeState.SUSPECT if self._suspect else NvmeState.FULL if self.disk.full else NvmeState.OK
        return NvmeStatistics(
            state=state,
            reason=self._suspect or "planned",
            used_bytes=self.disk.used,
            in_flight_bytes=0,
            limit_bytes=self.disk.capacity,
            foreign=0,
            preallocates=True,
        )

    async def put(self, name: str, sealed: memoryview) -> None:
        what = f"nvme.put {short(name)}"
        await self._run(what, self._put(check_name(name), sealed), self._fate(what, Kind.LOST_ANSWER))

    async def get_into(self, name: str, target: memoryview) -> None:
        what = f"nvme.get {short(name)}"
        kind = self._fate(what, Kind.FLIP)
        await self._run(what, self._get(check_name(name), target), kind)
        if kind is Kind.FLIP:
            target[:] = flipped(bytes(target), self._world.rng)

    async def stat(self, names: Sequence[str]) -> dict[str, int]:
        def steps() -> Steps:
            yield
            return {name: len(self.disk.visible[name].data) for name in names if name in self.disk.visible}

        what = f"nvme.stat {len(names)}"
        found: dict[str, int] = await self._run(what, steps(), self._fate(what))
        return found

    async def delete(self, names: Sequence[str]) -> None:
        what = f"nvme.delete {len(names)}"
        await self._run(what, self._delete(list(names)), self._fate(what, Kind.LOST_ANSWER))

    async def scan(self) -> AsyncIterator[BlobInfo]:
        names = sorted(self.disk.visible)
        for start in range(0, len(names), PAGE):

            def steps(page: Sequence[str] = names[start : start + PAGE]) -> Steps:
                yield
                there = [(name, self.disk.visible[name]) for name in page if name in self.disk.visible]
                return [BlobInfo(name, len(one.data), one.modified_ms) for name, one in there]

            for info in await self._run("nvme.scan", steps(), self._fate("nvme.scan")):
                yield info

    async def aclose(self) -> None: ...

    async def traces(self, prefix: str) -> list[Trace]:
        def steps() -> Steps:
            yield
            found = [Trace("blob", name) for name in sorted(self.disk.visible) if name.startswith(prefix)]
            left = sorted(self.disk.unfinished.items())
            return found + [Trace("unfinished", f"tmp/{leaf}", head=data[:64]) for leaf, data in left]

        looked: list[Trace] = await self._run("nvme.traces", steps(), self._fate("nvme.traces"))
        return looked

    def _put(self, name: str, sealed: memoryview) -> Steps:
        disk = self.disk
        if self._suspect:
            raise TierUnavailable(f"the disk is suspect: {self._suspect}")
        if disk.full or disk.used + len(sealed) > disk.capacity:
            raise TierFull("the disk is full")
        leaf, half = f"{name.rpartition('/')[2]}.{next(self._serial)}", len(sealed) // 2
        try:
            disk.unfinished[leaf] = bytes(sealed[:half])
            yield
            disk.unfinished[leaf] += bytes(sealed[half:])
            yield
            synced = self._sync_data()
            yield
            disk.visible[name] = Blob(disk.unfinished.pop(leaf), self._process.clock.now_ms(), synced)
            yield
            if not self._sync_folder():
                return
            disk.durable[name] = disk.visible[name]
        finally:
            if not self._process.dead:
                disk.unfinished.pop(leaf, None)
        yield

    def _sync_data(self) -> bool:
        """Whether the bytes are on the disk now."""
        if self.disk.sync_fails:
            self._suspect = "planned: fsync failed"
            raise TierUnavailable("fsync failed; whether the bytes are there nobody knows")
        return True

    def _sync_folder(self) -> bool:
        """Whether the name is."""
        return True

    def _get(self, name: str, target: memoryview) -> Steps:
        yield
        one = self.disk.visible.get(name)
        if one is None:
            raise BlobMissing(f"there is no blob {name} on NVMe")
        if len(one.data) != len(target):
            raise BlobDamaged(f"blob {name} on NVMe has {len(one.data)} bytes, not {len(target)}")
        half = len(target) // 2
        target[:half] = one.data[:half]
        yield
        target[half:] = one.data[half:]

    def _delete(self, names: Sequence[str]) -> Steps:
        yield
        for name in names:
            self.disk.visible.pop(name, None)
        yield
        for name in names:
            self.disk.durable.pop(name, None)

    async def _run(self, what: str, steps: Steps, kind: Kind | None) -> Any:
        """Take one step after the other, in the process's own time; a planned error comes at one of them."""
        world, loop = self._world, self._world.loop
        future: asyncio.Future[Any] = loop.create_future()
        fails_in = world.rng.randrange(STEPS_MAX) if kind is Kind.ERROR else -1

        def step(number: int) -> None:
            try:
                if number == fails_in:
                    steps.close()
                    raise TierUnavailable(f"planned: {what} fails")
                next(steps)
            except StopIteration as end:
                if kind is Kind.LOST_ANSWER:
                    future.set_exception(TierUnavailable(f"planned: {what} was done, and an error came back"))
                else:
                    future.set_result(end.value)
            except Exception as error:
                future.set_exception(error)
            else:
                loop.call_later(world.delay(), step, number + 1)

        loop.call_later(world.delay(), step, 0)
        return await finish(future)

    def _fate(self, what: str, *allowed: Kind) -> Kind | None:
        return self._world.fate(self._process.name, what, (Kind.ERROR, *allowed))


@dataclass
class Bucket:
    """What S3 has."""

    objects: dict[str, Blob] = field(default_factory=dict)

    def rot(self, rng: random.Random) -> str | None:
        """Flip a bit of an object; its name."""
        if not self.objects:
            return None
        name = rng.choice(sorted(self.objects))
        self.objects[name] = replace(self.objects[name], data=flipped(self.objects[name].data, rng))
        return name


class S3Face:
    """A gateway process's view of the bucket."""

    label = "s3"

    def __init__(self, world: World, process: Process) -> None:
        self._world, self._process, self._bucket = world, process, world.bucket

    async def put(self, name: str, sealed: memoryview) -> None:
        half = len(check_name(name) and sealed) // 2
        sent, unsent = [bytes(sealed[:half])], [sealed]
        del sealed  # the caller's memory is not held longer than the request takes

        def send_rest() -> None:
            """The rest leaves the client's memory when the request is through, or when its client gives it up."""
            if unsent:
                sent.append(bytes(unsent.pop()[half:]))

        def store() -> None:
            send_rest()
            self._bucket.objects[name] = Blob(b"".join(sent), self._world.wall_ms())

        try:
            await self._ask(f"s3.put {short(name)}", store, given_up=send_rest, twice=True)
        finally:
            unsent.clear()

    async def get_into(self, name: str, target: memoryview) -> None:
        def find() -> bytes:
            if name not in self._bucket.objects:
                raise BlobMissing(f"s3 has no blob {name}")
            return self._bucket.objects[name].data

        data = await self._ask(f"s3.get {short(name)}", find, flips=True)
        if len(data) != len(target):
            raise BlobDamaged(f"blob {name} in s3 has {len(data)} bytes, not {len(target)}")
        half = len(target) // 2
        target[:half] = data[:half]
        await asyncio.sleep(self._world.delay())
        target[half:] = data[half:]

    async def stat(self, names: Sequence[str]) -> dict[str, int]:
        objects = self._bucket.objects
        found: dict[str, int] = await self._ask(
            f"s3.stat {len(names)}", lambda: {name: len(objects[name].data) for name in names if name in objects}
        )
        return found

    async def delete(self, names: Sequence[str]) -> None:
        doomed = list(names)

        def remove() -> None:
            for name in doomed:
                self._bucket.objects.pop(name, None)

        await self._ask(f"s3.delete {len(doomed)}", remove, twice=True)

    async def scan(self) -> AsyncIterator[BlobInfo]:
        after = ""
        while page := await self._ask("s3.scan", lambda after=after: self._page(after)):
            for info in page:
                yield info
            after = page[-1].name

    async def traces(self, prefix: str) -> list[Trace]:
        objects = self._bucket.objects
        found: list[Trace] = await self._ask(
            "s3.traces", lambda: [Trace("blob", name) for name in sorted(objects) if name.startswith(prefix)]
        )
        return found

    async def aclose(self) -> None: ...

    def _page(self, after: str) -> list[BlobInfo]:
        names = sorted(name for name in self._bucket.objects if name > after)[:PAGE]
        return [BlobInfo(name, len(one.data), one.modified_ms) for name in names if (one := self._bucket.objects[name])]

    async def _ask(
        self,
        what: str,
        do: Callable[[], Any],
        *,
        given_up: Callable[[], None] | None = None,
        twice: bool = False,
        flips: bool = False,
    ) -> Any:
        more = (Kind.DUPLICATE,) if twice else (Kind.FLIP,) if flips else ()
        return await self._world.ask(
            self._process, "s3", what, do, TierUnavailable, S3_SECONDS, more=more, given_up=given_up
        )


class FaceTracer:
    """Looks through a tier for what a deletion left."""

    def __init__(self, face: NvmeFace | S3Face) -> None:
        self.label = face.label
        self.method = "looked at everything that the simulated tier has"
        self._face = face

    async def traces(self, prefix: str) -> AsyncIterator[Trace]:
        for trace in await self._face.traces(prefix):
            yield trace

    async def clear(self, traces: Sequence[Trace]) -> None: ...


def flipped(data: bytes, rng: random.Random) -> bytes:
    """The same bytes with one bit the other way round."""
    changed = bytearray(data)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def short(name: str) -> str:
    """Enough of a blob's name to follow it through a trace."""
    return name.rpartition("/")[2][:8]
