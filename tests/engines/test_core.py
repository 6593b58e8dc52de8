"""What all adapters share: threads, deadlines, whose a request is, settings, digests, memory."""

from __future__ import annotations

import ast
import asyncio
import json
import logging
import threading
import time
from pathlib import Path

import pytest

from kvgw.engines.counters import COUNTERS, Counters
from kvgw.engines.identity import WEIGHTS, folder_digest
from kvgw.engines.loop import LoopThread
from kvgw.engines.options import parse_options
from kvgw.engines.tenants import OWN, Credential, TenantMap, read_tenants
from kvgw.engines.windows import Windows
from kvgw.errors import FormatError, Outage

ENGINES = Path(__file__).resolve().parents[2] / "kvgw" / "engines"


def test_a_call_returns_at_its_deadline_whatever_the_coroutine_does() -> None:
    """Law 9."""
    loop = LoopThread("test")
    stuck = threading.Event()

    async def blocks_the_loop() -> None:
        stuck.wait(5)

    started = time.monotonic()
    with pytest.raises(Outage, match=r"no answer within 0\.05 s"):
        loop.call(blocks_the_loop, 0.05)
    assert time.monotonic() - started < 1
    stuck.set()
    assert loop.close()


def test_a_coroutines_result_and_errors_come_back() -> None:
    loop = LoopThread("test")

    async def answer() -> int:
        return 7

    async def fails() -> None:
        raise FormatError("wrong")

    assert loop.call(answer, 5) == 7
    with pytest.raises(FormatError, match="wrong"):
        loop.call(fails, 5)
    assert loop.close()


def test_closing_ends_what_runs_and_refuses_what_comes() -> None:
    """Law 7."""
    loop = LoopThread("test")
    ended = threading.Event()

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    future = loop.submit(waits)
    loop.call(lambda: asyncio.sleep(0), 5)
    assert loop.close()
    assert ended.is_set()
    assert future.cancelled()
    with pytest.raises(Outage, match="shut down"):
        loop.submit(waits)
    assert loop.close(), "a second call does nothing"


def test_a_reason_is_logged_once_and_counted_every_time(caplog: pytest.LogCaptureFixture) -> None:
    counters = Counters(logging.getLogger("test"))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            counters.reason("lookup_outages", "the gateway is away")
        counters.reason("lookup_outages", "another one")
    assert [record.getMessage() for record in caplog.records] == [
        "kvgw: lookup_outages: the gateway is away",
        "kvgw: lookup_outages: another one",
    ]
    assert counters.take() == {"lookup_outages": 4}
    assert counters.take() == {}
    counters.add("lookup_outages")
    assert counters.take() == {"lookup_outages": 1}
    assert counters.total("lookup_outages") == 5


def test_reasons_that_never_end_are_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    """Law 9."""
    counters = Counters(logging.getLogger("test"))
    with caplog.at_level(logging.WARNING):
        for number in range(500):
            counters.reason("lookup_outages", f"reason {number}")
    assert len(caplog.records) == 64
    assert counters.total("lookup_outages") == 500


def test_every_counter_that_is_used_is_known_and_the_other_way_round() -> None:
    """Otherwise a rare reason would be an error in the engine's own metrics."""
    used: set[object] = set()
    texts: set[object] = set()
    for path in ENGINES.rglob("*.py"):
        if path.name == "counters.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant):
                texts.add(node.value)
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("counters.add", "counters.reason")):
                used |= {node.args[0].value} if isinstance(node.args[0], ast.Constant) else set()
    assert used - set(COUNTERS) == set()
    assert set(COUNTERS) - texts == set()


TENANTS = {"by": "cache_salt", "tenants": {"acme-secret": {"token_file": "acme.token", "namespace": "chat"}}}


def tenants_of(tmp_path: Path, content: object = TENANTS) -> TenantMap:
    path = tmp_path / "tenants.json"
    path.write_text(json.dumps(content))
    return read_tenants(str(path), Credential("own.token"))


def test_the_operators_map_decides_whose_a_request_is(tmp_path: Path) -> None:
    """Law 6."""
    tenants = tenants_of(tmp_path)
    (tmp_path / "acme.token").write_text(" kvgw_token\n")
    name, _ = tenants.resolve("acme-secret", None)
    credential = tenants.credential(name)
    assert (credential.namespace, credential.token()) == ("chat", "kvgw_token")


def test_a_value_that_the_map_does_not_name_is_no_tenant_and_shares_with_no_other(tmp_path: Path) -> None:
    """Law 6. What a caller sends is salt at most, even if it looks like a tenant's name or token file."""
    tenants = tenants_of(tmp_path)
    callers = [None, "acme", "acme-secret ", "acme.token", "../own.token", "b"]
    resolved = [tenants.resolve(value, {"tenant": "acme-secret"}) for value in callers]
    assert {name for name, _ in resolved} == {OWN}
    assert len({salt for _, salt in resolved}) == len(callers)
    assert tenants.credential(OWN) == Credential("own.token")


def test_a_tenants_users_are_apart_by_their_salt(tmp_path: Path) -> None:
    tenants = tenants_of(tmp_path, {**TENANTS, "by": "kv_transfer_params.tenant"})
    params = {"tenant": "acme-secret"}
    assert tenants.resolve("user 1", params)[0] == "acme-secret"
    assert tenants.resolve("user 1", params)[1] != tenants.resolve("user 2", params)[1]
    assert tenants.resolve(None, params)[1] == b""
    strangers = [tenants.resolve("u", {"tenant": value}) for value in ("x", 1, None, ["acme-secret"])]
    assert {name for name, _ in strangers} == {OWN}
    assert len({salt for _, salt in strangers}) == 4
    assert tenants.resolve("u", None) == tenants.resolve("u", {})


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([], "must be"),
        ({"tenants": {}, "default": "x"}, "must be"),
        ({"by": "user", "tenants": {}}, "'by' in .* must be"),
        ({"tenants": {"a": {}}}, "needs a token_file"),
        ({"tenants": {"": {"token_file": "x"}}}, "must be a name"),
        ({"tenants": {"a": {"token_file": "x", "token": "y"}}}, "must be a name with token_file"),
    ],
)
def test_a_map_that_is_not_right_is_refused(tmp_path: Path, content: object, reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        tenants_of(tmp_path, content)


def test_a_token_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"nowhere cannot be read"):
        Credential(str(tmp_path / "nowhere")).token()
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(FormatError, match="is empty"):
        Credential(str(tmp_path / "empty")).token()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "endpoint"),
        ({"endpoint": "unix:/x", "deadline": 1}, "deadline"),
        ({"endpoint": "unix:/x", "lookup_deadline_s": 0}, "lookup_deadline_s"),
        ({"endpoint": "unix:/x", "tokens_per_chunk": "256"}, "tokens_per_chunk"),
    ],
)
def test_a_setting_that_is_not_right_is_refused_by_name(given: dict[str, object], reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        parse_options(given)


def test_settings_have_defaults() -> None:
    options = parse_options({"endpoint": "unix:/x"})
    assert options.endpoints == ["unix:/x"]
    assert options.tenants().resolve("anything", None)[0] == OWN
    assert parse_options({"endpoint": ["tcp:a:1", "tcp:b:1"]}).endpoints == ["tcp:a:1", "tcp:b:1"]


def test_a_digest_follows_the_content_and_is_remembered(tmp_path: Path) -> None:
    model, digests = tmp_path / "model", tmp_path / "digests"
    model.mkdir()
    with pytest.raises(FormatError, match="holds no file"):
        folder_digest(model, WEIGHTS, None)
    (model / "a.safetensors").write_bytes(b"one")
    first = folder_digest(model, WEIGHTS, digests)
    assert first == folder_digest(model, WEIGHTS, None)
    entry = next(digests.iterdir())
    entry.write_bytes(b"\0" * 32)
    assert folder_digest(model, WEIGHTS, digests) != first, "the remembered digest is used"
    entry.write_bytes(b"cut short")
    assert folder_digest(model, WEIGHTS, digests) == first
    (model / "a.safetensors").write_bytes(b"another")
    assert folder_digest(model, WEIGHTS, digests) != first
    (model / "notes.txt").write_text("no weights")
    (model / "a.safetensors").rename(model / "b.safetensors")
    assert folder_digest(model, WEIGHTS, None) != first


def test_windows_are_bounded_and_reused() -> None:
    """Law 9."""
    windows = Windows(100, 350)
    taken = windows.take(2)
    assert [window.nbytes for window in taken] == [100, 100]
    rest = windows.take(5)
    assert (len(rest), windows.take(1), windows.idle) == (1, [], False)
    windows.give(rest)
    assert windows.take(5)[0] is rest[0]
    windows.give([*taken, *rest])
    assert windows.idle
    assert len(Windows(100, 1).take(9)) == 1, "a chunk larger than the limit still travels"
