"""Real vLLM engines of other kinds over one gateway: what one of them stored is a miss for all others.

Each engine runs twice, with the connector and without: what it answers is what it computes itself. Over a gateway that
has the prompt of the first kind, an engine that took one chunk of it would answer something else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.engines import vllm_engine
from tests.engines.gateway_view import reach
from tests.engines.tiny_model import lora, prompt, tokenizer, with_another_weight
from tests.engines.vllm_engine import Engine, endpoint, engine, transfer_config
from tests.support.served import Served

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not vllm_engine.PYTHON, reason="vLLM has an environment of its own: make test-engines"),
]

PROMPT = prompt(0)
CHUNKS = 4
HITS = CHUNKS * 256


@dataclass(frozen=True)
class Kind:
    """An engine's model and settings."""

    model: Path
    settings: dict[str, Any] = field(default_factory=dict)
    """Of vLLM."""
    ours: dict[str, Any] = field(default_factory=dict)
    """Of kvgw."""
    version: str | None = None


@pytest.fixture(scope="module")
def one(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A process that becomes each kind of engine in turn."""
    with engine(tiny, tmp_path_factory.mktemp("misses"), None) as made:
        yield made


def cold(one: Engine, kind: Kind) -> list[int]:
    """What an engine of this kind answers without kvgw."""
    one.become(kind.model, None, version=kind.version, enable_prefix_caching=False, **kind.settings)
    return one.ask(PROMPT)[0]


def connected(one: Engine, gateway: Served, kind: Kind) -> None:
    config = transfer_config(endpoint(gateway), **kind.ours)
    one.become(kind.model, config, version=kind.version, enable_prefix_caching=False, **kind.settings)


def check_apart(one: Engine, gateway: Served, first: Kind, others: dict[str, Kind], *, same: bool = False) -> None:
    """What `first` stores, engines of its kind load, and `others` do not. `same`: what they compute may be equal."""
    right = cold(one, first)
    connected(one, gateway, first)
    assert one.ask(PROMPT) == [right]
    assert reach(gateway, lambda count: count >= CHUNKS) == CHUNKS
    for number, (name, kind) in enumerate(others.items(), 2):
        own = cold(one, kind)
        assert same or own != right, f"{name}: the kinds compute the same, and a wrong hit would not be seen"
        connected(one, gateway, kind)
        assert one.ask(PROMPT) == [own], name
        assert one.external_hits() == 0, name
        reach(gateway, lambda count, number=number: count == number * CHUNKS)
        assert one.ask(PROMPT) == [own], name
        assert one.external_hits() == HITS, f"{name}: and its own are hits"
    connected(one, gateway, first)
    assert one.ask(PROMPT) == [right]
    assert one.external_hits() == HITS, "the first kind is still found"


def test_other_numbers_in_the_cache(one: Engine, gateway: Served, tiny: Path, tmp_path: Path) -> None:
    """Law 2. Weights that differ in one number, positions that are scaled, other element types of model and cache."""
    scaled = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}
    others = {
        "one weight": Kind(with_another_weight(tiny, tmp_path / "tiny")),
        "RoPE scaling": Kind(tiny, {"hf_overrides": scaled}),
        "bfloat16": Kind(tiny, {"dtype": "bfloat16"}),
        "fp8 E4M3": Kind(tiny, {"kv_cache_dtype": "fp8_e4m3"}),
        "fp8 E5M2": Kind(tiny, {"kv_cache_dtype": "fp8_e5m2"}),
    }
    check_apart(one, gateway, Kind(tiny), others)


def test_the_same_numbers_that_are_promised_by_nobody(one: Engine, gateway: Served, tiny: Path) -> None:
    """Law 2. Where another engine would compute the same, by chance or not, it is a miss all the same."""
    others = {
        "revision": Kind(tiny, ours={"weights": "another-revision"}),
        "name": Kind(tiny, ours={"model": "another-model"}),
        "block size": Kind(tiny, {"block_size": 64}),
        "engine version": Kind(tiny, version="0.99.0"),
        "room for adapters": Kind(tiny, {"enable_lora": True, "max_lora_rank": 8}),
    }
    check_apart(one, gateway, Kind(tiny), others, same=True)


def test_another_tokenizer(one: Engine, gateway: Served, tiny: Path, tmp_path: Path) -> None:
    """Law 2. Token ids say nothing to an engine whose ids mean other words."""

    def kind(folder: str, first_word: str) -> Kind:
        words = tokenizer(tmp_path / folder, first_word)
        return Kind(tiny, {"skip_tokenizer_init": False, "tokenizer": str(words)})

    check_apart(one, gateway, kind("a", "one"), {"first word": kind("b", "two")}, same=True)


def test_an_adapters_kv_is_nobody_elses(one: Engine, gateway: Served, tiny: Path, tmp_path: Path) -> None:
    """Laws 2 and 6. Two adapters and the model without one, in an order in which a wrong hit is seen; then the same
    name and number for another folder."""
    roomy = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "enable_prefix_caching": False}
    folders = {name: lora(tmp_path / name, seed) for seed, name in enumerate("ab", 1)}
    adapters = {"base": None, **{name: (name, at, str(path)) for at, (name, path) in enumerate(folders.items(), 1)}}
    one.become(tiny, None, **roomy)
    right = {name: one.ask(PROMPT, lora=adapter)[0] for name, adapter in adapters.items()}
    assert len({tuple(tokens) for tokens in right.values()}) == 3, "the adapters change what is computed"

    one.become(tiny, transfer_config(endpoint(gateway)), **roomy)
    hits = []
    for number, name in enumerate(("base", "a", "b", "a", "base", "b"), 1):
        assert one.ask(PROMPT, lora=adapters[name]) == [right[name]], name
        hits.append(one.external_hits())
        reach(gateway, lambda count, number=number: count == min(number, 3) * CHUNKS)
    assert hits == [0, 0, 0, HITS, 2 * HITS, 3 * HITS]

    one.become(tiny, transfer_config(endpoint(gateway)), **roomy)
    assert one.ask(PROMPT, lora=("a", 1, str(folders["b"]))) == [right["b"]], "b's content under a's name"
    assert one.external_hits() == 0
    assert one.ask(PROMPT, lora=("b", 2, str(folders["b"]))) == [right["b"]]
    assert one.external_hits() == HITS


def test_an_adapter_that_was_trained_on_in_its_folder(one: Engine, gateway: Served, tiny: Path, tmp_path: Path) -> None:
    """Law 2. The path is the same, and the engine has loaded it anew."""
    roomy = {"enable_lora": True, "max_lora_rank": 8, "enable_prefix_caching": False}
    folder = tmp_path / "adapter"
    for seed, hits in ((1, 0), (2, 0), (2, HITS), (1, HITS)):
        adapter = ("a", 1, str(lora(folder, seed)))
        one.become(tiny, None, **roomy)
        right = one.ask(PROMPT, lora=adapter)
        one.become(tiny, transfer_config(endpoint(gateway)), **roomy)
        assert one.ask(PROMPT, lora=adapter) == right
        assert one.external_hits() == hits, seed
