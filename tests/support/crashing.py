"""The N-th-call loop: run a scenario again and again, and crash it before its first, second, … file system call."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

CALLS = ("open", "write", "pwrite", "fsync", "link", "rename", "replace", "unlink", "mkdir")


class Crash(BaseException):
    """The process died here; not an `Exception`, so that nothing handles it by accident."""


@contextmanager
def crash_before_call(number: int, failure: BaseException | None = None) -> Iterator[None]:
    """Raise `failure` (default: `Crash`) instead of the `number`-th call of this process into the file system."""
    calls = 0

    def counted(real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            nonlocal calls
            calls += 1
            if calls == number:
                raise failure or Crash(f"before {real.__name__}{arguments}")
            return real(*arguments, **options)

        return call

    with ExitStack() as patches:
        for name in CALLS:
            patches.enter_context(mock.patch.object(os, name, counted(getattr(os, name))))
        yield


def crash_points(
    prepare: Callable[[], None], act: Callable[[], object], check: Callable[[int], None], most: int = 200
) -> int:
    """Prepare, act with a crash before call 1, check; then with one before call 2, and so on, until none comes.

    Returns how many crashes were survived.
    """
    for number in range(1, most):
        prepare()
        try:
            with crash_before_call(number):
                act()
        except Crash:
            check(number)
            continue
        return number - 1
    raise AssertionError(f"the scenario makes more than {most} calls")
