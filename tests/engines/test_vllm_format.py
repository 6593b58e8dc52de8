"""The KV format of a vLLM worker: whatever differs between two engines, they share nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvgw.engines.vllm.format import EngineFacts, adapter_digest, format_of, with_adapter
from kvgw.errors import FormatError
from kvgw.keys import prefix_keys
from kvgw.kvformat import KVFormat, LayerGroup

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 128,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "dtype": "float32",
    "_name_or_path": "/models/tiny",
}
FACTS = EngineFacts(
    config=CONFIG,
    model="tiny",
    weights=b"w" * 32,
    tokenizer=b"t" * 32,
    kv_dtype="float32",
    cache_dtype="auto",
    quantisation=None,
    group=LayerGroup("mha", 2, kv_heads=2, head_dim=32),
    layers=("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"),
    block_tokens=32,
    block_shape=(2, 32, 64),
    cache_layout="LBHNC",
    abi=(("vllm", "0.32.0"), ("attention", "CPU_ATTN"), ("isa", "vec")),
    parallel=(1, 0, 1, 0, 1, 0),
    pp_layers=None,
    max_context=4096,
    lora=None,
)

DIFFERENCES: dict[str, dict[str, Any]] = {
    "revision": {"weights": "a" * 40},
    "weights": {"weights": b"v" * 32},
    "tokenizer": {"tokenizer": b"u" * 32},
    "name": {"model": "tiny-instruct"},
    "element type": {"kv_dtype": "bfloat16"},
    "cache quantisation": {"cache_dtype": "fp8_e4m3"},
    "weight quantisation": {"quantisation": "awq"},
    "block size": {"block_tokens": 64},
    "block shape": {"block_shape": (32, 2, 64)},
    "layout": {"cache_layout": "LBNHC"},
    "layer order": {"layers": FACTS.layers[::-1]},
    "engine version": {"abi": (("vllm", "0.33.0"), *FACTS.abi[1:])},
    "attention backend": {"abi": (FACTS.abi[0], ("attention", "FLASH_ATTN"), FACTS.abi[2])},
    "instruction set": {"abi": (*FACTS.abi[:2], ("isa", "amx"))},
    "rank": {"parallel": (2, 1, 1, 0, 1, 0)},
    "parallel size": {"parallel": (2, 0, 1, 0, 1, 0)},
    "adapters": {"lora": "dtype=bfloat16;max_rank=16"},
    "rope": {"config": {**CONFIG, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}},
    "an unknown field": {"config": {**CONFIG, "attn_logit_softcapping": 30.0}},
}


@pytest.mark.parametrize("changes", DIFFERENCES.values(), ids=DIFFERENCES.keys())
def test_engines_that_differ_share_nothing(changes: dict[str, Any]) -> None:
    """Law 2."""
    mine, other = format_of(FACTS, 256), format_of(replace(FACTS, **changes), 256)
    assert mine.canonical() != other.canonical()
    assert prefix_keys(mine, list(range(256))) != prefix_keys(other, list(range(256)))


def test_engines_that_do_not_differ_share() -> None:
    moved = {**CONFIG, "_name_or_path": "/elsewhere", "transformers_version": "5.99"}
    assert format_of(replace(FACTS, config=moved), 256) == format_of(FACTS, 256)
    assert KVFormat.from_canonical(format_of(FACTS, 256).canonical()) == format_of(FACTS, 256)


def test_a_chunk_has_the_bytes_of_the_engines_blocks() -> None:
    assert format_of(FACTS, 256).chunk_bytes == 2 * 8 * 2 * 32 * 64 * 4


def test_a_chunk_is_made_of_whole_blocks() -> None:
    with pytest.raises(FormatError, match="tokens_per_chunk is 100, and the engine's blocks have 32 tokens"):
        format_of(FACTS, 100)


def test_a_config_without_positions_is_refused() -> None:
    with pytest.raises(FormatError, match="model_type"):
        format_of(replace(FACTS, config={}), 256)


def test_windowed_layers_are_kept_whole_where_the_engine_keeps_them_whole() -> None:
    mistral = {**CONFIG, "model_type": "mistral", "sliding_window": 128}
    kv_format = format_of(replace(FACTS, config=mistral), 256)
    assert kv_format.attention == (FACTS.group,)
    assert kv_format.canonical() != format_of(FACTS, 256).canonical()


def adapter(folder: Path, weights: bytes = b"weights", config: str = '{"r": 16}') -> str:
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(weights)
    (folder / "adapter_config.json").write_text(config)
    return str(folder)


def test_an_adapter_is_its_content_not_its_name(tmp_path: Path) -> None:
    """Law 2."""
    plain = format_of(FACTS, 256)
    same = [adapter(tmp_path / "a"), adapter(tmp_path / "b")]
    others = [adapter(tmp_path / "c", weights=b"trained on"), adapter(tmp_path / "d", config='{"r": 32}')]
    digests = [adapter_digest(folder, tmp_path / "digests") for folder in [*same, *others]]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
    formats = {with_adapter(plain, "lora", digest).canonical() for digest in digests} | {plain.canonical()}
    assert len(formats) == 4
    assert with_adapter(plain, None, None) == plain


def test_an_adapter_that_cannot_be_looked_at_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no local folder"):
        adapter_digest("org/lora", None)
