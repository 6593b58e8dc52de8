"""The parts of SGLang's backend that need no SGLang: settings, formats, pages, and memory that outlives its caller."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kvgw.engines.loop import LoopThread
from kvgw.engines.sglang.format import Rank, check_page, format_of, rank_of
from kvgw.engines.sglang.options import NOT_HERE, SglangOptions, parse_sglang_options
from kvgw.engines.sglang.pages import Page, pages_of
from kvgw.engines.sglang.transfer import Transfer
from kvgw.engines.windows import Windows
from kvgw.errors import FormatError, Outage

GIVEN: dict[str, Any] = {
    "backend_name": "kvgw",
    "module_path": "kvgw.engines.sglang",
    "class_name": "KvgwHiCache",
    "interface_v1": 1,
    "endpoint": "unix:/x",
    "weights": "w",
    "tokenizer": "t",
    "compatibility": "c",
}


@dataclass(frozen=True)
class Pool:
    """The attributes of a host pool that decide a format."""

    layout: str = "page_first"
    dtype: str = "torch.bfloat16"
    layer_num: int = 2
    head_num: int = 4
    head_dim: int = 8
    v_head_dim: int = 8
    kv_cache_dim: int = 24
    page_size: int = 16
    start_layer: int = 0
    end_layer: int = 2
    storage_format_tag: str | None = None


def options(**changes: Any) -> SglangOptions:
    return parse_sglang_options({**GIVEN, **changes})


def made(pool: Pool, rank: Rank | None = None, **changes: Any) -> bytes:
    place = rank or Rank(2, 0, 1, 0, replicated=False)
    return format_of(pool, place, options(**changes), "/models/m", [("sglang", "1")]).canonical()


def test_every_fact_of_a_rank_and_its_pool_is_in_the_format() -> None:
    """Law 2: a wrong guess is a miss."""
    pool, rank = Pool(), Rank(2, 0, 1, 0, replicated=False)
    formats = [
        made(pool),
        made(replace(pool, layout="page_first_direct")),
        made(replace(pool, dtype="torch.float16")),
        made(replace(pool, layer_num=1)),
        made(replace(pool, head_num=2, head_dim=16, v_head_dim=16)),
        made(replace(pool, v_head_dim=4)),
        made(replace(pool, page_size=32)),
        made(replace(pool, start_layer=2, end_layer=4)),
        made(replace(pool, storage_format_tag="packed")),
        made(pool, replace(rank, tp_rank=1)),
        made(pool, replace(rank, tp_size=4)),
        made(pool, replace(rank, pp_size=2)),
        made(pool, replace(rank, pp_size=2, pp_rank=1)),
        made(pool, replace(rank, replicated=True)),
        made(pool, model="other"),
        made(pool, weights="other"),
        made(pool, tokenizer="other"),
        made(pool, compatibility="other"),
    ]
    assert len(set(formats)) == len(formats)


def test_replicated_kv_has_no_rank() -> None:
    one, other = (Rank(4, rank, 1, 0, replicated=True) for rank in (0, 3))
    assert made(Pool(), one) == made(Pool(), other)


def test_bytes_that_do_not_say_their_type_need_the_setting() -> None:
    bare = Pool(dtype="torch.uint8")
    with pytest.raises(FormatError, match="'kv_dtype'"):
        made(bare)
    assert made(bare, kv_dtype="fp8_e4m3") != made(bare, kv_dtype="fp8_e5m2")
    with pytest.raises(FormatError, match="has 'bfloat16'"):
        made(Pool(), kv_dtype="fp8_e4m3")


def test_a_page_with_more_in_it_is_refused() -> None:
    kv_format = format_of(Pool(), Rank(1, 0, 1, 0, replicated=False), options(), "m", [("sglang", "1")])
    half = kv_format.chunk_bytes // 2
    check_page(kv_format, [half, half])
    for sizes in ([half, half, 64], [half + 32, half + 32], [2 * half]):
        with pytest.raises(FormatError, match="scales or indices"):
            check_page(kv_format, sizes)


def test_ranks_that_are_not_served() -> None:
    @dataclass
    class Config:
        tp_size: int = 1
        tp_rank: int = 0
        pp_size: int = 1
        pp_rank: int = 0
        attn_cp_size: int = 1
        dcp_size: int = 1
        should_split_heads: bool = False
        is_mla_model: bool = False

    assert rank_of(Config()) == Rank(1, 0, 1, 0, replicated=False)
    for changes in ({"attn_cp_size": 2}, {"dcp_size": 2}, {"should_split_heads": True}):
        with pytest.raises(FormatError):
            rank_of(Config(**changes))  # type: ignore[arg-type]


def test_pages_are_cut_and_copied_in_the_order_of_their_buffers() -> None:
    memory = bytearray(range(64))
    window = memoryview(bytearray(8))
    base = _address(memory)
    pages = pages_of([base, base + 32, base + 4, base + 36], [4, 4, 4, 4], 2)
    pages[1].read(window)
    assert bytes(window) == bytes([4, 5, 6, 7, 36, 37, 38, 39])
    pages[0].write(window)
    assert memory[:8] == bytes([4, 5, 6, 7, 4, 5, 6, 7])
    assert memory[32:36] == bytes([36, 37, 38, 39])
    with pytest.raises(ValueError, match="cannot hold"):
        Page((base,), (9,)).read(window)
    with pytest.raises(ValueError, match="not those of 2 pages"):
        pages_of([base] * 3, [1] * 3, 2)


def _address(memory: bytearray) -> int:
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def test_windows_of_a_call_that_was_left_go_back_when_its_coroutine_ends() -> None:
    """Law 7: until then nobody else may have them."""
    loop, pool, stuck = LoopThread("test"), Windows(8, 16), threading.Event()

    async def blocks() -> int:
        stuck.wait(5)
        return 1

    with pytest.raises(Outage, match="no answer within"), Transfer(pool, pool.take(2)) as transfer:
        transfer.run(loop, blocks, 0.05)
    assert pool.take(1) == []
    stuck.set()
    until = time.monotonic() + 5
    while not pool.idle and time.monotonic() < until:
        time.sleep(0.01)
    assert len(pool.take(3)) == 2
    assert loop.close()


def test_windows_of_a_call_that_ended_or_never_began_are_back_at_once() -> None:
    loop, pool = LoopThread("test"), Windows(8, 16)

    async def answers() -> int:
        await asyncio.sleep(0)
        return 7

    with Transfer(pool, pool.take(2)) as transfer:
        assert transfer.run(loop, answers, 5) == 7
        assert not pool.idle
    assert pool.idle
    assert loop.close()
    with pytest.raises(Outage, match="shut down"), Transfer(pool, pool.take(2)) as transfer:
        transfer.run(loop, answers, 5)
    assert pool.idle


def test_the_page_says_what_the_code_says() -> None:
    folder = Path(__file__).resolve().parents[2] / "docs" / "engines"
    page = (folder / "sglang.md").read_text(encoding="utf-8")
    sample = json.loads((folder / "sglang-hicache.json").read_text(encoding="utf-8"))
    assert sample in [json.loads(block) for block in re.findall(r"(?s)```json\n(.*?)```", page)]
    table = page[page.index("| setting |") :].split("\n\n")[0]
    first = "\n".join(line.split(" | ")[0] for line in table.splitlines()[2:])
    assert set(re.findall(r"`(\w+)`", first)) == set(SglangOptions.__struct_fields__) - NOT_HERE
