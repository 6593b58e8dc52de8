"""S02, S18, R55: a migration with one fault at its N-th statement, for N = 1, 2, …, on both databases, up and down.

An error before the statement, an error after it, a cancellation of whoever waits, and the end of the process; the
commit is a statement too. The catalog is then exactly the old or exactly the new one, and once it has been migrated
again a gateway starts on it and every law is looked at.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvgw.settings import CatalogSettings
from tests.support.aio import run
from tests.support.catalogs import APP_ROLE, OWNER_ROLE, migrated_template
from tests.support.gateways import _database_without_a_clock
from tests.support.manual_clock import ManualClock
from tests.support.postgres import Postgres
from tests.torture.bench import SETTINGS, Bench, Ledger
from tests.torture.faults import ANYWHERE, EXIT_CODE, Kind, Nth
from tests.torture.nursery import Nursery
from tests.torture.scenarios import stock
from tests.torture.statements import (
    MOVES,
    bring_down,
    bring_up,
    catalog_at,
    moved,
    shape_of,
)
from tests.torture.test_nth_call import CLOCK_MS, ENDS, again
from tests.torture.test_nth_call import nursery as nursery
from tests.torture.test_nth_call import quick as quick

pytestmark = pytest.mark.timeout(300)

STATEMENTS_MAX = 300
THIN = 19
"""In the ordinary run every so manieth statement, on SQLite and upwards; all of all among the slow tests."""
LEAST = 20
"""A migration over all revisions has at least so many statements."""
_NUMBERS = itertools.count()


@dataclass
class Before:
    """A gateway's data before a migration, to be copied; what was acknowledged there; the catalog before and after."""

    folder: Path
    ledger: Ledger
    now_ms: int
    old: tuple[Any, ...]
    new: tuple[Any, ...]


class House:
    """Makes a gateway's data on one kind of database, and copies of it."""

    def __init__(self, folder: Path, server: Postgres | None) -> None:
        self._folder = folder
        self._server = server
        self._stocks: dict[str, Before] = {}

    def __str__(self) -> str:
        return "SQLite" if self._server is None else "PostgreSQL"

    def _place(self, folder: Path) -> str:
        """Where the catalog of a bench's folder is, as its owner reaches it."""
        return str(folder) if self._server is None else self._server.url(folder.name, OWNER_ROLE)

    def bench(self, folder: Path, ledger: Ledger, now_ms: int) -> Bench:
        settings = SETTINGS
        if self._server is not None:
            settings = replace(SETTINGS, catalog=CatalogSettings(url=self._server.url(folder.name, APP_ROLE), pool=2))
        return Bench(folder, ManualClock(now_ms), ledger, settings=settings)

    def before(self, move: str) -> Before:
        """What `move` begins with; it is made once."""
        if move not in self._stocks:
            folder = self._folder / self._name(f"{move}_stock")
            folder.mkdir()
            self._database(folder.name, None)
            self._stocks[move] = run(self._make(folder, move))
        return self._stocks[move]

    async def _make(self, folder: Path, move: str) -> Before:
        catalog, bench = catalog_at(self._place(folder)), self.bench(folder, Ledger(), CLOCK_MS)
        async with bench.open():
            await bench.prepare()
            await stock(bench)
        whole = await shape_of(catalog)
        await bring_down(catalog)
        least = await shape_of(catalog)
        assert len(bench.ledger.kept) == 8
        assert whole != least
        if move == "up":
            # What was dropped on the way down is not made up again: empty tables, and the defaults of new columns.
            async with catalog.open() as database:
                await database.write(MOVES["up"])
            whole = await shape_of(catalog)
            await bring_down(catalog)
            return Before(folder, bench.ledger, bench.clock.now_ms(), least, whole)
        await bring_up(catalog)
        return Before(folder, bench.ledger, bench.clock.now_ms(), await shape_of(catalog), least)

    @contextmanager
    def copy(self, before: Before) -> Iterator[tuple[Path, str]]:
        """A folder like `before`'s, and where its catalog is."""
        folder = self._folder / self._name("run")
        shutil.copytree(before.folder, folder, ignore=shutil.ignore_patterns("*.sock"))
        self._database(folder.name, before.folder.name)
        try:
            yield folder, self._place(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            if self._server is not None:
                self._server.sql(f'DROP DATABASE "{folder.name}" WITH (FORCE)')

    def _name(self, what: str) -> str:
        name = f"statements_{os.getpid()}_{next(_NUMBERS)}_{what}"
        return name if self._server is None else self._server.database(name)

    def _database(self, name: str, template: str | None) -> None:
        if self._server is not None:
            self._server.sql(
                f'CREATE DATABASE "{name}" OWNER {OWNER_ROLE} TEMPLATE "{template or migrated_template(self._server)}"'
            )


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def house(request: pytest.FixtureRequest, quick: Path) -> Iterator[House]:
    on_postgres = request.param == "postgresql"
    server: Postgres | None = request.getfixturevalue("postgres") if on_postgres else None
    with _database_without_a_clock():
        yield House(quick, server)


@pytest.fixture(scope="module")
def sqlite(quick: Path) -> Iterator[House]:
    with _database_without_a_clock():
        yield House(quick, None)


async def check(house: House, before: Before, folder: Path, place: str, done: bool) -> None:
    """Old or new, and nothing else; migrated again it is a whole catalog, over which every law holds."""
    catalog = catalog_at(place)
    found = await shape_of(catalog)
    assert found in (before.old, before.new), "S18: neither the old catalog nor the new one"
    assert not done or found == before.new, "it said that it was done"
    await bring_up(catalog)
    await again(house.bench(folder, before.ledger.twin(), before.now_ms))


def loop(house: House, move: str, kinds: tuple[Kind, ...], stride: int) -> int:
    """Faults at statement 1, 1 + `stride`, … until none comes any more, each of another kind; the last that was met."""
    before = house.before(move)
    for met, number in enumerate(range(1, STATEMENTS_MAX, stride)):
        plan = Nth(number, kinds[met % len(kinds)])

        async def body(folder: Path, place: str, plan: Nth = plan) -> None:
            async with catalog_at(place).open() as database:
                done = await moved(database, move, plan)
            await check(house, before, folder, place, done)

        with named(plan), house.copy(before) as (folder, place):
            run(body(folder, place))
        if not plan.fired:
            return number - stride
    raise AssertionError(f"the migration has more than {STATEMENTS_MAX} statements")


def exits(house: House, nursery: Nursery, move: str, kinds: tuple[Kind, ...], stride: int) -> int:
    """Let the process end at statement 1, 1 + `stride`, … until it does not any more; the last at which it did."""
    before = house.before(move)
    for met, number in enumerate(range(1, STATEMENTS_MAX, stride)):
        kind = kinds[met % len(kinds)]
        with named(Nth(number, kind)), house.copy(before) as (folder, place):
            log = folder / "log"
            pid = nursery.spawn("tests.torture.statements:end_at", place, move, number, str(kind), log=log)
            ended = nursery.wait(pid)
            assert ended in (0, EXIT_CODE), log.read_text()
            run(check(house, before, folder, place, done=ended == 0))
        if ended == 0:
            return number - stride
    raise AssertionError(f"the migration has more than {STATEMENTS_MAX} statements")


@contextmanager
def named(plan: Nth) -> Iterator[None]:
    """What fails names the fault."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"the fault was: {plan}")
        raise


def test_S02_S18_R55_a_migration_that_meets_a_fault_at_some_statements_is_old_or_new(sqlite: House) -> None:
    assert loop(sqlite, "up", ANYWHERE, THIN) >= LEAST


@pytest.mark.slow
@pytest.mark.postgres
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ANYWHERE)
@pytest.mark.parametrize("move", MOVES)
def test_S02_S18_R55_a_migration_that_meets_a_fault_at_any_statement_is_old_or_new(
    house: House, move: str, kind: Kind
) -> None:
    met = loop(house, move, (kind,), 1)
    print(f"S18: migration {move} ({house}), {kind}: met at each of {met} statements")
    assert met >= LEAST


@pytest.mark.slow
@pytest.mark.postgres
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.parametrize("move", MOVES)
def test_S02_S18_R55_a_process_that_ends_at_any_statement_of_a_migration_leaves_old_or_new(
    house: House, nursery: Nursery, move: str, kind: Kind
) -> None:
    met = exits(house, nursery, move, (kind,), 1)
    print(f"S18: migration {move} ({house}), {kind}: met at each of {met} statements")
    assert met >= LEAST
