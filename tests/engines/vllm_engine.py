"""Real vLLM engines for tests: in a process of their own, or as the server that operators start."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.support.served import Served

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "docs" / "engines" / "vllm-kv-transfer.json"
"""The configuration that the documentation shows."""
PYTHON = os.environ.get("KVGW_TEST_VLLM", "")
"""The interpreter of an environment with vLLM; see `make test-engines`."""
START_S = 420.0
ROOMY = """
[server]
http = ""
[staging]
bytes = 268435456
[nvme]
capacity_bytes = 1073741824
min_free_bytes = 0
"""
"""Settings of a gateway that has room for everything."""


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    ttft_s: float


def endpoint(gateway: Served) -> str:
    return f"unix:{gateway.folder / 'kvgw.sock'}"


def transfer_config(endpoint: str, *, sample: Path = SAMPLE, **changes: Any) -> dict[str, Any]:
    """The documentation's sample, for the gateway at `endpoint`."""
    config = json.loads(sample.read_text(encoding="utf-8"))
    # A machine that runs engine, gateway and tests on two cores answers late; the default is for one that does not.
    # And a tiny model may compute faster than such a machine loads.
    plain = {"endpoint": endpoint, "lookup_deadline_s": 10.0, "break_even": False}
    config["kv_connector_extra_config"].update({**plain, **changes})
    return config


def environment(work: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVGW", "VLLM"))}
    return {
        **kept,
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(work / "cache"),
        # What vLLM finds out about its own model classes, in fifteen seconds, it need not find out again.
        "VLLM_CACHE_ROOT": str(Path(PYTHON).parents[1] / ".cache"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Threads that spin while they wait slow everything down where other processes want the CPUs too.
        "OMP_WAIT_POLICY": "PASSIVE",
    }


class Engine:
    """An engine that a script drives; see vllm_process.py."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def ask(
        self,
        *prompts: Sequence[int],
        max_tokens: int = 16,
        cache_salt: str | None = None,
        lora: tuple[str, int, str] | None = None,
        pace_s: float = 0.0,
    ) -> list[list[int]]:
        """Greedy tokens after each of the prompts, which run at once.

        `lora`: an adapter's name, number and folder. `pace_s`: rest between the engine's steps, during which what is
        beside them goes on.
        """
        question = {"prompts": prompts, "max_tokens": max_tokens, "cache_salt": cache_salt, "lora": lora}
        answers = self._exchange({**question, "pace_s": pace_s})
        return [answer["tokens"] for answer in answers]

    def answer(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """The greedy tokens after one prompt, and the seconds to the first."""
        (answer,) = self._exchange({"prompts": [prompt], "max_tokens": max_tokens})
        return Answer(answer["tokens"], answer["ttft_s"])

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = self._exchange({"metrics": True})
        return found

    def external_hits(self) -> int:
        """Tokens that came from the gateway instead of being computed."""
        return int(self.metrics()["vllm:external_prefix_cache_hits"])

    def become(
        self, model: Path, transfer: dict[str, Any] | None, *, version: str | None = None, **options: Any
    ) -> None:
        """End the engine and start another one in the same process, which is faster. `version`: what it says it is."""
        assert self._exchange({"become": configuration(model, transfer, options), "version": version}) == "ready"

    def kill(self) -> None:
        """SIGKILL, at once."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def cpu_s(self) -> float:
        """CPU seconds of the process so far, in all its threads."""
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system

    def _exchange(self, question: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self.receive()

    def receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the engine ended:\n{self.log[-4000:]}"
        return json.loads(line)


def configuration(model: Path, transfer: dict[str, Any] | None, options: dict[str, Any]) -> dict[str, Any]:
    """What every engine is started with, and its `options`."""
    config = {"model": str(model), "dtype": "float32", "max_model_len": 4096, "enforce_eager": True, "block_size": 32}
    return config | {"skip_tokenizer_init": True, "kv_transfer_config": transfer} | options


@contextmanager
def engine(model: Path, work: Path, transfer: dict[str, Any] | None, **options: Any) -> Iterator[Engine]:
    """An engine in fp32 that is ready; its log is in `work`."""
    config = configuration(model, transfer, options)
    log = work / f"engine-{time.monotonic_ns()}.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [PYTHON, str(Path(__file__).with_name("vllm_process.py")), json.dumps(config)],
            env={
                **environment(work),
                **({"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if "tensor_parallel_size" in options else {}),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    with _ended(process):
        made = Engine(process, log)
        assert made.receive() == "ready"
        yield made


class Server:
    """vLLM's own server, in several processes as operators run it."""

    def __init__(self, url: str, log: Path) -> None:
        self._url = url
        self.log = log

    def answer(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """A greedy completion, streamed; the time to its first token is the caller's."""
        body = {"model": "m", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "stream": True}
        body |= {"return_token_ids": True, "ignore_eos": True}
        request = urllib.request.Request(
            f"{self._url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        started, first, tokens = time.perf_counter(), 0.0, []
        with urllib.request.urlopen(request, timeout=120) as reply:
            for line in reply:
                if line.startswith(b"data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    first = first or time.perf_counter() - started
                    tokens += choice["token_ids"]
        return Answer(tokens, first)

    def metric(self, name: str) -> float:
        """Sum of a metric's series."""
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=30) as reply:
            lines = reply.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


@contextmanager
def server(model: Path, work: Path, transfer: dict[str, Any] | None, *options: str) -> Iterator[Server]:
    """A server in fp32 that answers."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "m"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--block-size", "32"]
    command += ["--max-model-len", "4096", "--enforce-eager", *options]
    if transfer is not None:
        command += ["--kv-transfer-config", json.dumps(transfer)]
    log = work / f"server-{port}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=environment(work), stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    with _ended(process):
        made = Server(f"http://127.0.0.1:{port}", log)
        _wait(made, process, f"http://127.0.0.1:{port}/health")
        yield made


def _wait(made: Server, process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_S
    while True:
        assert process.poll() is None, f"the server ended:\n{made.log.read_text(errors='replace')[-4000:]}"
        assert time.monotonic() < deadline, f"the server is not ready:\n{made.log.read_text(errors='replace')[-4000:]}"
        with contextlib.suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.25)


@contextmanager
def _ended(process: subprocess.Popen[Any]) -> Iterator[None]:
    """End the process and everything that it started."""
    try:
        yield
    finally:
        if process.stdin is not None:
            process.stdin.close()
        else:
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
