"""KV formats: canonical form, lengths, and that nothing which decides a hit can be confused or forgotten."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import struct
import unicodedata
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
from blake3 import blake3
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvgw import canonical
from kvgw.canonical import Value
from kvgw.errors import FormatError
from kvgw.keys import prefix_keys
from kvgw.kvformat import CHUNK_BYTES_MAX, KVFormat, LayerGroup
from tests.kvgw.formats import VECTOR, kv_formats

GIB, MIB, KIB = 2**30, 2**20, 2**10


def with_groups(*groups: LayerGroup, kv_dtype: str = "float16") -> KVFormat:
    return replace(VECTOR, attention=groups, kv_dtype=kv_dtype, tokens_per_chunk=1)


# ---------------------------------------------------------------------- the format page


def test_vector_canonical_form() -> None:
    form = VECTOR.canonical()
    assert len(form) == 464
    assert hashlib.sha256(form).hexdigest() == "9dbb6d7729026d8e3347030cc9820b9fa757f1ffb20f81dbb48d0f1a2456691d"
    assert KVFormat.from_canonical(form) == VECTOR


def test_vector_fingerprint() -> None:
    key = bytes.fromhex("abd96f1df84b2b4d606cf0e251444b6bab14746ce67b6bef2bc065f2d7da7d2d")
    assert blake3(VECTOR.canonical(), key=key).hexdigest() == (
        "624ff5fb3b940617556c9881ac020617593ec87f6c664ae6e848f7822416ba93"
    )


# ---------------------------------------------------------------------- lengths


@pytest.mark.parametrize(
    ("group", "kv_dtype", "token_bytes", "tokens", "run_bytes"),
    [
        (LayerGroup("mha", 80, kv_heads=8, head_dim=128), "float16", 320 * KIB, 128 * KIB, 40 * GIB),
        (LayerGroup("mha", 64, kv_heads=8, head_dim=128), "float16", 256 * KIB, 128 * KIB, 32 * GIB),
        (LayerGroup("mla", 61, latent_dim=512, rope_dim=64), "bfloat16", 70_272, 1000, 70_272_000),
        (LayerGroup("mha", 40, kv_heads=40, head_dim=128), "float16", 800 * KIB, 1, 800 * KIB),
        (LayerGroup("mha", 64, kv_heads=8, head_dim=128), "bfloat16", 256 * KIB, 4 * 32768, 32 * GIB),
    ],
    ids=["80x8x128", "64x8x128", "DeepSeek-V3", "OPT-13B", "64 layers, kv_dim 1024, batch 4"],
)
def test_published_figures(group: LayerGroup, kv_dtype: str, token_bytes: int, tokens: int, run_bytes: int) -> None:
    kv_format = with_groups(group, kv_dtype=kv_dtype)
    assert kv_format.token_bytes == token_bytes
    assert kv_format.run_bytes(tokens) == run_bytes


def test_windows_and_states_stop_growing() -> None:
    kv_format = with_groups(
        LayerGroup("mha", 2, kv_heads=1, head_dim=8, v_head_dim=0),
        LayerGroup("window", 3, kv_heads=1, head_dim=8, window=4),
        LayerGroup("state", 5, state_bytes=7),
    )
    assert [kv_format.run_bytes(tokens) for tokens in (1, 4, 5)] == [
        *(tokens * (2 * 8 * 2) + min(tokens, 4) * (3 * 16 * 2) + 35 for tokens in (1, 4, 5))
    ]
    assert kv_format.token_bytes == 32


def test_chunk_over_the_limit_is_refused_with_the_largest_that_fits() -> None:
    group = LayerGroup("mha", 80, kv_heads=8, head_dim=128)
    largest = replace(VECTOR, attention=(group,), kv_dtype="float16", tokens_per_chunk=819)
    assert largest.chunk_bytes <= CHUNK_BYTES_MAX < largest.run_bytes(820)
    for tokens in (820, 4096, 2**32 - 1):
        with pytest.raises(FormatError, match=f"of {tokens} tokens .*{CHUNK_BYTES_MAX}; .* fits is 819$"):
            replace(largest, tokens_per_chunk=tokens)
    with pytest.raises(FormatError, match="not even one token fits"):
        with_groups(LayerGroup("state", 1, state_bytes=CHUNK_BYTES_MAX + 1))


@given(kv_formats(), st.integers(1, 2**32 - 1))
def test_advice_of_a_refused_chunk_is_exact(kv_format: KVFormat, tokens: int) -> None:
    try:
        replace(kv_format, tokens_per_chunk=tokens)
    except FormatError as error:
        advised = int(str(error).rsplit(" ", 1)[1])
        assert kv_format.run_bytes(advised) <= CHUNK_BYTES_MAX < kv_format.run_bytes(advised + 1)
    else:
        assert kv_format.run_bytes(tokens) <= CHUNK_BYTES_MAX


# ---------------------------------------------------------------------- I06, I07: one form for one format

PIECES = [
    "",
    "a",
    "b",
    "ab",
    "1",
    "01",
    "\x00",
    "\x01a",
    "\u00e9",
    "e\u0301",
    "\u212b",
    "\u00c5",
    "\ufb01",
    "none",
    "None",
]
"""Texts that naive keys confuse: empty and missing, parts of one another, digits, and several forms of one letter."""


def piece(rng: random.Random) -> Value:
    """A value that looks like others when types, lengths or nesting are left out."""
    choice = rng.randrange(8)
    if choice < 3:
        return unicodedata.normalize(
            rng.choice(["NFC", "NFC", "NFD"]), "".join(rng.choices(PIECES, k=rng.randrange(3)))
        )
    if choice == 3:
        return b"".join(text.encode() for text in rng.choices(PIECES, k=rng.randrange(3)))
    if choice == 4:
        return rng.choice([None, 0, 1, 2**64 - 1])
    if choice == 5:
        return rng.choice([0.0, -0.0, 1.0, 5e-324])
    return tuple(piece(rng) for _ in range(rng.randrange(3))) if choice == 6 else str(rng.randrange(3))


def neighbour(rng: random.Random, values: list[Value]) -> list[Value]:
    """A list of values close to `values`: a boundary moved, two swapped, or one replaced."""
    changed = list(values)
    at = rng.randrange(len(changed) - 1)
    left, right = changed[at], changed[at + 1]
    how = rng.randrange(3)
    if how == 0 and isinstance(left, str) and isinstance(right, str) and left + right:
        cut = rng.randrange(len(left + right) + 1)
        changed[at : at + 2] = [(left + right)[:cut], (left + right)[cut:]]
    elif how == 1:
        changed[at : at + 2] = [right, left]
    else:
        changed[at] = piece(rng)
    return changed


def form(values: list[Value]) -> bytes | None:
    try:
        return canonical.encode([*values, *[None] * (canonical.FIELD_COUNT - len(values))])
    except FormatError:
        return None  # a text that is not NFC has no form at all


def typed(value: Value) -> object:
    """`value` so that equality also sees the types: 1 and 1.0, and 0.0 and -0.0, are not the same."""
    return tuple(typed(item) for item in value) if isinstance(value, tuple) else (type(value), repr(value))


def test_I06_no_two_field_lists_share_a_canonical_form() -> None:
    rng = random.Random(6)
    encoded: dict[bytes, object] = {}
    pairs = 0
    while pairs < 100_000:
        values: list[Value] = [piece(rng) for _ in range(4)]
        other = neighbour(rng, values)
        forms = form(values), form(other)
        for one, fields_ in zip(forms, (values, other), strict=True):
            if one is not None:
                assert encoded.setdefault(hashlib.sha256(one).digest(), typed(tuple(fields_))) == typed(tuple(fields_))
        pairs += None not in forms


near = st.one_of(st.none(), st.sampled_from(PIECES), st.integers(0, 2), st.floats(0, 2), st.binary(max_size=2))


@settings(max_examples=1000)
@given(
    *[st.lists(st.recursive(near, lambda inner: st.lists(inner, max_size=2).map(tuple), max_leaves=3), max_size=4)] * 2
)
@example([], [None])
@example([""], [None])
@example([1], ["1"])
@example([1], [1.0])
@example(["ab", "c"], ["a", "bc"])
@example([("a",), "b"], [("a", "b")])
@example([b"a"], ["a"])
def test_I06_lists_of_any_shape_have_their_own_form(first: list[Value], second: list[Value]) -> None:
    def encoded(items: list[Value]) -> bytes | None:
        return form([tuple(items)] * canonical.FIELD_COUNT)

    if encoded(first) is not None and encoded(first) == encoded(second):
        assert typed(tuple(first)) == typed(tuple(second))


def test_I06_adapter_named_like_the_salt_has_other_keys() -> None:
    tokens = list(range(256))
    adapted = replace(VECTOR, adapter="tenant", adapter_digest=b"tenant")
    keys = [
        prefix_keys(kv_format, tokens, salt=salt)[0]
        for kv_format, salt in itertools.product((VECTOR, adapted), (b"", b"tenant", b"tenanttenant"))
    ]
    assert len(set(keys)) == 6


def test_I06_names_in_another_unicode_form_are_refused_and_empty_is_not_missing() -> None:
    assert replace(VECTOR, model="caf\u00e9").canonical() != replace(VECTOR, model="cafe").canonical()
    with pytest.raises(FormatError, match="NFC"):
        replace(VECTOR, model="cafe\u0301")
    for field in ("kv_quantisation", "multimodal", "model"):
        with pytest.raises(FormatError, match=field):
            replace(VECTOR, **{field: ""})


CHANGES: dict[str, Callable[[KVFormat], KVFormat]] = {
    "model": lambda f: replace(f, model=f.model + "2"),
    "weights": lambda f: replace(f, weights="main"),
    "tokenizer": lambda f: replace(f, tokenizer=bytes(16)),
    "kv_dtype": lambda f: replace(f, kv_dtype="bfloat16"),
    "kv_quantisation": lambda f: replace(f, kv_quantisation="per-tensor"),
    "adapter": lambda f: replace(f, adapter="lora", adapter_digest=b"1"),
    "adapter_digest": lambda f: replace(f, adapter="lora", adapter_digest=b"2"),
    "positions": lambda f: replace(f, positions=("kind", "rope", "theta", 100001.0)),
    "attention": lambda f: replace(f, attention=(LayerGroup("mha", 30, kv_heads=3, head_dim=64, v_head_dim=64),)),
    "layout": lambda f: replace(f, layout="kv,layer,token,head,dim"),
    "tokens_per_chunk": lambda f: replace(f, tokens_per_chunk=128),
    "engine": lambda f: replace(f, engine="vllm"),
    "engine_abi": lambda f: replace(f, engine_abi="2"),
    "parallel": lambda f: replace(f, parallel=(2, 0, 1, 0, 1, 0)),
    "parallel rank": lambda f: replace(f, parallel=(2, 1, 1, 0, 1, 0)),
    "multimodal": lambda f: replace(f, multimodal="processor"),
    "extra": lambda f: replace(f, extra=(("name", None),)),
}


def test_I07_every_field_has_a_change() -> None:
    assert {field.name for field in fields(KVFormat)} <= CHANGES.keys()


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_I07_one_changed_field_changes_the_form_and_the_first_key(change: Callable[[KVFormat], KVFormat]) -> None:
    changed = change(VECTOR)
    others = [other(VECTOR) for other in CHANGES.values() if other is not change]
    assert changed.canonical() not in {other.canonical() for other in [VECTOR, *others]}
    tokens = list(range(256))
    assert prefix_keys(changed, tokens)[0] != prefix_keys(VECTOR, tokens)[0]


# ---------------------------------------------------------------------- reading a canonical form


@settings(max_examples=300)
@given(kv_formats())
def test_round_trip(kv_format: KVFormat) -> None:
    read = KVFormat.from_canonical(kv_format.canonical())
    assert read == kv_format
    assert read.canonical() == kv_format.canonical()
    assert read.chunk_bytes == kv_format.chunk_bytes


def read_or_refuse(data: bytes) -> None:
    """Nothing but a `FormatError` may come out, or a format that is written as the very same bytes."""
    try:
        kv_format = KVFormat.from_canonical(data)
    except FormatError as error:
        assert str(error)
    else:
        assert kv_format.canonical() == data


@settings(max_examples=500)
@given(kv_formats(), st.data())
def test_mutated_forms_are_refused(kv_format: KVFormat, data: st.DataObject) -> None:
    form_ = bytearray(kv_format.canonical())
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(form_)))
        end = data.draw(st.integers(start, min(len(form_), start + 12)))
        form_[start:end] = data.draw(st.binary(max_size=12))
    read_or_refuse(bytes(form_))


@settings(max_examples=1000)
@given(st.lists(st.one_of(near, st.lists(near, max_size=10).map(tuple)), min_size=16, max_size=16))
def test_well_formed_forms_of_wrong_fields_are_refused(values: list[Value]) -> None:
    data = form(values)
    if data is not None:
        read_or_refuse(data)


@given(kv_formats(), st.data())
def test_a_form_with_one_field_of_another_type_is_refused(kv_format: KVFormat, data: st.DataObject) -> None:
    values = list(canonical.decode(kv_format.canonical()))
    deep: Value = data.draw(st.recursive(near, lambda inner: st.lists(inner, max_size=10).map(tuple), max_leaves=12))
    values[data.draw(st.integers(0, 15))] = deep
    encoded = form(values)
    if encoded is not None:
        read_or_refuse(encoded)


@pytest.mark.parametrize(
    ("number", "value"),
    [
        (8, ("kind", "rope", "theta")),
        (8, "rope"),
        (9, (("mha", 30, 3, 64),)),
        (9, (("mha", 30, 3, 64, None, None, None, None, None, None),)),
        (9, ((),)),
        (14, (1, 0)),
        (14, None),
        (16, ("name",)),
        (16, (1, 2)),
        (2, None),
        (11, 256.0),
    ],
)
def test_forms_with_misshapen_fields_are_refused(number: int, value: Value) -> None:
    values = list(canonical.decode(VECTOR.canonical()))
    values[number - 1] = value
    with pytest.raises(FormatError):
        KVFormat.from_canonical(canonical.encode(values))


@pytest.mark.parametrize(("written", "smuggled"), [(1.5, math.nan), (1.5, math.inf), ("\u00e9a", "e\u0301")])
def test_values_that_this_module_never_writes_are_refused(written: Value, smuggled: float | str) -> None:
    def raw(value: Value) -> bytes:
        return struct.pack(">d", value) if isinstance(value, float) else str(value).encode()

    data = replace(VECTOR, extra=(("name", written),)).canonical()
    assert len(raw(written)) == len(raw(smuggled))
    with pytest.raises(FormatError):
        KVFormat.from_canonical(data.replace(raw(written), raw(smuggled)))


@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        KVFormat.from_canonical(data)
    with pytest.raises(FormatError):
        KVFormat.from_canonical(canonical.MAGIC + data)


def test_every_shortened_or_lengthened_form_is_refused() -> None:
    data = VECTOR.canonical()
    for end in range(len(data)):
        with pytest.raises(FormatError):
            KVFormat.from_canonical(data[:end])
    with pytest.raises(FormatError, match="1 bytes behind"):
        KVFormat.from_canonical(data + b"\0")
    with pytest.raises(FormatError, match="over the limit"):
        KVFormat.from_canonical(bytes(256 * KIB + 1))


def test_nesting_that_would_exhaust_the_stack_is_refused() -> None:
    body = b""
    for _ in range(5000):
        body = b"\x05" + len(body).to_bytes(4, "big") + body
    data = canonical.MAGIC + b"\x00\x01\x05" + len(body).to_bytes(4, "big") + body
    with pytest.raises(FormatError, match="nested deeper"):
        KVFormat.from_canonical(data)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kv_dtype": "auto"}, "kv_dtype 'auto'"),
        ({"kv_dtype": None}, "kv_dtype"),
        ({"weights": b"short"}, "weights digest"),
        ({"adapter": "lora"}, "adapter_digest"),
        ({"adapter": "lora", "adapter_digest": b""}, "adapter_digest"),
        ({"positions": ()}, "positions"),
        ({"positions": ("theta", 1.0)}, "positions"),
        ({"positions": ("kind", "rope", "theta", 1.0, "factor", 1.0)}, "sorted"),
        ({"positions": ("kind", "rope", "theta", 1.0, "theta", 1.0)}, "unique"),
        ({"attention": ()}, "attention"),
        ({"attention": ("mha",)}, "attention"),
        ({"tokens_per_chunk": 0}, "tokens_per_chunk"),
        ({"tokens_per_chunk": True}, "tokens_per_chunk"),
        ({"parallel": (1, 1, 1, 0, 1, 0)}, "rank 1"),
        ({"parallel": (1, 0)}, "parallel"),
        ({"extra": (("b", 1), ("a", 1))}, "sorted"),
        ({"model": "x" * 1025}, "1025 characters"),
    ],
)
def test_values_that_cannot_be_part_of_a_format_are_refused_by_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(FormatError, match=named):
        replace(VECTOR, **change)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"kind": "gqa"}, "'gqa'"),
        ({"kind": "mha", "kv_heads": 1}, "head_dim"),
        ({"kind": "mha", "kv_heads": 1, "head_dim": 1, "window": 4}, "no window"),
        ({"kind": "mla", "latent_dim": 1}, "rope_dim"),
        ({"kind": "window", "kv_heads": 1, "head_dim": 1}, "window"),
        ({"kind": "state", "state_bytes": 0}, "state_bytes"),
        ({"kind": "mha", "kv_heads": 1.0, "head_dim": 1}, "kv_heads"),
        ({"kind": "mha", "kv_heads": True, "head_dim": 1}, "kv_heads"),
        ({"kind": "mha", "kv_heads": 2**32, "head_dim": 1}, "kv_heads"),
    ],
)
def test_layer_groups_with_fields_of_another_kind_are_refused(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(FormatError, match=named):
        LayerGroup(layers=1, **arguments)
