"""Embedded or over a socket: the same operations get the same answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvgw.client import Client
from kvgw.errors import KvgwError
from kvgw.model import Durability, Label
from kvgw.reports import Registered
from tenancy.sealing import sealed_length
from tests.support.aio import run
from tests.support.gateways import format_of, house, payloads_of, read
from tests.support.manual_clock import ManualClock

CHUNK = 1024
CONTENTS = 4
FORMATS = [format_of(CHUNK), format_of(CHUNK, engine_abi="2")]

keys = st.lists(st.sampled_from([b"%d" % number for number in range(8)]), min_size=1, max_size=6)
places = st.tuples(st.sampled_from(["default", "small"]), st.sampled_from([0, 1]))


@dataclass(frozen=True)
class Operation:
    """A call of a client, or the passing of time."""

    name: str
    where: tuple[str, int]
    arguments: dict[str, Any]


def operation(name: str, **arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Operation]:
    return st.builds(Operation, st.just(name), places, st.fixed_dictionaries(arguments))


times = st.none() | st.sampled_from([0, 0.5, 30, 90, 1e9])
operations = st.lists(
    st.one_of(
        operation(
            "put",
            keys=keys,
            contents=st.lists(st.integers(0, CONTENTS - 1), min_size=6, max_size=6),
            ttl=times,
            depth=st.sampled_from([0, 3, -1]),
            parent=st.sampled_from([None, b"0", b""]),
            durability=st.sampled_from([None, *Durability]),
            labels=st.lists(st.builds(Label, st.sampled_from(["user", ""]), st.just("u")), max_size=2),
        ),
        operation("get", keys=keys),
        operation("match", keys=keys, lease_ms=st.sampled_from([0, 60_000, 60_001])),
        operation("touch", keys=keys, ttl=times),
        operation("delete", keys=keys),
        operation("stat"),
        operation("wait", seconds=st.sampled_from([0.5, 29.5, 60.0])),
        operation("sweep"),
    ),
    min_size=4,
    max_size=16,
)


async def answers(kind: Any, folder: Path, plan: list[Operation]) -> list[object]:
    """What each operation answered, or the error's code and sentence."""
    clock = ManualClock()
    async with house(kind, folder, clock=clock) as gateway:
        await gateway.namespace("small", limit_bytes=3 * sealed_length(CHUNK), durability=Durability.STAGED)
        clients = {name: gateway.client(name) for name in ("default", "small")}
        registered = {
            (name, index): await client.register(one)
            for name, client in clients.items()
            for index, one in enumerate(FORMATS)
        }
        given_answers: list[object] = []
        for each in plan:
            if each.name == "wait":
                await gateway.wait(each.arguments["seconds"])
            elif each.name == "sweep":
                await gateway.opened.crew.sweep_everywhere()
            else:
                if each.name == "stat":  # what is on its way out counts until it is gone, and that goes on by itself
                    await gateway.opened.crew.sweep_everywhere()
                try:
                    given_answers.append(await call(clients[each.where[0]], registered[each.where], each))
                except KvgwError as error:
                    given_answers.append((error.code, str(error)))
        return given_answers


async def call(client: Client, registered: Registered, each: Operation) -> object:
    arguments = dict(each.arguments)
    if each.name == "stat":
        return await client.stat()
    names = arguments.pop("keys")
    if each.name == "put":
        contents = payloads_of(registered, CONTENTS)
        chosen = [contents[index] for index in arguments.pop("contents")[: len(names)]]
        return await client.put(registered, names, chosen, **arguments)
    if each.name == "get":
        return await read(client, registered, names)
    return await getattr(client, each.name)(registered, names, **arguments)


@pytest.mark.timeout(300)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=operations)
def test_both_transports_give_the_same_answers(tmp_path_factory: pytest.TempPathFactory, plan: list[Operation]) -> None:
    folder = tmp_path_factory.mktemp("same")
    assert run(answers("embedded", folder / "e", plan)) == run(answers("unix", folder / "u", plan))


def test_a_plan_reaches_every_kind_of_answer(tmp_path: Path) -> None:
    """The comparison is worth nothing if both sides only refuse: one plan by hand, with what it must answer."""
    puts = {"ttl": 30, "depth": 0, "parent": None, "durability": None, "labels": [Label("user", "u")]}
    where = ("small", 0)
    plan = [
        Operation("put", where, {"keys": [b"a", b"b", b"c", b"d"], "contents": [0, 1, 2, 3], **puts}),
        Operation("put", where, {"keys": [b"a"], "contents": [1], **puts}),
        Operation("get", where, {"keys": [b"a", b"x", b"c"]}),
        Operation("delete", where, {"keys": [b"b", b"x"]}),
        Operation("wait", where, {"seconds": 30}),
        Operation("match", where, {"keys": [b"a"], "lease_ms": 0}),
        Operation("put", where, {"keys": [b"a"], "contents": [0], **puts, "depth": -1}),
    ]
    embedded, socket = run(answers("embedded", tmp_path / "e", plan)), run(answers("unix", tmp_path / "u", plan))
    assert embedded == socket
    text = [str(one) for one in embedded]
    assert [text[0].count("stored"), text[0].count("over_quota"), text[1].count("have")] == [3, 1, 1]
    assert [hit.index for hit in embedded[2][0].hits] == [0, 2]  # type: ignore[index]
    assert embedded[3] == 1
    assert "Match(count=0" in text[4]
    assert "malformed" in text[5]
