"""Torture: three gateways over one PostgreSQL and one S3 under load, one of them killed every so often.

    python -m tests.torture.three_gateways [--seconds 300] [--kill-every 20] [--seed N] [--json FILE]

Workers put, match, read and delete through whichever gateway chance picks, and know what was acknowledged. One gateway
is killed (SIGKILL) every `--kill-every` seconds and started again; the second time its disk is emptied before that.
Between kills one is frozen (SIGSTOP) for longer and shorter than the lease of what it remembers.

What must hold: no wrong bytes; what was acknowledged as in S3 is readable through every gateway at once and at the end;
what was deleted or has expired is readable through none from then on; counters equal rows; nothing stays to be written,
deleted or reserved. Prints a table and, last, one line of JSON. Exit code 1 if anything did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvgw.breaker import BreakerOptions
from kvgw.client import Client, ClientOptions, connect
from kvgw.errors import KvgwError
from kvgw.model import Durability, Outcome, PutOutcome
from kvgw.reports import Registered
from tests.crash.gateway_process import GatewayProcess
from tests.support.gateways import MIB, buffers_for, format_of
from tests.support.postgres import Postgres
from tests.support.seaweed import Seaweed
from tests.support.several import Footing

NAMES = ("a", "b", "c")
WORKERS = 8
CHUNK_BYTES = 16 * 1024
CONTENTS = 300
"""So many contents are shared by all keys: entries come to share chunks, and deletions meet them."""
SHORT_TTL_S = 2.0
SETTLE_S = 120.0
PAUSE_S = 0.02
FREEZE_S = 2.0
"""Gateways are frozen for at most so long: less than the deadline of a read."""
READ_S, WRITE_S = 5.0, 10.0
FINAL_BATCH = 32

UNSETTLED = """
SELECT 'to be written', count(*) FROM placement WHERE state IN ('due', 'writing') UNION ALL
SELECT 'to be deleted', count(*) FROM placement WHERE state = 'doomed' UNION ALL
SELECT 'dying chunks', count(*) FROM chunk WHERE state <> 'live' UNION ALL
SELECT 'reservations', count(*) FROM reservation
"""
END_LEASES = (
    "UPDATE placement SET lease_ms = 0 WHERE state = 'writing' AND owner NOT IN (SELECT boot_id FROM gateway_process) "
    "RETURNING 1",
    "UPDATE placement SET not_before_ms = 0 WHERE state IN ('due', 'doomed') RETURNING 1",
    "UPDATE reservation SET expires_ms = 0 RETURNING 1",
)
"""What time would do: leases of killed processes run out, and writes that failed are tried again."""


def content_of(key: bytes) -> bytes:
    """What `key` holds: it follows from its name."""
    number = random.Random(key).randrange(CONTENTS)
    return random.Random(number).randbytes(CHUNK_BYTES)


@dataclass
class Ledger:
    """What was acknowledged, and what did not hold."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    in_s3: set[bytes] = field(default_factory=set)
    on_nvme: set[bytes] = field(default_factory=set)
    gone: set[bytes] = field(default_factory=set)
    """Deleted or expired for certain."""

    def breach(self, kind: str, what: str) -> None:
        self.wrong[kind] += 1
        if len(self.examples) < 20:
            self.examples.append(f"{kind}: {what}")


class Worker:
    """One client of every gateway; its keys are its own, their contents everybody's."""

    def __init__(self, name: str, seed: str, clients: Sequence[tuple[str, Client]], ledger: Ledger) -> None:
        self._name = name
        self._rng = random.Random(f"{seed}/{name}")
        self._clients = clients
        self._ledger = ledger
        self._registered: Registered | None = None
        self._count = 0
        self._mine: list[bytes] = []
        self._short: list[tuple[float, bytes]] = []

    async def run(self, until: float) -> None:
        while time.monotonic() < until:
            await asyncio.sleep(PAUSE_S * self._rng.random())
            gateway, client = self._rng.choice(self._clients)
            if self._registered is None:
                self._registered = await self._register(client)
                continue
            await self._step(gateway, client, self._registered)

    async def _register(self, client: Client) -> Registered | None:
        try:
            return await client.register(format_of(CHUNK_BYTES), deadline_s=WRITE_S)
        except KvgwError:
            self._ledger.counts["outages"] += 1
            return None

    async def _step(self, gateway: str, client: Client, registered: Registered) -> None:
        now = time.monotonic()
        if self._short and self._short[0][0] < now:
            key = self._short.pop(0)[1]
            self._ledger.gone.add(key)
            await self._check_gone(gateway, client, registered, key, "after its expiry")
            return
        dice = self._rng.random()
        if dice < 0.45 or not self._mine:
            await self._put(gateway, client, registered)
        elif dice < 0.85:
            keys = self._rng.sample(self._mine, min(len(self._mine), self._rng.randint(1, 4)))
            self._ledger.counts["matched keys"] += (await client.match(registered, keys)).count
            await self._read(gateway, client, registered, keys)
        else:
            await self._delete(gateway, client, registered)

    async def _put(self, gateway: str, client: Client, registered: Registered) -> None:
        keys = [self._new_key() for _ in range(self._rng.randint(1, 3))]
        durability = self._rng.choices(list(Durability), (15, 25, 60))[0]
        short = durability is Durability.S3 and self._rng.random() < 0.1
        if self._mine and not short and self._rng.random() < 0.2:
            keys.append(self._rng.choice(self._mine))
        report = await client.put(
            registered,
            keys,
            [content_of(key) for key in keys],
            durability=durability,
            ttl=SHORT_TTL_S if short else None,
        )
        self._ledger.counts["puts"] += 1
        if report.outcome is Outcome.OUTAGE:
            self._ledger.counts["outages"] += 1
            return
        held = [
            key for key, one in zip(keys, report.outcomes, strict=True) if one in (PutOutcome.STORED, PutOutcome.HAVE)
        ]
        self._ledger.counts["chunks acknowledged"] += len(held)
        if len(held) < len(keys):
            self._ledger.breach("refused without reason", f"{report.outcomes} through {gateway}: {report.reason}")
        if short:
            self._short += [(time.monotonic() + SHORT_TTL_S + 0.5, key) for key in held]
            return
        self._mine += [key for key in held if key not in self._mine]
        if durability is Durability.S3:
            self._ledger.in_s3.update(held)
            await self._read(*self._rng.choice(self._clients), registered, held)
        elif durability is Durability.NVME:
            self._ledger.on_nvme.update(held)

    async def _read(self, gateway: str, client: Client, registered: Registered, keys: Sequence[bytes]) -> None:
        found = await read(client, registered, keys)
        self._ledger.counts["gets"] += 1
        if found is None:
            self._ledger.counts["outages"] += 1
            return
        for key, chunk in zip(keys, found, strict=True):
            self._ledger.counts["hits" if chunk is not None else "misses"] += 1
            judge(self._ledger, key, chunk, f"through {gateway}")

    async def _delete(self, gateway: str, client: Client, registered: Registered) -> None:
        key = self._mine.pop(self._rng.randrange(len(self._mine)))
        # From here on it may be gone, whatever is answered.
        self._ledger.in_s3.discard(key)
        self._ledger.on_nvme.discard(key)
        self._ledger.counts["deletes"] += 1
        try:
            await client.delete(registered, [key], deadline_s=WRITE_S)
        except KvgwError:
            self._ledger.counts["outages"] += 1
            return
        self._ledger.gone.add(key)
        await self._check_gone(
            *self._rng.choice(self._clients), registered, key, f"after its deletion through {gateway}"
        )

    async def _check_gone(self, gateway: str, client: Client, registered: Registered, key: bytes, when: str) -> None:
        # Every gateway is asked: each remembers for itself.
        matches = await asyncio.gather(*(one.match(registered, [key]) for _, one in self._clients))
        for (name, _), match in zip(self._clients, matches, strict=True):
            if match.count:
                self._ledger.breach("matched after its end", f"{key!r} through {name} {when}")
        found = await read(client, registered, [key])
        self._ledger.counts["reads of what is gone"] += 1
        if found is not None and found[0] is not None:
            self._ledger.breach("read after its end", f"{key!r} through {gateway} {when}")

    def _new_key(self) -> bytes:
        self._count += 1
        return f"{self._name}-{self._count}".encode()


async def read(client: Client, registered: Registered, keys: Sequence[bytes]) -> list[bytes | None] | None:
    """For each key its chunk or None; None in all when that was an outage."""
    buffers = buffers_for(registered, len(keys))
    report = await client.get(registered, keys, buffers)
    if report.outcome is Outcome.OUTAGE:
        return None
    hits = {hit.index for hit in report.hits}
    return [bytes(buffer) if index in hits else None for index, buffer in enumerate(buffers)]


def judge(ledger: Ledger, key: bytes, chunk: bytes | None, where: str) -> None:
    """Hold what was read against what must be."""
    if chunk is not None and chunk != content_of(key):
        ledger.breach("wrong bytes", f"{key!r} {where}")
    if chunk is None and key in ledger.in_s3:
        ledger.breach("lost from S3", f"{key!r} {where}")


class Torture:
    """The whole set-up."""

    def __init__(self, folder: Path, seconds: float, kill_every: float, seed: str) -> None:
        self._folder = folder
        self._seconds = seconds
        self._kill_every = kill_every
        self._seed = seed
        self._rng = random.Random(seed)
        self.ledger = Ledger()
        self.gateways: dict[str, GatewayProcess] = {}

    def run(self) -> dict[str, Any]:
        """Run to the end; the figures."""
        with ExitStack() as stack:
            postgres = stack.enter_context(Postgres())
            seaweed = stack.enter_context(Seaweed(self._folder / "s3"))
            shared = Footing(postgres, seaweed, self._folder)
            shared.prepare()
            for name in NAMES:
                (self._folder / name).mkdir()
                gateway = GatewayProcess(self._folder / name / "data", **settings_of(shared))
                self.gateways[name] = stack.enter_context(gateway)
            return asyncio.run(self._body(shared))

    async def _body(self, shared: Footing) -> dict[str, Any]:
        started = time.monotonic()
        async with AsyncExitStack() as stack:
            clients = [(name, await stack.enter_async_context(self._client([name]))) for name in NAMES]
            fleet = ("the fleet", await stack.enter_async_context(self._client(NAMES)))
            workers = [Worker(f"w{n}", self._seed, [*clients, fleet], self.ledger) for n in range(WORKERS)]
            ends = started + self._seconds
            async with asyncio.TaskGroup() as group:
                for worker in workers:
                    group.create_task(worker.run(ends))
                group.create_task(self._kill_now_and_then(ends))
                group.create_task(self._freeze_now_and_then(ends))
            settled_s = await self._settle(shared)
            registered = await clients[0][1].register(format_of(CHUNK_BYTES))
            await self._look_at_everything(clients, registered)
        try:
            await shared.check_quota()
        except AssertionError as error:
            self.ledger.breach("counters", str(error))
        return {
            "seconds": round(self._seconds),
            "seed": self._seed,
            **dict(sorted(self.ledger.counts.items())),
            "seconds to settle": round(settled_s, 1),
            "in S3 at the end": len(self.ledger.in_s3),
            "gone at the end": len(self.ledger.gone),
            "breaches": dict(self.ledger.wrong),
            "examples": self.ledger.examples,
        }

    def _client(self, names: Sequence[str]) -> Client:
        breaker = BreakerOptions() if len(names) > 1 else BreakerOptions(failures=2**62)
        options = ClientOptions(read_deadline_s=READ_S, write_deadline_s=WRITE_S, breaker=breaker)
        return connect([f"unix:{self.gateways[name].socket}" for name in names], options=options)

    async def _kill_now_and_then(self, ends: float) -> None:
        for number in range(1, 1_000_000):
            wait_s = self._kill_every if number > 1 else self._kill_every / 2
            if time.monotonic() + wait_s > ends:
                return
            await asyncio.sleep(wait_s)
            name = self._rng.choice(NAMES)
            await asyncio.to_thread(self.gateways[name].kill)
            self.ledger.counts["kills"] += 1
            if number == 2:
                shutil.rmtree(self._folder / name / "data" / "nvme")
                self.ledger.counts["disks emptied"] += 1
            await asyncio.to_thread(self.gateways[name].start)

    async def _freeze_now_and_then(self, ends: float) -> None:
        while time.monotonic() + 2 * FREEZE_S < ends:
            await asyncio.sleep(FREEZE_S * self._rng.random())
            gateway = self.gateways[self._rng.choice(NAMES)]
            if gateway.pause():
                self.ledger.counts["freezes"] += 1
                await asyncio.sleep(FREEZE_S * self._rng.random())
                gateway.resume()

    async def _settle(self, shared: Footing) -> float:
        """Wait until nothing is left to be done; how long it took."""
        started = time.monotonic()
        while True:
            await asyncio.sleep(1.0)
            for statement in END_LEASES:
                await shared.rows(statement)
            left = {what: count for what, count in await shared.rows(UNSETTLED) if count}
            if not left:
                return time.monotonic() - started
            if time.monotonic() - started > SETTLE_S:
                self.ledger.breach("never settles", str(left))
                return SETTLE_S

    async def _look_at_everything(self, clients: Sequence[tuple[str, Client]], registered: Registered) -> None:
        """Through every gateway: all that is in S3 is there, nothing that is gone is, and nothing is wrong."""
        for kind, keys in (("kept", sorted(self.ledger.in_s3)), ("gone", sorted(self.ledger.gone))):
            for (name, client), start in ((one, at) for one in clients for at in range(0, len(keys), FINAL_BATCH)):
                batch = keys[start : start + FINAL_BATCH]
                found = await read(client, registered, batch)
                if found is None:
                    self.ledger.breach("no answer at the end", f"{name} from key {start}")
                    continue
                for key, chunk in zip(batch, found, strict=True):
                    judge(self.ledger, key, chunk, f"through {name} at the end")
                    if kind == "gone" and chunk is not None:
                        self.ledger.breach("read after its end", f"{key!r} through {name} at the end")
        alive = await read_all(clients[0][1], registered, sorted(self.ledger.on_nvme))
        self.ledger.counts["on NVMe only, asked for"] = len(alive)
        self.ledger.counts["on NVMe only, still there"] = sum(chunk is not None for chunk in alive)


async def read_all(client: Client, registered: Registered, keys: Sequence[bytes]) -> list[bytes | None]:
    found: list[bytes | None] = []
    for start in range(0, len(keys), FINAL_BATCH):
        batch = keys[start : start + FINAL_BATCH]
        found += await read(client, registered, batch) or [None] * len(batch)
    return found


def settings_of(shared: Footing) -> dict[str, object]:
    """The gateways' settings as variables: small, and in a hurry."""
    return {
        "CATALOG__URL": shared.url(),
        "KEYS__DIR": shared.folder / "keys",
        "KEYS__STORE": "s3",
        "S3__BUCKET": shared.s3.bucket,
        "S3__PREFIX": "torture/",
        "S3__ENDPOINT": shared.s3.endpoint,
        "S3__ADDRESSING": "path",
        "S3__ACCESS_KEY_ID": shared.s3.access_key,
        "S3__SECRET_ACCESS_KEY_FILE": shared.folder / "secret",
        "STAGING__BYTES": 32 * MIB,
        "NVME__CAPACITY_BYTES": 16 * MIB,
        "NVME__MIN_FREE_BYTES": 0,
        "MAINTENANCE__OUTBOX_SECONDS": 0.5,
        "MAINTENANCE__SWEEP_SECONDS": 1.0,
        "MAINTENANCE__EVICT_SECONDS": 0.5,
        "MAINTENANCE__HEARTBEAT_SECONDS": 1.0,
        "MAINTENANCE__ORPHANS_SECONDS": 15.0,
    }


def table(figures: dict[str, Any]) -> str:
    rows = [(name, value) for name, value in figures.items() if not isinstance(value, dict | list)]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value:>12}" for name, value in rows]
    lines += [f"BROKEN: {kind} × {count}" for kind, count in figures["breaches"].items()] or ["everything held"]
    return "\n".join([*lines, *(f"  {example}" for example in figures["examples"])])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--kill-every", type=float, default=20.0)
    parser.add_argument("--seed", default=secrets.token_hex(4))
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    chosen = parser.parse_args(arguments)
    print(f"seed {chosen.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="kvgw-torture-") as folder:
        torture = Torture(Path(folder), chosen.seconds, chosen.kill_every, chosen.seed)
        figures = torture.run()
        print(table(figures))
        if figures["breaches"]:
            for name, gateway in torture.gateways.items():
                print(f"--- the last words of {name}:\n{gateway.text()}")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(figures, indent=1))
    print(json.dumps(figures))
    return 1 if figures["breaches"] else 0


if __name__ == "__main__":
    sys.exit(main())
