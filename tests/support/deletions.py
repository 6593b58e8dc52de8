"""Deletions for tests: asked of the admin API, worked on turn by turn, and searched for behind everybody's back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from kvgw.client import Client
from kvgw.model import Label
from kvgw.reports import Registered
from tests.support.admin import Admin
from tests.support.gateways import House
from tests.support.seaweed import S3Server

CANARY = b"canary-of-a-person-"
ALICE: Final = {"label": {"kind": "user", "value": "alice"}}


def canaries(registered: Registered, count: int, seed: int = 0) -> list[bytes]:
    """Plaintext that would be known again anywhere: every 64 bytes of it hold `CANARY`."""
    return [
        (b"%s%06d-%06d" % (CANARY, seed, index) + b"." * 32) * (registered.chunk_bytes // 64) for index in range(count)
    ]


async def put(
    client: Client, registered: Registered, keys: Sequence[bytes], *, seed: int = 0, user: str = "", **more: Any
) -> list[bytes]:
    """Store canaries under `keys`; what was stored."""
    payloads = canaries(registered, len(keys), seed)
    labels = [Label("user", user)] if user else []
    report = await client.put(registered, keys, payloads, labels=labels, **more)
    assert report.stored == len(keys), report
    return payloads


async def delete(house: House, body: dict[str, Any], namespace: str = "default", **more: Any) -> Any:
    """Ask for a deletion in a namespace of the first tenant; the job as it was acknowledged."""
    return await Admin(house.opened).own("POST", f"/tenants/-/namespaces/{namespace}/deletions", body, **more)


async def job_of(house: House, job: dict[str, Any], tenant: str = "-") -> Any:
    return await Admin(house.opened).own("GET", f"/tenants/{tenant}/deletions/{job['id']}")


async def finished(houses: House | Sequence[House], job: dict[str, Any], tenant: str = "-", turns: int = 6) -> Any:
    """Let maintenance have its turns until the job is done."""
    gateways = [houses] if isinstance(houses, House) else houses
    for _ in range(turns):
        for house in gateways:
            await house.opened.crew.go_on_deleting()
        now = await job_of(gateways[0], job, tenant)
        if now["state"] == "done":
            return now
    raise AssertionError(f"not done after {turns} turns: {now}")


def found_in_files(folder: Path, needles: Iterable[bytes]) -> list[str]:
    """Files below `folder` that hold any of `needles`, in their bytes or in their names."""
    wanted = list(needles)
    found: list[str] = []
    for path in folder.rglob("*"):
        if any(needle.decode("latin-1") in path.name for needle in wanted):
            found.append(f"the name of {path}")
        if path.is_file() and any(needle in path.read_bytes() for needle in wanted):
            found.append(str(path))
    return found


def found_in_memory(house: House, needles: Iterable[bytes]) -> list[bytes]:
    """Those of `needles` that lie anywhere in the arena of a gateway in this process, given back memory included."""
    view = house.opened.arena.memory.view(0, house.opened.arena.capacity_bytes)
    everything = bytes(view)
    view.release()
    return [needle for needle in needles if needle in everything]


def found_in_bucket(server: S3Server, prefix: str, needles: Iterable[bytes]) -> list[str]:
    """Keys, versions, markers and uploads below `prefix` that are named by, or hold, any of `needles`."""
    wanted = list(needles)
    found: list[str] = []

    def look(what: str, key: str, body: bytes) -> None:
        if any(needle in body or needle in key.encode() for needle in wanted):
            found.append(f"{what} {key}")

    with server.client() as client:
        for page in client.get_paginator("list_object_versions").paginate(Bucket=server.bucket, Prefix=prefix):
            for item in page.get("Versions", []):
                version = {} if item["VersionId"] == "null" else {"VersionId": item["VersionId"]}
                body = client.get_object(Bucket=server.bucket, Key=item["Key"], **version)["Body"].read()
                look("version", item["Key"], body)
            for item in page.get("DeleteMarkers", []):
                look("marker", item["Key"], b"")
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=server.bucket, Prefix=prefix):
            for item in page.get("Contents", []):
                body = client.get_object(Bucket=server.bucket, Key=item["Key"])["Body"].read()
                look("object", item["Key"], body)
        for upload in client.list_multipart_uploads(Bucket=server.bucket, Prefix=prefix).get("Uploads", []):
            look("upload", upload["Key"], b"")
    return found
