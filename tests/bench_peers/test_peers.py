"""The parts of the peers' bench that need no peer: plan, rows, table, environments; and its end when interrupted."""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import signal
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from kvgw.bench.plan import KIB, MIB, Case, Limit, Sample
from tests.bench_peers.__main__ import main
from tests.bench_peers.contenders import About, drop_cached
from tests.bench_peers.environments import ROOT, Needs, PeerAbsent, prepare
from tests.bench_peers.others import NEEDS
from tests.bench_peers.peers import MODULES
from tests.bench_peers.plan import CASES, Report, Row, Step, schedule, turned
from tests.bench_peers.report import Figures, plot, rows, tables
from tests.bench_peers.run import ENVIRONMENTS, SYSTEMS, Run
from tests.kvgw.test_bench import environment, left_running, until

BIG = Case(4 * MIB, 16, 4, ("put", "get"))
MATCH = Case(4 * KIB, 64, 1, ("match64",))

LIMITS = {
    "copy": Limit(8.0, 8.0),
    "aes_256_gcm": Limit(5.0, 5.0),
    "blake3": Limit(4.0, 4.0),
    "unix_socket_send": Limit(4.0, 8.0),
    "unix_socket_receive": Limit(4.0, 4.0),
    "tcp_socket_send": Limit(2.0, 4.0),
    "tcp_socket_receive": Limit(2.0, 2.0),
    "odirect_write": Limit(2.0, 20.0),
    "odirect_read": Limit(1.0, 20.0),
}
TRIPS = {"unix": 10.0, "tcp": 20.0}

ABOUTS = {
    "kvgw-unix": About("kvgw", "0.1.0", "unix", "memory"),
    "kvgw-shm": About("kvgw", "0.1.0", "shm", "memory"),
    "peer": About("peer", "1.2", "tcp", "memory"),
    "kvgw-nvme": About("kvgw nvme", "0.1.0", "unix", "nvme"),
    "kvgw-nvme-shm": About("kvgw nvme", "0.1.0", "shm", "nvme"),
    "s3-tuned": About("aiobotocore tuned", "3.10.0", "http", "s3"),
}


def sample(
    gigabytes: float, seconds: float, server_cpu_s: float | None = 0.5, calls: tuple[float, ...] = (1.0,)
) -> Sample:
    return Sample(seconds, int(gigabytes * 1e9), calls, server_cpu_s, 0.25)


def made(figures: Figures) -> list[Row]:
    return rows(ABOUTS, figures, LIMITS, TRIPS)


def report(found: list[Row]) -> Report:
    machine: dict[str, str | int | float | list[float]] = {
        "cpu": "a CPU", "cpus": 2, "kernel": "6", "python": "3.11", "load_before": [0.1], "load_after": [1.0],
    }  # fmt: skip
    return Report(found, LIMITS, TRIPS, machine, [0.5], 3, 12.0, ["mooncake is absent: no such library"])


# The plan


def test_every_system_does_every_case_in_every_round_side_by_side() -> None:
    tiers = {"memory": ["a", "b", "c"], "s3": ["d"]}
    steps = list(schedule(2, tiers))
    assert [step for step in steps if isinstance(step, int)] == [0, 1, 2], "the machine is measured after each round"
    done = [(step.round, step.case, step.system) for step in steps if isinstance(step, Step)]
    assert len(set(done)) == len(done)
    assert set(done) == {
        (number, case, system)
        for number in range(3)
        for tier, systems in tiers.items()
        for case in CASES[tier]
        for system in systems
    }
    changes = sum(then[:2] != now[:2] for then, now in pairwise(done))
    assert changes == 3 * 4 - 1, "a case is over before the next begins"


def test_each_system_comes_first_and_last_at_some_time() -> None:
    orders = [turned(["a", "b", "c"], number) for number in range(6)]
    assert {order[0] for order in orders} == {order[-1] for order in orders} == {"a", "b", "c"}
    assert orders[1] == orders[0][::-1]
    assert turned([], 3) == []


# Rows


def test_a_row_is_the_median_of_its_rounds_and_a_share_of_its_limit() -> None:
    calls = tuple(float(number) for number in range(1, 101))
    figures: Figures = {
        ("kvgw-unix", "put", BIG): [sample(1, 1, calls=calls), sample(1, 0.25, calls=()), sample(1, 0.5, calls=())]
    }
    (row,) = made(figures)
    assert (row.system, row.version, row.transport, row.tier, row.rounds) == ("kvgw", "0.1.0", "unix", "memory", 3)
    assert (row.gb_per_s, row.limit, row.limit_share) == (2.0, "unix_socket_send", 0.5)
    assert (row.p50_us, row.p99_us, row.calls) == (50.0, 99.0, 100)
    assert row.gateway_cpu_s_per_gb == pytest.approx(0.5)
    assert row.client_cpu_s_per_gb == pytest.approx(0.25)
    assert row.cpu_share == pytest.approx((1 / 4 + 1 / 4 + 1 / 5) / 0.5), "receive, hash, seal"


@pytest.mark.parametrize(
    ("name", "op", "limit", "share"),
    [
        ("peer", "get", "tcp_socket_send", 0.5),
        ("kvgw-shm", "get", "copy", 0.125),
        ("kvgw-nvme", "put", "odirect_write", 0.5),
        ("kvgw-nvme", "get", "odirect_read", 1.0),
        ("kvgw-nvme-shm", "get", "odirect_read", 1.0),
        ("s3-tuned", "put", "tcp_socket_send", 0.5),
    ],
)
def test_each_kind_of_row_has_its_own_limit(name: str, op: str, limit: str, share: float) -> None:
    (row,) = made({(name, op, BIG): [sample(1, 1)]})
    assert (row.limit, row.limit_share) == (limit, share)


def test_match64_moves_nothing_and_is_held_against_a_round_trip() -> None:
    (row,) = made({("peer", "match64", MATCH): [sample(0, 1, calls=(40.0, 40.0))]})
    assert (row.chunk_bytes, row.batch, row.gb_per_s, row.p50_us) == (0, 64, None, 40.0)
    assert (row.limit, row.limit_share) == ("tcp", 0.5)
    assert (row.gateway_cpu_s_per_gb, row.client_cpu_s_per_gb, row.cpu_share) == (None, None, None)


def test_without_a_server_of_its_own_or_a_limit_a_figure_is_absent() -> None:
    (row,) = rows(ABOUTS, {("kvgw-nvme", "get", BIG): [sample(1, 1, None)]},
                  {name: one for name, one in LIMITS.items() if "odirect" not in name}, TRIPS)  # fmt: skip
    assert (row.gateway_cpu_s_per_gb, row.cpu_share, row.limit, row.limit_share) == (None, None, None, None)


def test_rows_answer_one_question_after_the_other_the_fastest_first() -> None:
    figures: Figures = {
        ("s3-tuned", "put", BIG): [sample(1, 1)],
        ("peer", "match64", MATCH): [sample(0, 1, calls=(9.0,))],
        ("peer", "get", BIG): [sample(1, 1)],
        ("kvgw-unix", "get", BIG): [sample(1, 0.5)],
        ("kvgw-unix", "put", BIG): [sample(1, 1)],
    }
    assert [(row.tier, row.op, row.system) for row in made(figures)] == [
        ("memory", "put", "kvgw"), ("memory", "get", "kvgw"), ("memory", "get", "peer"),
        ("memory", "match64", "peer"), ("s3", "put", "aiobotocore tuned"),
    ]  # fmt: skip


def test_the_json_has_what_its_readers_rely_on() -> None:
    found = made({("peer", "get", BIG): [sample(1, 1)]})
    told = msgspec.json.decode(msgspec.json.encode(report(found)))
    assert {"rows", "limits", "round_trips_us", "machine", "load_by_round", "notes"} <= told.keys()
    assert {
        "system", "version", "op", "transport", "chunk_bytes", "batch", "gb_per_s", "p50_us", "p99_us",
        "gateway_cpu_s_per_gb", "client_cpu_s_per_gb", "limit_share",
    } <= told["rows"][0].keys()  # fmt: skip
    assert told["limits"]["copy"] == {"gb_per_s": 8.0, "gb_per_cpu_s": 8.0}


def test_the_table_fits_a_terminal_and_names_every_row() -> None:
    figures: Figures = {(name, "get", BIG): [sample(1, 1, calls=(2.5e6, 900.0))] for name in ABOUTS}
    lines = tables(report(made(figures)))
    assert max(map(len, lines)) <= 80
    for about in ABOUTS.values():
        assert any(one.startswith(about.system) and about.transport in one for one in lines)
    (peer,) = [one for one in lines if one.startswith("peer ")]
    assert peer.split() == ["peer", "tcp", "1.00", "900", "µs", "2.5", "s", "50%", "0.50", "–", "0.25", "50%"]


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    figures: Figures = {(name, "get", BIG): [sample(1, 1)] for name in ABOUTS}
    figures["peer", "match64", MATCH] = [sample(0, 1)]
    plot(report(made(figures)), tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert drawn.startswith("<?xml")


# What is absent


def test_a_system_that_fails_is_absent_and_its_reason_is_told(tmp_path: Path) -> None:
    run = Run(abouts=ABOUTS, figures={("peer", "get", BIG): [sample(1, 1)], ("kvgw-unix", "get", BIG): [sample(1, 1)]})
    (tmp_path / "server.log").write_text("out of\nmemory")
    run.drop("peer", RuntimeError("it went away"), tmp_path)
    assert [row.system for row in made(run.figures)] == ["kvgw"]
    assert run.notes == ["peer is absent: it went away; its logs end: out of memory"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with the lock of a peer, and an environment whose pip says what it is asked and does nothing."""
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "bench-peer.lock").write_text("peer==1.2\n")
    (tmp_path / ".venv-bench-peer" / "lib" / "python3" / "site-packages").mkdir(parents=True)
    (tmp_path / ".venv-bench-peer" / "bin").mkdir()
    pretend(tmp_path, 'echo "$@" >> "$0.asked"')
    return tmp_path


def pretend(checkout: Path, does: str) -> None:
    python = checkout / ".venv-bench-peer" / "bin" / "python"
    python.write_text(f"#!/bin/sh\n{does}\n")
    python.chmod(0o700)


def asked(checkout: Path) -> list[str]:
    return (checkout / ".venv-bench-peer" / "bin" / "python.asked").read_text().splitlines()


def test_an_environment_is_built_once_and_again_when_its_lock_changes(checkout: Path) -> None:
    assert prepare(Needs("peer"), checkout).python == checkout / ".venv-bench-peer" / "bin" / "python"
    prepare(Needs("peer"), checkout)
    assert len(asked(checkout)) == 1
    assert asked(checkout)[0].endswith(f"--no-deps -r {checkout / 'requirements' / 'bench-peer.lock'}")
    stamp = checkout / ".venv-bench-peer" / ".installed"
    os.utime(stamp, (1, 1))
    prepare(Needs("peer"), checkout)
    assert len(asked(checkout)) == 2


def test_a_peer_that_cannot_be_installed_says_so_and_is_tried_again(checkout: Path) -> None:
    pretend(checkout, "echo first >&2; echo no matching distribution >&2; exit 1")
    for _ in range(2):
        with pytest.raises(PeerAbsent, match="ended with 1; it said: no matching distribution"):
            prepare(Needs("peer"), checkout)


def test_without_packages_to_fetch_a_program_is_absent(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(checkout))
    with pytest.raises(PeerAbsent, match="no apt-get to fetch some-package with"):
        prepare(Needs("peer", program="no-such-program", packages=("some-package",)), checkout)


def test_a_file_leaves_the_page_cache(tmp_path: Path) -> None:
    """Whether it was there is seen through a mapping that touches nothing (mincore)."""
    file = tmp_path / "inner" / "blob"
    file.parent.mkdir()
    file.write_bytes(bytes(MIB))
    with file.open("r+b") as opened:
        os.fsync(opened)
        assert cached_pages(opened.fileno()) == MIB // mmap.PAGESIZE
        drop_cached(tmp_path)
        assert cached_pages(opened.fileno()) == 0


def cached_pages(fd: int) -> int:
    size = os.fstat(fd).st_size
    with mmap.mmap(fd, size) as mapped:
        pages = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(mapped)
        failed = ctypes.CDLL(None, use_errno=True).mincore(ctypes.byref(start), ctypes.c_size_t(size), pages)
        del start  # a mapping that something points into cannot be closed
    assert not failed, os.strerror(ctypes.get_errno())
    return sum(one & 1 for one in pages)


# The command


def test_it_needs_a_round(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--rounds", "0"])
    assert "--rounds is at least 1, not 0" in capsys.readouterr().err


def test_names_are_systems_of_one_tier_each() -> None:
    names = [name for systems in SYSTEMS.values() for name in systems]
    assert len(set(names)) == len(names)
    stores = {"redis", "lmcache", "mooncake", "memcached", "s3-tuned", "s3-default", "s3-obstore"}
    assert {"kvgw-unix", "kvgw-tcp", *stores} <= set(names)


def test_every_peer_has_a_client_and_a_lock_where_it_has_an_environment() -> None:
    peers = {name for names in SYSTEMS.values() for name in names if not name.startswith("kvgw-")}
    assert set(MODULES) == peers
    assert all(importlib.util.find_spec(module) for module in MODULES.values())
    assert set(ENVIRONMENTS) <= peers
    assert set(ENVIRONMENTS.values()) == set(NEEDS)
    for name, needs in NEEDS.items():
        assert needs.peer == name
        assert (ROOT / "requirements" / f"bench-{name}.lock").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_nothing_running(ending: signal.Signals) -> None:
    with tempfile.TemporaryDirectory(prefix="kvgw-") as folder:
        world = Path(folder)
        command = [sys.executable, "-m", "tests.bench_peers", "--rounds", "1000", "--only", "kvgw-nvme", "s3-default"]
        run = subprocess.Popen(command, env=environment(world), stdout=subprocess.DEVNULL)
        try:
            until(lambda: run.poll() is not None or any("tier_client" in line for line in left_running(world)))
            run.send_signal(ending)
            assert run.wait(60) == 130
        finally:
            run.kill()
            run.wait()
        assert left_running(world) == []
        assert list(world.iterdir()) == []
