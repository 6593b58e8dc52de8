"""A group of tasks ends with one error, under deadlines, and leaves nothing to the garbage collector."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import suppress

import pytest

from storage.together import Together
from tests.support.aio import aio


class Broken(Exception):
    """What a task of these tests fails with."""


async def fail() -> None:
    await asyncio.sleep(0)
    raise Broken


async def fail_together(*, in_block: bool) -> None:
    with pytest.raises(Broken):
        async with Together() as tasks:
            tasks.create_task(fail())
            if in_block:
                await asyncio.Event().wait()


@pytest.mark.parametrize("in_block", [True, False])
@aio
async def test_a_task_that_failed_leaves_no_cancellation_behind(in_block: bool) -> None:
    parent = asyncio.current_task()
    assert parent is not None
    await fail_together(in_block=in_block)
    assert parent.cancelling() == 0


@pytest.mark.parametrize("in_block", [True, False])
@aio
async def test_a_deadline_around_it_still_ends_as_a_deadline(in_block: bool) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await fail_together(in_block=in_block)
            await asyncio.Event().wait()


@aio
async def test_whoever_is_cancelled_in_it_ends_as_cancelled_and_so_do_its_tasks() -> None:
    ended: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("task")

    async def parent() -> None:
        async with Together() as tasks:
            tasks.create_task(wait())

    task = asyncio.create_task(parent())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()
    assert ended == ["task"]


@aio
async def test_a_cancellation_from_outside_is_counted_also_where_a_task_fails_on_it() -> None:
    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise Broken from None

    counts: list[int] = []

    async def parent() -> None:
        try:
            async with Together() as tasks:
                tasks.create_task(stubborn())
        except Broken:
            this = asyncio.current_task()
            assert this is not None
            counts.append(this.cancelling())

    task = asyncio.create_task(parent())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert counts == [1], "it was not the group that asked for it"


@aio
async def test_an_error_of_the_block_itself_ends_its_tasks_and_keeps_the_count() -> None:
    parent = asyncio.current_task()
    assert parent is not None
    with pytest.raises(Broken):
        async with Together() as tasks:
            other = tasks.create_task(asyncio.Event().wait())
            await asyncio.sleep(0)
            raise Broken
    assert other.cancelled()
    assert parent.cancelling() == 0


@aio
async def test_the_first_error_comes_with_its_own_context_and_through_groups_in_groups() -> None:
    async def why() -> None:
        try:
            raise KeyError("lower down")
        except KeyError as error:
            raise Broken from error

    with pytest.raises(Broken) as caught:
        async with Together() as outer:
            async with Together() as inner:
                inner.create_task(why())
                await asyncio.Event().wait()
            outer.create_task(asyncio.sleep(0))
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__context__ is caught.value.__cause__


class Memory:
    """Something that frames hold."""


@pytest.mark.parametrize("waits", ["in its block", "at its end", "in a group within"])
@aio
async def test_what_frames_held_is_free_as_soon_as_the_error_is_dealt_with(waits: str) -> None:
    held: list[weakref.ref[Memory]] = []

    async def work(*, fails: bool) -> None:
        memory = Memory()
        held.append(weakref.ref(memory))
        if fails:
            await fail()
        if waits == "in a group within":
            async with Together() as within:
                within.create_task(asyncio.Event().wait())  # type: ignore[arg-type]
        await asyncio.Event().wait()

    async def together() -> None:
        async with Together() as tasks:
            for fails in (False, True):
                tasks.create_task(work(fails=fails))
            if waits == "in its block":
                await asyncio.Event().wait()

    gc.disable()
    try:
        with suppress(Broken):
            await together()
        assert [one() for one in held] == [None, None]
    finally:
        gc.enable()
