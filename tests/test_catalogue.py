"""The pages of the test catalogue say what the tests name, and every id that a test names exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import catalogue
from tests.support.catalogue_ids import CASES, FIGURES, IDS, NOT_APPLICABLE, NOT_TRIED


@pytest.mark.parametrize("page", ["tests.md", "cases.md"])
def test_a_page_is_what_the_tests_say(page: str) -> None:
    assert page not in catalogue.stale(), f"docs/{page} is old; run: make docs"


def test_every_id_that_a_test_names_exists() -> None:
    unknown = {one: places[0] for one, places in catalogue.scan().items() if one not in IDS and one not in CASES}
    assert unknown == {}


def test_every_case_has_a_test_or_a_reason() -> None:
    named = catalogue.scan()
    assert [one for one in CASES if one not in named and one not in NOT_APPLICABLE] == []
    assert set(NOT_APPLICABLE) | set(NOT_TRIED) <= set(CASES)
    assert set(FIGURES) <= set(IDS)


def test_an_id_is_found_wherever_a_test_may_name_it(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_a.py").write_text(
        '"""Of S09, and C03–C05."""\n'
        "def test_I07_by_name(): ...\n"
        'def test_said():\n    """Law 2 (Q12)."""\n    assert 1, "F07"\n    x = "S32"\n'
        "class TestB:\n    async def test_N01_in_a_class(self): ...\n"
        "def helper_L01(): ...\n"
    )
    (folder / "helpers.py").write_text('"""Nothing is tested here, not even I01."""\n')
    found = catalogue.scan(folder)
    assert found == {
        "I07": ["tests/test_a.py::test_I07_by_name"],
        "Q12": ["tests/test_a.py::test_said"],
        "F07": ["tests/test_a.py::test_said"],
        "N01": ["tests/test_a.py::TestB::test_N01_in_a_class"],
        **{one: ["tests/test_a.py"] for one in ("S09", "C03", "C04", "C05")},
    }
    page = catalogue.tests_page(found)
    assert f"{len(found)} of {len(IDS)} ids are named by a test. No test names " in page
    assert "| S01 | P | A crash at any call of a PUT. | **none** |  |" in page
