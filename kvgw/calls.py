"""Calls to a gateway: each under its deadline and behind the breaker. What `kvgw.client` is built on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, Literal, TypeVar

from kvgw.breaker import Breaker, BreakerOptions, BreakerState
from kvgw.checks import deadline
from kvgw.errors import Code, KvgwError, Outage
from kvgw.runtime import Clock, Rng, SystemClock, SystemRng
from kvgw.transport import Transport

GATEWAY_SHARE: Final = 0.95
"""Part of a call's time that the gateway may use."""

Result = TypeVar("Result")
OnError = Literal["miss", "raise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """How a client behaves. Deadlines are in seconds and hold for a call as a whole."""

    namespace: str = ""
    """Empty: the credential's default namespace."""
    read_deadline_s: float = 10.0
    write_deadline_s: float = 30.0
    on_error: OnError = "miss"
    breaker: BreakerOptions = field(default_factory=BreakerOptions)


class Calls:
    """A gateway at the other end of a transport, asked within bounds."""

    def __init__(
        self,
        transport: Transport,
        options: ClientOptions | None = None,
        *,
        clock: Clock | None = None,
        rng: Rng | None = None,
    ) -> None:
        self._transport = transport
        self._options = options or ClientOptions()
        self._breaker = Breaker(self._options.breaker, clock or SystemClock(), rng or SystemRng())

    async def aclose(self) -> None:
        """Close the connections; a second call does nothing."""
        await self._transport.aclose()

    @property
    def breaker(self) -> BreakerState:
        """Whether calls go to the gateway (closed) or are answered as outages here."""
        return self._breaker.state

    async def _call(self, limit_s: float, send: Callable[[], Awaitable[Result]]) -> Result:
        """Make one call under its deadline and the breaker."""
        if not self._breaker.admit():
            raise Outage("the gateway did not answer before; it is tried again shortly", Code.UNAVAILABLE)
        try:
            async with asyncio.timeout(limit_s):
                result = await send()
        except TimeoutError as error:
            self._breaker.failed()
            raise Outage(f"no answer within the deadline of {limit_s:g} s", Code.DEADLINE) from error
        except Outage as error:
            if error.answered:
                self._breaker.succeeded()
            else:
                self._breaker.failed()
            raise
        except KvgwError:
            self._breaker.succeeded()
            raise
        except BaseException:
            self._breaker.abandoned()
            raise
        self._breaker.succeeded()
        return result

    def _maybe_raise(self, error: Outage, on_error: OnError | None) -> None:
        if (on_error or self._options.on_error) == "raise":
            raise error

    @staticmethod
    def _limit(given: float | None, default: float) -> float:
        return deadline(default if given is None else given)


def gateway_ms(limit_s: float) -> int:
    """The deadline that the gateway is told: a little before the client's, so that its reason still arrives in time."""
    return max(1, int(limit_s * 1000 * GATEWAY_SHARE))
