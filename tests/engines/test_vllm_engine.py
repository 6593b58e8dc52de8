"""The real vLLM with the real connector, over a gateway in its own process: `make test-engines`."""

from __future__ import annotations

import json
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines import vllm_engine
from tests.engines.vllm_engine import engine, server, transfer_config
from tests.support.served import Served, kvgw, served

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not vllm_engine.PYTHON, reason="vLLM has an environment of its own: make test-engines"),
]

ROOMY = """
[server]
http = ""
[staging]
bytes = 268435456
[nvme]
capacity_bytes = 1073741824
min_free_bytes = 0
"""
DEMO = vllm_engine.ROOT / "docs" / "demo"


def endpoint(gateway: Served) -> str:
    return f"unix:{gateway.folder / 'kvgw.sock'}"


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "data", settings=ROOMY) as running:
        yield running


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose next token depends on the whole prompt; it has no tokenizer."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.3,
    )
    folder = tmp_path_factory.mktemp("tiny")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def prompt(number: int, tokens: int = 1100) -> list[int]:
    """Four whole chunks of 256 tokens, and more."""
    chance = random.Random(number + 1)
    return [chance.randrange(3, 500) for _ in range(tokens)]


@pytest.fixture(scope="module")
def right(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[int]]:
    """What an engine without connector and without prefix cache answers to `prompt` (0 … 3)."""
    with engine(tiny, tmp_path_factory.mktemp("right"), None, enable_prefix_caching=False) as cold:
        return {number: cold.ask(prompt(number))[0] for number in range(4)}


@pytest.fixture(scope="module")
def smollm() -> tuple[Path, list[list[int]]]:
    """SmolLM2-135M-Instruct, and three questions about one document of about 1,440 tokens."""
    transformers = pytest.importorskip("transformers")
    sys.path.insert(0, str(DEMO))
    try:
        from corpus import prompts
        from model import ModelUnavailable, default_cache, prepare_model

        folder: Path = prepare_model(default_cache())
        return folder, prompts(transformers.AutoTokenizer.from_pretrained(folder))
    except ModelUnavailable as error:
        pytest.skip(str(error))
    finally:
        sys.path.remove(str(DEMO))


@pytest.mark.smoke
@pytest.mark.filterwarnings("default")  # transformers' own deprecations
def test_a_second_process_takes_the_prompt_from_the_gateway(
    tmp_path: Path, gateway: Served, smollm: tuple[Path, list[list[int]]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Fp32: the same greedy tokens as a cold engine without connector, for three questions.

    The first process is the server of the documentation, whose scheduler and worker are processes of their own.
    """
    model, questions = smollm
    config = transfer_config(endpoint(gateway))
    with engine(model, tmp_path, None, enable_prefix_caching=False) as cold:
        right = [cold.answer(question, 24) for question in questions]
    with server(model, tmp_path, config) as first:
        stored = [first.answer(question, 24) for question in questions]
        assert first.metric("vllm:external_prefix_cache_hits_total") == 0
        assert first.metric("vllm:kvgw_tokens_stored_total") == 1280
    with engine(model, tmp_path, config, enable_prefix_caching=False, skip_tokenizer_init=False) as second:
        reused = [second.answer(questions[0], 24)]
        hits = second.external_hits()
        reused += [second.answer(question, 24) for question in questions[1:]]
    assert hits >= 1280
    assert [answer.tokens for answer in stored] == [answer.tokens for answer in right]
    assert [answer.tokens for answer in reused] == [answer.tokens for answer in right]
    seconds = [statistics.median(answer.ttft_s for answer in answers) for answers in (right, reused)]
    with capsys.disabled():
        print(f"\nTTFT, median of 3: cold {seconds[0]:.2f} s, reused {seconds[1]:.2f} s; {hits} tokens reused")


@pytest.mark.filterwarnings("default")
def test_a_server_takes_what_another_stored(
    tmp_path: Path, gateway: Served, smollm: tuple[Path, list[list[int]]]
) -> None:
    model, questions = smollm
    config = transfer_config(endpoint(gateway))
    with server(model, tmp_path, config) as first:
        right = first.answer(questions[0], 8)
    with server(model, tmp_path, config) as second:
        assert second.answer(questions[0], 8).tokens == right.tokens
        assert second.metric("vllm:external_prefix_cache_hits_total") == 1280
        assert second.metric("vllm:kvgw_tokens_loaded_total") == 1280


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
