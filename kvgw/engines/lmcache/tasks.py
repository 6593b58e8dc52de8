"""Tasks of one kind: numbers, results that are taken once, and the file descriptor that says there are some."""

from __future__ import annotations

import itertools
import threading
from typing import Generic, Protocol, TypeVar

Result = TypeVar("Result")


class Notifier(Protocol):
    """LMCache's event notifier."""

    def fileno(self) -> int: ...

    def notify(self) -> None: ...

    def close(self) -> None: ...


class Tasks(Generic[Result]):
    """Results wait here for a controller thread. Any thread may call it."""

    def __init__(self, notifier: Notifier, numbers: itertools.count[int]) -> None:
        self._notifier = notifier
        self._numbers = numbers
        self._lock = threading.Lock()
        self._open: set[int] = set()
        self._results: dict[int, Result] = {}
        self._closed = False

    @property
    def fd(self) -> int:
        return self._notifier.fileno()

    @property
    def in_flight(self) -> int:
        with self._lock:
            return len(self._open)

    def begin(self) -> int:
        """A new task's number."""
        number = next(self._numbers)
        with self._lock:
            self._open.add(number)
        return number

    def end(self, number: int, result: Result) -> None:
        """The task is done: nothing touches its memory any more."""
        with self._lock:
            self._open.discard(number)
            self._results[number] = result
            if not self._closed:
                self._notifier.notify()

    def take(self, number: int) -> Result | None:
        """A task's result; None while it runs, and when it was taken before."""
        with self._lock:
            return self._results.pop(number, None)

    def take_all(self) -> dict[int, Result]:
        """The results of all tasks that are done."""
        with self._lock:
            results, self._results = self._results, {}
        return results

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._notifier.close()
