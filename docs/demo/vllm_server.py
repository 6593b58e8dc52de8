"""A vLLM of its own for the demo: the OpenAI-compatible server, with kvgw's connector, in vLLM's own environment."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-engines" / "bin" / "python"
"""What `make demo-vllm` builds."""
_SAMPLE = ROOT / "docs" / "engines" / "vllm-kv-transfer.json"
_START_S = 300.0
_STOP_S = 30.0
_ANSWER_S = 120.0
_WARM_UP = "Say hello."


class VllmFailed(Exception):
    """The server's environment is missing, or its process ended, did not get ready or did not answer."""


@dataclass(frozen=True)
class Answer:
    """One streamed answer. `ttft_s`: seconds from the request to the first of its text."""

    text: str
    ttft_s: float
    prompt_tokens: int


class VllmServer:
    """Starts with its ``with`` block, and ends with it, whatever happens inside."""

    def __init__(self, python: Path, model: Path, endpoint: str, cache: Path, log: Path) -> None:
        self._command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        self._config = _transfer_config(endpoint, cache)
        self._cache = cache
        self._log = log
        self._url = ""
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> VllmServer:
        try:
            self._start()
            self.ask(_WARM_UP, tokens=2)  # the kernels' first call is slower; too short for a chunk
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def ask(self, content: str, tokens: int) -> Answer:
        """A greedy answer to a user who says `content`. Raises `VllmFailed`."""
        body = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": tokens}
        body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        request = urllib.request.Request(
            f"{self._url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        started, first, text, prompt_tokens = time.perf_counter(), 0.0, "", 0
        try:
            for event in _events(request):
                piece = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
                first = first or (time.perf_counter() - started if piece else 0.0)
                text += piece
                prompt_tokens = (event.get("usage") or {}).get("prompt_tokens", prompt_tokens)
        except OSError as error:
            raise VllmFailed(f"vLLM did not answer: {error}\n{self._tail()}") from error
        return Answer(text, first, prompt_tokens)

    def stored(self, tokens: int) -> bool:
        """Wait until the connector has stored `tokens` tokens; whether it has, within a minute."""
        deadline = time.monotonic() + 60
        while self.metric("vllm:kvgw_tokens_stored_total") < tokens:
            if time.monotonic() > deadline:
                return False
            self.ask(_WARM_UP, tokens=1)  # vLLM collects its connector's counters with the steps of the model
        return True

    def metric(self, name: str) -> int:
        """Sum of a metric's series. Raises `VllmFailed`."""
        try:
            with urllib.request.urlopen(f"{self._url}/metrics", timeout=_ANSWER_S) as reply:
                lines = reply.read().decode().splitlines()
        except OSError as error:
            raise VllmFailed(f"vLLM does not show its metrics: {error}\n{self._tail()}") from error
        return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} "))))

    def _start(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        command = [*self._command, "--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--dtype", "float32", "--block-size", "32", "--max-model-len", "4096", "--enforce-eager"]
        command += ["--kv-transfer-config", json.dumps(self._config)]
        with self._log.open("ab") as log:
            # A session of its own: Ctrl-C in the terminal is for the demo, which then ends the server in order.
            self._process = subprocess.Popen(
                command,
                env=_environment(self._cache),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_S
        while not self._answers():
            if self._process.poll() is not None:
                raise VllmFailed(f"vLLM ended with exit code {self._process.returncode}:\n{self._tail()}")
            if time.monotonic() > deadline:
                raise VllmFailed(f"vLLM was not ready after {_START_S:g} s:\n{self._tail()}")
            time.sleep(0.2)

    def _stop(self) -> None:
        """End the server and the processes that it started: politely, then not."""
        if self._process is None:
            return
        try:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/health", timeout=5):
                return True
        except OSError:
            return False

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])


def check_environment(python: Path) -> None:
    """Raise `VllmFailed`, saying what to do, unless `python` is an interpreter that has vLLM."""
    looked = [python, "-c", "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"]
    found = python.is_file() and subprocess.run(looked, check=False, capture_output=True).returncode == 0
    if not found:
        raise VllmFailed(
            f"there is no vLLM at {python}. `make demo-vllm` builds its environment, about 2.5 GB; --python names the "
            "interpreter of another one, which also needs the packages blake3 and msgspec"
        )


def _events(request: urllib.request.Request) -> Iterator[dict[str, Any]]:
    with urllib.request.urlopen(request, timeout=_ANSWER_S) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


def _transfer_config(endpoint: str, cache: Path) -> dict[str, Any]:
    """The documentation's sample, for this gateway."""
    config: dict[str, Any] = json.loads(_SAMPLE.read_text(encoding="utf-8"))
    # Patient: engine and gateway share the cores of one machine here.
    config["kv_connector_extra_config"] |= {
        "endpoint": endpoint,
        "lookup_deadline_s": 10.0,
        "digest_dir": str(cache / "digests"),
    }
    return config


def _environment(cache: Path) -> dict[str, str]:
    """This process's environment, without settings for other gateways and engines."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVGW", "VLLM"))}
    return kept | {
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # Threads that spin while they wait slow everything down where other processes want the CPUs too.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
