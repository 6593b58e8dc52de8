"""C23: nothing that lies at rest can be tested against a guess without a namespace's keys."""

from __future__ import annotations

import hashlib
from pathlib import Path

from blake3 import blake3

from tests.support.aio import aio
from tests.support.gateways import SMALL, format_of, house, keys_of, payloads_of

OBJECTS = 1000
BATCH = 250


@aio
async def test_C23_no_plain_hash_of_a_prefix_or_of_plaintext_is_anywhere(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    guesses: set[bytes] = set()
    async with house("embedded", folder, settings=SMALL) as gateway, gateway.client(on_error="raise") as client:
        registered = await client.register(format_of(1024))
        keys, payloads = keys_of(OBJECTS), payloads_of(registered, OBJECTS)
        for start in range(0, OBJECTS, BATCH):
            stored = await client.put(registered, keys[start : start + BATCH], payloads[start : start + BATCH])
            assert stored.stored == BATCH
        canonical = registered.kv_format.canonical()
        for known in (*keys, *payloads, canonical):
            guesses |= {hashlib.sha256(known).digest(), blake3(known).digest(), hashlib.blake2b(known).digest()[:32]}
        guesses |= set(keys)
        names = {path.relative_to(folder).as_posix().encode() for path in folder.rglob("*")}
    found = names | {path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert sum(b"nvme/v1/" in name for name in names) >= OBJECTS
    haystack = b"\0".join(sorted(found))
    assert registered.fingerprint in haystack, "the search finds what is there"
    leaked = [guess.hex() for guess in guesses if guess in haystack or guess.hex().encode() in haystack]
    assert leaked == []
