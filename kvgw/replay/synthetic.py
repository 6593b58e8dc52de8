"""A trace from a seed: conversations that grow turn by turn under a few system prompts, and questions asked once.

For those who have no recorded traffic at hand. Equal arguments make an equal trace, on every machine.
"""

from __future__ import annotations

import random
from typing import Final

from kvgw.replay.trace import BLOCK_TOKENS, Request

PROMPTS: Final = 4
PROMPT_BLOCKS: Final = 3
TURNS_MEAN: Final = 4
THINKING_MS: Final = 20_000
"""Mean pause of a person between two turns."""
ARRIVAL_MS: Final = 250
"""Mean time between two new conversations."""


def synthetic_trace(requests: int, seed: int = 1) -> list[Request]:
    """`requests` requests in order of their time."""
    chance = random.Random(seed)  # noqa: S311  # equal for an equal seed; nothing here is secret
    fresh = iter(range(PROMPTS * PROMPT_BLOCKS, 1 << 62))
    made: list[Request] = []
    start_ms = 0
    while len(made) < 2 * requests:  # those that a later cut at `requests` by time leaves are surely complete
        start_ms += int(chance.expovariate(1 / ARRIVAL_MS))
        prompt = chance.randrange(PROMPTS)
        ids = [prompt * PROMPT_BLOCKS + block for block in range(PROMPT_BLOCKS)]
        at_ms = start_ms
        for _ in range(1 + int(chance.expovariate(1 / TURNS_MEAN))):
            ids += [next(fresh) for _ in range(chance.randint(1, 8))]
            answer = chance.randint(16, BLOCK_TOKENS)
            rest = chance.randrange(BLOCK_TOKENS)
            made.append(Request(at_ms, len(ids) * BLOCK_TOKENS - rest, answer, tuple(ids)))
            at_ms += int(chance.expovariate(1 / THINKING_MS))
    return sorted(made, key=lambda one: one.timestamp)[:requests]
