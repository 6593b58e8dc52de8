"""The page about vLLM says what the code says."""

from __future__ import annotations

import json
import re
from pathlib import Path

from kvgw.engines.counters import COUNTERS, GAUGES
from kvgw.engines.options import EngineOptions, parse_options

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "engines"
PAGE = (FOLDER / "vllm.md").read_text(encoding="utf-8")
SAMPLE = json.loads((FOLDER / "vllm-kv-transfer.json").read_text(encoding="utf-8"))


def blocks() -> list[object]:
    return [json.loads(block) for block in re.findall(r"(?s)```json\n(.*?)```", PAGE)]


def rows(header: str) -> str:
    """The first column of the table that begins with `header`."""
    table = PAGE[PAGE.index(header) :].split("\n\n")[0]
    return "\n".join(line.split(" | ")[0] for line in table.splitlines()[2:])


def test_the_sample_is_the_file_and_vllm_would_recompute() -> None:
    assert SAMPLE in blocks()
    assert SAMPLE["kv_load_failure_policy"] == "recompute"
    assert parse_options(SAMPLE["kv_connector_extra_config"]).tokens_per_chunk == 256


def test_the_sample_for_decoding_is_the_file_and_only_reads() -> None:
    decode = json.loads((FOLDER / "vllm-decode.json").read_text(encoding="utf-8"))
    assert decode in blocks()
    assert (decode["kv_load_failure_policy"], decode["kv_role"]) == ("recompute", "kv_consumer")
    assert parse_options(decode["kv_connector_extra_config"]).wait_deadline_s == 10


def test_every_setting_is_on_the_page() -> None:
    named = set(re.findall(r"`(\w+)`", rows("| setting in ")))
    assert named == set(EngineOptions.__struct_fields__)


def test_every_counter_is_on_the_page() -> None:
    assert set(re.findall(r"`(\w+)`", rows("| counter |"))) == set(COUNTERS)
    assert set(re.findall(r"`(\w+)`", rows("| gauge "))) == set(GAUGES)
