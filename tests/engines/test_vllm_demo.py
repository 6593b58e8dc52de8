"""`make demo-vllm`: its claims can fail, it says what is missing, it leaves nothing behind; and the whole of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from tests.engines import vllm_engine

DEMO = vllm_engine.ROOT / "docs" / "demo"
MODULES = ("corpus", "demo_vllm", "gateway", "model", "progress", "vllm_server")

STAND_IN = """#!/bin/sh
# An interpreter that has vLLM, and whose server never gets ready.
[ "$1" = -c ] && exit 0
echo $$ > "{folder}/server"
exec sleep 300
"""


@pytest.fixture
def demo() -> Iterator[ModuleType]:
    sys.path.insert(0, str(DEMO))
    import demo_vllm

    yield demo_vllm
    sys.path.remove(str(DEMO))
    for name in MODULES:
        sys.modules.pop(name, None)


def rows(demo: ModuleType, **second: Any) -> list[Any]:
    """Those of a run in which every claim held, but for the last question to the second server."""
    first, again = demo.Answer("A contributor …", 4.0, 1446), demo.Answer("A contributor …", 0.5, 1446)
    reused = second.pop("reused", 1280)
    return [
        demo.Row("?", first, again, 1280),
        demo.Row("?", first, again, 1280),
        demo.Row("?", first, replace(again, **second), reused),
    ]


@pytest.mark.parametrize(
    ("second", "failed"),
    [({}, ""), ({"reused": 1024}, "whole chunks"), ({"text": "A"}, "same text"), ({"ttft_s": 9.0}, "")],
)
def test_claims_can_fail(demo: ModuleType, second: dict[str, Any], failed: str) -> None:
    """One slow answer is no median."""
    found = rows(demo, **second)
    lost = [text for text, held in demo.claims(found).items() if not held]
    assert (len(lost) == 1 and failed in lost[0]) if failed else not lost
    assert json.loads(demo.as_json(found))["held"] is (not failed)


def test_the_claim_about_time_can_fail(demo: ModuleType) -> None:
    slow = [replace(row, second=replace(row.second, ttft_s=2.1)) for row in rows(demo)]
    assert [text for text, held in demo.claims(slow).items() if not held] == [
        "the time to the first token is at most half"
    ]


def run(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(DEMO / "demo_vllm.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(vllm_engine.ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def test_a_missing_environment_is_named(tmp_path: Path) -> None:
    with run("--python", str(tmp_path / "python")) as process:
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"there is no vLLM at {tmp_path / 'python'}" in said
    assert "make demo-vllm" in said


@pytest.mark.engine
@pytest.mark.parametrize("how", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_what_was_started_is_ended_when_it_is_interrupted(tmp_path: Path, how: signal.Signals) -> None:
    python = tmp_path / "python"
    python.write_text(STAND_IN.format(folder=tmp_path))
    python.chmod(0o700)
    with run("--python", str(python)) as process:
        deadline = time.monotonic() + 100
        while not (tmp_path / "server").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        below = psutil.Process(process.pid).children(recursive=True)
        assert len(below) >= 2, "a gateway and a server"
        process.send_signal(how)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert psutil.wait_procs(below, timeout=10)[1] == []


@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.skipif(not vllm_engine.PYTHON, reason="vLLM has an environment of its own: make test-engines")
def test_two_servers_share_long_prompts(tmp_path: Path) -> None:
    with run("--python", vllm_engine.PYTHON, "--json", str(tmp_path / "seen.json")) as process:
        said, _ = process.communicate(timeout=800)
    assert process.returncode == 0, said
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert [row["reused_tokens"] for row in seen["rows"]] == [1280] * 3
