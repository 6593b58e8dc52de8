"""The contract of all transports over the gateway in this process, and what only the embedded one promises."""

from __future__ import annotations

from pathlib import Path

from kvgw import embedded
from kvgw.model import Outcome
from tests.support.aio import aio
from tests.support.gateway_contract import GatewayContract
from tests.support.gateway_isolation import IsolationContract
from tests.support.gateway_refusals import RefusalContract
from tests.support.gateways import SMALL, format_of, keys_of, payloads_of, read


class TestEmbedded(GatewayContract, RefusalContract, IsolationContract):
    kind = "embedded"


@aio
async def test_an_embedded_gateway_keeps_what_it_promised(tmp_path: Path) -> None:
    async with embedded.open(tmp_path / "gw", settings=SMALL) as client:
        registered = await client.register(format_of())
        keys, payloads = keys_of(3), payloads_of(registered, 3)
        await client.put(registered, keys, payloads)
    async with embedded.open(tmp_path / "gw", settings=SMALL) as again:
        assert (await read(again, registered, keys))[1] == payloads, "law 8: nvme survives the process"
        assert (await client.match(registered, keys)).outcome is Outcome.OUTAGE, "the first client stays closed"
