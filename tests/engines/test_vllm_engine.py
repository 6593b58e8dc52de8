"""The real vLLM with the real connector, over a gateway in its own process: `make test-engines`."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests.engines import vllm_engine
from tests.engines.tiny_model import prompt
from tests.engines.vllm_engine import ROOMY, endpoint, engine, transfer_config
from tests.support.served import Served, kvgw, served

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not vllm_engine.PYTHON, reason="vLLM has an environment of its own: make test-engines"),
]


@pytest.fixture(scope="module")
def right(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[int]]:
    """What an engine without connector and without prefix cache answers to `prompt` (0 … 3)."""
    with engine(tiny, tmp_path_factory.mktemp("right"), None, enable_prefix_caching=False) as cold:
        return {number: cold.ask(prompt(number))[0] for number in range(4)}


def test_a_second_engine_loads_and_a_third_of_another_revision_does_not(
    tmp_path: Path, gateway: Served, tiny: Path, right: dict[int, list[int]]
) -> None:
    """Law 2."""
    with engine(tiny, tmp_path, transfer_config(endpoint(gateway))) as first:
        assert first.ask(prompt(0)) == [right[0]]
        assert first.external_hits() == 0
    with engine(tiny, tmp_path, transfer_config(endpoint(gateway))) as second:
        assert second.ask(prompt(0)) == [right[0]]
        assert second.external_hits() == 1024
        assert second.ask(prompt(0)) == [right[0]], "from the engine's own prefix cache"
        assert second.external_hits() == 1024
    with engine(tiny, tmp_path, transfer_config(endpoint(gateway), weights="another-revision")) as third:
        assert third.ask(prompt(0)) == [right[0]]
        assert third.external_hits() == 0


def test_an_engine_outlives_its_gateway(tmp_path: Path, tiny: Path, right: dict[int, list[int]]) -> None:
    """Law 2: no gateway at the start, one that comes, one that is killed."""
    data = tmp_path / "data"
    config = transfer_config(f"unix:{data / 'kvgw.sock'}", lookup_deadline_s=2.0, load_deadline_s=2.0)
    with engine(tiny, tmp_path, config, enable_prefix_caching=False) as one:
        started = time.monotonic()
        assert one.ask(prompt(0)) == [right[0]]
        assert time.monotonic() - started < 10
        with served(data, settings=ROOMY) as gateway:
            deadline = time.monotonic() + 30
            while one.external_hits() == 0:
                assert time.monotonic() < deadline, one.log[-3000:]
                assert one.ask(prompt(0)) == [right[0]]
            gateway.stop(signal.SIGKILL)
        for number in (0, 1):
            assert one.ask(prompt(number)) == [right[number]]
        metrics = one.metrics()
        assert metrics["vllm:kvgw_lookup_outages"] >= 2
        assert one.log.count("no gateway answers at") >= 1


def test_damaged_chunks_are_computed(tmp_path: Path, tiny: Path, right: dict[int, list[int]]) -> None:
    """Laws 2 and 3."""
    data = tmp_path / "data"
    with served(data, settings=ROOMY) as gateway:
        with engine(tiny, tmp_path, transfer_config(endpoint(gateway))) as first:
            first.ask(prompt(0))
        gateway.stop()  # what is staged is on disk now, and forgotten
    blobs = sorted(path for path in (data / "nvme").rglob("*") if path.is_file() and path.stat().st_size > 100_000)
    assert len(blobs) == 4
    for blob in blobs[:2]:
        with blob.open("r+b") as file:
            file.seek(50_000)
            byte = file.read(1)
            file.seek(50_000)
            file.write(bytes([byte[0] ^ 1]))
    with served(data, settings=ROOMY) as gateway:
        config = transfer_config(endpoint(gateway))
        with engine(tiny, tmp_path, config, enable_prefix_caching=False) as second:
            assert second.ask(prompt(0)) == [right[0]]
            assert second.metrics()["vllm:kvgw_tokens_lost"] > 0
            assert second.ask(prompt(0)) == [right[0]], "and the lost chunks are stored anew"
            assert second.ask(prompt(0)) == [right[0]]
        with engine(tiny, tmp_path, config) as third:
            assert third.ask(prompt(0)) == [right[0]]
            assert third.metrics()["vllm:kvgw_tokens_loaded"] == 1024


def test_two_tenants_through_one_engine(
    tmp_path: Path, gateway: Served, tiny: Path, right: dict[int, list[int]]
) -> None:
    """Law 6. The same prompt: each tenant finds its own, a stranger neither's."""
    tenants = {}
    for name in ("red", "blue"):
        assert kvgw("tenant", "create", name, "--data", str(gateway.folder)).returncode == 0
        made = kvgw("token", "create", "vllm", "--tenant", name, "--data", str(gateway.folder), "--json")
        (tmp_path / f"{name}.token").write_text(json.loads(made.stdout)["token"])
        tenants[f"{name}-secret"] = {"token_file": f"{name}.token"}
    (tmp_path / "tenants.json").write_text(json.dumps({"by": "cache_salt", "tenants": tenants}))
    config = transfer_config(endpoint(gateway), tenants_file=str(tmp_path / "tenants.json"))
    with engine(tiny, tmp_path, config, enable_prefix_caching=False) as one:
        hits = []
        for salt in ("red-secret", "blue-secret", "stranger", "red-secret", "blue-secret", "stranger", "red"):
            assert one.ask(prompt(0), cache_salt=salt) == [right[0]]
            hits.append(one.external_hits())
    assert hits == [0, 0, 0, 1024, 2048, 3072, 3072]


def test_chunked_prefill_preemption_and_many_requests(
    tmp_path: Path, gateway: Served, tiny: Path, right: dict[int, list[int]]
) -> None:
    """Room for two prompts of four: they run in pieces of 300 tokens, and push each other out."""
    prompts = [prompt(number) for number in range(4)]
    tight = {"max_num_batched_tokens": 300, "max_num_seqs": 4, "num_gpu_blocks_override": 80, "max_model_len": 2048}
    with engine(tiny, tmp_path, transfer_config(endpoint(gateway)), **tight) as first:
        assert first.ask(*prompts) == [right[number] for number in range(4)]
    with engine(tiny, tmp_path, transfer_config(endpoint(gateway)), **tight) as second:
        assert second.ask(*prompts) == [right[number] for number in range(4)]
        assert second.external_hits() >= 4 * 1024
        long = second.ask(*prompts, max_tokens=300)
        assert [tokens[:16] for tokens in long] == [right[number] for number in range(4)]
        assert second.metrics()["vllm:num_preemptions"] > 0


def test_two_ranks_have_a_format_each(tmp_path: Path, gateway: Served, tiny: Path, right: dict[int, list[int]]) -> None:
    """Law 2: an engine of one rank finds nothing of theirs."""
    config = transfer_config(endpoint(gateway))
    for hits in (0, 1024):
        with engine(tiny, tmp_path, config, tensor_parallel_size=2) as one:
            assert one.ask(prompt(0)) == [right[0]]
            assert one.external_hits() == hits
    with engine(tiny, tmp_path, config) as single:
        assert single.ask(prompt(0)) == [right[0]]
        assert single.external_hits() == 0
