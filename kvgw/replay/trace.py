"""Request traces as the field publishes them: JSON lines with a time, lengths in tokens, and ids of prefix blocks.

``{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [id, …]}``, the format of the Mooncake
traces (FAST'25). An equal id is the same block after the same prefix, so that ids are keys already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from kvgw.errors import KvgwError

BLOCK_TOKENS: Final = 512
"""Of the published traces."""
LINE_BYTES_MAX: Final = 1 << 20
REQUESTS_MAX: Final = 1_000_000
BLOCKS_MAX: Final = 65_536

Count = Annotated[int, Meta(ge=0, le=2**40)]
BlockId = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class TraceError(KvgwError):
    """A trace that cannot be read; the sentence names the file, the line and what is wrong there."""


class Request(Struct, frozen=True):
    """One request: when it came (ms), its lengths in tokens, and the ids of its prefix blocks from the first on."""

    timestamp: Count
    input_length: Count
    output_length: Count
    hash_ids: Annotated[tuple[BlockId, ...], Meta(max_length=BLOCKS_MAX)]


def read_trace(file: Path, limit: int | None = None) -> list[Request]:
    """The first `limit` requests of a trace, all of them without a limit. Raises `TraceError`."""
    try:
        with file.open("rb") as lines:
            return list(_decoded(file, iter(lambda: lines.readline(LINE_BYTES_MAX + 1), b""), limit or REQUESTS_MAX))
    except OSError as error:
        raise TraceError(f"the trace {file} cannot be read: {error.strerror}") from error


def _decoded(file: Path, lines: Iterator[bytes], limit: int) -> Iterator[Request]:
    decoder = msgspec.json.Decoder(Request)
    last = 0
    count = 0
    for number, line in enumerate(lines, start=1):
        if count == limit:
            return
        if len(line) > LINE_BYTES_MAX:
            raise TraceError(f"line {number} of {file} is longer than {LINE_BYTES_MAX} bytes; is it a trace?")
        if not line.strip():
            continue
        try:
            request = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise TraceError(f"line {number} of {file} is no request: {error}") from error
        if request.timestamp < last:
            raise TraceError(
                f"line {number} of {file} goes back in time, from {last} to {request.timestamp} ms; sort the trace"
            )
        last = request.timestamp
        count += 1
        yield request
    if count == 0:
        raise TraceError(f"there is no request in {file}")


def divide(requests: Sequence[Request], tenants: int) -> list[list[Request]]:
    """Requests by tenant, each with its own order kept.

    Requests that share more than a first block, which may be everybody's system prompt, are one tenant's: a
    conversation is not torn apart.
    """
    parts: list[list[Request]] = [[] for _ in range(tenants)]
    for request in requests:
        ids = request.hash_ids
        parts[(ids[1] if len(ids) > 1 else ids[0] if ids else 0) % tenants].append(request)
    return parts
