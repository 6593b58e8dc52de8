"""Q02, Q07: any order of reserve, commit, abort, delete, expiry, write-back and sweep against a model in plain Python.

After every step the counters equal the model's and the rows' (law 4), no limit is passed, and exactly the entries that
the model has are visible (law 5).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sqlalchemy import update

from tenancy import formats, placements, putting, quota, registry, sweep, usage, visible
from tenancy.births import Batch, NewChunk
from tenancy.engine import sqlite_engine
from tenancy.errors import ReservationExpired
from tenancy.model import Scope
from tenancy.policy import Policy
from tenancy.registry import KeyRow
from tenancy.schema import TENANT_SCOPE, metadata
from tenancy.schema import quota as quota_table
from tests.tenancy.catalog_bench import BOTH, HERE, NOW, PLAIN, SEALED, description, name

SIZE = SEALED
TTL = 40
LEASE = 25
OBJECTS, S3_OBJECTS, TENANT_OBJECTS = (4, 7), (6, 4), 8
"""Limits of either namespace and of both: each of them is the tightest somewhere, or nothing would be seen of it."""

TENANT = UUID(int=0xA)
SCOPES = (Scope(TENANT, UUID(int=1)), Scope(TENANT, UUID(int=2)))

which = st.integers(0, 1)
keys = st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True)
contents = st.lists(st.sampled_from("xyz"), min_size=4, max_size=4)


@dataclass
class Reserved:
    space: int
    keys: list[str]
    granted: list[int]
    batch: Batch
    until: int


@dataclass
class Space:
    """The model of one namespace."""

    entries: dict[str, bytes] = field(default_factory=dict)
    expires: dict[str, int] = field(default_factory=dict)
    content: dict[bytes, str] = field(default_factory=dict)
    """Every chunk that has a row, with its content; of live and of dying ones."""
    live: dict[str, bytes] = field(default_factory=dict)
    s3: dict[bytes, str] = field(default_factory=dict)

    def visible(self, now: int) -> set[str]:
        return {key for key, until in self.expires.items() if until > now}

    def remove(self, key: str) -> None:
        blob = self.entries.pop(key)
        del self.expires[key]
        if blob not in self.entries.values():
            del self.live[self.content[blob]]
            if self.s3[blob] == "due":
                del self.s3[blob]
            else:
                self.s3[blob] = "doomed"

    def sweep(self) -> None:
        alive = set(self.live.values())
        self.content = {blob: content for blob, content in self.content.items() if blob in alive}
        self.s3 = {blob: state for blob, state in self.s3.items() if blob in alive}


class QuotaMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.engine = sqlite_engine(Path(":memory:"))
        self.prepared = False
        self.now = NOW
        self.serial = itertools.count(1)
        self.spaces = (Space(), Space())
        self.open: dict[bytes, Reserved] = {}

    @initialize()
    def prepare(self) -> None:
        with self.engine.begin() as connection:
            metadata.create_all(connection)
            registry.create_tenant(connection, TENANT, "t", NOW)
            for number, scope in enumerate(SCOPES):
                policy = Policy(limit_objects=OBJECTS[number], limit_s3_bytes=S3_OBJECTS[number] * SIZE)
                registry.create_namespace(connection, scope, f"n{number}", policy, [KeyRow("data", 1, b"k")], NOW)
                formats.register(connection, scope, description(), NOW)
            connection.execute(
                update(quota_table)
                .where(quota_table.c.tenant_id == TENANT, quota_table.c.scope_id == TENANT_SCOPE)
                .values(limit_bytes=TENANT_OBJECTS * SIZE)
            )
        self.prepared = True

    def teardown(self) -> None:
        self.engine.dispose()

    def blob(self) -> bytes:
        return next(self.serial).to_bytes(16, "big")

    def objects(self, space: int) -> int:
        return sum(len(one.granted) for one in self.open.values() if one.space == space) + len(
            self.spaces[space].content
        )

    def s3_objects(self, space: int) -> int:
        return sum(len(one.granted) for one in self.open.values() if one.space == space) + len(self.spaces[space].s3)

    @rule(space=which, chosen=keys)
    def begin(self, space: int, chosen: list[str]) -> None:
        self.reserve(space, chosen)

    @rule(space=which, chosen=keys, texts=contents, short=st.integers(0, 1))
    def put_at_once(self, space: int, chosen: list[str], texts: list[str], short: int) -> None:
        self.put(space, chosen, texts, short)

    def put(self, space: int, chosen: list[str], texts: list[str], short: int) -> None:
        before = set(self.open)
        self.reserve(space, chosen)
        for reservation in set(self.open) - before:
            self.announce(reservation, texts, short)

    def reserve(self, space: int, chosen: list[str]) -> None:
        model = self.spaces[space]
        names = tuple(name(key) for key in chosen)
        tiers = tuple((tier, HERE.node if tier == "nvme" else "") for tier in BOTH)
        batch = Batch(SCOPES[space], 1, names, (None, *names[:-1]), 0, 16, SIZE, TTL, "nvme", (), "w", tiers)
        visible_keys = model.visible(self.now)
        rest = [index for index, key in enumerate(chosen) if key not in visible_keys]
        room = min(
            OBJECTS[space] - self.objects(space),
            TENANT_OBJECTS - self.objects(0) - self.objects(1),
            S3_OBJECTS[space] - self.s3_objects(space),
        )
        for key in chosen:
            if key in model.entries and key not in visible_keys:
                model.remove(key)
        for key in visible_keys & set(chosen):
            model.expires[key] = max(model.expires[key], self.now + TTL)
        reservation = self.blob()
        with self.engine.begin() as connection:
            answer = putting.reserve(connection, batch, HERE, reservation, self.now + LEASE, self.now)
        assert answer.have == {index for index, key in enumerate(chosen) if key in visible_keys}
        assert list(answer.wanted) == rest[: max(0, room)], "a leading run, as long as the limits allow"
        assert answer.over_quota == set(rest[max(0, room) :])
        if answer.wanted:
            self.open[reservation] = Reserved(space, chosen, list(answer.wanted), batch, self.now + LEASE)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), texts=contents, short=st.integers(0, 1))
    def commit(self, data: st.DataObject, texts: list[str], short: int) -> None:
        self.announce(data.draw(st.sampled_from(sorted(self.open)), "reservation"), texts, short)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), texts=contents)
    def overtake(self, data: st.DataObject, texts: list[str]) -> None:
        """Another PUT of the same keys begins later and is finished first."""
        slow = self.open[data.draw(st.sampled_from(sorted(self.open)), "reservation")]
        self.put(slow.space, slow.keys, texts, 0)

    def announce(self, reservation: bytes, texts: list[str], short: int) -> None:
        """Commit with these contents, `short` of what was granted, and expect what the model does."""
        asked = self.open.pop(reservation)
        model = self.spaces[asked.space]
        new = [
            NewChunk(index, self.blob(), name(texts[index]), name("s"), name("r"), 1, 16, PLAIN, NOW,
                     frozenset({"nvme"}), "object")
            for index in asked.granted[: len(asked.granted) - short]
        ]  # fmt: skip
        taken = model.visible(self.now)
        for one in new:
            key = asked.keys[one.index]
            if key in model.entries and key not in taken:
                model.remove(key)
        with self.engine.begin() as connection:
            answer = putting.commit(connection, asked.batch, HERE, reservation, new, self.now)
        for one in new:
            key, content = asked.keys[one.index], texts[one.index]
            if key in taken:
                same = model.content[model.entries[key]] == content
                assert one.index in (answer.have if same else answer.conflict)
                continue
            assert one.index in answer.stored
            if content not in model.live:
                model.live[content] = one.blob_id
                model.content[one.blob_id] = content
                model.s3[one.blob_id] = "due"
            model.entries[key] = model.live[content]
            model.expires[key] = self.now + TTL
        assert set(answer.discarded) == {one.blob_id for one in new} - set(model.content)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        reservation = data.draw(st.sampled_from(sorted(self.open)), "reservation")
        asked = self.open.pop(reservation)
        with self.engine.begin() as connection:
            putting.abort(connection, SCOPES[asked.space], reservation)

    @rule(milliseconds=st.integers(1, 15))
    def wait(self, milliseconds: int) -> None:
        self.now += milliseconds

    @rule(space=which)
    def reclaim(self, space: int) -> None:
        over = [key for key, one in self.open.items() if one.space == space and one.until <= self.now]
        with self.engine.begin() as connection:
            assert putting.reclaim_expired(connection, SCOPES[space], self.now) == len(over)
        for reservation in over:
            asked = self.open.pop(reservation)
            try:
                with self.engine.begin() as connection:
                    putting.commit(connection, asked.batch, HERE, reservation, [], self.now)
            except ReservationExpired:
                continue
            raise AssertionError("a reclaimed reservation was committed")

    @rule(space=which, chosen=keys)
    def delete(self, space: int, chosen: list[str]) -> None:
        model = self.spaces[space]
        there = [key for key in chosen if key in model.entries]
        with self.engine.begin() as connection:
            count, _ = sweep.delete_keys(connection, SCOPES[space], 1, [name(key) for key in chosen], self.now)
        assert count == len(there)
        for key in there:
            model.remove(key)

    @rule(space=which, limit=st.integers(1, 3))
    def expire(self, space: int, limit: int) -> None:
        model = self.spaces[space]
        over = sorted((until, key) for key, until in model.expires.items() if until <= self.now)
        with self.engine.begin() as connection:
            count, _ = sweep.expire(connection, SCOPES[space], self.now, limit)
            found = visible.lookup(connection, SCOPES[space], [1], [name(key) for key in "abcd"], HERE, self.now)
            left = {
                row.entry_key
                for row in connection.exec_driver_sql(
                    "SELECT entry_key FROM entry WHERE namespace_id = ?", (SCOPES[space].namespace.hex,)
                )
            }
        assert count == min(limit, len(over))
        assert len(found) == len(model.visible(self.now))
        for _, key in over:
            if name(key) not in left:
                model.remove(key)

    @rule(space=which, finished=st.booleans())
    def write_back(self, space: int, finished: bool) -> None:
        model = self.spaces[space]
        with self.engine.begin() as connection:
            due = placements.claim_due(connection, SCOPES[space], HERE, "s3", self.now + 1, self.now, 2)
            assert {one.blob_id for one in due} <= {blob for blob, state in model.s3.items() if state == "due"}
            if finished:
                ended = placements.Endings(done=due)
                model.s3.update({one.blob_id: "ok" for one in due})
            else:
                ended = placements.Endings(failed=[(one, 0) for one in due])
            turn = placements.settle_writes(connection, SCOPES[space], HERE, ended, None, self.now)
            assert turn.unneeded == frozenset()

    @rule(space=which)
    def collect(self, space: int) -> None:
        model = self.spaces[space]
        dying = set(model.content) - set(model.live.values())
        with self.engine.begin() as connection:
            gone = [one for tier in BOTH for one in sweep.doomed(connection, SCOPES[space], HERE, tier, self.now, 99)]
            assert sweep.purge(connection, SCOPES[space], HERE, gone, 99) == len(dying)
        model.sweep()

    @invariant()
    def counters_equal_model_and_rows(self) -> None:
        if not self.prepared:
            return
        with self.engine.begin() as connection:
            for space, scope in enumerate(SCOPES):
                tenant, mine = quota.lock(connection, scope)
                assert mine == usage.counted_rows(connection, scope)
                assert mine.objects == self.objects(space) <= OBJECTS[space]
                assert mine.stored_bytes == mine.objects * SIZE
                assert mine.s3_bytes == self.s3_objects(space) * SIZE <= S3_OBJECTS[space] * SIZE
                assert tenant.stored_bytes == (self.objects(0) + self.objects(1)) * SIZE <= TENANT_OBJECTS * SIZE
                found = visible.lookup(connection, scope, [1], [name(key) for key in "abcd"], HERE, self.now)
                model = self.spaces[space]
                assert {key: one.blob_id for key, one in found.items()} == {
                    name(key): model.entries[key] for key in model.visible(self.now)
                }


QuotaMachine.TestCase.settings = settings(
    max_examples=30,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # to shrink takes minutes, and 40 steps can be read
)
TestQuotaMachine = QuotaMachine.TestCase
