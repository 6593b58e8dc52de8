"""`kvgw bench`: a tiny run end to end, and its parts by themselves."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvgw.bench.content import Content
from kvgw.bench.gateway import GatewayAnnounced, peer_pid
from kvgw.bench.plan import MIB, BenchError, Case, Limit, Options, Report, Sample
from kvgw.bench.processes import child, cpu_seconds
from kvgw.bench.protocol import Done
from kvgw.bench.redis import find_redis
from kvgw.bench.report import median_limits, percentile, rows
from kvgw.bench.resp import AHEAD_BYTES, Resp
from kvgw.model import Durability
from tests.support.aio import aio

COMMAND = [sys.executable, "-c", "from kvgw.cli import main; main()", "bench"]
TINY = ["--chunk-bytes", "65536", "--batch", "4", "--rounds", "2", "--round-bytes", "524288"]

needs_redis = pytest.mark.skipif(find_redis() is None, reason="redis-server is not installed")


def environment(folder: Path) -> dict[str, str]:
    """A world in which whatever the bench leaves behind is in `folder`, and its processes can be told by it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVGW")}
    return kept | {"TMPDIR": str(folder)}


def left_running(folder: Path) -> list[str]:
    """Processes whose environment points into `folder`, by command line."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if f"TMPDIR={folder}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # no process, not ours, or gone meanwhile
    return found


def bench(folder: Path, *options: str, **variables: str) -> tuple[Report, str]:
    """Run the command; the report that it wrote and what it printed."""
    file = folder / "report.json"
    world = folder / "tmp"
    world.mkdir()
    command = [*COMMAND, *TINY, "--json", str(file), *options]
    run = subprocess.run(
        command, env=environment(world) | variables, capture_output=True, text=True, timeout=100, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert left_running(world) == []
    assert list(world.iterdir()) == [], "the temporary data folder is gone"
    return msgspec.json.decode(file.read_bytes(), type=Report, strict=True), run.stdout


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder for a run. pytest's own is so long under xdist that a socket's path below it does not fit."""
    with tempfile.TemporaryDirectory(prefix="kvgw-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def tiny() -> tuple[Report, str]:
    """One run for several tests, since starting its processes takes seconds: two clients, and no Redis to be found."""
    with tempfile.TemporaryDirectory(prefix="kvgw-") as folder:
        return bench(Path(folder), "--clients", "2", "--namespaces", "2", PATH=folder)


def test_a_tiny_run(tiny: tuple[Report, str]) -> None:
    report, printed = tiny
    assert [(row.op, row.chunk_bytes, row.batch) for row in report.rows] == [
        ("put", 65536, 4),
        ("get", 65536, 4),
        ("match64", 0, 64),
    ]
    for row in report.rows:
        assert (row.system, row.transport, row.clients, row.rounds) == ("kvgw", "unix", 2, 2)
        assert 0 < row.p50_us <= row.p99_us
        assert row.client_cpu_us_per_call > 0
        assert row.gateway_cpu_us_per_call is not None
        assert row.gateway_cpu_us_per_call > 0
    put, get, match = report.rows
    for moving in (put, get):
        assert moving.calls == 2 * 2 * 2, "rounds, clients, calls"
        for figure in (moving.gb_per_s, moving.gateway_cpu_s_per_gb, moving.client_cpu_s_per_gb, moving.cpu_share):
            assert figure is not None
            assert figure > 0
    assert (match.gb_per_s, match.gateway_cpu_s_per_gb, match.socket_share) == (None, None, None)
    assert set(report.limits) == {"copy", "aes_256_gcm", "blake3", "unix_socket_send", "unix_socket_receive"}
    assert all(one.gb_per_s > 0 and one.gb_per_cpu_s > 0 for one in report.limits.values())
    assert {"cpu", "cpus", "kernel", "python", "load_before", "load_after"} <= set(report.machine)
    assert "token" not in report.options
    assert "match64" in printed
    assert "load average" in printed


def test_without_redis_it_says_so(tiny: tuple[Report, str]) -> None:
    report, printed = tiny
    assert report.notes == ["redis: not measured: redis-server is not installed"]
    assert report.notes[0] in printed


@pytest.mark.slow
def test_a_run_over_shared_memory_moves_nothing_through_the_socket(short: Path) -> None:
    report, printed = bench(short, "--transport", "shm", "--rounds", "1", PATH=str(short))
    assert [(row.op, row.transport) for row in report.rows] == [("put", "shm"), ("get", "shm"), ("match64", "shm")]
    for row in report.rows[:2]:
        assert row.socket_share is not None, "of what a Unix socket moves"
        assert row.cpu_share is not None
    assert "transport shm" in printed


@pytest.mark.slow
@needs_redis
def test_redis_in_the_same_rounds_over_tcp(short: Path) -> None:
    report, printed = bench(short, "--redis", "--transport", "tcp", "--rounds", "1")
    systems = [(row.op, row.system, row.transport) for row in report.rows]
    assert systems == [(op, system, "tcp") for op in ("put", "get", "match64") for system in ("kvgw", "redis")]
    assert "× redis" in printed


@contextlib.contextmanager
def running(world: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A long run whose clients are there; killed at the end."""
    command = [*COMMAND, *TINY, "--rounds", "1000", *options]
    run = subprocess.Popen(command, env=environment(world), stdout=subprocess.DEVNULL)
    try:
        until(lambda: run.poll() is not None or any("kvgw.bench.worker" in line for line in left_running(world)))
        assert run.returncode is None, "it ended by itself"
        yield run
    finally:
        run.kill()
        run.wait()


# What both do differs in one line, that SIGTERM is taken for Ctrl-C: the ordinary run tries the one that needs it.
@pytest.mark.parametrize("ending", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_interrupted_it_leaves_nothing_running(short: Path, ending: signal.Signals) -> None:
    with running(short) as run:
        run.send_signal(ending)
        assert run.wait(30) == 130
    assert left_running(short) == []
    assert list(short.iterdir()) == []


def test_killed_its_gateway_and_clients_end_themselves(short: Path) -> None:
    with running(short, "--no-redis"):
        pass
    until(lambda: left_running(short) == [])


def until(reached: Callable[[], bool], within_s: float = 40.0) -> None:
    deadline = time.monotonic() + within_s
    while not reached():
        assert time.monotonic() < deadline, f"not reached within {within_s} s"
        time.sleep(0.05)


# Options


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"clients": 0}, "--clients"),
        ({"chunk_bytes": (0,)}, "--chunk-bytes"),
        ({"chunk_bytes": ()}, "--chunk-bytes"),
        ({"batch": 4097}, "--batch"),
        ({"namespaces": 2}, "--namespaces"),
        ({"round_bytes": 0}, "--round-bytes"),
        ({"durability": Durability.S3}, "--endpoint"),
    ],
)
def test_options_that_cannot_be_name_themselves(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(BenchError, match=named):
        Options(**wrong)


def test_cases_follow_the_lengths() -> None:
    options = Options(chunk_bytes=(4 * MIB, 65536, 4 * MIB))
    assert options.cases() == (
        Case(4 * MIB, 16, 4, ("put", "get")),
        Case(65536, 64, 32, ("put", "get")),
        Case(4096, 64, 1, ("match64",)),
    )
    assert Options(chunk_bytes=(64 * MIB,), batch=8).cases()[0].calls == 1, "a round has at least one call"


def test_an_own_gateway_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    run = subprocess.run(
        [*COMMAND, "--no-redis", "--round-bytes", str(2**40), "--batch", "4096", "--clients", "64"],
        env=environment(tmp_path), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert run.returncode == 1
    assert "MiB of staging" in run.stderr
    assert "--round-bytes" in run.stderr


# Content


def test_content_is_new_in_each_round_and_checked() -> None:
    content = Content(memoryview(bytearray(4 * 100)), memoryview(bytearray(2 * 100)))
    content.renew(100, 2, 2)
    first = [bytes(chunk) for chunks in content.chunks for chunk in chunks]
    content.renew(100, 2, 2)
    second = [bytes(chunk) for chunks in content.chunks for chunk in chunks]
    assert len({*first, *second}) == 8, "no chunk is like another"
    with pytest.raises(BenchError, match="other bytes"):
        content.check()
    for target, chunk in zip(content.into, content.chunks[-1], strict=True):
        target[:] = chunk
    content.check()
    content.into[1][99] ^= 1
    with pytest.raises(BenchError, match="chunk 1 of 2"):
        content.check()


# The raw Redis client


@contextlib.contextmanager
def answering(pieces: Sequence[bytes]) -> Iterator[tuple[Resp, bytearray]]:
    """A client whose server sends `pieces`, whatever it is asked; and what it was sent, whole when this is left."""
    ours, theirs = socket.socketpair()
    received = bytearray()

    def serve() -> None:
        with theirs, contextlib.suppress(ConnectionError):  # a client that has seen enough may leave early
            for piece in pieces:
                theirs.sendall(piece)
            theirs.shutdown(socket.SHUT_WR)
            while data := theirs.recv(65536):
                received.extend(data)

    thread = threading.Thread(target=serve)
    thread.start()
    client = Resp(ours)
    try:
        yield client, received
    finally:
        client.close()
        thread.join()


VALUES = (b"a" * 5, b"\r\n$3\r\n" * 40, bytes(range(256)) * 300)
MGET = b"*3\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(value), value) for value in VALUES)


@pytest.mark.parametrize("step", [1, 2, 7, AHEAD_BYTES, 100, 10**6])
def test_values_arrive_however_they_are_cut(step: int) -> None:
    sent = MGET + b"+OK\r\n"
    cut = min(len(sent), 400 * step)  # the rest in one piece: thousands of small ones are slow
    pieces = [sent[at : min(cut, at + step)] for at in range(0, cut, step)]
    if cut < len(sent):
        pieces.append(sent[cut:])
    buffers = [bytearray(len(value)) for value in VALUES]
    with answering(pieces) as (client, received):
        assert client.get_many([b"k1", b"k22", b"k"], [memoryview(one) for one in buffers]) == 3
        client._expect(b"+OK")
    assert [bytes(one) for one in buffers] == list(VALUES)
    assert received == b"*4\r\n$4\r\nMGET\r\n$2\r\nk1\r\n$3\r\nk22\r\n$1\r\nk\r\n"


def test_a_missing_value_is_counted_and_its_buffer_left_alone() -> None:
    buffers = [bytearray(b"xxx"), bytearray(b"xxx")]
    with answering([b"*2\r\n$-1\r\n$3\r\nabc\r\n"]) as (client, _):
        assert client.get_many([b"a", b"b"], [memoryview(one) for one in buffers]) == 1
    assert buffers == [b"xxx", b"abc"]


def test_values_are_sent_in_one_pipeline() -> None:
    count = 700  # more pieces than the kernel takes at once
    values = [memoryview(os.urandom(1000)) for _ in range(count)]
    keys = [b"key-%d" % index for index in range(count)]
    with answering([b"+OK\r\n" * count]) as (client, received):
        client.set_many(keys, values)
    assert received == b"".join(
        b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$1000\r\n%b\r\n" % (len(key), key, value)
        for key, value in zip(keys, values, strict=True)
    )


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"-ERR no memory\r\n", "no memory"),
        (b"*2\r\n", "belongs"),
        (b"*1\r\n$4\r\nabcd\r\n", "4 bytes where 3"),
        (b"*1\r\n$x\r\n", "a number belong"),
        (b"*1\r\n$3\r\nabcXY", "closed|belongs"),
        (b"y" * 100, "without end"),
        (b"", "closed"),
    ],
)
def test_what_is_no_answer_is_an_error(answer: bytes, said: str) -> None:
    with answering([answer]) as (client, _), pytest.raises(BenchError, match=said):
        client.get_many([b"k"], [memoryview(bytearray(3))])


def test_numbers_and_the_version() -> None:
    info = b"# Server\r\nredis_version:7.0.15\r\nredis_mode:standalone\r\n"
    with answering([b":2\r\n:64\r\n", b"$%d\r\n%b\r\n" % (len(info), info)]) as (client, _):
        assert client.delete([b"a", b"b"]) == 2
        assert client.exists([b"k"] * 64) == 64
        assert client.version() == "7.0.15"


# CPU time, child processes, rows


def test_cpu_time_of_another_process_with_ended_threads() -> None:
    burn = (
        "import threading, time, sys\n"
        "def burn():\n"
        "    while time.thread_time() < 0.15: pass\n"
        "threads = [threading.Thread(target=burn) for _ in range(2)]\n"
        "for one in threads: one.start()\n"
        "for one in threads: one.join()\n"
        "print(time.process_time(), flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        own = float(process.stdout.readline())
        assert own >= 0.3
        assert cpu_seconds(process.pid) == pytest.approx(own, abs=0.05)
        process.communicate()
    with pytest.raises(BenchError, match=f"process {process.pid} cannot be read"):
        cpu_seconds(process.pid)


def test_own_cpu_time() -> None:
    assert cpu_seconds(os.getpid()) == pytest.approx(time.process_time(), abs=0.05)


def test_the_process_behind_a_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with pytest.raises(BenchError, match="no gateway answers"):
        peer_pid(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        assert peer_pid(path) == os.getpid()


@aio
async def test_a_child_that_fails_or_is_silent_is_named() -> None:
    async with child("client 7", "kvgw.bench.worker") as process:
        with pytest.raises(BenchError, match=r"client 7 .* did not answer within"):
            await process.hear(Done, 0.01)
        process.tell(GatewayAnnounced("no command", None))
        with pytest.raises(BenchError, match=r"client 7 .* ended with exit code 1"):
            await process.hear(Done, 20)
    async with child("client 8", "kvgw.bench.worker") as process:
        pid = process.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_rows_are_medians_shares_and_sums() -> None:
    options = Options(chunk_bytes=(10**6,), batch=10)
    case = Case(10**6, 10, 1, ("put", "get"))
    samples = [
        Sample(seconds, 10**9, (seconds * 1e6,) * 2, server, 0.25, later)
        for seconds, server, later in ((1.0, 0.5, 0.1), (0.5, 0.7, 0.3), (2.0, 0.6, 0.2))
    ]
    limit = Limit(4.0, 5.0)
    limits = dict.fromkeys(("unix_socket_receive", "unix_socket_send", "blake3", "aes_256_gcm"), limit)
    (row,) = rows(options, {"kvgw": "1"}, {("kvgw", "put", case): samples}, limits)
    assert (row.gb_per_s, row.p50_us, row.p99_us, row.calls) == (1.0, 1e6, 2e6, 6)
    assert row.gateway_cpu_s_per_gb == pytest.approx(0.6)
    assert row.later_cpu_s_per_gb == pytest.approx(0.2)
    assert row.client_cpu_s_per_gb == pytest.approx(0.25)
    assert row.gateway_cpu_us_per_call == pytest.approx(300_000)
    assert row.socket_share == pytest.approx(0.25)
    assert row.cpu_share == pytest.approx(1.0), "three blocks of 0.2 CPU-s/GB each over 0.6"


def test_unknown_cpu_time_is_none_and_not_zero() -> None:
    options = Options(chunk_bytes=(10**6,), batch=10)
    case = Case(10**6, 10, 1, ("get",))
    limits = dict.fromkeys(("unix_socket_send", "aes_256_gcm"), Limit(1.0, 1.0))
    (row,) = rows(options, {"kvgw": "1"}, {("kvgw", "get", case): [Sample(1.0, 10**9, (1.0,), None, 0.1)]}, limits)
    assert (row.gateway_cpu_s_per_gb, row.gateway_cpu_us_per_call, row.later_cpu_s_per_gb) == (None, None, None)
    assert row.cpu_share is None
    assert json.loads(msgspec.json.encode(row))["gateway_cpu_s_per_gb"] is None


def test_percentiles_and_medians() -> None:
    values = [float(number) for number in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile([7.0], 0.99)) == (50.0, 99.0, 7.0)
    measured = [{"copy": Limit(speed, 2 * speed)} for speed in (3.0, 1.0, 2.0)]
    assert median_limits(measured) == {"copy": Limit(2.0, 4.0)}


def test_the_worker_ends_with_its_input() -> None:
    run = subprocess.run([sys.executable, "-m", "kvgw.bench.worker"], stdin=subprocess.DEVNULL, timeout=30, check=False)
    assert run.returncode == 0


def test_no_gateway_at_the_endpoint_is_said(tmp_path: Path) -> None:
    world = tmp_path / "tmp"
    world.mkdir()
    run = subprocess.run(
        [*COMMAND, *TINY, "--endpoint", f"unix:{tmp_path}/nobody"],
        env=environment(world), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert run.returncode == 1
    assert "no gateway answers" in run.stderr
    assert left_running(world) == []
