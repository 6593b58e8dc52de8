"""The whole life of tenants on one gateway, from the first token to the deletion receipt and a forged audit record.

    python docs/walkthrough/walkthrough.py

Prints every command with its answer, as in the operator's guide; nothing is left behind. Exit code 0: every step ended
as it must; 1: one did not.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import kvgw
from kvgw.kvformat import LayerGroup
from kvgw.model import Label, PutOutcome

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "demo"))

CHUNK = 4096
WAIT = "150"
"""Seconds that a receipt may take. A write that failed while its chunk was deleted keeps its lease of two minutes."""

MODEL = kvgw.KVFormat(
    model="example/model",
    weights=b"w" * 32,
    tokenizer=b"t" * 32,
    kv_dtype="float16",
    kv_quantisation=None,
    adapter=None,
    adapter_digest=None,
    positions=("kind", "rope", "theta", 10000.0),
    attention=(LayerGroup("mha", 1, kv_heads=1, head_dim=CHUNK // 64),),
    layout="layer,kv,token,head,dim",
    tokens_per_chunk=16,
    engine="example",
    engine_abi="1",
    parallel=(1, 0, 1, 0, 1, 0),
    multimodal=None,
    extra=(),
)


class Failed(Exception):
    """A step did not end as it must."""


class Command(Protocol):
    """Runs ``kvgw`` with arguments; its exit code and what it printed."""

    def __call__(self, arguments: list[str]) -> tuple[int, str]: ...


@dataclass
class Walk:
    """One walk through all steps, against a gateway that runs."""

    command: Command
    endpoint: str
    folder: Path
    forge: Callable[[int], None]
    """Changes the audit record of this number behind the gateway's back."""
    say: Callable[[str], None] = print
    tokens: dict[str, str] = field(default_factory=dict)

    def kvgw(self, *arguments: str, code: int = 0) -> str:
        """Run a command, show it, and return what it printed. Raises `Failed` for another exit code than `code`."""
        self.say(f"$ kvgw {' '.join(arguments)}")
        ended, printed = self.command([*arguments, "--data", str(self.folder)])
        self.say("\n".join(line.rstrip() for line in printed.rstrip().splitlines()))
        if ended != code:
            raise Failed(f"kvgw {arguments[0]} ended with {ended}, not {code}: {printed.strip()}")
        return printed

    def value(self, *arguments: str) -> Any:
        """Run a command for its JSON, and show it without that."""
        self.say(f"$ kvgw {' '.join(arguments)}")
        ended, printed = self.command([*arguments, "--json", "--data", str(self.folder)])
        if ended:
            raise Failed(f"kvgw {arguments[0]} ended with {ended}: {printed}")
        return json.loads(printed)

    def client(self, tenant: str, namespace: str = "") -> kvgw.Client:
        options = kvgw.ClientOptions(namespace=namespace, on_error="raise")
        return kvgw.connect(self.endpoint, token=self.tokens[tenant], options=options)

    def do(self, what: str, body: Callable[[], Awaitable[str]]) -> None:
        """Run an engine's calls, and say what came of them."""

        async def bounded() -> str:
            async with asyncio.timeout(120):
                return await body()

        self.say(f"# {what}: {asyncio.run(bounded())}")


def must(true: object, sentence: str) -> None:
    """Raises `Failed` with the sentence unless it holds."""
    if not true:
        raise Failed(sentence)


def chunk(text: str) -> bytes:
    """A chunk's bytes, told apart by its text."""
    return (text.encode() + b"." * CHUNK)[:CHUNK]


def keys(prompt: str, count: int) -> list[bytes]:
    return [f"{prompt}/{index}".encode() for index in range(count)]


async def store(client: kvgw.Client, prompt: str, count: int, **options: Any) -> list[PutOutcome]:
    """Store a prompt's chunks; what became of each."""
    async with client:
        registered = await client.register(MODEL)
        chunks = [chunk(f"{prompt} {index}") for index in range(count)]
        return list((await client.put(registered, keys(prompt, count), chunks, **options)).outcomes)


async def matched(client: kvgw.Client, prompt: str, count: int, public: tuple[str, ...] = ()) -> int:
    async with client:
        registered = await client.register(MODEL)
        return (await client.match(registered, keys(prompt, count), public=public)).count


def two_tenants(walk: Walk) -> None:
    """Two tenants, each with a token for its engines"""
    for tenant in ("acme", "globex"):
        walk.value("tenant", "create", tenant)
        made = walk.value("token", "create", "engines", "--tenant", tenant)
        walk.tokens[tenant] = made["token"]

    async def isolated() -> str:
        await store(walk.client("acme"), "secret plans", 3)
        mine, theirs = [await matched(walk.client(tenant), "secret plans", 3) for tenant in ("acme", "globex")]
        must((mine, theirs) == (3, 0), f"acme has {mine}, globex {theirs}")
        return "acme stores a prompt of 3 chunks; the same prompt matches 3 for acme and 0 for globex"

    walk.do("Isolation", isolated)


def hard_quota(walk: Walk) -> None:
    """A quota that holds"""
    walk.value("namespace", "create", "small", "--tenant", "acme", "--limit-objects", "2")

    async def full() -> str:
        outcomes = await store(walk.client("acme", "small"), "long", 3)
        must(outcomes == ["stored", "stored", "over_quota"], f"{outcomes}")
        return "of 3 chunks the leading 2 are stored, the third is over_quota"

    walk.do("Quota", full)
    walk.kvgw("namespace", "list", "--tenant", "acme")


def expiry(walk: Walk) -> None:
    """A life that ends by itself"""

    async def expired() -> str:
        await store(walk.client("acme"), "brief", 1, ttl="1s")
        before = await matched(walk.client("acme"), "brief", 1)
        await asyncio.sleep(1.2)
        after = await matched(walk.client("acme"), "brief", 1)
        must((before, after) == (1, 0), f"{before} before, {after} after")
        return "stored with a TTL of 1s, it matches; 1.2 s later it does not"

    walk.do("Expiry", expired)


def shared_prefix(walk: Walk) -> None:
    """A public prefix with a private suffix"""
    walk.value("namespace", "create", "prompts", "--tenant", "acme", "--reader", "globex")

    async def shared() -> str:
        await store(walk.client("acme", "prompts"), "system", 2)
        async with walk.client("globex") as globex:
            registered = await globex.register(MODEL)
            whole = [*keys("system", 2), b"question"]
            await globex.put(registered, whole[2:], [chunk("question")], parent=whole[1], depth=2)
            match = await globex.match(registered, whole, public=["acme/prompts"])
            alone = await globex.match(registered, whole)
        must((match.count, alone.count) == (3, 0), f"{match.count} with, {alone.count} without")
        return f"globex matches 3 chunks, from {list(match.namespaces)}; without asking for acme/prompts, 0"

    walk.do("Sharing", shared)


def rotation(walk: Walk) -> None:
    """Keys rotated under traffic"""

    async def traffic() -> str:
        async with walk.client("acme") as client:
            registered = await client.register(MODEL)
            misses = reads = 0
            rotating = asyncio.create_task(
                asyncio.to_thread(walk.value, "keys", "rotate", "default", "--tenant", "acme")
            )
            while not rotating.done() or reads < 20:
                name = b"traffic/%d" % reads
                await client.put(registered, [name], [chunk(f"traffic {reads}")])
                match = await client.match(registered, [name])
                old = await client.match(registered, keys("secret plans", 3))
                misses += (match.count != 1) + (old.count != 3)
                reads += 1
            epoch = (await rotating)["epoch"]
        must((misses, epoch) == (0, 2), f"{misses} misses, epoch {epoch}")
        return f"epoch {epoch} seals what is new; no miss, neither of what was there nor of what came meanwhile"

    walk.do("Traffic", traffic)
    walk.kvgw("keys", "status", "default", "--tenant", "acme")


def deletion(walk: Walk) -> None:
    """A user's right to delete, with a receipt"""

    async def labelled() -> str:
        for user in ("alice", "bob"):
            await store(walk.client("acme"), f"chat of {user}", 2, labels=[Label("user", user)])
        return "two chunks each of alice and bob, labelled with their user"

    walk.do("Labels", labelled)
    job = walk.value("delete", "--tenant", "acme", "--label", "user=alice", "--wait", WAIT)
    receipt = walk.folder / "receipt.json"
    walk.kvgw("deletions", "show", job["id"], "--tenant", "acme", "--receipt", str(receipt))
    walk.kvgw("verify-receipt", str(receipt))

    async def gone() -> str:
        counts = [await matched(walk.client("acme"), f"chat of {user}", 2) for user in ("alice", "bob")]
        must(counts == [0, 2], f"{counts}")
        return "alice's chat matches 0, bob's still 2"

    walk.do("After it", gone)
    key, canonical = keys("chat of alice", 1)[0].hex(), MODEL.canonical().hex()
    (why,) = walk.value("explain", key, "--tenant", "acme", "--canonical", canonical)["answers"]
    must(why["why"] == "deleted", f"explain says {why}")


def shredding(walk: Walk) -> None:
    """A namespace made unreadable for good"""
    walk.kvgw("keys", "shred", "small", "--tenant", "acme", "--confirm", "small")

    async def refused() -> str:
        try:
            await matched(walk.client("acme", "small"), "long", 2)
        except kvgw.RequestRefused as error:
            return f"refused: {error}"
        raise Failed("the shredded namespace still answers")

    walk.do("After it", refused)


def audit(walk: Walk) -> None:
    """An audit log that shows when it was touched"""
    walk.kvgw("audit", "list", "--limit", "5")
    walk.kvgw("audit", "verify")
    records = walk.value("audit", "list", "--limit", "1000")
    forged = next(one["seq"] for one in records if one["action"] == "namespace.shred")
    walk.forge(forged)
    walk.say(f"# Somebody edits record {forged} in the database by hand")
    printed = walk.kvgw("audit", "verify", code=1)
    must(f"record {forged}" in printed, f"verify does not name record {forged}")


STEPS = (two_tenants, hard_quota, expiry, shared_prefix, rotation, deletion, shredding, audit)


def take(walk: Walk) -> None:
    """Take every step. Raises `Failed`."""
    for number, step in enumerate(STEPS, start=1):
        walk.say(f"\n## {number}. {step.__doc__}\n")
        step(walk)


def forge_sqlite(catalog: Path) -> Callable[[int], None]:
    """Edits an audit record as somebody with the file could: the trigger first, then the row."""

    def forge(number: int) -> None:
        with sqlite3.connect(catalog, timeout=10) as connection:
            connection.execute("DROP TRIGGER audit_record_no_update")
            connection.execute("UPDATE audit_record SET actor = 'nobody' WHERE seq = ?", (number,))
        connection.close()

    return forge


def main() -> int:
    from gateway import DemoGateway

    wide = {**os.environ, "COLUMNS": "116"}
    program = Path(sys.executable).with_name("kvgw")

    def command(arguments: list[str]) -> tuple[int, str]:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False, env=wide)
        return done.returncode, done.stdout + done.stderr

    with tempfile.TemporaryDirectory(prefix="kvgw-walk-") as work:
        folder = Path(work) / "gateway"
        with DemoGateway(folder, Path(work) / "gateway.log") as gateway:
            try:
                take(Walk(command, gateway.endpoint, folder, forge_sqlite(folder / "catalog.db")))
            except Failed as error:
                sys.stderr.write(f"walkthrough: {error}\n")
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
