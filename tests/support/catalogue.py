"""Writes ``docs/tests.md`` and ``docs/cases.md``: which test stands for which id.

python -m tests.support.catalogue           write them
python -m tests.support.catalogue --check   write nothing; exit code 1 if one is not what the tests say

A test names an id in its own name, its docstring, an assertion's sentence, or the first docstring of its file.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support.catalogue_ids import CASES, FIGURES, IDS, NOT_APPLICABLE, NOT_TRIED, SECTIONS
from tests.support.mutants_known import KILLED, KNOWN

ROOT = Path(__file__).resolve().parents[2]
TESTS, DOCS = ROOT / "tests", ROOT / "docs"
ID = re.compile(r"(?<![A-Za-z0-9])([CFILNQRScfilnqrs]\d\d)(?![A-Za-z0-9])")
RANGE = re.compile(r"([A-Z])(\d\d)–(?:[A-Z])?(\d\d)")
SHOWN = 3
"""Tests that are shown of each id; the rest is counted."""

TESTS_HEAD = """\
# Test catalogue

<!-- Written by tests/support/catalogue.py from the tests; change those, then run: make docs -->

What the tests have to show, and which of them do. A test names its id in its name, its docstring or the sentence of an
assertion. Tiers: **P** in every run (`make test`), **N** among the slow tests (`make test-all`), **W** with a GPU. The
laws are those of `ARCHITECTURE.md`.
"""

MUTANTS_HEAD = """\
## Mutants

A mutant is one small change of a module; the tests of the module have to notice (`make mutants MUTANTS_ARGS=--all`).
Those that survive were looked at one by one.

"""

CASES_HEAD = """\
# Cases from the field

<!-- Written by tests/support/catalogue.py from the tests; change those, then run: make docs -->

Situations in which caches of this kind have failed their users. Each stands for a kind of fault and is a test here.
"""


def ids_in(text: str) -> set[str]:
    """Every id that a text names, those inside a range like C03–C07 too."""
    found = {one.upper() for one in ID.findall(text)}
    for letter, first, last in RANGE.findall(text):
        found |= {f"{letter}{number:02}" for number in range(int(first), int(last) + 1)}
    return found


def scan(folder: Path = TESTS) -> dict[str, list[str]]:
    """Places by the id that they name, the most explicit first: tests by name, by what they say, then files."""
    ranked: dict[str, dict[str, int]] = defaultdict(dict)
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        file = path.relative_to(folder.parent).as_posix()
        tests = list(_tests(tree))
        for name, node in tests:
            said = " ".join(_said(node))
            for found, rank in ((ids_in(name), 0), (ids_in(said), 1)):
                for one in found:
                    ranked[one].setdefault(f"{file}::{name}", rank)
        if path.name.startswith("test_"):
            for one in ids_in(ast.get_docstring(tree) or ""):
                if not any(place.startswith(file) for place in ranked[one]):
                    ranked[one][file] = 2
    return {one: sorted(places, key=lambda place: (places[place], place)) for one, places in ranked.items()}


def _tests(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Test functions with the class that they are in."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if _is_test(inner):
                    yield f"{node.name}::{inner.name}", inner  # type: ignore[attr-defined]
        elif _is_test(node):
            yield node.name, node  # type: ignore[attr-defined]


def _is_test(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")


def _said(node: ast.AST) -> Iterator[str]:
    yield ast.get_docstring(node) or ""  # type: ignore[arg-type]
    for inner in ast.walk(node):
        if isinstance(inner, ast.Assert) and inner.msg is not None:
            yield ast.unparse(inner.msg)


def tests_page(places: Mapping[str, list[str]]) -> str:
    """The page of the catalogue."""
    missing = sorted(one for one in IDS if not places.get(one))
    parts = [TESTS_HEAD, _count("ids", IDS, missing)]
    for letter, title in SECTIONS.items():
        rows = ["| id | tier | what | tests | last whole run |", "|---|---|---|---|---|"]
        for one, (tier, sentence) in IDS.items():
            if one[0] == letter:
                cells = (one, tier, sentence, _cell(places.get(one, [])), FIGURES.get(one, ""))
                rows.append(f"| {' | '.join(cells)} |")
        parts.append(f"## {title}\n\n" + "\n".join(rows) + "\n")
    return "\n".join([*parts, _mutants()])


def _mutants() -> str:
    """What the last whole run of all mutants came to, and those that no test notices."""
    rows = ["| module | killed |", "|---|---|", *(f"| `{module}` | {count} |" for module, count in KILLED.items())]
    left = ["| module | line | change | why no test notices |", "|---|---|---|---|"]
    for one in KNOWN:
        line = one.line.replace("|", "\\|")
        left.append(f"| `{one.module}` | `{line}` | {one.change} | {one.why} |")
    return MUTANTS_HEAD + "\n".join(rows) + "\n\n" + "\n".join(left) + "\n"


def cases_page(places: Mapping[str, list[str]]) -> str:
    """The page of the cases."""
    missing = sorted(one for one in CASES if not places.get(one) and one not in NOT_APPLICABLE)
    rows = ["| id | case | tests | not tried |", "|---|---|---|---|"]
    for one, sentence in CASES.items():
        why = NOT_APPLICABLE.get(one)
        rows.append(f"| {one} | {sentence} | {why or _cell(places.get(one, []))} | {NOT_TRIED.get(one, '')} |")
    return "\n".join([CASES_HEAD, _count("cases", CASES, missing), "\n".join(rows) + "\n"])


def _count(kind: str, all_of_them: Mapping[str, object], missing: list[str]) -> str:
    have = len(all_of_them) - len(missing)
    rest = f" No test names {', '.join(missing)}." if missing else ""
    return f"{have} of {len(all_of_them)} {kind} are named by a test.{rest}\n"


def _cell(places: list[str]) -> str:
    if not places:
        return "**none**"
    shown = [f"`{place.removeprefix('tests/')}`" for place in places[:SHOWN]]
    more = [f"and {len(places) - SHOWN} more"] if len(places) > SHOWN else []
    return "<br>".join([*shown, *more])


def pages() -> dict[str, str]:
    places = scan()
    return {"tests.md": tests_page(places), "cases.md": cases_page(places)}


def stale() -> list[str]:
    """Pages that are not what the tests say."""
    made = pages()
    return [name for name, text in made.items() if _written(DOCS / name) != text]


def _written(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        old = stale()
        if old:
            print(f"old: {', '.join(old)}; run: make docs", file=sys.stderr)
        return int(bool(old))
    for name, text in pages().items():
        (DOCS / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
