"""What a gateway makes of its process: the event loop, the signals that end it, and its garbage."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import uvloop

COLLECT_AFTER: Final = 10_000
"""Objects made and not gone before young ones are searched for garbage: a batch makes more than Python's default."""


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a gateway to its end, in an event loop that takes less time between a frame and its task than asyncio's."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


def settle() -> None:
    """The gateway is open: what is here by now stays, and each batch would pay for looking at it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])


@contextmanager
def stop_signals() -> Iterator[asyncio.Future[signal.Signals]]:
    """Hear SIGINT and SIGTERM while the block runs: the first that came, once it has come."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[signal.Signals] = loop.create_future()

    def asked(which: signal.Signals) -> None:
        if not stop.done():
            stop.set_result(which)

    for which in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(which, partial(asked, which))
    try:
        yield stop
    finally:
        for which in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(which)
