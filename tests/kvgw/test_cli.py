"""The commands as an operator meets them: a process, its output, its exit code, and one sentence when it refuses."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from tests.support.served import SERVICE_LINKS, Served, answer, command, environment, kvgw, served

ONE_SENTENCE_MAX = 600


def refused(run: subprocess.CompletedProcess[str], code: int = 1) -> str:
    """The sentence of a refusal: on standard error, without a trace."""
    assert run.returncode == code, run.stdout + run.stderr
    assert "Traceback" not in run.stderr
    sentence = run.stderr.strip().splitlines()[-1]
    assert sentence.startswith("kvgw: ")
    assert len(sentence) < ONE_SENTENCE_MAX
    return sentence


def listening_addresses(running: Served) -> set[tuple[str, int]]:
    connections = psutil.Process(running.process.pid).net_connections("inet")
    return {(one.laddr.ip, one.laddr.port) for one in connections if one.status == psutil.CONN_LISTEN}


@pytest.mark.timeout(180)
def test_a_first_start_and_what_an_operator_asks_next(tmp_path: Path) -> None:
    data = ("--data", str(tmp_path / "gw"))
    with served(tmp_path / "gw", **SERVICE_LINKS) as running:
        assert running.token
        assert running.printed.count("kvgw_") == 1, "the token is shown once"
        assert listening_addresses(running) == {("127.0.0.1", int(running.http.rpartition(":")[2]))}, "F07"
        status = answer("status", *data)
        assert (status["ready"], status["catalog"], status["root_key"]) == (True, "ok", "ok")
        assert [tier["tier"] for tier in status["tiers"]] == ["nvme"]
        made = answer("namespace", "create", "team-a", "--limit-bytes", "1000000", "--ttl", "60s", *data)
        assert (made["name"], made["limit_bytes"], made["default_ttl"]) == ("team-a", 1000000, "1m")
        listed = answer("namespace", "list", *data)
        assert [one["name"] for one in listed] == ["default", "team-a"]
        assert [one["usage"]["stored_bytes"] for one in answer("stats", *data)["namespaces"]] == [0, 0]
        keys = sorted((tmp_path / "gw" / "keys").rglob("*"))
        for name in ("team-a", "..", "A", "a/b", "%2e%2e%2f", "x" * 4096, "\u202etxt", ""):
            assert "cannot be" in (sentence := refused(kvgw("namespace", "create", name, *data))) or "name" in sentence
        assert sorted((tmp_path / "gw" / "keys").rglob("*")) == keys, "F02: no file for a refusal"
        for text in (
            kvgw("status", *data).stdout,
            kvgw("stats", *data).stdout,
            kvgw("namespace", "list", *data).stdout,
        ):
            assert "default" in text or "ready" in text
        findings = answer("doctor", *data)
        assert {one["verdict"] for one in findings} <= {"good", "note"}
        assert any("in use by process" in one["what"] for one in findings)
        assert "in use by process" in refused(kvgw("serve", *data))
        assert "in use by process" in refused(kvgw("migrate", *data)), "the gateway's folder is its own"
        assert running.token not in (tmp_path / "gw" / "catalog.db").read_bytes().decode("latin-1")
        assert running.stop() == 0
        complaints = running.complaints()
        assert complaints.count("service link") == len(SERVICE_LINKS), "R37: one note each"
        assert "Traceback" not in complaints
        assert not (tmp_path / "gw" / "kvgw.sock").exists()
    with served(tmp_path / "gw") as again:
        assert "kvgw_" not in again.printed, "and never again"
        assert running.token not in again.printed
        started = time.monotonic()
        assert again.stop(signal.SIGINT) in (0, 130)
        assert time.monotonic() - started < 8, "Ctrl-C ends it within seconds"
        assert "Traceback" not in again.complaints()
        assert not (tmp_path / "gw" / "kvgw.sock").exists()
    run = kvgw("status", *data)
    assert "no gateway answers" in refused(run, 3)
    assert f"kvgw serve --data {tmp_path}/gw" in refused(run, 3), "and says how to start one"
    assert answer("migrate", *data)["before"] == answer("migrate", *data)["after"]
    (tmp_path / "gw" / "catalog.db").write_bytes(b"this is no database" * 300)
    for name in ("serve", "migrate"):
        assert "catalog" in refused(kvgw(name, *data))
    assert kvgw("doctor", *data).returncode == 1


@pytest.mark.timeout(180)
def test_a_catalog_or_key_of_another_gateway_is_refused(tmp_path: Path) -> None:
    data = ("--data", str(tmp_path / "gw"))
    for folder in ("gw", "other"):
        with served(tmp_path / folder) as running:
            assert running.stop() == 0
    root, foreign = tmp_path / "gw" / "keys" / "root.key", tmp_path / "other" / "keys" / "root.key"
    own = root.read_bytes()
    root.write_bytes(foreign.read_bytes())
    assert "wrapped by key" in refused(kvgw("serve", *data)), "a foreign root key"
    root.write_bytes(own[:-1])
    assert "root.key" in refused(kvgw("serve", *data)), "a damaged one"
    root.unlink()
    assert "restore it from its backup" in refused(kvgw("serve", *data)), "a lost one is never replaced"
    assert kvgw("doctor", *data).returncode == 1
    root.write_bytes(own)
    root.chmod(0o600)
    with closing(sqlite3.connect(tmp_path / "gw" / "catalog.db")) as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'ffff'")
        connection.commit()
    for name in ("serve", "migrate"):
        sentence = refused(kvgw(name, *data))
        assert "ffff" in sentence
        assert "newer kvgw" in sentence
    findings = kvgw("doctor", *data)
    assert findings.returncode == 1
    assert "newer kvgw" in findings.stdout


@pytest.mark.timeout(180)
def test_R81_a_rolling_restart_on_one_folder(tmp_path: Path) -> None:
    with served(tmp_path / "gw") as old:
        waiting = subprocess.Popen(
            command("serve", "--data", str(tmp_path / "gw"), "--wait", "60"),
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with waiting:
            sentence = refused(kvgw("serve", "--data", str(tmp_path / "gw"), "--wait", "0.5"))
            assert "in use by process" in sentence
            assert "update strategy Recreate" in " ".join(sentence.split()), "R81: the holder, and what to do"
            assert waiting.poll() is None
            assert answer("status", "--data", str(tmp_path / "gw"))["ready"], "the old one is not disturbed"
            assert old.stop() == 0
            new = Served(waiting, tmp_path / "gw")
            new.wait_ready()
            assert new.stop() == 0


@pytest.mark.timeout(180)
def test_interrupted_while_it_waits_for_the_folder(tmp_path: Path) -> None:
    with served(tmp_path / "gw") as running:
        waiting = subprocess.Popen(
            command("serve", "--data", str(tmp_path / "gw"), "--wait", "100"), env=environment(), stderr=subprocess.PIPE
        )
        with waiting:
            assert waiting.stderr is not None
            assert any(b"waiting up to 100 s" in line for line in waiting.stderr), "it says so"
            waiting.send_signal(signal.SIGINT)
            assert waiting.wait(15) == 130, "one Ctrl-C is enough"
        assert running.stop() == 0


def test_wrong_usage_and_wrong_settings_have_their_codes(tmp_path: Path) -> None:
    assert kvgw("serve", "--nonsense").returncode == 2
    assert kvgw("nonsense").returncode == 2
    data = ("--data", str(tmp_path / "gw"))
    assert "KVGW_LISTNE" in refused(kvgw("serve", *data, KVGW_LISTNE="x"))
    assert "listne" in refused(kvgw("serve", *data, KVGW__SERVER__LISTNE="x"))
    assert "beyond this host" in refused(kvgw("serve", *data, KVGW__SERVER__LISTEN="0.0.0.0:0"))
    doctor = kvgw("doctor", *data, KVGW__SERVER__LISTNE="x")
    assert doctor.returncode == 1
    assert "listne" in doctor.stdout
    long = tmp_path / ("d" * 120)
    assert "107" in refused(kvgw("status", "--data", str(long)))
    assert "not an endpoint" in refused(kvgw("status", "--endpoint", "nonsense"))


def test_doctor_before_the_first_start_finds_nothing_wrong(tmp_path: Path) -> None:
    for folder in ("none", "empty"):
        if folder == "empty":
            (tmp_path / folder).mkdir(mode=0o700)
        findings = answer("doctor", "--data", str(tmp_path / folder), KVGW__STAGING__BYTES="16777216")
        assert [one for one in findings if one["verdict"] == "bad"] == []
        assert not (tmp_path / "none").exists(), "doctor changes nothing"
    assert list((tmp_path / "empty").iterdir()) == []


def test_R71_a_data_folder_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "open").chmod(0o755)
    assert "chmod 700" in refused(kvgw("serve", "--data", str(tmp_path / "open")))
    (tmp_path / "file").write_text("")
    assert "cannot be" in refused(kvgw("serve", "--data", str(tmp_path / "file" / "gw")))


def test_a_question_does_not_import_the_gateway() -> None:
    """`kvgw status` and its like answer at once: web framework, database and S3 libraries stay where they are."""
    program = (
        "import sys, typer; from kvgw.cli.app import app; group = typer.main.get_command(app); "
        "context = typer.Context(group); "
        "assert all(group.get_command(context, name) for name in ('status', 'tenant', 'token', 'scrub')); "
        "heavy = {'fastapi', 'sqlalchemy', 'aiobotocore', 'uvicorn'} & set(sys.modules); "
        "assert not heavy, heavy; "
        "assert all(group.get_command(context, name) for name in group.list_commands(context))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
