"""Both halves of the vLLM connector over a real gateway, driven as vLLM drives them. The engine is a stand-in."""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'kvgw[torch]'")

from kvgw.engines.options import EngineOptions, parse_options
from kvgw.engines.vllm.plan import Load, Plan, Store, Whose
from kvgw.reports import Registered
from tests.engines.fake_vllm import CHUNK, FakeVllm, Served
from tests.support.aio import aio
from tests.support.gateways import House, house

PROMPT = list(range(3, 3 + 5 * CHUNK + 7))
"""Five whole chunks and seven tokens."""


def options_for(gateway: House, **changes: Any) -> EngineOptions:
    given = {"endpoint": str(gateway.endpoint), "tokens_per_chunk": CHUNK, "lookup_deadline_s": 10.0}
    # What pays for a tiny cache and a stand-in for a model is chance; test_vllm_guard.py has it on.
    return parse_options({**given, "break_even": False, **changes})


@asynccontextmanager
async def engine(options: EngineOptions, **changes: Any) -> AsyncIterator[FakeVllm]:
    made = FakeVllm(options, **changes)
    try:
        yield made
    finally:
        await asyncio.to_thread(made.close)


async def serve(one: FakeVllm, tokens: list[int], **changes: Any) -> Served:
    return await asyncio.to_thread(lambda: one.serve(tokens, **changes))


@aio
async def test_what_one_engine_computed_another_loads(tmp_path: Path) -> None:
    async with house("unix", tmp_path) as gateway:
        async with engine(options_for(gateway)) as first:
            assert (await serve(first, PROMPT)).loaded == 0
            assert first.counters.total("tokens_stored") == 5 * CHUNK
        async with engine(options_for(gateway)) as second:
            assert (await serve(second, PROMPT)).loaded == 5 * CHUNK
            assert second.counters.total("tokens_loaded") == 5 * CHUNK
            assert second.counters.total("tokens_stored") == 0, "only what the gateway lacks is offered"


@aio
async def test_only_the_common_prefix_is_loaded_and_only_the_rest_stored(tmp_path: Path) -> None:
    other = [*PROMPT[: 2 * CHUNK + 3], *range(500, 560)]
    async with house("unix", tmp_path) as gateway:
        async with engine(options_for(gateway)) as first:
            await serve(first, PROMPT)
        async with engine(options_for(gateway)) as second:
            assert (await serve(second, other)).loaded == 2 * CHUNK
            assert second.counters.total("tokens_stored") == (len(other) // CHUNK - 2) * CHUNK


@aio
async def test_a_prompt_of_whole_chunks_keeps_its_last_token_to_compute(tmp_path: Path) -> None:
    async with house("unix", tmp_path) as gateway:
        async with engine(options_for(gateway)) as first:
            await serve(first, PROMPT[: 2 * CHUNK])
            assert first.counters.total("tokens_stored") == 2 * CHUNK
        async with engine(options_for(gateway)) as second:
            assert (await serve(second, PROMPT[: 2 * CHUNK])).loaded == CHUNK
            assert (await serve(second, PROMPT[: 2 * CHUNK + 1])).loaded == 2 * CHUNK


@pytest.mark.parametrize("local", [4, CHUNK, CHUNK + 8, 5 * CHUNK, 5 * CHUNK + 4])
def test_blocks_that_the_engine_has_itself_are_left_alone(tmp_path: Path, local: int) -> None:
    """They may be shared with requests that run."""

    @aio
    async def run() -> None:
        async with house("unix", tmp_path) as gateway:
            async with engine(options_for(gateway)) as first:
                await serve(first, PROMPT)
            async with engine(options_for(gateway)) as second:
                caches = second.caches[0]
                own = second.request(PROMPT)
                blocks = list(range(40, 62))
                served = Served(0, 0, 0.0)
                tokens, _ = await asyncio.to_thread(lambda: second.ask(own, local, served))
                assert tokens == max(0, 5 * CHUNK - local)
                before = caches[0][40 : 40 + local // 4].clone()
                second.scheduler.allocated(own, blocks, tokens)
                nobody = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set(), num_computed_tokens=[])
                plan = second.scheduler.plan(
                    SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=nobody, num_scheduled_tokens={})
                )
                second.workers[0].start_loads(plan)
                while plan.loads and not second.workers[0].finished_loads():
                    await asyncio.sleep(0.001)
                assert second.workers[0].take_bad_blocks() == set()
                assert bool((caches[0][40 : 40 + local // 4] == before).all())
                if tokens:
                    assert bool((caches[0][40 + local // 4 : 60] != -1).all())
                assert bool((caches[0][60:] == -1).all())

    run()


@pytest.mark.parametrize("step", [1, 5, CHUNK, 3 * CHUNK + 1])
def test_a_prompt_that_is_computed_in_pieces_is_stored_whole(tmp_path: Path, step: int) -> None:
    @aio
    async def run() -> None:
        async with house("unix", tmp_path) as gateway:
            async with engine(options_for(gateway)) as first:
                await serve(first, PROMPT, step=step)
            async with engine(options_for(gateway)) as second:
                assert (await serve(second, PROMPT)).loaded == 5 * CHUNK

    run()


@aio
async def test_a_preempted_request_loads_again(tmp_path: Path) -> None:
    async with house("unix", tmp_path) as gateway:
        async with engine(options_for(gateway)) as first:
            await serve(first, PROMPT)
        async with engine(options_for(gateway)) as second:
            assert (await serve(second, PROMPT, preempt=True)).loaded == 5 * CHUNK
            assert second.counters.total("tokens_loaded") == 10 * CHUNK


@aio
async def test_several_requests_load_in_one_step(tmp_path: Path) -> None:
    prompts = [[number, *PROMPT] for number in range(1, 4)]
    async with house("unix", tmp_path) as gateway:
        async with engine(options_for(gateway), blocks=400) as first:
            for prompt in prompts:
                await serve(first, prompt)
        async with engine(options_for(gateway), blocks=400) as second:
            served = await asyncio.gather(*(serve(second, prompt) for prompt in prompts[:1]))
            requests = [second.request(prompt) for prompt in prompts]
            for request in requests:
                await asyncio.to_thread(lambda request=request: second.ask(request, 0, served[0]))
            for at, request in enumerate(requests):
                start = 100 + 50 * at
                second.scheduler.allocated(request, list(range(start, start + 22)), 5 * CHUNK)
            nobody = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set(), num_computed_tokens=[])
            plan = second.scheduler.plan(
                SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=nobody, num_scheduled_tokens={})
            )
            assert len(plan.loads) == 3
            second.workers[0].start_loads(plan)
            done: set[str] = set()
            while len(done) < 3:
                done |= second.workers[0].finished_loads()
                await asyncio.sleep(0.001)
            assert second.workers[0].take_bad_blocks() == set()
            for at, prompt in enumerate(prompts):
                start = 100 + 50 * at
                second._check(prompt, list(range(start, start + 22)), 5 * CHUNK)


@aio
async def test_a_run_counts_only_as_far_as_every_rank_has_it(tmp_path: Path) -> None:
    async with house("unix", tmp_path) as gateway:
        async with engine(options_for(gateway), ranks=2) as first:
            await serve(first, PROMPT)
        async with engine(options_for(gateway), ranks=2) as second:
            assert (await serve(second, PROMPT)).loaded == 5 * CHUNK
            keys = _keys(second)
        client = gateway.client()
        registered = await client.register(second.formats[1])
        assert await client.delete(registered, keys[3:4]) == 1
        async with engine(options_for(gateway), ranks=2) as third:
            assert (await serve(third, PROMPT)).loaded == 3 * CHUNK
            assert third.counters.total("tokens_lost") == 0, "known from the lookup, not found out by the load"


def _keys(one: FakeVllm) -> list[bytes]:
    from kvgw.keys import prefix_keys

    return prefix_keys(one.formats[0], PROMPT)


@aio
async def test_a_chunk_that_is_gone_when_it_is_read_is_computed(tmp_path: Path) -> None:
    """Law 2."""
    async with house("unix", tmp_path) as gateway:
        async with engine(options_for(gateway)) as first:
            await serve(first, PROMPT)
        client, loop = gateway.client(), asyncio.get_running_loop()
        for gone, loaded in ((3, 3 * CHUNK), (0, 0)):
            async with engine(options_for(gateway)) as second:
                registered = await client.register(second.formats[0])
                key = _keys(second)[gone]

                def delete(registered: Registered = registered, key: bytes = key) -> None:
                    asyncio.run_coroutine_threadsafe(client.delete(registered, [key]), loop).result(5)

                served = await serve(second, PROMPT, between=delete)
                assert served.loaded == loaded
                assert served.bad
                assert second.counters.total("chunks_lost") > 0
                assert second.counters.total("tokens_lost") == 5 * CHUNK - loaded
                assert second.counters.total("tokens_stored") == 5 * CHUNK - loaded, "computed, and stored anew"


@aio
async def test_without_a_gateway_the_scheduler_is_answered_in_time(tmp_path: Path) -> None:
    """Laws 2 and 9: a peer that accepts and never answers."""
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "silent.sock"))
        silent.listen()
        endpoint = f"unix:{tmp_path / 'silent.sock'}"
        options = parse_options({"endpoint": endpoint, "tokens_per_chunk": CHUNK, "lookup_deadline_s": 0.2})
        async with engine(options) as one:
            started = time.monotonic()
            served = await serve(one, PROMPT)
            assert served.loaded == 0
            assert time.monotonic() - started < 2
            assert served.slowest_s < 0.1
            assert one.counters.total("lookups_late") + one.counters.total("lookup_outages") >= 1
            assert one.counters.total("tokens_stored") == 0


@aio
async def test_a_lookup_that_hangs_is_given_up(tmp_path: Path) -> None:
    """Law 9: whatever keeps the adapter's own thread."""
    async with house("unix", tmp_path) as gateway, engine(options_for(gateway, lookup_deadline_s=0.2)) as one:
        hangs = threading.Event()

        async def hang() -> None:
            hangs.wait(20)

        one.scheduler._loop.submit(hang)
        try:
            assert (await serve(one, PROMPT)).loaded == 0
        finally:
            hangs.set()
        assert one.counters.total("lookups_late") == 1


@aio
async def test_a_gateway_that_comes_back_is_used_again(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o700)
    endpoint = f"unix:{tmp_path / 'data' / 'kvgw.sock'}"
    options = parse_options({"endpoint": endpoint, "tokens_per_chunk": CHUNK, "lookup_deadline_s": 5.0})
    one = FakeVllm(options, blocks=2000)
    assert (await serve(one, PROMPT)).loaded == 0
    assert one.counters.total("lookup_outages") >= 1
    async with house("unix", tmp_path / "data"):
        for _ in range(60):  # the breaker lets a call through within seconds
            await serve(one, PROMPT)
            if one.counters.total("tokens_stored"):
                break
            await asyncio.sleep(0.1)
        assert (await serve(one, PROMPT)).loaded == 5 * CHUNK
        await asyncio.to_thread(one.close)


@aio
async def test_what_finds_no_memory_is_not_stored_and_the_model_does_not_wait(tmp_path: Path) -> None:
    """Law 9."""
    async with house("unix", tmp_path) as gateway:
        chunk_bytes = CHUNK * 2 * 2 * 8 * 4
        async with engine(options_for(gateway, store_bytes=2 * chunk_bytes)) as first:
            await serve(first, PROMPT)
            assert first.counters.total("chunks_dropped") == 3
            assert first.counters.total("tokens_stored") == 2 * CHUNK
            assert first.workers[0]._outward.idle
        async with engine(options_for(gateway, load_bytes=chunk_bytes)) as second:
            assert (await serve(second, PROMPT)).loaded == 2 * CHUNK
            assert second.workers[0]._inward.idle, "law 7"


@aio
async def test_users_with_different_salts_share_nothing(tmp_path: Path) -> None:
    """Law 6."""
    async with house("unix", tmp_path) as gateway, engine(options_for(gateway), blocks=400) as one:
        assert (await serve(one, PROMPT, cache_salt="a")).loaded == 0
        assert (await serve(one, PROMPT, cache_salt="b")).loaded == 0
        assert (await serve(one, PROMPT)).loaded == 0
        assert (await serve(one, PROMPT, cache_salt="a")).loaded == 5 * CHUNK


@aio
async def test_two_tenants_of_one_engine_have_their_own_namespaces(tmp_path: Path) -> None:
    """Law 6. Told apart by the operator's map, by nothing that a caller may choose."""
    values = {"red-secret": "red", "blue-secret": "blue"}
    async with house("unix", tmp_path / "data") as gateway:
        (tmp_path / "token").write_text((await gateway.new_token())[0])
        for namespace in values.values():
            await gateway.namespace(namespace)
        tenants = {value: {"token_file": "token", "namespace": namespace} for value, namespace in values.items()}
        (tmp_path / "map.json").write_text(json.dumps({"tenants": tenants}))
        async with engine(options_for(gateway, tenants_file=str(tmp_path / "map.json")), blocks=400) as one:
            for value in (*values, "stranger", "red"):
                assert (await serve(one, PROMPT, cache_salt=value)).loaded == 0
                assert (await serve(one, PROMPT, cache_salt=value)).loaded == 5 * CHUNK
        entries = {name: (await gateway.client(name).stat()).entries for name in ("red", "blue", "")}
        assert entries == {"red": 5, "blue": 5, "": 10}


@aio
async def test_an_adapter_has_a_kv_of_its_own(tmp_path: Path) -> None:
    lora = tmp_path / "lora"
    lora.mkdir()
    (lora / "adapter_config.json").write_text("{}")
    (lora / "adapter_model.safetensors").write_bytes(b"one")
    request = SimpleNamespace(lora_name="lora", lora_path=str(lora))
    async with house("unix", tmp_path / "data") as gateway, engine(options_for(gateway), blocks=400) as one:
        await serve(one, PROMPT)
        assert (await serve(one, PROMPT, lora_request=request)).loaded == 0
        assert (await serve(one, PROMPT, lora_request=request)).loaded == 5 * CHUNK
        (lora / "adapter_model.safetensors").write_bytes(b"two!")
        assert (await serve(one, PROMPT, lora_request=request)).loaded == 0, "the same name with other weights"
        hub = SimpleNamespace(lora_name="hub", lora_path="org/lora")
        assert (await serve(one, PROMPT, lora_request=hub)).loaded == 0
        assert one.counters.total("adapters_refused") == 1


@aio
async def test_requests_that_token_ids_do_not_name_are_left_alone(tmp_path: Path) -> None:
    """Law 2."""
    async with house("unix", tmp_path) as gateway, engine(options_for(gateway), blocks=400) as one:
        for changes in (
            {"mm_features": [SimpleNamespace(mm_hash="the caller's name of it")]},
            {"prompt_embeds": object()},
            {"pooling_params": object()},
            {"resumable": True},
            {"skip_reading_prefix_cache": True},
        ):
            assert (await serve(one, PROMPT, **changes)).waited == 0
        assert one.counters.total("requests_not_served") == 5
        await serve(one, PROMPT[: CHUNK - 1])
        assert one.counters.total("requests_short") == 1
        assert one.counters.total("lookups") == 0


def test_a_plan_travels_to_the_workers() -> None:
    whose = Whose("red", "lora", b"d" * 32)
    plan = Plan([Load("r", whose, [b"k"], [1, 2], 1)], [Store(whose, [b"k"], [1, 2], None, 0)])
    assert pickle.loads(pickle.dumps(plan)) == plan
