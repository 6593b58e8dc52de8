"""The operator's walk-through ends as it must on both databases, and the guide tells what it does."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.postgres import Postgres
from tests.support.seaweed import S3Server
from tests.support.served import SMALL_TOML, kvgw, served
from tests.support.several import Footing

FOLDER = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def walkthrough() -> Iterator[ModuleType]:
    sys.path.insert(0, str(FOLDER / "walkthrough"))
    import walkthrough

    yield walkthrough
    sys.path.remove(str(FOLDER / "walkthrough"))


def command(arguments: list[str]) -> tuple[int, str]:
    done = kvgw(*arguments)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.timeout(240)
def test_on_sqlite(walkthrough: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "gw"
    said: list[str] = []
    with served(folder):
        forge = walkthrough.forge_sqlite(folder / "catalog.db")
        walkthrough.take(walkthrough.Walk(command, f"unix:{folder / 'kvgw.sock'}", folder, forge, said.append))
    check_guide(said)


@pytest.mark.postgres
@pytest.mark.s3
@pytest.mark.timeout(300)
def test_on_postgresql_and_s3(walkthrough: ModuleType, postgres: Postgres, seaweed: S3Server, tmp_path: Path) -> None:
    footing = Footing(postgres, seaweed, tmp_path)
    footing.prepare()
    folder = tmp_path / "gw"

    def forge(number: int) -> None:
        for statement in (
            "ALTER TABLE audit_record DISABLE TRIGGER ALL",
            f"UPDATE audit_record SET actor = 'nobody' WHERE seq = {number}",
        ):
            postgres.sql(statement, footing.database, "postgres")

    said: list[str] = []
    with served(folder, settings=SMALL_TOML + toml_of(footing)):
        walkthrough.take(walkthrough.Walk(command, f"unix:{folder / 'kvgw.sock'}", folder, forge, said.append))
    check_guide(said)


def toml_of(footing: Footing) -> str:
    """The settings of `Footing.settings`, as an operator writes them."""
    return f"""
[catalog]
url = "{footing.url()}"
pool = 4
[keys]
dir = "{footing.folder / "keys"}"
store = "s3"
s3_prefix = "{footing.database}/keys/"
[s3]
bucket = "{footing.s3.bucket}"
prefix = "{footing.database}/"
endpoint = "{footing.s3.endpoint}"
region = "{footing.s3.region}"
addressing = "{footing.s3.addressing}"
checksums = "{footing.s3.checksums}"
access_key_id = "{footing.s3.access_key}"
secret_access_key_file = "{footing.folder / "secret"}"
"""


def told(lines: str) -> list[str]:
    """Headings and commands, without what is different in every walk."""
    found = re.findall(r"^(?:## .*|\$ kvgw .*)$", lines, re.MULTILINE)
    return [re.sub(r"/\S*/|\b[0-9a-f]{32,}\b", "…", one) for one in found]


def check_guide(said: list[str]) -> None:
    guide = (FOLDER / "operators-guide.md").read_text(encoding="utf-8")
    assert told("\n".join(said)) == told(guide.partition("\n# The walk\n")[2]), (
        "docs/operators-guide.md tells another walk; print it anew"
    )
