"""The parts of vLLM's tier that need no vLLM: settings, formats, lookups, transfers and jobs."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from kvgw.engines.counters import COUNTERS, Counters
from kvgw.engines.loop import LoopThread
from kvgw.engines.remote import Found
from kvgw.engines.vllm_tier.format import engine_key, format_of
from kvgw.engines.vllm_tier.jobs import Allowance, Job, Jobs
from kvgw.engines.vllm_tier.lookups import Lookups, Whose
from kvgw.engines.vllm_tier.options import NOT_HERE, TierOptions, parse_tier_options
from kvgw.engines.vllm_tier.transfers import Chunk, Transfers
from kvgw.errors import FormatError
from kvgw.kvformat import KVFormat
from kvgw.runtime import SystemClock

GIVEN: dict[str, Any] = {"endpoint": "unix:/x", "weights": "w", "tokenizer": "t", "compatibility": "c"}
WHOSE = Whose("", b"")
ROW = 64


@dataclass(frozen=True)
class Group:
    tokens_per_block: int = 16
    layer_names: tuple[str, ...] = ("a", "b")
    group_id: int = 0
    sliding_window_size_in_chunks: int | None = None


@dataclass(frozen=True)
class Model:
    name: str = "/models/m"
    dtype: str = "bfloat16"
    max_model_len: int = 4096


@dataclass(frozen=True)
class Cache:
    tokens_per_hash: int = 16
    blocks_per_chunk: int = 2


@dataclass(frozen=True)
class Parallel:
    world_size: int = 2
    tp_size: int = 2
    pp_size: int = 1
    pcp_size: int = 1
    dcp_size: int = 1


@dataclass(frozen=True)
class Config:
    """What vLLM says of itself; its own class has the same names."""

    groups: tuple[Group, ...] = (Group(),)
    model: Model = Model()
    cache: Cache = Cache()
    parallel: Parallel = Parallel()
    worker_kv_bytes_per_block: int = 16
    canonical_layout: bool = False
    kv_cache_layout: str | None = "LBHNC"


def made(config: Config | None = None, row: int = ROW, *, replicated: bool = False, **changes: Any) -> KVFormat:
    options, _ = parse_tier_options({**GIVEN, **changes})
    return format_of(config or Config(), row, replicated=replicated, options=options, abi=[("vllm", "1")])  # type: ignore[arg-type]


def test_every_fact_that_vllm_states_is_in_the_format() -> None:
    """Law 2: a wrong guess is a miss."""
    base = Config()
    formats = [
        made(),
        made(replace(base, groups=(Group(tokens_per_block=32),))),
        made(replace(base, groups=(Group(layer_names=("a", "c")),))),
        made(replace(base, groups=(Group(group_id=1),))),
        made(replace(base, model=Model(name="/models/n"))),
        made(replace(base, model=Model(dtype="float16"))),
        made(replace(base, model=Model(dtype="fp8"))),
        made(replace(base, model=Model(dtype="fp8_ds_mla"))),
        made(replace(base, model=Model(max_model_len=1))),
        made(replace(base, cache=Cache(tokens_per_hash=8))),
        made(replace(base, cache=Cache(blocks_per_chunk=4))),
        made(replace(base, parallel=Parallel(world_size=4))),
        made(replace(base, parallel=Parallel(tp_size=1, pp_size=2))),
        made(replace(base, parallel=Parallel(pcp_size=2))),
        made(replace(base, parallel=Parallel(dcp_size=2))),
        made(replace(base, worker_kv_bytes_per_block=8)),
        made(replace(base, canonical_layout=True)),
        made(replace(base, kv_cache_layout="BLHNC")),
        made(row=128),
        made(replicated=True),
        *(made(**{name: "other"}) for name in ("model", "weights", "tokenizer", "compatibility")),
    ]
    assert len({one.canonical() for one in formats}) == len(formats)
    assert (formats[0].chunk_bytes, formats[0].tokens_per_chunk, formats[0].model) == (ROW, 32, "m")
    assert (formats[7].kv_dtype, formats[7].kv_quantisation) == ("uint8", "fp8_ds_mla")


def test_a_local_model_is_known_by_its_files(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "tokenizer.json").write_text("{}")
    config = replace(Config(), model=Model(name=str(tmp_path)))
    unset = {"weights": None, "tokenizer": None, "digest_dir": str(tmp_path / "digests")}
    first = made(config, **unset)
    assert first.canonical() == made(config, **unset).canonical()
    (tmp_path / "model.safetensors").write_bytes(b"others")
    assert first.canonical() != made(config, **unset).canonical()
    with pytest.raises(FormatError, match="needs 'weights': org/m is no local folder"):
        made(replace(Config(), model=Model(name="org/m")), **unset)


def test_what_cannot_be_served_is_refused() -> None:
    for config, row, sentence in (
        (Config(groups=()), ROW, "0 groups"),
        (Config(groups=(Group(), Group(group_id=1))), ROW, "--disable-hybrid-kv-cache-manager"),
        (Config(groups=(Group(sliding_window_size_in_chunks=1),)), ROW, "full attention"),
        (Config(), 2**30, "smaller 'block_size'"),
    ):
        with pytest.raises(FormatError, match=sentence):
            made(config, row)


def test_tenants_come_by_a_requests_parameters_alone(tmp_path: Path) -> None:
    """Law 6."""
    path = tmp_path / "tenants.json"
    for content, sentence in (
        ({"by": "cache_salt", "tenants": {}}, "no cache_salt"),
        ({"by": "kv_transfer_params.t", "tenants": {}, "public": ["acme/prompts"]}, "kept in none"),
    ):
        path.write_text(json.dumps(content))
        with pytest.raises(FormatError, match=sentence):
            parse_tier_options({**GIVEN, "tenants_file": str(path)})
    salts = {Whose.of(*parse_tier_options(GIVEN)[1].resolve(None, params)) for params in (None, {"t": "x"})}
    assert salts == {WHOSE}, "without a map all are the engine's own"
    path.write_text(json.dumps({"by": "kv_transfer_params.t", "tenants": {}}))
    tenants = parse_tier_options({**GIVEN, "tenants_file": str(path)})[1]
    values = (None, "x", "y" * 100_000, ["x"], {"x": 1})
    strangers = [Whose.of(*tenants.resolve(None, {"t": value})) for value in values]
    assert {one.tenant for one in strangers} == {""}
    assert len({one.salt for one in strangers}) == len(strangers)
    assert max(len(one.salt) for one in strangers) == 32, "a caller's value is not hashed again for each key"
    assert len({engine_key(b"k" * 36, one.salt) for one in strangers}) == len(strangers)


class Gateway:
    """The gateway of `Lookups`: it answers when it is told to."""

    def __init__(self) -> None:
        self.asked: list[list[bytes]] = []
        self.answer: asyncio.Future[Found] | None = None
        self.count = 0

    async def match(self, tenant: str, keys: list[bytes], until: float) -> Found:
        self.asked.append(keys)
        if self.answer is not None:
            return await self.answer
        return Found(self.count, answered=True)


@dataclass
class FakeClock(SystemClock):
    now: float = 100.0

    def monotonic(self) -> float:
        return self.now


@dataclass
class Asking:
    """Lookups, their clock and their gateway."""

    belief_s: float = 30.0
    clock: FakeClock = field(default_factory=FakeClock)
    gateway: Gateway = field(default_factory=Gateway)
    counters: Counters = field(default_factory=lambda: Counters(logging.getLogger("test")))
    loop: LoopThread = field(default_factory=lambda: LoopThread("test-lookups"))

    def __post_init__(self) -> None:
        self.lookups = Lookups(
            self.gateway.match, self.loop, self.counters, self.clock, deadline_s=1.0, belief_s=self.belief_s
        )

    def step(self, request: str, keys: Sequence[bytes]) -> list[bool | None]:
        found = [self.lookups.look_up(request, WHOSE, key) for key in keys]
        self.lookups.flush()
        return found

    def settle(self) -> None:
        """Whatever was submitted to the loop has run."""

        async def nothing() -> None:
            for _ in range(5):
                await asyncio.sleep(0)

        self.loop.call(nothing, 10)


KEYS = [bytes([index]) * 36 for index in range(1, 6)]


def test_the_keys_of_a_step_are_one_question() -> None:
    one = Asking()
    one.gateway.count = 3
    assert one.step("r", KEYS) == [None] * 5
    one.settle()
    assert one.step("r", KEYS) == [True, True, True, False, False]
    assert one.gateway.asked == [KEYS]
    assert one.step("other", KEYS[:1]) == [None]
    one.lookups.forget("r")
    one.lookups.forget("other")
    assert one.lookups.requests == 0
    one.loop.close()


def test_a_question_without_an_answer_is_given_up_and_a_late_answer_counts_for_nothing() -> None:
    one = Asking()
    holder: list[asyncio.Future[Found]] = []

    async def hang() -> None:
        holder.append(asyncio.get_running_loop().create_future())

    one.loop.call(hang, 10)
    one.gateway.answer = holder[0]
    assert one.step("r", KEYS[:2]) == [None, None]
    one.clock.now += 1.2
    assert one.step("r", KEYS[:2]) == [None, None], "a little grace"
    one.clock.now += 0.1
    assert one.step("r", KEYS[:2]) == [False, False]
    assert one.counters.total("lookups_late") == 1

    async def answer() -> None:
        holder[0].set_result(Found(2, answered=True))

    one.loop.call(answer, 10)
    one.settle()
    assert one.step("r", KEYS[:2]) == [False, False]
    one.loop.close()


@pytest.mark.parametrize("belief", [0.0, 5.0])
def test_an_answer_is_told_at_least_once_and_believed_for_its_time(belief: float) -> None:
    """However late the engine asks again: or it would ask for ever."""
    one = Asking(belief)
    one.gateway.count = 1
    one.step("r", KEYS[:1])
    one.settle()
    one.clock.now += 60
    assert one.step("r", KEYS[:1]) == [True]
    one.clock.now += belief
    assert one.step("r", KEYS[:1]) == [None], "asked anew"
    one.settle()
    assert len(one.gateway.asked) == 2
    assert one.step("r", KEYS[:1]) == [True]
    one.loop.close()


def test_a_chunk_that_could_not_be_read_is_not_found_again() -> None:
    one = Asking()
    one.gateway.count = 5
    one.step("r", KEYS)
    one.settle()
    one.lookups.lost(Whose("another", b""), KEYS[:1])
    assert one.step("r", KEYS) == [True] * 5
    one.lookups.lost(WHOSE, [KEYS[3], KEYS[2]])
    assert one.step("r", KEYS) == [True, True, False, False, False]
    one.loop.close()
    assert one.step("late", KEYS[:1]) == [None]
    assert one.step("late", KEYS[:1]) == [False], "after the end nothing is found"


@dataclass
class Remote:
    """The gateway of `Transfers`."""

    puts: list[tuple[list[bytes], bytes | None, int | None]] = field(default_factory=list)
    there: int = 1000
    fail: bool = False
    ended: int = 0

    async def get_each(
        self, tenant: str, kv_format: KVFormat, keys: Sequence[bytes], into: Sequence[memoryview], until: float
    ) -> frozenset[int]:
        try:
            if self.fail and keys[0] == KEYS[0]:
                raise ZeroDivisionError
            await asyncio.sleep(0.05)
            for view in into:
                view[:] = b"x" * len(view)
        finally:
            self.ended += 1
        return frozenset(range(len(keys)))

    async def put(
        self,
        tenant: str,
        kv_format: KVFormat,
        keys: Sequence[bytes],
        chunks: Sequence[memoryview],
        *,
        parent: bytes | None,
        depth: int,
        until: float,
    ) -> int:
        self.puts.append((list(keys), parent, depth))
        return min(len(keys), self.there)

    async def put_each(
        self, tenant: str, kv_format: KVFormat, keys: Sequence[bytes], chunks: Sequence[memoryview], until: float
    ) -> frozenset[int]:
        self.puts.append((list(keys), None, None))
        return frozenset(range(len(keys)))


def transfers(remote: Remote, row: int = ROW) -> Transfers:
    return Transfers(made(row=row) and remote, made(row=row), Counters(logging.getLogger("test")), SystemClock())  # type: ignore[arg-type]


def test_chunks_are_stored_as_the_chains_they_are() -> None:
    remote = Remote()
    k = KEYS
    row = memoryview(bytearray(ROW))
    chunks = [
        Chunk(k[2], row, 3, k[1]),
        Chunk(k[1], row, 2, k[0]),
        Chunk(k[4], row),
        Chunk(k[3], row, 7, None),
        Chunk(k[0], row, 1, b"before"),
    ]
    until = SystemClock().monotonic() + 10
    stored = asyncio.run(transfers(remote).store(WHOSE, chunks, until))
    assert stored == set(k)
    assert remote.puts == [([k[4]], None, None), (k[:3], b"before", 1), ([k[3]], None, 7)]
    remote.there, remote.puts = 1, []
    assert asyncio.run(transfers(remote).store(WHOSE, chunks[:2], until)) == {k[1]}
    remote.puts = []
    salted = Whose("", b"s" * 32)
    asyncio.run(transfers(remote).store(salted, [chunks[0]], until))
    assert remote.puts == [([engine_key(k[2], salted.salt)], engine_key(k[1], salted.salt), 3)]


def test_a_load_ends_when_all_of_it_has_ended() -> None:
    """Law 7, also when a part of it fails in a way that nobody expected: no row is written afterwards."""
    remote = Remote(fail=True)
    row = 20 * 1024 * 1024  # one chunk is a batch
    memory = memoryview(bytearray(3 * row))
    chunks = [Chunk(key, memory[index * row : (index + 1) * row]) for index, key in enumerate(KEYS[:3])]

    async def run() -> None:
        with pytest.raises(ExceptionGroup):
            await transfers(remote, row).load(WHOSE, chunks, SystemClock().monotonic() + 10)
        ended = remote.ended
        memory[:] = bytes(len(memory))
        await asyncio.sleep(0.1)
        assert remote.ended == ended

    asyncio.run(run())
    assert memory == bytes(len(memory))


def test_a_transfer_that_finds_no_turn_ends_by_its_deadline() -> None:
    """Law 9: a gateway that hangs holds up those behind it no longer than their own deadlines."""
    remote = Remote()

    async def run() -> None:
        one = transfers(remote)
        await one._stores.acquire()
        clock = SystemClock()
        started = clock.monotonic()
        assert not await one.store(WHOSE, [Chunk(KEYS[0], memoryview(bytearray(ROW)))], started + 0.2)
        assert 0.1 < clock.monotonic() - started < 2

    asyncio.run(run())
    assert remote.puts == []


def test_jobs_are_reported_once_and_draining_waits_for_them() -> None:
    counters = Counters(logging.getLogger("test"))
    loop = LoopThread("test-jobs")
    jobs = Jobs(loop, counters, SystemClock())

    async def done() -> frozenset[bytes]:
        await asyncio.sleep(0.05)
        return frozenset(KEYS[:1])

    async def broken() -> frozenset[bytes]:
        raise ZeroDivisionError

    jobs.start(Job(1, True, WHOSE, tuple(KEYS[:1])), done)
    jobs.start(Job(2, True, WHOSE, tuple(KEYS[:2])), done)
    jobs.start(Job(3, False, WHOSE, tuple(KEYS[:1])), broken)
    jobs.refuse(Job(4, False, WHOSE, tuple(KEYS[:1])))
    jobs.drain()
    ended = {one.job.number: (one.success, len(one.done)) for one in jobs.take()}
    assert ended == {1: (True, 1), 2: (False, 1), 3: (False, 0), 4: (False, 0)}
    assert counters.total("store_outages") == 1
    assert jobs.take() == []
    loop.close()
    jobs.start(Job(5, False, WHOSE, tuple(KEYS[:1])), done)
    jobs.drain()
    assert [one.success for one in jobs.take()] == [False], "after the end"


def test_an_allowance_is_never_exceeded() -> None:
    """Law 9."""
    allowance = Allowance(3)
    assert [allowance.take(2), allowance.take(2), allowance.take(1)] == [2, 1, 0]
    allowance.give(2)
    assert allowance.take(5) == 2


def test_the_page_says_what_the_code_says() -> None:
    folder = Path(__file__).resolve().parents[2] / "docs" / "engines"
    page = (folder / "vllm-tier.md").read_text(encoding="utf-8")
    sample = json.loads((folder / "vllm-tier.json").read_text(encoding="utf-8"))
    assert sample in [json.loads(block) for block in re.findall(r"(?s)```json\n(.*?)```", page)]
    table = page[page.index("| setting of the tier") :].split("\n\n")[0]
    first = "\n".join(line.split(" | ")[0] for line in table.splitlines()[2:])
    assert set(re.findall(r"`(\w+)`", first)) == set(TierOptions.__struct_fields__) - NOT_HERE
    counters = page[page.index("| counter |") :].split("\n\n")[0]
    named = "\n".join(line.split(" | ")[0] for line in counters.splitlines()[2:])
    assert set(re.findall(r"`(\w+)`", named)) <= set(COUNTERS)
