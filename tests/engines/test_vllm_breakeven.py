"""Declining inside a real vLLM: the scheduler sees how long prompts take, and is told how long loads took.

Needs an environment with vLLM: `make test-engines`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvgw.engines.breakeven import SAMPLES_MIN
from tests.engines.tiny_model import prompt
from tests.engines.vllm_engine import PYTHON, endpoint, engine, transfer_config
from tests.support.served import Served

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON, reason="vLLM has an environment of its own: make test-engines"),
]


def test_an_engine_that_measures_both_speeds_declines_what_does_not_pay(
    tmp_path: Path, gateway: Served, tiny: Path
) -> None:
    config = transfer_config(endpoint(gateway), break_even=True)
    with engine(tiny, tmp_path, config, enable_prefix_caching=False) as one:
        right = one.ask(prompt(0), max_tokens=4)
        for number in range(1, SAMPLES_MIN):
            one.ask(prompt(number), max_tokens=4)
        for _ in range(SAMPLES_MIN):
            assert one.ask(prompt(0), max_tokens=4) == right
        assert one.external_hits() == 1024 * SAMPLES_MIN, "nothing is declined before there are samples"
        one.ask(prompt(SAMPLES_MIN), max_tokens=4)
        metrics = one.metrics()
        prefill, load = metrics["vllm:kvgw_prefill_tokens_per_second"], metrics["vllm:kvgw_load_bytes_per_second"]
        assert 10 < prefill < 1e6
        assert 1e4 < load < 1e11
        told = transfer_config(endpoint(gateway), break_even=True, prefill_tokens_per_s=1e9)
        one.become(tiny, told, enable_prefix_caching=False)
        for _ in range(SAMPLES_MIN):
            assert one.ask(prompt(0), max_tokens=4) == right
        before = one.metrics()
        assert one.ask(prompt(0), max_tokens=4) == right
        after = one.metrics()
        assert before["vllm:kvgw_hits_declined"] == 0
        assert after["vllm:kvgw_hits_declined"] == 1
        assert after["vllm:external_prefix_cache_hits"] == before["vllm:external_prefix_cache_hits"]
