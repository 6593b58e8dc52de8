"""What an attack needs of the store that it is made against."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

CHUNK_TOKENS = 16
CHUNK_BYTES = 2048
"""Of one chunk: 2 layers, keys and values, 16 tokens, 2 heads of 8 elements of two bytes."""


class NotApplicable(Exception):
    """The store has nothing that this attack could be made on; the sentence says why."""


@dataclass(frozen=True, slots=True)
class Asker:
    """An engine's request, as far as it decides what may be reused."""

    tenant: str = "acme"
    """Whose request it is. A store that knows credentials gets this tenant's own."""
    salt: str = ""
    """What the request says to be kept apart by, where the store takes such a word from requests."""
    adapter: str = ""
    """The LoRA adapter that the request runs with."""
    revision: str = "1"
    """Of the model's weights, under an unchanged name."""
    dtype: str = "bfloat16"
    """Of the KV cache."""


class Subject(Protocol):
    """A store under attack, running. Every method may raise `NotApplicable`."""

    name: str
    version: str

    async def store(self, who: Asker, tokens: list[int], payload: bytes) -> None:
        """Keep the KV of one chunk; returns when a reader can be expected to find it."""

    async def load(self, who: Asker, tokens: list[int], limit_s: float) -> bytes | None:
        """Look the chunk up and read it, as an engine does; None is a miss.

        Raises `TimeoutError` when there was no answer within `limit_s`, which is far beyond the store's own deadline.
        """

    async def delete(self, who: Asker, tokens: list[int]) -> None:
        """Delete the chunk so that nobody reads it again; raises `NotApplicable` where there is no such way."""

    async def flip(self, who: Asker, tokens: list[int]) -> str:
        """Change one bit of the chunk's bytes where they rest; says where that was."""

    async def swap(self, who: Asker, victim: list[int], foreign: list[int]) -> str:
        """Put the stored bytes of `foreign` in the place of those of `victim`; says how."""

    async def freeze(self) -> str:
        """Stop the store's process without ending it; says what was stopped."""

    async def aclose(self) -> None:
        """End all processes."""


async def stop_process(pid: int) -> None:
    """Stop it, and return when each of its threads stands still: until then one may still answer."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path("/proc") / str(pid) / "task"
    while not all(_state(thread) in ("T", "Z") for thread in threads.iterdir()):
        await asyncio.sleep(0.01)


def _state(thread: Path) -> str:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]
