"""The table of engines is written from reports of tests, and names the versions that the lock files name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines import compatibility
from tests.engines.compatibility import ENTRIES, PAGE, ROOT, read_report, renew, versions

REPORT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest" timestamp="2026-01-02T03:04:05+00:00">
<testcase classname="tests.engines.test_sglang" name="test_conformance[mha-dead gateway]"/>
<testcase classname="tests.engines.test_sglang" name="test_read_only"/>
<testcase classname="tests.engines.test_sglang" name="test_on_a_gpu"><skipped message="no GPU"/></testcase>
<testcase classname="tests.engines.test_blocks" name="test_gather"/>
</testsuite></testsuites>
"""


def test_the_table_names_the_versions_of_the_lock_files() -> None:
    """Where this fails, engines were updated and their tests did not run since: make test-engines."""
    there = versions(PAGE.read_text(encoding="utf-8"))
    for entry in ENTRIES:
        if entry.title in there:
            assert there[entry.title] == entry.version(), f"{entry.title}: run `make test-engines`"


def test_every_engine_that_is_locked_is_in_the_table() -> None:
    there = versions(PAGE.read_text(encoding="utf-8"))
    locks = {path.name for path in (ROOT / "requirements").glob("engines-*.lock")}
    assert locks == {entry.lock for entry in ENTRIES if entry.title in there} - {"dev.lock"}


def test_a_report_renews_its_own_engines(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    old = renew("", [("2025-12-31", [compatibility.Case("test_lmcache", "test_usage_by_salt", "")])])
    page = renew(old, [read_report(report)])
    version = {entry.engine: entry.version() for entry in ENTRIES if entry.engine in ("SGLang", "LMCache")}
    assert f"| SGLang | {version['SGLang']} | HiCache storage | 2 | 1 | 2026-01-02 |" in page
    assert f"| LMCache | {version['LMCache']} | L2 adapter | 1 | 0 | 2025-12-31 |" in page, "as it was"
    assert "- `test_sglang`: conformance (mha-dead gateway); read only." in page
    assert "- Left out (no GPU): on a gpu." in page
    assert "gather" not in page
    assert renew(page, []) == page


def test_a_report_with_a_failure_changes_nothing(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT.replace("<skipped", "<failure").replace("no GPU", "AssertionError"))
    with pytest.raises(SystemExit, match="test_on_a_gpu failed"):
        read_report(report)
