"""The scheduler's half: asks for prefixes in the background, and plans what workers load and store. Never blocks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvgw.engines.counters import Counters
from kvgw.engines.loop import LoopThread
from kvgw.engines.options import EngineOptions
from kvgw.engines.remote import Remote
from kvgw.engines.tenants import OWN, TenantMap
from kvgw.engines.vllm.handover import Handover
from kvgw.engines.vllm.lookup import Answer, Question, look_up
from kvgw.engines.vllm.media import items_of
from kvgw.engines.vllm.plan import Load, Loaded, Plan, Store, Whose
from kvgw.engines.vllm.prefill import PrefillTimer
from kvgw.errors import FormatError
from kvgw.kvformat import KVFormat
from kvgw.runtime import Clock

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_NOBODY: Final = Answer(Whose(OWN), [], 0, answered=False)
_NEVER: Final = -1


@dataclass(slots=True)
class _State:
    """One request that this adapter serves."""

    request: Request
    question: Question
    lookup: Future[Answer] | None = None
    until: float = 0.0
    """When the scheduler waits no longer for the lookup, and then until when its answer is believed."""
    answer: Answer | None = None
    local: int = 0
    """Tokens that the engine had itself when it last asked."""
    loaded_in: int = _NEVER
    """The life of the request in which a load was planned: how often it had been preempted by then."""
    judged_in: int = _NEVER
    """The life of the request in which it was decided whether its hit is loaded."""
    pays: bool = True
    blocks: list[int] = field(default_factory=list)
    stored: int = 0
    """Leading chunks that the gateway has or was offered."""


class SchedulerHalf:
    """Knows the requests of one engine. Called by the scheduler's thread alone."""

    def __init__(
        self,
        options: EngineOptions,
        tenants: TenantMap,
        counters: Counters,
        clock: Clock,
        *,
        block_tokens: int,
        digest_dir: Path | None,
    ) -> None:
        self._options = options
        self._tenants = tenants
        self._counters = counters
        self._clock = clock
        self._block_tokens = block_tokens
        self._per_chunk = options.tokens_per_chunk // block_tokens
        self._digest_dir = digest_dir
        self._loop = LoopThread("kvgw-lookup")
        self._remote = Remote(options, tenants, counters, clock)
        self._handover = Handover(options, tenants, counters, clock) if options.wait_deadline_s else None
        self._formats: list[KVFormat] = []
        self._states: dict[str, _State] = {}
        self._loads: list[Load] = []
        self._guard = options.guard()
        self._prefills = PrefillTimer(self._guard, options.tokens_per_chunk)

    def learn(self, formats: Sequence[KVFormat]) -> None:
        """The formats of all workers, the first rank's first. Connects and registers them, in the background."""
        self._formats = list(formats)
        until = self._clock.monotonic() + self._options.store_deadline_s
        probe = b"\0" * 32
        self._loop.submit(lambda: self._remote.match(OWN, self._formats, [probe], until))

    def matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """How many tokens can be loaded behind the `computed` ones; None: ask again."""
        state = self._states.get(request.request_id)
        if state is None:
            question = self._question(request)
            if question is None:
                return 0, False
            state = self._states[request.request_id] = _State(request, question)
        usable = (request.num_tokens - 1) // self._options.tokens_per_chunk * self._options.tokens_per_chunk
        if usable <= computed or state.loaded_in == request.num_preemptions:
            return 0, False  # nothing to win, or what was planned did not arrive
        answer = self._answer(state)
        if answer is None:
            return None, False
        tokens = min(answer.count * self._options.tokens_per_chunk, usable) - computed
        state.local = computed
        return (tokens, True) if tokens > 0 and self._pays(state, request, tokens) else (0, False)

    def allocated(self, request: Request, blocks: Sequence[int], tokens: int) -> None:
        """The engine gave the request `blocks`, and wants `tokens` tokens loaded behind those that it had."""
        state = self._states.get(request.request_id)
        if state is None or state.answer is None or not tokens:
            return
        first, last = self._chunk(state.local), self._chunk(state.local + tokens)
        state.loaded_in = request.num_preemptions
        state.blocks = list(blocks)
        self._counters.add("tokens_planned", tokens)
        self._loads.append(
            Load(
                request.request_id,
                state.answer.whose,
                state.answer.run(first, last),
                list(blocks[first * self._per_chunk : last * self._per_chunk]),
                state.local // self._block_tokens - first * self._per_chunk,
                max(0, min(last, len(state.answer.public)) - first),
            )
        )

    def lost(self, bad: Collection[int]) -> None:
        """Workers could not load into the blocks `bad`: what is computed there instead is stored anew."""
        for state in self._states.values():
            at = next((at for at, block in enumerate(state.blocks) if block in bad), None)
            if at is not None:
                state.stored = min(state.stored, at // self._per_chunk)

    def measured(self, loads: Sequence[Loaded]) -> None:
        """How long workers took for loads that ended."""
        for load in loads:
            self._guard.loaded(load.nbytes, load.seconds)
        self._counters.show("load_bytes_per_second", self._guard.load_bytes_per_s)

    def plan(self, output: SchedulerOutput) -> Plan:
        """The workers' work beside the step that `output` describes."""
        now = self._clock.monotonic()
        self._prefills.look(now)
        self._counters.show("prefill_tokens_per_second", self._guard.prefill_tokens_per_s)
        plan = Plan(self._loads)
        self._loads = []
        scheduled: Mapping[str, int] = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            self._blocks_are(new.req_id, new.block_ids[0])
            if new.req_id in self._states:
                state = self._states[new.req_id]
                self._prefills.begin(state.request, len(state.question.tokens) - new.num_computed_tokens, now)
            self._plan_store(plan, new.req_id, new.num_computed_tokens + scheduled[new.req_id])
        running = output.scheduled_cached_reqs
        for index, name in enumerate(running.req_ids):
            blocks = running.new_block_ids[index]
            if name in running.resumed_req_ids:
                self._blocks_are(name, blocks[0])
            elif blocks is not None and name in self._states:
                self._states[name].blocks.extend(blocks[0])
            self._plan_store(plan, name, running.num_computed_tokens[index] + scheduled[name])
        return plan

    def finished(self, request: str) -> None:
        """The request ended, however it did."""
        self._prefills.finished(request, self._clock.monotonic())
        state = self._states.pop(request, None)
        if state is not None and state.lookup is not None:
            state.lookup.cancel()

    def close(self) -> None:
        """End the lookups and the connections."""
        self._loop.close(self._aclose)

    async def _aclose(self) -> None:
        await self._remote.aclose()
        if self._handover is not None:
            await self._handover.aclose()

    def _question(self, request: Request) -> Question | None:
        """What to ask for a request; None, with the reason counted, for one that this adapter does not serve."""
        tokens = request.prompt_token_ids
        if not self._formats:
            self._counters.reason("requests_not_served", "the workers did not say in which format they keep KV")
        elif request.prompt_embeds is not None or tokens is None:
            self._counters.reason("requests_not_served", "a prompt of embeddings")
        elif request.pooling_params is not None or request.resumable or request.skip_reading_prefix_cache:
            self._counters.reason(
                "requests_not_served", "a request that pools, streams its input or wants prompt logprobs"
            )
        elif len(tokens) < self._options.tokens_per_chunk:
            self._counters.add("requests_short")
        else:
            tenant, salt = self._tenants.resolve(request.cache_salt, request.kv_transfer_params)
            lora = request.lora_request
            adapter = None if lora is None else (lora.lora_name, lora.lora_path)
            try:
                items = items_of(request.mm_features)
            except FormatError as error:
                self._counters.reason("requests_not_served", str(error))
            else:
                return Question(tenant, salt, list(tokens), items, adapter, self._tenants.reads_public(tenant))
        return None

    def _answer(self, state: _State) -> Answer | None:
        """The answer of the gateway, asked now if need be; None while it is awaited and there is time."""
        now = self._clock.monotonic()
        if state.answer is not None and (now < state.until or not state.answer.answered):
            return state.answer
        if state.lookup is None:
            self._ask(state, now)
            return None
        if state.lookup.done():
            error = state.lookup.exception()
            if error is not None:
                self._counters.reason("lookups_failed", repr(error))
            first = state.answer is None
            state.answer = _NOBODY if error is not None else state.lookup.result()
            state.until = now + self._options.lease_s
            if first:
                state.stored = state.answer.count
        elif now < state.until:
            return None
        else:
            self._counters.reason(
                "lookups_late",
                f"no answer within lookup_deadline_s={self._options.lookup_deadline_s:g} and "
                f"wait_deadline_s={self._options.wait_deadline_s:g}",
            )
            state.lookup.cancel()
            state.answer = _NOBODY
        state.lookup = None
        return state.answer

    def _ask(self, state: _State, now: float) -> None:
        """Begin to ask; the first time also to wait, where the engine does that."""
        self._counters.add("lookups")
        question, until = state.question, now + self._options.lookup_deadline_s
        handover = self._handover if state.answer is None else None
        state.until = until if handover is None else until + self._options.wait_deadline_s
        state.lookup = self._loop.submit(
            lambda: look_up(self._remote, self._counters, self._formats, question, until, self._digest_dir, handover)
        )

    def _pays(self, state: _State, request: Request, tokens: int) -> bool:
        """Whether `tokens` tokens are loaded, rather than computed; decided once in each life of a request."""
        if state.judged_in != request.num_preemptions:
            state.judged_in = request.num_preemptions
            chunks = self._chunk(state.local + tokens) - self._chunk(state.local)
            # The workers load at once, each its own part.
            nbytes = chunks * max(one.chunk_bytes for one in self._formats)
            state.pays = self._guard.pays(tokens, nbytes, self._clock.monotonic())
            if not state.pays:
                self._counters.add("hits_declined")
        return state.pays

    def _chunk(self, tokens: int) -> int:
        return tokens // self._options.tokens_per_chunk

    def _blocks_are(self, name: str, blocks: Sequence[int]) -> None:
        if name in self._states:
            self._states[name].blocks = list(blocks)

    def _plan_store(self, plan: Plan, name: str, computed: int) -> None:
        """Offer the whole chunks of the prompt that are computed when this step is done."""
        state = self._states.get(name)
        if not self._options.store or state is None or state.answer is None or not state.answer.answered:
            return
        first, last = state.stored, min(self._chunk(computed), len(state.answer.keys))
        if first >= last:
            return
        keys = state.answer.keys
        plan.stores.append(
            Store(
                state.answer.whose,
                keys[first:last],
                state.blocks[first * self._per_chunk : last * self._per_chunk],
                keys[first - 1] if first else None,
                first,
            )
        )
        state.stored = last
