"""A GET whose chunks can be read is answered, whatever else fails around it (law 2)."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.errors import TierMisconfigured
from tenancy.errors import CatalogUnavailable
from tests.support.aio import aio
from tests.support.gateways import format_of, house, keys_of, payloads_of
from tests.support.manual_clock import ManualClock


@aio
async def test_hits_stay_hits_when_their_life_cannot_be_extended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    async with (
        house("embedded", tmp_path / "data", clock=clock) as gateway,
        gateway.client(on_error="raise") as client,
    ):
        registered = await client.register(format_of())
        keys, payloads = keys_of(2), payloads_of(registered, 2)
        await client.put(registered, keys, payloads, ttl=100)
        clock.advance(50)
        asked = []

        async def refused(*arguments: object) -> int:
            asked.append(arguments)
            raise CatalogUnavailable("planned")

        monkeypatch.setattr(gateway.opened.rooms.catalog, "extend", refused)
        buffers = [bytearray(registered.chunk_bytes) for _ in keys]
        assert (await client.get(registered, keys, buffers)).leading == 2
        assert len(asked) == 1, "half of the life is over: the gateway tried"
        assert buffers == payloads


@aio
async def test_a_misconfigured_tier_is_an_outage_of_its_chunks_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house("embedded", tmp_path / "data") as gateway, gateway.client() as client:
        registered = await client.register(format_of())
        keys, payloads = keys_of(2), payloads_of(registered, 2)
        await client.put(registered, keys, payloads)
        rooms = gateway.opened.rooms
        [first, _] = [path.stem for path in sorted((tmp_path / "data" / "nvme" / "v1").rglob("*")) if path.is_file()]
        [name] = [name for name in _names(tmp_path / "data" / "nvme") if name.endswith(first)]
        rooms.staging.drop(name)

        async def refused(*_: object) -> None:
            raise TierMisconfigured("planned")

        monkeypatch.setattr(rooms.tiers["nvme"], "get_into", refused)
        report = await client.get(registered, keys, [bytearray(registered.chunk_bytes) for _ in keys])
        assert len(report.hits) == 1, "the other one is still resident"
        assert "planned" in report.reason


def _names(root: Path) -> list[str]:
    return [path.relative_to(root).as_posix() for path in (root / "v1").rglob("*") if path.is_file()]
