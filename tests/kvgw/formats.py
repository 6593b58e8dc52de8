"""KV formats for tests: the one of the format page's vectors, and random ones."""

from __future__ import annotations

import hashlib
import unicodedata

from hypothesis import strategies as st

from kvgw.canonical import Value
from kvgw.kvformat import DTYPE_BYTES, KVFormat, LayerGroup

VECTOR = KVFormat(
    model="HuggingFaceTB/SmolLM2-135M-Instruct",
    weights=hashlib.sha256(b"weights").digest(),
    tokenizer=hashlib.sha256(b"tokenizer").digest(),
    kv_dtype="float32",
    kv_quantisation=None,
    adapter=None,
    adapter_digest=None,
    positions=("kind", "rope", "theta", 100000.0),
    attention=(LayerGroup("mha", 30, kv_heads=3, head_dim=64),),
    layout="layer,kv,token,head,dim",
    tokens_per_chunk=256,
    engine="transformers",
    engine_abi="1",
    parallel=(1, 0, 1, 0, 1, 0),
    multimodal=None,
    extra=(),
)
"""The format of the vectors on the format page."""


def nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).map(nfc)
digests = st.binary(min_size=16, max_size=64)
small = st.integers(1, 64)

values: st.SearchStrategy[Value] = st.recursive(
    st.none()
    | st.integers(0, 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | names
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
named_values = st.dictionaries(names, values, max_size=3).map(lambda pairs: tuple(sorted(pairs.items())))

groups = st.one_of(
    st.builds(
        LayerGroup, st.just("mha"), small, kv_heads=small, head_dim=small, v_head_dim=st.none() | st.integers(0, 64)
    ),
    st.builds(LayerGroup, st.just("mla"), small, latent_dim=small, rope_dim=st.integers(0, 64)),
    st.builds(LayerGroup, st.just("window"), small, kv_heads=small, head_dim=small, window=st.integers(1, 2**32 - 1)),
    st.builds(LayerGroup, st.just("state"), small, state_bytes=st.integers(1, 2**20)),
)


@st.composite
def kv_formats(draw: st.DrawFn) -> KVFormat:
    adapter = draw(st.none() | names)
    ranks = [
        draw(st.integers(1, 8).flatmap(lambda size: st.tuples(st.just(size), st.integers(0, size - 1)))) for _ in "tpc"
    ]
    (tp_size, tp_rank), (pp_size, pp_rank), (cp_size, cp_rank) = ranks
    positions = draw(named_values)
    return KVFormat(
        model=draw(names),
        weights=draw(names | digests),
        tokenizer=draw(names | digests),
        kv_dtype=draw(st.sampled_from(sorted(DTYPE_BYTES))),
        kv_quantisation=draw(st.none() | names),
        adapter=adapter,
        adapter_digest=None if adapter is None else draw(st.binary(min_size=1, max_size=32)),
        positions=("kind", draw(names), *(part for pair in positions for part in pair)),
        attention=tuple(draw(st.lists(groups, min_size=1, max_size=3))),
        layout=draw(names),
        tokens_per_chunk=draw(st.integers(1, 16)),
        engine=draw(names),
        engine_abi=draw(names),
        parallel=(tp_size, tp_rank, pp_size, pp_rank, cp_size, cp_rank),
        multimodal=draw(st.none() | names | digests),
        extra=draw(named_values),
    )
