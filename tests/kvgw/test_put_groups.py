"""What no thread can receive, as inside TLS: a PUT's groups take turns in two windows, and none is left in the end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
from msgspec.structs import replace

from kvgw.channel import ConnectionEnded
from kvgw.errors import KvgwError
from kvgw.gateway.payloads import Chunk
from kvgw.model import PutRequest
from kvgw.server.exchange import Exchange
from kvgw.settings import SharedMemorySettings
from tests.support.aio import aio
from tests.support.gateways import SMALL, House, Kind, format_of, house, keys_of, payloads_of, read

CHUNK = 256 * 1024
GROUP = 3
"""Chunks of a group: a quarter of what a tenant of this small gateway may have in windows."""


def window_bytes(gateway: House) -> bytes:
    region = gateway.opened.rooms.staging.window_region
    start = region.address - gateway.opened.arena.region.address
    return bytes(gateway.opened.arena.memory.view(start, region.length))


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@aio
async def test_law_6_the_groups_of_a_put_take_turns_in_two_windows_that_are_zero_in_the_end(
    tmp_path: Path, kind: Kind
) -> None:
    settings = replace(SMALL, shared_memory=SharedMemorySettings(bytes=0))
    async with house(kind, tmp_path / "gw", settings=settings) as gateway:
        client = gateway.client()
        registered = await client.register(format_of(CHUNK))
        keys, payloads = keys_of(26), payloads_of(registered, 26)
        staging = gateway.opened.rooms.staging
        with (
            mock.patch.object(Exchange, "incoming", None),
            mock.patch.object(type(staging), "window", autospec=True, side_effect=type(staging).window) as taken,
        ):
            assert (await client.put(registered, keys, payloads)).stored == 26
        assert [call.args[2] for call in taken.call_args_list] == 2 * [GROUP * CHUNK], "nine groups"
        assert not any(window_bytes(gateway))
        assert (await read(client, registered, keys))[1] == payloads
        await gateway.check_clean()


class Breaking:
    """A client that sends `good` groups, at once, and then something else."""

    def __init__(self, payloads: Sequence[bytes], good: int, error: Exception) -> None:
        self._payloads = payloads
        self._good = good
        self._error = error
        self.incoming = None

    async def wanted(self, indices: Sequence[int]) -> None:
        """It knows what to send."""

    async def shared(self, most: int, nbytes: int) -> Sequence[memoryview]:
        return ()

    async def receive(self, chunks: Sequence[Chunk]) -> None:
        if self._good == 0:
            raise self._error
        self._good -= 1
        for index, target in chunks:
            target[:] = self._payloads[index]

    def check(self) -> None:
        raise AssertionError("it never came so far")


@pytest.mark.parametrize("good", range(9))
@aio
async def test_law_7_no_window_is_left_of_a_put_that_breaks_off_between_two_groups(tmp_path: Path, good: int) -> None:
    async with house("embedded", tmp_path / "gw") as gateway:
        registered = await gateway.client().register(format_of(CHUNK))
        keys, payloads = keys_of(26), payloads_of(registered, 26)
        request = PutRequest(registered.fingerprint, keys, namespace="default", deadline_ms=10_000)
        source = Breaking(payloads, good, ConnectionEnded("gone"))
        # Nothing lets the event loop run between a group and the next: the first one's task was never begun.
        with pytest.raises((ConnectionEnded, KvgwError)):
            await gateway.opened.gateway.put(gateway.owner, request, source)
        await gateway.check_clean(within_s=2.0)
        assert not any(window_bytes(gateway)), "law 6: what came is not there for the next"
