"""Whether a hit pays: one that would be loaded slower than the engine computes it is declined.

Both speeds are measured where the adapter runs. A decision needs enough samples of both; until then every hit is
taken. While hits are declined, one of them is loaded now and then, so that a store that is fast again is noticed.
"""

from __future__ import annotations

import math
import threading
from typing import Final

SAMPLES_MIN: Final = 8
"""Of each speed, before a hit is declined."""
MARGIN: Final = 1.25
"""A load must be so many times slower than computing before hits are declined; once they are, it must be faster."""
PROBE_S: Final = 10.0
"""So long after the last load a declined hit is loaded anyway."""
PROBE_HITS: Final = 4
"""But at most every so manieth hit."""

_WEIGHT: Final = 0.2
"""Of the newest sample."""
_SHORTEST_S: Final = 1e-6


class Speed:
    """Amounts per second, as an exponentially weighted geometric mean: one hiccup moves it by little."""

    def __init__(self) -> None:
        self._samples = 0
        self._log = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """A sample; one without an amount says nothing."""
        if amount <= 0:
            return
        self._samples += 1
        sample = math.log(amount / max(seconds, _SHORTEST_S))
        self._log += (sample - self._log) * max(_WEIGHT, 1 / self._samples)

    @property
    def known(self) -> float | None:
        """Amount per second; None before there are enough samples."""
        return math.exp(self._log) if self._samples >= SAMPLES_MIN else None


def arrived(chunks: int, chunk_bytes: int, seconds: float, deadline_s: float) -> int:
    """Bytes that a load says can be had in `seconds`: those of its `chunks`.

    Where the time ran out before the first was there, one would have taken longer still. Otherwise a gateway that
    never delivers in time would never be declined.
    """
    return chunk_bytes * (max(chunks, 1) if seconds >= deadline_s else chunks)


class BreakEven:
    """The two speeds of one adapter and its endpoint, and the decisions that follow. Any thread may call it.

    `prefill_tokens_per_s`: the engine's, where it is known or cannot be measured; None: `computed` says it. Several
    gateways of one catalog are one endpoint.
    """

    def __init__(self, *, on: bool = True, prefill_tokens_per_s: float | None = None) -> None:
        self._on = on
        self._given = prefill_tokens_per_s
        self._lock = threading.Lock()
        self._loads = Speed()
        self._prefills = Speed()
        self._declining = False
        self._declined = 0
        self._loaded_at = -math.inf

    def loaded(self, nbytes: int, seconds: float) -> None:
        """A load ended: `nbytes` arrived within `seconds`, latency and waiting included."""
        with self._lock:
            self._loads.add(nbytes, seconds)

    def computed(self, tokens: int, seconds: float) -> None:
        """The engine computed the KV of `tokens` tokens of a prompt within `seconds`."""
        with self._lock:
            self._prefills.add(tokens, seconds)

    @property
    def load_bytes_per_s(self) -> float | None:
        """Measured; None before there are enough samples."""
        with self._lock:
            return self._loads.known

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Given or measured; None before there are enough samples."""
        with self._lock:
            return self._given or self._prefills.known

    def pays(self, tokens: int, nbytes: int, now: float) -> bool:
        """Whether to load `tokens` tokens, for which `nbytes` bytes travel; `now`: monotonic seconds."""
        with self._lock:
            self._declining = self._on and self._slower(tokens, nbytes)
            probe = self._declined >= PROBE_HITS - 1 and now - self._loaded_at >= PROBE_S
            if self._declining and not probe:
                self._declined += 1
                return False
            self._declined = 0
            self._loaded_at = now
            return True

    def _slower(self, tokens: int, nbytes: int) -> bool:
        load, prefill = self._loads.known, self._given or self._prefills.known
        if load is None or prefill is None:
            return False
        margin = 1.0 if self._declining else MARGIN
        return nbytes / load > tokens / prefill * margin
