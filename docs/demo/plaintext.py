"""Is any of the KV readable in the gateway's files? Samples of the real bytes, and a search for them.

Samples lie 256 KiB apart, closer than any piece in which the gateway seals (1 MiB) or moves a chunk, so that no
such piece could lie readable in a file without one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from transformers import DynamicCache

    from kvgw import KVFormat

SAMPLE_BYTES = 32
SPACING_BYTES = 256 * 1024

_SAMPLES = "samples.bin"
_CONTROL = "control.bin"


@dataclass(frozen=True)
class Search:
    """What was looked for, where, and what was found."""

    samples: int
    files: int
    searched_bytes: int
    found: list[str]
    """Files that hold a sample, relative to the folder."""
    control_found: bool
    """Whether every sample of a chunk was found in that chunk's own plaintext, so that the search is known to work."""


def write_samples(work: Path, cache: DynamicCache, kv_format: KVFormat) -> None:
    """Leave samples of every whole chunk of `cache` in `work`, and the first chunk itself for the control."""
    from kvgw.engines.transformers.cache import Layers

    layers = Layers.of(cache, kv_format)
    chunk = bytearray(kv_format.chunk_bytes)
    with (work / _SAMPLES).open("wb") as samples:
        for index in range(layers.tokens // kv_format.tokens_per_chunk):
            layers.copy_chunk_out(index, memoryview(chunk))
            for at in range(0, len(chunk) - SAMPLE_BYTES + 1, SPACING_BYTES):
                samples.write(chunk[at : at + SAMPLE_BYTES])
            if index == 0:
                (work / _CONTROL).write_bytes(chunk)


def search(work: Path, folder: Path) -> Search:
    """Search every file under `folder` for the samples in `work`.

    Raises `ValueError` for samples that would prove nothing.
    """
    content = (work / _SAMPLES).read_bytes()
    samples = [content[at : at + SAMPLE_BYTES] for at in range(0, len(content), SAMPLE_BYTES)]
    if not samples or len(set(samples)) != len(samples) or min(len(set(sample)) for sample in samples) < 8:
        raise ValueError(f"{len(samples)} samples of KV are not distinct enough to be searched for")
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size]
    control = work / _CONTROL
    own = samples[: len(range(0, control.stat().st_size - SAMPLE_BYTES + 1, SPACING_BYTES))]
    return Search(
        samples=len(samples),
        files=len(files),
        searched_bytes=sum(path.stat().st_size for path in files),
        found=[str(path.relative_to(folder)) for path in files if _count(path, samples)],
        control_found=_count(control, own) == len(own),
    )


def _count(path: Path, samples: Sequence[bytes]) -> int:
    """How many of the samples the file holds, at whatever offset.

    Looking for hundreds of samples one after the other would take a minute: their first two bytes, in a table, leave
    few places to compare.
    """
    content = np.fromfile(path, dtype=np.uint8)
    begins = np.zeros(2**16, dtype=np.bool_)
    begins[[int.from_bytes(sample[:2], "little") for sample in samples]] = True
    first_words = np.array([int.from_bytes(sample[:8], "little") for sample in samples], dtype="<u8")
    found: set[bytes] = set()
    for odd in (0, 1):
        pairs = content[odd : odd + (content.size - odd) // 2 * 2].view("<u2")
        places = np.flatnonzero(begins[pairs]) * 2 + odd
        places = places[places <= content.size - SAMPLE_BYTES]
        heads = content[places[:, np.newaxis] + np.arange(8)].view("<u8")[:, 0]
        likely = places[np.isin(heads, first_words)]
        found.update(content[at : at + SAMPLE_BYTES].tobytes() for at in likely)
    return len(found.intersection(samples))
