"""Both halves of the vLLM connector in the scenarios that every adapter passes, over a real gateway.

The engine is a stand-in, which needs no vLLM. As in vLLM one thread at a time calls the halves; requests take turns.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'kvgw[torch]'")

from kvgw.engines.options import parse_options
from kvgw.engines.testing import SCENARIOS
from tests.engines.bench import DEADLINES_S, Gateway, gateway
from tests.engines.fake_vllm import BLOCK, CHUNK, FakeVllm, _step
from tests.engines.test_vllm_format import FACTS


class Engine:
    """One engine that serves several requests at once."""

    deadlines_s = DEADLINES_S

    def __init__(self, fake: FakeVllm, cache_salt: str | None) -> None:
        self._fake = fake
        self._salt = cache_salt
        self._lock = threading.Lock()
        self._stored: set[bytes] = set()
        self._loaded: set[str] = set()
        self._bad: set[int] = set()
        (self._worker,) = fake.workers
        self._put = self._worker._remote.put
        self._worker._remote.put = self._noted_put  # type: ignore[method-assign,assignment]

    def store(self, prompt: int, chunks: int) -> int:
        """Computes what it cannot load; counts what the gateway said that it has."""
        tokens = tokens_of(prompt, chunks)
        request = self._request(tokens)
        blocks, found, first_bad = self._load(request, chunks)
        loaded = min(found, first_bad)
        with self._lock:
            state = self._fake.scheduler._states[request.request_id]
            keys = [] if state.answer is None else list(state.answer.keys)
            plan = self._fake._plan(request, blocks, loaded, len(tokens) - loaded, True)
            self._fake._compute(tokens, blocks, loaded, len(tokens))
            self._worker.start_stores(plan)
        assert self._worker.drain(DEADLINES_S[2] + 1)
        self._finish(request)
        known = [at < loaded // CHUNK or keys[at] in self._stored for at in range(min(chunks, len(keys)))]
        return next((at for at, there in enumerate(known) if not there), len(known))

    def found(self, prompt: int, chunks: int) -> int:
        request = self._request(tokens_of(prompt, chunks))
        tokens = self._ask(request)
        self._finish(request)
        return tokens // CHUNK

    def load(self, prompt: int, chunks: int) -> Sequence[bool]:
        """With a lookup: this adapter loads nothing that it was not told of."""
        tokens = tokens_of(prompt, chunks)
        request = self._request(tokens)
        blocks, found, first_bad = self._load(request, chunks)
        loaded = min(found, first_bad)
        with self._lock:
            self._fake._check(tokens, blocks, loaded)
        self._finish(request)
        return [at < loaded // CHUNK for at in range(chunks)]

    def _request(self, tokens: list[int]) -> Any:
        with self._lock:
            return self._fake.request(tokens, cache_salt=self._salt)

    def _finish(self, request: Any) -> None:
        with self._lock:
            self._fake.scheduler.finished(request.request_id)

    def _ask(self, request: Any) -> int:
        while True:
            with self._lock:
                tokens, _ = self._fake.scheduler.matched_tokens(request, 0)
            if tokens is not None:
                return tokens
            time.sleep(0.002)

    def _load(self, request: Any, chunks: int) -> tuple[list[int], int, int]:
        """Blocks of the request, tokens that were to be loaded into them, and those before the first that failed."""
        found = self._ask(request)
        name = request.request_id
        with self._lock:
            blocks = self._fake._blocks((chunks * CHUNK + BLOCK) // BLOCK)
            self._fake.scheduler.allocated(request, blocks, found)
            if found:
                self._fake._start(self._fake.scheduler.plan(_step()))
        while found and name not in self._loaded:
            with self._lock:
                self._loaded |= self._worker.finished_loads()
                new = self._worker.take_bad_blocks()
                self._bad |= new
                self._fake.scheduler.lost(new)
            time.sleep(0.002)
        return blocks, found, self._fake._computed(blocks, self._bad, found)

    async def _noted_put(self, tenant: str, kv_format: Any, keys: Sequence[bytes], *args: Any, **options: Any) -> int:
        stored: int = await self._put(tenant, kv_format, keys, *args, **options)
        self._stored |= set(keys[:stored])
        return stored


def tokens_of(prompt: int, chunks: int) -> list[int]:
    """Whole chunks, and the token that is always computed."""
    return [prompt + 1, *(1 + at % 50 for at in range(chunks * CHUNK))]


class VllmBench:
    """`kvgw.engines.testing.Bench` for vLLM."""

    def __init__(self, served: Gateway, name: str) -> None:
        self.served = served
        self.name = name
        self.tenants = served.tenants
        self.stop, self.start, self.kill = served.stop, served.start, served.kill
        self.freeze, self.thaw, self.damage_one = served.freeze, served.thaw, served.damage_one

    @property
    def other_kinds(self) -> Iterator[Mapping[str, Any]]:
        yield {"weights": b"v" * 32}
        yield {"tokenizer": b"u" * 32}
        yield {"quantisation": "awq"}
        yield {"abi": (("vllm", "0.33.0"), *FACTS.abi[1:])}
        yield {"cache_layout": "LBNHC"}
        yield {"media": b"m" * 32}
        yield {"cache_salt": "someone"}

    @contextmanager
    def adapter(self, changes: Mapping[str, Any] | None = None, *, tenant: str = "") -> Iterator[Engine]:
        facts = {"model": self.name, **(changes or {})}
        salt = facts.pop("cache_salt", f"{tenant}-secret" if tenant else None)
        entries = {f"{name}-secret": {"token_file": str(path)} for name, path in self.served.tokens.items()}
        tenants = self.served.folder.parent / "tenants.json"
        tenants.write_text(json.dumps({"by": "cache_salt", "tenants": entries}))
        more = {"tokens_per_chunk": CHUNK, "break_even": False, "tenants_file": str(tenants)}
        fake = FakeVllm(parse_options({**self.served.options, **more}), blocks=4000, **facts)
        try:
            yield Engine(fake, salt)
        finally:
            fake.close()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(tmp_path_factory.mktemp("vllm") / "data") as made:
        yield made


@pytest.fixture
def bench(running: Gateway, request: pytest.FixtureRequest, tmp_path: Path) -> VllmBench:
    running.ensure()
    return VllmBench(running, request.node.name)


@pytest.mark.parametrize("name", SCENARIOS)
def test_conformance(name: str, bench: VllmBench) -> None:
    SCENARIOS[name](bench)
