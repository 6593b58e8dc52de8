"""Calls to a gateway: each under its deadline and behind the breaker. What `kvgw.client` is built on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, Literal, TypeVar

from kvgw.breaker import Breaker, BreakerOptions, BreakerState
from kvgw.checks import deadline
from kvgw.deadlines import Deadlines
from kvgw.errors import Code, FormatError, KvgwError, Outage
from kvgw.runtime import Clock, Rng, SystemClock, SystemRng
from kvgw.transport import CONNECTIONS_DEFAULT, Transport
from kvgw.wire import WINDOW_BYTES_MAX

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
    connections: int = CONNECTIONS_DEFAULT
    """To each gateway; a connection carries one call at a time, a wait as long as it waits."""
    shared_memory: bool = False
    """Move payloads through memory that a gateway at ``unix:`` lends, as far as it does; see `Client.window`."""


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
        self._deadlines = Deadlines()

    async def aclose(self) -> None:
        """Close the connections; a second call does nothing."""
        await self._transport.aclose()
        self._deadlines.close()

    @property
    def breaker(self) -> BreakerState:
        """Whether calls go to the gateway (closed) or are answered as outages here."""
        return self._breaker.state

    @asynccontextmanager
    async def window(self, nbytes: int) -> AsyncIterator[memoryview]:
        """Memory for chunks, zeroed, to put from and to get into: shared with the gateway if it lends it, else plain.

        What lies in shared memory is not copied on its way to and from the gateway. Operations on one window take
        turns. A `get` that is cancelled, or gets no answer in time, costs a shared window: every later call with memory
        in it is an outage. A `put` that is given up leaves it to you: what was not read by then is never stored. The
        memory ends with the block; release slices and arrays over it before.
        """
        if not 1 <= nbytes <= WINDOW_BYTES_MAX:
            raise FormatError(f"a window has 1 to {WINDOW_BYTES_MAX} bytes, not {nbytes}")
        limit = self._limit(None, self._options.read_deadline_s)
        try:
            held = await self._call(limit, lambda: self._transport.lend(nbytes))
        except Outage:
            held = None
        if held is None:
            yield memoryview(bytearray(nbytes))
            return
        try:
            yield held.view
        finally:
            await held.aclose()

    async def _call(self, limit_s: float, send: Callable[[], Awaitable[Result]]) -> Result:
        """Make one call under its deadline and the breaker."""
        if not self._breaker.admit():
            raise Outage("the gateway did not answer before; it is tried again shortly", Code.UNAVAILABLE)
        try:
            with self._deadlines.within(limit_s):
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

    @property
    def read_deadline_s(self) -> float:
        """Seconds that a read takes at most where a call says nothing else."""
        return self._options.read_deadline_s

    def _maybe_raise(self, error: Outage, on_error: OnError | None) -> None:
        if (on_error or self._options.on_error) == "raise":
            raise error

    @staticmethod
    def _limit(given: float | None, default: float) -> float:
        return deadline(default if given is None else given)


def gateway_ms(limit_s: float) -> int:
    """The deadline that the gateway is told: a little before the client's, so that its reason still arrives in time."""
    return max(1, int(limit_s * 1000 * GATEWAY_SHARE))
