"""Deletions that leave a receipt, by each kind of selector, on one gateway: acknowledged, erased, verified."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvgw.model import Label, PutOutcome
from storage.tier import blob_name
from tenancy.deletion.deletions import Deletions
from tenancy.deletion.jobs import Job
from tenancy.deletion.merkle import merkle_root
from tenancy.deletion.receipt import faults
from tenancy.errors import CatalogOutdated
from tests.support.admin import Admin
from tests.support.aio import aio
from tests.support.deletions import ALICE, canaries, delete, finished, job_of, put
from tests.support.gateways import House, format_of, house, keys_of, payloads_of, read
from tests.support.manual_clock import ManualClock


async def there(gateway: House) -> set[bytes]:
    """Ids of the blobs that have a row."""
    return {bytes(row[0]) for row in await gateway.rows("SELECT blob_id FROM chunk")}


@aio
async def test_by_label_every_entry_that_carries_it_goes_and_a_shared_chunk_is_retained(tmp_path: Path) -> None:
    async with house("embedded", tmp_path / "gw") as gateway:
        client = gateway.client()
        registered = await client.register(format_of())
        hers, his, both = keys_of(3, "hers"), keys_of(2, "his"), keys_of(1, "both")
        await put(client, registered, hers, seed=1, user="alice")
        kept = await put(client, registered, his, seed=2, user="bob")
        shared = kept[0]
        same = await client.put(registered, keys_of(1, "same"), [shared])  # equal content under another of his keys
        assert same.stored == 1
        await client.put(registered, both, [shared])
        labelled = await client.put(registered, both, [shared], labels=[Label("user", "alice")])
        assert labelled.outcomes == (PutOutcome.HAVE,), "labels attach on have too"
        blobs = await there(gateway)
        job = await delete(gateway, ALICE)
        assert (job["state"], job["acknowledged"], job["entries"]) == ("erasing", True, 4)
        assert (await client.match(registered, hers)).count == 0, "law 5"
        assert (await client.match(registered, both)).count == 0, "law 5"
        assert (await read(client, registered, his))[1] == kept
        done = await finished(gateway, job)
        left = await there(gateway)
        assert len(blobs - left) == 3
        receipt = done["receipt"]
        assert receipt["counts"] == {"entries": 4, "chunks": 3, "bytes": 3 * 4368}
        assert {bytes.fromhex(one) for one in receipt["blobs"]["ids"]} == blobs - left
        assert receipt["retained"]["count"] == 1
        assert {bytes.fromhex(one) for one in receipt["retained"]["ids"]} < left
        assert "alice" not in str(done), "the label's value is in no receipt: only its keyed hash"
        assert (await read(client, registered, his))[1] == kept
        await gateway.check_clean()


@aio
async def test_by_keys(tmp_path: Path) -> None:
    async with house("embedded", tmp_path / "gw") as gateway:
        client = gateway.client()
        registered = await client.register(format_of())
        keys = keys_of(4)
        payloads = await put(client, registered, keys)
        named = [keys[1].hex(), keys[3].hex(), b"never stored".hex()]
        job = await delete(gateway, {"keys": {"format": registered.fingerprint.hex(), "keys": named}})
        assert job["entries"] == 2
        assert (await read(client, registered, keys))[1] == [payloads[0], None, payloads[2], None]
        done = await finished(gateway, job)
        assert done["receipt"]["counts"]["chunks"] == 2
        assert keys[1].hex() not in str(done["receipt"]), "engine keys are in no receipt"


@aio
async def test_by_prefix_what_follows_goes_with_it_along_every_branch(tmp_path: Path) -> None:
    async with house("embedded", tmp_path / "gw") as gateway:
        client = gateway.client()
        registered = await client.register(format_of())
        trunk, branch, other = keys_of(4, "trunk"), keys_of(2, "branch"), keys_of(2, "other")
        await put(client, registered, trunk, seed=1)
        await put(client, registered, branch, seed=2, parent=trunk[1], depth=2)
        await put(client, registered, other, seed=3)
        job = await delete(gateway, {"prefix": {"format": registered.fingerprint.hex(), "key": trunk[1].hex()}})
        assert job["entries"] == 5
        assert (await client.match(registered, trunk)).count == 1
        assert (await client.match(registered, branch)).count == 0
        assert (await client.match(registered, other)).count == 2
        await finished(gateway, job)


@aio
async def test_by_prefix_is_unsupported_where_the_chain_is_not_known(tmp_path: Path) -> None:
    async with house("embedded", tmp_path / "gw") as gateway:
        client, admin = gateway.client(), Admin(gateway.opened)
        registered = await client.register(format_of())
        keys = keys_of(4)
        await put(client, registered, keys)
        await client.delete(registered, keys[2:3])  # now nobody can tell what the last one follows
        body = {"prefix": {"format": registered.fingerprint.hex(), "key": keys[0].hex()}}
        refused = await admin.ask("POST", "/v1/tenants/-/namespaces/default/deletions", body, peer=os.geteuid())
        assert refused.status_code == 400
        assert "unsupported: 1 entries" in refused.text
        assert (await client.match(registered, keys)).count == 2, "refused is not half done"
        assert await admin.own("GET", "/tenants/-/deletions") == []
        deeper = {"prefix": {"format": registered.fingerprint.hex(), "key": keys[3].hex()}}
        assert (await delete(gateway, deeper))["entries"] == 1, "behind it everything is known"


@aio
async def test_by_prefix_is_unsupported_where_an_engine_names_no_predecessors(tmp_path: Path) -> None:
    """Chunks of several prompts in one store, in any order: no depth tells which of them follows which."""
    async with house("embedded", tmp_path / "gw") as gateway:
        client, admin = gateway.client(), Admin(gateway.opened)
        registered = await client.register(format_of())
        keys, later = keys_of(4), keys_of(2, "later")
        chunks = payloads_of(registered, 6)
        for stored, payloads in ((keys, chunks[:4]), (later, chunks[4:])):
            await client.put(registered, stored, payloads, chained=False)
            for key in (*stored, b"never stored"):
                body = {"prefix": {"format": registered.fingerprint.hex(), "key": key.hex()}}
                refused = await admin.ask("POST", "/v1/tenants/-/namespaces/default/deletions", body, peer=os.geteuid())
                assert (refused.status_code, "unsupported" in refused.text) == (400, True), key
        await client.delete(registered, [*keys[1:], *later])
        alone = {"prefix": {"format": registered.fingerprint.hex(), "key": keys[0].hex()}}
        assert (await delete(gateway, alone))["entries"] == 1, "nothing is left that could follow it"


@aio
async def test_by_format_and_by_age(tmp_path: Path) -> None:
    clock = ManualClock()
    async with house("embedded", tmp_path / "gw", clock=clock) as gateway:
        client = gateway.client()
        plain = await client.register(format_of())
        tuned = await client.register(format_of(adapter="alices-adapter", adapter_digest=b"a" * 32))
        newer = await client.register(format_of(weights=b"v" * 32))
        for registered in (plain, tuned, newer):
            await put(client, registered, keys_of(2))
        job = await delete(gateway, {"format": {"field": "adapter", "value": "alices-adapter"}})
        assert job["entries"] == 2
        await finished(gateway, job)
        assert (await client.match(tuned, keys_of(2))).count == 0
        job = await delete(gateway, {"format": {"field": "weights", "value": (b"v" * 32).hex()}})
        assert job["entries"] == 2
        assert (await client.match(plain, keys_of(2))).count == 2
        await gateway.wait(3600)
        await put(client, plain, keys_of(2, "late"), seed=5)
        job = await delete(gateway, {"age": {"moment": "created", "older_than": "30m"}})
        assert job["entries"] == 2
        assert (await client.match(plain, keys_of(2))).count == 0
        assert (await client.match(plain, keys_of(2, "late"))).count == 2
        await gateway.wait(600)
        await read(client, plain, keys_of(1, "late"))
        await gateway.opened.crew.write_down_hits()
        job = await delete(gateway, {"age": {"moment": "last_hit", "older_than": "5m"}})
        assert job["entries"] == 1, "the one that was read lately stays"
        assert (await client.match(plain, keys_of(1, "late"))).count == 1


@aio
async def test_more_entries_than_one_transaction_takes_all_go_before_the_acknowledgement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenancy.deletion.deletions.BATCH", 7)
    monkeypatch.setattr("tenancy.deletion.deletions.PAGE", 5)
    async with house("embedded", tmp_path / "gw") as gateway:
        client = gateway.client()
        registered = await client.register(format_of(256))
        await put(client, registered, keys_of(40), user="alice")
        twins = canaries(registered, 20)  # chunks of the first 20 keys, met again in another transaction
        labels = [Label("user", "alice")]
        assert (await client.put(registered, keys_of(20, "twin"), twins, labels=labels)).stored == 20
        await put(client, registered, keys_of(5, "other"), seed=1)
        job = await delete(gateway, ALICE)
        assert (job["entries"], job["chunks"]) == (60, 40)
        assert (await finished(gateway, job))["receipt"]["blobs"]["count"] == 40
        assert (await client.match(registered, keys_of(5, "other"))).count == 5


@aio
async def test_the_receipt_is_signed_and_every_change_of_it_shows(tmp_path: Path) -> None:
    async with house("embedded", tmp_path / "gw") as gateway:
        client = gateway.client()
        registered = await client.register(format_of())
        await put(client, registered, keys_of(3), user="alice")
        receipt = (await finished(gateway, await delete(gateway, ALICE)))["receipt"]
        key = gateway.opened.rooms.signer.public_key
        records = await gateway.rows("SELECT seq, action, target FROM audit_record ORDER BY seq")
        assert records[-1] == (receipt["audit_seq"], "deletion.done", receipt["job"])
        assert records[-2][1:] == ("deletion.begin", receipt["job"])
        assert receipt["blobs"]["root"] == merkle_root(map(bytes.fromhex, receipt["blobs"]["ids"])).hex()
        assert await gateway.rows("SELECT count(*) FROM deletion_blob") == [(0,)]

    def text(changed: dict[str, Any]) -> bytes:
        return msgspec.json.encode(changed)

    assert faults(text(receipt), key) == []
    assert faults(text(dict(reversed(receipt.items()))), key) == [], "the order of fields is not the statement"
    for field in receipt:
        if field == "signature":
            continue
        assert faults(text({**receipt, field: "another"}), key), field
    ids = receipt["blobs"]["ids"]
    assert faults(text({**receipt, "blobs": {**receipt["blobs"], "ids": ids[1:]}}), key)
    assert faults(text(receipt), bytes(32)), "another installation's key"
    for nonsense in (b"", b"[]", b"{}", b'{"signature":1}', b"\xff", text({**receipt, "signature": "zz"})):
        assert faults(nonsense, key)


@aio
async def test_S20_an_older_catalog_cannot_bring_back_what_a_job_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "gw"
    async with house("embedded", folder) as gateway:
        client = gateway.client()
        registered = await client.register(format_of())
        await put(client, registered, keys_of(2), user="alice")
    older = shutil.copy(folder / "catalog.db", tmp_path)
    async with house("embedded", folder) as gateway:
        await delete(gateway, ALICE)  # acknowledged; maintenance has not had its turn
    for file in folder.glob("catalog.db*"):
        file.unlink()
    shutil.copy(older, folder / "catalog.db")
    with pytest.raises(CatalogOutdated):
        async with house("embedded", folder):
            raise AssertionError("law 5: a deleted chunk could be read again")


@aio
async def test_a_job_goes_on_after_a_restart_in_the_middle_of_each_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, clock = tmp_path / "gw", ManualClock()
    async with house("embedded", folder, clock=clock) as gateway:
        client = gateway.client()
        registered = await client.register(format_of(256))
        await put(client, registered, keys_of(30), user="alice")
        job = await interrupted(gateway, monkeypatch)
        assert (job["state"], job["entries"], job["acknowledged"]) == ("removing", 20, False)
    for state, after in (("removing", "erasing"), ("erasing", "verifying"), ("verifying", "done")):
        clock.advance(60)  # the lease of the process before is over
        async with house("embedded", folder, clock=clock) as gateway:
            with monkeypatch.context() as patch:
                patch.setattr("kvgw.maintenance.erasing.STEPS_MAX", 1)  # one step, then the process ends
                assert (await job_of(gateway, job))["state"] == state
                await gateway.opened.crew.go_on_deleting()
            now = await job_of(gateway, job)
            assert now["state"] == after, now
            assert (await gateway.client().match(registered, keys_of(30))).count == 0
    assert now["receipt"]["counts"]["chunks"] == 30, "each is counted once, however often it was begun"
    assert now["entries"] == 30


async def interrupted(gateway: House, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A job whose removal died after two transactions of ten entries each."""
    real, calls = Deletions._write, 0

    async def dies(self: Deletions, job: Job, body: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise ConnectionAbortedError("the process dies here")
        return await real(self, job, body)

    with monkeypatch.context() as patch:
        patch.setattr("tenancy.deletion.deletions.BATCH", 10)
        patch.setattr(Deletions, "_write", dies)
        answer = await Admin(gateway.opened).ask(
            "POST", "/v1/tenants/-/namespaces/default/deletions", ALICE, peer=os.geteuid()
        )
    assert answer.status_code == 500, "not acknowledged"
    (job,) = await Admin(gateway.opened).own("GET", "/tenants/-/deletions")
    return job


@aio
async def test_a_put_that_commits_later_is_new_data(tmp_path: Path) -> None:
    async with house("embedded", tmp_path / "gw") as gateway:
        client = gateway.client()
        registered = await client.register(format_of())
        await put(client, registered, keys_of(2), user="alice")
        job = await delete(gateway, ALICE)
        payloads = payloads_of(registered, 2, seed=9)
        assert (await client.put(registered, keys_of(2), payloads, labels=[Label("user", "alice")])).stored == 2
        await finished(gateway, job)
        assert (await read(client, registered, keys_of(2)))[1] == payloads


@aio
async def test_blobs_of_a_job_leave_staging_and_disk(tmp_path: Path) -> None:
    async with house("embedded", tmp_path / "gw") as gateway:
        client = gateway.client()
        registered = await client.register(format_of())
        await put(client, registered, keys_of(3), user="alice")
        scope = (await gateway.place()).scope
        names = {blob_name(scope.namespace, one) for one in await there(gateway)}
        assert set(gateway.opened.rooms.staging.names()) == names
        await finished(gateway, await delete(gateway, ALICE))
        assert gateway.opened.rooms.staging.names() == []
        assert not any((tmp_path / "gw" / "nvme" / name).exists() for name in names)
