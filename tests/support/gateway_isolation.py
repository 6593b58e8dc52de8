"""The contract's other half: namespaces share nothing, formats never meet, and a failed call leaves nothing behind."""

from __future__ import annotations

import asyncio
import ctypes
import random
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvgw.client import Client
from kvgw.errors import Code, RequestRefused
from kvgw.kvformat import LayerGroup
from kvgw.model import NamespaceCreateRequest, NamespaceInfo, PutOutcome
from kvgw.reports import Registered
from tests.support.aio import aio
from tests.support.gateways import (
    MIB,
    House,
    Kind,
    buffers_for,
    bytes_on_disk,
    format_of,
    house,
    keys_of,
    payloads_of,
    read,
)

FIELDS: dict[str, dict[str, Any]] = {
    "model": {"model": "test/other"},
    "weights": {"weights": b"x" * 32},
    "weights as text": {"weights": "w" * 32},
    "tokenizer": {"tokenizer": b"u" * 32},
    "dtype of the same size": {"kv_dtype": "bfloat16"},
    "quantisation": {"kv_quantisation": "per-token"},
    "adapter": {"adapter": "lora", "adapter_digest": b"a" * 32},
    "positions": {"positions": ("kind", "rope", "theta", 10001.0)},
    "positions: integer for float": {"positions": ("kind", "rope", "theta", 10000)},
    "attention": {"attention": (LayerGroup("mha", 1, kv_heads=2, head_dim=32),)},
    "layout": {"layout": "layer,kv,head,token,dim"},
    "tokens per chunk": {"tokens_per_chunk": 32, "attention": (LayerGroup("mha", 1, kv_heads=1, head_dim=32),)},
    "engine": {"engine": "other"},
    "engine abi": {"engine_abi": "2"},
    "rank": {"parallel": (2, 0, 1, 0, 1, 0)},
    "multimodal": {"multimodal": "clip"},
    "extra": {"extra": (("salt", 1),)},
    "extra as text": {"extra": (("salt", "1"),)},
}

HOSTILE_NAMES = ["..", ".", "../../etc", "%2e%2e%2f", "a\0", "A", "\u202ea", "a/b", "a//b", "CON", "a b", "a\n", "é"]


class IsolationContract:
    """Inherit, and name the transport."""

    kind: ClassVar[Kind]

    def house(self, tmp_path: Path, **options: Any) -> AbstractAsyncContextManager[House]:
        return house(self.kind, tmp_path / "gw", **options)

    def written(self, tmp_path: Path) -> set[str]:
        """The names of all files, and of whatever else the house keeps things under."""
        return {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}

    @aio
    async def test_I01_a_second_namespace_gets_nothing(self, tmp_path: Path) -> None:
        async with self.house(tmp_path) as gateway:
            for name in ("a", "b"):
                await gateway.namespace(name)
            a, b = gateway.client("a"), gateway.client("b")
            in_a, in_b = await a.register(format_of()), await b.register(format_of())
            keys, payloads = keys_of(3), payloads_of(in_a, 3)
            await a.put(in_a, keys, payloads)
            assert (await read(b, in_b, keys))[1] == [None] * 3, "law 6: B misses after A's put"
            assert (await b.match(in_b, keys)).count == 0
            assert (await read(a, in_a, keys))[1] == payloads, "and A hits (the pair that keeps the test honest)"
            assert in_a.fingerprint != in_b.fingerprint
            report = await b.put(in_b, keys, payloads)
            assert report.outcomes == (PutOutcome.STORED,) * 3, "law 6: no dedup across namespaces"
            rows = await gateway.rows(
                "SELECT e.namespace_id, e.entry_key, c.chunk_id, c.blob_id FROM entry e JOIN chunk c "
                "ON c.blob_id = e.blob_id AND c.namespace_id = e.namespace_id"
            )
            assert len(rows) == 6
            assert [len({row[column] for row in rows}) for column in range(4)] == [2, 6, 6, 6]
            folder = gateway.opened.folder
            content = b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())
            assert bytes_on_disk(folder / "nvme") > 6 * in_a.chunk_bytes, "the files that were searched hold the blobs"
            for secret in (*keys, *(payload[:64] for payload in payloads)):
                assert secret not in content, "C23: neither engine keys nor plaintext are written down"

    @aio
    async def test_a_foreign_fingerprint_or_namespace_looks_missing(self, tmp_path: Path) -> None:
        async with self.house(tmp_path) as gateway:
            await gateway.namespace("a")
            a, default = gateway.client("a"), gateway.client()
            in_a = await a.register(format_of())
            with pytest.raises(RequestRefused, match="not registered"):
                await default.delete(Registered(in_a.kv_format, "", in_a.fingerprint), [b"k"])
            answers = []
            for name in ("missing", "x" * 64, *HOSTILE_NAMES):
                with pytest.raises(RequestRefused) as refusal:
                    await gateway.client(name).register(format_of())
                assert refusal.value.code is Code.NOT_FOUND, name
                answers.append(str(refusal.value))
            assert len(set(answers)) == 1, "I03: missing and forbidden look alike"
            for name in ("x" * 65, "x" * 4096, "\ud800"):
                with pytest.raises(RequestRefused, match=r"malformed|cannot be sent"):
                    await gateway.client(name).register(format_of())

    @aio
    async def test_F02_a_name_never_becomes_a_path(self, tmp_path: Path) -> None:
        async with self.house(tmp_path) as gateway:
            await gateway.namespace("taken")
            transport = gateway.client()._transport
            names = self.written(tmp_path)
            long = ["x" * 65, "x" * 4096, "\ud800"]
            for name in (*HOSTILE_NAMES, *long, "taken", ""):
                with pytest.raises(RequestRefused, match=r"cannot be a|exists already|malformed|cannot be sent"):
                    await transport.ask(NamespaceCreateRequest(name), NamespaceInfo)
            assert self.written(tmp_path) == names, "F02: no file, not even a key, for a name that is refused"
            made = await transport.ask(NamespaceCreateRequest("a.b-c_9"), NamespaceInfo)
            assert made.name == "a.b-c_9"
            new = self.written(tmp_path) - names
            assert new
            assert not [name for name in new if "a.b-c_9" in name], "and none is called by a name that is taken"

    @pytest.mark.parametrize("changed", FIELDS)
    @aio
    async def test_I07_one_changed_field_is_a_miss(self, tmp_path: Path, changed: str) -> None:
        async with self.house(tmp_path) as gateway:
            client = gateway.client()
            mine, other = await client.register(format_of()), await client.register(format_of(**FIELDS[changed]))
            assert other.fingerprint != mine.fingerprint
            keys, payloads = keys_of(2), payloads_of(mine, 2)
            await client.put(mine, keys, payloads)
            assert (await client.match(other, keys)).count == 0
            assert (await read(client, other, keys))[1] == [None, None]
            assert (await read(client, mine, keys))[1] == payloads, "and the unchanged format hits"

    @aio
    async def test_I12_reused_memory_never_shows_another_tenants_bytes(self, tmp_path: Path) -> None:
        async with self.house(tmp_path) as gateway:
            for name in ("a", "b"):
                await gateway.namespace(name)
            a, b = gateway.client("a"), gateway.client("b")
            wide = format_of(MIB)  # few of them fit: memory goes to and fro between the two
            in_a, in_b = await a.register(wide), await b.register(wide)
            canary = b"\xaaCANARY\xaa"
            chance = random.Random(12)
            for turn in range(12):
                secrets = [canary * (MIB // len(canary))] * 2
                puts = asyncio.create_task(a.put(in_a, keys_of(2, f"a{turn}"), secrets, deadline_s=5))
                await asyncio.sleep(chance.random() * 0.004)
                if turn % 2:
                    puts.cancel()
                buffers = buffers_for(in_b, 2)
                # Half of B's reads are of what is there, half of what is not: neither may show a byte of A.
                name = "b0" if turn % 4 < 2 else f"none{turn}"
                if turn == 0:
                    await b.put(in_b, keys_of(2, "b0"), payloads_of(in_b, 2, seed=7))
                await b.get(in_b, keys_of(2, name), buffers)
                assert all(canary not in buffer for buffer in buffers), "law 6: B sees a byte of A"
                await asyncio.gather(puts, return_exceptions=True)
            await gateway.check_clean()
            region = gateway.opened.rooms.staging.window_region
            left = ctypes.string_at(region.address, region.length)
            assert canary not in left, "law 7: windows are zeroed on release"

    @aio
    async def test_cancelled_calls_leak_nothing_and_disturb_nobody(self, tmp_path: Path) -> None:
        async with self.house(tmp_path) as gateway:
            client, other = gateway.client(), gateway.client()
            registered = await client.register(format_of(64 * 1024))
            keys, payloads = keys_of(8), payloads_of(registered, 8)
            await other.put(registered, keys, payloads)
            for step in range(40):
                call = _some_call(client, registered, step)
                task = asyncio.create_task(call)
                for _ in range(step):  # cancelled after as many turns of the loop: at ever later points
                    await asyncio.sleep(0)
                task.cancel()
                (_, read_back), *_ = await asyncio.gather(read(other, registered, keys), task, return_exceptions=True)  # type: ignore[misc]
                assert read_back == payloads, "I11: another client's answers are its own"
            await gateway.check_clean()
            assert (await client.put(registered, [b"after"], payloads[:1])).stored == 1, "the client works on"


async def _some_call(client: Client, registered: Registered, step: int) -> None:
    keys, payloads = keys_of(4, f"new{step}"), payloads_of(registered, 4, seed=step + 1)
    if step % 2:
        await client.put(registered, keys, payloads)
    else:
        await client.get(registered, keys_of(4), buffers_for(registered, 4))
