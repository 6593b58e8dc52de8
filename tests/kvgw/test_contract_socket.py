"""The contract of all transports over the Unix socket, over shared memory, and over TCP."""

from __future__ import annotations

from tests.support.gateway_contract import GatewayContract
from tests.support.gateway_isolation import IsolationContract
from tests.support.gateway_refusals import RefusalContract


class TestUnixSocket(GatewayContract, RefusalContract, IsolationContract):
    kind = "unix"


class TestSharedMemory(GatewayContract, RefusalContract, IsolationContract):
    kind = "shm"


class TestTcp(GatewayContract, RefusalContract, IsolationContract):
    kind = "tcp"
