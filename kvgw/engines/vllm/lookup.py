"""What is asked of the gateway for one request, in the background: which of its leading chunks can be had."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvgw.engines.counters import Counters
from kvgw.engines.remote import Found, Remote
from kvgw.engines.tenants import PUBLIC_SALT
from kvgw.engines.vllm.format import adapter_digest, with_adapter
from kvgw.engines.vllm.handover import Handover
from kvgw.engines.vllm.plan import Whose
from kvgw.errors import FormatError
from kvgw.keys import MultimodalItem, prefix_keys
from kvgw.kvformat import KVFormat


@dataclass(frozen=True, slots=True)
class Question:
    """A request as the gateway is asked about it."""

    tenant: str
    salt: bytes
    tokens: list[int]
    """The prompt."""
    items: tuple[MultimodalItem, ...]
    """Images and sounds in it."""
    lora: tuple[str, str] | None
    """Name and folder of the adapter."""
    public: bool = False
    """Ask the public namespaces first."""


@dataclass(frozen=True, slots=True)
class Answer:
    """`keys` of the whole chunks of the prompt, of which the gateway has the first `count`."""

    whose: Whose
    keys: list[bytes]
    count: int
    answered: bool
    """False: the gateway did not say."""
    public: list[bytes] = field(default_factory=list)
    """Keys of the leading chunks, among those `count`, that are in a public namespace."""

    def run(self, first: int, last: int) -> list[bytes]:
        """The keys by which chunks ``first … last - 1`` of those `count` can be read."""
        return [*self.public, *self.keys[len(self.public) :]][first:last]


async def look_up(
    remote: Remote,
    counters: Counters,
    formats: Sequence[KVFormat],
    question: Question,
    until: float,
    digest_dir: Path | None,
    handover: Handover | None = None,
) -> Answer:
    """Ask for the leading run that every worker has: each has a format of its own, under the keys of the first's.

    `handover`: waits for what is not there yet, for a time of its own behind the lookup.
    """
    name = digest = None
    if question.lora is not None:
        name, folder = question.lora
        try:
            digest = await asyncio.to_thread(adapter_digest, folder, digest_dir)
        except FormatError as error:
            counters.reason("adapters_refused", str(error))
            return Answer(Whose(question.tenant), [], 0, answered=False)
    wanted = [with_adapter(one, name, digest) for one in formats]
    keys = prefix_keys(wanted[0], question.tokens, salt=question.salt, items=question.items)
    # The last token of a prompt is always computed: its logits are what comes next.
    usable = (len(question.tokens) - 1) // wanted[0].tokens_per_chunk
    whose = Whose(question.tenant, name, digest)
    if not usable:
        return Answer(whose, keys, 0, answered=True)
    public = await _public_run(remote, wanted, question, usable, until) if question.public else []
    found = Found(0, answered=True)
    if len(public) < usable:
        found = await remote.match(question.tenant, wanted, keys[len(public) : usable], until)
    count = len(public) + found.count
    if handover is not None and found.answered and count < usable:
        count += await handover.rest(question.tenant, wanted, keys[count:usable])
    return Answer(whose, keys, count, found.answered, public)


async def _public_run(
    remote: Remote, formats: Sequence[KVFormat], question: Question, usable: int, until: float
) -> list[bytes]:
    """Keys of the leading chunks that a public namespace has; the tenant's own can go on behind them."""
    keys = prefix_keys(formats[0], question.tokens, salt=PUBLIC_SALT, items=question.items)[:usable]
    found = await remote.match(question.tenant, formats, keys, until, public=True)
    return keys[: found.count]
