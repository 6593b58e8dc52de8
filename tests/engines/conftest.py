"""What the tests of engines share: a tiny model, and a gateway in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.tiny_model import llama
from tests.engines.vllm_engine import ROOMY
from tests.support.served import Served, served


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "data", settings=ROOMY) as running:
        yield running


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama; see `tests.engines.tiny_model`."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    return llama(tmp_path_factory.mktemp("models") / "tiny")
