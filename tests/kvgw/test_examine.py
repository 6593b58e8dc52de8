"""What `kvgw doctor` says of the host's kernel."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from kvgw.dial import UNIX_SEND_BYTES
from kvgw.examine import Verdict, examine
from tests.support.aio import aio
from tests.support.gateways import SMALL


@pytest.mark.parametrize(
    ("limit", "verdict"), [("212992", Verdict.NOTE), (str(UNIX_SEND_BYTES), Verdict.GOOD), ("", None)]
)
@aio
async def test_a_kernel_that_gives_sockets_less_than_is_asked_for_is_named_with_the_remedy(
    limit: str, verdict: Verdict | None, tmp_path: Path
) -> None:
    file = tmp_path / "wmem_max"
    if limit:
        file.write_text(f"{limit}\n")
    with mock.patch("kvgw.examine._BUFFER_LIMIT", file):
        findings = {one.subject: one for one in await examine(SMALL, tmp_path / "gw")}
    found = findings.get("socket buffers")
    assert (None if found is None else found.verdict) == verdict
    if verdict is Verdict.NOTE:
        assert found is not None
        assert f"net.core.wmem_max={UNIX_SEND_BYTES}" in found.remedy
        assert "208.0 KiB" in found.what
