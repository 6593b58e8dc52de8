"""Prefill and decode in two vLLM processes: one computes and publishes chunk by chunk, the other waits and goes on.

The engine that decodes answers right whatever becomes of the one that prefills, at whichever chunk, and of the gateway.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.engines import vllm_engine
from tests.engines.bench import Gateway, gateway
from tests.engines.gateway_view import entries, reach
from tests.engines.tiny_model import prompt
from tests.engines.vllm_engine import Engine, endpoint, engine, transfer_config

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not vllm_engine.PYTHON, reason="vLLM has an environment of its own: make test-engines"),
]

DECODE = vllm_engine.SAMPLE.with_name("vllm-decode.json")
CHUNKS = 4
"""Whole chunks of a prompt."""
PACE_S = 1.0
"""Between two chunks: long enough for a process to be killed there."""
WAIT_S = 20.0
STEPS = {"max_num_batched_tokens": 256, "enable_prefix_caching": False}
"""One chunk in each of the engine's steps."""
PROMPTS = 12


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(tmp_path_factory.mktemp("handover") / "data") as made:
        yield made


@pytest.fixture(scope="module")
def second(tiny: Path, running: Gateway, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The engine that decodes."""
    with engine(tiny, tmp_path_factory.mktemp("decode"), None, enable_prefix_caching=False) as made:
        yield made


@pytest.fixture(scope="module")
def right(second: Engine, tiny: Path, running: Gateway) -> list[list[int]]:
    """What it answers to each prompt without kvgw; from then on it has the connector."""
    answers = [second.ask(prompt(number))[0] for number in range(PROMPTS)]
    config = transfer_config(endpoint(running), sample=DECODE, wait_deadline_s=WAIT_S)
    second.become(tiny, config, enable_prefix_caching=False)
    return answers


@contextmanager
def prefilling(model: Path, running: Gateway, folder: Path) -> Iterator[Engine]:
    with engine(model, folder, transfer_config(endpoint(running)), **STEPS) as made:
        yield made


Asked = Future[list[list[int]]]


@contextmanager
def both(first: Engine, second: Engine, prompts: list[list[int]], pace_s: float = 0.0) -> Iterator[tuple[Asked, Asked]]:
    """Ask both at once, as a router does: the one for a token, the other for the answer."""
    with ThreadPoolExecutor(2) as threads:
        answer = threads.submit(second.ask, *prompts)
        yield threads.submit(first.ask, *prompts, max_tokens=1, pace_s=pace_s), answer


def killed_at(boundary: int, number: int, first: Engine, second: Engine, running: Gateway, right: list[int]) -> int:
    """Kill the process that prefills when the gateway has `boundary` chunks of the prompt; how many it got in all."""
    before, hits = entries(running), second.external_hits()
    with both(first, second, [prompt(number)], PACE_S) as (_, answer):
        reach(running, lambda count: count >= before + boundary)
        first.kill()
        assert answer.result() == [right], boundary
    reached = entries(running) - before
    assert second.external_hits() - hits == reached * 256, "all that was published was taken"
    return reached


def test_the_process_that_prefills_dies_at_every_chunk(
    tmp_path: Path, tiny: Path, running: Gateway, second: Engine, right: list[list[int]]
) -> None:
    """Laws 2 and 9. A chunk may come in the moment of the kill; then the boundary before it is tried again."""
    missing = set(range(CHUNKS + 1))
    for number in range(PROMPTS - 4):
        with prefilling(tiny, running, tmp_path) as first:
            missing.discard(killed_at(min(missing), number, first, second, running, right[number]))
        if not missing:
            break
    assert not missing, f"it was never killed behind {missing} chunks; is PACE_S long enough for this machine?"
    metrics = second.metrics()
    assert metrics["vllm:kvgw_waits"] >= CHUNKS + 1
    assert metrics["vllm:kvgw_waits_over"] >= CHUNKS


def test_duplicates_and_a_gateway_that_is_restarted_meanwhile(
    tmp_path: Path, tiny: Path, running: Gateway, second: Engine, right: list[list[int]]
) -> None:
    """Law 2. Both engines get the request twice; later the gateway goes and comes back while they are at it."""
    with prefilling(tiny, running, tmp_path) as first:
        number, hits = PROMPTS - 1, second.external_hits()
        with both(first, second, [prompt(number)] * 2, 0.2) as (prefilled, answer):
            assert prefilled.result() == [right[number][:1]] * 2
            assert answer.result() == [right[number]] * 2
        assert second.external_hits() - hits == 2 * CHUNKS * 256

        number, before = PROMPTS - 2, entries(running)
        with both(first, second, [prompt(number)], PACE_S) as (prefilled, answer):
            reach(running, lambda count: count >= before + 2)
            running.kill()
            running.start()
            assert answer.result() == [right[number]]
            assert prefilled.result() == [right[number][:1]]

        until = time.monotonic() + 60
        while not whole(first, second, prompt(PROMPTS - 3), right[PROMPTS - 3]):
            assert time.monotonic() < until, second.log[-3000:]


def whole(first: Engine, second: Engine, tokens: list[int], right: list[int]) -> bool:
    """Hand a prompt over; whether all of its chunks were taken."""
    hits = second.external_hits()
    with both(first, second, [tokens]) as (prefilled, answer):
        assert prefilled.result() == [right[:1]]
        assert answer.result() == [right]
    return second.external_hits() - hits == CHUNKS * 256
