"""The real vLLM over a gateway that hangs, dies, refuses or is full: answers stay right, and nothing waits for long."""

from __future__ import annotations

import signal
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engines import vllm_engine
from tests.engines.full_staging import full_staging
from tests.engines.gateway_view import entries, reach
from tests.engines.relay import relay
from tests.engines.tiny_model import prompt
from tests.engines.vllm_engine import ROOMY, Engine, endpoint, engine, transfer_config
from tests.support.served import kvgw, served

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not vllm_engine.PYTHON, reason="vLLM has an environment of its own: make test-engines"),
]

CHUNKS = 4
HITS = CHUNKS * 256
SLACK_S = 2.0
"""What a machine that is busy with other things may add."""
BREAKER = "the gateway did not answer before; it is tried again shortly"
GET = b"\xa2op\xa3get"
"""In the header of a request to read chunks."""


@pytest.fixture(scope="module")
def one(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A process that becomes each of the engines in turn."""
    with engine(tiny, tmp_path_factory.mktemp("outage"), None, enable_prefix_caching=False) as made:
        yield made


@pytest.fixture(scope="module")
def right(one: Engine) -> dict[int, list[int]]:
    """What the engine answers to a prompt without kvgw."""
    return {number: one.ask(prompt(number))[0] for number in range(8)}


def connected(one: Engine, tiny: Path, config: dict[str, Any]) -> None:
    one.become(tiny, config, enable_prefix_caching=False)


def timed(ask: Callable[[], Any]) -> tuple[Any, float]:
    started = time.monotonic()
    return ask(), time.monotonic() - started


def counted(one: Engine, name: str, count: int) -> int:
    """One of the adapter's counters, once it is `count` or more. vLLM takes them over with a step of the engine."""
    until = time.monotonic() + 30
    while (found := int(one.metrics().get(f"vllm:kvgw_{name}", 0))) < count:
        assert time.monotonic() < until, f"{name} is {found}:\n{one.log[-3000:]}"
        one.ask(prompt(0, 32), max_tokens=1)  # too short to be looked up
    return found


def test_a_gateway_that_hangs_costs_the_lookups_deadline(
    tmp_path: Path, one: Engine, tiny: Path, right: dict[int, list[int]]
) -> None:
    """Law 9. It is frozen by SIGSTOP; after three deadlines nobody waits any more, and then it is back."""
    with served(tmp_path / "data", settings=ROOMY) as gateway:
        deadline_s = 1.0
        connected(one, tiny, transfer_config(endpoint(gateway), lookup_deadline_s=deadline_s))
        computed = max(timed(lambda number=number: one.ask(prompt(number)))[1] for number in (0, 1))
        reach(gateway, lambda count: count == 2 * CHUNKS)
        before = one.log.count(BREAKER)
        gateway.process.send_signal(signal.SIGSTOP)
        seconds = []
        while len(seconds) < 6 or (one.log.count(BREAKER) == before and len(seconds) < 30):
            number = len(seconds) % 6
            answer, took = timed(lambda number=number: one.ask(prompt(number)))
            assert answer == [right[number]]
            seconds.append(took)
        metrics = one.metrics()
        gateway.process.send_signal(signal.SIGCONT)
        assert max(seconds) < deadline_s + 2 * computed + SLACK_S, seconds
        assert one.log.count(BREAKER) == before + 1, "the breaker opened, and said so once"
        assert metrics["vllm:kvgw_lookup_outages"] + metrics.get("vllm:kvgw_lookups_late", 0) >= 6
        used_again(one, [prompt(0)], [right[0]])


def used_again(one: Engine, prompts: list[list[int]], right: list[list[int]], max_tokens: int = 16) -> None:
    """The gateway's return is noticed."""
    before, until = one.external_hits(), time.monotonic() + 30
    while one.external_hits() == before:
        assert time.monotonic() < until, one.log[-3000:]
        assert one.ask(*prompts, max_tokens=max_tokens) == right


def test_a_gateway_that_hangs_while_it_is_read_costs_the_loads_deadline(
    tmp_path: Path, one: Engine, tiny: Path, right: dict[int, list[int]]
) -> None:
    """Law 9. It says what it has, and freezes when it is asked for it."""
    port = free_port()
    listening = ROOMY.replace("[server]", f'[server]\nlisten = "127.0.0.1:{port}"')
    with served(tmp_path / "data", settings=listening) as gateway:
        (tmp_path / "token").write_text(gateway.token)
        with relay(port) as between:
            config = transfer_config(
                f"tcp:127.0.0.1:{between.port}", token_file=str(tmp_path / "token"), load_deadline_s=1.5
            )
            connected(one, tiny, config)
            _, computed = timed(lambda: one.ask(prompt(0)))
            reach(gateway, lambda count: count == CHUNKS)
            between.trap(GET, lambda: gateway.process.send_signal(signal.SIGSTOP))
            answer, took = timed(lambda: one.ask(prompt(0)))
            metrics = one.metrics()
            gateway.process.send_signal(signal.SIGCONT)
            assert answer == [right[0]]
            assert 1.4 < took < 1.5 + 2 * computed + SLACK_S
            assert metrics["vllm:kvgw_tokens_planned"] == metrics["vllm:kvgw_tokens_lost"] == HITS
            used_again(one, [prompt(0)], [right[0]])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


PAIRS = 5
ROUNDS = 4
REQUESTS = 64


def test_throughput_without_a_gateway(tmp_path: Path, one: Engine, tiny: Path) -> None:
    """Rounds of the same requests through an engine without kvgw and one whose gateway is gone, in pairs.

    Both are the same process: two processes of the same engine can differ by a tenth for as long as they live. Other
    programs disturb a round's seconds, so the CPU seconds of the process count as well: what the connector adds is in
    both. That nothing waits is in the counters.
    """
    prompts = [prompt(1000 + number, 280) for number in range(REQUESTS)]
    config = transfer_config(f"unix:{tmp_path / 'nobody.sock'}", lookup_deadline_s=1.0)
    walls, cpus, answers = [], [], []

    def rounds(transfer: dict[str, Any] | None) -> tuple[float, float]:
        """Median seconds of a round, and those of CPU."""
        one.become(tiny, transfer, enable_prefix_caching=False)
        answers.append(one.ask(*prompts, max_tokens=4))
        before = one.metrics()
        took = []
        for _ in range(ROUNDS):
            cpu = one.cpu_s()
            _, wall = timed(lambda: one.ask(*prompts, max_tokens=4))
            took.append((wall, one.cpu_s() - cpu))
        if transfer is not None:
            told = {name: value - before.get(name, 0) for name, value in one.metrics().items()}
            assert told["vllm:kvgw_lookups"] == ROUNDS * REQUESTS
            assert told["vllm:kvgw_lookup_outages"] >= told["vllm:kvgw_lookups"], "each was told at once"
            assert told.get("vllm:kvgw_lookups_late", 0) == 0
            assert told.get("vllm:kvgw_tokens_stored", 0) == 0
        return statistics.median(wall for wall, _ in took), statistics.median(cpu for _, cpu in took)

    for number in range(PAIRS):
        order = (None, config) if number % 2 else (config, None)  # who comes second finds what is warm
        took = {transfer is not None: rounds(transfer) for transfer in order}
        without, with_kvgw = took[False], took[True]
        walls.append(without[0] / with_kvgw[0])
        cpus.append(without[1] / with_kvgw[1])
    assert all(answer == answers[0] for answer in answers)
    share = max(statistics.median(walls), statistics.median(cpus))
    print(f"share of the throughput without kvgw: wall {sorted(walls)}, CPU {sorted(cpus)}")
    assert share >= 0.9, (walls, cpus)


def test_500_requests_and_a_gateway_that_is_killed_and_comes_back(tmp_path: Path, one: Engine, tiny: Path) -> None:
    """Law 2. All at once, 32 in each step, which take long enough for a gateway to start. A fifth of the prompts is in
    the gateway before, of which it forgets what was not on disk."""
    prompts = [prompt(2000 + number, 130) for number in range(500)]
    one.become(tiny, None, enable_prefix_caching=False)
    right = one.ask(*prompts, max_tokens=8)
    data = tmp_path / "data"
    with served(data, settings=ROOMY) as gateway, ThreadPoolExecutor(1) as threads:
        config = transfer_config(endpoint(gateway), tokens_per_chunk=64, load_deadline_s=5.0, lookup_deadline_s=5.0)
        one.become(tiny, config, enable_prefix_caching=False, max_num_seqs=32)
        assert one.ask(*prompts[:100], max_tokens=8) == right[:100]
        before = reach(gateway, lambda count: count == 200)
        answer = threads.submit(one.ask, *prompts, max_tokens=8, pace_s=0.1)
        reach(gateway, lambda count: count > before)
        gateway.stop(signal.SIGKILL)
        assert not answer.done()
        with served(data, settings=ROOMY) as again:
            assert not answer.done(), "the gateway is back in the middle"
            assert answer.result() == right
            used_again(one, prompts[:8], right[:8], 8)
            assert entries(again) > 0


def test_a_wrong_token(tmp_path: Path, one: Engine, tiny: Path, right: dict[int, list[int]]) -> None:
    """Law 2. The gateway refuses; the reason is in the log once, and counted each time."""
    with served(tmp_path / "data", settings=ROOMY) as gateway:
        (tmp_path / "token").write_text(gateway.token[:-6] + "aaaaaa")
        before = one.log.count("kvgw: lookup_outages")
        connected(one, tiny, transfer_config(endpoint(gateway), token_file=str(tmp_path / "token")))
        for number in (0, 1, 0):
            assert one.ask(prompt(number)) == [right[number]]
        assert one.metrics()["vllm:kvgw_lookup_outages"] >= 3
        assert one.log.count("kvgw: lookup_outages") - before == 1, one.log[-3000:]
        assert entries(gateway) == 0
        (tmp_path / "token").write_text(gateway.token)
        assert one.ask(prompt(2)) == [right[2]]
        reach(gateway, lambda count: count == CHUNKS)


def test_a_full_quota(tmp_path: Path, one: Engine, tiny: Path, right: dict[int, list[int]]) -> None:
    """Laws 2 and 4. Room for two and a half chunks: two are kept, the rest is computed each time."""
    with served(tmp_path / "data", settings=ROOMY) as gateway:
        limits = ("--limit-bytes", str(1_300_000), "--over-quota", "reject")
        made = kvgw("namespace", "create", "small", *limits, "--data", str(gateway.folder))
        assert made.returncode == 0, made.stdout + made.stderr
        connected(one, tiny, transfer_config(endpoint(gateway), namespace="small"))
        before = one.log.count("kvgw: chunks_refused")
        for number, hits, refused in ((0, 0, 2), (0, 512, 4), (1, 512, 8), (0, 1024, 10)):
            assert one.ask(prompt(number)) == [right[number]]
            assert one.external_hits() == hits
            assert counted(one, "chunks_refused", refused) == refused
        assert counted(one, "tokens_stored", 512) == 512
        assert one.log.count("kvgw: chunks_refused") - before == 1, one.log[-3000:]


def test_no_room_in_the_adapter_and_none_in_the_gateway(
    tmp_path: Path, one: Engine, tiny: Path, right: dict[int, list[int]]
) -> None:
    """Laws 2 and 9. The model never waits for a store."""
    with served(tmp_path / "data", settings=ROOMY.replace("268435456", str(16 * 1024 * 1024))) as gateway:
        little = {"store_bytes": 600_000, "store_deadline_s": 2.0}
        connected(one, tiny, transfer_config(endpoint(gateway), **little))
        before = one.log.count("kvgw: chunks_dropped")
        for number in (0, 1):
            assert one.ask(prompt(number)) == [right[number]]
            reach(gateway, lambda count, number=number: count == number + 1)
        assert counted(one, "chunks_dropped", 6) == 6
        assert one.log.count("kvgw: chunks_dropped") - before == 1

        connected(one, tiny, transfer_config(endpoint(gateway), store_deadline_s=1.0))
        with full_staging(gateway):
            before = one.log.count("kvgw: store_outages")
            for number, outages in ((2, 4), (3, 8), (2, 12)):
                assert one.ask(prompt(number)) == [right[number]]
                assert counted(one, "store_outages", outages) == outages
            assert one.log.count("kvgw: store_outages") > before
            assert one.external_hits() == 0
        used_again(one, [prompt(0)], [right[0]])
