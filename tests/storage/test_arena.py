"""The arena: slots never overlap, free room comes back whole, waste is bounded, memory lives as long as its views."""

from __future__ import annotations

import ctypes
import errno
import pickle
import resource
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import host_memory
from storage.arena import Arena, Slot, Zone, size_class
from storage.extents import FreeExtents
from storage.host_memory import PAGE, HostMemory

MIB = 1 << 20


@given(st.integers(1, 1 << 40))
def test_size_classes_waste_less_than_a_page_or_a_seventeenth(nbytes: int) -> None:
    reserved = size_class(nbytes)
    assert reserved >= nbytes
    assert reserved % PAGE == 0
    assert size_class(reserved) == reserved
    assert reserved - nbytes < max(PAGE, reserved / 17 + 1)


def test_there_are_sixteen_classes_per_doubling() -> None:
    assert len({size_class(nbytes) for nbytes in range(MIB + 1, 2 * MIB + 1, 512)}) == 16


def test_the_sealed_length_of_a_usual_chunk_wastes_six_percent() -> None:
    assert size_class(4 * MIB + 512) == 4 * MIB + MIB // 4


@given(st.lists(st.tuples(st.integers(1, 40 * PAGE), st.booleans(), st.integers(0, 1 << 30)), max_size=80))
@settings(max_examples=150, deadline=None)
def test_slots_never_overlap_and_all_free_room_coalesces(steps: list[tuple[int, bool, int]]) -> None:
    arena = Arena(64 * PAGE)
    slots: list[Slot] = []
    for nbytes, frees, pick in steps:
        if frees and slots:
            arena.free(slots.pop(pick % len(slots)))
            continue
        largest = arena.statistics().largest_free_bytes
        slot = arena.allocate(nbytes)
        assert (slot is not None) == (size_class(nbytes) <= largest)
        if slot is not None:
            assert len(slot.view) == nbytes
            assert slot.address % PAGE == 0
            slots.append(slot)
        taken = sorted((each.offset, each.reserved_bytes) for each in slots)
        assert all(a + length <= b for (a, length), (b, _) in pairwise(taken))
        assert taken == [] or taken[-1][0] + taken[-1][1] <= arena.capacity_bytes
        statistics = arena.statistics()
        assert statistics.used_bytes == sum(length for _, length in taken)
        assert statistics.wasted_bytes == sum(each.reserved_bytes - each.nbytes for each in slots)
        assert statistics.slots == len(slots)
    for slot in slots:
        arena.free(slot)
    assert arena.statistics().largest_free_bytes == arena.capacity_bytes
    assert arena.statistics().fragmentation == 0.0


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 30), st.integers(0, 1 << 30)), max_size=120))
@settings(deadline=None)
def test_extents_agree_with_a_bitmap(steps: list[tuple[bool, int, int]]) -> None:
    pages = 100
    extents = FreeExtents(pages)
    free = [True] * pages
    held: list[tuple[int, int]] = []
    for takes, length, pick in steps:
        if takes:
            start = extents.take(length)
            runs = _runs(free)
            assert (start is None) == (max(runs.values(), default=0) < length)
            if start is not None:
                assert runs[start] == min(run for run in runs.values() if run >= length), "not the best fit"
                free[start : start + length] = [False] * length
                held.append((start, length))
        elif held:
            start, length = held.pop(pick % len(held))
            extents.give(start, length)
            free[start : start + length] = [True] * length
        assert extents.free_pages == sum(free)
        assert extents.largest == max(_runs(free).values(), default=0)


def _runs(free: list[bool]) -> dict[int, int]:
    runs: dict[int, int] = {}
    start = None
    for page, is_free in enumerate([*free, False]):
        if is_free and start is None:
            start = page
        if not is_free and start is not None:
            runs[start] = page - start
            start = None
    return runs


def test_fragmentation_is_reported() -> None:
    arena = Arena(4 * PAGE)
    slots = [arena.allocate(PAGE) for _ in range(4)]
    for slot in slots[::2]:
        assert slot is not None
        arena.free(slot)
    assert arena.statistics().free_bytes == 2 * PAGE
    assert arena.statistics().largest_free_bytes == PAGE
    assert arena.statistics().fragmentation == 0.5
    assert arena.allocate(2 * PAGE) is None


def test_the_hole_freed_last_is_used_first() -> None:
    arena = Arena(8 * PAGE)
    slots = [arena.allocate(PAGE) for _ in range(8)]
    for at in (1, 5, 3):
        slot = slots[at]
        assert slot is not None
        arena.free(slot)
    reused = [arena.allocate(PAGE) for _ in range(3)]
    assert [slot.offset // PAGE for slot in reused if slot is not None] == [3, 5, 1]


def test_freeing_twice_or_elsewhere_asserts() -> None:
    arena, other = Arena(4 * PAGE), Arena(4 * PAGE)
    slot = arena.allocate(10)
    assert slot is not None
    with pytest.raises(AssertionError, match="not allocated in this zone"):
        other.free(slot)
    arena.free(slot)
    with pytest.raises(AssertionError, match="not allocated in this zone"):
        arena.free(slot)
    with pytest.raises(AssertionError, match="has been freed"):
        _ = slot.view


def test_an_exported_slot_is_not_freed() -> None:
    arena = Arena(4 * PAGE)
    slot = arena.allocate(10)
    assert slot is not None
    running_call = pickle.PickleBuffer(slot.view)  # holds a buffer as a call such as recv_into does while it runs
    with pytest.raises(BufferError):
        arena.free(slot)
    assert arena.statistics().slots == 1
    running_call.release()
    arena.free(slot)
    assert arena.statistics().slots == 0


def test_the_parts_of_a_split_arena_are_apart_and_cover_it() -> None:
    arena = Arena(8 * PAGE)
    first, second = arena.split(2 * PAGE)
    assert arena.allocate(1) is None
    assert first.region.address == arena.region.address
    assert first.region.address + first.region.length == second.region.address
    assert first.region.length + second.region.length == arena.region.length
    slots = [zone.allocate(zone.capacity_bytes) for zone in (first, second)]
    for slot, filler in zip(slots, (b"\x11", b"\x22"), strict=True):
        assert slot is not None
        slot.view[:] = filler * slot.nbytes
    assert slots[0] is not None
    assert bytes(slots[0].view) == b"\x11" * 2 * PAGE
    with pytest.raises(AssertionError, match="unused"):
        arena.split(PAGE)


@pytest.mark.parametrize("capacity", [0, -PAGE, 100, PAGE + 1])
def test_a_capacity_is_whole_pages(capacity: int) -> None:
    with pytest.raises(ValueError, match=str(capacity)):
        Arena(capacity)
    with pytest.raises(ValueError, match=str(capacity)):
        Zone(HostMemory(PAGE), 0, capacity)


def test_a_refused_capacity_names_the_number() -> None:
    with pytest.raises(MemoryError, match=str(1 << 60)):
        Arena(1 << 60)


def test_R35_memory_is_anonymous_prepared_in_pieces_and_keeps_its_content() -> None:
    arena = Arena(64 * MIB)
    slot = arena.allocate(40 * MIB)
    assert slot is not None
    slot.view[:4] = b"kept"
    pieces = 0
    while arena.memory.prepare_next(16 * MIB):
        pieces += 1
    assert pieces <= 3
    assert bytes(slot.view[:4]) == b"kept"
    if "lock" not in arena.memory.refusals:
        assert arena.memory.locked_bytes == arena.capacity_bytes
    if "touch" not in arena.memory.refusals:
        assert arena.memory.prepared_bytes == arena.capacity_bytes
    assert "dd" in _vm_flags(arena.region.address), "plaintext would go into core dumps"


def test_R35_opening_an_arena_costs_the_same_whatever_its_size() -> None:
    """A start does not wait for its memory: nothing is touched until it is prepared or used."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arena = Arena(2 << 30)
    arena.split(1 << 30)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < 200, "2 GiB are 1024 huge pages, or half a million small ones"
    assert arena.memory.prepared_bytes == 0
    arena.close()


def test_memory_that_cannot_be_locked_is_used_unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        ctypes.set_errno(errno.ENOMEM)
        return -1

    monkeypatch.setattr(host_memory._libc, "mlock", refuse)
    memory = HostMemory(4 * MIB)
    while memory.prepare_next(MIB):
        pass
    assert memory.locked_bytes == 0
    assert memory.refusals["lock"].startswith("ENOMEM")
    assert memory.prepared_bytes == 4 * MIB or "touch" in memory.refusals


def test_closing_waits_for_the_last_view() -> None:
    arena = Arena(4 * PAGE)
    assert Arena(PAGE).close()
    slot = arena.allocate(8)
    assert slot is not None
    view = slot.view[:]
    assert not arena.close()
    view[:] = b"is alive"  # not unmapped
    assert bytes(slot.view) == b"is alive"


def _vm_flags(address: int) -> list[str]:
    with open("/proc/self/smaps", encoding="ascii") as file:
        inside = False
        for line in file:
            first = line.split()[0]
            if "-" in first and not first.endswith(":"):
                low, high = (int(part, 16) for part in first.split("-"))
                inside = low <= address < high
            elif inside and first == "VmFlags:":
                return line.split()[1:]
    raise AssertionError("the mapping is not in /proc/self/smaps")
