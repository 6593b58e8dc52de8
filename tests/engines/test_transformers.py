"""The transformers adapter in the scenarios that every adapter passes, and what it declines. A tiny model, real."""

from __future__ import annotations

import asyncio
import inspect
import random
import re
import runpy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvgw[transformers]'")
transformers = pytest.importorskip("transformers", reason="not installed: pip install 'kvgw[transformers]'")

from kvgw.breaker import BreakerOptions  # noqa: E402  # needs both
from kvgw.client import Client, ClientOptions, connect  # noqa: E402
from kvgw.device import copy_from_window  # noqa: E402
from kvgw.engines.breakeven import PROBE_HITS, PROBE_S, SAMPLES_MIN, BreakEven  # noqa: E402
from kvgw.engines.loop import LoopThread  # noqa: E402
from kvgw.engines.testing import SCENARIOS  # noqa: E402
from kvgw.engines.transformers import KVReuse  # noqa: E402
from kvgw.engines.transformers import cache as caches  # noqa: E402
from kvgw.engines.transformers.format import format_of  # noqa: E402
from kvgw.errors import Outage  # noqa: E402
from kvgw.model import Outcome  # noqa: E402
from tests.engines.bench import DEADLINES_S, Gateway, content, gateway  # noqa: E402
from tests.kvgw.test_engine_transformers import CHUNK, IDENTITY, config, prefill, reuse_of  # noqa: E402
from tests.support.aio import aio  # noqa: E402
from tests.support.gateways import house  # noqa: E402
from tests.support.manual_clock import ManualClock  # noqa: E402

READ_S = 0.9
"""Of each of the two reads that a restored prompt needs."""


def tiny(**changes: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config(**changes)).eval()


class Process:
    """One process with a model. Its event loop is a thread of its own, because scenarios call from several."""

    deadlines_s = DEADLINES_S

    def __init__(self, loop: LoopThread, reuse: KVReuse, salt: bytes) -> None:
        self._loop = loop
        self._reuse = reuse
        self._salt = salt

    def store(self, prompt: int, chunks: int) -> int:
        cache = self._cache(prompt, chunks)
        stored = self._loop.call(lambda: self._reuse.store(tokens_of(prompt, chunks), cache, salt=self._salt), 60)
        return stored.tokens // CHUNK

    def found(self, prompt: int, chunks: int) -> int:
        return self._restored(prompt, chunks).tokens // CHUNK

    def load(self, prompt: int, chunks: int) -> Sequence[bool]:
        """With a lookup: what is not found is not read."""
        restored = self._restored(prompt, chunks)
        for mine, stored in zip(restored.cache.layers, self._cache(prompt, chunks).layers, strict=False):
            for one, other in ((mine.keys, stored.keys), (mine.values, stored.values)):
                # As bytes: some that chance gives are no numbers.
                end = restored.tokens
                assert torch.equal(one.view(torch.uint8), other[:, :, :end].contiguous().view(torch.uint8))
        return [at < restored.tokens // CHUNK for at in range(chunks)]

    def _restored(self, prompt: int, chunks: int) -> Any:
        ids = [*tokens_of(prompt, chunks), 0]
        return self._loop.call(lambda: self._reuse.restore(ids, salt=self._salt), 60)

    def _cache(self, prompt: int, chunks: int) -> Any:
        """One with the scenarios' bytes, instead of what the model would compute."""
        kv_format = self._reuse.kv_format
        layers = caches.Layers.empty(kv_format, chunks * CHUNK, self._reuse._model)
        for index in range(chunks):
            layers.copy_chunk_in(index, memoryview(bytearray(content(prompt, index, kv_format.chunk_bytes))))
        return layers.as_cache(chunks * CHUNK)


def tokens_of(prompt: int, chunks: int) -> list[int]:
    return random.Random(prompt).choices(range(128), k=chunks * CHUNK)


class TransformersBench:
    """`kvgw.engines.testing.Bench` for transformers."""

    def __init__(self, served: Gateway, name: str) -> None:
        self.served = served
        self.identity = replace(IDENTITY, name=f"test/{name}")
        self.tenants = served.tenants
        self.stop, self.start, self.kill = served.stop, served.start, served.kill
        self.freeze, self.thaw, self.damage_one = served.freeze, served.thaw, served.damage_one

    @property
    def other_kinds(self) -> Iterator[Mapping[str, Any]]:
        yield {"identity": replace(self.identity, weights=b"v" * 32)}
        yield {"identity": replace(self.identity, tokenizer="0123abcd" * 5)}
        yield {"identity": replace(self.identity, adapter="lora", adapter_digest=b"a" * 32)}
        yield {"model": tiny().to(torch.bfloat16)}
        yield {"model": tiny(rope_parameters={"rope_type": "default", "rope_theta": 5000.0})}
        yield {"model": tiny(rms_norm_eps=1e-5)}
        yield {"salt": b"someone"}

    @contextmanager
    def adapter(self, changes: Mapping[str, Any] | None = None, *, tenant: str = "") -> Iterator[Process]:
        made = {"identity": self.identity, "model": tiny(), "salt": b"", **(changes or {})}
        token = self.served.tokens.get(tenant)
        salt = made["salt"] if token or not tenant else tenant.encode()
        loop = LoopThread("process")
        endpoint = f"unix:{self.served.folder / 'kvgw.sock'}"
        options = ClientOptions(
            read_deadline_s=READ_S, write_deadline_s=DEADLINES_S[2], breaker=BreakerOptions(period_max_s=5.0)
        )

        async def opened() -> tuple[Client, KVReuse]:
            client = connect(endpoint, token=token.read_text() if token else None, options=options)
            return client, await KVReuse.open(client, made["model"], made["identity"], tokens_per_chunk=CHUNK)

        client, reuse = loop.call(opened, 60)
        try:
            yield Process(loop, reuse, salt)
        finally:
            loop.close(client.aclose)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(tmp_path_factory.mktemp("transformers") / "data") as made:
        yield made


@pytest.fixture
def bench(running: Gateway, request: pytest.FixtureRequest) -> TransformersBench:
    running.ensure()
    return TransformersBench(running, request.node.name)


@pytest.mark.parametrize("name", SCENARIOS)
def test_conformance(name: str, bench: TransformersBench) -> None:
    SCENARIOS[name](bench)


@pytest.fixture(scope="module")
def prompt() -> Any:
    return torch.randint(128, (1, 100), generator=torch.Generator().manual_seed(1))


@aio
async def test_a_hit_that_loads_slower_than_the_model_computes_is_declined(tmp_path: Path, prompt: Any) -> None:
    clock, model = ManualClock(), tiny()
    async with house("embedded", tmp_path) as home:
        await (await reuse_of(home, model)).store(prompt, prefill(model, prompt))
        reuse = await KVReuse.open(home.client(), model, IDENTITY, tokens_per_chunk=CHUNK, clock=clock)
        read, chunk_s = reuse._client.get, 1.0

        async def get(registered: Any, keys: Any, into: Any) -> Any:
            clock.advance(len(keys) * chunk_s)
            return await read(registered, keys, into)

        reuse._client.get = get  # type: ignore[method-assign,assignment]
        for _ in range(SAMPLES_MIN):
            assert (await reuse.restore(prompt)).tokens == 96
            reuse.computed(100, 0.1)
        assert reuse.guard.load_bytes_per_s == pytest.approx(reuse.kv_format.chunk_bytes)
        for _ in range(PROBE_HITS - 1):
            declined = await reuse.restore(prompt)
            assert (declined.tokens, declined.cache.get_seq_length(), declined.outcome) == (0, 0, Outcome.OK)
            assert "to compute them is faster" in declined.reason
        assert reuse.hits_declined == PROBE_HITS - 1
        assert reuse.guard.prefill_tokens_per_s == pytest.approx(1000)
        chunk_s = 0.0001
        clock.advance(PROBE_S)
        assert (await reuse.restore(prompt)).tokens == 96, "a probe"
        off = await KVReuse.open(
            home.client(), model, IDENTITY, tokens_per_chunk=CHUNK, guard=BreakEven(on=False), clock=clock
        )
        for _ in range(SAMPLES_MIN):
            off.guard.loaded(1, 100.0)
            off.computed(100, 0.001)
        assert (await off.restore(prompt)).tokens == 96


@aio
async def test_a_gateway_that_comes_later_is_used_from_then_on(tmp_path: Path, prompt: Any) -> None:
    model = tiny()
    client = connect(f"unix:{tmp_path / 'data' / 'kvgw.sock'}")
    reuse = await KVReuse.open(client, model, IDENTITY, tokens_per_chunk=CHUNK)
    with pytest.raises(Outage, match="not answered yet"):
        assert reuse.registered
    assert (await reuse.restore(prompt)).outcome is Outcome.OUTAGE
    assert (await reuse.store(prompt, prefill(model, prompt))).outcome is Outcome.OUTAGE
    async with house("unix", tmp_path / "data"):
        for _ in range(100):  # the breaker lets a call through within seconds
            if (await reuse.store(prompt, prefill(model, prompt))).tokens:
                break
            await asyncio.sleep(0.1)
        assert (await reuse.restore(prompt)).tokens == 96
        assert reuse.registered.kv_format == reuse.kv_format
        await client.aclose()


def test_a_restored_chunk_is_copied_once() -> None:
    """From the window into the tensors that the cache then holds; a whole run is taken over as it is."""
    model = tiny()
    kv_format = format_of(model, IDENTITY, CHUNK)
    layers = caches.Layers.empty(kv_format, 3 * CHUNK, model)
    places = {tensor.data_ptr() for pair in layers._pairs for tensor in pair}
    copied: list[int] = []

    def copy(window: memoryview, tensors: Sequence[Any]) -> None:
        copied.append(window.nbytes)
        copy_from_window(window, tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(caches, "copy_from_window", copy)
        for index in range(3):
            layers.copy_chunk_in(index, memoryview(bytearray(kv_format.chunk_bytes)))
    for tokens in (3 * CHUNK, 2 * CHUNK):
        cache = layers.as_cache(tokens)
        assert cache.get_seq_length() == tokens
        assert {tensor.data_ptr() for one in cache.layers for tensor in (one.keys, one.values)} == places
    assert copied == [kv_format.chunk_bytes] * 3


FOLDER = Path(__file__).resolve().parents[2] / "docs" / "engines"
SAMPLE = FOLDER / "transformers_reuse.py"


def test_the_page_says_what_the_code_says() -> None:
    page = (FOLDER / "transformers.md").read_text(encoding="utf-8")
    assert SAMPLE.read_text(encoding="utf-8") in page.partition("```python\n")[2].partition("```")[0]
    table = page[page.index("| parameter of ") :].split("\n\n")[0]
    named = set(re.findall(r"(?m)^\| `(\w+)`", table))
    assert named == set(inspect.signature(KVReuse.open).parameters)


def test_the_sample_of_the_page_answers_the_same_from_what_it_stored(
    running: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running.ensure()
    folder = tmp_path / "tiny"
    tiny(max_position_embeddings=2048).save_pretrained(folder)
    tokenizers = pytest.importorskip("tokenizers")
    words = [f"w{number}" for number in range(128)]
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: at for at, word in enumerate(words)}, words[0]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token=words[0]).save_pretrained(folder)
    prompt = " ".join(random.Random(7).choices(words, k=600))
    sample = runpy.run_path(str(SAMPLE))
    printed = []
    for loaded in (0, 512):
        asyncio.run(sample["main"](folder, f"unix:{running.folder / 'kvgw.sock'}", prompt))
        numbers, text = capsys.readouterr().out.splitlines()
        assert numbers.startswith(f"{loaded} of 600 tokens loaded, 512 are kept")
        printed.append(text)
    assert printed[0] == printed[1]
    assert len(printed[0].split()) > 16
