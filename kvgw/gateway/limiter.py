"""Rate limits: how often, how much and how much at once a namespace and its tenant may ask of this gateway.

Requests are counted before they are served, by the generic cell rate algorithm; bytes after they moved, since nobody
knows before: who is in debt waits until it is paid. Several gateways each grant their part of the limit. This is about
load, not about safety: if it fails it lets requests pass, whereas quota, which is in the catalog, refuses them.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import TracebackType
from typing import Final
from uuid import UUID

from kvgw.errors import Code, Outage
from kvgw.gateway.meter import Meter
from kvgw.metrics import Metrics
from kvgw.runtime import Clock
from tenancy.model import Namespace

log = logging.getLogger("kvgw.gateway")

BURST_SECONDS: Final = 1.0
"""What a second allows may come at once."""
REMEMBERED_MAX: Final = 65_536
CROWD_RETRY_SECONDS: Final = 0.1

READING_PART, WRITING_PART, ASKING_PART = 1.0, 0.75, 0.5
"""How far the requests of each kind may fill what is allowed at once. In a crowd those go first that are missed least:
a match is an answer about work that can be done without it, a PUT may be sent again, a GET saves what it delivers."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What somebody may ask for; 0 is no limit."""

    requests_per_second: int = 0
    bytes_per_second: int = 0
    concurrent_requests: int = 0


_NO_LIMIT: Final = Allowance()


@dataclass(slots=True)
class Cell:
    """A flow of `rate` units a second, of which those of `BURST_SECONDS` may come at once."""

    rate: float
    due: float = 0.0
    """When all that was taken would have come at an even pace."""

    def wait(self, now: float, burst: float) -> float:
        """Seconds until one more unit may come; 0 when it may now. `burst` units may come at once."""
        return max(0.0, self.due - now - (burst - 1.0) / self.rate)

    def take(self, now: float, units: float) -> None:
        """Count units that come."""
        self.due = max(self.due, now) + units / self.rate

    def pace(self, now: float, rate: float) -> None:
        """Go on at another rate: what is owed is so many units, and is paid at the new one."""
        if rate != self.rate:
            self.due = now + (self.due - now) * self.rate / rate if self.due > now else self.due
            self.rate = rate


@dataclass(slots=True)
class _Account:
    """One namespace's, or one tenant's."""

    allowance: Allowance
    requests: Cell | None
    bytes: Cell | None
    inside: int = 0


@dataclass(slots=True)
class _CountedIn:
    """The accounts of a namespace, paced for its policy and so many gateways."""

    namespace: Namespace
    gateways: int
    accounts: Sequence[_Account]


class Limiter:
    """Counts what each namespace and tenant asks for. One event loop; no await."""

    def __init__(self, clock: Clock, metrics: Metrics, tenant: Allowance, meter: Meter | None = None) -> None:
        """`tenant`: what each tenant may ask for, all of its namespaces together. `meter` counts what is refused."""
        self._clock = clock
        self._meter = meter
        self._tenant = tenant
        self._limits_tenants = tenant != _NO_LIMIT
        self._accounts: OrderedDict[UUID, _Account] = OrderedDict()
        self._counted_in: dict[UUID, _CountedIn] = {}
        """By namespace. Most requests find it as it was at the last one."""
        self._refusals = {what: metrics.limited.labels(what) for what in ("concurrency", "requests", "bytes")}
        self._told = False
        self.gateways = 1
        """How many gateways share the limits."""

    def admitted(self, namespace: Namespace, part: float = READING_PART) -> Admission:
        """A block that lets one request in, or raises `Outage` (busy) with the time after which to come again.

        `part`: it is turned away as soon as so much of what may be served at once is.
        """
        return Admission(self, namespace, part)

    def turned_away(self, namespace: Namespace, part: float) -> Outage | None:
        """Why a request would not be let in now, counted as refused; None: ask by `admitted`.

        In a crowd most are refused, and each refusal is work that is taken from those who are served: so this is asked
        before anything else is done for a request.
        """
        if self._is_free(namespace):
            return None
        _, refusal = self._look(namespace, part, self._clock.monotonic())
        return None if refusal is None else self._refused(namespace, refusal)

    def close(self, accounts: Sequence[_Account], moved_bytes: int) -> None:
        """Only for `Admission`: a request that was let in is over."""
        now = self._clock.monotonic()
        for account in accounts:
            account.inside -= 1
            if account.bytes is not None and moved_bytes:
                account.bytes.take(now, moved_bytes)

    def open(self, namespace: Namespace, part: float) -> Sequence[_Account]:
        """Only for `Admission`: the accounts that a request is counted in."""
        if self._is_free(namespace):
            return ()
        now = self._clock.monotonic()
        accounts, refusal = self._look(namespace, part, now)
        if refusal is not None:
            raise self._refused(namespace, refusal)
        for account in accounts:
            account.inside += 1
            if account.requests is not None:
                account.requests.take(now, 1)
        return accounts

    def _is_free(self, namespace: Namespace) -> bool:
        own = namespace.requests_per_second or namespace.bytes_per_second or namespace.concurrent_requests
        return not own and not self._limits_tenants

    def _look(self, namespace: Namespace, part: float, now: float) -> tuple[Sequence[_Account], _Refusal | None]:
        """The accounts that a request is counted in, and what speaks against it."""
        try:
            accounts = self._accounts_of(namespace)
            for account in accounts:
                if (why := _refusal(account, part, now)) is not None:
                    return accounts, why
            return accounts, None
        except Exception:  # a bug here must not be an outage: the limiter fails open
            if not self._told:
                self._told = True
                log.exception("the rate limiter failed; requests pass without it")
            return [], None

    def _refused(self, namespace: Namespace, refusal: _Refusal) -> Outage:
        self._refusals[refusal.what].inc()
        if self._meter is not None:
            self._meter.limited(namespace.scope)
        return Outage(refusal.sentence, Code.BUSY, retry_after_s=refusal.wait_s)

    def _accounts_of(self, namespace: Namespace) -> Sequence[_Account]:
        known = self._counted_in.get(namespace.scope.namespace)
        if known is None or known.namespace is not namespace or known.gateways != self.gateways:
            if len(self._counted_in) >= REMEMBERED_MAX:
                self._counted_in.clear()
            known = _CountedIn(namespace, self.gateways, self._brought_up_to_date(namespace))
            self._counted_in[namespace.scope.namespace] = known
        return known.accounts

    def _brought_up_to_date(self, namespace: Namespace) -> Sequence[_Account]:
        own = Allowance(namespace.requests_per_second, namespace.bytes_per_second, namespace.concurrent_requests)
        wanted = ((namespace.scope.namespace, own), (namespace.scope.tenant, self._tenant))
        return [self._account(who, allowance) for who, allowance in wanted if allowance != _NO_LIMIT]

    def _account(self, who: UUID, allowance: Allowance) -> _Account:
        known = self._accounts.get(who)
        if known is None:
            known = self._accounts[who] = _Account(allowance, None, None)
            while len(self._accounts) > REMEMBERED_MAX:
                self._accounts.popitem(last=False)
                self._counted_in.clear()  # one that is forgotten is counted in no more
        self._accounts.move_to_end(who)
        known.allowance = allowance
        now = self._clock.monotonic()
        known.requests = _paced(known.requests, allowance.requests_per_second / self.gateways, now)
        known.bytes = _paced(known.bytes, allowance.bytes_per_second / self.gateways, now)
        return known


class Admission:
    """A request that is let in while its block lasts; says how many bytes it moved."""

    __slots__ = ("_accounts", "_limiter", "_namespace", "_part", "moved_bytes")

    def __init__(self, limiter: Limiter, namespace: Namespace, part: float) -> None:
        self._limiter = limiter
        self._namespace = namespace
        self._part = part
        self._accounts: Sequence[_Account] = ()
        self.moved_bytes = 0

    def __enter__(self) -> Admission:
        self._accounts = self._limiter.open(self._namespace, self._part)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._accounts:
            self._limiter.close(self._accounts, self.moved_bytes)


@dataclass(frozen=True, slots=True)
class _Refusal:
    what: str
    sentence: str
    wait_s: float


def _paced(cell: Cell | None, rate: float, now: float) -> Cell | None:
    if not rate:
        return None
    if cell is None:
        return Cell(rate)
    cell.pace(now, rate)
    return cell


@lru_cache(maxsize=1024)
def _crowded(inside: int, allowed: int, most: int) -> _Refusal:
    return _Refusal(
        "concurrency",
        f"{inside} requests are being served of the {allowed} that may be at once; "
        f"one of this kind is let in below {most}; come again in a moment",
        CROWD_RETRY_SECONDS,
    )


def _refusal(account: _Account, part: float, now: float) -> _Refusal | None:
    allowance = account.allowance
    most = max(1, int(part * allowance.concurrent_requests))
    if allowance.concurrent_requests and account.inside >= most:
        return _crowded(account.inside, allowance.concurrent_requests, most)
    for cell, what, limit in (
        (account.requests, "requests", allowance.requests_per_second),
        (account.bytes, "bytes", allowance.bytes_per_second),
    ):
        wait = 0.0 if cell is None else cell.wait(now, max(1.0, cell.rate * BURST_SECONDS))
        if wait > 0:
            return _Refusal(what, f"the limit of {limit} {what} a second is reached; retry in {wait:.2f} s", wait)
    return None
