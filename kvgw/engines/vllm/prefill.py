"""How fast the engine computes prompts, as its scheduler sees it: from a request's first step to its first token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgw.engines.breakeven import BreakEven

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class _Prefill:
    request: Request
    life: int
    """How often the request had been preempted when it began."""
    tokens: int
    since: float


class PrefillTimer:
    """Tells a guard how long prompts take. Called by the scheduler's thread alone.

    A step that was scheduled has not run yet, and several may be on their way. So the end of a prefill is the first
    token that the request itself has.
    """

    def __init__(self, guard: BreakEven, tokens_min: int) -> None:
        """`tokens_min`: shorter prefills say more about a step's fixed costs than about speed."""
        self._guard = guard
        self._tokens_min = tokens_min
        self._running: dict[str, _Prefill] = {}

    def begin(self, request: Request, tokens: int, now: float) -> None:
        """The engine begins to compute the last `tokens` tokens of a prompt."""
        if tokens >= self._tokens_min:
            self._running[request.request_id] = _Prefill(request, request.num_preemptions, tokens, now)

    def look(self, now: float) -> None:
        """See which prompts have been computed."""
        for name in list(self._running):
            self._ended(name, now)

    def finished(self, name: str, now: float) -> None:
        """The request ended, perhaps before its first token."""
        if name in self._running:
            self._ended(name, now)
            self._running.pop(name, None)

    def _ended(self, name: str, now: float) -> None:
        one = self._running[name]
        if one.request.num_preemptions != one.life:
            del self._running[name]
        elif one.request.num_output_tokens:
            del self._running[name]
            self._guard.computed(one.tokens, now - one.since)
