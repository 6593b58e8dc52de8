"""The contract of all transports over TLS."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from tests.support.encrypted import tls_house
from tests.support.gateway_contract import GatewayContract
from tests.support.gateway_isolation import IsolationContract
from tests.support.gateway_refusals import RefusalContract
from tests.support.gateways import House


class TestTls(GatewayContract, RefusalContract, IsolationContract):
    kind = "tcp"

    def house(self, tmp_path: Path, **options: Any) -> AbstractAsyncContextManager[House]:
        return tls_house(tmp_path / "gw", **options)
