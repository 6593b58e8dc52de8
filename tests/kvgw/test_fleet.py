"""Several gateways as one: where a prefix goes, and what a dead, frozen or refusing gateway costs."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvgw.breaker import BreakerOptions, BreakerState
from kvgw.client import ClientOptions, connect
from kvgw.endpoint import TcpEndpoint
from kvgw.errors import Code, FormatError, Outage, RequestRefused
from kvgw.fleet import REMEMBERED_KEYS_MAX, FleetTransport
from kvgw.model import (
    DeleteReply,
    DeleteRequest,
    GetReply,
    GetRequest,
    MatchReply,
    MatchRequest,
    Outcome,
    PutOutcome,
    PutReply,
    PutRequest,
    StatReply,
    StatRequest,
    TouchReply,
    TouchRequest,
)
from kvgw.reports import Registered
from kvgw.runtime import SystemClock, SystemRng
from tests.support.aio import aio
from tests.support.gateways import format_of, house, keys_of, payloads_of, read
from tests.support.manual_clock import ManualClock
from tests.support.proxy import Proxy
from tests.support.several import Footing, on_footing

FINGERPRINT = b"f" * 32


class Fake:
    """A transport that notes what it is asked and answers, fails, refuses or freezes as it is told."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log
        self.asked: list[Any] = []
        self.behaviour: BaseException | None = None
        self.frozen = False
        self.closed = False

    async def _answer(self, request: Any, answer: Any) -> Any:
        self.asked.append(request)
        self.log.append(self.name)
        if self.frozen:
            await asyncio.Event().wait()
        if self.behaviour is not None:
            raise self.behaviour
        return answer

    async def ask(self, request: Any, answer: Any) -> Any:
        answers = {MatchReply: MatchReply(0, []), TouchReply: TouchReply(0), DeleteReply: DeleteReply(0)}
        return await self._answer(request, answers.get(answer))

    async def put(self, request: PutRequest, payloads: Sequence[memoryview]) -> Any:
        return await self._answer(request, PutReply([PutOutcome.STORED] * len(payloads), 0))

    async def get(self, request: GetRequest, into: Sequence[memoryview]) -> Any:
        return await self._answer(request, GetReply([]))

    async def aclose(self) -> None:
        self.closed = True


class Fleet:
    """A fleet of fakes, and short ways to ask it."""

    def __init__(self, size: int, **options: Any) -> None:
        self.log: list[str] = []
        names = [f"tcp:gateway-{number}:8470" for number in range(size)]
        self.members = {name: Fake(name, self.log) for name in names}
        self.clock = options.pop("clock", None) or SystemClock()
        self.transport = FleetTransport(list(self.members.items()), BreakerOptions(**options), self.clock, SystemRng())

    async def match(self, *keys: bytes, deadline_ms: int = 1000) -> str:
        request = MatchRequest([FINGERPRINT], list(keys), deadline_ms=deadline_ms)
        await self.transport.ask(request, MatchReply)
        return self.log[-1]

    async def put(self, *keys: bytes, parent: bytes | None = None, deadline_ms: int = 1000) -> str:
        request = PutRequest(FINGERPRINT, list(keys), parent, deadline_ms=deadline_ms)
        await self.transport.put(request, [memoryview(b"")] * len(keys))
        return self.log[-1]

    async def get(self, *keys: bytes) -> str:
        request = GetRequest(FINGERPRINT, list(keys))
        await self.transport.get(request, [memoryview(bytearray())] * len(keys))
        return self.log[-1]


def chain(name: str, length: int = 6) -> list[bytes]:
    return keys_of(length, name)


# Where a prefix goes


@aio
async def test_every_request_of_a_chain_goes_to_one_gateway() -> None:
    fleet = Fleet(5)
    places = set()
    for number in range(60):
        keys = chain(f"chain-{number}")
        where = await fleet.match(*keys)
        places.add(where)
        assert await fleet.put(*keys[:3]) == where
        assert await fleet.put(*keys[3:], parent=keys[2]) == where, "a later PUT names its parent only"
        assert await fleet.put(b"new-%d" % number, parent=keys[5]) == where
        assert await fleet.match(b"new-%d" % number) == where, "its keys belong to the chain from then on"
        assert await fleet.get(*keys[2:4]) == where, "a GET from the middle of a chain that was seen"
        for request, answer in (
            (TouchRequest(FINGERPRINT, keys[4:]), TouchReply),
            (DeleteRequest(FINGERPRINT, keys[1:2]), DeleteReply),
        ):
            await fleet.transport.ask(request, answer)
            assert fleet.log[-1] == where
    assert len(places) == 5, "all gateways have their part"


@aio
async def test_clients_agree_without_talking() -> None:
    one, other = Fleet(4), Fleet(4)
    shuffled = list(other.members.items())
    random.Random(1).shuffle(shuffled)
    other.transport = FleetTransport(shuffled, BreakerOptions(), SystemClock(), SystemRng())
    for number in range(40):
        keys = chain(f"chain-{number}")
        assert await one.match(*keys) == await other.put(*keys[:1])


@aio
async def test_the_loss_of_a_gateway_moves_its_own_prefixes_and_no_others() -> None:
    fleet = Fleet(4, failures=1, period_s=1000.0)
    names = [f"chain-{number}" for number in range(200)]
    before = {name: await fleet.match(*chain(name)) for name in names}
    counts = [list(before.values()).count(name) for name in fleet.members]
    assert min(counts) > 25, f"roughly even: {counts}"
    lost = next(iter(fleet.members))
    fleet.members[lost].behaviour = Outage("down")
    after = {name: await fleet.match(*chain(name)) for name in names}
    assert all(after[name] == before[name] for name in names if before[name] != lost)
    moved = {after[name] for name in names if before[name] == lost}
    assert moved == set(fleet.members) - {lost}, "and they are spread over all that are left"
    assert fleet.transport.states[lost] is BreakerState.OPEN


@aio
async def test_requests_without_keys_and_forgotten_chains_are_served_all_the_same() -> None:
    fleet = Fleet(3)
    assert await fleet.transport.ask(StatRequest(), StatReply) is None
    await fleet.match(*chain("old"))
    for start in range(0, REMEMBERED_KEYS_MAX + 1000, 1000):
        await fleet.match(*(b"%d" % number for number in range(start, start + 1000)))
    assert len(fleet.transport._prefix_of) == REMEMBERED_KEYS_MAX
    await fleet.get(*chain("old"))


# What a bad gateway costs


def order_of(fleet: Fleet, first: bytes) -> list[str]:
    return [one.name for one in sorted(fleet.transport._members, key=lambda one: one.weight(first), reverse=True)]


@aio
async def test_a_dead_gateway_is_asked_a_few_times_and_then_no_more() -> None:
    fleet = Fleet(2, failures=2, period_s=1000.0)
    first, second = order_of(fleet, b"k")
    fleet.members[first].behaviour = Outage("connection refused")
    for _ in range(10):
        assert await fleet.match(b"k") == second
    assert len(fleet.members[first].asked) == 2, "then its breaker answers for it"
    fleet.members[second].behaviour = Outage("connection refused too")
    for _ in range(2):
        with pytest.raises(Outage, match="refused too"):
            await fleet.match(b"k")
    with pytest.raises(Outage, match="no gateway of the fleet answered lately"):
        await fleet.match(b"k")


@aio
async def test_a_gateway_that_is_back_gets_its_prefixes_again() -> None:
    clock = ManualClock()
    fleet = Fleet(2, failures=1, period_s=1.0, clock=clock)
    first, second = order_of(fleet, b"k")
    fleet.members[first].behaviour = Outage("restarting")
    assert await fleet.match(b"k") == second
    fleet.members[first].behaviour = None
    assert await fleet.match(b"k") == second
    clock.advance(2.0)
    assert await fleet.match(b"k") == first
    assert fleet.transport.states[first] is BreakerState.CLOSED


@aio
async def test_a_frozen_gateway_takes_half_of_the_deadline_at_most_and_then_none() -> None:
    fleet = Fleet(2, failures=2, period_s=1000.0)
    first, second = order_of(fleet, b"k")
    fleet.members[first].frozen = True
    for attempt in range(4):
        started = time.monotonic()
        assert await fleet.match(b"k", deadline_ms=800) == second
        took = time.monotonic() - started
        assert 0.35 < took < 0.8 if attempt < 2 else took < 0.35, f"attempt {attempt}: {took:.2f} s"
    assert len(fleet.members[first].asked) == 2


@aio
async def test_the_last_gateway_has_nearly_all_the_time_that_is_left() -> None:
    fleet = Fleet(2, failures=1, period_s=1000.0)
    first, second = order_of(fleet, b"k")
    fleet.members[first].behaviour = Outage("down")
    assert await fleet.match(b"k") == second

    async def slowly(request: Any, answer: Any) -> Any:
        await asyncio.sleep(0.7)
        return MatchReply(0, [])

    fleet.members[second].ask = slowly  # type: ignore[method-assign]
    await fleet.transport.ask(MatchRequest([FINGERPRINT], [b"k"], deadline_ms=1000), MatchReply)
    assert fleet.transport.states[second] is BreakerState.CLOSED, "slow within the deadline is no failure"
    fleet.members[second].ask = Fake.ask.__get__(fleet.members[second])  # type: ignore[method-assign]
    fleet.members[second].frozen = True
    started = time.monotonic()
    with pytest.raises(Outage, match="did not answer within") as outage:
        await fleet.match(b"k", deadline_ms=400)
    assert outage.value.code is Code.DEADLINE
    assert time.monotonic() - started < 0.4 + 0.3
    assert fleet.transport.states[second] is BreakerState.OPEN


@aio
async def test_a_gateway_that_was_never_asked_is_not_blamed() -> None:
    clock = ManualClock()
    fleet = Fleet(3, failures=1, clock=clock)
    first, *others = order_of(fleet, b"k")

    async def stalled(request: Any, answer: Any) -> Any:
        clock.advance(5.0)  # the whole deadline passes
        raise Outage("down")

    fleet.members[first].ask = stalled  # type: ignore[method-assign]
    with pytest.raises(Outage, match="down"):
        await fleet.match(b"k", deadline_ms=1000)
    assert [fleet.transport.states[name] for name in others] == [BreakerState.CLOSED] * 2
    assert not fleet.log


@aio
async def test_a_refusal_is_an_answer_and_is_not_asked_for_elsewhere() -> None:
    fleet = Fleet(3, failures=1)
    first, *others = order_of(fleet, b"k")
    fleet.members[first].behaviour = RequestRefused("no such format", Code.FORMAT_UNKNOWN)
    for send in (fleet.match, fleet.put, fleet.get):
        with pytest.raises(RequestRefused, match="no such format"):
            await send(b"k")
    assert sum(len(fleet.members[name].asked) for name in others) == 0
    assert fleet.transport.states[first] is BreakerState.CLOSED


@aio
async def test_a_cancelled_request_says_nothing_about_its_gateway() -> None:
    fleet = Fleet(2, failures=1)
    first, second = order_of(fleet, b"k")
    fleet.members[first].frozen = True
    task = asyncio.create_task(fleet.match(b"k"))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert set(fleet.transport.states.values()) == {BreakerState.CLOSED}
    assert not fleet.members[second].asked
    await fleet.transport.aclose()
    assert all(one.closed for one in fleet.members.values())


# Real gateways


def options(**changes: Any) -> ClientOptions:
    return ClientOptions(breaker=BreakerOptions(**({"failures": 2, "period_s": 1000.0} | changes)))


@contextmanager
def unused_endpoint() -> Any:
    with closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))  # bound, and never listening: every connection is refused
        yield f"tcp:127.0.0.1:{sock.getsockname()[1]}"


@aio
async def test_connect_takes_one_or_several_endpoints_and_no_nonsense(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="at least one endpoint"):
        connect([])
    with pytest.raises(RequestRefused, match="'nowhere' is not an endpoint"):
        connect(["tcp:127.0.0.1:1", "nowhere"])
    async with house("tcp", tmp_path / "gw") as gateway:
        for endpoints in (str(gateway.endpoint), [str(gateway.endpoint)]):
            async with connect(endpoints, token=gateway.token) as client:
                assert (await client.stat()).entries == 0


@aio
async def test_all_dead_is_an_outage_for_reads_and_an_error_for_the_rest() -> None:
    with unused_endpoint() as a, unused_endpoint() as b:
        async with connect([a, b], token="t", options=options()) as client:
            registered = Registered(format_of(), "", FINGERPRINT)
            for _ in range(4):
                match = await client.match(registered, [b"k"])
                assert (match.count, match.outcome) == (0, Outcome.OUTAGE)
            assert "no gateway" in match.reason or "did not answer" in match.reason
            with pytest.raises(Outage):
                await client.delete(registered, [b"k"])


@pytest.mark.s3
@pytest.mark.postgres
@pytest.mark.timeout(120)
@on_footing
async def test_real_gateways_share_the_prefixes_and_take_over_for_each_other(shared: Footing) -> None:
    async with AsyncExitStack() as stack:
        a = await stack.enter_async_context(shared.gateway("a", tcp=True))
        b = await stack.enter_async_context(shared.gateway("b", tcp=True))
        token = a.token or b.token
        ports = [one.endpoint.port for one in (a, b) if isinstance(one.endpoint, TcpEndpoint)]
        proxies = [await stack.enter_async_context(Proxy(port)) for port in ports]
        endpoints = [f"tcp:127.0.0.1:{proxy.port}" for proxy in proxies]
        client = await stack.enter_async_context(connect(endpoints, token=token, options=options(failures=1)))
        registered = await client.register(format_of())
        chains = [keys_of(3, f"chain-{number}") for number in range(12)]
        contents = {keys[0]: payloads_of(registered, 3, seed) for seed, keys in enumerate(chains)}
        for keys in chains:
            assert (await client.put(registered, keys[:1], contents[keys[0]][:1])).stored == 1
            later = await client.put(registered, keys[1:], contents[keys[0]][1:], parent=keys[0], depth=1)
            assert later.stored == 2
            assert (await client.match(registered, keys)).count == 3, "all of a chain is where it is asked for"
        homes = await shared.rows("SELECT home_node, count(*) FROM chunk GROUP BY 1")
        assert len(homes) == 2
        assert all(count % 3 == 0 for _, count in homes), "a chain is never split"
        for one in (a, b):
            await one.opened.crew.drain_everywhere()
        proxies[0].freeze()
        started = time.monotonic()
        for keys in chains:
            report, found = await read(client, registered, keys)
            assert (report.outcome, found) == (Outcome.OK, contents[keys[0]]), "from S3, through the other"
        assert time.monotonic() - started < 10.0 * 0.5 + 10.0, "one frozen half of one deadline, and no more"
        assert set(client._transport.states.values()) == {BreakerState.OPEN, BreakerState.CLOSED}  # type: ignore[attr-defined]
        proxies[1].cut()
        match = await client.match(registered, chains[0])
        assert (match.count, match.outcome) == (0, Outcome.OUTAGE)
        proxies[0].thaw()
