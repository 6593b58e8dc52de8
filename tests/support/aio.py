"""Asynchronous tests without a plugin: each runs in a loop of its own and within a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec, TypeVar

Params = ParamSpec("Params")
Result = TypeVar("Result")


def run(main: Coroutine[Any, Any, Result], timeout: float = 60.0) -> Result:
    """Run `main` in a new event loop; raises `TimeoutError` after `timeout` seconds."""

    async def bounded() -> Result:
        async with asyncio.timeout(timeout):
            return await main

    return asyncio.run(bounded())


def aio(test: Callable[Params, Coroutine[Any, Any, None]]) -> Callable[Params, None]:
    """Make a pytest test of an ``async def``; fixtures and parameters work as usual."""

    @wraps(test)
    def synchronous(*args: Params.args, **kwargs: Params.kwargs) -> None:
        run(test(*args, **kwargs))

    return synchronous
