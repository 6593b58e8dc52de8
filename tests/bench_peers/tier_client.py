"""A client process of the gateway for chunks that lie in a tier: ``python -m tests.bench_peers.tier_client nvme``.

The client of `kvgw bench`, but what a GET reads must come from that tier, all of it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from unittest import mock

from kvgw.bench import worker
from kvgw.bench.plan import BenchError
from kvgw.bench.subjects import CALL_SECONDS, KvgwSubject


class FromTier(KvgwSubject):
    """Reads from the tier that the process was started for."""

    async def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        report = await self._client.get(self._known, keys, into, deadline_s=CALL_SECONDS, on_error="raise")
        tiers = Counter(str(hit.tier) for hit in report.hits)
        if tiers != {sys.argv[1]: len(keys)}:
            found = ", ".join(f"{count} from {tier}" for tier, count in tiers.items()) or "none"
            raise BenchError(f"a cold GET of {len(keys)} chunks read {found}, not all from {sys.argv[1]}")


if __name__ == "__main__":
    with mock.patch.object(worker, "KvgwSubject", FromTier):
        worker.main()
