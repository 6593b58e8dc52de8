"""A group of tasks leaves its parent such that a later deadline ends as a deadline."""

from __future__ import annotations

import asyncio
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
    with pytest.raises(ExceptionGroup) as caught:
        async with Together() as tasks:
            tasks.create_task(fail())
            if in_block:
                await asyncio.Event().wait()
    assert [type(one) for one in caught.value.exceptions] == [Broken]


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
async def test_an_error_of_the_block_itself_ends_its_tasks_and_keeps_the_count() -> None:
    parent = asyncio.current_task()
    assert parent is not None
    with pytest.raises(ExceptionGroup) as caught:
        async with Together() as tasks:
            other = tasks.create_task(asyncio.Event().wait())
            await asyncio.sleep(0)
            raise Broken
    assert [type(one) for one in caught.value.exceptions] == [Broken]
    assert other.cancelled()
    assert parent.cancelling() == 0
