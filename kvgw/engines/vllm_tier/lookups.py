"""What the gateway has for each request, asked in the background and answered from memory.

vLLM's scheduler asks key by key, step by step, and must never wait. The keys of one request and step are one question,
in the order of the prompt; its answer is how many of them, from the first, can be had.
"""

from __future__ import annotations

import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

from blake3 import blake3

from kvgw.engines.counters import Counters
from kvgw.engines.loop import LoopThread
from kvgw.engines.remote import Found
from kvgw.engines.vllm_tier.format import engine_key
from kvgw.errors import Outage
from kvgw.runtime import Clock

_GRACE_S: Final = 0.25
"""A question that is not answered so long after its deadline is given up."""


@dataclass(frozen=True, slots=True)
class Whose:
    """Whose chunks a request's are."""

    tenant: str
    salt: bytes

    @classmethod
    def of(cls, tenant: str, salt: bytes) -> Whose:
        """With a digest in place of the salt: a caller's value may be long, and it goes into every key."""
        return cls(tenant, blake3(salt).digest() if salt else b"")


class Ask(Protocol):
    """How the gateway is asked for the leading run of keys, until an instant of the clock."""

    def __call__(self, tenant: str, keys: list[bytes], until: float) -> Coroutine[Any, Any, Found]: ...


@dataclass(slots=True)
class _Question:
    """Keys of one request in the order they were asked for, and how many leading ones can be had."""

    ends: float
    """When it is given up; once the answer was told, until when that is believed."""
    keys: list[bytes] = field(default_factory=list)
    count: int | None = None
    told: bool = False


@dataclass(slots=True)
class _Request:
    whose: Whose
    asked: dict[bytes, tuple[_Question, int]] = field(default_factory=dict)
    """Question and place in it of each key."""
    gathering: _Question | None = None
    """The question of this step."""


class Lookups:
    """Answers by request and key. Any thread may call it; nothing in it waits."""

    def __init__(
        self, ask: Ask, loop: LoopThread, counters: Counters, clock: Clock, *, deadline_s: float, belief_s: float
    ) -> None:
        """`belief_s`: how long an answer holds from when it was first told."""
        self._ask = ask
        self._loop = loop
        self._counters = counters
        self._clock = clock
        self._deadline_s = deadline_s
        self._belief_s = belief_s
        self._lock = threading.Lock()
        self._requests: dict[str, _Request] = {}

    def look_up(self, request_id: str, whose: Whose, key: bytes) -> bool | None:
        """Whether a chunk can be had; None: not known yet, `flush` asks."""
        now = self._clock.monotonic()
        with self._lock:
            request = self._requests.setdefault(request_id, _Request(whose))
            question, index = request.asked.get(key, (None, 0))
            if question is not None and question.count is None:
                if now < question.ends:
                    return None
                question.count = 0
                self._counters.reason("lookups_late", f"the gateway did not say within {self._deadline_s:g} s")
            if question is not None and question.count is not None:
                if not question.told:
                    question.told, question.ends = True, now + self._belief_s
                    return index < question.count
                if now < question.ends:
                    return index < question.count
            self._gather(request, key, now)
            return None

    def flush(self) -> None:
        """Ask what was gathered since the last call; once a step."""
        with self._lock:
            gathered = [(one, one.gathering) for one in self._requests.values() if one.gathering is not None]
            for request, _ in gathered:
                request.gathering = None
        for request, question in gathered:
            self._counters.add("lookups")
            until = self._clock.monotonic() + self._deadline_s
            question.ends = until + _GRACE_S
            try:
                future = self._loop.submit(partial(self._found, request.whose, list(question.keys), until))
            except Outage as error:  # closed
                self._answer(question, 0)
                self._counters.reason("lookup_outages", str(error))
                continue
            future.add_done_callback(partial(self._answered, question))

    def lost(self, whose: Whose, keys: Sequence[bytes]) -> None:
        """Chunks that were found could not be read: nobody is told again that they, or those behind, can be had."""
        with self._lock:
            for request in self._requests.values():
                for key in keys if request.whose == whose else ():
                    question, index = request.asked.get(key, (None, 0))
                    if question is not None and question.count is not None:
                        question.count = min(question.count, index)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        with self._lock:
            self._requests.pop(request_id, None)

    @property
    def requests(self) -> int:
        """How many are remembered."""
        with self._lock:
            return len(self._requests)

    def _gather(self, request: _Request, key: bytes, now: float) -> None:
        if request.gathering is None:
            request.gathering = _Question(now + self._deadline_s + _GRACE_S)
        request.asked[key] = request.gathering, len(request.gathering.keys)
        request.gathering.keys.append(key)

    async def _found(self, whose: Whose, keys: list[bytes], until: float) -> Found:
        return await self._ask(whose.tenant, [engine_key(key, whose.salt) for key in keys], until)

    def _answered(self, question: _Question, future: Future[Found]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None:
            self._counters.reason("lookups_failed", repr(error))
        self._answer(question, 0 if future.cancelled() or error is not None else future.result().count)

    def _answer(self, question: _Question, count: int) -> None:
        with self._lock:
            if question.count is None:  # not given up meanwhile
                question.count = count
