"""``kvgw delete``, ``kvgw deletions`` and ``kvgw verify-receipt``: as an operator uses them, with their exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvgw.client import Client, ClientOptions
from kvgw.endpoint import UnixEndpoint
from kvgw.reports import Registered
from kvgw.transport import SocketTransport
from storage.tier import blob_name
from tests.support.aio import run
from tests.support.deletions import put
from tests.support.gateways import format_of, keys_of
from tests.support.served import answer, kvgw, served


async def store(folder: Path) -> Registered:
    client = Client(SocketTransport(UnixEndpoint(str(folder / "kvgw.sock")), None), ClientOptions(on_error="raise"))
    try:
        registered = await client.register(format_of())
        await put(client, registered, keys_of(3), user="alice")
        await put(client, registered, keys_of(2, "his"), seed=1, user="bob")
        return registered
    finally:
        await client.aclose()


@pytest.mark.timeout(180)
def test_delete_by_label_show_and_verify(tmp_path: Path) -> None:
    folder, receipt = tmp_path / "gw", tmp_path / "receipt.json"
    data = ("--data", str(folder))
    with served(folder) as running:
        registered = run(store(folder))
        for wrong in ((), ("--label", "user=alice", "--model", "x"), ("--label", "alice")):
            assert kvgw("delete", *wrong, *data).returncode == 1
        assert kvgw("delete", "--everything", *data).returncode == 1, "the name was not typed again"
        job = answer("delete", "--label", "user=alice", "--wait", "60", *data)
        assert (job["state"], job["entries"], job["receipt"]["counts"]["chunks"]) == ("done", 3, 3)
        assert [one["id"] for one in answer("deletions", "list", *data)] == [job["id"]]
        shown = kvgw("deletions", "show", job["id"], "--receipt", str(receipt), *data)
        assert shown.returncode == 0, shown.stderr
        assert "3 entries, 3 chunks" in shown.stdout
        by_key = ("--format", registered.fingerprint.hex(), "--key", keys_of(1, "his")[0].hex())
        assert answer("delete", *by_key, *data)["entries"] == 1

        good = kvgw("verify-receipt", str(receipt), *data)
        assert good.returncode == 0, good.stdout + good.stderr
        key = json.loads(receipt.read_text())["public_key"]
        changed = tmp_path / "changed.json"
        changed.write_text(receipt.read_text().replace('"chunks":3', '"chunks":2'))
        assert kvgw("verify-receipt", str(changed), *data).returncode == 1
        assert kvgw("verify-receipt", str(receipt), "--public-key", "00" * 32, *data).returncode == 1

        said = json.loads(receipt.read_text())
        name = blob_name(said["namespace"]["id"], bytes.fromhex(said["blobs"]["ids"][0]))
        back = folder / "nvme" / name
        back.parent.mkdir(parents=True, exist_ok=True)
        back.write_bytes(b"it has come back")
        leak = kvgw("verify-receipt", str(receipt), *data)
        assert leak.returncode == 1
        assert "nvme of node" in leak.stdout
        assert name in leak.stdout
        back.unlink()
        assert running.stop() == 0
        assert "Traceback" not in running.complaints()
    assert kvgw("verify-receipt", str(receipt), *data).returncode == 0, "without a gateway the data folder is opened"
    alone = kvgw("verify-receipt", str(receipt), "--offline", "--public-key", key)
    assert alone.returncode == 2, "genuine, but nobody looked"
    assert "--offline" in alone.stdout
    assert kvgw("verify-receipt", str(tmp_path / "none.json"), *data).returncode == 1
    away = kvgw("verify-receipt", str(receipt), "--public-key", key, *data, KVGW_ADMIN="http://127.0.0.1:9")
    assert away.returncode == 2, away.stdout + away.stderr


@pytest.mark.timeout(120)
def test_a_namespace_goes_while_no_gateway_runs_and_its_receipt_follows(tmp_path: Path) -> None:
    folder = tmp_path / "gw"
    data = ("--data", str(folder))
    with served(folder) as running:
        run(store(folder))
        assert running.stop() == 0
    job = answer("delete", "--everything", "--confirm", "default", *data)
    assert (job["state"], job["acknowledged"]) == ("removing", True)
    with served(folder, KVGW__MAINTENANCE__SWEEP_SECONDS="0.3"):
        done = answer("deletions", "show", job["id"], "--wait", "60", *data)
        assert done["state"] == "done"
        assert done["receipt"]["counts"]["entries"] == 5
        assert answer("namespace", "create", "default", *data)["state"] == "active", "the name is free again"
