"""Real gateways in the simulated world: the product's own wiring, with simulated rooms where the world begins."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

from msgspec.structs import replace

import kvgw.gateway.put
import kvgw.wiring
import kvgw.witness
import tenancy.deletion.deletions
import tenancy.postgres
from kvgw.errors import KvgwError
from kvgw.maintenance.crew import Pace
from kvgw.runtime import Rng, Workers
from kvgw.settings import DefaultSettings, NvmeSettings, ServerSettings, Settings, StagingSettings
from kvgw.wiring import opened
from kvgw.wiring.keys import Keys, _pepper
from storage.errors import StorageError
from storage.tracing import Tracer
from tenancy.catalog import Catalog
from tenancy.engine import Database
from tenancy.errors import TenancyError
from tenancy.keys.environmentroot import EnvironmentRootKey
from tenancy.keys.secret import SecretBytes
from tenancy.keys.signing import Signer
from tenancy.naming import entry_keys
from tenancy.sight import NO_TENANT
from tests.simulation.seams import OwnDatabase, ServerDatabase, SimKeyStore, SimWorkers
from tests.simulation.tiers import FaceTracer, NvmeFace, S3Face
from tests.simulation.world import Node, Process, World, owner

MIB: Final = 1024 * 1024
DAY_S: Final = 86_400
SETTINGS: Final = replace(
    Settings(),
    server=ServerSettings(http=""),
    staging=StagingSettings(bytes=2 * MIB, tenants=2),
    nvme=NvmeSettings(capacity_bytes=64 * MIB, min_free_bytes=0),
    defaults=DefaultSettings(durability="staged", ttl_seconds=30 * DAY_S, max_ttl_seconds=30 * DAY_S),
)
PACE: Final = Pace(
    outbox=12.0,
    sweep=15.0,
    evict=15.0,
    orphans=45.0,
    heartbeat=4.0,
    reach=30.0,
    watch=20.0,
    keys=80.0,
    usage=90.0,
    audit=60.0,
    coherence=0.4,
    nvme_orphan_grace=60.0,
    s3_orphan_grace=60.0,
)
RESTART_S: Final = (0.2, 3.0)
FORESEEN: Final = (KvgwError, StorageError, TenancyError)
"""What a start may fail with; anything else is a bug."""


@dataclass
class _Folder:
    """In the place of a data folder: a gateway's name is its node's."""

    path: Path
    node: Node

    def node_name(self, configured: str, rng: Rng) -> str:
        return configured or self.node.name

    def close(self) -> None: ...


@contextmanager
def simulated(world: World) -> Iterator[None]:
    """Within this, what the wiring opens is simulated: each room for the process that opens it."""

    async def open_database(*_: object) -> Database:
        made = OwnDatabase if len(world.nodes) == 1 else ServerDatabase
        return made(world, owner(), world.engine)

    async def database_now_ms(self: Catalog) -> int | None:
        if len(world.nodes) == 1:
            return None
        return await self._database.read(lambda _: world.wall_ms(), NO_TENANT)

    async def open_keys(_stack: AsyncExitStack, _settings: Settings, _data: Path, _: Workers, rng: Rng) -> Keys:
        root = EnvironmentRootKey(hashlib.sha256(b"simulated root key").hexdigest(), rng.token)
        store = SimKeyStore(world, owner())
        pepper = await _pepper(root, store, rng)
        return Keys(root, store, pepper, Signer(pepper), shared=True)

    async def open_nvme(*_: object) -> NvmeFace:
        return NvmeFace(world, owner(), owner().node.disk)

    async def open_s3(*_: object) -> S3Face:
        return S3Face(world, owner())

    async def open_folder(_stack: object, data: Path, _wait_s: float) -> _Folder:
        return _Folder(data, owner().node)

    def tracers_of(_settings: object, _data: object, _workers: object, nvme: Any, s3: Any) -> dict[str, Tracer]:
        return {"nvme": FaceTracer(nvme), "s3": FaceTracer(s3)}

    def noted_keys(mac: SecretBytes, fingerprint: bytes, keys: Sequence[bytes]) -> list[bytes]:
        found = list(entry_keys(mac, fingerprint, keys))
        world.entry_of |= {key.decode(): entry_key for key, entry_key in zip(keys, found, strict=True)}
        return found

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(kvgw.gateway.put, "entry_keys", noted_keys))
        for name, instead in (
            ("open_database", open_database),
            ("open_keys", open_keys),
            ("open_nvme", open_nvme),
            ("open_s3", open_s3),
            ("open_audit_objects", lambda *_: None),
            ("_folder", open_folder),
            ("tracers_of", tracers_of),
            ("ThreadWorkers", lambda *_: SimWorkers(world)),
        ):
            patches.enter_context(mock.patch.object(kvgw.wiring, name, instead))
        patches.enter_context(mock.patch.object(Catalog, "database_now_ms", database_now_ms))
        patches.enter_context(
            mock.patch.object(tenancy.postgres, "look", lambda *_: None)
        )  # it has no row-level security
        if len(world.nodes) > 1:  # a server has no file to overwrite
            patches.enter_context(mock.patch.object(tenancy.deletion.deletions, "_checkpoint", lambda *_: True))
        patches.enter_context(mock.patch.object(kvgw.witness, "append", lambda *_: None))
        yield


async def keep_running(world: World, node: Node) -> None:
    """Run a gateway on a node as a supervisor does: anew whenever it has ended."""
    while True:
        if node.wanted:
            process = world.new_process(node)
            world.note(process.name, "starts")
            world.counts["starts"] += 1
            world.spawn(process, _run(world, process))
            await process.ended.wait()
        await asyncio.sleep(world.rng.uniform(*RESTART_S))


async def _run(world: World, process: Process) -> None:
    try:
        await _serve(world, process)
    except FORESEEN as error:
        world.note(process.name, f"does not start: {type(error).__name__}")
    except Exception as error:
        world.breach(f"unforeseen: {process.name} ended with {type(error).__name__}: {error}")
    finally:
        process.opened = None
        process.ended.set()
    left = [task for task in process.tasks if not task.done() and task is not asyncio.current_task()]
    if left:
        world.breach(f"law 7: {process.name} has ended, and {len(left)} of its tasks have not: {left[0].get_coro()}")
    process.dead = True


async def _serve(world: World, process: Process) -> None:
    outside = kvgw.wiring.World(process.clock, process.rng, PACE)
    async with opened(SETTINGS, Path("/simulated") / process.node.name, world=outside) as gateway:
        process.opened = gateway
        world.note(process.name, "serves")
        crew = world.loop.create_task(gateway.crew.run())
        try:
            await process.stop.wait()
        finally:
            process.opened = None
            for handler in list(process.handlers):
                handler.cancel()
            crew.cancel()
            await asyncio.gather(*process.handlers, crew, return_exceptions=True)
    world.note(process.name, "has ended in order")
