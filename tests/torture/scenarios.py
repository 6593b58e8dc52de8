"""What is done while a fault is due at the N-th call: each a few steps on a gateway with something in it."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Final

from kvgw.model import Durability
from tenancy.audit.chain import Act
from tests.support.admin import Admin
from tests.support.gateways import take_up_backlog
from tests.torture.bench import CHUNK_BYTES, DEFAULT, GRACE_S, SECOND, Bench

ACT: Final = Act(actor="owner", action="key.test")

Scenario = Callable[[Bench], Awaitable[None]]


async def stock(bench: Bench) -> None:
    """What every scenario finds: chunks in both tiers, on disk alone, and in another namespace."""
    await bench.put(["a", "b", "c"], Durability.S3)
    await take_up_backlog(bench.opened.crew)
    await _leave_to_s3(bench, 2)
    await bench.put(["d", "e", "a-again"], Durability.NVME)
    await bench.put(["a", "s"], Durability.S3, namespace=SECOND)


async def _leave_to_s3(bench: Bench, count: int) -> None:
    """So many chunks leave NVMe, as an eviction lets them."""
    scope, rooms = bench.scopes[DEFAULT], bench.opened.rooms
    placed = await bench.house.rows("SELECT blob_id FROM placement WHERE tier = 'nvme' AND state = 'ok'")
    await rooms.catalog.evict_nvme(scope, [bytes(row[0]) for row in placed[:count]], rooms.time.now_ms())
    await bench.opened.crew.sweep.collect(scope)


async def put(bench: Bench) -> None:
    await bench.put(["n1", "n2"], Durability.NVME)
    await bench.put(["o1", "a", "b-again"], Durability.S3)
    await bench.put(["p1"], Durability.STAGED)
    await bench.put(["n1", "p1"], Durability.NVME)
    await bench.get(["n1", "n2", "o1", "a", "b-again", "p1"])


async def get(bench: Bench) -> None:
    await bench.get(["a", "b", "d", "nobody"])
    bench.forget_staging()
    await bench.get(["a", "b", "d", "nobody"])
    await bench.get(["a", "s"], SECOND)


async def delete(bench: Bench) -> None:
    await bench.delete(["a", "d"])
    await bench.get(["a", "a-again", "d", "e"])
    await bench.step(bench.opened.crew.sweep_everywhere())
    await bench.delete(["a-again", "nobody"])
    await bench.step(bench.opened.crew.sweep_everywhere())
    await bench.get(["a", "a-again", "d", "e"])


async def expiry(bench: Bench) -> None:
    await bench.put(["t1", "t2"], Durability.NVME, ttl=20.0)
    await bench.put(["t3", "a-late"], Durability.S3, ttl=20.0)
    await bench.expire(21.0, ["t1", "t2", "t3", "a-late"])
    await bench.get(["t1", "t3", "a-late", "a"])
    await bench.step(bench.opened.crew.sweep_everywhere())
    await bench.get(["t1", "t3", "a-late", "a"])


async def rotation(bench: Bench) -> None:
    custodian, scope = bench.opened.custodian, bench.scopes[DEFAULT]
    await bench.step(custodian.rotate_data_key(scope, ACT))
    bench.opened.directory.forget(scope.tenant)
    await bench.put(["r1"], Durability.NVME)
    await bench.step(custodian.rotate_namespace_key(scope, ACT))
    bench.forget_staging()
    await bench.get(["a", "d", "r1"])
    await bench.step(custodian.rotate_root_key(ACT, scope.tenant))
    await bench.step(custodian.rewrap(ACT, scope.tenant, retire=True))
    await bench.get(["a", "d", "r1"])


async def shred(bench: Bench) -> None:
    scope = bench.scopes[SECOND]

    async def work() -> None:
        bench.tell("doubt", SECOND, ["a", "s"])
        await bench.opened.custodian.shred(scope, ACT)
        bench.tell("gone", SECOND, ["a", "s"])

    await bench.step(work())
    await bench.step(bench.opened.crew.keys.watch())
    await bench.get(["a", "s"], SECOND)
    await bench.step(bench.opened.crew.tend_keys())
    await bench.step(bench.opened.crew.sweep_everywhere())
    await bench.get(["a", "b"])


async def write_back(bench: Bench) -> None:
    await bench.put(["w1", "w2"], Durability.STAGED)
    await bench.step(take_up_backlog(bench.opened.crew))
    bench.forget_staging()
    await bench.get(["w1", "w2", "d", "e"])
    await bench.step(bench.opened.crew.drain_everywhere())


async def promotion(bench: Bench) -> None:
    """What is in S3 alone is read, and comes up to NVMe again."""
    bench.forget_staging()
    await bench.get(["a", "b", "c"])
    await bench.step(take_up_backlog(bench.opened.crew))
    bench.forget_staging()
    await bench.get(["a", "b", "c"])


async def eviction(bench: Bench) -> None:
    """A namespace goes over its share of the disk, and gives back what S3 has too."""
    await bench.step(bench.opened.crew.drain_everywhere())
    narrow = {"nvme_bytes": 4 * CHUNK_BYTES}
    asked = Admin(bench.opened).ask("PATCH", f"/v1/tenants/-/namespaces/{DEFAULT}", narrow, peer=os.geteuid())
    await bench.step(asked)
    bench.tell("doubt", DEFAULT, ["d", "e"])  # unless S3 has them by now, room may be made of them for good
    await bench.step(bench.opened.crew.evict())
    await bench.step(bench.opened.crew.sweep_everywhere())
    bench.forget_staging()
    await bench.get(["a", "b", "c", "d", "e"])


async def receipt(bench: Bench) -> None:
    """A deletion that leaves a receipt, taken from state to state."""
    admin = Admin(bench.opened)

    async def ask() -> None:
        bench.tell("doubt", SECOND, ["a", "s"])
        await admin.ask("POST", f"/v1/tenants/-/namespaces/{SECOND}/deletions", {"everything": True}, peer=os.geteuid())

    await bench.step(ask())
    for _ in range(3):
        await bench.step(bench.opened.crew.go_on_deleting())
        bench.clock.advance(GRACE_S)
        await bench.step(bench.opened.crew.heartbeat())
    await bench.get(["a", "b"], DEFAULT)


SCENARIOS: Final[dict[str, Scenario]] = {
    "put": put,
    "get": get,
    "delete": delete,
    "expiry": expiry,
    "rotation": rotation,
    "shred": shred,
    "write-back": write_back,
    "promotion": promotion,
    "eviction": eviction,
    "receipt": receipt,
}
