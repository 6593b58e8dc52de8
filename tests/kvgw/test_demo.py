"""The demo's judgement: its search finds what is there, and each of its claims can fail. `make demo` runs the rest."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import msgspec
import pytest

pytest.importorskip("numpy", reason="numpy is not installed: pip install 'kvgw[torch]'")

_DEMO = Path(__file__).resolve().parents[2] / "docs" / "demo"
_MODULES = ("corpus", "messages", "plaintext", "report", "plot")
_KIB = 1024


class Demo(NamedTuple):
    """The demo's modules: a folder of scripts, not a package."""

    corpus: ModuleType
    messages: ModuleType
    plaintext: ModuleType
    report: ModuleType


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    sys.path.insert(0, str(_DEMO))
    import corpus
    import messages
    import plaintext
    import report

    yield Demo(corpus, messages, plaintext, report)
    sys.path.remove(str(_DEMO))
    for name in _MODULES:
        sys.modules.pop(name, None)


def findings(demo: Demo) -> Any:
    """Those of a run in which every claim held."""
    messages = demo.messages
    stored = [messages.Stored(1446, 4.0, [5, 6, 7], "An answer", 5, 5, 1 << 20) for _ in range(3)]
    rounds = [messages.Round(0.1, ttft, 5, ["nvme"] * 5) for ttft in (0.5, 0.4, 9.0)]
    reused = [messages.Reused(1446, 1280, 1 << 20, 5, cold, rounds, [5, 6, 7]) for cold in (4.0, 3.0, 5.0)]
    denied = [messages.Denied(who, 0) for who in ("adapter", "dtype bf16", "revision", "namespace")]
    result = messages.ReuseResult(reused, denied, 5, [0, 0, 0])
    searches = [demo.plaintext.Search(45, 9, 1 << 20, [], control_found=True)] * 2
    return demo.report.Findings(messages.StoreResult(stored), result, searches)


def reused_with(found: Any, **changes: Any) -> Any:
    """The same findings, but for process B's first prompt."""
    first, *others = found.reused.prompts
    prompts = [msgspec.structs.replace(first, **changes), *others]
    return type(found)(found.stored, msgspec.structs.replace(found.reused, prompts=prompts), found.searches)


def failed(found: Any) -> list[str]:
    return [claim.text for claim in found.claims() if not claim.held]


def test_all_claims_hold_and_are_shown(demo: Demo) -> None:
    from rich.console import Console

    found = findings(demo)
    assert failed(found) == []
    assert (found.cold_s, found.warm_s) == (4.0, 0.5)
    console = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115  # closed with the console
    demo.report.show(console, found)
    console.file.close()
    text = console.export_text()
    assert text.count("held") == len(found.claims()) == 8
    assert "bit-identical only against the same prefill schedule" in text
    document = json.loads(demo.report.as_json(found))
    assert document["held"] is True
    assert document["reused"]["prompts"][0]["matched_tokens"] == 1280


@pytest.mark.parametrize(
    ("changes", "claim"),
    [
        ({"matched_tokens": 256}, "is given the KV"),
        ({"answer": [5, 6, 8]}, "greedy tokens are identical"),
        ({"cold_first_token": 6}, "greedy tokens are identical"),
    ],
)
def test_claims_about_reuse_can_fail(demo: Demo, changes: dict[str, Any], claim: str) -> None:
    (text,) = failed(reused_with(findings(demo), **changes))
    assert claim in text


@pytest.mark.parametrize(
    ("first_token", "tiers", "claim"),
    [
        (6, ["nvme"] * 5, "greedy tokens are identical"),
        (5, ["nvme"] * 4 + ["staging"], "after a restart"),
        (5, [], "after a restart"),
    ],
)
def test_claims_about_one_round_can_fail(demo: Demo, first_token: int, tiers: list[str], claim: str) -> None:
    rounds = [demo.messages.Round(0.1, 0.5, first_token, tiers)] * 3
    (text,) = failed(reused_with(findings(demo), rounds=rounds))
    assert claim in text


def test_other_claims_can_fail(demo: Demo) -> None:
    found = findings(demo)
    make, take = type(found), demo.messages.Round
    slow = [msgspec.structs.replace(one, rounds=[take(0.1, 2.1, 5, ["nvme"])] * 3) for one in found.reused.prompts]
    for changes, claim in (
        ({"prompts": slow}, "at most half"),
        ({"denied": [*found.reused.denied[:3], demo.messages.Denied("namespace", 256)]}, "second namespace"),
        ({"denied": [demo.messages.Denied("adapter", 256), *found.reused.denied[1:]]}, "another adapter"),
        ({"tokens_after_delete": [0, 256, 0]}, "after delete"),
        ({"deleted": 0}, "after delete"),
    ):
        other = make(found.stored, msgspec.structs.replace(found.reused, **changes), found.searches)
        (text,) = failed(other)
        assert claim in text
    for search in (
        demo.plaintext.Search(45, 9, 1 << 20, ["nvme/x"], control_found=True),
        demo.plaintext.Search(45, 9, 1 << 20, [], control_found=False),
    ):
        (text,) = failed(make(found.stored, found.reused, [found.searches[0], search]))
        assert "readable KV" in text
        assert json.loads(demo.report.as_json(make(found.stored, found.reused, [search])))["held"] is False


def test_the_search_finds_a_sample_at_any_offset(tmp_path: Path, demo: Demo) -> None:
    chance = random.Random(0)
    chunk = chance.randbytes(600 * _KIB)
    samples = [chunk[at : at + 32] for at in range(0, len(chunk) - 31, 256 * _KIB)]
    work, data = tmp_path / "work", tmp_path / "data"
    (data / "deep").mkdir(parents=True)
    work.mkdir()
    (work / "control.bin").write_bytes(chunk)
    (work / "samples.bin").write_bytes(b"".join(samples))
    (data / "clean").write_bytes(chance.randbytes(100 * _KIB) + samples[0][:31])
    (data / "empty").touch()
    (data / "small").write_bytes(b"x")
    assert demo.plaintext.search(work, data) == demo.plaintext.Search(3, 2, 100 * _KIB + 32, [], control_found=True)
    for shift in range(8):
        (data / "deep" / f"leak{shift}").write_bytes(chance.randbytes(4096 + shift) + samples[shift % 3])
    found = demo.plaintext.search(work, data).found
    assert found == [f"deep/leak{shift}" for shift in range(8)]
    (work / "control.bin").write_bytes(chunk[: 300 * _KIB] + bytes(300 * _KIB))
    assert not demo.plaintext.search(work, data).control_found


def test_samples_that_would_prove_nothing_are_refused(tmp_path: Path, demo: Demo) -> None:
    (tmp_path / "control.bin").write_bytes(bytes(64))
    for samples in (b"", bytes(32), bytes(range(32)) * 2):
        (tmp_path / "samples.bin").write_bytes(samples)
        with pytest.raises(ValueError, match="not distinct enough"):
            demo.plaintext.search(tmp_path, tmp_path)


def test_the_picture_is_drawn_without_a_display(tmp_path: Path, demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install matplotlib")
    monkeypatch.delenv("DISPLAY", raising=False)
    import plot

    plot.draw(findings(demo), tmp_path / "out" / "ttft.png")
    assert (tmp_path / "out" / "ttft.png").read_bytes().startswith(b"\x89PNG")


def test_the_document_is_long_enough_to_be_worth_it(demo: Demo) -> None:
    text = demo.corpus.document()
    assert len(text) > 7000
    assert text.rstrip().endswith("the conditions stated in this License.")
    assert len(demo.corpus.QUESTIONS) == 3
