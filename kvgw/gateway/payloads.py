"""Where a request's payload comes from and goes to: a connection, or the caller's own buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class PayloadSource(Protocol):
    """Payloads of a PUT. Raises what its medium raises when the client is gone."""

    async def wanted(self, indices: Sequence[int]) -> None:
        """Tell the client which chunks are wanted, by batch index in ascending order; called exactly once."""
        ...

    async def receive(self, index: int, target: memoryview) -> None:
        """Receive the payload of the next wanted chunk; `target` has exactly its length."""
        ...


class PayloadSink(Protocol):
    """Payloads of a GET."""

    async def deliver(self, index: int, payload: memoryview) -> None:
        """Hand over a verified chunk. The memory is the gateway's again when this returns."""
        ...
