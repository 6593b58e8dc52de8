"""Removal on its own: of one chunk's placements, and of what is not there (L08)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from sqlalchemy import Connection, event, select

from tenancy import prepared, quota, removal
from tenancy.schema import tombstone
from tests.support.aio import aio
from tests.tenancy import test_catalog_sqlite
from tests.tenancy.catalog_bench import NOW, SEALED, Bench, name
from tests.tenancy.test_catalog_sqlite import sqlite_backend

empty_catalog = test_catalog_sqlite.empty_catalog


@aio
async def test_one_chunks_placements_are_doomed_and_the_others_stay(tmp_path: Path, empty_catalog: Path) -> None:
    shutil.copy(empty_catalog, tmp_path / "catalog.db")
    async with sqlite_backend(tmp_path / "catalog.db") as backend:
        bench = await Bench.make(backend)
        blob = (await bench.put("a")).blobs["a"]
        await bench.put("b")

        def doom(connection: Connection) -> None:
            quota.lock(connection, bench.scope)
            removal.doom_placements(connection, bench.scope, [blob])

        def of_a(states: dict[tuple[bytes, str, str], str]) -> dict[str, str]:
            return {tier: state for (one, tier, _), state in states.items() if one == blob}

        assert of_a(await bench.states()) == {"nvme": "ok", "s3": "due"}
        assert (await bench.usage()).s3_bytes == 2 * SEALED
        await backend.transact(doom)
        assert of_a(await bench.states()) == {"nvme": "doomed"}, "what was not begun vanishes"
        assert (await bench.usage()).s3_bytes == SEALED, "law 4"
        assert sorted((await bench.states()).values()) == ["doomed", "due", "ok"], "the other chunk keeps its own"


@aio
async def test_more_than_one_statement_takes_at_once_ends_whole(
    tmp_path: Path, empty_catalog: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A staging that died may have held more than a database takes in one list."""
    monkeypatch.setattr(prepared, "MEMBERS_MOST", 2)
    shutil.copy(empty_catalog, tmp_path / "catalog.db")
    async with sqlite_backend(tmp_path / "catalog.db") as backend:
        bench = await Bench.make(backend)
        keys = [f"{number}" for number in range(5)]
        blobs = sorted((await bench.put(*keys)).blobs.values())

        def remove(connection: Connection) -> list[bytes]:
            quota.lock(connection, bench.scope)
            return removal.remove_entries(connection, bench.scope, [(1, name(key)) for key in keys], "lost", NOW)

        assert sorted(await backend.transact(remove)) == blobs
        assert await bench.see(*keys) == {}
        assert set((await bench.states()).values()) == {"doomed"}
        assert len(await bench.rows(select(tombstone.c.entry_key))) == len(keys)
        assert (await bench.usage()).s3_bytes == 0, "law 4"


@aio
async def test_what_is_not_there_leaves_no_tombstone(tmp_path: Path, empty_catalog: Path) -> None:
    shutil.copy(empty_catalog, tmp_path / "catalog.db")
    async with sqlite_backend(tmp_path / "catalog.db") as backend:
        bench = await Bench.make(backend)
        await bench.put("a")
        asked: list[str] = []

        def remove(connection: Connection) -> None:
            event.listen(connection, "before_cursor_execute", lambda *told: asked.append(told[2]))
            for names in ([], [(1, name("none"))], [(2, name("a"))]):
                assert removal.remove_entries(connection, bench.scope, names, "deleted", NOW) == []

        await backend.transact(remove)
        assert len(asked) == 2, "each is looked for, and nothing comes of it"
        assert await bench.rows(select(tombstone.c.entry_key)) == []
        assert set(await bench.see("a")) == {"a"}
