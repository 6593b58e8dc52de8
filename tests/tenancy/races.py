"""Races of whole processes on one PostgreSQL catalog, and the functions that run in them."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.queues import Queue
from typing import Any

from tenancy.births import Batch
from tenancy.catalog import Catalog
from tenancy.model import Node, Scope
from tenancy.postgres import PostgresDatabase, parse_url

NOW = 1_700_000_000_000
EACH = 5


def race(processes: int, work: Callable[..., Any], arguments: Sequence[Sequence[Any]], timeout_s: float) -> list[Any]:
    """Run `work` in many processes that begin together; what each returned. A process that fails fails the race."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    start, results = context.Barrier(processes), context.Queue()
    running = [context.Process(target=_one, args=(start, results, work, list(one)), daemon=True) for one in arguments]
    for process in running:
        process.start()
    try:
        answers = [results.get(timeout=timeout_s) for _ in running]
    finally:
        for process in running:
            process.join(5)
            if process.is_alive():
                process.kill()
    failures = [error for error, _ in answers if error is not None]
    assert not failures, failures
    return [answer for _, answer in answers]


def _one(start: Any, results: Queue[Any], work: Callable[..., Any], arguments: list[Any]) -> None:
    try:
        results.put((None, asyncio.run(work(start, *arguments))))
    except BaseException as error:
        results.put((f"{type(error).__name__}: {error}", None))


async def reserve_until_full(start: Any, url: str, number: int, scopes: Sequence[Scope]) -> dict[Scope, int]:
    """Reserve a few chunks at a time, in one namespace after the other, until none has room; how many in each."""
    database = PostgresDatabase(parse_url(url, None), pool=1)
    try:
        catalog = Catalog(database, Node(f"node-{number}", f"boot-{number}"))
        await catalog.high_water_ms()  # connected before the race begins
        await asyncio.to_thread(start.wait)
        granted = dict.fromkeys(scopes, 0)
        open_scopes, step = list(scopes), 0
        while open_scopes:
            scope = open_scopes[step % len(open_scopes)]
            step += 1
            reserved = await catalog.reserve(
                batch_of(scope, number, step), step.to_bytes(8, "big") + number.to_bytes(8, "big"), NOW + 60_000, NOW
            )
            granted[scope] += len(reserved.wanted)
            if len(reserved.wanted) < EACH:
                open_scopes.remove(scope)
        return granted
    finally:
        await database.aclose()


def batch_of(scope: Scope, number: int, step: int) -> Batch:
    names = tuple(f"{number}/{step}/{index}".encode().ljust(32, b".") for index in range(EACH))
    return Batch(
        scope=scope,
        format_id=1,
        entry_keys=names,
        parents=(None, *names[:-1]),
        depth=0,
        tokens=16,
        sealed_length=200,
        ttl_ms=10_000,
        durability="nvme",
        label_macs=(),
        writer="w",
        tiers=(("nvme", f"node-{number}"), ("s3", "")),
    )
