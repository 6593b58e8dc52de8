"""`kvgw replay`: traces read and bounded, ideal figures, and traffic through a real gateway that reaches them."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgw.replay import run
from kvgw.replay.drive import content_of, key_of
from kvgw.replay.ideal import Ideal, Order, bounded, distinct, infinite
from kvgw.replay.plan import ReplayOptions
from kvgw.replay.synthetic import synthetic_trace
from kvgw.replay.trace import BLOCK_TOKENS, LINE_BYTES_MAX, Request, TraceError, divide, read_trace
from tests.support.served import kvgw

TRACES = Path(os.environ.get("KVGW_TEST_TRACES", Path(__file__).parents[2].parent / "shared" / "traces"))


def chain(at_ms: int, *ids: int) -> Request:
    return Request(at_ms, len(ids) * BLOCK_TOKENS, 1, ids)


def written(folder: Path, *lines: str) -> Path:
    file = folder / "trace.jsonl"
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return file


LINE = '{"timestamp": 5, "input_length": 600, "output_length": 7, "hash_ids": [0, 3]}'


def test_a_trace_is_read_as_published(tmp_path: Path) -> None:
    file = written(tmp_path, LINE, "", LINE.replace("5,", "6,"))
    assert read_trace(file) == [Request(5, 600, 7, (0, 3)), Request(6, 600, 7, (0, 3))]
    assert len(read_trace(file, 1)) == 1


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (["not json"], "line 1 of"),
        ([LINE, LINE.replace("[0, 3]", "[-1]")], "line 2 of"),
        ([LINE, LINE.replace("5,", "4,")], "goes back in time, from 5 to 4 ms"),
        (["x" * (LINE_BYTES_MAX + 5)], "longer than"),
        ([""], "there is no request"),
    ],
)
def test_a_bad_trace_names_its_line(tmp_path: Path, lines: list[str], sentence: str) -> None:
    with pytest.raises(TraceError, match=sentence):
        read_trace(written(tmp_path, *lines))


def test_a_missing_trace_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl")


def test_reuse_ends_at_the_first_gap() -> None:
    requests = [chain(0, 0, 1, 2), chain(1, 0, 9, 2), chain(2, 0, 1, 2, 3)]
    assert infinite(requests) == Ideal(blocks=10, reused=4)
    assert distinct(requests) == 5


def test_without_its_head_a_chain_is_of_no_use() -> None:
    """The tail goes first: with room for three of four blocks LRU loses the head, and with it everything."""
    requests = [chain(0, 0, 1, 2, 3), chain(1, 0, 1, 2, 3)]
    assert bounded(requests, 3, Order.TAIL_FIRST).reused == 3
    assert bounded(requests, 3, Order.HEAD_FIRST).reused == 0


traces = st.lists(
    st.lists(st.integers(0, 12), min_size=1, max_size=6, unique=True).map(lambda ids: chain(0, *ids)), max_size=30
)


@given(traces, st.integers(1, 14))
def test_no_bounded_cache_beats_an_infinite_one(requests: list[Request], capacity: int) -> None:
    perfect = infinite(requests)
    for order in Order:
        found = bounded(requests, capacity, order)
        assert found.reused <= perfect.reused
        assert found.blocks == perfect.blocks
        if capacity >= distinct(requests):
            assert found == perfect


def test_the_synthetic_trace_is_the_same_everywhere() -> None:
    made = synthetic_trace(200)
    assert made == synthetic_trace(200)
    assert made != synthetic_trace(200, seed=2)
    assert len(made) == 200
    assert 0.4 < infinite(made).share < 0.8
    assert made == sorted(made, key=lambda one: one.timestamp)


def test_a_conversation_stays_with_one_tenant() -> None:
    parts = divide(synthetic_trace(300), 4)
    owners = [{one.hash_ids[1] for one in part} for part in parts]
    assert sum(map(len, parts)) == 300
    assert len(set().union(*owners)) == sum(map(len, owners))


@pytest.mark.skipif(not TRACES.is_dir(), reason=f"the published traces are not in {TRACES}")
@pytest.mark.parametrize(
    ("name", "blocks", "different", "share"),
    [("conversation", 288_500, 182_790, 0.36641), ("synthetic", 121_877, 43_924, 0.63960)],
)
def test_the_published_figures_come_out(name: str, blocks: int, different: int, share: float) -> None:
    requests = read_trace(TRACES / f"mooncake_{name}.jsonl")
    perfect = infinite(requests)
    assert (perfect.blocks, distinct(requests), round(perfect.share, 5)) == (blocks, different, share)


@pytest.mark.timeout(120)
def test_a_gateway_with_room_reuses_what_an_infinite_cache_would() -> None:
    """Four tenants; every block that comes back is compared."""
    requests = synthetic_trace(60)
    steps: list[None] = []
    report = asyncio.run(run.replay(requests, ReplayOptions(staging_bytes=64 << 20), lambda: steps.append(None)))
    assert len(steps) == report.requests == 60
    assert report.share == report.infinite_share > 0.3
    assert (report.wrong, report.outages, report.refused, report.evicted) == (0, 0, 0, 0)
    assert report.stored + report.reused == report.blocks
    assert sum(report.bytes_by_tier.values()) == report.reused * 16 * BLOCK_TOKENS
    assert report.calls["match"].calls == 60


def test_no_two_blocks_have_equal_bytes() -> None:
    assert len({content_of(key_of(block), 64) for block in range(500)}) == 500


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tenants", "0"], "--tenants is from 1 to 64, not 0"),
        (["--bytes-per-token", "0"], "--bytes-per-token is from 1"),
        (["--speed", "-1"], "--speed is 0 or more, not -1"),
        (["--prefill-tokens-per-s", "0"], "--prefill-tokens-per-s is more than 0"),
        (["nowhere.jsonl"], "cannot be read"),
    ],
)
def test_wrong_options_are_one_sentence(arguments: list[str], sentence: str) -> None:
    done = kvgw("replay", "--plan", *arguments)
    assert done.returncode == 1
    assert sentence in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_the_plan_needs_no_gateway() -> None:
    done = kvgw("replay", "--plan", "--json", "--requests", "100")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [one["blocks"] for one in rows] == sorted(one["blocks"] for one in rows)
    assert rows[-1]["share"]["tail-first"] == rows[-1]["share"]["lru"] == infinite(synthetic_trace(100)).share
