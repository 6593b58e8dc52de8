"""`KvgwL2`: what LMCache loads. Its controllers' threads submit tasks; one thread of its own talks to the gateway."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from lmcache import __version__ as lmcache_version
from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from kvgw.engines.breakeven import arrived
from kvgw.engines.counters import COUNTERS, Counters
from kvgw.engines.keyed import KeyedRemote
from kvgw.engines.lmcache.format import Layout, Part, engine_key, format_of, part_of
from kvgw.engines.lmcache.options import parse_lmcache_options
from kvgw.engines.lmcache.tasks import Tasks
from kvgw.engines.loop import LoopThread
from kvgw.errors import FormatError, KvgwError, Outage
from kvgw.kvformat import KVFormat
from kvgw.runtime import SystemClock

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.distributed.internal_api import L1MemoryDesc
    from lmcache.v1.memory_management import MemoryObj

logger = init_logger("lmcache.kvgw")

_TRACKED_MAX: Final = 1_000_000
"""Keys whose sizes are remembered for the usage report; older ones are no longer counted."""


@dataclass(slots=True)
class _Row:
    """Keys of one tenant in one KV format, in the order of the task."""

    tenant: str
    kv_format: KVFormat
    indices: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)


class KvgwL2(L2AdapterInterface):  # type: ignore[misc]  # LMCache is not installed where types are checked
    """Keeps LMCache's objects in a gateway. See docs/engines/lmcache.md.

    Raises `FormatError` while the server starts, for settings that are not right. Afterwards every task ends by its
    deadline, and what the gateway cannot give or take is a 0 in the bitmap or a failed store.
    """

    def __init__(self, params: Mapping[str, object], l1_memory_desc: L1MemoryDesc | None = None) -> None:
        super().__init__()
        self._options, self._tenants = parse_lmcache_options(params)
        self._counters = Counters(logger)
        self._clock = SystemClock()
        self._loop = LoopThread("kvgw-lmcache")
        self._remote = KeyedRemote(self._options, self._tenants, self._counters, self._clock)
        numbers = itertools.count()
        self._stores: Tasks[L2StoreResult] = Tasks(create_event_notifier(), numbers)
        self._lookups: Tasks[Bitmap] = Tasks(create_event_notifier(), numbers)
        self._loads: Tasks[Bitmap] = Tasks(create_event_notifier(), numbers)
        self._guard = self._options.guard()
        self._lock = threading.Lock()
        self._formats: dict[tuple[Part, Layout], KVFormat] = {}
        self._sizes: OrderedDict[ObjectKey, int] = OrderedDict()
        self._closed = False
        self._answered = True

    # Descriptors: three different ones.

    def get_store_event_fd(self) -> int:
        return self._stores.fd

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.fd

    def get_load_event_fd(self) -> int:
        return self._loads.fd

    # Store.

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Store objects. The memory is read until the task is done."""
        failed = L2StoreResult(success=False, bytes_transferred=0)
        return self._submit(self._stores, partial(self._store, list(keys), list(objects)), failed)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stores.take_all()

    # Lookup.

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Ask which objects can be had, and shield them from eviction for the time of the lease."""
        layouts = {group: Layout.of(one.shapes, one.dtypes) for group, one in group_layout_descs.items()}
        return self._submit(self._lookups, partial(self._look_up, list(keys), layouts), Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Nothing is left to do: a lease ends when the object is loaded, or by itself after ``lease_s``."""

    # Load.

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Read objects into memory. It is written until the task is done; an object whose bit is 0 holds nothing."""
        return self._submit(self._loads, partial(self._load, list(keys), list(objects)), Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loads.take(task_id)

    # The rest.

    def delete(self, keys: list[ObjectKey]) -> None:
        """Make objects invisible at once. Those that could not be deleted stay counted, and an error is logged."""
        with self._lock:
            formats = {
                part: [one for (of, _), one in self._formats.items() if of == part] for part in map(part_of, keys)
            }
        limit = self._options.store_deadline_s
        until = self._clock.monotonic() + limit
        gone: list[ObjectKey] = []
        try:
            for part, known in formats.items():
                for kv_format in known:
                    mine = [key for key in keys if part_of(key) == part]
                    for row in self._rows(mine, [kv_format] * len(mine)):
                        self._loop.call(partial(self._remote.delete, row.tenant, kv_format, row.keys, until), limit)
                        gone += [mine[index] for index in row.indices]
        except KvgwError as error:
            logger.error("kvgw: %d of %d objects were not deleted: %s", len(keys) - len(gone), len(keys), error)
        self._forget(gone)

    def report_status(self) -> dict[str, Any]:
        """Whether the gateway answered last time, what is in flight, and every counter."""
        return {
            "is_healthy": self._answered and not self._closed,
            "type": type(self).__name__,
            "endpoints": self._options.endpoints,
            "stores_in_flight": self._stores.in_flight,
            "lookups_in_flight": self._lookups.in_flight,
            "loads_in_flight": self._loads.in_flight,
            "objects_tracked": len(self._sizes),
            **{name: self._counters.total(name) for name in COUNTERS},
            **self._counters.gauges,
        }

    def close(self) -> None:
        """End tasks, connections and the thread; no object's memory is used afterwards. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if not self._loop.close(self._remote.aclose):
            logger.error("kvgw: the adapter's thread did not end")
        for tasks in (self._stores, self._lookups, self._loads):
            tasks.close()

    @property
    def _outages(self) -> int:
        return sum(self._counters.total(f"{name}_outages") for name in ("lookup", "load", "store"))

    # In the adapter's own thread.

    def _submit(self, tasks: Tasks[Any], work: Callable[[], Coroutine[Any, Any, Any]], failed: Any) -> int:
        number = tasks.begin()

        async def run() -> None:
            result, outages = failed, self._outages
            try:
                result = await work()
                self._answered = self._outages == outages
            except Exception as error:  # whatever went wrong, the controller must get its answer
                logger.exception("kvgw: a task failed: %r", error)
            finally:
                tasks.end(number, result)

        try:
            self._loop.submit(run)
        except Outage:  # closed
            tasks.end(number, failed)
        return number

    async def _store(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2StoreResult:
        until = self._clock.monotonic() + self._options.store_deadline_s
        stored: list[ObjectKey] = []
        if self._options.store:
            rows = self._rows(keys, [self._format_of_object(*pair) for pair in zip(keys, objects, strict=True)])
            for row in rows:
                chunks = [_bytes(objects[index]) for index in row.indices]
                # A task has whatever was written since the last one: chunks of several prompts, some of them missing.
                there = await self._remote.put_each(row.tenant, row.kv_format, row.keys, chunks, until)
                stored += [keys[row.indices[at]] for at in sorted(there)]
                self._counters.add("tokens_stored", len(there) * self._options.tokens_per_chunk)
        sizes = {key: one.get_size() for key, one in zip(keys, objects, strict=True)}
        self._remember(stored, sizes)
        return L2StoreResult(success=len(stored) == len(keys), bytes_transferred=sum(sizes[key] for key in stored))

    async def _look_up(self, keys: list[ObjectKey], layouts: Mapping[int, Layout]) -> Bitmap:
        until = self._clock.monotonic() + self._options.lookup_deadline_s
        self._counters.add("lookups")
        formats = [
            self._known_format(part_of(key), layouts[key.object_group_id]) if key.object_group_id in layouts else None
            for key in keys
        ]
        rows = self._rows(keys, formats)
        answers = await asyncio.gather(
            *(self._remote.match(row.tenant, [row.kv_format], row.keys, until) for row in rows)
        )
        found = Bitmap(len(keys))
        # Rows are the parts that ranks keep of the same tokens.
        tokens = max((answer.count for answer in answers), default=0) * self._options.tokens_per_chunk
        nbytes = sum(answer.count * row.kv_format.chunk_bytes for row, answer in zip(rows, answers, strict=True))
        if tokens and not self._guard.pays(tokens, nbytes, self._clock.monotonic()):
            self._counters.add("hits_declined")
            return found
        for row, answer in zip(rows, answers, strict=True):
            found.batched_set(row.indices[: answer.count])
            self._counters.add("tokens_planned", answer.count * self._options.tokens_per_chunk)
        return found

    async def _load(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> Bitmap:
        started = self._clock.monotonic()
        until = started + self._options.load_deadline_s
        rows = self._rows(keys, [self._format_of_object(*pair) for pair in zip(keys, objects, strict=True)])
        answers = await asyncio.gather(
            *(
                self._remote.get_each(
                    row.tenant, row.kv_format, row.keys, [_bytes(objects[index]) for index in row.indices], until
                )
                for row in rows
            )
        )
        loaded = Bitmap(len(keys))
        for row, hits in zip(rows, answers, strict=True):
            loaded.batched_set([row.indices[hit] for hit in hits])
        seconds = self._clock.monotonic() - started
        nbytes = sum(len(hits) * row.kv_format.chunk_bytes for row, hits in zip(rows, answers, strict=True))
        one = arrived(0, rows[0].kv_format.chunk_bytes if rows else 0, seconds, self._options.load_deadline_s)
        self._guard.loaded(nbytes or one, seconds)
        self._counters.show("load_bytes_per_second", self._guard.load_bytes_per_s)
        tokens = loaded.popcount() * self._options.tokens_per_chunk
        self._counters.add("tokens_loaded", tokens)
        self._counters.add("tokens_lost", len(keys) * self._options.tokens_per_chunk - tokens)
        self._notify_keys_accessed([key for index, key in enumerate(keys) if loaded.test(index)])
        return loaded

    def _rows(self, keys: Sequence[ObjectKey], formats: Sequence[KVFormat | None]) -> list[_Row]:
        """One row for each tenant and format; keys without a format are in none."""
        rows: dict[tuple[str, str, int], _Row] = {}
        for index, (key, kv_format) in enumerate(zip(keys, formats, strict=True)):
            if kv_format is None:
                continue
            tenant, salt = self._tenants.resolve(key.cache_salt or None, None)
            # Salts are apart: their keys are runs of prefixes of their own.
            row = rows.setdefault((tenant, key.cache_salt, id(kv_format)), _Row(tenant, kv_format))
            row.indices.append(index)
            row.keys.append(engine_key(key.chunk_hash, salt))
        return list(rows.values())

    def _format_of_object(self, key: ObjectKey, obj: MemoryObj) -> KVFormat | None:
        kv_format = self._known_format(part_of(key), Layout.of(obj.get_shapes(), obj.get_dtypes()))
        if kv_format is not None and obj.get_size() != kv_format.chunk_bytes:
            self._counters.reason(
                "requests_not_served",
                f"an object of {obj.get_size()} bytes has a layout of {kv_format.chunk_bytes}; kvgw does not keep "
                "objects that LMCache compresses",
            )
            return None
        return kv_format

    def _known_format(self, part: Part, layout: Layout) -> KVFormat | None:
        with self._lock:
            known = self._formats.get((part, layout))
        if known is None:
            try:
                known = format_of(part, layout, self._options, f"lmcache={lmcache_version}")
            except FormatError as error:
                self._counters.reason("requests_not_served", str(error))
                return None
            logger.info("kvgw: chunks of %d bytes: %s", known.chunk_bytes, known)
            with self._lock:
                known = self._formats.setdefault((part, layout), known)
        return known

    def _remember(self, stored: Sequence[ObjectKey], sizes: Mapping[ObjectKey, int]) -> None:
        with self._lock:
            new = [key for key in stored if key not in self._sizes]
            self._sizes.update({key: sizes[key] for key in new})
            old = [self._sizes.popitem(last=False) for _ in range(len(self._sizes) - _TRACKED_MAX)]
        if new:
            self._notify_keys_stored(new, [sizes[key] for key in new])
        if old:
            self._notify_keys_deleted([key for key, _ in old], [size for _, size in old])

    def _forget(self, keys: Sequence[ObjectKey]) -> None:
        with self._lock:
            gone = [(key, self._sizes.pop(key)) for key in keys if key in self._sizes]
        if gone:
            self._notify_keys_deleted([key for key, _ in gone], [size for _, size in gone])


def _bytes(obj: MemoryObj) -> memoryview:
    return memoryview(obj.byte_array).cast("B")
