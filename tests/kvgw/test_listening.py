"""A channel whose reader stays registered hears of its peer when it wants to, and of nothing else."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvgw.channel import ConnectionEnded, PlainChannel
from tests.support.aio import aio


@contextmanager
def pair() -> Iterator[tuple[PlainChannel, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    channel = PlainChannel(ours)
    try:
        yield channel, theirs
    finally:
        channel.close()
        theirs.close()


async def receive(channel: PlainChannel, count: int) -> bytes:
    target = bytearray(count)
    await channel.receive(memoryview(target), memoryview(bytearray(0)))
    return bytes(target)


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """Which descriptors the event loop's `name` was called for."""
    loop = asyncio.get_running_loop()
    called: list[int] = []
    real: Callable[..., Any] = getattr(loop, name)
    monkeypatch.setattr(loop, name, lambda number, *rest: (called.append(number), real(number, *rest))[1])
    return called


@aio
async def test_it_is_registered_once_for_many_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    added, removed = counted(monkeypatch, "add_reader"), counted(monkeypatch, "remove_reader")
    with pair() as (channel, theirs):
        for number in range(20):
            waiting = asyncio.create_task(receive(channel, 3))
            await asyncio.sleep(0)
            theirs.send(b"%03d" % number)
            assert await waiting == b"%03d" % number
        assert len(added) == 1 and not removed
    assert len(removed) == 1


@aio
async def test_what_nobody_waits_for_costs_one_turn_and_is_there_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair() as (channel, theirs):
        waiting = asyncio.create_task(receive(channel, 1))
        await asyncio.sleep(0)
        theirs.send(b"a")
        assert await waiting == b"a"
        removed = counted(monkeypatch, "remove_reader")
        theirs.send(b"bc")
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(removed) == 1, "the loop says it no more"
        assert await receive(channel, 2) == b"bc"
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionEnded):
            await receive(channel, 1)


@pytest.mark.parametrize("end", [PlainChannel.close, PlainChannel.abandon])
@aio
async def test_the_next_socket_with_its_number_is_heard(end: Callable[[PlainChannel], None]) -> None:
    numbers = set()
    for _ in range(3):
        with pair() as (channel, theirs):
            numbers.add(channel._socket.fileno())
            waiting = asyncio.create_task(receive(channel, 1))
            await asyncio.sleep(0)
            theirs.send(b"x")
            assert await waiting == b"x"
            end(channel)
    assert len(numbers) == 1, "the number was not used again: the test shows nothing"


@aio
async def test_a_forked_child_that_gives_up_leaves_the_parent_listening() -> None:
    with pair() as (channel, theirs):
        for sent in (b"1", b"2"):
            waiting = asyncio.create_task(receive(channel, 1))
            await asyncio.sleep(0)
            if sent == b"2":
                child = os.fork()
                if not child:
                    try:
                        channel.abandon()
                    finally:
                        os._exit(0)
                os.waitpid(child, 0)
            theirs.send(sent)
            assert await waiting == sent
