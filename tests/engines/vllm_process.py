"""A vLLM engine in a process of its own, in the engines' environment; it takes requests as JSON lines.

    python vllm_process.py '{"model": …, "kv_transfer_config": …}'

Reads ``{"prompts": [[ids], …], "max_tokens": n}``, runs the prompts at once, and answers for each ``{"tokens": […],
"ttft_s": …, "cached": n}``. Besides it takes ``"cache_salt"``, ``"lora": [name, number, folder]``, and ``"pace_s"``, a
rest after each step. To ``{"metrics": true}`` it answers ``{name: value}``. ``{"become": {…}, "version": …}`` ends the
engine and starts another one in its place, which says of itself that it is that version if one is given. What it prints
on standard error is the engine's log.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # whatever a library prints is no answer

import vllm  # noqa: E402  # after the settings
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory  # noqa: E402
from vllm.inputs import TokensPrompt  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402

VERSION = vllm.__version__


def ask(llm: LLM, question: dict[str, Any]) -> list[dict[str, Any]]:
    """Greedy tokens after each prompt, and the seconds to the first of them."""
    params = SamplingParams(temperature=0.0, max_tokens=question["max_tokens"], ignore_eos=True)
    lora = LoRARequest(*question["lora"]) if question.get("lora") else None
    engine = llm.llm_engine
    started = time.perf_counter()
    found: dict[str, dict[str, Any]] = {}
    for ids in question["prompts"]:
        prompt = TokensPrompt(prompt_token_ids=ids)
        if question.get("cache_salt"):
            prompt["cache_salt"] = question["cache_salt"]
        name = f"{question['number']}-{len(found)}"
        found[name] = {"ttft_s": None}
        engine.add_request(name, prompt, params, lora_request=lora)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        time.sleep(question.get("pace_s", 0))
        if not outputs:
            time.sleep(0.001)  # as vLLM's own engine process does after a step that had nothing to compute
        for output in outputs:
            one = found[output.request_id]
            one["ttft_s"] = one["ttft_s"] or time.perf_counter() - started
            one["tokens"], one["cached"] = list(output.outputs[0].token_ids), output.num_cached_tokens
    return list(found.values())


def opened(config: dict[str, Any]) -> LLM:
    return LLM(**config, disable_log_stats=False)


def end(llm: LLM) -> None:
    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def main() -> None:
    llm: LLM | None = opened(json.loads(sys.argv[1]))
    print(json.dumps("ready"), file=answers)
    answer: Any
    for number, line in enumerate(sys.stdin):
        question = json.loads(line)
        if question.get("become"):
            end(llm)
            llm = None
            gc.collect()
            vllm.__version__ = question["version"] or VERSION
            llm, answer = opened(question["become"]), "ready"
        elif question.get("metrics"):
            answer = {one.name: one.value for one in llm.get_metrics() if hasattr(one, "value")}
        else:
            answer = ask(llm, {**question, "number": number})
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
