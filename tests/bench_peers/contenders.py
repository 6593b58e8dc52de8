"""A system that is ready to be measured: its client process, and the processes whose CPU time is its server's."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

from kvgw.bench.operator import Operator
from kvgw.bench.plan import BenchError, Case, Op, Sample
from kvgw.bench.processes import Child, cpu_seconds
from kvgw.bench.protocol import Check, Done, Forget, Measure, Measured, Prepare
from tests.bench_peers.plan import Tier
from tests.bench_peers.protocol import ForgetPeer, MeasurePeer

ANSWER_SECONDS: Final = 300.0
SETTLE_SECONDS: Final = 60.0


@dataclass(frozen=True)
class About:
    """What rows say of a system."""

    system: str
    version: str
    transport: str
    tier: Tier


class Contender(Protocol):
    """Commands to one system's client."""

    about: About
    client: Child
    servers: tuple[int, ...]
    """Process ids; none where nothing stands between the client and S3."""

    async def measure(self, op: Op) -> Measured: ...

    async def forget(self) -> None:
        """Delete what the round stored."""
        ...

    async def settle(self) -> None:
        """Wait until the server does nothing any more. Raises `BenchError`."""
        ...

    def cool(self) -> None:
        """Make the next GET cold, as far as the operating system goes."""
        ...


@dataclass(frozen=True)
class Ours:
    """The gateway, driven by the client of `kvgw bench`."""

    about: About
    client: Child
    servers: tuple[int, ...]
    operator: Operator
    disk: Path | None
    """Folder whose files a GET is to read from the disk itself."""

    async def measure(self, op: Op) -> Measured:
        self.client.tell(Measure("kvgw", op))
        return await self.client.hear(Measured, ANSWER_SECONDS)

    async def forget(self) -> None:
        self.client.tell(Forget("kvgw"))
        await self.client.hear(Done, ANSWER_SECONDS)

    async def settle(self) -> None:
        busy = await self.operator.settle(SETTLE_SECONDS)
        if busy:
            raise BenchError(f"the gateway was not quiet after {SETTLE_SECONDS:g} s: {busy}")

    def cool(self) -> None:
        if self.disk is not None:
            drop_cached(self.disk)


@dataclass(frozen=True)
class Peer:
    """A peer, driven by `client` in its environment. It has nothing left to do once it answered."""

    about: About
    client: Child
    servers: tuple[int, ...]

    async def measure(self, op: Op) -> Measured:
        self.client.tell(MeasurePeer(op))
        return await self.client.hear(Measured, ANSWER_SECONDS)

    async def forget(self) -> None:
        self.client.tell(ForgetPeer())
        await self.client.hear(Done, ANSWER_SECONDS)

    async def settle(self) -> None: ...

    def cool(self) -> None: ...


def drop_cached(folder: Path) -> None:
    """Take the files of a folder from the page cache; what is not on the disk yet stays there."""
    for file in folder.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


async def measure_case(contender: Contender, case: Case) -> dict[Op, Sample]:
    """Store new content, measured or not; read or find it; delete it. Raises `BenchError`."""
    client = contender.client
    client.tell(Prepare(case.chunk_bytes, case.batch, case.calls))
    await client.hear(Done, ANSWER_SECONDS)
    stored = await _sample(contender, case, "put")
    before = _server_cpu(contender)
    await contender.settle()
    after = _server_cpu(contender)
    if isinstance(contender, Ours) and before is not None and after is not None:
        stored = replace(stored, later_cpu_s=after - before)
    contender.cool()
    found: dict[Op, Sample] = {}
    for op in case.ops:
        found[op] = stored if op == "put" else await _sample(contender, case, op)
    if "get" in case.ops:
        client.tell(Check())
        await client.hear(Done, ANSWER_SECONDS)
    await contender.forget()
    await contender.settle()
    return found


async def _sample(contender: Contender, case: Case, op: Op) -> Sample:
    server, client = _server_cpu(contender), cpu_seconds(contender.client.pid)
    measured = await contender.measure(op)
    server_after, client_after = _server_cpu(contender), cpu_seconds(contender.client.pid)
    return Sample(
        seconds=measured.ended_s - measured.started_s,
        payload_bytes=0 if op == "match64" else case.stored_bytes,
        call_us=tuple(measured.call_us),
        server_cpu_s=None if server is None or server_after is None else server_after - server,
        client_cpu_s=client_after - client,
    )


def _server_cpu(contender: Contender) -> float | None:
    return sum(map(cpu_seconds, contender.servers)) if contender.servers else None
