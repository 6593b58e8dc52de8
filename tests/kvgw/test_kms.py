"""The root key in KMS: bound to its place by the service, destroyed and unreachable told apart, nothing given away."""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest
from msgspec.structs import replace as replace_fields

from kvgw import kms
from kvgw.kms import KmsOptions, KmsRootKey
from kvgw.settings import KeySettings, SettingsError
from tenancy.audit.chain import Act
from tenancy.errors import KeyDamaged, KeyGone, KeyMismatch, KeyRefused, KeyUnavailable
from tenancy.keys.rootkey import RootKey
from tenancy.keys.secret import SecretBytes
from tenancy.keys.wrapping import RECORD_BYTES_MAX, KeyContext, remote_parts, remote_record, wrapped_by
from tests.support.aio import aio
from tests.support.fake_kms import FakeKms, arn_of
from tests.support.gateways import SMALL, format_of, house, keys_of, payloads_of, read
from tests.support.seaweed import free_ports

CONTEXT = KeyContext(UUID(int=1), UUID(int=2), "namespace", 3)
KEY = SecretBytes(b"\x5a" * 32)


@asynccontextmanager
async def root_key(server: FakeKms, arn: str, *previous: str) -> AsyncIterator[KmsRootKey]:
    options = KmsOptions(arn, tuple(previous), server.endpoint, "id", "secret")
    root = KmsRootKey(options)
    try:
        yield root
    finally:
        await root.aclose()


@aio
async def test_a_key_comes_back_in_its_own_place_only() -> None:
    """C14 at the service: the place is the encryption context."""
    async with FakeKms() as server, root_key(server, server.add_key()) as root:
        provider: RootKey = root
        record = await provider.wrap(KEY, CONTEXT)
        assert await provider.unwrap(record, CONTEXT) == KEY
        assert wrapped_by(record) == provider.key_id == arn_of(1)
        assert KEY.reveal() not in record
        assert len(record) <= RECORD_BYTES_MAX
        context = {"tenant": str(UUID(int=1)), "namespace": str(UUID(int=2)), "purpose": "namespace", "epoch": "3"}
        assert server.calls[0][1]["EncryptionContext"] == context
        for moved in (
            replace(CONTEXT, tenant=UUID(int=9)),
            replace(CONTEXT, namespace=UUID(int=9)),
            replace(CONTEXT, epoch=4),
            replace(CONTEXT, purpose="token"),
        ):
            with pytest.raises(KeyMismatch, match="made for another place"):
                await provider.unwrap(record, moved)
        altered = record[:-1] + bytes([record[-1] ^ 1])
        with pytest.raises(KeyMismatch):
            await provider.unwrap(altered, CONTEXT)
        await provider.check()
        assert await provider.retire(()) == []
        with pytest.raises(KeyRefused, match="kms_previous_key_id"):
            await provider.rotate()


@aio
async def test_only_the_configured_kms_keys_are_asked() -> None:
    async with FakeKms() as server:
        one, two = server.add_key(1), server.add_key(2)
        async with root_key(server, one) as old, root_key(server, two, one) as new, root_key(server, two) as strict:
            record = await old.wrap(KEY, CONTEXT)
            assert await new.unwrap(record, CONTEXT) == KEY
            assert wrapped_by(await new.wrap(KEY, CONTEXT)) == two
            calls = len(server.calls)
            with pytest.raises(KeyMismatch, match="kms_previous_key_id"):
                await strict.unwrap(record, CONTEXT)
            assert len(server.calls) == calls, "KMS was not even asked"
            with pytest.raises(KeyMismatch):  # one of ours, but not the one that wrapped it
                await new.unwrap(remote_record(two, remote_parts(record)[1]), CONTEXT)


@pytest.mark.parametrize(
    ("state", "error"),
    [
        ("PendingDeletion", KeyGone),
        ("PendingReplicaDeletion", KeyGone),
        (None, KeyGone),
        ("Disabled", KeyUnavailable),
        ("Unavailable", KeyUnavailable),
        ("Updating", KeyUnavailable),
    ],
)
@aio
async def test_what_was_destroyed_is_told_from_what_cannot_be_had_now(
    state: str | None, error: type[Exception]
) -> None:
    async with FakeKms() as server, root_key(server, server.add_key()) as root:
        record = await root.wrap(KEY, CONTEXT)
        if state is None:
            del server.states[root.key_id]
        else:
            server.states[root.key_id] = state
        for attempt in (root.unwrap(record, CONTEXT), root.wrap(KEY, CONTEXT), root.check()):
            with pytest.raises(error, match=r"arn:aws:kms"):
                await attempt
        server.states[root.key_id] = "Enabled"
        assert await root.unwrap(record, CONTEXT) == KEY, "nothing of that is remembered"


@aio
async def test_retries_are_bounded_and_their_end_is_an_outage() -> None:
    async with FakeKms() as server, root_key(server, server.add_key()) as root:
        record = await root.wrap(KEY, CONTEXT)
        server.faults.extend([(500, "KMSInternalException")] * (kms.ATTEMPTS_MAX - 1))
        assert await root.unwrap(record, CONTEXT) == KEY
        server.faults.extend([(400, "ThrottlingException")] * 20)
        before = len(server.calls)
        with pytest.raises(KeyUnavailable, match="ThrottlingException"):
            await root.unwrap(record, CONTEXT)
        assert len(server.calls) - before == kms.ATTEMPTS_MAX
        server.faults.clear()
        server.faults.append((400, "AccessDeniedException"))
        with pytest.raises(KeyUnavailable, match="kms:Decrypt"):
            await root.unwrap(record, CONTEXT)


@aio
async def test_a_service_that_does_not_answer_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeKms() as server, root_key(server, server.add_key()) as root:
        record = await root.wrap(KEY, CONTEXT)
        monkeypatch.setattr(kms, "REQUEST_SECONDS", 0.3)
        server.hang = True
        began = time.monotonic()
        with pytest.raises(KeyUnavailable, match=r"within 0\.3 s"):
            await root.unwrap(record, CONTEXT)
        assert time.monotonic() - began < 3
        server.hang = False
        monkeypatch.undo()
        assert await root.unwrap(record, CONTEXT) == KEY
    dead = KmsRootKey(KmsOptions(arn_of(1), (), f"http://127.0.0.1:{free_ports('kms')['kms']}", "id", "secret"))
    with pytest.raises(KeyUnavailable, match="reachable"):
        await dead.check()
    await dead.aclose()


@aio
async def test_C19_no_error_repeats_the_key_that_was_sent() -> None:
    """The service's own sentences here repeat the whole request."""
    async with FakeKms() as server, root_key(server, server.add_key()) as root:
        for kind in ("ValidationException", "KMSInternalException", "DisabledException"):
            server.faults.extend([(400, kind)] * kms.ATTEMPTS_MAX)
            with pytest.raises(KeyUnavailable) as refused:
                await root.wrap(KEY, CONTEXT)
            server.faults.clear()
            shown = repr(refused.value) + repr(refused.value.__cause__)
            assert base64.b64encode(KEY.reveal()).decode()[:12] not in shown
            assert refused.value.__suppress_context__, "nor does a traceback show the foreign error"
        assert "secret" not in repr(root._options)


@pytest.mark.parametrize("record", [b"", b"KVKW\x01\x01\x00\x01x" + bytes(116), b"KVKW\x01\x02\x00\x01x"])
@aio
async def test_records_of_others_are_refused(record: bytes) -> None:
    async with FakeKms() as server, root_key(server, server.add_key()) as root:
        with pytest.raises(KeyDamaged):
            await root.unwrap(record, CONTEXT)


@pytest.mark.parametrize("key_id", ["", "alias/kvgw", "arn:aws:kms:eu-north-1:123456789012:alias/kvgw", "mrk-1"])
def test_a_key_is_named_by_its_arn(key_id: str) -> None:
    with pytest.raises(KeyRefused, match="ARN"):
        KmsOptions(key_id)
    with pytest.raises(KeyRefused, match="half"):
        KmsOptions(arn_of(1), access_key_id="x")
    assert KmsOptions(arn_of(1)).region == "eu-north-1"


@pytest.mark.parametrize(
    ("url", "good"),
    [
        ("https://kms.example.org", True),
        ("http://127.0.0.1:4566/", True),
        ("http://kms.example.org", False),
        ("http://10.0.0.1:4566", False),
        ("https://user:pass@kms.example.org", False),
        ("https://kms.example.org/path", False),
        ("kms.example.org", False),
    ],
)
def test_keys_go_nowhere_in_the_clear(url: str, good: bool) -> None:
    if good:
        assert KmsOptions(arn_of(1), endpoint_url=url).endpoint_url == url
    else:
        with pytest.raises(KeyRefused, match="https"):
            KmsOptions(arn_of(1), endpoint_url=url)


# A gateway on it


@aio
async def test_a_gateway_stores_and_reads_on_a_key_in_kms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    async with FakeKms() as server:
        keys = KeySettings(provider="aws-kms", kms_key_id=server.add_key(), kms_endpoint=server.endpoint)
        settings = replace_fields(SMALL, keys=keys)
        async with house("embedded", tmp_path, settings=settings) as gateway:
            client = gateway.client()
            registered = await client.register(format_of())
            wanted = payloads_of(registered, 2)
            await client.put(registered, keys_of(2), wanted)
            assert not (tmp_path / "keys" / "root.key").exists()
        async with house("embedded", tmp_path, settings=settings) as gateway:
            registered = await gateway.client().register(format_of())
            assert (await read(gateway.client(), registered, keys_of(2)))[1] == wanted
        server.states[arn_of(1)] = "PendingDeletion"
        with pytest.raises(KeyGone):
            async with house("embedded", tmp_path, settings=settings):
                pass


@aio
async def test_changing_to_another_kms_key_is_a_rewrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    async with FakeKms() as server:
        one, two = server.add_key(1), server.add_key(2)
        keys = KeySettings(provider="aws-kms", kms_key_id=one, kms_endpoint=server.endpoint)
        async with house("embedded", tmp_path, settings=replace_fields(SMALL, keys=keys)) as gateway:
            client = gateway.client()
            registered = await client.register(format_of())
            wanted = payloads_of(registered, 2)
            await client.put(registered, keys_of(2), wanted)
        keys = replace_fields(keys, kms_key_id=two, kms_previous_key_id=one)
        async with house("embedded", tmp_path, settings=replace_fields(SMALL, keys=keys)) as gateway:
            done = await gateway.opened.custodian.rewrap(Act(actor="owner", action="key.rewrap"), gateway.owner.tenant)
            assert (done.versions, done.failed) == (2, {})
        del server.states[one]
        keys = replace_fields(keys, kms_previous_key_id="")
        async with house("embedded", tmp_path, settings=replace_fields(SMALL, keys=keys)) as gateway:
            registered = await gateway.client().register(format_of())
            assert (await read(gateway.client(), registered, keys_of(2)))[1] == wanted


@aio
async def test_the_environment_keeps_the_root_key_in_development_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = KeySettings(provider="environment")
    for settings, sentence in (
        (replace_fields(SMALL, keys=keys), "development"),
        (replace_fields(SMALL, keys=replace_fields(keys, development=True)), "not set"),
        (replace_fields(SMALL, keys=KeySettings(provider="aws-kms")), "kms_key_id"),
    ):
        with pytest.raises(SettingsError, match=sentence):
            async with house("embedded", tmp_path, settings=settings):
                pass
    monkeypatch.setenv("KVGW_ROOT_KEY", bytes(range(32)).hex())
    settings = replace_fields(SMALL, keys=replace_fields(keys, development=True))
    async with house("embedded", tmp_path, settings=settings) as gateway:
        client = gateway.client()
        registered = await client.register(format_of())
        await client.put(registered, keys_of(1), payloads_of(registered, 1))
        assert (await read(client, registered, keys_of(1)))[1] == payloads_of(registered, 1)
    monkeypatch.setenv("KVGW_ROOT_KEY", bytes(range(1, 33)).hex())
    with pytest.raises(KeyMismatch):
        async with house("embedded", tmp_path, settings=settings):
            pass
