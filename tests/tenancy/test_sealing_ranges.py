"""C20: any range of a chunk can be read from the segments that it touches, verified, and from no other."""

from __future__ import annotations

import pytest

from tenancy.errors import SealBroken
from tenancy.sealing import Opener
from tests.tenancy.samples import DATA_KEY, sealed_object

SEGMENT = 1 << 16
LENGTH = 2 * SEGMENT + 1000
EDGES = [0, 1, SEGMENT - 1, SEGMENT, SEGMENT + 1, 2 * SEGMENT - 1, 2 * SEGMENT, 2 * SEGMENT + 1, LENGTH - 1, LENGTH]
"""Of three segments, every place at which a range may behave otherwise; between them nothing changes."""


def test_C20_every_range_equals_its_slice_and_costs_its_segments_only() -> None:
    made = sealed_object(LENGTH)
    for start in EDGES:
        for stop in EDGES:
            if start >= stop:
                continue
            target = bytearray(LENGTH)
            opener = Opener(DATA_KEY, made.address, made.salt, made.sealed, memoryview(made.blob), memoryview(target))
            touched = range(start // SEGMENT, (stop - 1) // SEGMENT + 1)
            for index in touched:
                opener.open_segment(index)
            assert target[start:stop] == made.plain[start:stop], (start, stop)
            opened = sum(
                made.address.plain_span(index).stop - made.address.plain_span(index).start for index in touched
            )
            assert opened <= stop - start + 2 * SEGMENT


@pytest.mark.parametrize("altered", [0, 1, 2])
def test_C20_an_altered_segment_costs_the_ranges_that_touch_it(altered: int) -> None:
    made = sealed_object(LENGTH)
    blob = bytearray(made.blob)
    blob[made.address.sealed_span(altered).start] ^= 1
    for index in range(3):
        target = bytearray(b"\xee" * LENGTH)
        opener = Opener(DATA_KEY, made.address, made.salt, made.sealed, memoryview(blob), memoryview(target))
        if index == altered:
            with pytest.raises(SealBroken):
                opener.open_segment(index)
            assert not any(target), "C17"
        else:
            opener.open_segment(index)
