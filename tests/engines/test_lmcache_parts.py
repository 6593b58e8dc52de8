"""The parts of LMCache's adapter that need no LMCache: settings, formats and keys, tasks."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kvgw.engines.lmcache.format import Layout, Part, engine_key, format_of
from kvgw.engines.lmcache.options import NOT_HERE, LmcacheOptions, parse_lmcache_options
from kvgw.engines.lmcache.tasks import Tasks
from kvgw.errors import FormatError

IDENTITY = {"weights": "w", "tokenizer": "t", "compatibility": "c"}
LAYOUT = Layout(((2, 4, 16, 8),), ("bfloat16",))


def options(**changes: Any) -> LmcacheOptions:
    models = {"m": {**IDENTITY, **changes}, "n": IDENTITY}
    return parse_lmcache_options({"endpoint": "unix:/x", "models": models})[0]


PART = Part("m", 33554944, 0)


def made(part: Part = PART, layout: Layout = LAYOUT, abi: str = "lmcache=1", **changes: Any) -> bytes:
    return format_of(part, layout, options(**changes), abi).canonical()


def test_one_format_for_each_model_rank_group_and_layout() -> None:
    """Law 2: a wrong guess is a miss."""
    part = Part("m", 33554944, 0)
    formats = [
        made(),
        made(replace(part, model="n")),
        made(replace(part, kv_rank=33620481)),
        made(replace(part, object_group=1)),
        made(layout=Layout(((2, 16, 4, 8),), ("bfloat16",))),
        made(layout=Layout(((2, 4, 16, 8),), ("float16",))),
        made(layout=Layout(((2, 4, 16, 4), (2, 4, 16, 4)), ("bfloat16", "bfloat16"))),
        made(abi="lmcache=2"),
        made(weights="other"),
        made(tokenizer="other"),
        made(compatibility="other"),
    ]
    assert len(set(formats)) == len(formats)
    assert format_of(part, LAYOUT, options(), "x").chunk_bytes == 2 * 4 * 16 * 8 * 2
    with pytest.raises(FormatError, match="not in 'models'"):
        made(replace(part, model="unknown"))
    with pytest.raises(FormatError, match="complex64"):
        made(layout=Layout(((2,),), ("complex64",)))


def test_torchs_types_by_kvgws_names() -> None:
    torch = pytest.importorskip("torch")
    layout = Layout.of([torch.Size([2, 8])], [torch.float8_e4m3fn])
    assert (str(layout), layout.nbytes) == ("[2,8]fp8_e4m3", 16)


def test_keys_differ_wherever_hash_or_salt_does() -> None:
    assert engine_key(b"h" * 32, b"") == b"h" * 32
    keys = [engine_key(b"h" * 32, b""), engine_key(b"h" * 32, b"a"), engine_key(b"h" * 33, b""), engine_key(b"h", b"a")]
    assert len({*keys}) == 4
    assert {len(key) for key in keys} == {32}


def test_tenants_come_by_the_salt_alone(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    path.write_text(json.dumps({"by": "kv_transfer_params.tenant", "tenants": {}}))
    params = {"endpoint": "unix:/x", "models": {"m": IDENTITY}, "tenants_file": str(path)}
    with pytest.raises(FormatError, match="nothing else"):
        parse_lmcache_options(params)


@dataclass
class Notifier:
    signals: int = 0
    closed: bool = False

    def fileno(self) -> int:
        return 3

    def notify(self) -> None:
        assert not self.closed
        self.signals += 1

    def close(self) -> None:
        assert not self.closed
        self.closed = True


def test_a_result_is_given_once_and_a_closed_descriptor_is_not_written() -> None:
    """Law 7: another file may have its number by then."""
    notifier = Notifier()
    tasks: Tasks[str] = Tasks(notifier, itertools.count())
    first, second, third = (tasks.begin() for _ in range(3))
    assert tasks.take(first) is None
    tasks.end(first, "a")
    tasks.end(second, "b")
    assert (tasks.in_flight, notifier.signals) == (1, 2)
    assert (tasks.take(first), tasks.take(first), tasks.take_all()) == ("a", None, {second: "b"})
    tasks.close()
    tasks.close()
    tasks.end(third, "c")
    assert (tasks.take(third), notifier.signals) == ("c", 2)


def test_the_page_says_what_the_code_says() -> None:
    folder = Path(__file__).resolve().parents[2] / "docs" / "engines"
    page = (folder / "lmcache.md").read_text(encoding="utf-8")
    sample = json.loads((folder / "lmcache-l2.json").read_text(encoding="utf-8"))
    assert sample in [json.loads(block) for block in re.findall(r"(?s)```json\n(.*?)```", page)]
    table = page[page.index("| setting in ") :].split("\n\n")[0]
    first = "\n".join(line.split(" | ")[0] for line in table.splitlines()[2:])
    assert set(re.findall(r"`(\w+)`", first)) == set(LmcacheOptions.__struct_fields__) - NOT_HERE
