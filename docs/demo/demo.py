"""The demo: two processes of a real language model share their KV cache through a gateway. No service is needed.

    python docs/demo/demo.py [--json FILE] [--out FOLDER]

Process A computes a long prompt with three questions and stores its KV; the gateway restarts; process B, which never
saw the prompt, answers the same questions with that KV. Exit codes: 0 every claim held · 1 one did not, or something
failed · 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import msgspec
from gateway import DemoGateway, GatewayFailed
from messages import Message, ReuseResult, Stage, StoreResult
from model import ModelUnavailable, default_cache, prepare_model
from plaintext import search
from plot import draw
from progress import LOG_COLUMNS, Progress
from report import Findings, as_json, show
from rich.console import Console

_HERE = Path(__file__).resolve().parent
_PROCESS_S = 300.0
"""An engine process that takes longer is ended: it hangs."""


class EngineFailed(Exception):
    """An engine process ended without its result."""


def run_engine(
    role: str, model: Path, gateway: DemoGateway, work: Path, progress: Progress
) -> StoreResult | ReuseResult:
    """Run an engine process to its end and return its result. Raises `EngineFailed` with what it printed."""
    command = [sys.executable, _HERE / "ask.py", role, model, gateway.endpoint, work]
    # Threads that spin while they wait for each other slow torch down tenfold where other processes want the CPUs too.
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    log = work / f"{role}.log"
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
        ) as process,
    ):
        watchdog = threading.Timer(_PROCESS_S, process.kill)
        watchdog.start()
        try:
            result = _follow(process, progress)
        finally:
            watchdog.cancel()
            process.kill()  # without effect on a process that has ended
    if result is None:
        raise EngineFailed(
            f"the process {role!r} ended without a result (exit code {process.returncode}):\n"
            + log.read_text(encoding="utf-8", errors="replace")
        )
    return result


def _follow(process: subprocess.Popen[bytes], progress: Progress) -> StoreResult | ReuseResult | None:
    """Show the stages that a process tells of, until its result."""
    assert process.stdout is not None
    for line in process.stdout:
        message: Message = msgspec.json.decode(line, type=Message)
        if not isinstance(message, Stage):
            return message if process.wait() == 0 else None
        progress.stage(message.text)
    process.wait()
    return None


def run_all(model: Path, scratch: Path, progress: Progress) -> Findings:
    """Everything between an empty folder and the findings."""
    work, data = scratch / "work", scratch / "data"
    work.mkdir()
    progress.stage("gateway: starts on an empty data folder")
    with DemoGateway(data, work / "gateway.log") as gateway:
        gateway.make_namespace("other")
        stored = run_engine("store", model, gateway, work, progress)
        assert isinstance(stored, StoreResult)
        progress.stage("gateway: stops")
        gateway.stop()
        progress.stage("search: looks for the KV in the gateway's files")
        searches = [search(work, data)]
        progress.stage("gateway: starts again")
        gateway.start()
        reused = run_engine("reuse", model, gateway, work, progress)
        assert isinstance(reused, ReuseResult)
    progress.stage("search: looks again, after the deletion")
    searches.append(search(work, data))
    return Findings(stored, reused, searches)


def main() -> int:
    """Run the demo; the exit code."""
    parser = argparse.ArgumentParser(description="Two processes of a language model share their KV through kvgw.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured to FILE")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", default=_HERE.parents[1] / "demo-out", help="for the picture"
    )
    options = parser.parse_args()
    # The end by SIGTERM takes the same way out as Ctrl-C, through every `with` block.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console(width=None if sys.stdout.isatty() else LOG_COLUMNS)
    progress = Progress(console)
    try:
        progress.stage("model: SmolLM2-135M-Instruct")
        model = prepare_model(default_cache())
        with tempfile.TemporaryDirectory(prefix="kvgw-demo-") as scratch:
            findings = run_all(model, Path(scratch), progress)
    except (EngineFailed, GatewayFailed, ModelUnavailable) as error:
        console.print(f"[bold red]demo:[/] {error}", highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; gateway and temporary files are gone")
        return 130
    show(console, findings)
    picture = options.out / "ttft.png"
    draw(findings, picture)
    console.print(f"picture: {picture}", highlight=False, soft_wrap=True)
    if options.json is not None:
        options.json.write_bytes(as_json(findings))
    return 0 if all(claim.held for claim in findings.claims()) else 1


if __name__ == "__main__":
    sys.exit(main())
