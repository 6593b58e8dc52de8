"""The attacks, one function each, and what they find out about a store."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Literal

from tests.attacks.subject import CHUNK_BYTES, CHUNK_TOKENS, Asker, NotApplicable, Subject

Word = Literal["safe", "leaks", "corrupt", "hangs", "n.a."]

LIMIT_S = 60.0
"""No store is waited for any longer."""
HANG_S = 2.5
"""An engine that waits longer than this for a cache is held up by it: most prompts are computed in less."""

ALICE, BOB = Asker("acme"), Asker("globex")


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a store came through an attack.

    safe: nothing was served that should not be, in time. leaks: another tenant's bytes were served. corrupt: a hit was
    announced whose bytes are not those that belong to the request. hangs: no answer within `HANG_S`.
    """

    word: Word
    evidence: str
    seconds: float = 0.0
    """Of a hang."""

    @property
    def short(self) -> str:
        return f"hangs {self.seconds:.0f} s" if self.word == "hangs" else self.word


def tokens_of(name: str) -> list[int]:
    chance = random.Random(name)
    return [chance.randrange(3, 30_000) for _ in range(CHUNK_TOKENS)]


def payload_of(name: str) -> bytes:
    return random.Random(f"payload of {name}").randbytes(CHUNK_BYTES)


async def _kept(store: Subject, who: Asker, name: str) -> tuple[list[int], bytes]:
    """Store a chunk and see that its owner reads it: without that, a miss proves nothing."""
    tokens, payload = tokens_of(name), payload_of(name)
    await store.store(who, tokens, payload)
    if await store.load(who, tokens, LIMIT_S) != payload:
        raise AssertionError(f"{store.name} does not read back what it was given; nothing can be said of it")
    return tokens, payload


async def salt_join(store: Subject) -> Verdict:
    """Another tenant's request says the same salt and the same tokens."""
    tokens, payload = await _kept(store, replace(ALICE, salt="tea"), "salt")
    found = await store.load(replace(BOB, salt="tea"), tokens, LIMIT_S)
    if found is None:
        return Verdict("safe", "a miss for the other tenant, a hit for the owner")
    return Verdict("leaks", "the other tenant reads the owner's KV") if found == payload else _wrong(found)


async def adapter_mix_up(store: Subject) -> Verdict:
    """The same tokens under another LoRA adapter."""
    return await _other(store, replace(ALICE, adapter="tone"), replace(ALICE, adapter="law"), "adapter")


async def revision_change(store: Subject) -> Verdict:
    """The same model name with other weights, as after a fine-tune that was pushed under the old name."""
    return await _other(store, ALICE, replace(ALICE, revision="2"), "revision")


async def dtype_change(store: Subject) -> Verdict:
    """The same engine with another type of KV cache of the same size."""
    return await _other(store, ALICE, replace(ALICE, dtype="float16"), "dtype")


async def _other(store: Subject, wrote: Asker, asks: Asker, name: str) -> Verdict:
    tokens, payload = await _kept(store, wrote, name)
    found = await store.load(asks, tokens, LIMIT_S)
    if found is None:
        return Verdict("safe", "a miss")
    return Verdict("corrupt", f"KV computed under another {name} is a hit") if found == payload else _wrong(found)


def _wrong(found: bytes) -> Verdict:
    return Verdict("corrupt", f"a hit of {len(found)} bytes that nobody stored")


async def bit_flip(store: Subject) -> Verdict:
    """One bit of the stored bytes changes."""
    tokens, payload = await _kept(store, ALICE, "flip")
    where = await store.flip(ALICE, tokens)
    return _damaged(await store.load(ALICE, tokens, LIMIT_S), payload, where)


async def foreign_blob(store: Subject) -> Verdict:
    """The whole, well-formed bytes of another chunk lie under a live name."""
    tokens, payload = await _kept(store, ALICE, "victim")
    foreign, other = await _kept(store, ALICE, "foreign")
    how = await store.swap(ALICE, tokens, foreign)
    found = await store.load(ALICE, tokens, LIMIT_S)
    if found == other:
        return Verdict("corrupt", f"the other prompt's KV is a hit ({how})")
    return _damaged(found, payload, how)


def _damaged(found: bytes | None, payload: bytes, where: str) -> Verdict:
    if found is None:
        return Verdict("safe", f"a miss ({where})")
    if found == payload:
        return Verdict("safe", f"the right bytes ({where})")
    return Verdict("corrupt", f"the changed bytes are a hit ({where})")


async def frozen_store(store: Subject) -> Verdict:
    """The store's process stands still while its sockets stay open."""
    tokens, _ = await _kept(store, ALICE, "frozen")
    what = await store.freeze()
    started = time.monotonic()
    try:
        found = await store.load(ALICE, tokens, LIMIT_S)
    except TimeoutError:
        return Verdict("hangs", f"no answer, then it was ended ({what})", LIMIT_S)
    took = time.monotonic() - started
    kind = "a miss" if found is None else "a hit"
    return Verdict("hangs" if took > HANG_S else "safe", f"{kind} after {took:.1f} s ({what})", took)


async def deleted_then_read(store: Subject) -> Verdict:
    """A chunk that was deleted is asked for again."""
    tokens, _ = await _kept(store, ALICE, "deleted")
    try:
        await store.delete(ALICE, tokens)
    except NotApplicable as why:
        served = await store.load(ALICE, tokens, LIMIT_S) is not None
        raise NotApplicable(f"{why}; it is still {'served' if served else 'held'}") from None
    found = await store.load(ALICE, tokens, LIMIT_S)
    if found is None:
        return Verdict("safe", "a miss after the deletion was acknowledged")
    return Verdict("leaks", "still served after the deletion was acknowledged")


TRIALS: dict[str, Callable[[Subject], Awaitable[Verdict]]] = {
    "salt join across tenants": salt_join,
    "LoRA mix-up": adapter_mix_up,
    "model revision changed": revision_change,
    "KV dtype changed": dtype_change,
    "bit flip at rest": bit_flip,
    "foreign blob under a live name": foreign_blob,
    "deleted, then read": deleted_then_read,
    "frozen store": frozen_store,
}
"""The last one leaves the store standing still."""


async def tried(store: Subject) -> dict[str, Verdict]:
    """Every attack on one store, which is of no use afterwards."""
    found = {}
    for name, trial in TRIALS.items():
        try:
            found[name] = await trial(store)
        except NotApplicable as why:
            found[name] = Verdict("n.a.", str(why))
    return found
