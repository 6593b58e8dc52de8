"""The README's promises that a test can hold: its example runs, its commands and settings exist."""

from __future__ import annotations

import asyncio
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from kvgw.server.serve import serving
from kvgw.settings import ServerSettings, Settings, StagingSettings, load
from tests.kvgw.formats import VECTOR
from tests.support.aio import run

README = Path(__file__).parent.parent / "README.md"


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_sdk_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The ten lines, as they stand in the README, against a served gateway."""
    [example] = _blocks("python")
    scope: dict[str, object] = {}
    exec(compile(example, str(README), "exec"), scope)  # the README's own text
    main = scope["main"]
    form = replace(VECTOR, tokens_per_chunk=16)
    tokens = list(range(16 * 3))
    chunks = [bytes([index]) * form.chunk_bytes for index in range(3)]
    settings = Settings(server=ServerSettings(http=""), staging=StagingSettings(bytes=32 << 20))

    async def body() -> None:
        async with serving(settings, tmp_path / "data") as started:
            await asyncio.wait_for(main(str(started.endpoints[0]), form, tokens, chunks), 30)  # type: ignore[operator]

    run(body())
    assert capsys.readouterr().out == "3 of 3 chunks came back, the first from staging\n"


@pytest.mark.parametrize("example", _blocks("toml"))
def test_the_settings_examples_are_understood(tmp_path: Path, example: str) -> None:
    assert tomllib.loads(example)
    file = tmp_path / "kvgw.toml"
    file.write_text(example, encoding="utf-8")
    _, notes = load(file, {})
    assert notes == []
