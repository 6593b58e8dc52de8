"""What every adapter must do, whatever its engine: scenarios over a small protocol that an adapter's test implements.

    @pytest.mark.parametrize("name", SCENARIOS)
    def test_conformance(name, bench):
        SCENARIOS[name](bench)

A prompt is a number; its chunks have bytes that follow from prompt and index. An adapter's `load` compares them: a
chunk that counts as loaded holds the right bytes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Final, Protocol

CHUNKS: Final = 4
"""Chunks of a prompt, unless a scenario says otherwise."""

_SLACK_S: Final = 1.5
"""What a loaded machine may add to a deadline."""

_BACK_S: Final = 30.0
"""A gateway that is back is used again within this time."""


class Adapter(Protocol):
    """An adapter inside its engine."""

    @property
    def deadlines_s(self) -> tuple[float, float, float]:
        """Of a lookup, a load and a store."""

    def store(self, prompt: int, chunks: int) -> int:
        """Store the leading chunks of a prompt; how many the engine was told are stored."""

    def found(self, prompt: int, chunks: int) -> int:
        """Look up the leading chunks of a prompt; how many the engine was told it can have."""

    def load(self, prompt: int, chunks: int) -> Sequence[bool]:
        """Load the leading chunks without a lookup; which the engine was told it has.

        Raises `AssertionError` where one of those has other bytes than were stored.
        """


class Bench(Protocol):
    """One gateway with an empty namespace, and adapters that use it."""

    def adapter(
        self, changes: Mapping[str, object] | None = None, *, tenant: str = ""
    ) -> AbstractContextManager[Adapter]:
        """A new adapter; `changes`: one of `other_kinds`. `tenant`: one of `tenants`, or a name that is none."""

    @property
    def other_kinds(self) -> Iterable[Mapping[str, object]]:
        """Changes of an adapter's engine, each of which makes its chunks useless to others."""

    @property
    def tenants(self) -> tuple[str, str]:
        """Two tenants of the gateway."""

    def stop(self) -> None:
        """End the gateway; what it acknowledged is on disk."""

    def start(self) -> None:
        """Start the gateway anew, with the same data."""

    def kill(self) -> None:
        """Kill the gateway."""

    def freeze(self) -> None:
        """Stop the gateway's process without ending it; `thaw` continues it."""

    def thaw(self) -> None: ...

    def damage_one(self) -> None:
        """Change a byte of one stored chunk; the gateway is stopped."""


def _store(bench: Bench) -> None:
    with bench.adapter() as adapter:
        assert adapter.found(1, CHUNKS) == 0
        assert not any(adapter.load(1, CHUNKS)), "nothing was stored"
        assert adapter.store(1, CHUNKS) == CHUNKS
        assert adapter.found(1, CHUNKS) == CHUNKS
        assert all(adapter.load(1, CHUNKS))
        assert adapter.store(1, CHUNKS) == CHUNKS, "what is there already counts as stored"


def _restart(bench: Bench) -> None:
    with bench.adapter() as adapter:
        assert adapter.store(1, CHUNKS) == CHUNKS
        bench.stop()
        bench.start()
        assert _eventually(lambda: adapter.found(1, CHUNKS) == CHUNKS), "the old connection is replaced"
        assert _eventually(lambda: all(adapter.load(1, CHUNKS))), "each of them, where there are several"


def _reuse(bench: Bench) -> None:
    with bench.adapter() as adapter:
        assert adapter.store(1, CHUNKS) == CHUNKS
    for _ in range(2):
        with bench.adapter() as other:
            assert other.found(1, CHUNKS) == CHUNKS
            assert all(other.load(1, CHUNKS))


def _partial_hit(bench: Bench) -> None:
    with bench.adapter() as adapter:
        assert adapter.store(1, 2) == 2
        assert adapter.found(1, CHUNKS) == 2
        assert list(adapter.load(1, CHUNKS)) == [True, True, False, False]


def _changed_field(bench: Bench) -> None:
    with bench.adapter() as adapter:
        assert adapter.store(1, CHUNKS) == CHUNKS
    tried = 0
    for changes in bench.other_kinds:
        with bench.adapter(changes) as other:
            assert other.found(1, CHUNKS) == 0, changes
            assert not any(other.load(1, CHUNKS)), changes
        tried += 1
    assert tried


def _corrupt_chunk(bench: Bench) -> None:
    with bench.adapter() as adapter:
        assert adapter.store(1, CHUNKS) == CHUNKS
    bench.stop()
    bench.damage_one()
    bench.start()
    with bench.adapter() as other:
        loaded = other.load(1, CHUNKS)
        assert not all(loaded), "a damaged chunk is a miss"
        assert other.found(1, CHUNKS) < CHUNKS, "and stays one"


def _dead_gateway(bench: Bench) -> None:
    with bench.adapter() as adapter:
        assert adapter.store(1, CHUNKS) == CHUNKS
        bench.kill()
        _bounded(adapter)
        bench.start()
        # Chunks that were only staged went with the process; it is the gateway's use that comes back.
        assert _eventually(lambda: adapter.store(2, CHUNKS) == CHUNKS)
        assert all(adapter.load(2, CHUNKS))
    bench.stop()
    with bench.adapter() as without:
        _bounded(without)


def _slow_gateway(bench: Bench) -> None:
    with bench.adapter() as adapter:
        assert adapter.store(1, CHUNKS) == CHUNKS
        bench.freeze()
        try:
            _bounded(adapter)
        finally:
            bench.thaw()
        assert _eventually(lambda: adapter.found(1, CHUNKS) == CHUNKS)
        assert all(adapter.load(1, CHUNKS))


def _two_tenants(bench: Bench) -> None:
    """The tenants, and who is none of them, see the same prompts; each finds its own."""
    red, blue = bench.tenants
    for name in (red, blue, "stranger"):
        with bench.adapter(tenant=name) as adapter:
            assert adapter.found(1, CHUNKS) == 0, name
            assert not any(adapter.load(1, CHUNKS)), name
            assert adapter.store(1, CHUNKS) == CHUNKS, name
            assert adapter.found(1, CHUNKS) == CHUNKS, name
    for name in (red, blue):
        with bench.adapter(tenant=name) as adapter:
            assert all(adapter.load(1, CHUNKS)), name


def _concurrent_requests(bench: Bench) -> None:
    """Requests for prompts of their own and for one that all share, at once."""
    ended: dict[tuple[int, int], bool] = {}
    with bench.adapter() as adapter:
        limits = max(adapter.deadlines_s) * 20

        def ask(number: int) -> None:
            for prompt in (number, 1):
                right = adapter.store(prompt, CHUNKS) == CHUNKS and all(adapter.load(prompt, CHUNKS))
                ended[number, prompt] = right

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(10, 18)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(limits)
            assert not thread.is_alive(), "a request hangs"
    assert len(ended) == 2 * len(threads)
    assert all(ended.values()), ended


SCENARIOS: Final[Mapping[str, Callable[[Bench], None]]] = {
    "store": _store,
    "restart": _restart,
    "reuse": _reuse,
    "partial hit": _partial_hit,
    "changed field": _changed_field,
    "corrupt chunk": _corrupt_chunk,
    "dead gateway": _dead_gateway,
    "slow gateway": _slow_gateway,
    "two tenants": _two_tenants,
    "concurrent requests": _concurrent_requests,
}
"""Each by its name. Raises `AssertionError` where the adapter does something else."""


def _bounded(adapter: Adapter) -> None:
    """Without a gateway everything fails, within its deadline, and again as often as it is asked for."""
    fails: tuple[Callable[[], bool], ...] = (
        lambda: adapter.found(1, CHUNKS) == 0,
        lambda: not any(adapter.load(1, CHUNKS)),
        lambda: adapter.store(3, CHUNKS) == 0,
    )
    for _ in range(2):
        for limit_s, failed in zip(adapter.deadlines_s, fails, strict=True):
            started = time.monotonic()
            assert failed()
            assert time.monotonic() - started < limit_s + _SLACK_S


def _eventually(holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + _BACK_S
    while time.monotonic() < until:
        if holds():
            return True
        time.sleep(0.1)
    return False
