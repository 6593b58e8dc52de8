"""Wrapped namespace keys in S3: one answer for all gateways, and destruction that no other gateway can undo."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit
from uuid import UUID, uuid4

import pytest

from kvgw.settings import S3Settings
from kvgw.sharedkeys import S3KeyStore
from kvgw.wiring.tiers import s3_options
from storage.errors import TierUnavailable
from storage.s3 import S3Objects
from tenancy.errors import KeyDamaged, KeyGone, KeyUnavailable
from tenancy.keys.keystore import encode_versions
from tests.support.aio import aio
from tests.support.seaweed import S3Server, free_ports

NAMESPACE = UUID(int=7)
OURS, THEIRS = {1: b"w" * 60}, {1: b"v" * 60}


class Objects:
    """`S3Objects` in memory; `between` runs before each call, as another gateway would."""

    place = "the test's memory"

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.between: Callable[[str, str], None] = lambda _call, _name: None
        self.away = False

    def _enter(self, call: str, name: str) -> None:
        self.between(call, name)
        if self.away:
            raise TierUnavailable("planned")

    async def get(self, name: str) -> bytes | None:
        self._enter("get", name)
        return self.held.get(name)

    async def put(self, name: str, data: bytes) -> None:
        self._enter("put", name)
        self.held[name] = data

    async def put_first(self, name: str, data: bytes) -> bool:
        self._enter("put_first", name)
        return self.held.setdefault(name, data) is data

    async def delete(self, name: str) -> None:
        self._enter("delete", name)
        self.held.pop(name, None)


def store_over(objects: Objects) -> S3KeyStore:
    return S3KeyStore(cast("S3Objects", objects))


@pytest.mark.s3
@aio
async def test_the_key_stores_promises_hold_on_a_real_server(
    seaweed: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    dead = f"http://127.0.0.1:{free_ports('proxy')['proxy']}"
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, dead)  # R39: a proxy of the environment gets nothing unless it was said
    secret = tmp_path / "secret"
    secret.write_text(seaweed.secret_key)
    settings = S3Settings(
        bucket=seaweed.bucket,
        endpoint=seaweed.endpoint,
        addressing="path",
        access_key_id=seaweed.access_key,
        secret_access_key_file=str(secret),
    )
    options = replace(s3_options(settings), prefix=f"keys-{uuid4()}/")
    async with S3Objects(options) as mine, S3Objects(options) as other:
        here, there = S3KeyStore(mine), S3KeyStore(other)
        with pytest.raises(KeyUnavailable, match="no mark that it was destroyed"):
            await here.read(NAMESPACE)
        with pytest.raises(KeyUnavailable):
            await here.replace(NAMESPACE, OURS)
        assert await here.create(NAMESPACE, OURS) == OURS
        assert await there.create(NAMESPACE, THEIRS) == OURS, "the first one's key stands, and both have it"
        await there.replace(NAMESPACE, OURS | {2: b"u" * 60})
        assert await here.read(NAMESPACE) == OURS | {2: b"u" * 60}
        await mine.put(f"{UUID(int=8)}.key", b"nonsense")
        with pytest.raises(KeyDamaged):
            await there.read(UUID(int=8))
        for _ in range(2):
            await there.destroy(NAMESPACE)
        for again in (here.read(NAMESPACE), here.create(NAMESPACE, OURS), here.replace(NAMESPACE, OURS)):
            with pytest.raises(KeyGone):
                await again
        assert await mine.get(f"{NAMESPACE}.key") is None


@pytest.mark.parametrize("write", ["create", "replace"])
@aio
async def test_a_key_written_while_another_gateway_destroys_it_does_not_stay(write: str) -> None:
    """The destruction of another gateway lands before each step of the write in turn."""
    step = 0
    for step in range(1, 20):
        objects = Objects()
        if write == "replace":
            objects.held[f"{NAMESPACE}.key"] = encode_versions(OURS)
        calls = 0

        def destroyed_by_another(_call: str, _name: str, objects: Objects = objects, step: int = step) -> None:
            nonlocal calls
            calls += 1
            if calls == step:
                objects.held[f"{NAMESPACE}.gone"] = b""
                objects.held.pop(f"{NAMESPACE}.key", None)

        objects.between = destroyed_by_another
        store = store_over(objects)
        try:
            await (store.create if write == "create" else store.replace)(NAMESPACE, THEIRS)
        except (KeyGone, KeyUnavailable):
            assert f"{NAMESPACE}.key" not in objects.held, f"destroyed before step {step}, and there again"
        else:
            assert calls < step or f"{NAMESPACE}.key" not in objects.held
        if calls < step:
            break
    assert step >= 4, "every step of the write had its turn"


@aio
async def test_a_store_that_does_not_answer_says_nothing_about_the_key() -> None:
    objects = Objects()
    store = store_over(objects)
    await store.create(NAMESPACE, OURS)
    objects.away = True
    for call in (
        store.read(NAMESPACE),
        store.create(NAMESPACE, OURS),
        store.replace(NAMESPACE, OURS),
        store.destroy(NAMESPACE),
    ):
        with pytest.raises(KeyUnavailable, match="planned"):
            await call
    objects.away = False
    assert await store.read(NAMESPACE) == OURS
    objects.between = lambda call, _name: setattr(objects, "away", call == "delete")
    with pytest.raises(KeyUnavailable, match="may still be there"):
        await store.destroy(NAMESPACE)
    objects.between, objects.away = lambda _call, _name: None, False
    with pytest.raises(KeyGone):
        await store.read(NAMESPACE)
    await store.destroy(NAMESPACE)
    assert objects.held == {f"{NAMESPACE}.gone": b""}, "asked again, it is erased"


@pytest.mark.s3
@aio
async def test_an_upload_that_ends_early_leaves_the_key_as_it_was(seaweed: S3Server, tmp_path: Path) -> None:
    """A gateway that is killed between the headers and the body; this server takes it for an empty object."""
    target = urlsplit(seaweed.endpoint)
    cuts, links = False, set[asyncio.Task[Any] | None]()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        links.add(asyncio.current_task())
        there, to = await asyncio.open_connection(target.hostname, target.port)
        back = asyncio.create_task(_pump(there, writer))
        while data := await reader.read(65536):
            if cuts:
                to.write(data[: data.index(b"\r\n\r\n") + 4].replace(b"Expect: 100-continue\r\n", b""))
                break
            to.write(data)
        to.write_eof()
        await back
        to.close()
        await to.wait_closed()

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        (tmp_path / "secret").write_text(seaweed.secret_key)
        settings = S3Settings(
            bucket=seaweed.bucket,
            endpoint=f"http://127.0.0.1:{port}",
            addressing="path",
            access_key_id=seaweed.access_key,
            secret_access_key_file=str(tmp_path / "secret"),
        )
        options = replace(s3_options(settings), prefix=f"keys-{uuid4()}/", attempts_max=1, request_timeout_s=5.0)
        async with S3Objects(options) as objects:
            await objects.put("generation", b"12")
            cuts = True
            with pytest.raises(TierUnavailable):
                await objects.put("generation", b"13")
            cuts = False
            assert await objects.get("generation") == b"12"
        await asyncio.wait_for(asyncio.gather(*filter(None, links)), 20)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()
    await writer.wait_closed()
