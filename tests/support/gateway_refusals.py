"""The contract's refusals: what a client is told when it asks for what cannot be, and that nothing has changed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvgw.errors import Code, FormatError, KvgwError, RequestRefused
from kvgw.model import KEYS_MAX, Label, Outcome, PutOutcome
from kvgw.reports import Registered
from tests.support.aio import aio
from tests.support.gateways import House, Kind, buffers_for, format_of, house, keys_of, payloads_of
from tests.support.manual_clock import ManualClock

STORED, HAVE, CONFLICT = PutOutcome.STORED, PutOutcome.HAVE, PutOutcome.CONFLICT
DAY_S = 86_400


class RefusalContract:
    """Inherit, and name the transport."""

    kind: ClassVar[Kind]

    def house(self, tmp_path: Path, **options: Any) -> AbstractAsyncContextManager[House]:
        return house(self.kind, tmp_path / "gw", **options)

    @aio
    async def test_an_unknown_format_is_refused_by_name(self, tmp_path: Path) -> None:
        async with self.house(tmp_path) as gateway:
            client = gateway.client()
            foreign = Registered(format_of(), "", b"f" * 32)
            match = await client.match(foreign, [b"k"])
            assert (match.count, match.outcome) == (0, Outcome.OK), "R79: an early rank matches nothing"
            assert "not registered" in match.reason
            payload = payloads_of(foreign, 1)
            for call in (
                client.put(foreign, [b"k"], payload),
                client.get(foreign, [b"k"], buffers_for(foreign, 1)),
                client.touch(foreign, [b"k"]),
                client.delete(foreign, [b"k"]),
            ):
                with pytest.raises(RequestRefused, match="not registered") as refusal:
                    await call
                assert refusal.value.code is Code.FORMAT_UNKNOWN

    @aio
    async def test_R17_wrong_lengths_are_refused_before_a_byte_moves(self, tmp_path: Path) -> None:
        async with self.house(tmp_path) as gateway:
            client = gateway.client()
            registered = await client.register(format_of())
            length = registered.chunk_bytes
            keys, payloads = keys_of(40), payloads_of(registered, 40)
            await client.put(registered, keys, payloads)
            shared = memoryview(bytearray(b"\xcc" * (40 * length + 4096)))
            short = [shared[index * (length - 64) : (index + 1) * (length - 64)] for index in range(40)]
            with pytest.raises(FormatError, match=rf"{length - 64} bytes.* has {length}") as refusal:
                await client.get(registered, keys, short)
            assert refusal.value.code is Code.LENGTH_MISMATCH
            assert bytes(shared) == b"\xcc" * len(shared), "R17: nothing was written"
            right = [shared[index * length : (index + 1) * length] for index in range(40)]
            assert (await client.get(registered, keys, right)).leading == 40
            assert bytes(shared[: 40 * length]) == b"".join(payloads)
            assert bytes(shared[40 * length :]) == b"\xcc" * 4096, "R17: nothing behind the buffer changes"
            for wrong in (b"", payloads[0][:-1], payloads[0] + b"x"):
                with pytest.raises(FormatError, match=rf"chunk 0 has {len(wrong)} bytes.* {length}"):
                    await client.put(registered, [b"new"], [wrong])
            with pytest.raises(FormatError, match="read-only"):
                await client.get(registered, keys[:1], [memoryview(bytes(length))])
            with pytest.raises(FormatError, match="contiguous"):
                await client.get(registered, keys[:1], [memoryview(bytearray(2 * length))[::2]])
            with pytest.raises(FormatError, match="contiguous"):
                await client.put(registered, [b"new"], [memoryview(bytearray(2 * length))[::2]])
            with pytest.raises(FormatError, match="40 keys but 1 buffers"):
                await client.get(registered, keys, right[:1])

    @aio
    async def test_R51_too_many_keys_name_the_limit(self, tmp_path: Path) -> None:
        async with self.house(tmp_path) as gateway:
            client = gateway.client()
            registered = await client.register(format_of(64))
            buffer = bytearray(64)
            for count in (0, KEYS_MAX + 1, 100_000):
                keys = keys_of(count)
                for call in (
                    client.match(registered, keys),
                    client.get(registered, keys, [buffer] * count),
                    client.put(registered, keys, [buffer] * count),
                    client.touch(registered, keys),
                    client.delete(registered, keys),
                ):
                    with pytest.raises(KvgwError, match=rf"{KEYS_MAX} keys, not {count}") as refusal:
                        await call
                    assert refusal.value.code is Code.TOO_MANY_KEYS
            keys = keys_of(KEYS_MAX)
            ranks = [await client.register(format_of(64, parallel=(9, rank, 1, 0, 1, 0))) for rank in range(9)]
            match = await client.match(ranks, keys)
            assert (match.count, match.outcome) == (0, Outcome.OK), (
                f"more keys than SQLite takes at once: {match.reason}"
            )
            assert (await client.touch(registered, keys)).count == 0
            assert await client.delete(registered, keys) == 0

    @aio
    async def test_a_repeated_or_malformed_key_is_refused(self, tmp_path: Path) -> None:
        async with self.house(tmp_path) as gateway:
            client = gateway.client()
            registered = await client.register(format_of())
            payloads = payloads_of(registered, 2)
            for wrong in ([b"k", b"k"], [b"k", b""], [b"k", b"x" * 65], [b"k", "text"]):
                keys: Sequence[Any] = wrong
                for call in (
                    client.match(registered, keys),
                    client.put(registered, keys, payloads),
                    client.get(registered, keys, buffers_for(registered, 2)),
                    client.delete(registered, keys),
                ):
                    with pytest.raises(FormatError, match="key 1"):
                        await call
            assert (await client.stat()).entries == 0

    @aio
    async def test_R53_nonsense_times_are_refused_and_long_ones_capped(self, tmp_path: Path) -> None:
        clock = ManualClock()
        async with self.house(tmp_path, clock=clock) as gateway:
            client = gateway.client()
            registered = await client.register(format_of())
            payload = payloads_of(registered, 1)
            wrong: list[Any] = [0, -1, 0.0005, 1e300, float("nan"), float("inf"), 11 * 366 * DAY_S, "60", True]
            for ttl in wrong:
                with pytest.raises(FormatError, match=r"time must be|no duration"):
                    await client.put(registered, [b"k"], payload, ttl=ttl)
                with pytest.raises(FormatError, match=r"time must be|no duration"):
                    await client.touch(registered, [b"k"], ttl=ttl)
            for deadline in (0, -1, float("nan"), 1e9, "1"):
                with pytest.raises(FormatError, match=r"(deadline|time) must be"):
                    await client.match(registered, [b"k"], deadline_s=deadline)  # type: ignore[arg-type]
            report = await client.put(registered, [b"k"], payload, ttl=9 * 366 * DAY_S)
            assert report.expires_ms == gateway.now_ms() + 30 * DAY_S * 1000, "the namespace's longest TTL"
            await client.touch(registered, [b"k"], ttl=9 * 366 * DAY_S)
            assert await gateway.rows("SELECT expires_ms FROM entry") == [(report.expires_ms,)]

    @aio
    async def test_values_out_of_bounds_are_refused_the_same_everywhere(self, tmp_path: Path) -> None:
        async with self.house(tmp_path) as gateway:
            client = gateway.client()
            registered = await client.register(format_of())
            payload = payloads_of(registered, 1)
            puts: list[dict[str, Any]] = [
                {"depth": -1},
                {"depth": 2**31 + 1},
                {"depth": 2**70},
                {"depth": "1"},
                {"parent": b""},
                {"parent": b"x" * 65},
                {"labels": [Label("user", "u")] * 17},
                {"labels": [Label("", "u")]},
                {"labels": [Label("user", "x" * 257)]},
            ]
            for wrong in puts:
                with pytest.raises(KvgwError, match=r"malformed|cannot be sent") as refusal:
                    await client.put(registered, [b"k"], payload, **wrong)
                assert not refusal.value.retryable, f"{wrong}: retrying changes nothing"
            for lease in (-1, 60_001, 2**70):
                with pytest.raises(RequestRefused, match=r"malformed|cannot be sent"):
                    await client.match(registered, [b"k"], lease_ms=lease)
            with pytest.raises(FormatError, match="at least one"):
                await client.match([], [b"k"])
            assert (await client.stat()).entries == 0
