"""Requests leave nothing to the garbage collector: it would stop everybody, and keep memory in use until it comes.

Objects in a cycle are counted with the collector off. What SQLAlchemy leaves is its own.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvgw.model import Durability, PutOutcome
from kvgw.settings import NvmeSettings
from tests.support.aio import aio
from tests.support.gateways import MIB, SMALL, House, Kind, buffers_for, format_of, house, keys_of, payloads_of

TIMES = 10
OURS = ("kvgw.", "storage.", "tenancy.")
FRAMES = {"frame", "traceback", "coroutine", "memoryview", "managedbuffer"}

pytestmark = pytest.mark.parametrize("kind", ["embedded", "unix", "shm"])


@contextmanager
def no_garbage(what: str) -> Iterator[None]:
    """Fails when the block leaves one of our objects, or a frame, in a cycle for each time."""
    gc.collect()
    gc.freeze()  # what was there before is not looked through again: the gateway would lose touch with its catalog
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield
        gc.collect()
        names = [f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
        gc.enable()
    found = Counter(name for name in names if name.startswith(OURS) or name.removeprefix("builtins.") in FRAMES)
    assert sum(found.values()) < TIMES, f"{what}: {found}"


async def check(gateway: House, operations: dict[str, Callable[[int], Awaitable[None]]]) -> None:
    for what, operation in operations.items():
        for turn in range(3):
            await operation(-1 - turn)  # what is made once
        await gateway.opened.crew.heartbeat()
        with no_garbage(what):
            for turn in range(TIMES):
                await operation(turn)


@pytest.mark.parametrize("length", [64 * 1024, 2 * MIB])
@aio
async def test_requests_leave_no_cycles(kind: Kind, length: int, tmp_path: Path) -> None:
    async with house(kind, tmp_path / "gw", settings=SMALL) as gateway:
        client = gateway.client()
        part, keys = await client.register(format_of(length)), keys_of(4)
        payloads, buffers = payloads_of(part, 4), buffers_for(part, 4)
        await client.put(part, keys, payloads, durability=Durability.NVME, on_error="raise")

        async def match(_: int) -> None:
            assert (await client.match(part, keys)).count == 4

        async def get(_: int) -> None:
            assert (await client.get(part, keys, buffers)).leading == 4

        async def get_from_disk(_: int) -> None:
            forget_residents(gateway)
            assert (await client.get(part, keys, buffers)).leading == 4

        async def put_again(_: int) -> None:
            assert (await client.put(part, keys, payloads)).stored == 4

        async def put(turn: int) -> None:
            again = payloads_of(part, 1, seed=1000 + turn)
            assert (await client.put(part, keys_of(1, f"put {turn}"), again)).stored == 1

        async def put_durably(turn: int) -> None:
            again = payloads_of(part, 1, seed=2000 + turn)
            report = await client.put(part, keys_of(1, f"durable {turn}"), again, durability=Durability.NVME)
            assert report.stored == 1

        async def delete(turn: int) -> None:
            await client.delete(part, keys_of(1, f"put {turn}"))

        await check(
            gateway, {one.__name__: one for one in (match, get, get_from_disk, put_again, put, put_durably, delete)}
        )


@aio
async def test_puts_that_fail_on_a_full_disk_leave_no_cycles(kind: Kind, tmp_path: Path) -> None:
    """In cycles their frames kept views of staging, and a later PUT into the same memory was refused (law 7)."""
    full = replace(SMALL, nvme=NvmeSettings(capacity_bytes=8 * MIB, min_free_bytes=0))
    async with house(kind, tmp_path / "gw", settings=full) as gateway:
        client = gateway.client()
        part = await client.register(format_of(2 * MIB))
        for turn in range(8):
            await client.put(part, keys_of(1, f"fill {turn}"), payloads_of(part, 1, seed=turn), deadline_s=0.5)

        async def put(turn: int) -> None:
            chunks = payloads_of(part, 8, seed=1000 + 10 * turn)
            report = await client.put(part, keys_of(8, f"{turn}"), chunks, durability=Durability.NVME, deadline_s=0.5)
            assert PutOutcome.FAILED in report.outcomes, report

        await check(gateway, {"a PUT that fails": put})


def forget_residents(gateway: House) -> None:
    staging = gateway.opened.rooms.staging
    for name in list(staging.names()):
        staging.drop(name)
