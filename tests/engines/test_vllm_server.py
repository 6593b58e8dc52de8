"""The real vLLM over what operators run: its OpenAI-compatible server, and gateways with each tier and transport."""

from __future__ import annotations

import json
import re
import shutil
import socket
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.engines import vllm_engine
from tests.engines.tiny_model import prompt
from tests.engines.vllm_engine import ROOMY, Answer, Engine, Server, endpoint, engine, server, transfer_config
from tests.support.seaweed import S3Server
from tests.support.served import Served, answer, kvgw, served
from tests.support.tls import Authority

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not vllm_engine.PYTHON, reason="vLLM has an environment of its own: make test-engines"),
    pytest.mark.filterwarnings("default"),  # transformers' own deprecations
]

DEMO = vllm_engine.ROOT / "docs" / "demo"
ANSWER = 24
BLOB = 100_000
"""Bytes; every blob is larger, and nothing else in a tier is."""
PATIENCE_S = 60.0
Right: TypeAlias = Callable[..., list[list[int]]]


def until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def blobs(data: Path) -> list[Path]:
    return [path for path in (data / "nvme").rglob("*") if path.is_file() and path.stat().st_size > BLOB]


# Two servers, one after the other, and the real model.


@dataclass
class Seen:
    """What was seen of three prompts. Each begins with a document of its own, so that none finds another's chunks."""

    right: list[Answer] = field(default_factory=list)
    """Of an engine without connector."""
    first: list[Answer] = field(default_factory=list)
    second: list[Answer] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)
    """External tokens of the second server after each of its answers; first comes what the first server had."""
    damaged: list[int] = field(default_factory=list)
    """Tokens of the answer when half of the bytes of every chunk were flipped."""
    lost: list[float] = field(default_factory=list)
    """Tokens that were to be loaded, arrived, and did not arrive, for that answer, and loads that were not answered."""


@pytest.fixture(scope="module")
def smollm() -> tuple[Path, list[list[int]]]:
    """SmolLM2-135M-Instruct, and a question about each of three documents of about 1,440 tokens."""
    transformers = pytest.importorskip("transformers")
    sys.path.insert(0, str(DEMO))
    try:
        from corpus import QUESTIONS, document, prompt_ids
        from model import default_cache, prepare_model

        folder: Path = prepare_model(default_cache())
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        text = document()
        return folder, [
            prompt_ids(tokenizer, f"Edition {number} of the document.\n{text}\n\n{question}")
            for number, question in enumerate(QUESTIONS, 1)
        ]
    finally:
        sys.path.remove(str(DEMO))


@pytest.fixture(scope="module")
def seen(smollm: tuple[Path, list[list[int]]], tmp_path_factory: pytest.TempPathFactory) -> Seen:
    model, prompts = smollm
    work, found = tmp_path_factory.mktemp("servers"), Seen()
    data = work / "data"
    config = transfer_config(f"unix:{data / 'kvgw.sock'}")
    with engine(model, work, None, enable_prefix_caching=False) as cold:
        found.right = [cold.answer(one, ANSWER) for one in prompts]
    with served(data, settings=ROOMY) as gateway:
        with warm(model, work, config) as first:
            found.first = [first.answer(one, ANSWER) for one in prompts]
            found.hits.append(hits(first))
            until(lambda: len(blobs(data)) == 15, "the first server stores five chunks of each prompt")
        with warm(model, work, config) as second:
            for one in prompts:
                found.second.append(second.answer(one, ANSWER))
                found.hits.append(hits(second))
            gateway.stop()
            for blob in blobs(data):
                flip_half(blob)
            with served(data, settings=ROOMY):
                ask_for_damaged(second, prompts[0], found)
    return found


def warm(model: Path, work: Path, config: dict[str, Any]) -> Any:
    """A server without a prefix cache of its own: what is reused comes from the gateway."""
    return server(model, work, config, "--no-enable-prefix-caching")


def hits(one: Server) -> int:
    return int(one.metric("vllm:external_prefix_cache_hits_total"))


def flip_half(blob: Path) -> None:
    content = blob.read_bytes()
    half = len(content) // 2
    blob.write_bytes(content[:half] + content[half:].translate(bytes(255 - byte for byte in range(256))))


def ask_for_damaged(one: Server, ids: list[int], found: Seen) -> None:
    """Ask until the server has found the gateway that came back, and that has read."""
    names = [f"vllm:kvgw_{name}_total" for name in ("tokens_planned", "tokens_loaded", "tokens_lost", "load_outages")]

    def tried() -> bool:
        before = [one.metric(name) for name in names]
        found.damaged = one.answer(ids, ANSWER).tokens
        found.lost = [one.metric(name) - was for name, was in zip(names, before, strict=True)]
        return one.metric("vllm:kvgw_chunks_lost_total") > 0

    until(tried, "the gateway is not used again")


@pytest.mark.smoke
def test_a_second_server_begins_where_the_first_one_ended(
    seen: Seen, smollm: tuple[Path, list[list[int]]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Fp32: five chunks of each prompt come from the gateway, and three answers are those of a cold engine."""
    assert all(1400 < len(one) < 1536 for one in smollm[1])
    assert seen.hits == [0, 1280, 2560, 3840]
    right = [one.tokens for one in seen.right]
    assert all(len(tokens) == ANSWER for tokens in right)
    assert len({tuple(tokens) for tokens in right}) > 1, "the answers depend on the prompts"
    assert [one.tokens for one in seen.first] == right
    assert [one.tokens for one in seen.second] == right
    cold, reused = (statistics.median(one.ttft_s for one in run) for run in (seen.first, seen.second))
    with capsys.disabled():
        print(f"\nTTFT, median of 3: first server {cold:.2f} s, second server {reused:.2f} s")
    assert reused <= cold / 2


@pytest.mark.smoke
def test_chunks_with_half_of_their_bytes_flipped_are_a_miss(seen: Seen) -> None:
    """Laws 2 and 3."""
    assert seen.lost == [1280, 0, 1280, 0]
    assert seen.damaged == seen.right[0].tokens


# One engine process, one gateway of each kind, a tiny model.


@dataclass(frozen=True)
class Way:
    """A gateway as an operator sets it up, and how an engine reaches it."""

    settings: str
    endpoint: str
    extra: dict[str, Any] = field(default_factory=dict)
    tier: str = "nvme"


@pytest.fixture(scope="module")
def one(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A process that becomes each engine in turn."""
    with engine(tiny, tmp_path_factory.mktemp("ways"), None, enable_prefix_caching=False) as made:
        yield made


@pytest.fixture(scope="module")
def right(one: Engine, tiny: Path) -> Right:
    """What an engine without connector answers; asked before the process becomes one with it."""

    def ask(*prompts: list[int]) -> list[list[int]]:
        one.become(tiny, None, enable_prefix_caching=False)
        return one.ask(*prompts)

    return ask


WATCHED = ROOMY.replace('http = ""', 'http = "127.0.0.1:0"')


def on_disk(data: Path, seaweed: S3Server) -> Way:
    return Way(WATCHED, f"unix:{data / 'kvgw.sock'}")


def in_s3(data: Path, seaweed: S3Server) -> Way:
    """No disk at all, over TCP with TLS; the token is that of the first start."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    authority = Authority(data.parent)
    certificate, key = authority.issue("gateway")
    listen = f'listen = "127.0.0.1:{port}"\ntls_cert_file = "{certificate}"\ntls_key_file = "{key}"\n'
    settings = WATCHED.replace("[server]\n", f"[server]\n{listen}").replace("[nvme]\n", "[nvme]\nenabled = false\n")
    settings += bucket(data.parent, seaweed) + '[defaults]\ndurability = "s3"\n'
    extra = {"ca_file": str(authority.file), "token_file": str(data.parent / "token")}
    return Way(settings, f"tls:127.0.0.1:{port}", extra, "s3")


def in_s3_behind_a_disk_that_is_lost(data: Path, seaweed: S3Server) -> Way:
    return Way(WATCHED + bucket(data.parent, seaweed), f"unix:{data / 'kvgw.sock'}", tier="s3")


def bucket(folder: Path, seaweed: S3Server) -> str:
    (folder / "secret").write_text(seaweed.secret_key)
    return f"""
[s3]
bucket = "{seaweed.bucket}"
prefix = "{folder.name}/"
endpoint = "{seaweed.endpoint}"
region = "{seaweed.region}"
addressing = "{seaweed.addressing}"
checksums = "{seaweed.checksums}"
access_key_id = "{seaweed.access_key}"
secret_access_key_file = "{folder / "secret"}"
"""


def uploaded(folder: Path, seaweed: S3Server) -> int:
    with seaweed.client() as client:
        listed = client.list_objects_v2(Bucket=seaweed.bucket, Prefix=f"{folder.name}/")
    return sum(item["Size"] > BLOB for item in listed.get("Contents", []))


def delivered(gateway: Served, token: str) -> dict[str, float]:
    """Bytes that the gateway gave, by the tier that had them."""
    request = urllib.request.Request(f"{gateway.http}/metrics", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=30) as reply:
        text = reply.read().decode()
    found = re.findall(r'^kvgw_get_bytes_total\{tier="(\w+)"\} (\S+)$', text, re.MULTILINE)
    return {tier: float(count) for tier, count in found if float(count)}


@pytest.mark.s3
@pytest.mark.parametrize("made", [on_disk, in_s3, in_s3_behind_a_disk_that_is_lost])
def test_a_restarted_gateway_has_what_an_engine_stored(
    made: Callable[[Path, S3Server], Way],
    tmp_path: Path,
    tiny: Path,
    one: Engine,
    right: Right,
    seaweed: S3Server,
) -> None:
    """Law 8: disk alone over the Unix socket, S3 alone over TLS with a token, S3 when the disk is lost."""
    data = tmp_path / "data"
    way = made(data, seaweed)
    expected = right(prompt(0))
    config = transfer_config(way.endpoint, **way.extra)
    with served(data, settings=way.settings) as gateway:
        (tmp_path / "token").write_text(gateway.token)
        one.become(tiny, config, enable_prefix_caching=False)
        assert one.ask(prompt(0)) == expected
        assert one.external_hits() == 0
        if way.tier == "s3":
            until(lambda: uploaded(tmp_path, seaweed) == 4, "four chunks are written to S3")
        else:
            until(lambda: len(blobs(data)) == 4, "four chunks are written to the disk")
        gateway.stop()
    if way.tier == "s3":
        shutil.rmtree(data / "nvme", ignore_errors=True)
    with served(data, settings=way.settings) as gateway:

        def loaded() -> bool:
            assert one.ask(prompt(0)) == expected
            return one.metrics()["vllm:kvgw_tokens_loaded"] > 0

        until(loaded, "the gateway is not used again")
        assert one.metrics()["vllm:kvgw_tokens_loaded"] == 1024
        assert delivered(gateway, (tmp_path / "token").read_text()) == {way.tier: 4 * 256 * 2048}


# A prompt that all tenants begin with.


STRANGER = "what nobody named"


def tenants_of(gateway: Served, folder: Path) -> Path:
    """Tenants red and blue, and the operator's with its public namespace; the file that maps their values."""
    data, tenants = str(gateway.folder), {}
    for name in ("operator", "red", "blue"):
        assert kvgw("tenant", "create", name, "--data", data).returncode == 0
        made = answer("token", "create", "vllm", "--tenant", name, "--data", data)
        (folder / name).write_text(made["token"])
        tenants[name] = {"token_file": name}
    made = kvgw("namespace", "create", "prompts", "--tenant", "operator", "--reader", "*", "--data", data)
    assert made.returncode == 0, made.stdout
    tenants["publisher"] = {"token_file": "operator", "namespace": "prompts", "publishes": True}
    path = folder / "tenants.json"
    path.write_text(json.dumps({"public": ["operator/prompts"], "tenants": tenants}))
    return path


def stored(gateway: Served) -> list[int]:
    """Bytes in the public namespace, and in the own ones of operator, red and blue."""
    places = (("operator", "prompts"), ("operator", "default"), ("red", "default"), ("blue", "default"))
    data = str(gateway.folder)
    shown = [answer("namespace", "show", name, "--tenant", tenant, "--data", data) for tenant, name in places]
    return [one["stored_bytes"] for one in shown]


def test_two_tenants_begin_with_a_public_system_prompt(
    tmp_path: Path, gateway: Served, tiny: Path, one: Engine, right: Right
) -> None:
    """Law 6: the operator's value alone publishes; what each tenant adds is its own."""
    system = prompt(0, 768)
    prompts = {name: [*system, *prompt(number, 400)] for number, name in enumerate(("red", "blue"), 1)}
    expected = dict(zip(prompts, right(*prompts.values()), strict=True))
    config = transfer_config(endpoint(gateway), tenants_file=str(tenants_of(gateway, tmp_path)))
    one.become(tiny, config, enable_prefix_caching=False)
    one.ask([*system, 7], cache_salt="publisher", max_tokens=1)
    until(lambda: stored(gateway)[0] > 0, "the system prompt is published")
    chunk = stored(gateway)[0] // 3
    before = (0.0, 0.0)
    for salt, whose, loaded, kept in (
        ("red", "red", 768, [3, 0, 1, 0]),
        ("blue", "blue", 768, [3, 0, 1, 1]),
        ("red", "red", 1024, [3, 0, 1, 1]),
        ("blue", "blue", 1024, [3, 0, 1, 1]),
        ("red", "blue", 768, [3, 0, 2, 1]),
        (STRANGER, "red", 768, [3, 0, 2, 1]),
    ):
        assert one.ask(prompts[whose], cache_salt=salt) == [expected[whose]]
        metrics = one.metrics()
        after = metrics["vllm:kvgw_tokens_loaded"], metrics["vllm:kvgw_tokens_public"]
        assert (after[0] - before[0], after[1] - before[1]) == (loaded, 768), (salt, whose)
        until(lambda kept=kept: stored(gateway) == [count * chunk for count in kept], f"{salt} keeps what is its own")
        before = after
