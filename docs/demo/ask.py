"""One engine process of the demo: `store` computes and stores, `reuse` restores, measures and tries what must fail.

    python docs/demo/ask.py store|reuse MODEL_FOLDER ENDPOINT WORK_FOLDER

Writes messages (see `messages`) to standard output. Process A (`store`) also leaves samples of its KV bytes in
WORK_FOLDER, for the search that must not find them in the gateway's files.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch
from corpus import QUESTIONS, prompts
from messages import Denied, Message, Reused, ReuseResult, Round, Stage, Stored, StoreResult
from plaintext import write_samples
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

import kvgw
from kvgw.engines.transformers import KVReuse, ModelIdentity, Restored

MODEL_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
ANSWER_TOKENS = 32
ROUNDS = 3

OPTIONS = kvgw.ClientOptions(read_deadline_s=60.0, write_deadline_s=60.0, on_error="raise")
"""Patient, and never taking an outage for a miss: a miss is what the demo looks for."""


@dataclass(frozen=True)
class Engine:
    """A loaded model and a connection to the gateway."""

    endpoint: str
    client: kvgw.Client
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    identity: ModelIdentity
    reuse: KVReuse
    end: int


def tell(message: Message) -> None:
    print(msgspec.json.encode(message).decode(), flush=True)


def load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in fp32, warmed up."""
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    model(torch.arange(1, 65).view(1, -1), use_cache=False)  # the kernels' first call is slower
    return model, tokenizer


@torch.inference_mode()
def first_token(engine: Engine, ids: Sequence[int], cache: DynamicCache) -> int:
    """Compute the tokens that `cache` lacks, and choose the next one."""
    rest = torch.tensor([ids[cache.get_seq_length() :]])
    output = engine.model(rest, use_cache=True, logits_to_keep=1, **engine.reuse.cache_argument(cache))
    return int(output.logits[0, -1].argmax())


def answer(engine: Engine, ids: Sequence[int], first: int, cache: DynamicCache) -> list[int]:
    """Greedy continuation after `first`, up to the end of the turn or `ANSWER_TOKENS`."""
    tokens = [first]
    while len(tokens) < ANSWER_TOKENS and tokens[-1] != engine.end:
        tokens.append(first_token(engine, [*ids, *tokens], cache))
    return tokens


async def store_all(engine: Engine, work: Path) -> StoreResult:
    """Process A: answer each question from the first token on, and store the KV of its prompt."""
    done: list[Stored] = []
    for number, ids in enumerate(prompts(engine.tokenizer), 1):
        tell(Stage(f"process A: computes prompt {number} of {len(QUESTIONS)} ({len(ids)} tokens) and stores its KV"))
        cache = DynamicCache()
        started = time.perf_counter()
        first = first_token(engine, ids, cache)
        ttft_s = time.perf_counter() - started
        stored = await engine.reuse.store(ids, cache, labels=[kvgw.Label("session", "demo")])
        tokens = answer(engine, ids, first, cache)
        new = stored.outcomes.count(kvgw.PutOutcome.STORED)
        done.append(
            Stored(
                prompt_tokens=len(ids),
                ttft_s=ttft_s,
                answer=tokens,
                text=engine.tokenizer.decode(tokens, skip_special_tokens=True),
                chunks=stored.tokens // engine.reuse.registered.kv_format.tokens_per_chunk,
                new_chunks=new,
                payload_bytes=new * engine.reuse.registered.chunk_bytes,
            )
        )
        if number == 1:
            write_samples(work, cache, engine.reuse.registered.kv_format)
    return StoreResult(done)


async def reuse_all(engine: Engine) -> ReuseResult:
    """Process B: answer with and without reuse, try what must find nothing, then delete."""
    ids_of = prompts(engine.tokenizer)
    done: list[Reused] = []
    for number, ids in enumerate(ids_of, 1):
        tell(Stage(f"process B: prompt {number} of {len(ids_of)}, with reuse and without"))
        done.append(await ask_both_ways(engine, ids))
    tell(Stage("process B: asks as somebody else"))
    denied = await ask_as_others(engine, ids_of[0])
    tell(Stage("process B: deletes, and asks again"))
    keys = sorted({key for ids in ids_of for key in engine.reuse.keys(ids)})
    deleted = await engine.client.delete(engine.reuse.registered, keys)
    after = [(await engine.reuse.restore(ids)).tokens for ids in ids_of]
    return ReuseResult(done, denied, deleted, after)


async def ask_both_ways(engine: Engine, ids: Sequence[int]) -> Reused:
    """Ask `ROUNDS` times with reuse and once, as that takes long, without; the first round goes on to answer."""
    done = [await ask_with_reuse(engine, ids) for _ in range(ROUNDS)]
    first_round, restored = done[0]
    tokens = answer(engine, ids, first_round.first_token, restored.cache)
    started = time.perf_counter()
    cold = first_token(engine, ids, DynamicCache())
    return Reused(
        prompt_tokens=len(ids),
        matched_tokens=restored.tokens,
        payload_bytes=restored.payload_bytes,
        cold_first_token=cold,
        cold_ttft_s=time.perf_counter() - started,
        rounds=[one for one, _ in done],
        answer=tokens,
    )


async def ask_with_reuse(engine: Engine, ids: Sequence[int]) -> tuple[Round, Restored]:
    started = time.perf_counter()
    restored = await engine.reuse.restore(ids)
    restore_s = time.perf_counter() - started
    first = first_token(engine, ids, restored.cache)
    return Round(restore_s, time.perf_counter() - started, first, list(restored.tiers)), restored


async def ask_as_others(engine: Engine, ids: Sequence[int]) -> list[Denied]:
    """The same prompt from another namespace, and under formats that differ in one field."""
    kv_format = engine.reuse.registered.kv_format
    formats = {
        "adapter": replace(kv_format, adapter="lora", adapter_digest=b"\1" * 32),
        "dtype bf16": replace(kv_format, kv_dtype="bfloat16"),
        "revision": replace(kv_format, weights="another-revision"),
    }
    denied: list[Denied] = []
    for who, other in formats.items():
        registered = await engine.client.register(other)
        # Neither under the keys of that format nor under those of the entries that are there.
        runs = [await engine.client.match(registered, keys) for keys in (registered.keys(ids), engine.reuse.keys(ids))]
        denied.append(Denied(who, sum(run.count for run in runs) * kv_format.tokens_per_chunk))
    async with kvgw.connect(engine.endpoint, options=replace(OPTIONS, namespace="other")) as client:
        neighbour = await KVReuse.open(client, engine.model, engine.identity)
        denied.append(Denied("namespace", (await neighbour.restore(ids)).tokens))
    return denied


async def main(role: str, folder: Path, endpoint: str, work: Path) -> None:
    tell(Stage(f"process {'A' if role == 'store' else 'B'}: loads the model"))
    model, tokenizer = load(folder)
    identity = ModelIdentity.of_folder(MODEL_NAME, folder, cache_dir=work / "digests")
    async with kvgw.connect(endpoint, options=OPTIONS) as client:
        reuse = await KVReuse.open(client, model, identity)
        engine = Engine(endpoint, client, model, tokenizer, identity, reuse, tokenizer.eos_token_id)
        tell(await store_all(engine, work) if role == "store" else await reuse_all(engine))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4])))
