"""Requests waiting for staging memory, in the order in which fairness serves them. Pure: no time, no memory, no await.

The rule, and why:

- *A tenant's requests are served in the order of their arrival*: its large one is not starved by its small ones.
- *A request within its tenant's guarantee passes all who want to borrow.* Its bytes are set aside; nobody's wish for
  the common rest may delay them (law 6: no starvation beyond one's share).
- *Of those who want to borrow, who cannot be served holds back only later ones whose tenants borrow at least as much.*
  Plain FIFO would let a tenant that has borrowed everything block all others with one more wish, which only its own
  releases can fulfil. Overtaking without limit would starve large requests. So the common rest goes first to whoever
  has least of it, and among equals by arrival.
- *A request within its guarantee that still finds no room* (free bytes too scattered) holds back all borrowers: what
  comes free is owed to it first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar
from uuid import UUID

from storage.arena import size_class
from storage.errors import StagingBusy
from storage.shares import Ledger

Grant = TypeVar("Grant")


class Ask(Generic[Grant]):
    """One request: `nbytes` for `tenant`, under `name` where it is about a blob; `since` is when it was made (s)."""

    __slots__ = ("grant", "name", "nbytes", "refusal", "since", "tenant")

    def __init__(self, tenant: UUID, nbytes: int, name: str, since: float) -> None:
        self.tenant = tenant
        self.nbytes = nbytes
        self.name = name
        self.since = since
        self.grant: Grant | None = None
        """What was given; the asker owns it from then on."""
        self.refusal: str = ""
        """Why it will never be granted."""


class Line(Generic[Grant]):
    """The waiting requests of one kind."""

    def __init__(
        self,
        what: str,
        ledgers: Sequence[Ledger],
        *,
        waiters: int,
        price: Callable[[Ask[Grant]], int],
        give: Callable[[Ask[Grant]], Grant | None],
    ) -> None:
        """`price` says how many bytes an ask would be charged now, `give` takes them or answers None."""
        self._what = what
        self._ledgers = ledgers
        self._waiters = waiters
        self._price = price
        self._give = give
        self.waiting: dict[Ask[Grant], None] = {}
        """Who waits, in the order of arrival."""
        self._of_tenant: dict[UUID, int] = {}
        self._closed = ""

    def __len__(self) -> int:
        return len(self.waiting)

    @property
    def busy(self) -> bool:
        """Whether whoever comes now has to wait, or is refused."""
        return bool(self._closed or self.waiting)

    @property
    def oldest(self) -> float | None:
        """When the longest waiting request was made, in seconds of the clock; None when nobody waits."""
        return next(iter(self.waiting)).since if self.waiting else None

    def join(self, ask: Ask[Grant]) -> None:
        """Queue a request. Raises `StagingBusy` if it can never be served, or too many of its tenant's wait."""
        self._check(ask)
        waiting = self._of_tenant.get(ask.tenant, 0)
        if waiting >= self._waiters:
            raise StagingBusy(f"tenant {ask.tenant} has {waiting} requests waiting for {self._what}, the most allowed")
        self._of_tenant[ask.tenant] = waiting + 1
        self.waiting[ask] = None

    def _check(self, ask: Ask[Grant]) -> None:
        if self._closed:
            raise StagingBusy(self._closed)
        reserved = size_class(ask.nbytes)
        for ledger in self._ledgers:
            if reserved > ledger.limit:
                raise StagingBusy(
                    f"{self._what} of {ask.nbytes} bytes takes {reserved} bytes of {ledger.what}, and a tenant can "
                    f"have at most {ledger.limit}: use smaller chunks, a larger staging capacity or other shares"
                )

    def leave(self, ask: Ask[Grant]) -> None:
        """Withdraw a request; one that is no longer in the line is no error."""
        if ask in self.waiting:
            del self.waiting[ask]
            self._of_tenant[ask.tenant] -= 1
            if not self._of_tenant[ask.tenant]:
                del self._of_tenant[ask.tenant]

    def close(self, reason: str) -> list[Ask[Grant]]:
        """Refuse all who wait and all who come later; returns those who waited."""
        self._closed = reason
        refused = list(self.waiting)
        for ask in refused:
            ask.refusal = reason
            self.leave(ask)
        return refused

    def shortage(self, ask: Ask[Grant]) -> str:
        """A sentence about why a request still waits, for its error."""
        room = ", ".join(
            f"tenant {ask.tenant} holds {ledger.held(ask.tenant)} of at most {ledger.limit} bytes of {ledger.what}"
            f" ({ledger.total} in use by all)"
            for ledger in self._ledgers
        )
        others = len(self.waiting)
        return f"no room for {self._what} of {ask.nbytes} bytes, with {others} other requests waiting: {room}"

    def serve(self) -> list[Ask[Grant]]:
        """Grant what can be granted now, by the rule above; returns the asks that got their grant."""
        served: list[Ask[Grant]] = []
        held_back: set[UUID] = set()
        least_borrowed: int | None = None  # by the tenants of borrowing requests that could not be served
        for ask in list(self.waiting):
            if ask.tenant in held_back:
                continue
            borrowed = self._would_have_borrowed(ask)
            if borrowed and least_borrowed is not None and borrowed >= least_borrowed:
                held_back.add(ask.tenant)
                continue
            ask.grant = self._give(ask)
            if ask.grant is not None:
                served.append(ask)
                self.leave(ask)
                continue
            held_back.add(ask.tenant)
            least_borrowed = borrowed if least_borrowed is None else min(least_borrowed, borrowed)
        return served

    def _would_have_borrowed(self, ask: Ask[Grant]) -> int:
        """A rank: 0 for a request within its tenant's guarantee, else 1 + what its tenant has borrowed already."""
        price = self._price(ask)
        if all(ledger.guarantees(ask.tenant, price) for ledger in self._ledgers):
            return 0
        return 1 + sum(ledger.borrowed(ask.tenant) for ledger in self._ledgers)
