"""``kvgw backup``, ``kvgw restore`` and ``kvgw wipe``."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvgw.cli.options import Config, Data, Json, data_folder, settings_of
from kvgw.cli.output import console, print_json
from kvgw.datadir import DataFolder
from kvgw.errors import RequestRefused
from kvgw.fence import LEASE_SECONDS
from kvgw.runtime import SystemClock, ThreadWorkers
from kvgw.settings import Settings, SettingsError
from kvgw.wiring.catalog import open_database, open_to_read
from kvgw.wiring.keys import open_store
from kvgw.wiring.tiers import open_nvme, open_s3
from storage.tier import Tier
from tenancy import backup as copies
from tenancy import generation, migrate, processes, registry
from tenancy.engine import Database
from tenancy.sight import Sight
from tenancy.wipe import forget_chunks

DELETE_BATCH = 1000


def backup(
    file: Annotated[Path, typer.Argument(help="Where to write the copy; replaced as a whole or not at all.")],
    data: Data = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Copy the catalog's tenants, namespaces, tokens, formats and limits to a file, while gateways run.

    The copy holds no chunk, no salt and no key: restored, it is a cold cache. Keep the keys folder apart from it.
    """
    folder = data_folder(data)
    settings = settings_of(folder, config)
    lines = asyncio.run(_copy(settings, folder))
    _write_whole(file, lines)
    if json:
        print_json({"file": str(file), "rows": len(lines) - 1})
    else:
        console().print(f"copied {len(lines) - 1} rows to {file}", highlight=False, soft_wrap=True)


def restore(
    file: Annotated[Path, typer.Argument(help="A copy made by kvgw backup.")],
    data: Data = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Put a copy into an empty catalog. No gateway may be running; the cache begins cold."""
    folder = data_folder(data)
    settings = settings_of(folder, config)
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"the copy {file} cannot be read: {error}") from error
    count = asyncio.run(_put_back(settings, folder, lines))
    if json:
        print_json({"file": str(file), "rows": count})
    else:
        console().print(f"put back {count} rows; run kvgw wipe if the tiers still hold older blobs", highlight=False)


def wipe(
    data: Data = None,
    config: Config = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do it: every stored chunk is lost.")] = False,
    json: Json = False,
) -> None:
    """Forget every chunk and delete every blob of this node's NVMe and of S3: a cold start.

    Tenants, namespaces, tokens and policies stay. No gateway may be running.
    """
    if not yes:
        raise RequestRefused("kvgw wipe deletes every stored chunk; add --yes if that is what you want")
    folder = data_folder(data)
    settings = settings_of(folder, config)
    chunks, blobs = asyncio.run(_wipe(settings, folder))
    if json:
        print_json({"chunks": chunks, "blobs": blobs})
    else:
        console().print(f"forgot {chunks} chunks and deleted {blobs} blobs", highlight=False)


async def _copy(settings: Settings, folder: Path) -> list[str]:
    async with AsyncExitStack() as stack:
        database = await open_to_read(stack, settings.catalog, folder)
        revision = await database.read(migrate.check_known)
        if revision is None:
            raise SettingsError(f"there is no catalog in {folder} to copy; name the right one with --data")
        lines = [copies.header(revision, SystemClock().now_ms())]
        for tenant, _ in await database.read(registry.tenants):
            lines += await database.read(partial(copies.rows_of, tenant_id=tenant), Sight(tenant))
        return lines


async def _put_back(settings: Settings, folder: Path, lines: list[str]) -> int:
    async with AsyncExitStack() as stack:
        database = await stack.enter_async_context(_alone(settings, folder))
        if await database.read(registry.count_tenants):
            raise RequestRefused("the catalog has tenants already: a copy is put back into an empty one only")
        count = 0
        for tenant, put in copies.read(lines, migrate.newest_revision()):
            await database.write(put, Sight(tenant))
            count += 1
        await _begin_cold(stack, database, settings, folder)
        return count


async def _wipe(settings: Settings, folder: Path) -> tuple[int, int]:
    async with AsyncExitStack() as stack:
        database = await stack.enter_async_context(_alone(settings, folder))
        workers = ThreadWorkers(4)
        stack.callback(workers.close)
        chunks = 0
        for tenant, _ in await database.read(registry.tenants):
            sight = Sight(tenant)
            for one in await database.read(partial(registry.namespaces, tenant_id=tenant), sight):
                chunks += await database.write(partial(forget_chunks, scope=one.scope), sight)
        clock = SystemClock()
        tiers = [
            await open_nvme(stack, settings, folder, workers, clock),
            await open_s3(stack, settings.s3, clock),
        ]
        blobs = sum([await _empty(tier) for tier in tiers if tier is not None])
        await _begin_cold(stack, database, settings, folder)
        return chunks, blobs


async def _begin_cold(stack: AsyncExitStack, database: Database, settings: Settings, folder: Path) -> None:
    """The catalog lists no chunk any more, so that it may be newer than whatever the keys have seen."""
    workers = ThreadWorkers(1)
    stack.callback(workers.close)
    store = await open_store(stack, settings, folder, workers)
    known = await store.generation()
    now_ms = SystemClock().now_ms()
    await database.write(lambda connection: processes.raise_high_water(connection, now_ms))
    await store.advance(await database.write(lambda connection: generation.catch_up(connection, known)))


async def _empty(tier: Tier) -> int:
    names = [info.name async for info in tier.scan()]
    for start in range(0, len(names), DELETE_BATCH):
        await tier.delete(names[start : start + DELETE_BATCH])
    return len(names)


@asynccontextmanager
async def _alone(settings: Settings, folder: Path) -> AsyncIterator[Database]:
    """The catalog's database while no gateway runs on it. Raises `FolderLocked` or `RequestRefused`."""
    async with AsyncExitStack() as stack:
        stack.callback(DataFolder.open(folder).close)
        database = await open_database(stack, settings.catalog, folder)
        now_ms, lease_ms = SystemClock().now_ms(), int(LEASE_SECONDS * 1000)
        live = await database.read(lambda connection: processes.live_boots(connection, now_ms, lease_ms))
        if live and settings.catalog.url:
            raise RequestRefused(f"{len(live)} gateways of this catalog are running; stop them first")
        yield database


def _write_whole(file: Path, lines: list[str]) -> None:
    """Write a private file as a whole or not at all."""
    try:
        handle, draft = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.writelines(f"{line}\n" for line in lines)
            out.flush()
            os.fsync(out.fileno())
        os.replace(draft, file)
    except OSError as error:
        raise SettingsError(f"the copy cannot be written to {file}: {error.strerror}") from error
