"""A client process of `tests.scale_gateways`: the bench's own, but a chunk may come from any tier."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

from kvgw.bench import worker
from kvgw.bench.plan import BenchError
from kvgw.bench.subjects import CALL_SECONDS, KvgwSubject


class FromAnyTier(KvgwSubject):
    async def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        report = await self._client.get(self._known, keys, into, deadline_s=CALL_SECONDS, on_error="raise")
        if report.leading != len(keys):
            raise BenchError(f"a GET of {len(keys)} chunks that were just stored read {len(report.hits)}")


if __name__ == "__main__":
    with mock.patch.object(worker, "KvgwSubject", FromAnyTier):
        worker.main()
