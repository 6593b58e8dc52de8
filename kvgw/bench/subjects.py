"""The systems that a client process drives, behind one door. All of them raise unless everything was done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, Protocol

from kvgw.bench.plan import BenchError
from kvgw.bench.resp import Resp
from kvgw.client import Client
from kvgw.kvformat import KVFormat, LayerGroup
from kvgw.model import Durability, PutOutcome
from kvgw.reports import Registered

CALL_SECONDS: Final = 60.0
LIFE_SECONDS: Final = 3600.0
"""What a bench that was interrupted leaves in a running gateway is gone after this."""


class Subject(Protocol):
    """A system under measurement. Keys are new in each round; chunks and buffers have the prepared length."""

    async def prepare(self, chunk_bytes: int) -> None:
        """Make the length of the chunks known."""
        ...

    async def put(self, keys: Sequence[bytes], chunks: Sequence[memoryview]) -> None:
        """Store all chunks."""
        ...

    async def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        """Read all chunks."""
        ...

    async def match(self, keys: Sequence[bytes]) -> None:
        """Find all chunks."""
        ...

    async def delete(self, keys: Sequence[bytes]) -> None:
        """Delete all chunks."""
        ...


class KvgwSubject:
    """The gateway, through its own client."""

    def __init__(self, client: Client, durability: Durability) -> None:
        self._client = client
        self._durability = durability
        self._formats: dict[int, Registered] = {}
        self._format: Registered | None = None

    async def prepare(self, chunk_bytes: int) -> None:
        if chunk_bytes not in self._formats:
            self._formats[chunk_bytes] = await self._client.register(format_of(chunk_bytes))
        self._format = self._formats[chunk_bytes]

    async def put(self, keys: Sequence[bytes], chunks: Sequence[memoryview]) -> None:
        report = await self._client.put(
            self._known,
            keys,
            chunks,
            ttl=LIFE_SECONDS,
            durability=self._durability,
            deadline_s=CALL_SECONDS,
            on_error="raise",
        )
        outcomes = Counter(report.outcomes)
        if outcomes[PutOutcome.STORED] != len(keys):
            counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
            raise BenchError(
                f"a PUT of {len(keys)} new chunks ended with {counts}: {report.reason or 'no reason given'}"
            )

    async def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        report = await self._client.get(self._known, keys, into, deadline_s=CALL_SECONDS, on_error="raise")
        tiers = Counter(hit.tier for hit in report.hits)
        if tiers["staging"] != len(keys):
            counts = ", ".join(f"{count} from {tier}" for tier, count in tiers.items()) or "none"
            raise BenchError(
                f"a GET of {len(keys)} chunks that were just stored read {counts}; staging is too small for this: "
                "lower --round-bytes or --clients, or raise staging.bytes of the gateway"
            )

    async def match(self, keys: Sequence[bytes]) -> None:
        match = await self._client.match(self._known, keys, deadline_s=CALL_SECONDS, on_error="raise")
        if match.count != len(keys):
            raise BenchError(f"a match found {match.count} of {len(keys)} chunks that were just stored: {match.reason}")

    async def delete(self, keys: Sequence[bytes]) -> None:
        deleted = await self._client.delete(self._known, keys, deadline_s=CALL_SECONDS)
        if deleted != len(keys):
            raise BenchError(f"the gateway deleted {deleted} of {len(keys)} chunks that were just stored")

    @property
    def _known(self) -> Registered:
        assert self._format is not None, "prepare comes first"
        return self._format


class RedisSubject:
    """Redis, through the raw client. Its calls block, which costs less than waiting in an event loop."""

    def __init__(self, connection: Resp) -> None:
        self._connection = connection

    async def prepare(self, chunk_bytes: int) -> None:
        """Redis takes values of any length."""

    async def put(self, keys: Sequence[bytes], chunks: Sequence[memoryview]) -> None:
        self._connection.set_many(keys, chunks)

    async def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        self._check("MGET", self._connection.get_many(keys, into), keys)

    async def match(self, keys: Sequence[bytes]) -> None:
        self._check("EXISTS", self._connection.exists(keys), keys)

    async def delete(self, keys: Sequence[bytes]) -> None:
        self._check("DEL", self._connection.delete(keys), keys)

    @staticmethod
    def _check(command: str, count: int, keys: Sequence[bytes]) -> None:
        if count != len(keys):
            raise BenchError(f"Redis answered {command} for {count} of {len(keys)} values that were just stored")


def format_of(chunk_bytes: int) -> KVFormat:
    """A KV format whose chunks have exactly `chunk_bytes` bytes: one state of that length."""
    return KVFormat(
        model="kvgw/bench",
        weights="1",
        tokenizer="1",
        kv_dtype="uint8",
        kv_quantisation=None,
        adapter=None,
        adapter_digest=None,
        positions=("kind", "none"),
        attention=(LayerGroup("state", 1, state_bytes=chunk_bytes),),
        layout="bytes",
        tokens_per_chunk=256,
        engine="kvgw bench",
        engine_abi="1",
        parallel=(1, 0, 1, 0, 1, 0),
        multimodal=None,
        extra=(),
    )
