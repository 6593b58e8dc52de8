"""The contract of all transports over the Unix socket and over TCP."""

from __future__ import annotations

from tests.support.gateway_contract import GatewayContract
from tests.support.gateway_isolation import IsolationContract


class TestUnixSocket(GatewayContract, IsolationContract):
    kind = "unix"


class TestTcp(GatewayContract, IsolationContract):
    kind = "tcp"
