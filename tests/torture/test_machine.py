"""S24, Q02: PUTs, GETs, deletions, waits, jobs, rotations, shreds, restarts in any order, with faults, against a model.

The model is a dictionary: for each key what it may hold, whether it must be there, until when, and its labels. After
every step the counters equal the rows and no limit is passed (law 4); what is read is what may be read (laws 3, 5, 8).
At the end the gateway settles, and every law is looked at once more. SQLite is in every run; PostgreSQL, sockets, TLS,
shared memory and longer runs are among the slow tests.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from msgspec.structs import replace

from kvgw.client import Client
from kvgw.errors import Outage, RequestRefused
from kvgw.model import Durability, Label, Outcome, PutOutcome
from kvgw.reports import Registered
from kvgw.settings import CatalogSettings, Settings
from tenancy.errors import RegistryRefused
from tenancy.keys.epochs import EpochPolicy
from tests.support.admin import Admin
from tests.support.gateways import _database_without_a_clock, format_of, take_up_backlog
from tests.support.manual_clock import ManualClock
from tests.support.postgres import Postgres
from tests.support.seaweed import S3Server
from tests.support.several import Footing
from tests.tenancy.catalog_bench import check_laws
from tests.torture.bench import CHUNK_BYTES, MONTH_S, SETTINGS, Ledger
from tests.torture.faults import ANYWHERE, Kind
from tests.torture.reached import WAYS, ReachedBench, Way
from tests.torture.scenarios import ACT

OBJECTS = 6
KEYS = "abcde"
CONTENTS = {one: one.encode() * CHUNK_BYTES for one in "xyz"}

keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True)
contents = st.lists(st.sampled_from("xyz"), min_size=3, max_size=3)
durabilities = st.sampled_from(list(Durability))
lives = st.sampled_from([None, None, 10.0, 40.0])
users = st.sampled_from([None, "alice", "bob"])
faults = st.one_of(st.none(), st.tuples(st.integers(1, 10), st.sampled_from(ANYWHERE)))
Fault = tuple[int, Kind] | None


@dataclass
class Cell:
    """What is known of one key."""

    may: set[str] = field(default_factory=set)
    """Contents that it may have; it may be missing besides, unless `must`."""
    must: bool = False
    must_until: float = 0.0
    may_until: float = 0.0
    users: set[str | None] = field(default_factory=set)
    """By whom it may be labelled; with one alone there is no doubt."""

    def clear(self) -> None:
        self.may, self.must, self.users = set(), False, set()


class GatewayMachine(RuleBasedStateMachine):
    chosen: ClassVar[Settings] = SETTINGS
    way: ClassVar[Way] = "embedded"

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        memory = Path("/dev/shm")
        self.folder = Path(tempfile.mkdtemp(prefix="kvgw-machine-", dir=memory if memory.is_dir() else None))
        self.clock = ManualClock(1_900_000_000_000)
        self.cells = {key: Cell() for key in KEYS}
        self.bench = ReachedBench(self.folder, self.clock, Ledger(), settings=self.chosen, way=self.way)
        self.spaces = 0
        """Namespaces that were made; all but the last are shredded."""
        self.going: set[str | None] = set()
        """Users of whom a deletion was asked for and not answered: its job goes on, and may meet what comes later."""
        self.stack = AsyncExitStack()
        self.ready = False

    def do(self, work: Awaitable[Any]) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(60):
                return await work

        return self.runner.run(bounded())

    @initialize()
    def begin(self) -> None:
        self.do(self._open(new=True))
        self.ready = True

    async def _open(self, *, new: bool = False) -> None:
        await self.stack.enter_async_context(self.bench.open())
        await (self._make() if new else self._speak())

    async def _make(self) -> None:
        """A namespace of its own name, and with it the clients of the machine."""
        self.spaces += 1
        wanted = {"name": self._space, "sliding_ttl": False, "limit_objects": OBJECTS}
        await Admin(self.bench.opened).own("POST", "/tenants/-/namespaces", wanted)
        await self._speak()

    async def _speak(self) -> None:
        self.scope = (await self.bench.house.place(self._space)).scope
        self.client: Client = self.bench.house.client(self._space)
        self.registered: Registered = await self.client.register(format_of(CHUNK_BYTES))

    @property
    def _space(self) -> str:
        return f"machine-{self.spaces}"

    def teardown(self) -> None:
        try:
            if self.ready:
                self.do(self._end())
        finally:
            self.do(self.stack.aclose())
            self.runner.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    async def _end(self) -> None:
        """Restart, let everything settle, and look at all of it."""
        await self._restart()
        await self._read(KEYS, excused=False)
        await self.bench.settle()
        await self._ask_what_goes_on()
        await self.bench.check()
        await self._read(KEYS, excused=False)

    # What may happen, each with a fault on its way or without

    async def _step(self, work: Awaitable[Any], fault: Fault) -> bool:
        plan = self.bench.plan
        plan.aim(*(fault or (0, Kind.ERROR)))
        plan.armed = True
        try:
            return await self.bench.step(work)
        finally:
            plan.armed = False

    @rule(chosen=keys, texts=contents, durability=durabilities, life=lives, user=users, fault=faults)
    def put(
        self,
        chosen: list[str],
        texts: list[str],
        durability: Durability,
        life: float | None,
        user: str | None,
        fault: Fault,
    ) -> None:
        now, ttl = self.clock.monotonic(), life or MONTH_S
        outcomes: list[PutOutcome] = []

        async def work() -> None:
            report = await self.client.put(
                self.registered,
                [key.encode() for key in chosen],
                [CONTENTS[text] for text in texts[: len(chosen)]],
                durability=durability,
                ttl=life,
                labels=[] if user is None else [Label("user", user)],
                on_error="raise",
            )
            outcomes.extend(report.outcomes)

        answered = self.do(self._step(work(), fault))
        for at, (key, text) in enumerate(zip(chosen, texts, strict=False)):
            outcome = outcomes[at] if answered else None
            self._note_put(self.cells[key], text, outcome, now, ttl, durability)
            if outcome is PutOutcome.STORED:
                self.cells[key].users = {user}
            elif outcome not in (PutOutcome.OVER_QUOTA, PutOutcome.CONFLICT):
                self.cells[key].users.add(user)  # whether the one that was there was given the label too is not asked

    def _note_put(
        self, cell: Cell, text: str, outcome: PutOutcome | None, now: float, ttl: float, durability: Durability
    ) -> None:
        stood = self._stands(cell, now)
        if outcome is PutOutcome.OVER_QUOTA:
            return
        if outcome in (PutOutcome.STORED, PutOutcome.HAVE):
            if outcome is PutOutcome.STORED:
                cell.may = {text}
            # Of two writers of a key the first wins: whoever has it is not asked what the second one brings.
            assert cell.may, "law 5: it is said to be there, and it is gone"
            cell.must = durability is not Durability.STAGED or stood
            cell.must_until = max(now + ttl, cell.must_until if stood else 0.0)
            cell.may_until = max(now + ttl, cell.may_until)
        elif outcome is PutOutcome.CONFLICT:
            assert not stood or cell.may != {text}, "in conflict with itself"
        else:  # who knows
            if not stood:
                cell.may.add(text)
                cell.must = False
            cell.may_until = max(now + ttl, cell.may_until)

    def _stands(self, cell: Cell, now: float) -> bool:
        """Whether it must be there."""
        return cell.must and now < cell.must_until and not cell.users & self.going

    @rule(chosen=keys, fault=faults)
    def get(self, chosen: list[str], fault: Fault) -> None:
        self.do(self._step(self._read(chosen, excused=fault is not None), fault))

    @rule(chosen=keys, fault=faults)
    def delete(self, chosen: list[str], fault: Fault) -> None:
        work = self.client.delete(self.registered, [key.encode() for key in chosen])
        done = self.do(self._step(work, fault))
        for key in chosen:
            self.cells[key].must = False
            if done:
                self.cells[key].clear()

    @rule(user=st.sampled_from(["alice", "bob"]), fault=faults)
    def delete_by_label(self, user: str, fault: Fault) -> None:
        """Everything of one user, with a receipt that is worked on from then on."""

        async def work() -> None:
            body = {"label": {"kind": "user", "value": user}}
            asked = await Admin(self.bench.opened).ask(
                "POST", f"/v1/tenants/-/namespaces/{self._space}/deletions", body, peer=os.geteuid()
            )
            if not asked.is_success:
                raise Outage(asked.text)

        done = self.do(self._step(work(), fault))
        if not done:
            self.going.add(user)
        for cell in self.cells.values():
            if user in cell.users:
                cell.must = False
                if done and cell.users == {user}:
                    cell.clear()

    @rule(seconds=st.sampled_from([1.0, 11.0, 41.0]))
    def wait(self, seconds: float) -> None:
        self.do(self.bench.house.wait(seconds))

    @rule(job=st.sampled_from(["backlog", "sweep", "drain", "keys", "orphans", "hits", "deletions"]), fault=faults)
    def work(self, job: str, fault: Fault) -> None:
        crew = self.bench.opened.crew
        jobs = {
            "backlog": lambda: take_up_backlog(crew),
            "sweep": crew.sweep_everywhere,
            "drain": crew.drain_everywhere,
            "keys": crew.tend_keys,
            "orphans": crew.look_for_orphans,
            "hits": crew.write_down_hits,
            "deletions": crew.go_on_deleting,
        }
        self.do(self._step(jobs[job](), fault))
        if job == "deletions" and fault is None:
            self.do(self._ask_what_goes_on())

    async def _ask_what_goes_on(self) -> None:
        """Where no job is left, what is there may have been met by one, and nothing that comes now is."""
        if not await self.bench.opened.rooms.deletions.unfinished(self.bench.house.owner.tenant):
            for cell in self.cells.values():
                cell.must = cell.must and not cell.users & self.going
            self.going.clear()

    @rule(fault=faults)
    def rotate(self, fault: Fault) -> None:
        async def work() -> None:
            with suppress(RegistryRefused):  # one that was broken off may have left its lease, for some minutes
                await self.bench.opened.custodian.rotate_data_key(self.scope, ACT)

        self.do(self._step(work(), fault))
        self.bench.opened.directory.forget(self.scope.tenant)

    @rule(fault=faults)
    def raise_least_epoch(self, fault: Fault) -> None:
        """After a leak: the next epoch begins, and nothing of those before may be opened any more."""

        async def work() -> None:
            custodian = self.bench.opened.custodian
            await custodian.rotate_data_key(self.scope, ACT)
            newest = (await self.bench.house.place(self._space)).epoch
            await custodian.change_epochs(self.scope, EpochPolicy(min_decrypt_epoch=newest), ACT)

        async def unless_leased() -> None:
            with suppress(RegistryRefused):  # as in `rotate`
                await work()
                raised.append(True)

        raised: list[bool] = []
        self.do(self._step(unless_leased(), fault))
        self.bench.opened.directory.forget(self.scope.tenant)
        for cell in self.cells.values():
            cell.must = False
            if raised:
                cell.clear()

    @rule(fault=faults)
    def shred(self, fault: Fault) -> None:
        """The namespace's key is destroyed; asked again until it says so. Nothing is read there any more."""
        for attempt in (fault, None):
            done = self.do(self._step(self.bench.opened.custodian.shred(self.scope, ACT), attempt))
            self.bench.opened.directory.forget(self.scope.tenant)
            if done:
                break
        assert done, "without a fault it comes to its end"
        self.do(self._read_nothing())
        for cell in self.cells.values():
            cell.clear()
        self.going.clear()
        self.do(self._make())

    async def _read_nothing(self) -> None:
        buffers = [bytearray(CHUNK_BYTES) for _ in KEYS]
        with suppress(RequestRefused):
            report = await self.client.get(self.registered, [key.encode() for key in KEYS], buffers)
            assert not report.hits, "law 5: read after a shred"
        assert buffers == [bytearray(CHUNK_BYTES) for _ in KEYS], "law 3: bytes were left after a shred"

    @rule()
    def forget_staging(self) -> None:
        self.bench.forget_staging()

    @rule()
    def restart(self) -> None:
        self.do(self._restart())

    async def _restart(self) -> None:
        await self.bench.check_held()
        await self.stack.aclose()
        await self._open()

    # What must hold

    async def _read(self, chosen: Sequence[str], *, excused: bool) -> None:
        buffers = [bytearray(CHUNK_BYTES) for _ in chosen]
        now = self.clock.monotonic()
        report = await self.client.get(self.registered, [key.encode() for key in chosen], buffers)
        hits = {hit.index for hit in report.hits}
        for index, key in enumerate(chosen):
            cell = self.cells[key]
            if index in hits:
                found = {one for one in cell.may if CONTENTS[one] == buffers[index]}
                assert found, f"law 3 or 5: {key} was read, and may only be {cell.may or 'gone'}"
                assert now < cell.may_until, f"law 5: {key} was read after its expiry"
            else:
                lost = self._stands(cell, now)
                assert excused or not lost, f"law 8: {key} is lost, an outage: {report.outcome is Outcome.OUTAGE}"

    @invariant()
    def counters_equal_rows(self) -> None:
        if not self.ready:
            return

        async def look() -> None:
            tenant = self.bench.house.owner.tenant
            scopes = [one.scope for one in await self.bench.opened.rooms.catalog.namespaces(tenant)]
            database = self.bench.opened.rooms.catalog._database
            await database.read(lambda connection: check_laws(connection, scopes), self.bench.house._sight)

        self.do(look())


def chosen_settings(examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.reuse, Phase.generate),  # a run can be read, and to shrink takes an hour
    )


@pytest.mark.timeout(300)
def test_S24_a_gateway_over_faulty_seams_does_what_the_model_does() -> None:
    run_state_machine_as_test(GatewayMachine, settings=chosen_settings(6, 16))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("by", WAYS)
def test_S24_the_same_at_length_over_every_transport(by: Way) -> None:
    class Reached(GatewayMachine):
        way = by

    examples = 100 if by == "embedded" else 25
    run_state_machine_as_test(Reached, settings=chosen_settings(examples, 50))


@pytest.mark.slow
@pytest.mark.postgres
@pytest.mark.s3
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("by", WAYS)
def test_S24_the_same_on_postgresql(postgres: Postgres, seaweed: S3Server, tmp_path: Path, by: Way) -> None:
    shared = Footing(postgres, seaweed, tmp_path)
    shared.prepare()

    class OnPostgres(GatewayMachine):
        way = by

        def __init__(self) -> None:
            anew = Footing(postgres, seaweed, tmp_path)
            anew.prepare()
            OnPostgres.chosen = replace(SETTINGS, catalog=CatalogSettings(url=anew.url(), pool=4))
            super().__init__()

    with _database_without_a_clock():
        run_state_machine_as_test(OnPostgres, settings=chosen_settings(10, 25))
