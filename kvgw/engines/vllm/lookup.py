"""What is asked of the gateway for one request, in the background: which of its leading chunks can be had."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvgw.engines.counters import Counters
from kvgw.engines.remote import Remote
from kvgw.engines.vllm.format import adapter_digest, with_adapter
from kvgw.engines.vllm.plan import Whose
from kvgw.errors import FormatError
from kvgw.keys import prefix_keys
from kvgw.kvformat import KVFormat


@dataclass(frozen=True, slots=True)
class Question:
    """A request as the gateway is asked about it."""

    tenant: str
    salt: bytes
    tokens: list[int]
    """The prompt."""
    lora: tuple[str, str] | None
    """Name and folder of the adapter."""


@dataclass(frozen=True, slots=True)
class Answer:
    """`keys` of the whole chunks of the prompt, of which the gateway has the first `count`."""

    whose: Whose
    keys: list[bytes]
    count: int
    answered: bool
    """False: the gateway did not say."""


async def look_up(
    remote: Remote,
    counters: Counters,
    formats: Sequence[KVFormat],
    question: Question,
    until: float,
    digest_dir: Path | None,
) -> Answer:
    """Ask for the leading run that every worker has: each has a format of its own, under the keys of the first's."""
    name = digest = None
    if question.lora is not None:
        name, folder = question.lora
        try:
            digest = await asyncio.to_thread(adapter_digest, folder, digest_dir)
        except FormatError as error:
            counters.reason("adapters_refused", str(error))
            return Answer(Whose(question.tenant), [], 0, answered=False)
    wanted = [with_adapter(one, name, digest) for one in formats]
    keys = prefix_keys(wanted[0], question.tokens, salt=question.salt)
    # The last token of a prompt is always computed: its logits are what comes next.
    usable = (len(question.tokens) - 1) // wanted[0].tokens_per_chunk
    whose = Whose(question.tenant, name, digest)
    if not usable:
        return Answer(whose, keys, 0, answered=True)
    found = await remote.match(question.tenant, wanted, keys[:usable], until)
    return Answer(whose, keys, found.count, found.answered)
