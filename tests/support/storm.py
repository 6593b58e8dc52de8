"""A storm of everything that a client and time do to a few chunks of one namespace, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence

from kvgw.client import Client
from kvgw.model import Durability
from kvgw.reports import Registered
from tests.support.gateways import House, keys_of, payloads_of, read

CHUNKS = 12


async def storm(
    rng: random.Random, made: House, client: Client, registered: Registered, steps: int
) -> AsyncIterator[tuple[Sequence[bytes], int, int]]:
    """After each step: all keys, and where the run of them begins and ends that the step was about."""
    keys, payloads = keys_of(CHUNKS), payloads_of(registered, CHUNKS)
    crew = made.opened.crew
    for _ in range(steps):
        start = rng.randrange(CHUNKS)
        stop = rng.randint(start + 1, CHUNKS)
        run = keys[start:stop]
        match rng.randrange(7):
            case 0 | 1:
                durability = rng.choice([Durability.STAGED, Durability.NVME])
                await client.put(registered, run, payloads[start:stop], ttl=60, durability=durability)
            case 2:
                await client.delete(registered, run)
            case 3:
                await made.wait(rng.uniform(1, 30))
            case 4:
                await crew.sweep_everywhere()
            case 5:
                await read(client, registered, run)
            case _:
                await crew.drain_everywhere()
        yield keys, start, stop
